package dltest

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// shareVar lets the ranks of a test share GPUs where there are fewer. NCCL joins them by sockets then, and takes milliseconds for a call.
const shareVar = "GORUN_TEST_SHARE_GPUS"

// Sharing reports whether ranks on real GPUs may share them.
func Sharing() bool { return os.Getenv(shareVar) == "1" && os.Getenv("GORUN_CUDA_LIB") == "" }

// DeviceOf is the device of a rank, for cuda.Open: that of its local rank. Ranks that share GPUs take them in turn, and those of each turn tell NCCL,
// by the environment of this process, that they are on a host of their own, as gorun --gpu-bind share does.
func DeviceOf(localRank int) string {
	if !Sharing() {
		return strconv.Itoa(localRank)
	}
	n, _ := visible()
	os.Setenv("NCCL_HOSTID", "turn-"+strconv.Itoa(localRank/n))
	return strconv.Itoa(localRank % n)
}

// NeedOwnGPUs is NeedGPUs for a test whose ranks must reach each other's memory.
func NeedOwnGPUs(t testing.TB, n int) {
	t.Helper()
	if Sharing() {
		t.Skip(shareVar + "=1: the ranks of this test need GPUs of their own")
	}
	NeedGPUs(t, n)
}

// visible counts the GPUs that a process may use, and says what hides some.
func visible() (n int, by string) {
	found, _ := filepath.Glob("/dev/nvidia[0-9]*")
	v, set := os.LookupEnv("CUDA_VISIBLE_DEVICES")
	if !set {
		return len(found), ""
	}
	shown := 0
	if v != "" { // else there are none
		shown = strings.Count(v, ",") + 1
	}
	return min(len(found), shown), " (CUDA_VISIBLE_DEVICES=" + v + ")"
}

// NeedGPUs skips a test that needs n GPUs where they are not, or GORUN_DEVICE=host says not to use them. With GORUN_REQUIRE_GPU=1
// a machine without any fails it; one that has some, or shows some (CUDA_VISIBLE_DEVICES), need not have as many as the test wants, and with
// GORUN_TEST_SHARE_GPUS=1 one is enough.
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
	have, by := visible()
	if have > 0 && Sharing() {
		return
	}
	if have < n {
		t.Skipf("%d GPUs%s, this test needs %d", have, by, n)
	}
}

// Parallel is t.Parallel where there are no GPUs: with them, tests bound what a call may take, and want the machine for themselves.
func Parallel(t *testing.T) {
	t.Helper()
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		t.Parallel()
	}
}

// LibraryOnly has a test's ranks make small collectives by their library, too, as most tests of the way to it want. With GORUN_TEST_PEER=1 they run as they come.
func LibraryOnly() []string {
	if os.Getenv("GORUN_TEST_PEER") != "" {
		return nil
	}
	return []string{"GORUN_PEER=off"}
}

// GPUEnv is the environment of a test's ranks on GPUs. NVLink multicast stays off, unless the caller's environment says otherwise: it needs more
// of the machine than a test may ask for.
func GPUEnv() []string {
	env := append(LibraryOnly(), "NVSHMEM_DISABLE_NVLS=1")
	if _, set := os.LookupEnv("NCCL_NVLS_ENABLE"); !set {
		env = append(env, "NCCL_NVLS_ENABLE=0")
	}
	return env
}
