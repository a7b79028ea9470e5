package cusys

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Driver is an open driver library.
type Driver struct {
	vendor  *Vendor
	lib     *dl.Library
	f       functions
	version Version
}

// Open opens the vendor's driver library. It calls nothing but the version.
func Open(v *Vendor) (*Driver, error) {
	lib, err := dl.Open(v.Driver)
	if err != nil {
		return nil, err
	}
	d := &Driver{vendor: v, lib: lib}
	if err := lib.Bind(d.f.symbols(v)); err != nil {
		lib.Close()
		return nil, err
	}
	var code int32
	if rc := d.f.DriverGetVersion.Result3(uintptr(unsafe.Pointer(&code)), 0, 0); rc == 0 {
		d.version = v.version(code)
	}
	return d, nil
}

func (d *Driver) Vendor() *Vendor      { return d.vendor }
func (d *Driver) Library() *dl.Library { return d.lib }

// Version is that of the interface that the driver offers, not that of the kernel module. Zero if it told none.
func (d *Driver) Version() Version { return d.version }

// Close unloads the library; for tests.
func (d *Driver) Close() { d.lib.Close() }

// cells are out arguments of hot calls: a variable of the caller's would be garbage each time.
var cells = sync.Pool{New: func() any { return new(uint64) }}

// u32 is an int argument.
func u32[T ~int32](v T) uintptr { return uintptr(uint32(v)) }

// Init starts the driver. Once a process, before all else.
func (d *Driver) Init() error { return d.check(&d.f.Init, d.f.Init.Result3(0, 0, 0)) }

// errorName is the vendor's name of a result, "" if it has none.
func (d *Driver) errorName(r Result) string { return d.errorString(&d.f.GetErrorName, r) }

// errorText is the vendor's description of a result.
func (d *Driver) errorText(r Result) string { return d.errorString(&d.f.GetErrorString, r) }

func (d *Driver) errorString(e *dl.Entry, r Result) string {
	if e.Func == 0 {
		return ""
	}
	if d.vendor.errorReturns {
		return dl.GoString(e.Call3(u32(r), 0, 0))
	}
	var p uintptr
	if rc := e.Result3(u32(r), uintptr(unsafe.Pointer(&p)), 0); rc != 0 {
		return ""
	}
	return dl.GoString(p)
}

// DeviceCount is the number of devices that the process may use.
func (d *Driver) DeviceCount() (int, error) {
	var n int32
	rc := d.f.DeviceGetCount.Result3(uintptr(unsafe.Pointer(&n)), 0, 0)
	return int(n), d.check(&d.f.DeviceGetCount, rc)
}

// Device is the device of an ordinal.
func (d *Driver) Device(ordinal int) (Device, error) {
	var dev Device
	rc := d.f.DeviceGet.Result3(uintptr(unsafe.Pointer(&dev)), uintptr(ordinal), 0)
	return dev, d.check(&d.f.DeviceGet, rc)
}

// DeviceAttribute is a property of a device. One that no device of the vendor has is 0.
func (d *Driver) DeviceAttribute(dev Device, a Attribute) (int, error) {
	number := int32(a)
	if d.vendor.attributes != nil {
		var ok bool
		if number, ok = d.vendor.attributes[a]; !ok {
			return 0, nil
		}
	}
	var v int32
	rc := d.f.DeviceGetAttribute.Result3(uintptr(unsafe.Pointer(&v)), u32(number), u32(dev))
	return int(v), d.check(&d.f.DeviceGetAttribute, rc)
}

// DeviceUUID is the device's, or the MIG instance's.
func (d *Driver) DeviceUUID(dev Device) (UUID, error) {
	var id UUID
	rc := d.f.DeviceGetUuid.Result3(uintptr(unsafe.Pointer(&id)), u32(dev), 0)
	return id, d.check(&d.f.DeviceGetUuid, rc)
}

// DeviceName is the model's.
func (d *Driver) DeviceName(dev Device) (string, error) { return d.deviceText(&d.f.DeviceGetName, dev) }

