package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"
)

// AllocKind says how memory was made.
type AllocKind uint8

const (
	Private   AllocKind = iota + 1 // cuMemAlloc's kind: this process alone
	Shareable                      // VMM with exportable handle (host platform: a memfd): can be registered
)

// String is "private" or "shareable".
func (k AllocKind) String() string {
	switch k {
	case Private:
		return "private"
	case Shareable:
		return "shareable"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Memory is an allocation on a device, aligned to a page on the host platform, to 256 bytes at least on a GPU. It has an owner who frees it, and holders (registrations, graphs)
// that keep it until they let go.
type Memory struct {
	dev  *Device
	id   uint64
	size uint64
	kind AllocKind
	raw  platformMemory
	ptr  unsafe.Pointer

	freed atomic.Bool // the owner's Free has been accepted
	gone  atomic.Bool // and carried out

	mu     sync.Mutex // guards what follows, and changes of the two above
	holds  []*Hold
	onFree []func()
}

// Alloc makes zeroed memory. bytes may be 0. Refused while the calling thread captures (in every mode but
// relaxed), with ErrCaptureUnsafe, which invalidates the capture as CUDA does.
func (d *Device) Alloc(bytes uint64, kind AllocKind) (*Memory, error) {
	const op = "allocate"
	if kind != Private && kind != Shareable {
		return nil, &Error{Op: op, Err: fmt.Errorf("unknown allocation %s", kind)}
	}
	if err := d.plat.unsafeCall(op); err != nil {
		return nil, err
	}
	m := &Memory{dev: d, id: lastID.Add(1), size: bytes, kind: kind}
	if err := d.remember(op, m); err != nil {
		return nil, err
	}
	raw, err := d.plat.alloc(bytes, kind, m.String())
	if err != nil {
		d.forget(m)
		return nil, &Error{Op: op, Detail: fmt.Sprintf("%d bytes of %s memory", bytes, kind), Err: err}
	}
	m.raw, m.ptr = raw, raw.pointer()
	return m, nil
}

// ID is unique among the allocations of this process, never used again.
func (m *Memory) ID() uint64 { return m.id }

// Size is the number of bytes that were asked for.
func (m *Memory) Size() uint64 { return m.size }

// Kind is how it was made.
func (m *Memory) Kind() AllocKind { return m.kind }

// Device is where it is.
func (m *Memory) Device() *Device { return m.dev }

// Pointer is the device address.
func (m *Memory) Pointer() uintptr { return uintptr(m.ptr) }

// Freed reports whether the owner has freed it. The memory may still be there for its holders.
func (m *Memory) Freed() bool { return m.freed.Load() }

// String is "4096-byte allocation 7".
func (m *Memory) String() string { return fmt.Sprintf("%d-byte allocation %d", m.size, m.id) }

// Free gives the memory back. It waits for no stream (a GPU's driver may): work that still uses the memory gets ErrIllegalAddress, the sticky device
// error; work that would use it is refused with ErrIllegalAddress on a GPU. While a registration or a dead-but-unreleased graph holds it the free is carried out when the
// last hold goes (nil is returned, the owner is done). While a live graph holds it (Hold with live true): *HeldError that names it,
// and nothing is freed. Freeing twice is an error. Like Alloc it is refused while the calling thread captures.
func (m *Memory) Free() error {
	const op = "free"
	if err := m.dev.plat.unsafeCall(op); err != nil {
		return err
	}
	m.mu.Lock()
	if m.freed.Load() {
		m.mu.Unlock()
		return &Error{Op: op, Detail: m.String(), Err: ErrClosed}
	}
	var live []string
	for _, h := range m.holds {
		if h.live {
			live = append(live, h.who)
		}
	}
	if len(live) > 0 {
		m.mu.Unlock()
		return &HeldError{Memory: m, Holders: live}
	}
	m.freed.Store(true)
	give := len(m.holds) == 0
	m.gone.Store(give)
	m.mu.Unlock()
	if !give {
		return nil
	}
	return m.giveBack()
}

// giveBack runs once, after gone was set, with no lock held.
func (m *Memory) giveBack() error {
	m.mu.Lock()
	fns := m.onFree
	m.onFree = nil
	m.mu.Unlock()
	for _, fn := range fns {
		fn()
	}
	err := m.raw.free()
	m.dev.forget(m)
	if err != nil {
		return &Error{Op: "free", Detail: m.String(), Err: err}
	}
	return nil
}

// Hold keeps the memory. who is for errors ("graph captured at train.go:41"); live holds refuse Free, others defer it.
// Memory that its owner has freed cannot be held any more: ErrClosed.
func (m *Memory) Hold(who string, live bool) (*Hold, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.freed.Load() {
		return nil, &Error{Op: "hold", Detail: fmt.Sprintf("%s for %s: the memory was freed", m, who), Err: ErrClosed}
	}
	h := &Hold{mem: m, who: who, live: live}
	m.holds = append(m.holds, h)
	return h, nil
}

// Holders names who holds the memory at the moment.
func (m *Memory) Holders() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for _, h := range m.holds {
		names = append(names, h.who)
	}
	return names
}

// Hold is one claim on a Memory.
type Hold struct {
	mem  *Memory
	who  string
	live bool // guarded by mem.mu
}

// SetLive turns a live hold into one that only defers, or back. On a released hold it does nothing.
func (h *Hold) SetLive(live bool) {
	h.mem.mu.Lock()
	defer h.mem.mu.Unlock()
	h.live = live
}

// Release ends the hold; it may be called twice. The last one carries out a free that was deferred, on this goroutine.
func (h *Hold) Release() {
	m := h.mem
	m.mu.Lock()
	found := false
	for i := range m.holds {
		if m.holds[i] == h {
			m.holds = append(m.holds[:i], m.holds[i+1:]...)
			found = true
			break
		}
	}
	give := found && len(m.holds) == 0 && m.freed.Load() && !m.gone.Load()
	if give {
		m.gone.Store(true)
	}
	m.mu.Unlock()
	if give {
		if err := m.giveBack(); err != nil {
			m.dev.Fail(err) // nobody else could be told
		}
	}
}

// OnFree calls fn when the memory is really given back (before it is unmapped), in order of attachment and with no lock held.
// On memory that is gone fn is called at once. For libraries.
func (m *Memory) OnFree(fn func()) {
	m.mu.Lock()
	if m.gone.Load() {
		m.mu.Unlock()
		fn()
		return
	}
	m.onFree = append(m.onFree, fn)
	m.mu.Unlock()
}

// Share describes Shareable memory of the host platform for another rank of this machine: a descriptor (owned by the
// memory, valid until it is given back), or under the race detector a heap slice for ranks of the same process. For libraries.
func (m *Memory) Share() (SharedMemory, error) {
	const op = "share"
	if m.kind != Shareable {
		return SharedMemory{}, &Error{Op: op, Detail: m.String(), Err: errors.New("it was allocated as private memory")}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gone.Load() {
		return SharedMemory{}, &Error{Op: op, Detail: m.String(), Err: ErrClosed}
	}
	s, err := m.raw.share()
	if err != nil {
		return SharedMemory{}, &Error{Op: op, Detail: m.String(), Err: err}
	}
	s.Size = m.size
	return s, nil
}

// SharedMemory is what Memory.Share gives and MapShared takes.
type SharedMemory struct {
	FD   int // memfd, -1 with Heap
	Heap []byte
	Size uint64
}

// PeerMemory is another rank's memory as this process sees it.
type PeerMemory struct {
	dev *Device
	raw platformPeer
	id  uint64
	n   uint64

	mu     sync.Mutex // guards closed
	closed bool
}

// MapShared maps it. It does not take the descriptor over. The descriptor must be a memfd that cannot shrink and
// holds at least s.Size bytes: memory that its owner could cut short would kill this process.
func (d *Device) MapShared(s SharedMemory) (*PeerMemory, error) {
	const op = "map shared memory"
	p := &PeerMemory{dev: d, id: lastID.Add(1), n: s.Size}
	if err := d.remember(op, p); err != nil {
		return nil, err
	}
	raw, err := d.plat.mapShared(s)
	if err != nil {
		d.forget(p)
		return nil, &Error{Op: op, Detail: fmt.Sprintf("%d bytes", s.Size), Err: err}
	}
	p.raw = raw
	return p, nil
}

// Bytes is the memory, nil after Close.
func (p *PeerMemory) Bytes() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	return p.raw.bytes()
}

// Pointer is the address of its first byte, 0 after Close.
func (p *PeerMemory) Pointer() uintptr {
	base := unsafe.Pointer(unsafe.SliceData(p.Bytes()))
	return uintptr(base)
}

// String is "4096-byte mapping 9 of a peer's memory".
func (p *PeerMemory) String() string {
	return fmt.Sprintf("%d-byte mapping %d of a peer's memory", p.n, p.id)
}

// Close unmaps; nothing may touch Bytes any more. It may be called twice.
func (p *PeerMemory) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	p.dev.forget(p)
	if err := p.raw.close(); err != nil {
		return &Error{Op: "unmap", Detail: p.String(), Err: err}
	}
	return nil
}

