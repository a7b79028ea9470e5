package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// hostStream is a queue of tasks. Enqueueing adds to it under mu; the driver takes the first, runs it, and counts it as ended.
//
// Lock order: stream, then event or capture.
type hostStream struct {
	h  *hostDevice
	id uint64

	mu     sync.Mutex // guards what follows
	queue  []entry    // a ring: its length is a power of two
	head   uint64     // entries taken
	closed bool
	rec    *recording // while the stream captures

	submitted atomic.Uint64 // entries enqueued (changes under mu)
	ended     atomic.Uint64 // entries carried out or cancelled; the driver's
	failure   atomic.Pointer[streamFailure]

	// The driver's.
	current entry
	running bool // current is taken and not ended
	started bool
}

// streamFailure is the sticky error. What came after the first done entries was not carried out.
type streamFailure struct {
	err  error
	done uint64
}

// entry is a place in the queue: a task, a graph to run, or a point of another stream to wait for.
type entry struct {
	task Task
	exec *hostExec
	mark mark
}

// mark is a point in a stream: after its first n entries.
type mark struct {
	s *hostStream
	n uint64
}

// reached reports whether the work before the mark is done, or why it never will be.
func (m mark) reached() (bool, error) {
	if m.s == nil {
		return true, nil
	}
	if m.s.ended.Load() < m.n {
		return false, nil
	}
	if f := m.s.failure.Load(); f != nil && f.done < m.n {
		return false, &Error{Op: "event", Detail: fmt.Sprintf("stream %d failed before it", m.s.id), Err: f.err}
	}
	return true, nil
}

func (h *hostDevice) newStream(id uint64) (platformStream, error) {
	s := &hostStream{h: h, id: id, queue: make([]entry, 16)}
	h.streams.add(s)
	return s, nil
}

// enqueued counts what was ever enqueued on the streams there are.
func (h *hostDevice) enqueued() (n uint64) {
	for _, s := range h.streams.all() {
		n += s.submitted.Load()
	}
	return n
}

func (s *hostStream) handle() uintptr { return uintptr(s.id) }

func (s *hostStream) String() string { return fmt.Sprintf("stream %d", s.id) }

func (s *hostStream) pending() bool { return s.ended.Load() != s.submitted.Load() }

// sticky is the error that every operation on the stream returns, nil where all is well.
func (s *hostStream) sticky(op string) error {
	if f := s.failure.Load(); f != nil {
		return &Error{Op: op, Detail: s.String(), Err: f.err}
	}
	if err := s.h.dev.Err(); err != nil {
		return &Error{Op: op, Detail: s.String(), Err: err}
	}
	return nil
}

// enqueue adds an entry, unless the stream captures: then record does it. No lock is held.
func (s *hostStream) enqueue(op string, e entry, pooled pooledTask) error {
	s.mu.Lock()
	if err := s.usable(op); err != nil {
		s.mu.Unlock()
		return err
	}
	if s.rec != nil {
		err := s.recordNode(op, e)
		s.mu.Unlock()
		return err
	}
	if pooled != nil {
		pooled.setPooled()
	}
	s.push(e)
	s.mu.Unlock()
	s.notify()
	return nil
}

// usable says why nothing can be enqueued. mu is held.
func (s *hostStream) usable(op string) error {
	if s.closed {
		return &Error{Op: op, Detail: s.String(), Err: ErrClosed}
	}
	return s.sticky(op)
}

// push adds an entry at the end. mu is held.
func (s *hostStream) push(e entry) {
	n := s.submitted.Load()
	if n-s.head == uint64(len(s.queue)) {
		bigger := make([]entry, 2*len(s.queue))
		for i := s.head; i != n; i++ {
			bigger[i&uint64(len(bigger)-1)] = s.queue[i&uint64(len(s.queue)-1)]
		}
		s.queue = bigger
	}
	s.queue[n&uint64(len(s.queue)-1)] = e
	s.submitted.Store(n + 1)
}

// notify tells who drives, or the device's goroutine, that there is work.
func (s *hostStream) notify() {
	s.h.bell.Load().Ring()
	if s.h.driver.background.parked.Load() {
		s.h.driver.background.wake()
	}
}

// take makes the first entry the current one. The driver's.
func (s *hostStream) take() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.head == s.submitted.Load() {
		return false
	}
	slot := &s.queue[s.head&uint64(len(s.queue)-1)]
	s.current, *slot = *slot, entry{}
	s.head++
	s.running, s.started = true, false
	return true
}

// burst is how many entries of a stream the driver carries out before it looks at the others.
const burst = 16

// step carries on with the stream as far as that goes without waiting, and reports whether it went on. The driver's.
func (s *hostStream) step() (progress bool) {
	if s.failure.Load() != nil || s.h.dev.sticky.Load() != nil {
		s.fail(s.h.dev.Err())
		return true
	}
	for range burst {
		if !s.running && !s.take() {
			return progress
		}
		if !s.started {
			s.started, progress = true, true
			if s.current.task != nil {
				s.current.task.Start()
			}
		}
		var done bool
		var err error
		switch e := &s.current; {
		case e.task != nil:
			done, err = e.task.Step()
		case e.exec != nil:
			var went bool
			went, done, err = e.exec.step(s)
			progress = progress || went
		default:
			done, err = e.mark.reached()
		}
		if err != nil {
			if e := s.current.exec; e != nil {
				e.left(s)
			}
			s.drop()
			s.fail(err)
			return true
		}
		if !done {
			return progress
		}
		progress = true
		if e := s.current.exec; e != nil {
			e.left(s)
		}
		s.drop()
		s.ended.Add(1)
	}
	return progress
}

