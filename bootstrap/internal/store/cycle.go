package store

import (
	"time"
)

// cycleAge is how old the waits of a circle must be before it is reported. A rank that meets in two
// groups from two goroutines closes a circle for the moment between the two calls.
const cycleAge = 250 * time.Millisecond

// watchCycles looks at a new wait; if it closes a circle the circle is looked at again when it is old enough.
func (s *Store) watchCycles(w *wait) {
	w.since = time.Now()
	if s.blocked < 2 || s.cycleTimer != nil {
		return
	}
	if len(s.stuck(time.Time{})) > 0 {
		s.armCycleTimer()
	}
}

func (s *Store) armCycleTimer() {
	if s.broken == nil {
		s.cycleTimer = time.AfterFunc(cycleAge+cycleAge/10, s.reportCycles)
	}
}

func (s *Store) stopCycleTimer() {
	if s.cycleTimer != nil {
		s.cycleTimer.Stop()
		s.cycleTimer = nil
	}
}

func (s *Store) reportCycles() {
	s.mu.Lock()
	defer s.unlock()
	s.cycleTimer = nil
	if s.broken != nil {
		return
	}
	for {
		stuck := s.stuck(time.Now().Add(-cycleAge))
		if len(stuck) == 0 {
			break
		}
		circle := s.circle(stuck)
		err := &Error{Kind: Cycle}
		for _, w := range circle {
			err.Waits = append(err.Waits, CycleWait{w.rank, w.what})
		}
		for _, w := range circle {
			s.fail(w.gen, err)
		}
	}
	if len(s.stuck(time.Time{})) > 0 {
		s.armCycleTimer() // younger ones
	}
}

// stuck finds the waits of which none can end: each misses a rank that is itself in such a wait with
// everything it waits in. Waits that began after before count as able to end; the zero time takes all.
func (s *Store) stuck(before time.Time) map[*wait]bool {
	of := map[int][]*wait{} // by rank
	stuck := map[*wait]bool{}
	for _, w := range s.pending {
		if w.what != "" {
			of[w.rank] = append(of[w.rank], w)
			stuck[w] = before.IsZero() || w.since.Before(before)
		}
	}
	for again := true; again; {
		again = false
		for w, is := range stuck {
			if is && s.blocker(w, of, stuck) == nil {
				stuck[w] = false
				again = true
			}
		}
	}
	for w, is := range stuck {
		if !is {
			delete(stuck, w)
		}
	}
	return stuck
}

// blocker is a stuck wait of the first rank that w misses and that is in stuck waits only.
func (s *Store) blocker(w *wait, of map[int][]*wait, stuck map[*wait]bool) *wait {
	for _, rank := range w.gen.missing() {
		var first *wait
		for _, other := range of[rank] {
			if !stuck[other] {
				first = nil
				break
			}
			if first == nil || other.id < first.id {
				first = other
			}
		}
		if first != nil {
			return first
		}
	}
	return nil
}

// circle follows the waits from the one of the lowest rank until it comes back to one that it has seen.
func (s *Store) circle(stuck map[*wait]bool) []*wait {
	of := map[int][]*wait{}
	var w *wait
	for other := range stuck {
		of[other.rank] = append(of[other.rank], other)
		if w == nil || other.rank < w.rank || other.rank == w.rank && other.id < w.id {
			w = other
		}
	}
	seen := map[*wait]int{}
	var path []*wait
	for {
		if at, ok := seen[w]; ok {
			return path[at:]
		}
		seen[w] = len(path)
		path = append(path, w)
		w = s.blocker(w, of, stuck)
	}
}
