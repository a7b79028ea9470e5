package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/cuda"
)

// SymmetricWindow is a range of memory that every member can reach by load and store at an address of its own (NCCL's symmetric window). The nil SymmetricWindow, which a
// platform without the ability gives, has no addresses.
type SymmetricWindow struct {
	c      *Comm
	r      cuda.Range
	parts  []windowOffer // of all members
	hold   *cuda.Hold
	raw    rawWindow
	closed bool // guarded by Comm.mu
}

// rawWindow is the backend's part.
type rawWindow interface {
	// peer is the range's address in a member's memory as this rank's device sees it.
	peer(rank int) (uintptr, error)
	// user is the address that the backend has for the window.
	user() (uintptr, error)
	close() error
}

// ErrNoWindow is an address asked of the nil SymmetricWindow.
var ErrNoWindow = errors.New("no window: the communicator has none (WindowSupport tells why)")

// windowAlign is what NCCL asks of a window's address in its allocation.
const windowAlign = 4096

// WindowSupport reports whether the communicator can have windows, and if not why. It knows what can be told without trying.
func (c *Comm) WindowSupport() (ok bool, why string) {
	if c == nil {
		return false, errNoComm.text
	}
	switch be := c.be.(type) {
	case *library:
		why = be.unableWhy()
	case *host:
		why = c.Staged()
	}
	return why == "", why
}

// Window makes a window of a range of Shareable memory that begins at a multiple of 4096 bytes. Collective: all members give ranges of equal length at
// the same offset from the head of their allocations, and wait for each other at most as long as ctx. Where a member's platform has no windows all get nil
// and no error. Where a library fails on one member and leaves the others in it, they are let out and the communicator has failed.
// The memory is kept until Close. Addresses stay the same until then; who writes through them orders that with the owner.
func (c *Comm) Window(ctx context.Context, r cuda.Range) (*SymmetricWindow, error) {
	w, err := c.window(ctx, r)
	if err != nil {
		return nil, c.errorf("window", err)
	}
	return w, nil
}

// windowOffer is what members tell each other about their part: the range, and what keeps it from being a window.
type windowOffer struct {
	off, len, memory uint64
	unable           bool   // no ability; text says why
	failed           bool   // it could not be made ready; text says why
	text             string // else what is wrong with the range
	err              error  // with failed: this rank's own, which is not told
}

func (o windowOffer) encode() []byte {
	b := []byte{0}
	switch {
	case o.unable:
		b[0] = 1
	case o.failed:
		b[0] = 2
	}
	for _, w := range []uint64{o.off, o.len, o.memory} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return append(b, o.text...)
}

func decodeWindowOffer(b []byte) (o windowOffer, err error) {
	if len(b) < 25 || b[0] > 2 {
		return o, fmt.Errorf("window: message of %d bytes", len(b))
	}
	o.unable, o.failed = b[0] == 1, b[0] == 2
	for i, w := range []*uint64{&o.off, &o.len, &o.memory} {
		*w = binary.LittleEndian.Uint64(b[1+8*i:])
	}
	o.text = string(b[25:])
	return o, nil
}

// agreeWindow compares the members' parts. able is false where one has no ability.
func agreeWindow(offers []windowOffer) (able bool, err error) {
	able = true
	for r, o := range offers {
		if o.failed && o.err != nil {
			return false, fmt.Errorf("rank %d: %w", r, o.err)
		}
		if o.failed {
			return false, fmt.Errorf("rank %d: %s", r, o.text)
		}
		if o.text != "" && !o.unable {
			return false, causef(ErrArgument, "rank %d: %s", r, o.text)
		}
		able = able && !o.unable
	}
	for r, o := range offers[1:] {
		if o.off != offers[0].off || o.len != offers[0].len {
			return false, causef(ErrMismatch, "rank %d: %d bytes at offset %d of their allocation; rank 0: %d bytes at offset %d", r+1, o.len, o.off, offers[0].len, offers[0].off)
		}
	}
	return able, nil
}