// drop forgets the current entry.
func (s *hostStream) drop() {
	s.current = entry{}
	s.running = false
}

// fail makes err the sticky error, unless there is one, and cancels all that is left. It can be called again where a Cancel panicked.
func (s *hostStream) fail(err error) {
	s.mu.Lock() // nothing is enqueued behind the failure
	if s.failure.Load() == nil {
		s.failure.Store(&streamFailure{err: err, done: s.ended.Load()})
	}
	s.mu.Unlock()
	cause := s.failure.Load().err
	for s.running || s.take() {
		e := s.current
		s.drop()
		e.cancel(s, cause)
	}
	s.ended.Store(s.submitted.Load())
}

func (e entry) cancel(s *hostStream, cause error) {
	if e.exec != nil {
		defer e.exec.left(s) // also where the Cancel of one of its tasks panics
		e.exec.cancel(s, cause)
	}
	if c, ok := e.task.(Canceler); ok {
		c.Cancel(cause)
	}
}

// String says what the entry is, and what it waits for where it knows.
func (e *entry) String() string {
	switch {
	case e.exec != nil:
		return e.exec.String()
	case e.task == nil:
		return fmt.Sprintf("wait for an event of stream %d", e.mark.s.id)
	}
	return describe(e.task)
}

func describe(t Task) string {
	switch t := t.(type) {
	case Waiter:
		return t.Waiting()
	case fmt.Stringer:
		return t.String()
	}
	return fmt.Sprintf("a task (%T)", t)
}

// doing says what the stream is in.
func (s *hostStream) doing() string {
	s.h.driver.acquire()
	defer s.h.driver.release()
	if s.running {
		return s.String() + " in " + s.current.String()
	}
	if s.pending() {
		return s.String() + " has work that has not begun"
	}
	return s.String()
}

func (s *hostStream) synchronize(ctx context.Context) error {
	const op = "stream synchronize"
	if err := s.notCapturing(op); err != nil {
		return err
	}
	target := s.submitted.Load()
	if err := s.h.driver.wait(ctx, s, target); err != nil {
		return &Error{Op: op, Detail: s.doing(), Err: err}
	}
	return s.sticky(op)
}

func (s *hostStream) query() (bool, error) {
	const op = "stream query"
	if err := s.notCapturing(op); err != nil {
		return false, err
	}
	if s.pending() {
		return false, nil
	}
	return true, s.sticky(op)
}

// notCapturing refuses what a capturing stream cannot do, and invalidates its capture.
func (s *hostStream) notCapturing(op string) error {
	if !s.h.captures.any() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec == nil {
		return nil
	}
	return s.rec.c.forbid(op, s.String())
}

// closeDrive is how long Close carries on with work that is left before it complains.
const closeDrive = 100 * time.Millisecond

func (s *hostStream) close() error {
	const op = "close stream"
	if err := s.notCapturing(op); err != nil {
		return err
	}
	d := &s.h.driver
	if s.pending() {
		// What can end by itself does: a task of a communicator that has failed, a small copy.
		ctx, cancel := context.WithTimeout(context.Background(), closeDrive)
		d.wait(ctx, s, s.submitted.Load())
		cancel()
	}
	// The driver's place: nobody is between taking an entry and ending it.
	d.acquire()
	if s.failure.Load() != nil || s.h.dev.sticky.Load() != nil {
		s.fail(s.h.dev.Err())
		d.wakeDone()
	}
	d.release()
	s.mu.Lock()
	switch {
	case s.closed:
		s.mu.Unlock()
		return &Error{Op: op, Detail: s.String(), Err: ErrClosed}
	case s.pending():
		s.mu.Unlock()
		return &Error{Op: op, Detail: s.doing(), Err: fmt.Errorf("%d operations are not done: synchronize first", s.submitted.Load()-s.ended.Load())}
	}
	s.closed = true
	s.mu.Unlock()
	s.h.streams.remove(s)
	return nil
}

func (s *hostStream) submit(t Task) error {
	if t == nil {
		return &Error{Op: "submit", Detail: s.String(), Err: errors.New("nil")}
	}
	return s.enqueue("submit", entry{task: t}, nil)
}

func (s *hostStream) hostFunc(fn func()) error {
	return s.enqueue("host function", entry{task: &hostFunc{h: s.h, fn: fn}}, nil)
}

func (s *hostStream) copy(dst, src unsafe.Pointer, n uint64) error {
	t := s.h.copies.get()
	t.h, t.dst, t.src, t.n = s.h, dst, src, uintptr(n)
	return s.enqueue("copy", entry{task: t}, t)
}

// copyIn and copyOut are copies like any other: the memory is the same.
func (s *hostStream) copyIn(dst, src unsafe.Pointer, n uint64) error  { return s.copy(dst, src, n) }
func (s *hostStream) copyOut(dst, src unsafe.Pointer, n uint64) error { return s.copy(dst, src, n) }

func (s *hostStream) fill(dst unsafe.Pointer, n uint64, pattern uint64, width int) error {
	t := s.h.fills.get()
	t.h, t.dst, t.n, t.pattern, t.width = s.h, dst, uintptr(n), pattern, uintptr(width)
	return s.enqueue("fill", entry{task: t}, t)
}
