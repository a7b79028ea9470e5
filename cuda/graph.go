package cuda

import (
	"errors"
	"fmt"
)

// CaptureMode is how strict a capture is about unsafe calls elsewhere, as in CUDA. Unsafe are Alloc, Free, Event.Query and
// Event.Synchronize, on whatever they work. (What works on a capturing stream or an event of a capture is forbidden in every mode.)
type CaptureMode uint8

const (
	CaptureGlobal      CaptureMode = iota // no thread of the process may make unsafe calls on the device
	CaptureThreadLocal                    // the thread that began the capture may not
	CaptureRelaxed                        // anybody may
)

// String is "global", "thread-local" or "relaxed".
func (m CaptureMode) String() string {
	switch m {
	case CaptureGlobal:
		return "global"
	case CaptureThreadLocal:
		return "thread-local"
	case CaptureRelaxed:
		return "relaxed"
	}
	return fmt.Sprintf("mode(%d)", uint8(m))
}

// CaptureState is that of a stream.
type CaptureState uint8

const (
	CaptureNone CaptureState = iota // none, or it has ended
	CaptureActive
	CaptureInvalidated // EndCapture is still to come
)

// String is "none", "active" or "invalidated".
func (s CaptureState) String() string {
	switch s {
	case CaptureNone:
		return "none"
	case CaptureActive:
		return "active"
	case CaptureInvalidated:
		return "invalidated"
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Capture is a capture in progress, shared by all streams that joined it.
type Capture struct {
	id  uint64
	raw platformCapture
}

// ID is unique in this process.
func (c *Capture) ID() uint64 { return c.id }

// State is CaptureNone after EndCapture.
func (c *Capture) State() CaptureState { return c.raw.state() }

// Invalidate spoils the capture, as a forbidden call does: EndCapture will return ErrCaptureInvalidated with cause. For libraries.
func (c *Capture) Invalidate(cause error) { c.raw.invalidate(cause) }

// After makes the next node that stream s records depend on the last node recorded by an earlier stream under the same key, so that the
// library's calls (one communicator's) are in order whatever their streams. Call before and Mark after recording. For libraries. On a GPU they do nothing.
func (c *Capture) After(s *Stream, key any) { c.raw.after(s.raw, key) }

// Mark: see After. key must be comparable.
func (c *Capture) Mark(s *Stream, key any) { c.raw.mark(s.raw, key) }

// BeginCapture starts a capture on the stream; the calling goroutine must be locked to its thread, EndCapture comes from the same one
// (in relaxed mode from any). What is enqueued already is not part of it and goes on. On a GPU a setting under which graphs hang (CUDA_LAUNCH_BLOCKING=1) is an error.
func (s *Stream) BeginCapture(mode CaptureMode) error {
	if mode > CaptureRelaxed {
		return &Error{Op: "begin capture", Err: fmt.Errorf("unknown %s", mode)}
	}
	return s.raw.beginCapture(mode)
}

// EndCapture ends it, always: after it the stream is usable. Without a graph it returns ErrCaptureInvalidated, with the cause,
// ErrCaptureUnjoined, or ErrCaptureUnsafe from another thread (where a GPU cannot end it: call it again on its own). Only the stream that began a capture ends it: on one that joined it is forbidden, and invalidates.
func (s *Stream) EndCapture() (*Graph, error) {
	raw, err := s.raw.endCapture()
	if err != nil {
		return nil, err
	}
	g := &Graph{dev: s.dev, id: lastID.Add(1), raw: raw}
	if err := s.dev.remember("end capture", g); err != nil {
		return nil, errors.Join(err, raw.destroy())
	}
	return g, nil
}

// Capture is the capture that the stream is part of, nil without one.
func (s *Stream) Capture() *Capture {
	if d, is := s.raw.(*driverStream); is { // each call of a communication library asks
		return d.capture()
	}
	return s.raw.capture()
}

// Graph is a recorded template. It owns no memory. Its release callbacks run once when the template, every GraphExec and every launch
// in flight are gone, in order of attachment, with no lock held: inside the Destroy that was last, or on a goroutine of the device
// when a launch outlived it, and always on a GPU, soon after.
type Graph struct {
	dev *Device
	id  uint64
	raw platformGraph
}

// NumNodes is the number of recorded operations.
func (g *Graph) NumNodes() int { return g.raw.numNodes() }

// String is "graph 12 (20 nodes)".
func (g *Graph) String() string { return fmt.Sprintf("graph %d (%d nodes)", g.id, g.NumNodes()) }

// OnRelease attaches a callback (a user object). It must come before Instantiate to cover the execs; a later one
// waits only for the template and the execs made after it.
func (g *Graph) OnRelease(fn func()) error { return g.raw.onRelease(fn) }

// Instantiate makes an executable graph. All those of one template share its tasks, so on the host platform their launches do not overlap either.
func (g *Graph) Instantiate() (*GraphExec, error) {
	raw, err := g.raw.instantiate()
	if err != nil {
		return nil, err
	}
	x := &GraphExec{dev: g.dev, id: lastID.Add(1), of: g.String(), raw: raw}
	if err := g.dev.remember("instantiate", x); err != nil {
		return nil, errors.Join(err, raw.destroy())
	}
	return x, nil
}

// Destroy gives the template up; at once, also with launches in flight. Twice is ErrClosed.
func (g *Graph) Destroy() error {
	if err := g.raw.destroy(); err != nil {
		return err
	}
	g.dev.forget(g)
	return nil
}

// GraphExec is an executable graph. Launches of one exec do not overlap each other: they run in the order of the Launch calls.
type GraphExec struct {
	dev *Device
	id  uint64
	of  string
	raw platformExec
}

// String is "executable 13 of graph 12 (20 nodes)".
func (x *GraphExec) String() string { return fmt.Sprintf("executable %d of %s", x.id, x.of) }

// Launch enqueues a run. A launch cannot itself be captured: it is ErrCaptureUnsafe and invalidates the capture.
// It allocates nothing.
func (x *GraphExec) Launch(s *Stream) error {
	if err := s.sameDevice("launch graph", x.dev); err != nil {
		return err
	}
	return x.raw.launch(s.raw)
}

// Destroy gives it up; at once, also with launches in flight, which go on. Twice is ErrClosed.
func (x *GraphExec) Destroy() error {
	if err := x.raw.destroy(); err != nil {
		return err
	}
	x.dev.forget(x)
	return nil
}
