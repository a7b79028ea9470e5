package launcher

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// stops sees that this process was stopped: what it did not hear meanwhile says nothing.
type stops struct{ last time.Time }

// passed is called every beat. It reports whether one is far from the one before.
func (s *stops) passed(now time.Time) bool {
	stopped := !s.last.IsZero() && now.Sub(s.last) > paused
	s.last = now
	return stopped
}

// heartbeat is one side of a session's.
type heartbeat struct {
	stops
	mux   *agentwire.Mux
	heard time.Time // when the other side was heard, no earlier than the end of our own last stop
}

func newHeartbeat(mux *agentwire.Mux) *heartbeat {
	now := time.Now()
	return &heartbeat{stops{now}, mux, now}
}

// beat is called every beat: it says something, unless quiet, and returns for how long the other side has been silent, and whether this process
// was stopped since the last beat.
func (h *heartbeat) beat(now time.Time, quiet bool) (silent time.Duration, stopped bool) {
	if stopped = h.passed(now); stopped {
		h.heard = now
	}
	if !quiet && h.mux.Idle() {
		h.mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
	}
	if at := h.mux.Heard(); at.After(h.heard) {
		h.heard = at
	}
	return now.Sub(h.heard), stopped
}

// sayBye has an agent end, and ends the session when it has, or is slow to, or ctx ends.
func sayBye(ctx context.Context, mux *agentwire.Mux) {
	ctx, cancel := context.WithTimeout(ctx, farewell)
	defer cancel()
	mux.Send(&agentwire.Message{Bye: &agentwire.Empty{}})
	select {
	case <-mux.Done():
	case <-ctx.Done():
	}
	mux.Close()
}

// tend keeps the heartbeat of a session in which nobody else does: an agent ends when it does not hear of gorun, however long other hosts take. It calls
// lost, if that is not nil, when the other side is silent, and is done then. It says nothing while quiet, if that is not nil. The function that it returns
// ends it, and may be called again.
func tend(mux *agentwire.Mux, quiet *atomic.Bool, lost func(error)) (end func()) {
	quit := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		tick := time.NewTicker(beat)
		defer tick.Stop()
		pulse := newHeartbeat(mux)
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			if silent, _ := pulse.beat(time.Now(), quiet != nil && quiet.Load()); silent > silentAgreed && lost != nil {
				lost(fmt.Errorf("no answer for %v", silent.Round(time.Second)))
				return
			}
		}
	})
	return sync.OnceFunc(func() {
		close(quit)
		wait.Wait()
	})
}
