package launcher

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// VisibleGPUs counts the GPUs of this host that a program with the environment may use, by the traces that the kernel shows and
// without a vendor's library. root is "/".
func VisibleGPUs(root string, environ []string) int {
	for _, v := range []struct {
		count func(root string) int
		masks []string
	}{
		{devices("dev/nvidia[0-9]*"), []string{"CUDA_VISIBLE_DEVICES"}},
		{amdGPUs, []string{"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}},
		{devices("dev/mtgpu.[0-9]*"), []string{"MUSA_VISIBLE_DEVICES"}},
	} {
		n := v.count(root)
		if n == 0 {
			continue
		}
		for _, name := range v.masks {
			for _, kv := range environ {
				if isVar(kv, name) {
					n = min(n, masked(kv[len(name)+1:], n))
					break // the first of two counts
				}
			}
		}
		return n
	}
	return 0
}

func devices(pattern string) func(string) int {
	return func(root string) int {
		found, _ := filepath.Glob(filepath.Join(globQuote(root), pattern))
		return len(found)
	}
}

// amdGPUs counts the nodes of the kernel's topology that are no CPU.
func amdGPUs(root string) int {
	found, _ := filepath.Glob(filepath.Join(globQuote(root), "sys/class/kfd/kfd/topology/nodes/*/gpu_id"))
	n := 0
	for _, f := range found {
		if id, err := os.ReadFile(f); err == nil && strings.TrimSpace(string(id)) != "0" {
			n++
		}
	}
	return n
}

// masked counts what a variable such as CUDA_VISIBLE_DEVICES leaves of n GPUs: the list ends at the first that isn't there. UUIDs are
// opaque, and believed.
func masked(list string, n int) int {
	seen := 0
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		i, err := strconv.Atoi(item)
		if item == "" || err == nil && (i < 0 || i >= n) || item == "NoDevFiles" {
			break
		}
		seen++
	}
	return seen
}
