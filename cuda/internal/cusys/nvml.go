package cusys

import (
	"fmt"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// NVML is NVIDIA's management library. It knows all GPUs of the machine, also those that CUDA_VISIBLE_DEVICES hides from the driver.
type NVML struct {
	lib *dl.Library
	f   struct {
		Init, Shutdown, HandleByUUID, P2PStatus, ErrorString dl.Entry
	}
}

// nvmlDevice is the library's handle of a GPU.
type nvmlDevice uintptr

// What nvmlDeviceGetP2PStatus is asked for; its answer 0 is OK.
const (
	nvmlP2PWrite  = 1
	nvmlP2PNVLink = 2
)

// OpenNVML opens the library. Close it again: it holds descriptors.
func OpenNVML() (*NVML, error) {
	lib, err := dl.Open(dl.Spec{Name: "NVML", Search: gpulib.NVML, Symbol: "nvmlInit_v2"})
	if err != nil {
		return nil, err
	}
	n := &NVML{lib: lib}
	symbol := func(e *dl.Entry, name string) dl.Symbol {
		return dl.Symbol{Entry: e, Names: []string{name}, Required: true}
	}
	f := &n.f
	if err := lib.Bind([]dl.Symbol{
		symbol(&f.Init, "nvmlInit_v2"), symbol(&f.Shutdown, "nvmlShutdown"), symbol(&f.HandleByUUID, "nvmlDeviceGetHandleByUUID"),
		symbol(&f.P2PStatus, "nvmlDeviceGetP2PStatus"), symbol(&f.ErrorString, "nvmlErrorString"),
	}); err != nil {
		return nil, err
	}
	if err := n.check(&f.Init, f.Init.Result3(0, 0, 0)); err != nil {
		return nil, err
	}
	return n, nil
}

// Close ends the use of the library, which counts them. It stays loaded.
func (n *NVML) Close() error { return n.check(&n.f.Shutdown, n.f.Shutdown.Result3(0, 0, 0)) }

// Linked reports whether two GPUs, by UUID ("GPU-8a5e…"), are joined by NVLink, and the first can write to the second's memory.
func (n *NVML) Linked(a, b string) (bool, error) {
	from, err := n.device(a)
	if err != nil {
		return false, err
	}
	to, err := n.device(b)
	if err != nil {
		return false, err
	}
	for _, what := range []uintptr{nvmlP2PWrite, nvmlP2PNVLink} {
		status := int32(-1)
		if err := n.check(&n.f.P2PStatus, n.f.P2PStatus.Result6(uintptr(from), uintptr(to), what, uintptr(unsafe.Pointer(&status)), 0, 0)); err != nil || status != 0 {
			return false, err
		}
	}
	return true, nil
}

func (n *NVML) device(uuid string) (nvmlDevice, error) {
	var d nvmlDevice
	text := dl.CString(uuid)
	if err := n.check(&n.f.HandleByUUID, n.f.HandleByUUID.Result3(uintptr(unsafe.Pointer(&text[0])), uintptr(unsafe.Pointer(&d)), 0)); err != nil {
		return 0, fmt.Errorf("%s: %w", uuid, err)
	}
	return d, nil
}

func (n *NVML) check(e *dl.Entry, rc int32) error {
	if rc == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (NVML result %d)", e.Name, dl.GoString(n.f.ErrorString.Call3(uintptr(uint32(rc)), 0, 0)), rc)
}
