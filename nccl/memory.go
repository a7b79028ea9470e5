package nccl

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gorun-dev/gorun/cuda"
)

// Alloc makes a zeroed buffer of n elements for communication: memory that can be registered, so that collectives work straight in it. Use it for what
// is sent and received, not for everything (cuda.Malloc). The caller frees it, after what uses it is closed.
func Alloc[T cuda.Element](d *cuda.Device, n int) (*cuda.Buffer[T], error) {
	return cuda.AllocBuffer[T](d, n, cuda.Shareable)
}

// registered is memory that is registered with a communicator, by whom and how often.
type registered struct {
	mem     *cuda.Memory
	hold    *cuda.Hold
	user    int // the counts are guarded by Comm.mu
	graph   int
	pending int // of graph: its graph is closed

	// Of the eager operations that are enqueued and use it: how many, and the last one (op in the top byte, then its number).
	inflight atomic.Int64
	last     atomic.Uint64
	marks    map[*use]uint64 // by the library backend instead: see library.mark
	ops      atomic.Uint32   // bits: operations in which the library has used it, on all members
	mapped   atomic.Bool     // the library may have mapped it on other members
}

func (r *registered) enter(op Op, seq uint64) {
	r.inflight.Add(1)
	r.last.Store(uint64(op)<<56 | seq)
}

func (r *registered) leave() { r.inflight.Add(-1) }

func (r *registered) busy() error {
	n := r.inflight.Load()
	if n <= 0 {
		return nil
	}
	w := r.last.Load()
	last := Op(w >> 56).String()
	if seq := w << 8 >> 8; seq > 0 {
		last += fmt.Sprintf(" #%d", seq)
	}
	return fmt.Errorf("%d enqueued operations use it, the last is %s; synchronize first", n, last)
}

// Register registers memory for all collectives of the communicator until Close. It is local and reference counted: memory registered
// twice is deregistered by the second Close. All members must pass registered memory to a call, or none: a mix is an error that names
// ranks and buffers. The memory is not given back by Free before it is deregistered.
func (c *Comm) Register(m *cuda.Memory) (*Registration, error) { return c.registerAs(m, false) }

// RegisterGraph registers memory for a captured graph: as Register, but eager calls do not see it, since graphs are closed by each rank
// on its own. For libraries.
func (c *Comm) RegisterGraph(m *cuda.Memory) (*Registration, error) { return c.registerAs(m, true) }

func (c *Comm) registerAs(m *cuda.Memory, graph bool) (*Registration, error) {
	if m == nil {
		return nil, c.errorf("register", causef(ErrArgument, "no memory"))
	}
	if err := c.usable(); err != nil {
		return nil, c.errorf("register", err)
	}
	if m.Device() != c.dev {
		return nil, c.errorf("register", causef(ErrArgument, "%v is of another device than the communicator", m))
	}
	if m.Kind() != cuda.Shareable {
		return nil, c.errorf("register", causef(ErrArgument, "%v is private memory (cuda.Malloc), which other ranks cannot reach safely; allocate it with nccl.Alloc", m))
	}
	reg := &Registration{c: c, graph: graph}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.regs == nil {
		return nil, c.errorf("register", ErrClosed)
	}
	r := c.regs[m.ID()]
	if r == nil {
		hold, err := m.Hold("registration with communicator "+c.name, false)
		if err != nil {
			return nil, c.errorf("register", err)
		}
		r = &registered{mem: m, hold: hold}
	}
	if graph && r.graph == 0 || !graph && r.user == 0 {
		if err := c.be.register(m, !graph); err != nil {
			if r.user+r.graph == 0 {
				releaseHolds(r.hold)
			}
			return nil, c.errorf("register", err)
		}
		c.regs[m.ID()] = r
	}
	if graph {
		r.graph++
	} else {
		if r.user == 0 {
			c.userRegs.Add(1)
		}
		r.user++
	}
	if r.user > 0 && r.graph > 0 {
		r.mapped.Store(true)
	}
	reg.r = r
	return reg, nil
}

// Registration is one claim on registered memory.
type Registration struct {
	c       *Comm
	r       *registered
	graph   bool
	pending bool
	closed  bool // guarded by Comm.mu, as is pending
}

// Memory is what is registered.
func (r *Registration) Memory() *cuda.Memory { return r.r.mem }

// SetPending says that the graph of a RegisterGraph is closed but its release has not come yet (Stats.PendingRelease). For libraries.
func (r *Registration) SetPending() {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.graph && !r.pending && !r.closed {
		r.pending = true
		r.r.pending++
	}
}

