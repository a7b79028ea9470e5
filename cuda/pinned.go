package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"
)

// Pinned is host memory that kernels read and write at the address that it has in the process.
type Pinned struct {
	g  *driverDevice
	id uint64
	n  int

	mu    sync.Mutex // guards words
	words []uint32
}

// AllocPinned makes such memory for a GPU, zeroed, of a number of bytes above 0 that is rounded up to whole words. Close it before the device. For libraries.
func (d *Device) AllocPinned(bytes int) (*Pinned, error) {
	const op = "allocate pinned memory"
	detail := fmt.Sprintf("%d bytes", bytes)
	g, ok := d.plat.(*driverDevice)
	if !ok {
		return nil, &Error{Op: op, Detail: detail, Err: errors.New("the host platform has none")}
	}
	if bytes <= 0 {
		return nil, &Error{Op: op, Detail: detail, Err: errors.New("less than a word")}
	}
	p := &Pinned{g: g, id: lastID.Add(1), n: bytes}
	if err := d.remember(op, p); err != nil {
		return nil, err
	}
	if err := p.open(); err != nil {
		d.forget(p)
		return nil, &Error{Op: op, Detail: detail, Err: err}
	}
	return p, nil
}

func (p *Pinned) open() error {
	in, err := p.g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	n := (p.n-1)/4 + 1
	base, err := p.g.drv.MemAllocHost(4 * uint64(n))
	if err != nil {
		return p.g.cause(err)
	}
	p.words = unsafe.Slice((*uint32)(base), n)
	clear(p.words)
	return nil
}

// Words is the memory, nil after Close. What kernels use at the same time is for sync/atomic.
func (p *Pinned) Words() []uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.words
}

// Pointer is the address of its first byte, 0 after Close.
func (p *Pinned) Pointer() uintptr {
	words := unsafe.Pointer(unsafe.SliceData(p.Words()))
	return uintptr(words)
}

// String is "64-byte pinned memory 9".
func (p *Pinned) String() string { return fmt.Sprintf("%d-byte pinned memory %d", p.n, p.id) }

// Close gives it back; it may be called twice. Neither Go nor work of the device may use the memory any more. It may wait for the device, as the driver decides.
func (p *Pinned) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.words == nil {
		return nil
	}
	base := unsafe.Pointer(unsafe.SliceData(p.words))
	p.words = nil
	err := p.close(base)
	p.g.dev.forget(p)
	if err = p.g.lost(err); err != nil {
		return &Error{Op: "free", Detail: p.String(), Err: err}
	}
	return nil
}

func (p *Pinned) close(base unsafe.Pointer) error {
	in, err := p.g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	return p.g.cause(p.g.drv.MemFreeHost(base))
}