func (c *Comm) window(ctx context.Context, r cuda.Range) (*SymmetricWindow, error) {
	if err := c.usable(); err != nil {
		return nil, err
	}
	own := windowOffer{off: r.Off, len: r.Len}
	w := &SymmetricWindow{c: c, r: r}
	if err := c.windowRange(r); err != nil {
		own.text = err.Error()
	} else if ok, why := c.WindowSupport(); !ok {
		own.unable, own.text = true, why
	} else if err := w.ready(); err != nil { // before the others rely on it
		own.failed, own.text, own.err = true, err.Error(), err
	}
	if r.Mem != nil {
		own.memory = r.Mem.ID()
	}
	able, err := w.make(ctx, own)
	if err != nil || !able {
		return nil, errors.Join(err, w.give())
	}
	c.mu.Lock()
	c.windows = append(c.windows, w)
	c.mu.Unlock()
	return w, nil
}

// windowFailed is the meeting that a member comes to which could not make its window: where the library leaves the others in the making of theirs, it tells them.
const windowFailed = "the end of a window that could not be made"

// make meets the others, and makes the window with them: on all, or none. able is false where a member has no windows.
func (w *SymmetricWindow) make(ctx context.Context, own windowOffer) (able bool, err error) {
	c := w.c
	what := fmt.Sprintf("window of %v", w.r)
	all, err := c.meetInOrder(ctx, own.encode(), what)
	if err != nil {
		return false, err
	}
	w.parts = make([]windowOffer, len(all))
	for i, b := range all {
		if w.parts[i], err = decodeWindowOffer(b); err != nil {
			return false, fmt.Errorf("rank %d: %w", i, err)
		}
	}
	w.parts[c.rank].err = own.err
	if able, err = agreeWindow(w.parts); err != nil || !able {
		return false, err
	}
	err = w.open(ctx)
	text := []byte{0}
	if err != nil {
		text = append([]byte{1}, err.Error()...)
		what = windowFailed
	} else if w.raw == nil {
		text[0] = 2 // no ability after all
	}
	all, meetErr := c.Meet(ctx, text, what)
	if err == nil {
		err = meetErr
	}
	for i, b := range all {
		if err == nil && len(b) > 0 && b[0] == 1 {
			err = fmt.Errorf("rank %d: %s", i, b[1:])
		}
		able = able && len(b) > 0 && b[0] == 0
	}
	return able, err
}

// windowRange says what is wrong with a range, before a library that would hang sees it.
func (c *Comm) windowRange(r cuda.Range) error {
	switch {
	case r.Mem == nil || r.Len == 0:
		return errors.New("an empty range")
	case r.Mem.Device() != c.dev:
		return fmt.Errorf("%v is of another device than the communicator", r)
	case r.Mem.Freed():
		return fmt.Errorf("%v: the memory was freed", r)
	case r.Mem.Kind() != cuda.Shareable:
		return fmt.Errorf("%v is private memory (cuda.Malloc); allocate it with nccl.Alloc", r)
	case r.Off%windowAlign != 0:
		return fmt.Errorf("%v begins at no multiple of %d bytes", r, windowAlign)
	}
	return r.Qualifies()
}

// ready makes what this rank has for itself.
func (w *SymmetricWindow) ready() (err error) {
	if w.hold, err = w.r.Mem.Hold("window of communicator "+w.c.name, false); err != nil {
		return err
	}
	if h, ok := w.c.be.(*host); ok {
		hw, err := h.newWindow(w.r)
		if err != nil {
			return err
		}
		w.raw = hw
	}
	return nil
}

// open makes the rest, with the others.
func (w *SymmetricWindow) open(ctx context.Context) (err error) {
	switch be := w.c.be.(type) {
	case *library:
		w.raw, err = be.window(ctx, w.r)
	case *host:
		err = w.raw.(*hostWindow).open(ctx, w.parts)
	default:
		w.raw = soleWindow{w.r}
	}
	return err
}

