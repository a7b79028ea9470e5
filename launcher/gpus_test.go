package launcher

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVisibleGPUs(t *testing.T) {
	for _, c := range []struct {
		name, files, env string
		want             int
	}{
		{"no GPU", "", "", 0},
		{"NVIDIA", "dev/nvidia0 dev/nvidia1 dev/nvidia10 dev/nvidiactl dev/nvidia-uvm", "", 3},
		{"only the driver", "dev/nvidiactl", "", 0},
		{"masked", "dev/nvidia0 dev/nvidia1 dev/nvidia2", "CUDA_VISIBLE_DEVICES=2,0", 2},
		{"by UUID", "dev/nvidia0 dev/nvidia1", "CUDA_VISIBLE_DEVICES=GPU-1234", 1},
		{"all masked", "dev/nvidia0", "CUDA_VISIBLE_DEVICES=", 0},
		{"minus one", "dev/nvidia0 dev/nvidia1", "CUDA_VISIBLE_DEVICES=1,-1,0", 1},
		{"one that isn't there", "dev/nvidia0 dev/nvidia1", "CUDA_VISIBLE_DEVICES=0,5,1", 1},
		{"the first of two settings", "dev/nvidia0 dev/nvidia1", "CUDA_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=0,1", 1},
		{"AMD", "sys/class/kfd/kfd/topology/nodes/0/gpu_id=0 sys/class/kfd/kfd/topology/nodes/1/gpu_id=5 sys/class/kfd/kfd/topology/nodes/2/gpu_id=6", "", 2},
		{"AMD masked", "sys/class/kfd/kfd/topology/nodes/1/gpu_id=5 sys/class/kfd/kfd/topology/nodes/2/gpu_id=6", "HIP_VISIBLE_DEVICES=1", 1},
		{"Moore Threads", "dev/mtgpu.0 dev/mtgpu.1", "CUDA_VISIBLE_DEVICES=", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := filepath.Join(t.TempDir(), "[x]")
			for f := range strings.FieldsSeq(c.files) {
				name, text, _ := strings.Cut(f, "=")
				name = filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(name, []byte(text+"\n"), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if got := VisibleGPUs(root, strings.Fields(c.env)); got != c.want {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}
