package cuda

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// driverStream is a non-blocking stream of the driver.
//
// Each operation that something else refers to (an event, a copy to Go memory) has a position in the stream, a count. When the stream is
// known to have come to a position, the copies to Go memory before it are landed: see driver_copy.go.
//
// Lock order: mu, then anything else. mu is held over calls of the driver that enqueue, and those may block when the queue is full; so nothing
// that helps the stream to go on (a host function, a wait) takes it.
type driverStream struct {
	g  *driverDevice
	id uint64
	h  cusys.Stream

	mu     sync.Mutex  // guards the order of what is enqueued
	closed atomic.Bool // changes under mu

	use sync.RWMutex // the driver is asked about the handle; taken in between by close, after closed is set

	position atomic.Uint64 // changes under mu
	cap      atomic.Pointer[driverCapture]
	failure  atomic.Pointer[error] // sticky

	tmu       sync.Mutex      // guards what follows
	transfers []transfer      // under way, in order
	upstream  []upstream      // copies of other streams that are done when this stream has come to a position
	sources   []*driverStream // that this stream waits for, and fails with

	watches sharedList[*driverWatch]
	leaving sharedList[*func()]
}

type driverWatch struct {
	check func(seen uint64, done bool) (now uint64, err error)
	doing func() string // may be nil
}

// looks are what those who watch a stream said before the driver was asked; a wait has its own. A value, so that no wait allocates.
type looks struct {
	few  [2]look // most streams have one or two who watch
	more []look
}

type look struct {
	w    *driverWatch
	seen uint64
}

// of is what w said; 0 of one that has come since.
func (l *looks) of(w *driverWatch) uint64 {
	for i := range l.few {
		if l.few[i].w == w {
			return l.few[i].seen
		}
	}
	for i := range l.more {
		if l.more[i].w == w {
			return l.more[i].seen
		}
	}
	return 0
}

func (l *looks) set(w *driverWatch, seen uint64) {
	for i := range l.few {
		if l.few[i].w == w || l.few[i].w == nil {
			l.few[i] = look{w, seen}
			return
		}
	}
	for i := range l.more {
		if l.more[i].w == w {
			l.more[i].seen = seen
			return
		}
	}
	l.more = append(l.more, look{w, seen})
}

// upstream is a position of another stream that this one waits for, at a position of its own, with copies to Go memory before it.
type upstream struct {
	at       uint64
	s        *driverStream
	position uint64
}

func (g *driverDevice) newStream(id uint64) (platformStream, error) {
	in, err := g.enter(true)
	if err != nil {
		return nil, err
	}
	defer in.leave()
	h, err := g.drv.StreamCreate(cusys.StreamNonBlocking)
	if err != nil {
		return nil, g.cause(err)
	}
	s := &driverStream{g: g, id: id, h: h}
	g.smu.Lock()
	g.streams[s] = struct{}{}
	g.smu.Unlock()
	return s, nil
}

func (s *driverStream) handle() uintptr { return uintptr(s.h) }

func (s *driverStream) String() string { return fmt.Sprintf("stream %d", s.id) }

// usable says why nothing can be done with the stream any more.
func (s *driverStream) usable(op string) error {
	var err error
	switch f := s.failure.Load(); {
	case s.closed.Load():
		err = ErrClosed
	case f != nil:
		err = *f
	default:
		err = s.g.dev.Err()
	}
	if err != nil {
		return &Error{Op: op, Detail: s.String(), Err: err}
	}
	return nil
}

// enqueueLocked makes driver calls with the device bound; mu, which keeps the order, is held. A capture that they fail in remembers the first failure as its cause.
func (s *driverStream) enqueueLocked(op string, calls func() error) error {
	if err := s.usable(op); err != nil {
		return err
	}
	in, err := s.g.enter(s.cap.Load() == nil)
	if err == nil {
		err = s.g.cause(calls())
		in.leave()
	}
	if err == nil {
		return nil
	}
	e := &Error{Op: op, Detail: s.String(), Err: err}
	if c := s.cap.Load(); c != nil {
		c.note(e)
	}
	return e
}

