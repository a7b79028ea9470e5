package bootstrap

import (
	"sync"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// Event is a change in the job's membership.
type Event struct {
	Kind EventKind
	Rank int        // job rank, or -1 for an event of a host
	Node int        // host index
	Err  *RankError // how the rank ended, for RankLeft and RankDied; of HostLost: Rank -1 and the cause
}

// EventKind is what an event tells of.
type EventKind uint8

const (
	RankJoined EventKind = iota + 1
	RankLeft             // closed its job in good order
	RankDied             // its process ended, or its control connection broke, without goodbye
	HostLost
)

func (k EventKind) String() string {
	switch k {
	case RankJoined:
		return "rank joined"
	case RankLeft:
		return "rank left"
	case RankDied:
		return "rank died"
	case HostLost:
		return "host lost"
	}
	return "unknown event"
}

// Watch calls fn for each event, those of the past first, one at a time, on a goroutine of the job. fn must
// not block and must call neither stop nor Job.Close. After stop has returned fn is not running and is not called again.
func (j *Job) Watch(fn func(Event)) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() {
		close(quit)
		<-done
	})
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return func() {}
	}
	id := j.nextWatch
	j.nextWatch++
	j.watches[id] = end
	j.mu.Unlock()

	go func() {
		defer close(done)
		for from := 0; ; {
			events, more := j.ctl.events(from)
			for _, e := range events {
				select {
				case <-quit:
					return
				default:
				}
				fn(eventOf(e))
			}
			from += len(events)
			if len(events) > 0 {
				continue
			}
			select {
			case <-more:
			case <-quit:
				return
			}
		}
	}()
	return func() {
		end()
		j.mu.Lock()
		delete(j.watches, id)
		j.mu.Unlock()
	}
}

func eventOf(e store.Event) Event {
	ev := Event{Kind: EventKind(e.Kind), Rank: e.End.Rank, Node: e.Node}
	if e.Kind != store.Joined {
		ev.Err = rankError(e.End)
	}
	return ev
}

// RankErr is how the rank ended; nil while it lives.
func (j *Job) RankErr(rank int) *RankError {
	if end := j.ctl.status(rank); end != nil {
		return rankError(*end)
	}
	return nil
}
