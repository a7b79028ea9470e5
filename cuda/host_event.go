package cuda

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// hostEvent is a mark in a stream, or in a capture. Recording enqueues nothing: a stream counts what has ended.
type hostEvent struct {
	h  *hostDevice
	id uint64

	mu     sync.Mutex // guards what follows
	closed bool
	mark   mark
	rec    *capturedEvent // recorded last in a capture
}

func (h *hostDevice) newEvent(id uint64) (platformEvent, error) {
	return &hostEvent{h: h, id: id}, nil
}

func (e *hostEvent) String() string { return fmt.Sprintf("event %d", e.id) }

// look gives the mark for Query and Synchronize, and refuses where a capture forbids it.
func (e *hostEvent) look(op string) (mark, error) {
	e.mu.Lock()
	m, rec, closed := e.mark, e.rec, e.closed
	e.mu.Unlock()
	switch {
	case closed:
		return mark{}, &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	case rec != nil:
		return mark{}, rec.c.forbid(op, e.String()+", which was recorded in a capture")
	}
	return m, e.h.unsafeCall(op)
}

func (e *hostEvent) query() (bool, error) {
	const op = "event query"
	m, err := e.look(op)
	if err != nil {
		return false, err
	}
	done, err := m.reached()
	if err == nil {
		err = e.h.dev.Err()
	}
	if err != nil {
		return false, &Error{Op: op, Err: err}
	}
	return done, nil
}

func (e *hostEvent) synchronize(ctx context.Context) error {
	const op = "event synchronize"
	m, err := e.look(op)
	if err != nil {
		return err
	}
	if m.s != nil {
		if err := e.h.driver.wait(ctx, m.s, m.n); err != nil {
			return &Error{Op: op, Detail: m.s.doing(), Err: err}
		}
	}
	if _, err = m.reached(); err == nil {
		err = e.h.dev.Err()
	}
	if err != nil {
		return &Error{Op: op, Err: err}
	}
	return nil
}

func (e *hostEvent) close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return &Error{Op: "close event", Detail: e.String(), Err: ErrClosed}
	}
	e.closed = true
	return nil
}

// record marks the end of what is enqueued, in the stream or in its capture.
func (s *hostStream) record(ev platformEvent) error {
	const op = "record event"
	e := ev.(*hostEvent)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(op); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	}
	if s.rec != nil {
		rec, err := s.rec.event(op)
		if err == nil {
			e.rec, e.mark = rec, mark{}
		}
		return err
	}
	e.rec, e.mark = nil, mark{s: s, n: s.submitted.Load()}
	return nil
}

var errOutsideCapture = errors.New("it was recorded outside the capture")

// behind: nobody on the host platform asks for it.
func (s *hostStream) behind(other platformStream, e platformEvent) error {
	return errors.Join(other.record(e), s.wait(e))
}

// wait makes the stream wait for the event; on an event of a capture the stream joins it.
func (s *hostStream) wait(ev platformEvent) error {
	const op = "wait for event"
	e := ev.(*hostEvent)
	e.mu.Lock()
	m, rec, closed := e.mark, e.rec, e.closed
	e.mu.Unlock()
	if closed {
		return &Error{Op: op, Detail: e.String(), Err: ErrClosed}
	}
	s.mu.Lock()
	if err := s.usable(op); err != nil {
		s.mu.Unlock()
		return err
	}
	switch {
	case rec != nil:
		err := s.join(op, e, rec)
		s.mu.Unlock()
		return err
	case s.rec != nil && m.s != nil:
		err := s.rec.c.forbidCause(op, e.String(), errOutsideCapture)
		s.mu.Unlock()
		return err
	case m.s == nil || m.s == s:
		s.mu.Unlock()
		return nil
	}
	if done, err := m.reached(); done && err == nil {
		s.mu.Unlock()
		return nil
	}
	s.push(entry{mark: m})
	s.mu.Unlock()
	s.notify()
	return nil
}
