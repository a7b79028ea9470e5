package dltest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// NeedGPUs skips a test that needs n GPUs where they are not, or GORUN_DEVICE=host says not to use them. With GORUN_REQUIRE_GPU=1
// a machine without any fails it; one that has some, or shows some (CUDA_VISIBLE_DEVICES), need not have as many as the test wants.
func NeedGPUs(t testing.TB, n int) {
	t.Helper()
	if os.Getenv("GORUN_DEVICE") == "host" {
		t.Skip("GORUN_DEVICE=host")
	}
	missing := t.Skipf
	if os.Getenv("GORUN_REQUIRE_GPU") == "1" {
		missing = t.Fatalf
	}
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		missing("no GPU: %v", err)
	}
	found, _ := filepath.Glob("/dev/nvidia[0-9]*")
	if len(found) == 0 {
		missing("no GPU: /dev/nvidiactl is there, but no device")
	}
	have, by := len(found), ""
	if v, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set {
		shown := 0
		if v != "" { // else there are none
			shown = strings.Count(v, ",") + 1
		}
		have, by = min(have, shown), " (CUDA_VISIBLE_DEVICES="+v+")"
	}
	if have < n {
		t.Skipf("%d GPUs%s, this test needs %d", have, by, n)
	}
}

// GPUEnv is the environment of a test's ranks on GPUs. NVLink multicast stays off, unless the caller's environment says otherwise: it needs more
// of the machine than a test may ask for.
func GPUEnv() []string {
	env := []string{"NVSHMEM_DISABLE_NVLS=1"}
	if _, set := os.LookupEnv("NCCL_NVLS_ENABLE"); !set {
		env = append(env, "NCCL_NVLS_ENABLE=0")
	}
	return env
}
