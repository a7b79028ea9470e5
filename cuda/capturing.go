package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// captures are those in progress on a device that were begun here. Without one, the checks cost a load.
type captures struct {
	n  atomic.Int32
	mu sync.Mutex // guards active
	// active is a list in order of their beginning: there is hardly ever more than one.
	active []*capturing
}

func (cs *captures) any() bool { return cs.n.Load() > 0 }

func (cs *captures) add(c *capturing) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.active = append(cs.active, c)
	cs.n.Store(int32(len(cs.active)))
}

func (cs *captures) remove(c *capturing) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.active = slices.DeleteFunc(cs.active, func(other *capturing) bool { return other == c })
	cs.n.Store(int32(len(cs.active)))
}

// unsafeCall refuses a potentially unsafe call where a capture's mode forbids it to this thread, and invalidates that capture.
func (cs *captures) unsafeCall(op string) error {
	if !cs.any() {
		return nil
	}
	tid := unix.Gettid()
	cs.mu.Lock()
	active := slices.Clone(cs.active)
	cs.mu.Unlock()
	var refused error
	for _, c := range active {
		if c.mode == CaptureGlobal || c.mode == CaptureThreadLocal && c.tid == tid {
			refused = c.forbid(op, "")
		}
	}
	return refused
}

// capturing is a capture of either platform without what it records: who began it, how, and whether it is whole.
type capturing struct {
	pub    *Capture
	mode   CaptureMode
	tid    int            // the thread that began it
	origin platformStream // that it was begun on

	mu    sync.Mutex // guards what follows, and what the platform's capture holds beside it
	st    CaptureState
	cause error // of the invalidation
}

func (c *capturing) begin(raw platformCapture, mode CaptureMode, origin platformStream) {
	c.pub = &Capture{id: lastID.Add(1), raw: raw}
	c.mode, c.tid, c.origin, c.st = mode, unix.Gettid(), origin, CaptureActive
}

func (c *capturing) String() string {
	return fmt.Sprintf("%s capture %d on %v", c.mode, c.pub.id, c.origin)
}

// invalidate spoils the capture; the first cause stays.
func (c *capturing) invalidate(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.st == CaptureActive {
		c.st, c.cause = CaptureInvalidated, cause
	}
}

// forbid is a call that spoils the capture: the error for its caller. After the end of the capture it is only that.
func (c *capturing) forbid(op, subject string) error { return c.forbidCause(op, subject, nil) }

func (c *capturing) forbidCause(op, subject string, why error) error {
	cause := fmt.Errorf("%w (%s)", ErrCaptureUnsafe, c)
	if why != nil {
		cause = fmt.Errorf("%w: %w", cause, why)
	}
	err := &Error{Op: op, Detail: subject, Err: cause}
	c.invalidate(err)
	return err
}

// usable says why nothing can be recorded.
func (c *capturing) usable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.usableLocked()
}

func (c *capturing) usableLocked() error {
	switch c.st {
	case CaptureInvalidated:
		return fmt.Errorf("%w: %w", ErrCaptureInvalidated, c.cause)
	case CaptureNone:
		return errEnded
	}
	return nil
}

var (
	errEnded        = fmt.Errorf("%w: the capture has ended", ErrCaptureUnsafe)
	errNotCapturing = errors.New("the stream is not capturing")
	errCapturing    = errors.New("the stream is capturing already")
)
