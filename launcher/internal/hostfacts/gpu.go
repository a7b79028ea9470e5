package hostfacts

import (
	"cmp"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/files"
)

// The makers of GPUs, by their numbers on the PCI bus.
const (
	nvidia       = "NVIDIA"
	amd          = "AMD"
	mooreThreads = "Moore Threads"
)

func vendorOf(id string) string {
	switch id {
	case "0x10de":
		return nvidia
	case "0x1002":
		return amd
	case "0x1ed5":
		return mooreThreads
	}
	return ""
}

// gpus are those on the PCI bus, with what their driver tells of them, and those whose device files are there although the bus does not show them, as in
// some containers.
func (h host) gpus() []GPU {
	gpus := []GPU{}
	for _, bus := range h.names("sys/bus/pci/devices") {
		at := filepath.Join("sys/bus/pci/devices", bus)
		vendor := vendorOf(h.text(filepath.Join(at, "vendor")))
		// Display controllers, 3D controllers, and AMD's processing accelerators.
		class := h.text(filepath.Join(at, "class"))
		if vendor == "" || !strings.HasPrefix(class, "0x03") && !strings.HasPrefix(class, "0x12") {
			continue
		}
		// A graphics adapter that the machine's board has for its console is no GPU to compute on.
		if vendor == amd && len(h.names("sys/class/kfd/kfd/topology/nodes")) == 0 && !h.exists("dev/kfd") && strings.HasPrefix(class, "0x0300") {
			continue
		}
		gpus = append(gpus, GPU{Vendor: vendor, Bus: bus})
	}
	for _, n := range h.nvidia() {
		i := slices.IndexFunc(gpus, func(g GPU) bool { return strings.EqualFold(g.Bus, n.Bus) })
		if i < 0 {
			gpus = append(gpus, n)
			continue
		}
		n.Bus = gpus[i].Bus
		gpus[i] = n
	}
	for _, d := range []struct{ pattern, vendor string }{{"dev/nvidia[0-9]*", nvidia}, {"dev/mtgpu.[0-9]*", mooreThreads}} {
		found, _ := filepath.Glob(filepath.Join(files.GlobQuote(h.Root), d.pattern)) // the pattern is well formed
		for _, f := range found {
			dev := "/" + strings.TrimPrefix(strings.TrimPrefix(f, h.Root), "/")
			if slices.ContainsFunc(gpus, func(g GPU) bool { return g.Device == dev }) {
				continue
			}
			// One of those whose driver does not tell which device is theirs.
			i := slices.IndexFunc(gpus, func(g GPU) bool { return g.Vendor == d.vendor && g.Device == "" && g.UUID == "" })
			if i < 0 {
				i = len(gpus)
				gpus = append(gpus, GPU{Vendor: d.vendor})
			}
			gpus[i].Device = dev
		}
	}
	for i := range gpus {
		if gpus[i].Device != "" {
			gpus[i].Err = h.access(gpus[i].Device)
		}
	}
	return gpus
}

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

// nvidiaInfo reads "Model: \t\t NVIDIA H200" and the like.
func nvidiaInfo(text string) map[string]string {
	info := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(line, ":"); ok {
			info[strings.TrimSpace(name)] = strings.TrimSpace(value)
		}
	}
	return info
}

func (h host) exists(p string) bool {
	_, err := os.Stat(h.path(p))
	return err == nil
}

// access is why this user cannot read and write a device, "" where it can.
func (h host) access(dev string) string {
	if err := unix.Access(h.path(dev), unix.R_OK|unix.W_OK); err != nil {
		return err.Error()
	}
	return ""
}

// driver is the kernel module of the first maker that has one.
func (h host) driver(gpus []GPU) Driver {
	if text := h.text("proc/driver/nvidia/version"); text != "" || h.exists("dev/nvidiactl") {
		d := Driver{Vendor: nvidia, Version: nvidiaVersion(text)}
		if text == "" {
			d.Errors = append(d.Errors, "/proc/driver/nvidia/version: not there")
		}
		for _, dev := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
			switch why := h.access(dev); {
			case why == "":
			case dev == "/dev/nvidia-uvm" && !h.exists(dev):
				d.Lacks = append(d.Lacks, dev)
			default:
				d.Errors = append(d.Errors, dev+": "+why)
			}
		}
		return d
	}
	if h.exists("dev/kfd") {
		d := Driver{Vendor: amd, Version: h.text("sys/module/amdgpu/version")}
		if why := h.access("/dev/kfd"); why != "" {
			d.Errors = append(d.Errors, "/dev/kfd: "+why)
		}
		return d
	}
	if slices.ContainsFunc(gpus, func(g GPU) bool { return g.Vendor == mooreThreads && g.Device != "" }) {
		return Driver{Vendor: mooreThreads, Version: h.text("sys/module/mtgpu/version")}
	}
	return Driver{}
}

// nvidiaVersion is 580.159.04 of "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ...".
func nvidiaVersion(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	for word := range strings.FieldsSeq(line) {
		if strings.Count(word, ".") >= 1 && strings.Trim(word, "0123456789.") == "" {
			return word
		}
	}
	return ""
}

// String is "NVIDIA H200 at 0000:1b:00.0, /dev/nvidia0".
func (g GPU) String() string {
	s := cmp.Or(g.Model, g.Vendor+" GPU")
	if g.Bus != "" {
		s += " at " + g.Bus
	}
	if g.Device != "" {
		s += ", " + g.Device
	}
	return s
}