func (s *driverStream) submit(Task) error {
	return &Error{Op: "submit", Detail: s.String(), Err: fmt.Errorf("tasks run on the host platform, this is a %s", s.g)}
}

func (s *driverStream) watch(check func(seen uint64, done bool) (uint64, error), doing func() string) (remove func()) {
	w := &driverWatch{check, doing}
	s.watches.add(w)
	return func() { s.watches.remove(w) }
}

func (s *driverStream) beforeLeaving(f func()) (remove func()) {
	s.leaving.add(&f)
	return func() { s.leaving.remove(&f) }
}

// leaves tells those who use the stream that it is about to be closed, or to capture. No lock is held.
func (s *driverStream) leaves() {
	if s.closed.Load() || s.cap.Load() != nil {
		return
	}
	for _, f := range s.leaving.all() {
		(*f)()
	}
}

func (s *driverStream) ready() (bool, error) {
	s.use.RLock()
	defer s.use.RUnlock()
	if s.closed.Load() {
		return false, ErrClosed
	}
	return s.g.drv.StreamQuery(s.h)
}

// broken is the stream's failure, or that of a stream that it waits for. before is what those who watch it said before the driver was asked, and comes back as they say
// it now.
func (s *driverStream) broken(done bool, before looks) (looks, error) {
	err := s.brokenAfter(done, &before, nil)
	return before, err
}

// brokenAfter does not ask the streams in seen, which it has come from.
func (s *driverStream) brokenAfter(done bool, before *looks, seen []*driverStream) error {
	if f := s.failure.Load(); f != nil {
		return *f
	}
	for _, w := range s.watches.all() {
		now, err := w.check(before.of(w), done)
		if err != nil {
			return s.fail(err)
		}
		if !done {
			before.set(w, now)
		}
	}
	s.tmu.Lock()
	sources := slices.Clone(s.sources)
	s.tmu.Unlock()
	for _, from := range sources {
		if slices.Contains(seen, from) {
			continue
		}
		var none looks // of it the driver is not asked
		if err := from.brokenAfter(false, &none, append(seen, s)); err != nil {
			return s.fail(&Error{Op: "event", Detail: from.String() + " failed before it", Err: err})
		}
	}
	return nil
}

// fail makes err the sticky error, unless there is one, and returns which it is.
func (s *driverStream) fail(err error) error {
	s.failure.CompareAndSwap(nil, &err)
	return *s.failure.Load()
}

// waitFor records that the stream waits for a position of another. mu is held.
func (s *driverStream) waitFor(other *driverStream, position uint64) {
	other.tmu.Lock()
	copies := len(other.transfers) > 0 || len(other.upstream) > 0
	other.tmu.Unlock()
	s.tmu.Lock()
	defer s.tmu.Unlock()
	at := s.position.Add(1)
	if copies {
		s.upstream = append(s.upstream, upstream{at, other, position})
	}
	if !slices.Contains(s.sources, other) {
		s.sources = append(s.sources, other)
	}
}

func (s *driverStream) synchronize(ctx context.Context) error {
	const op = "stream synchronize"
	if err := s.notCapturing(op); err != nil {
		return err
	}
	position, err := s.reached(op)
	if err != nil {
		return err
	}
	if err := wait(ctx, s.g, s); err != nil {
		return &Error{Op: op, Detail: s.doing(ctx), Err: err}
	}
	s.land(position)
	return nil
}

// doing is the stream, and where ctx has ended what those who watch it say that it is in.
func (s *driverStream) doing(ctx context.Context) string {
	text := s.String()
	if ctx.Err() == nil {
		return text
	}
	joint := " in "
	for _, w := range s.watches.all() {
		if w.doing == nil {
			continue
		}
		if what := w.doing(); what != "" {
			text += joint + what
			joint = "; "
		}
	}
	return text
}

