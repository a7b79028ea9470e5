package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// RawKernel is a kernel that takes its arguments as C has them, for a caller whose launches are a good part of its time: a Kernel's takes as long again as the driver's. For libraries
// on a GPU.
type RawKernel struct {
	g    *driverDevice
	name string
	fn   cusys.Function
}

// LoadPTX loads a kernel. It needs no closing.
func (d *Device) LoadPTX(name, ptx string) (*RawKernel, error) {
	op := "load kernel " + name
	g, ok := d.plat.(*driverDevice)
	if !ok {
		return nil, &Error{Op: op, Err: fmt.Errorf("a %s device runs no PTX", d.Platform())}
	}
	err := d.Err()
	var m *driverModule
	if err == nil {
		m, err = g.loadOnce(name, kernelSource{ptx: ptx})
	}
	if err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	return &RawKernel{g, name, m.fn}, nil
}

// Launch enqueues it on blocks of threads. params are the addresses of its arguments, which are read before it returns: of memory outside of any stack.
func (k *RawKernel) Launch(s *Stream, blocks, threads int, params []unsafe.Pointer) error {
	d, ok := s.raw.(*driverStream)
	if !ok || d.g != k.g {
		return &Error{Op: "launch kernel", Detail: k.name, Err: errors.New("the stream belongs to another device")}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cap.Load() != nil {
		return d.recordRaw(k, blocks, threads, params)
	}
	if err := d.usable("launch kernel"); err != nil {
		return err
	}
	b, err := k.g.dev.BindCall()
	if err != nil {
		return err
	}
	err = k.launch(d, blocks, threads, params)
	b.Release()
	if err != nil {
		return &Error{Op: "launch kernel", Detail: k.name, Err: k.g.cause(err)}
	}
	return nil
}

func (k *RawKernel) launch(s *driverStream, blocks, threads int, params []unsafe.Pointer) error {
	return k.g.drv.LaunchKernel(k.fn, cusys.Dim{X: uint32(blocks), Y: 1, Z: 1}, cusys.Dim{X: uint32(threads), Y: 1, Z: 1}, 0, s.h, params)
}

// recordRaw is a launch in a capture. mu is held.
func (s *driverStream) recordRaw(k *RawKernel, blocks, threads int, params []unsafe.Pointer) error {
	const op = "launch kernel"
	if err := s.recordable(op); err != nil {
		return err
	}
	return s.enqueueLocked(op, func() error { return k.launch(s, blocks, threads, params) })
}
