package cusys

import (
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

func TestNVML(t *testing.T) {
	t.Setenv(gpulib.NVML.Env, dltest.Build(t, "../../testdata/nvml.c", "libnvidia-ml.so.1"))
	t.Setenv("FAKE_UNLINKED", "2")
	n, err := OpenNVML()
	if err != nil {
		t.Fatal(err)
	}
	const gpu0, gpu1, gpu2 = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f", "GPU-20212223-2425-2627-2829-2a2b2c2d2e2f", "GPU-30313233-3435-3637-3839-3a3b3c3d3e3f"
	for _, c := range []struct {
		a, b   string
		linked bool
		err    string
	}{
		{gpu0, gpu1, true, ""},
		{gpu1, gpu0, true, ""},
		{gpu0, gpu2, false, ""},
		{gpu2, gpu1, false, ""},
		{gpu0, gpu0, false, "nvmlDeviceGetP2PStatus: Invalid Argument (NVML result 2)"},
		{gpu0, "GPU-none", false, "GPU-none: nvmlDeviceGetHandleByUUID: Not Found (NVML result 6)"},
		{"MIG-1", gpu0, false, "MIG-1: nvmlDeviceGetHandleByUUID: Not Found (NVML result 6)"},
	} {
		linked, err := n.Linked(c.a, c.b)
		if linked != c.linked || (err == nil) != (c.err == "") || err != nil && err.Error() != c.err {
			t.Errorf("%s and %s: %t, %v; want %t, %q", c.a, c.b, linked, err, c.linked, c.err)
		}
	}
	held := n.lib.Lookup("fake_open")
	if err := n.Close(); err != nil || held.Call() != 0 {
		t.Errorf("close: %v, open %d times", err, held.Call())
	}
	t.Setenv("FAKE_NVML", "broken")
	if _, err := OpenNVML(); err == nil || err.Error() != "nvmlInit_v2: Driver Not Loaded (NVML result 9)" {
		t.Errorf("open: %v", err)
	}
	t.Setenv(gpulib.NVML.Env, "/nowhere/libnvidia-ml.so.1")
	if _, err := OpenNVML(); err == nil || !strings.Contains(err.Error(), "load NVML: no usable library") {
		t.Errorf("open: %v", err)
	}
}