func (s *driverStream) query() (bool, error) {
	const op = "stream query"
	if err := s.notCapturing(op); err != nil {
		return false, err
	}
	position, err := s.reached(op)
	if err != nil {
		return false, err
	}
	done, err := ask(s.g, s)
	if err != nil {
		return false, &Error{Op: op, Detail: s.String(), Err: err}
	}
	if done {
		s.land(position)
	}
	return done, nil
}

// reached is the stream's last position, which it has come to if the driver, asked afterwards, says that all is done.
func (s *driverStream) reached(op string) (uint64, error) {
	position := s.position.Load()
	return position, s.usable(op)
}

// notCapturing refuses what a capturing stream cannot do, and invalidates its capture.
func (s *driverStream) notCapturing(op string) error {
	if c := s.cap.Load(); c != nil {
		return c.forbid(op, s.String())
	}
	return nil
}

// close gives the stream up. Work that goes on ends first within a short time, mostly.
func (s *driverStream) close() error {
	const op = "close stream"
	if err := s.notCapturing(op); err != nil {
		return err
	}
	failed := s.failure.Load() != nil && !s.closed.Load()
	if s.usable(op) == nil {
		const patience = 100 * time.Millisecond
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := s.synchronize(ctx)
		late := err != nil && ctx.Err() != nil // the error may be another one's deadline: of who watches the stream
		cancel()
		if late {
			return &Error{Op: op, Detail: s.String(), Err: errors.New("its work is not done: synchronize first")}
		}
	}
	s.leaves()
	if failed {
		settle(context.Background(), s.g, s) // who closes it frees what it used next
	}
	s.mu.Lock()
	if s.closed.Swap(true) {
		s.mu.Unlock()
		return &Error{Op: op, Detail: s.String(), Err: ErrClosed}
	}
	s.mu.Unlock()
	unused(&s.use)
	s.g.smu.Lock()
	delete(s.g.streams, s)
	s.g.smu.Unlock()
	s.abandon()
	in, err := s.g.enter(true)
	if err == nil {
		err = s.g.cause(s.g.drv.StreamDestroy(s.h))
		in.leave()
	}
	if err = s.g.lost(err); err != nil {
		return &Error{Op: op, Detail: s.String(), Err: err}
	}
	return nil
}

// driverEvent is an event without timing.
type driverEvent struct {
	g  *driverDevice
	id uint64
	h  cusys.Event

	mu       sync.Mutex // guards what follows
	closed   bool
	s        *driverStream // recorded last on it, outside a capture
	position uint64
	cap      *driverCapture // recorded last in it
}

func (g *driverDevice) newEvent(id uint64) (platformEvent, error) {
	in, err := g.enter(true)
	if err != nil {
		return nil, err
	}
	defer in.leave()
	h, err := g.drv.EventCreate(cusys.EventDisableTiming)
	if err != nil {
		return nil, g.cause(err)
	}
	return &driverEvent{g: g, id: id, h: h}, nil
}

func (e *driverEvent) String() string { return fmt.Sprintf("event %d", e.id) }

// marked is a record of an event, which can be waited for.
type marked struct {
	e        *driverEvent
	s        *driverStream // nil: never recorded
	position uint64
}

func (m marked) ready() (bool, error) {
	m.e.mu.Lock()
	defer m.e.mu.Unlock()
	if m.e.closed {
		return false, ErrClosed
	}
	return m.e.g.drv.EventQuery(m.e.h)
}

func (m marked) broken(bool, looks) (looks, error) {
	var none looks // that an event is done says nothing of the whole stream
	if m.s == nil {
		return none, nil
	}
	if _, err := m.s.broken(false, none); err != nil {
		return none, &Error{Op: "event", Detail: m.s.String() + " failed", Err: err}
	}
	return none, nil
}

