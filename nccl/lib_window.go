package nccl

import (
	"context"
	"errors"
	"fmt"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// noWindows is why the library cannot make windows for this communicator, "" if nothing speaks against it.
func (l *library) noWindows() string {
	if err := l.sys.Need(ncclsys.Windows); err != nil {
		return err.Error()
	}
	p := l.sys.Vendor().Prefix()
	for _, f := range l.warned {
		if f.Name == p+"WIN_ENABLE" || f.Name == p+"CUMEM_ENABLE" {
			return f.String()
		}
	}
	return ""
}

// unableWhy is noWindows for all members, and with what was seen.
func (l *library) unableWhy() string {
	if why := l.unable.Load(); why != nil {
		return *why
	}
	return ""
}

// libWindow is a window of the library.
type libWindow struct {
	l *library
	r cuda.Range
	h ncclsys.Window
}

// window makes one, together with all members, which have agreed on it. It is made on a thread of its own: in a capture the capturing thread may not, and
// that thread is the one that would wait for ever. What ctx ends is ended by an abort. nil without error: the communicator has no windows.
func (l *library) window(ctx context.Context, r cuda.Range) (rawWindow, error) {
	l.mu.Lock()
	defer l.unlock()
	if err := l.enter(); err != nil {
		return nil, err
	}
	type outcome struct {
		p   *ncclsys.Pending[ncclsys.Window]
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		var p *ncclsys.Pending[ncclsys.Window]
		err := l.onThread(func() (err error) {
			p, err = l.sys.CommWindowRegister(l.main, ncclsys.DevicePtr(r.Pointer()), r.Len, ncclsys.WindowCollective)
			return err
		})
		l.leave()
		done <- outcome{p, err}
	}()
	var o outcome
	select {
	case o = <-done:
	case <-ctx.Done():
		err := fmt.Errorf("window of %v: the members do not meet in the library: %w", r, context.Cause(ctx))
		l.c.fail(&cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: %v", ErrAborted, l.c.rank, err)}, true, false)
		return nil, err
	case <-l.c.ctx.Done():
		return nil, context.Cause(l.c.ctx)
	}
	if o.err != nil {
		return nil, o.err
	}
	defer o.p.Done()
	if err := l.settle(ctx, l.main, l.c.timeout); err != nil {
		return nil, err
	}
	h := o.p.Handle()
	if h == 0 {
		why := "the library made none: not all members can reach each other's memory directly"
		l.unable.Store(&why)
		return nil, nil
	}
	return &libWindow{l, r, h}, nil
}

func (w *libWindow) user() (uintptr, error) {
	if err := w.l.sys.Need(ncclsys.WindowPointers); err != nil {
		return 0, unsupported(err)
	}
	if err := w.l.enter(); err != nil {
		return 0, err
	}
	defer w.l.leave()
	p, err := w.l.sys.WindowUserPtr(w.l.main, w.h)
	return uintptr(p), result(err)
}

func (w *libWindow) peer(rank int) (uintptr, error) {
	l := w.l
	if rank == l.c.rank {
		return w.r.Pointer(), nil
	}
	if err := l.sys.Need(ncclsys.WindowPointers); err != nil {
		return 0, unsupported(err)
	}
	if err := l.enter(); err != nil {
		return 0, err
	}
	defer l.leave()
	b := l.c.dev.Bind()
	defer b.Release()
	if err := b.Err(); err != nil {
		return 0, err
	}
	team, err := l.sys.TeamLSA(l.main)
	if err = result(err); err != nil {
		return 0, err
	}
	lsa := rank - l.c.rank + int(team.Rank)
	if lsa < 0 || lsa >= int(team.Size) {
		return 0, fmt.Errorf("rank %d is out of reach: %d ranks of the communicator reach each other's memory by load and store", rank, team.Size)
	}
	p, err := l.sys.LSAPtr(w.h, 0, lsa)
	if err = result(err); err != nil {
		return 0, err
	}
	if p == 0 {
		return 0, fmt.Errorf("rank %d: the library has no address for it", rank)
	}
	return uintptr(p), nil
}

func unsupported(err error) error { return &cause{kind: ErrUnsupported, text: err.Error(), err: err} }

func (w *libWindow) close() error {
	l := w.l
	l.mu.Lock()
	defer l.unlock()
	if l.enter() != nil {
		return nil // it ends with the communicator
	}
	defer l.leave()
	b := l.c.dev.Bind()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	err := l.sys.CommWindowDeregister(l.main, w.h)
	return l.finish(err, l.main)
}

// PrepareWindow makes the windows that a captured group in mode Window uses, when all members have agreed on that mode. layouts are by rank. It returns the mode
// that the members really have (Graph where the library has no windows for the group, the same on all) and what ends the windows, for when the graph is gone.
// Each capture has windows of its own, since graphs are closed by each rank when it likes. Collective. For libraries.
func (c *Comm) PrepareWindow(ctx context.Context, group []Call, layouts [][]byte) (mode Mode, release func() error, err error) {
	release = func() error { return nil }
	l, ok := c.be.(*library)
	if !ok {
		return Window, release, nil
	}
	keys, err := windowKeys(group, layouts)
	if err != nil {
		return 0, release, c.errorf("prepare", err)
	}
	if ok, _ := c.WindowSupport(); !ok || keys == nil {
		return Graph, release, nil
	}
	var made []rawWindow
	release = func() error {
		var errs []error
		for _, w := range made {
			errs = append(errs, w.close())
		}
		made = nil
		return errors.Join(errs...)
	}
	for _, k := range keys {
		if !c.newWindow(k.ids) {
			continue
		}
		w, err := l.window(ctx, cuda.Range{Mem: k.mem, Len: k.mem.Size()})
		if err != nil {
			return 0, release, c.errorf("prepare", err)
		}
		if w == nil {
			return Graph, release, nil
		}
		made = append(made, w)
	}
	return Window, release, nil
}

// newWindow notes a window of the lease's capture; false if it has it.
func (c *Comm) newWindow(ids string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paned[ids] {
		return false
	}
	if c.paned == nil {
		c.paned = map[string]bool{}
	}
	c.paned[ids] = true
	return true
}

// windowed is memory that wants a window.
type windowed struct {
	ids string // the allocations of all members: the same on all of them
	mem *cuda.Memory
}

// windowKeys is which windows a group wants, in an order that is the same on all members; nil where it wants none: the library uses windows for what has
// buffers on all members, and wants them of equal size.
func windowKeys(group []Call, layouts [][]byte) ([]windowed, error) {
	decoded := make([][]layoutCall, len(layouts))
	for r, b := range layouts {
		var err error
		if decoded[r], err = decodeLayout(b); err != nil {
			return nil, fmt.Errorf("rank %d: %w", r, err)
		}
		if len(decoded[r]) != len(group) {
			return nil, fmt.Errorf("rank %d: layout of %d calls, want %d", r, len(decoded[r]), len(group))
		}
	}
	var keys []windowed
	for i, call := range group {
		if call.Op != OpAllReduce && call.Op != OpAllGather && call.Op != OpReduceScatter {
			return nil, nil
		}
		if call.Count == 0 {
			continue
		}
		for _, send := range []bool{true, false} {
			k := windowed{mem: call.Recv.Mem}
			if send {
				k.mem = call.Send.Mem
			}
			for _, calls := range decoded {
				buf := calls[i].buffer(send)
				if buf == nil || buf.memLen != k.mem.Size() {
					return nil, nil
				}
				k.ids += fmt.Sprintf("%d ", buf.memory)
			}
			keys = append(keys, k)
		}
	}
	return keys, nil
}

func (c *layoutCall) buffer(send bool) *layoutBuf {
	for i := range c.buffers {
		if c.buffers[i].flags&layoutSend != 0 == send {
			return &c.buffers[i]
		}
	}
	return nil
}