// DevicePCIBusID is the device's place: "0000:1b:00.0".
func (d *Driver) DevicePCIBusID(dev Device) (string, error) {
	return d.deviceText(&d.f.DeviceGetPCIBusId, dev)
}

func (d *Driver) deviceText(e *dl.Entry, dev Device) (string, error) {
	var buf [256]byte // longer texts are cut by the driver
	rc := e.Result3(uintptr(unsafe.Pointer(&buf)), uintptr(len(buf)-1), u32(dev))
	if err := d.check(e, rc); err != nil {
		return "", err
	}
	for n, c := range buf {
		if c == 0 {
			return string(buf[:n]), nil
		}
	}
	return string(buf[:]), nil
}

// DeviceMemory is the device's memory in bytes.
func (d *Driver) DeviceMemory(dev Device) (uint64, error) {
	var n uint64
	rc := d.f.DeviceTotalMem.Result3(uintptr(unsafe.Pointer(&n)), u32(dev), 0)
	return n, d.check(&d.f.DeviceTotalMem, rc)
}

// CanAccessPeer reports whether dev can use peer's memory.
func (d *Driver) CanAccessPeer(dev, peer Device) (bool, error) {
	var v int32
	rc := d.f.DeviceCanAccessPeer.Result3(uintptr(unsafe.Pointer(&v)), u32(dev), u32(peer))
	return v != 0, d.check(&d.f.DeviceCanAccessPeer, rc)
}

// p2pNativeAtomics is CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED.
const p2pNativeAtomics = 3

// PeerAtomics reports whether atomic operations of dev on peer's memory go through the link between them: NVLink can, PCIe cannot.
func (d *Driver) PeerAtomics(dev, peer Device) (bool, error) {
	var v int32
	rc := d.f.DeviceGetP2PAttribute.Result6(uintptr(unsafe.Pointer(&v)), p2pNativeAtomics, u32(dev), u32(peer), 0, 0)
	return v != 0, d.check(&d.f.DeviceGetP2PAttribute, rc)
}

// PrimaryCtxRetain makes or finds the device's primary context, the one that collective libraries expect. On HIP,
// which has none, the result stands for the device.
func (d *Driver) PrimaryCtxRetain(dev Device) (Context, error) {
	if d.vendor.noContexts {
		return Context(dev) + 1, nil
	}
	var c Context
	rc := d.f.PrimaryCtxRetain.Result3(uintptr(unsafe.Pointer(&c)), u32(dev), 0)
	return c, d.check(&d.f.PrimaryCtxRetain, rc)
}

// PrimaryCtxRelease undoes one PrimaryCtxRetain. The last one destroys the context and all that is in it.
func (d *Driver) PrimaryCtxRelease(dev Device) error {
	if d.vendor.noContexts {
		return nil
	}
	return d.check(&d.f.PrimaryCtxRelease, d.f.PrimaryCtxRelease.Result3(u32(dev), 0, 0))
}

// CtxSetCurrent sets the calling thread's context.
func (d *Driver) CtxSetCurrent(c Context) error {
	arg := uintptr(c)
	if d.vendor.noContexts {
		if c == 0 {
			return nil // a thread always has a device
		}
		arg--
	}
	return d.check(&d.f.CtxSetCurrent, d.f.CtxSetCurrent.Result3(arg, 0, 0))
}

// CtxCurrent is the calling thread's context, 0 without one; for tests.
func (d *Driver) CtxCurrent() (Context, error) {
	var c Context
	rc := d.f.CtxGetCurrent.Result3(uintptr(unsafe.Pointer(&c)), 0, 0)
	if d.vendor.noContexts {
		c++
	}
	return c, d.check(&d.f.CtxGetCurrent, rc)
}

// Callback makes a Go function callable by the driver's threads. A process has at most 2000 of them and none is given
// back: make one for each kind of event and tell the events apart by arg, a number. In it no driver call, no blocking.
func Callback(fn func(arg uint64)) HostFn {
	return HostFn(dl.NewCallback(func(arg uintptr) { fn(uint64(arg)) }))
}

func (d *Driver) String() string {
	return fmt.Sprintf("%s %s (%s)", d.vendor.Name, d.version, d.lib.Path())
}
