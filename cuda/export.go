package cuda

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

var errHostMemory = errors.New("memory of the host platform is shared by Memory.Share")

// ExportFD makes a file descriptor by which other processes of this machine, and other devices of this one, map the same memory: see Device.ImportFD. It
// is close-on-exec and the caller's, and keeps the memory as a mapping does. Only Shareable memory of a GPU has one; freed memory: ErrClosed. For libraries.
func (m *Memory) ExportFD() (fd int, err error) {
	const op = "export memory"
	h, err := m.Hold(op, false)
	if err != nil {
		return -1, err
	}
	defer h.Release()
	if fd, err = m.exportFD(); err != nil {
		return -1, &Error{Op: op, Detail: m.String(), Err: err}
	}
	return fd, nil
}

func (m *Memory) exportFD() (int, error) {
	raw, ok := m.raw.(*driverMemory)
	if !ok {
		return -1, errHostMemory
	}
	if m.kind != Shareable {
		return -1, errors.New("it was allocated as private memory")
	}
	return raw.exportFD()
}

func (m *driverMemory) exportFD() (fd int, err error) {
	in, err := m.g.enter(true)
	if err != nil {
		return -1, err
	}
	defer in.leave()
	d := m.g.drv
	h, err := d.MemRetain(m.base)
	if err != nil {
		return -1, m.g.cause(err)
	}
	syscall.ForkLock.RLock() // no child between the two may inherit it
	if fd, err = d.MemExportFD(h); err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if releaseErr := d.MemRelease(h); releaseErr != nil {
		if err == nil {
			syscall.Close(fd)
		}
		err = errors.Join(err, releaseErr)
	}
	return fd, m.g.cause(err)
}

// Imported is another process's or device's memory as this device sees it.
type Imported struct {
	g     *driverDevice
	id    uint64
	size  uint64
	bytes uint64 // of the mapping

	mu   sync.Mutex // guards base
	base cusys.DevicePtr
}

// ImportFD maps memory of ExportFD for this device, which must reach it: its own, or that of a device that CUDA calls its peer. bytes is the exporter's
// Memory.Size. fd stays the caller's. Close the mapping before the device; it keeps the memory when its owner has freed it. For libraries.
func (d *Device) ImportFD(fd int, bytes uint64) (*Imported, error) {
	const op = "import memory"
	detail := fmt.Sprintf("%d bytes by descriptor %d", bytes, fd)
	g, ok := d.plat.(*driverDevice)
	if !ok {
		return nil, &Error{Op: op, Detail: detail, Err: errHostMemory}
	}
	i := &Imported{g: g, id: lastID.Add(1), size: bytes}
	if err := d.remember(op, i); err != nil {
		return nil, err
	}
	if err := i.open(fd); err != nil {
		d.forget(i)
		return nil, &Error{Op: op, Detail: detail, Err: err}
	}
	return i, nil
}

func (i *Imported) open(fd int) error {
	var about syscall.Stat_t
	if err := syscall.Fstat(fd, &about); err != nil { // drivers call it an invalid value
		return err
	}
	v := &i.g.vmm
	switch {
	case v.off != nil:
		return v.off
	case i.size > i.g.about.Memory:
		return fmt.Errorf("the device has %d bytes", i.g.about.Memory)
	}
	in, err := i.g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	h, err := i.g.drv.MemImportFD(fd)
	if err != nil {
		return i.g.cause(err)
	}
	i.base, i.bytes, err = v.mapping(h, i.size, v.access[:1])
	return i.g.cause(err)
}

// Pointer is the address of its first byte for this device, 0 after Close.
func (i *Imported) Pointer() uintptr {
	i.mu.Lock()
	defer i.mu.Unlock()
	return uintptr(i.base)
}

// Size is the number of bytes that were asked for.
func (i *Imported) Size() uint64 { return i.size }

// String is "4096-byte import 9".
func (i *Imported) String() string { return fmt.Sprintf("%d-byte import %d", i.size, i.id) }

// Close unmaps it; it may be called twice. No work of the device may use the memory any more. It may wait for the device, as the driver decides.
func (i *Imported) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.base == 0 {
		return nil
	}
	base := i.base
	i.base = 0
	err := i.close(base)
	i.g.dev.forget(i)
	if err = i.g.lost(err); err != nil {
		return &Error{Op: "unmap", Detail: i.String(), Err: err}
	}
	return nil
}

func (i *Imported) close(base cusys.DevicePtr) error {
	in, err := i.g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	if err := i.g.drv.MemUnmap(base, i.bytes); err != nil {
		return i.g.cause(err)
	}
	return i.g.cause(i.g.drv.MemUnreserve(base, i.bytes))
}