// look gives the record for Query and Synchronize, and refuses where a capture forbids it.
func (e *driverEvent) look(op string) (marked, error) {
	e.mu.Lock()
	m, c, closed := marked{e, e.s, e.position}, e.cap, e.closed
	e.mu.Unlock()
	switch {
	case closed:
		return m, &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	case c != nil:
		return m, c.forbid(op, e.String()+", which was recorded in a capture")
	}
	if err := e.g.unsafeCall(op); err != nil {
		return m, err
	}
	if err := e.g.dev.Err(); err != nil {
		return m, &Error{Op: op, Err: err}
	}
	return m, nil
}

func (e *driverEvent) query() (bool, error) {
	const op = "event query"
	m, err := e.look(op)
	if err != nil {
		return false, err
	}
	done, err := ask(e.g, m)
	if err != nil {
		return false, &Error{Op: op, Detail: e.String(), Err: err}
	}
	if done {
		m.land()
	}
	return done, nil
}

func (e *driverEvent) synchronize(ctx context.Context) error {
	const op = "event synchronize"
	m, err := e.look(op)
	if err != nil {
		return err
	}
	if err := wait(ctx, e.g, m); err != nil {
		return &Error{Op: op, Detail: e.String(), Err: err}
	}
	m.land()
	return nil
}

func (m marked) land() {
	if m.s != nil {
		m.s.land(m.position)
	}
}

func (e *driverEvent) close() error {
	const op = "close event"
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		return &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	}
	e.closed = true
	e.mu.Unlock()
	in, err := e.g.enter(true)
	if err == nil {
		err = e.g.cause(e.g.drv.EventDestroy(e.h))
		in.leave()
	}
	if err = e.g.lost(err); err != nil {
		return &Error{Op: op, Detail: e.String(), Err: err}
	}
	return nil
}

func (s *driverStream) record(ev platformEvent) error {
	const op = "record event"
	e := ev.(*driverEvent)
	s.mu.Lock()
	defer s.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	}
	if err := s.recordable(op); err != nil {
		return err
	}
	if err := s.enqueueLocked(op, func() error { return s.g.drv.EventRecord(e.h, s.h) }); err != nil {
		return err
	}
	if c := s.cap.Load(); c != nil {
		e.cap, e.s = c, nil
		return nil
	}
	e.cap, e.s, e.position = nil, s, s.position.Add(1)
	return nil
}