// give lets go of what open has made.
func (w *SymmetricWindow) give() error {
	var err error
	if w.raw != nil {
		err = w.raw.close()
		w.raw = nil
	}
	if w.hold != nil {
		w.c.letGo(w.hold)
	}
	return err
}

// letGo releases memory that the library may still know: where the communicator ends, not before it has.
func (c *Comm) letGo(hold *cuda.Hold) {
	c.mu.Lock()
	ending := c.closing || c.failed.Load() != nil
	c.mu.Unlock()
	if l, ok := c.be.(*library); ok && ending && l.keep(hold) {
		return
	}
	releaseHolds(hold)
}

// Range is what the window is of.
func (w *SymmetricWindow) Range() cuda.Range {
	if w == nil {
		return cuda.Range{}
	}
	return w.r
}

// UserPtr is the device address of this rank's own part, 0 of the nil SymmetricWindow.
func (w *SymmetricWindow) UserPtr() uintptr {
	if w == nil {
		return 0
	}
	return w.r.Pointer()
}

// CheckUserPtr asks the library for the address that it has for the window, and compares it with UserPtr. ErrUnsupported where the library's version does
// not tell it.
func (w *SymmetricWindow) CheckUserPtr() error {
	if w == nil {
		return ErrNoWindow
	}
	c := w.c
	c.mu.Lock()
	closed := w.closed
	c.mu.Unlock()
	if closed {
		return c.errorf("window", errors.New("it is closed"))
	}
	p, err := w.raw.user()
	if err == nil && p != w.r.Pointer() {
		err = fmt.Errorf("the library has it at %#x, it was made of %v at %#x", p, w.r, w.r.Pointer())
	}
	if err != nil {
		return c.errorf("window", err)
	}
	return nil
}

// LSADevicePtr is the address of a member's part as this rank's device sees it: it may be read and written by kernels (on the host platform by
// the process) until Close. ErrUnsupported where the library's version does not tell addresses; another error where the member is out of reach of loads
// and stores.
func (w *SymmetricWindow) LSADevicePtr(rank int) (uintptr, error) {
	if w == nil {
		return 0, ErrNoWindow
	}
	c := w.c
	if rank < 0 || rank >= len(c.ranks) {
		return 0, c.errorf("window", causef(ErrArgument, "rank %d is no rank of a communicator of %d", rank, len(c.ranks)))
	}
	c.mu.Lock()
	closed := w.closed
	c.mu.Unlock()
	if closed {
		return 0, c.errorf("window", errors.New("it is closed"))
	}
	p, err := w.raw.peer(rank)
	if err != nil {
		return 0, c.errorf("window", err)
	}
	return p, nil
}

// windowCloseWait bounds the wait of a window's Close for the other members: it stands in defers.
const windowCloseWait = 2 * time.Second

// Close ends the window: nobody may use its addresses any more. Collective, since the libraries want windows to come and go in one order on all members; it
// waits for them as long as ctx, at most 2 s. It is an error on all, and the window stays, while a graph of a member uses the memory or operations are enqueued
// there. A window that its members do not close together ends with the communicator. Twice is fine, also after the communicator's Close, and of the nil
// SymmetricWindow.
func (w *SymmetricWindow) Close(ctx context.Context) error {
	if w == nil {
		return nil
	}
	c := w.c
	c.mu.Lock()
	over := w.closed
	c.mu.Unlock()
	if over {
		return nil
	}
	if c.failed.Load() == nil && len(c.ranks) > 1 {
		if err := w.leave(ctx); err != nil {
			return c.errorf("close window", err)
		}
	}
	c.mu.Lock()
	if w.closed {
		c.mu.Unlock()
		return nil
	}
	w.closed = true
	c.windows = slices.DeleteFunc(c.windows, func(o *SymmetricWindow) bool { return o == w })
	c.mu.Unlock()
	if err := w.give(); err != nil {
		return c.errorf("close window", err)
	}
	return nil
}

