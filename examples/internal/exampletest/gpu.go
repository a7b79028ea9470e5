package exampletest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// FakeGPUs builds a driver, a run-time compiler and a collective library that work without a GPU, and returns the environment that makes
// programs use them, given a device by number. Kernels are compiled by g++. examples is the path of the folder of the examples.
func FakeGPUs(t testing.TB, examples string) []string {
	t.Helper()
	citest.Program(t, "g++")
	own := filepath.Join(examples, "internal", "exampletest", "testdata")
	return []string{
		"GORUN_CUDA_LIB=" + dltest.Build(t, filepath.Join(own, "driver.c"), "libcuda.so.1", "-lpthread", "-ldl"),
		"GORUN_NVRTC_LIB=" + dltest.Build(t, filepath.Join(own, "rtc.c"), "libnvrtc.so.12"),
		"GORUN_NCCL_LIB=" + dltest.Build(t, filepath.Join(examples, "..", "nccl", "testdata", "nccl.c"), "libnccl.so.2", "-lpthread", "-ldl"),
		"FAKE_DEVICES=8", "FAKE_DIR=" + t.TempDir(),
	}
}

// OpenGPU opens the machine's GPU, or one of FakeGPUs where it has none. One test of a process can do that: the libraries go with it.
func OpenGPU(t testing.TB, examples string) *cuda.Device {
	t.Helper()
	_, err := os.Stat("/dev/nvidiactl")
	if err == nil || os.Getenv("GORUN_REQUIRE_GPU") == "1" {
		dltest.NeedGPUs(t, 1)
		return Open(t, "")
	}
	for _, v := range FakeGPUs(t, examples) {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	return Open(t, "0")
}

// Open opens a device until the end of the test.
func Open(t testing.TB, token string) *cuda.Device {
	t.Helper()
	dev, err := cuda.Open(token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}
