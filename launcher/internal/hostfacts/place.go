package hostfacts

import "path/filepath"

// CoreLimit is how many CPUs' time the control groups of this process grant; 0: no quota. root is "/".
func CoreLimit(root string) float64 { return host{Options{Root: root}}.coreLimit() }

// NVIDIA is what the kernel's driver tells of NVIDIA's GPUs, in the order of the PCI bus. root is "/".
func NVIDIA(root string) []GPU { return host{Options{Root: root}}.nvidia() }

func (h host) nvidia() []GPU {
	var gpus []GPU
	for _, bus := range h.names("proc/driver/nvidia/gpus") {
		info := nvidiaInfo(h.text(filepath.Join("proc/driver/nvidia/gpus", bus, "information")))
		g := GPU{Vendor: nvidia, Bus: bus, Model: info["Model"], UUID: info["GPU UUID"]}
		if minor := info["Device Minor"]; minor != "" && h.exists("dev/nvidia"+minor) {
			g.Device = "/dev/nvidia" + minor
		}
		gpus = append(gpus, g)
	}
	return gpus
}