// leave agrees with the members that the window may go.
func (w *SymmetricWindow) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, windowCloseWait)
	defer cancel()
	w.c.awaitReleases(ctx)
	own := fmt.Appendf(nil, "%d %d %d\n%s", w.r.Off, w.r.Len, w.parts[0].memory, w.busy())
	all, err := w.c.Meet(ctx, own, fmt.Sprintf("close of the window of %v", w.r))
	if err != nil {
		return err
	}
	id, _, _ := strings.Cut(string(own), "\n")
	for r, b := range all {
		other, text, _ := strings.Cut(string(b), "\n")
		if other != id {
			return causef(ErrMismatch, "rank %d closes another window", r)
		}
		if text != "" {
			return fmt.Errorf("rank %d: %s", r, text)
		}
	}
	return nil
}

// busy says what uses the window on this rank. Without it a graph would touch addresses that are not there: the device would be lost.
func (w *SymmetricWindow) busy() string {
	l, ok := w.c.be.(*library)
	if !ok {
		return ""
	}
	w.c.mu.Lock()
	reg := w.c.regs[w.r.Mem.ID()]
	graph := reg != nil && reg.graph > 0
	w.c.mu.Unlock()
	if graph {
		return fmt.Sprintf("%v is in use by %s", w.r.Mem, joinNames(w.r.Mem.Holders()))
	}
	if n := l.outstanding(); n > 0 {
		return fmt.Sprintf("%d enqueued operations may use it; synchronize first", n)
	}
	return ""
}

// closeWindows follows the communicator's end, before the backend's.
func (c *Comm) closeWindows() {
	c.mu.Lock()
	list := c.windows
	c.windows = nil
	for _, w := range list {
		w.closed = true
	}
	c.mu.Unlock()
	for _, w := range list {
		w.give() // the backend's end gives back what this cannot
	}
	if l, ok := c.be.(*library); ok {
		l.closePanes()
	}
}

// soleWindow is that of a communicator of one.
type soleWindow struct{ r cuda.Range }

func (s soleWindow) peer(int) (uintptr, error) { return s.r.Pointer(), nil }
func (s soleWindow) user() (uintptr, error)    { return s.r.Pointer(), nil }
func (s soleWindow) close() error              { return nil }

// hostWindow is the members' memory, mapped.
type hostWindow struct {
	h    *host
	r    cuda.Range
	reg  *Registration
	maps []*cuda.PeerMemory // nil for this rank
}

// newWindow registers this rank's memory, as a graph's: eager calls do not see it. Who has met can rely on everyone's being there to be mapped.
func (h *host) newWindow(r cuda.Range) (*hostWindow, error) {
	reg, err := h.c.RegisterGraph(r.Mem)
	if err != nil {
		return nil, err
	}
	return &hostWindow{h: h, r: r, reg: reg, maps: make([]*cuda.PeerMemory, h.n)}, nil
}

func (w *hostWindow) open(ctx context.Context, offers []windowOffer) error {
	h := w.h
	for rank, o := range offers {
		if rank == h.rank {
			continue
		}
		pm, err := importMemory(ctx, h.c, rank, h.c.memoryKey(o.memory))
		if err == nil && uint64(len(pm.Bytes())) < o.off+o.len {
			err = errors.Join(fmt.Errorf("%d bytes, its window ends at %d", len(pm.Bytes()), o.off+o.len), pm.Close())
		}
		if err != nil {
			return fmt.Errorf("map allocation %d of rank %d: %w", o.memory, rank, err)
		}
		w.maps[rank] = pm
		h.peers.count.Add(1)
	}
	return nil
}

func (w *hostWindow) user() (uintptr, error) { return w.r.Pointer(), nil }

func (w *hostWindow) peer(rank int) (uintptr, error) {
	if rank == w.h.rank {
		return w.r.Pointer(), nil
	}
	return w.maps[rank].Pointer() + uintptr(w.r.Off), nil
}

func (w *hostWindow) close() error {
	var errs []error
	for _, pm := range w.maps {
		if pm != nil {
			errs = append(errs, pm.Close())
			w.h.peers.count.Add(-1)
		}
	}
	return errors.Join(append(errs, w.reg.Close())...)
}
