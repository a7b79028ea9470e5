package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

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
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var alone time.Time // since when a member that could not make its own is known
	for back := false; !back; {
		select {
		case o = <-done:
			back = true
		case <-tick.C:
			who := slices.IndexFunc(l.c.peers, func(p peer) bool { return p.acct.Busy() == windowFailed })
			switch {
			case who < 0:
				alone = time.Time{}
			case alone.IsZero():
				alone = time.Now()
			case time.Since(alone) > windowPatience:
				return nil, l.windowGivenUp(r, fmt.Errorf("rank %d could not make its own", who))
			}
		case <-ctx.Done():
			return nil, l.windowGivenUp(r, context.Cause(ctx))
		case <-l.c.ctx.Done():
			return nil, context.Cause(l.c.ctx)
		}
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

// windowPatience is how long a member stays in the making of a window after another's could not be made: the library may have let it go on.
const windowPatience = 2 * time.Second

// windowGivenUp ends the communicator where a thread is left in the library.
func (l *library) windowGivenUp(r cuda.Range, why error) error {
	err := fmt.Errorf("window of %v: the members do not meet in the library: %w", r, why)
	l.c.fail(&cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: %v", ErrAborted, l.c.rank, err)}, true, false)
	return err
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

// pane is a window that captured calls have got. It stays until no member needs it (see idle), which they find when the next call is captured, or until the
// communicator's end: the library's windows come and go in one order on all members, or addresses are no longer the same.
type pane struct {
	ids     string // allocations on all members
	mem     *cuda.Memory
	raw     rawWindow
	hold    *cuda.Hold
	unasked bool // made without a demand: for all later calls, too, until its memory is freed
	users   int  // graphs of this rank; guarded by Comm.mu
}

// idle reports whether this rank does without the window, when others are made by demand, or not. Comm.mu is held.
func (p *pane) idle(demand bool) bool { return p.users == 0 && (demand && !p.unasked || p.mem.Freed()) }

// WindowWish is which windows a capture makes beside those that the program has made (Comm.Window).
type WindowWish uint8

const (
	WindowNever    WindowWish = iota // none
	WindowAuto                       // in memory so small that every call in it is faster with one, as far as that was measured
	WindowDemanded                   // of whatever the calls use
)

// PrepareWindow finds whether a captured group runs in windows, when all members could have them: layouts are by rank. It does where there are windows of the
// buffers, made by the program or for earlier calls, and makes missing ones as wish, which is equal on all members, says. It returns the mode that the members have,
// Window or Graph, why, and what the graph calls when it is gone. Collective. For libraries.
func (c *Comm) PrepareWindow(ctx context.Context, group []Call, layouts [][]byte, wish WindowWish) (mode Mode, why string, release func(), err error) {
	l, ok := c.be.(*library)
	if !ok {
		return Window, "", func() {}, nil
	}
	keys, whole, err := windowKeys(group, layouts)
	if err != nil {
		return 0, "", func() {}, c.errorf("prepare", err)
	}
	var used []*pane // also where the group as a whole does not: the library does not ask
	var missing []windowed
	asked := true
	for _, k := range keys {
		if c.covers(k) {
			continue
		}
		if i := slices.IndexFunc(l.panes, func(p *pane) bool { return p.ids == k.ids }); i >= 0 {
			used = append(used, l.panes[i])
			asked = asked && !l.panes[i].unasked
		} else if !slices.ContainsFunc(missing, func(m windowed) bool { return m.ids == k.ids }) {
			missing = append(missing, k)
		}
	}
	why = l.without(missing, whole, wish)
	if why == "" && len(missing) > 0 {
		made, lack, err := l.newPanes(ctx, missing, wish == WindowAuto)
		if err != nil {
			return 0, "", func() {}, c.errorf("prepare", err)
		}
		used = append(used, made...)
		asked = asked && wish == WindowDemanded
		why = lack
	}
	mode = Graph
	if why == "" {
		mode, why = Window, "the program made or demanded it"
		if !asked {
			why = fmt.Sprintf("in memory of up to %s it is faster in all calls", bytesText(windowLimit(len(c.ranks))))
		}
	}
	count := func(n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		for _, p := range used {
			p.users += n
		}
	}
	count(1)
	return mode, why, sync.OnceFunc(func() { count(-1) }), nil
}

// without says why the calls have no windows: those that are missing are not to be made, or cannot be. "": they have, or will have.
func (l *library) without(missing []windowed, whole bool, wish WindowWish) string {
	switch why := l.unableWhy(); {
	case why != "":
		return why
	case !whole:
		return "the library uses none for such calls, or the members' memory differs in size"
	case len(missing) > 0 && wish == WindowNever:
		return "the program made none of these buffers (Comm.Window)"
	}
	if wish == WindowAuto {
		for _, k := range missing {
			if why := unasked(len(l.c.ranks), k.mem.Size()); why != "" {
				return why
			}
		}
	}
	return ""
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

// newPanes makes windows, on all members or none: lack says, with the same text on all, why there are none.
func (l *library) newPanes(ctx context.Context, keys []windowed, unasked bool) (made []*pane, lack string, err error) {
	var failed, why error    // why: it did not follow from the communicator's failure
	for _, k := range keys { // all of them, also after one that failed here: the others wait in the library
		p, err := l.newPane(ctx, k)
		switch {
		case err != nil && failed == nil:
			failed = err
			if l.c.failed.Load() == nil {
				why = err
			}
		case p != nil:
			p.unasked = unasked
			made = append(made, p)
		}
	}
	own := []byte{}
	switch {
	case failed != nil:
		own = append(own, failed.Error()...)
	case len(made) < len(keys):
		own = append(own, l.unableWhy()...)
	}
	what := "windows of a captured call"
	if failed != nil {
		what = windowFailed
	}
	all, meetErr := l.c.Meet(ctx, own, what)
	if meetErr != nil {
		// The end of the capture, or of the communicator, on all members alike: nobody uses the windows, and they end with the communicator.
		l.keepPanes(&l.strays, made)
		return nil, "", errors.Join(why, meetErr)
	}
	for r, b := range all {
		if lack == "" && len(b) > 0 {
			lack = fmt.Sprintf("rank %d: %s", r, b)
		}
	}
	if lack == "" {
		l.keepPanes(&l.panes, made)
		return made, "", nil
	}
	for _, p := range made {
		if l.c.failed.Load() == nil { // else the abort ends it
			p.raw.close()
		}
		l.c.letGo(p.hold)
	}
	if unasked && l.unable.Load() == nil {
		l.unable.Store(&lack) // the next try would end as this one
	}
	return nil, lack, nil
}

// keepPanes has the end of the communicator end them, or where that has been lets go of their memory.
func (l *library) keepPanes(list *[]*pane, made []*pane) {
	l.c.mu.Lock()
	closed := l.c.closed
	if !closed {
		*list = append(*list, made...)
	}
	l.c.mu.Unlock()
	if closed {
		for _, p := range made {
			l.c.letGo(p.hold)
		}
	}
}

func (l *library) newPane(ctx context.Context, k windowed) (*pane, error) {
	hold, err := k.mem.Hold("window of communicator "+l.c.name, false)
	if err != nil {
		return nil, err
	}
	raw, err := l.window(ctx, cuda.Range{Mem: k.mem, Len: k.mem.Size()})
	if err != nil || raw == nil {
		l.c.letGo(hold)
		return nil, err
	}
	return &pane{ids: k.ids, mem: k.mem, raw: raw, hold: hold}, nil
}

// IdleWindows says, one byte each, which of the windows that captures have made this rank does without: those of freed memory that no graph uses, and with demand, where
// the call that is captured demands windows, those that earlier ones had demanded. Members exchange it with the description of a captured call; DropWindows of what
// all have said follows. For libraries.
func (c *Comm) IdleWindows(demand bool) []byte {
	l, ok := c.be.(*library)
	if !ok || len(l.panes) == 0 {
		return nil
	}
	idle := make([]byte, len(l.panes))
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, p := range l.panes {
		if p.idle(demand) {
			idle[i] = 1
		}
	}
	return idle
}

// DropWindows ends the windows that no member needs. idle is by rank. Collective. For libraries.
func (c *Comm) DropWindows(idle [][]byte) error {
	l, ok := c.be.(*library)
	if !ok {
		return nil
	}
	for r, b := range idle {
		if len(b) != len(l.panes) {
			return c.errorf("drop windows", fmt.Errorf("rank %d has %d windows, this rank %d", r, len(b), len(l.panes)))
		}
	}
	var left, dead []*pane
	for i, p := range l.panes {
		if slices.ContainsFunc(idle, func(b []byte) bool { return b[i] == 0 }) {
			left = append(left, p)
		} else {
			dead = append(dead, p)
		}
	}
	if len(dead) == 0 {
		return nil
	}
	c.mu.Lock()
	l.panes = left
	c.mu.Unlock()
	var errs []error
	for _, p := range dead {
		errs = append(errs, p.raw.close())
		l.c.letGo(p.hold)
	}
	if err := errors.Join(errs...); err != nil {
		return c.errorf("drop windows", err)
	}
	return nil
}

// closePanes follows the communicator's end.
func (l *library) closePanes() {
	l.c.mu.Lock()
	panes, strays := l.panes, l.strays
	l.panes, l.strays = nil, nil
	l.c.mu.Unlock()
	for _, p := range panes {
		p.raw.close()
		l.c.letGo(p.hold)
	}
	for _, p := range strays {
		l.c.letGo(p.hold)
	}
}

// windowStats counts the windows that captures have made, and those of them whose memory the program has freed. Comm.mu is held.
func (l *library) windowStats() (made, pending int) {
	for _, p := range l.panes {
		if p.mem.Freed() {
			pending++
		}
	}
	return len(l.panes), pending
}

// windowed is memory that wants a window.
type windowed struct {
	ids   string // the allocations of all members: the same on all of them
	parts []layoutBuf
	mem   *cuda.Memory
}

// windowKeys is which windows a group wants, in an order that is the same on all members. whole: all of its calls could run in windows. The library uses them for
// what has buffers on all members, and wants them of equal size.
func windowKeys(group []Call, layouts [][]byte) (keys []windowed, whole bool, err error) {
	decoded := make([][]layoutCall, len(layouts))
	for r, b := range layouts {
		if decoded[r], err = decodeLayout(b); err != nil {
			return nil, false, fmt.Errorf("rank %d: %w", r, err)
		}
		if len(decoded[r]) != len(group) {
			return nil, false, fmt.Errorf("rank %d: layout of %d calls, want %d", r, len(decoded[r]), len(group))
		}
	}
	whole = true
	for i, call := range group {
		if call.Count == 0 {
			continue
		}
		if !symmetric(call.Op) {
			whole = false
			continue
		}
		for _, send := range []bool{true, false} {
			k, ok := windowKey(call, decoded, i, send)
			if ok {
				keys = append(keys, k)
			}
			whole = whole && ok
		}
	}
	return keys, whole, nil
}

// windowKey is the window that one buffer of call i wants, if it can have one.
func windowKey(call Call, decoded [][]layoutCall, i int, send bool) (k windowed, ok bool) {
	k.mem = call.Recv.Mem
	if send {
		k.mem = call.Send.Mem
	}
	for _, calls := range decoded {
		buf := calls[i].buffer(send)
		if buf == nil || buf.memLen != k.mem.Size() {
			return k, false
		}
		k.ids += fmt.Sprintf("%d ", buf.memory)
		k.parts = append(k.parts, *buf)
	}
	return k, true
}

func (c *layoutCall) buffer(send bool) *layoutBuf {
	for i := range c.buffers {
		if c.buffers[i].flags&layoutSend != 0 == send {
			return &c.buffers[i]
		}
	}
	return nil
}