// wait makes the stream wait for the event; on an event of a capture the stream joins it.
func (s *driverStream) wait(ev platformEvent) error {
	const op = "wait for event"
	e := ev.(*driverEvent)
	e.mu.Lock()
	joins := e.cap != nil
	e.mu.Unlock()
	if joins {
		s.leaves()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	from, position, c := e.s, e.position, e.cap
	own := s.cap.Load()
	switch {
	case e.closed:
		return &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	case c != nil && own != nil && own != c:
		err := own.forbidCause(op, e.String(), fmt.Errorf("it was recorded in %s", c))
		c.invalidate(err)
		return err
	case c != nil:
		if err := c.usable(); err != nil {
			return &Error{Op: op, Detail: e.String(), Err: err}
		}
	case own != nil && from != nil:
		return own.forbidCause(op, e.String(), errOutsideCapture)
	case from == nil:
		return s.enqueueLocked(op, func() error { return nil }) // never recorded: nothing to wait for
	}
	if err := s.enqueueLocked(op, func() error { return s.g.drv.StreamWaitEvent(s.h, e.h) }); err != nil {
		return err
	}
	if c != nil {
		c.join(s)
	} else if from != s {
		s.waitFor(from, position)
	}
	return nil
}

func (s *driverStream) behind(p platformStream, ev platformEvent) error {
	const op = "order streams"
	other, e := p.(*driverStream), ev.(*driverEvent)
	for _, st := range [...]*driverStream{s, other} {
		if c := st.cap.Load(); c != nil {
			return &Error{Op: op, Detail: fmt.Sprintf("%s is part of %s", st, c), Err: ErrCaptureUnsafe}
		}
	}
	other.mu.Lock() // closed changes under it
	if other.closed.Load() {
		other.mu.Unlock()
		return nil
	}
	in, err := s.g.enter(true)
	if err == nil {
		err = s.g.cause(s.g.drv.EventRecord(e.h, other.h))
		in.leave()
	}
	other.mu.Unlock()
	if err != nil {
		return &Error{Op: op, Detail: other.String(), Err: err}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.enqueueLocked(op, func() error { return s.g.drv.StreamWaitEvent(s.h, e.h) })
}

// copy refuses what the driver does not define: its copies go in no order.
func (s *driverStream) copy(dst, src unsafe.Pointer, n uint64) error {
	const op = "copy"
	if dst != src && (uint64(uintptr(dst)-uintptr(src)) < n || uint64(uintptr(src)-uintptr(dst)) < n) {
		return &Error{Op: op, Detail: s.String(), Err: fmt.Errorf("the source and the destination overlap, which a %s device cannot do", s.g.platform)}
	}
	return s.enqueueNode(op, func() error {
		if n == 0 || dst == src {
			return nil
		}
		return s.g.drv.Copy(devicePtr(dst), devicePtr(src), n, s.h)
	})
}

// enqueueNode enqueues what a capture records.
func (s *driverStream) enqueueNode(op string, calls func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.recordable(op); err != nil {
		return err
	}
	return s.enqueueLocked(op, calls)
}

// recordable says why a capture of the stream records nothing any more. mu is held.
func (s *driverStream) recordable(op string) error {
	c := s.cap.Load()
	if c == nil {
		return nil
	}
	if err := c.usable(); err != nil {
		return &Error{Op: op, Detail: s.String(), Err: err}
	}
	return nil
}

// fill has the widths that the driver has none for made of others.
func (s *driverStream) fill(dst unsafe.Pointer, n, pattern uint64, width int) error {
	return s.enqueueNode("fill", func() error {
		if n == 0 {
			return nil
		}
		return s.g.fill(devicePtr(dst), n, pattern, width, s.h)
	})
}

func (g *driverDevice) fill(dst cusys.DevicePtr, n, pattern uint64, width int, h cusys.Stream) error {
	d := g.drv
	switch width {
	case 2:
		lo, hi := uint8(pattern), uint8(pattern>>8)
		if lo == hi {
			return d.Set8(dst, lo, n, h)
		}
		one := func(at cusys.DevicePtr) error {
			return errors.Join(d.Set8(at, lo, 1, h), d.Set8(at+1, hi, 1, h))
		}
		// Words in the middle, and what stands before and after them by itself.
		if dst%4 != 0 {
			if err := one(dst); err != nil {
				return err
			}
			dst, n = dst+2, n-2
		}
		if n >= 4 {
			if err := d.Set32(dst, uint32(pattern&0xffff)*0x10001, n/4, h); err != nil {
				return err
			}
		}
		if n%4 != 0 {
			return one(dst + cusys.DevicePtr(n&^3))
		}
		return nil
	case 4:
		return d.Set32(dst, uint32(pattern), n/4, h)
	case 8:
		lo, hi := uint32(pattern), uint32(pattern>>32)
		if lo == hi {
			return d.Set32(dst, lo, n/4, h)
		}
		if err := errors.Join(d.Set32(dst, lo, 1, h), d.Set32(dst+4, hi, 1, h)); err != nil {
			return err
		}
		for have := uint64(8); have < n; have *= 2 {
			if err := d.Copy(dst+cusys.DevicePtr(have), dst, min(have, n-have), h); err != nil {
				return err
			}
		}
		return nil
	}
	return d.Set8(dst, uint8(pattern), n, h)
}
