package nccl

import (
	"fmt"
	"sync"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// order is this package's part where the library's graph mixing is off (lib_mixing.go): no captured call of a communicator may run beside another graph's, or an
// eager one. What is enqueued on one stream comes in order by itself. So from the first capture on, with peer memory (lib_peer.go) from the start, a use of the
// communicator on another stream than the last one first has that stream wait for the last one. Before, there are eager calls only, which the library orders.
type order struct {
	sync.Mutex
	at    *cuda.Stream // of the last use
	home  *cuda.Stream // this package's own, from then on to the communicator's end
	event *cuda.Event
}

// turn is called before a use on a stream that may be another one than the last use's.
func (l *library) turn(s *cuda.Stream) error {
	l.order.Lock()
	defer l.order.Unlock()
	return l.turnLocked(s)
}

func (l *library) turnLocked(s *cuda.Stream) error {
	o := &l.order
	if o.home != nil && o.at != nil && o.at != s {
		if err := s.Behind(o.at, o.event); err != nil {
			return fmt.Errorf("order it behind the communicator's last operation: %w", err)
		}
	}
	o.at = s
	return nil
}

// Captured follows a capture of calls, and comes before the first replay. For libraries.
func (c *Comm) Captured() error {
	l, ok := c.be.(*library)
	if !ok || !l.mixing.off {
		return nil
	}
	if err := l.settleCapture(); err != nil {
		return c.errorf("capture", err)
	}
	return nil
}

// settleCapture makes replays wait for what the library has uploaded to the device during the capture: an operation of this rank alone, a copy by the library on a stream of
// this package's, waits for it, and counts as the communicator's last use.
func (l *library) settleCapture() error {
	l.mu.Lock()
	defer l.unlock()
	p, s, err := l.ownStream()
	if err != nil {
		return err
	}
	if err := l.comeHome(s); err != nil {
		return err
	}
	b := l.c.dev.Bind()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	for _, comm := range l.comms() {
		if err := l.enter(); err != nil {
			return err
		}
		err := l.selfGroup(comm, p, p+settleBytes, settleBytes, ncclsys.Stream(s.Handle()))
		l.leave()
		if err = l.finish(err, comm); err != nil {
			return err
		}
	}
	return nil
}

// comeHome makes this package's own stream the one of the last use.
func (l *library) comeHome(s *cuda.Stream) error {
	o := &l.order
	o.Lock()
	defer o.Unlock()
	if o.home == nil {
		e, err := l.c.dev.NewEvent()
		if err != nil {
			return err
		}
		o.home, o.event = s, e
	}
	l.last.Store(nil) // the next use looks
	return l.turnLocked(s)
}

// leaveHome ends the order with the communicator.
func (l *library) leaveHome() {
	o := &l.order
	o.Lock()
	defer o.Unlock()
	if o.event != nil {
		o.event.Close()
	}
	o.at, o.home, o.event = nil, nil, nil
}

// settleBytes is any length: with different ends the library really launches something.
const settleBytes = 16

// moveFrom makes this package's own stream the last one instead of s, which is about to be closed, or to capture: then nothing can be ordered behind it any more. Where that
// fails the next use says so.
func (l *library) moveFrom(s *cuda.Stream) {
	o := &l.order
	o.Lock()
	defer o.Unlock()
	if o.home == nil || o.at != s {
		return
	}
	l.last.Store(nil)
	l.turnLocked(o.home)
}