// Range is a part of a Memory in bytes.
type Range struct {
	Mem *Memory // nil for an empty range without memory
	Off uint64
	Len uint64
}

// check says what is wrong with the range.
func (r Range) check() error {
	switch {
	case r.Mem == nil && (r.Len != 0 || r.Off != 0):
		return fmt.Errorf("range [%d,%d) has no memory", r.Off, r.Off+r.Len)
	case r.Mem != nil && (r.Off > r.Mem.size || r.Len > r.Mem.size-r.Off):
		return fmt.Errorf("%s: outside the allocation", r)
	}
	return nil
}

// address is the first byte.
func (r Range) address() unsafe.Pointer {
	if r.Mem == nil {
		return nil
	}
	return unsafe.Add(r.Mem.ptr, r.Off)
}

// Bytes is the memory itself; host platform only. It panics like a Go slice where the range is outside its memory.
func (r Range) Bytes() []byte {
	if r.Mem == nil && r.Len == 0 {
		return nil
	}
	if err := r.check(); err != nil {
		panic(&Error{Op: "range bytes", Err: err})
	}
	r.Mem.mustBeHost("range bytes")
	return unsafe.Slice((*byte)(r.address()), r.Len)
}

// mustBeHost panics where the host cannot touch the memory.
func (m *Memory) mustBeHost(op string) {
	if m.gone.Load() {
		panic(&Error{Op: op, Detail: m.String() + " was freed", Err: ErrIllegalAddress})
	}
	if p := m.dev.plat.kind(); p != Host {
		panic(&Error{Op: op, Detail: m.String(), Err: fmt.Errorf("it is memory of a %s device: use CopyToHost", p)})
	}
}

