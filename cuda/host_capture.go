package cuda

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

func (h *hostDevice) unsafeCall(op string) error { return h.captures.unsafeCall(op) }

// hostCapture records what its streams enqueue as nodes.
type hostCapture struct {
	capturing

	// Guarded by mu.
	nodes   []capturedNode
	streams []*hostStream // that joined, with the origin
	last    map[any][]int32
}

type capturedNode struct {
	task   Task
	deps   []int32 // earlier nodes
	stream *hostStream
}

// recording is a stream's part in a capture; guarded by the stream's mu and then the capture's.
type recording struct {
	c     *hostCapture
	deps  []int32 // what the next node depends on: the end of the stream
	extra []int32 // and what After asked for
}

// capturedEvent is what an event recorded in a capture stands for.
type capturedEvent struct {
	c    *hostCapture
	deps []int32
}

func (c *hostCapture) state() CaptureState {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.st
}

func (s *hostStream) beginCapture(mode CaptureMode) error {
	const op = "begin capture"
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.usable(op); err != nil {
		return err
	}
	if s.rec != nil {
		return &Error{Op: op, Detail: s.String(), Err: errCapturing}
	}
	c := &hostCapture{streams: []*hostStream{s}, last: make(map[any][]int32)}
	c.begin(c, mode, s)
	s.rec = &recording{c: c}
	s.h.captures.add(&c.capturing)
	return nil
}

// recordNode records an entry as the next node. s.mu is held and the stream captures.
func (s *hostStream) recordNode(op string, e entry) error {
	if e.exec != nil {
		return s.rec.c.forbid(op, "a launch cannot be captured")
	}
	c := s.rec.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usableLocked(); err != nil {
		return &Error{Op: op, Detail: s.String(), Err: err}
	}
	r := s.rec
	deps := union(r.deps, r.extra)
	n := int32(len(c.nodes))
	c.nodes = append(c.nodes, capturedNode{task: e.task, deps: deps, stream: s})
	r.deps, r.extra = []int32{n}, nil
	return nil
}

// union is the sorted union; it shares memory with neither.
func union(a, b []int32) []int32 {
	u := slices.Concat(a, b)
	slices.Sort(u)
	return slices.Compact(u)
}

// event is what an event recorded now stands for. The stream's mu is held.
func (r *recording) event(op string) (*capturedEvent, error) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if err := r.c.usableLocked(); err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	return &capturedEvent{c: r.c, deps: union(r.deps, r.extra)}, nil
}

// join makes what the stream records next depend on an event of a capture; a stream that does not capture becomes part of it. s.mu is held.
func (s *hostStream) join(op string, e *hostEvent, ev *capturedEvent) error {
	if s.rec != nil && s.rec.c != ev.c {
		err := s.rec.c.forbidCause(op, e.String(), fmt.Errorf("it was recorded in %s", ev.c))
		ev.c.invalidate(err)
		return err
	}
	c := ev.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usableLocked(); err != nil {
		return &Error{Op: op, Detail: e.String(), Err: err}
	}
	if s.rec == nil {
		s.rec = &recording{c: c}
		c.streams = append(c.streams, s)
	}
	s.rec.deps = union(s.rec.deps, ev.deps)
	return nil
}

func (s *hostStream) capture() *Capture {
	if !s.h.captures.any() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec == nil {
		return nil
	}
	return s.rec.c.pub
}

func (c *hostCapture) after(p platformStream, key any) {
	c.with(p, func(r *recording) { r.extra = union(r.extra, c.last[key]) })
}

func (c *hostCapture) mark(p platformStream, key any) {
	c.with(p, func(r *recording) { c.last[key] = slices.Clone(r.deps) })
}

// with gives a stream's part in the capture to fn, under the locks; nothing happens if it has none.
func (c *hostCapture) with(p platformStream, fn func(*recording)) {
	s := p.(*hostStream)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec == nil || s.rec.c != c {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.st != CaptureNone {
		fn(s.rec)
	}
}

func (s *hostStream) endCapture() (platformGraph, error) {
	const op = "end capture"
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	if rec == nil {
		return nil, &Error{Op: op, Detail: s.String(), Err: errNotCapturing}
	}
	c := rec.c
	if c.origin != s {
		return nil, c.forbid(op, s.String()+" only joined the capture")
	}
	if tid := unix.Gettid(); c.mode != CaptureRelaxed && tid != c.tid {
		c.forbid(op, fmt.Sprintf("called on thread %d, the capture began on thread %d", tid, c.tid))
	}

	c.mu.Lock()
	if c.st == CaptureNone {
		c.mu.Unlock()
		return nil, &Error{Op: op, Detail: s.String(), Err: errNotCapturing} // another EndCapture was first
	}
	err := c.usableLocked()
	if err == nil {
		err = c.unjoined(rec)
	}
	c.st = CaptureNone
	nodes, streams := c.nodes, c.streams
	c.nodes, c.last = nil, nil
	c.mu.Unlock()

	s.h.captures.remove(&c.capturing)
	for _, other := range streams {
		other.mu.Lock()
		if other.rec != nil && other.rec.c == c {
			other.rec = nil
		}
		other.mu.Unlock()
	}
	if err != nil {
		return nil, &Error{Op: op, Detail: c.String(), Err: err}
	}
	return newHostGraph(s.h, nodes), nil
}

// unjoined finds a node that the end of the origin does not come after. mu is held.
func (c *hostCapture) unjoined(origin *recording) error {
	before := make([]bool, len(c.nodes))
	for _, n := range union(origin.deps, origin.extra) {
		before[n] = true
	}
	for n := len(c.nodes) - 1; n >= 0; n-- {
		if !before[n] {
			return fmt.Errorf("%w: %s, with %s", ErrCaptureUnjoined, c.nodes[n].stream, describe(c.nodes[n].task))
		}
		for _, d := range c.nodes[n].deps {
			before[d] = true
		}
	}
	return nil
}