// Close deregisters. An error, naming them, while enqueued operations still use the memory; nothing is deregistered then. Twice is fine, also
// after the communicator's Close, which deregisters all.
func (r *Registration) Close() error {
	c := r.c
	c.mu.Lock()
	if r.closed || c.regs == nil {
		r.closed = true
		c.mu.Unlock()
		return nil
	}
	if !r.graph && r.r.user == 1 && c.failed.Load() == nil {
		if err := c.busy(r.r); err != nil {
			mem := r.r.mem
			c.mu.Unlock()
			return c.errorf("deregister", fmt.Errorf("%v: %w", mem, err))
		}
	}
	r.closed = true
	if r.graph {
		r.r.graph--
		if r.pending {
			r.r.pending--
		}
	} else {
		if r.r.user--; r.r.user == 0 {
			c.userRegs.Add(-1)
		}
	}
	var hold *cuda.Hold
	if r.r.user+r.r.graph == 0 {
		delete(c.regs, r.r.mem.ID())
		hold = r.r.hold
	}
	after := func() error { return nil }
	if r.graph && r.r.graph == 0 || !r.graph && r.r.user == 0 {
		// Under mu: a Register of the same memory that follows finds a clean table.
		after = c.be.deregister(r.r.mem, !r.graph, hold)
	}
	c.releasing++
	c.mu.Unlock()
	err := after()
	c.mu.Lock()
	c.releasing--
	c.mu.Unlock()
	if err != nil {
		return c.errorf("deregister", err)
	}
	return nil
}

func (c *Comm) busy(r *registered) error {
	if l, ok := c.be.(*library); ok {
		if !l.busy(r) {
			return nil
		}
		r.inflight.Store(1)
		defer r.inflight.Store(0)
	}
	return r.busy()
}

// userRegistered is the registration by the user of a range's memory, nil without one.
func (c *Comm) userRegistered(r cuda.Range) *registered {
	if r.Mem == nil || c.userRegs.Load() == 0 {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if reg := c.regs[r.Mem.ID()]; reg != nil && reg.user > 0 {
		return reg
	}
	return nil
}

// isRegistered reports whether the range's memory is registered by anyone.
func (c *Comm) isRegistered(r cuda.Range) bool {
	if r.Mem == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.regs[r.Mem.ID()] != nil
}

// arenaAlign is where carvings begin: what NCCL's symmetric kernels want at most.
const arenaAlign = 256

// Arena is one large block, allocated and registered once, from which slices are carved; the same sequence of
// carvings gives the same offsets on all ranks, as windows and NVLS demand. It is for one goroutine.
type Arena struct {
	mem    *cuda.Memory
	regs   []*Registration
	used   uint64
	closed bool
}

// NewArena allocates bytes (rounded up to the allocation granularity: a page on the host platform) and registers them with the communicators.
func NewArena(d *cuda.Device, bytes uint64, comms ...*Comm) (*Arena, error) {
	const page = 4096
	if bytes > 1<<62 {
		return nil, fmt.Errorf("nccl: arena of %d bytes: %w", bytes, ErrArgument)
	}
	m, err := d.Alloc((bytes+page-1)/page*page, cuda.Shareable)
	if err != nil {
		return nil, err
	}
	a := &Arena{mem: m}
	for _, c := range comms {
		r, err := c.Register(m)
		if err != nil {
			return nil, errors.Join(err, a.Close())
		}
		a.regs = append(a.regs, r)
	}
	return a, nil
}

// Carve takes n elements, aligned to 256 bytes. *FullError when they do not fit.
func Carve[T cuda.Element](a *Arena, n int) (cuda.Slice[T], error) {
	if n < 0 {
		return cuda.Slice[T]{}, fmt.Errorf("nccl: carve %d elements: %w", n, ErrArgument)
	}
	if a.closed {
		return cuda.Slice[T]{}, fmt.Errorf("nccl: carve: the arena is closed")
	}
	off := (a.used + arenaAlign - 1) / arenaAlign * arenaAlign
	size := uint64(cuda.DTypeOf[T]().Size())
	if off > a.mem.Size() || uint64(n) > (a.mem.Size()-off)/size {
		return cuda.Slice[T]{}, &FullError{Need: off - a.used + uint64(n)*size, Used: a.used, Size: a.mem.Size()}
	}
	s, err := cuda.SliceOf[T](a.mem, off, n)
	if err != nil {
		return s, err
	}
	a.used = off + uint64(n)*size
	return s, nil
}

// Memory is the block itself.
func (a *Arena) Memory() *cuda.Memory { return a.mem }

// Used is how many bytes are carved, padding included.
func (a *Arena) Used() uint64 { return a.used }

// Reset takes all carvings back; their slices must not be used any more.
func (a *Arena) Reset() { a.used = 0 }

// Close deregisters and frees. An error, and nothing is freed, while enqueued operations or live graphs use the block. Twice is fine.
func (a *Arena) Close() error {
	if a.closed {
		return nil
	}
	for len(a.regs) > 0 {
		if err := a.regs[0].Close(); err != nil {
			return err
		}
		a.regs = a.regs[1:]
	}
	if err := a.mem.Free(); err != nil {
		return err
	}
	a.closed = true
	return nil
}
