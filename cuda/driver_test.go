package cuda

import (
	"testing"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

func openLibrary(t testing.TB, path string) *dl.Library {
	t.Helper()
	t.Setenv("GORUN_CUDA_TEST_LIB", path)
	lib, err := dl.Open(dl.Spec{Name: "a test's library", Search: gpulib.Search{Env: "GORUN_CUDA_TEST_LIB"}, Symbol: "offset"})
	check(t, err)
	t.Cleanup(lib.Close)
	return lib
}

func TestIsDeviceToken(t *testing.T) {
	for token, want := range map[string]bool{"0": true, "12": true, "GPU-1": true, "MIG-1": true, "MIG-GPU-1/2/3": true, "-1": false, "": false, "gpu": false, "1.5": false} {
		if got := isDeviceToken(token); got != want {
			t.Errorf("%q: %t", token, got)
		}
	}
}
