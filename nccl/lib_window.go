package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

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

// close is called on all members in one order. Where they end otherwise, the window ends with the communicator.
func (w *libWindow) close() error {
	l := w.l
	l.c.mu.Lock()
	ending := l.c.closing
	l.c.mu.Unlock()
	if ending && !l.together {
		return nil
	}
	l.mu.Lock()
	defer l.unlock()
	if l.enter() != nil {
		return nil // it ends with the communicator
	}
	defer l.leave()
	// As at its making: this thread may be capturing.
	if err := l.onThread(func() error { return l.sys.CommWindowDeregister(l.main, w.h) }); err != nil {
		return err
	}
	return l.settle(context.Background(), l.main, l.c.timeout)
}

// pane is a window that captured calls have demanded. It stays until no member's graphs use it, which the members find when the next one is
// demanded, or until the communicator's end: the library's windows come and go in one order on all members, or addresses are no longer the same.
type pane struct {
	ids   string // allocations on all members
	mem   *cuda.Memory
	raw   rawWindow
	hold  *cuda.Hold
	users int // graphs of this rank; guarded by Comm.mu
}

// PrepareWindow finds whether a captured group runs in windows, when all members could have them: layouts are by rank. It does where the program has made
// windows of the buffers (Comm.Window), and with demand, which is equal on all members, makes those that are missing. It returns the mode that the
// members have, Window or Graph, and what the graph calls when it is gone. Collective. For libraries.
func (c *Comm) PrepareWindow(ctx context.Context, group []Call, layouts [][]byte, demand bool) (mode Mode, release func(), err error) {
	release = func() {}
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
	if demand {
		if err := l.closeDead(ctx); err != nil {
			return 0, release, c.errorf("prepare", err)
		}
	}
	var used []*pane
	for _, k := range keys {
		if c.covers(k) {
			continue
		}
		i := slices.IndexFunc(l.panes, func(p *pane) bool { return p.ids == k.ids })
		if i < 0 {
			if !demand {
				return Graph, release, nil
			}
			p, err := l.newPane(ctx, k)
			if err != nil {
				return 0, release, c.errorf("prepare", err)
			}
			if p == nil {
				return Graph, release, nil
			}
			i = len(l.panes)
			l.panes = append(l.panes, p)
		}
		used = append(used, l.panes[i])
	}
	count := func(n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, p := range used {
			p.users += n
		}
	}
	count(1)
	return Window, sync.OnceFunc(func() { count(-1) }), nil
}

// covers reports whether the program's windows have the buffers of all members.
func (c *Comm) covers(k windowed) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.windows, func(w *SymmetricWindow) bool {
		for r, p := range w.parts {
			if b := k.parts[r]; b.memory != p.memory || b.off < p.off || b.off+b.len > p.off+p.len {
				return false
			}
		}
		return true
	})
}

func (l *library) newPane(ctx context.Context, k windowed) (*pane, error) {
	hold, err := k.mem.Hold("window of communicator "+l.c.name, false)
	if err != nil {
		return nil, err
	}
	raw, err := l.window(ctx, cuda.Range{Mem: k.mem, Len: k.mem.Size()})
	if err != nil || raw == nil {
		hold.Release()
		return nil, err
	}
	return &pane{ids: k.ids, mem: k.mem, raw: raw, hold: hold}, nil
}

// closeDead ends the windows that no member's graphs use any more.
func (l *library) closeDead(ctx context.Context) error {
	c := l.c
	if len(l.panes) == 0 {
		return nil // the same on all members
	}
	own := make([]byte, len(l.panes))
	c.mu.Lock()
	for i, p := range l.panes {
		if p.users > 0 {
			own[i] = 1
		}
	}
	c.mu.Unlock()
	all, err := c.Meet(ctx, own, "windows in use")
	if err != nil {
		return err
	}
	var left, dead []*pane
	for i, p := range l.panes {
		used := false
		for r, b := range all {
			if len(b) != len(own) {
				return fmt.Errorf("rank %d has %d windows, this rank %d", r, len(b), len(own))
			}
			used = used || b[i] != 0
		}
		if used {
			left = append(left, p)
		} else {
			dead = append(dead, p)
		}
	}
	l.panes = left
	var errs []error
	for _, p := range dead {
		errs = append(errs, p.raw.close())
		p.hold.Release()
	}
	return errors.Join(errs...)
}

// closePanes follows the communicator's end.
func (l *library) closePanes() {
	for _, p := range l.panes {
		p.raw.close()
		l.c.letGo(p.hold)
	}
	l.panes = nil
}

// windowed is memory that wants a window.
type windowed struct {
	ids   string // the allocations of all members: the same on all of them
	parts []layoutBuf
	mem   *cuda.Memory
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
		if !symmetric(call.Op) {
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
				k.parts = append(k.parts, *buf)
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
