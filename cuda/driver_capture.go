package cuda

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// unsafeCall refuses what a capture forbids to this thread before the driver does: the driver's calls for shareable memory do not, and
// leave a graph that cannot run.
func (g *driverDevice) unsafeCall(op string) error { return g.captures.unsafeCall(op) }

// driverCapture is a capture of the driver, and what this package knows of it. One that a forbidden call has spoilt here may still be
// whole for the driver; EndCapture then throws its graph away.
type driverCapture struct {
	capturing
	g *driverDevice

	// Guarded by mu.
	noted   error // the first call that the driver refused
	streams []*driverStream
	calls   []uint64 // host functions, for the graph
	pieces  []pinnedPiece
}

// state asks the driver too, which may know of a forbidden call of somebody else.
func (c *driverCapture) state() CaptureState {
	c.mu.Lock()
	st := c.st
	c.mu.Unlock()
	if st != CaptureActive {
		return st
	}
	in, err := c.g.enter(true)
	if err != nil {
		return st
	}
	defer in.leave()
	if status, err := c.g.drv.StreamCaptureStatus(c.origin.(*driverStream).h); err != nil || status != cusys.CaptureActive {
		return CaptureInvalidated
	}
	return CaptureActive
}

// note keeps the first refusal of the driver, which mostly is why the driver says at the end that the capture is invalid.
func (c *driverCapture) note(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.noted == nil {
		c.noted = err
	}
}

// after and mark are not needed: NCCL orders what one communicator captures itself.
func (c *driverCapture) after(platformStream, any) {}
func (c *driverCapture) mark(platformStream, any)  {}

// join makes a stream part of the capture; its mu is held.
func (c *driverCapture) join(s *driverStream) {
	if s.cap.Load() == c {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams = append(c.streams, s)
	s.cap.Store(c)
}

// own gives the capture a piece of pinned memory.
func (c *driverCapture) own(p pinnedPiece) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pieces = append(c.pieces, p)
}

func (s *driverStream) capture() *Capture {
	if c := s.cap.Load(); c != nil {
		return c.pub
	}
	return nil
}

func (s *driverStream) beginCapture(mode CaptureMode) error {
	const op = "begin capture"
	if s.g.settings != nil {
		return &Error{Op: op, Detail: s.String(), Err: &gpulib.SettingError{Findings: s.g.settings}}
	}
	s.leaves()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cap.Load() != nil {
		return &Error{Op: op, Detail: s.String(), Err: errCapturing}
	}
	c := &driverCapture{g: s.g, streams: []*driverStream{s}}
	c.begin(c, mode, s)
	if err := s.enqueueLocked(op, func() error { return s.g.drv.StreamBeginCapture(s.h, cusys.CaptureMode(mode)) }); err != nil {
		return err
	}
	s.cap.Store(c)
	s.g.captures.add(&c.capturing)
	return nil
}

func names(streams []*driverStream) string {
	var list []string
	for _, s := range streams {
		list = append(list, s.String())
	}
	return strings.Join(list, ", ")
}

func (s *driverStream) endCapture() (platformGraph, error) {
	const op = "end capture"
	c := s.cap.Load()
	if c == nil {
		return nil, &Error{Op: op, Detail: s.String(), Err: errNotCapturing}
	}
	if c.origin != s {
		return nil, c.forbid(op, s.String()+" only joined the capture")
	}
	if tid := unix.Gettid(); c.mode != CaptureRelaxed && tid != c.tid {
		// The driver ends it on its own thread only.
		return nil, c.forbid(op, fmt.Sprintf("called on thread %d, the capture began on thread %d and must end there", tid, c.tid))
	}
	c.mu.Lock()
	if c.st == CaptureNone {
		c.mu.Unlock()
		return nil, &Error{Op: op, Detail: s.String(), Err: errNotCapturing} // another EndCapture was first
	}
	spoilt, noted := c.cause, c.noted
	c.st = CaptureNone
	streams := c.streams
	gr := &driverGraph{g: s.g, calls: c.calls, pieces: c.pieces}
	c.mu.Unlock()

	in, err := s.g.enter(false)
	if err == nil {
		gr.h, err = s.g.drv.StreamEndCapture(s.h)
		err = s.g.cause(err)
		in.leave()
	}
	s.g.captures.remove(&c.capturing)
	for _, other := range streams {
		other.cap.CompareAndSwap(c, nil)
	}
	switch {
	case spoilt != nil:
		err = fmt.Errorf("%w: %w", ErrCaptureInvalidated, spoilt)
	case errors.Is(err, ErrCaptureUnjoined):
		err = fmt.Errorf("%w: one of %s: %w", ErrCaptureUnjoined, names(streams[1:]), err)
	case err != nil && noted != nil:
		err = fmt.Errorf("%w: %w", err, noted)
	}
	if err == nil {
		err = gr.complete()
	}
	if err != nil {
		return nil, &Error{Op: op, Detail: c.String(), Err: errors.Join(err, gr.discard())}
	}
	return gr, nil
}