// Qualifies explains why the range cannot be registered with a communicator or be part of a window: it is not Shareable memory,
// or was freed. nil: it can. It may be called during a capture.
func (r Range) Qualifies() error {
	const op = "qualify for registration"
	switch err := r.check(); {
	case err != nil:
		return &Error{Op: op, Err: err}
	case r.Mem == nil:
		return &Error{Op: op, Detail: r.String(), Err: errors.New("it has no memory")}
	case r.Mem.gone.Load():
		return &Error{Op: op, Detail: r.Mem.String() + " was freed", Err: ErrIllegalAddress}
	case r.Mem.kind != Shareable:
		return &Error{Op: op, Detail: r.Mem.String(), Err: errors.New("it is private memory: allocate it as Shareable (nccl.Alloc)")}
	}
	return r.Mem.dev.Qualifies(r.Pointer(), r.Len)
}

// Qualifies is Range.Qualifies for memory of any origin, by its address: on a GPU it asks the driver how the memory was made.
func (d *Device) Qualifies(addr uintptr, bytes uint64) error {
	if err := d.plat.qualifies(addr, bytes); err != nil {
		return &Error{Op: "qualify for registration", Err: err}
	}
	return nil
}

// Pointer is the device address of the range's first byte.
func (r Range) Pointer() uintptr { return uintptr(r.address()) }

// String is "range [0,4096) of 8192-byte allocation 7".
func (r Range) String() string {
	if r.Mem == nil {
		return "empty range"
	}
	return fmt.Sprintf("range [%d,%d) of %s", r.Off, r.Off+r.Len, r.Mem)
}
