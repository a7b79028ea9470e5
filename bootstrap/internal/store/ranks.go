package store

import "fmt"

// Join enters a rank. A rank joins once.
func (s *Store) Join(rank int, host string) *Error {
	s.mu.Lock()
	defer s.unlock()
	if rank < 0 || rank >= s.size {
		return refused("rank %d of a job of %d", rank, s.size)
	}
	r := &s.ranks[rank]
	switch {
	case r.left:
		return refused("rank %d has left the job", rank)
	case r.end != nil:
		return refused("rank %d has ended: it %s", rank, r.end.Cause)
	case r.joined:
		return refused("rank %d has already joined", rank)
	}
	r.joined = true
	s.names[s.nodeOf[rank]] = host
	s.event(Event{Kind: Joined, Node: s.nodeOf[rank], End: End{Rank: rank, Host: host}})
	return nil
}

// NameHost enters the name of a host of which no rank need have joined.
func (s *Store) NameHost(node int, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names[node] = name
}

// HostName is the name of a host, "" until it is known.
func (s *Store) HostName(node int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[node]
}

// hostsOf are the names of the ranks' hosts; nil in a job of one.
func (s *Store) hostsOf(ranks []int) []string {
	if len(s.names) <= 1 || len(ranks) == 0 {
		return nil
	}
	hosts := make([]string, len(ranks))
	for i, r := range ranks {
		hosts[i] = s.names[s.nodeOf[r]]
	}
	return hosts
}

// Leave enters a rank's goodbye.
func (s *Store) Leave(rank int, host string) {
	s.endRank(Left, End{Rank: rank, Host: host, Cause: "left the job", Left: true})
}

// Die enters a rank's death: of one that had joined, or whose process failed before.
func (s *Store) Die(rank int, host, cause string) {
	s.endRank(Died, End{Rank: rank, Host: host, Cause: cause})
}

// GoneCause is the cause of a rank that ended without failing and without joining.
const GoneCause = "ended (exit code 0) without joining the job"

// Gone enters that a rank will never join, which is no death but ends every wait for it.
func (s *Store) Gone(rank int, host string) {
	s.endRank(0, End{Rank: rank, Host: host, Cause: GoneCause})
}

// LoseHost enters the loss of a host and the death of its ranks; detail may be empty.
func (s *Store) LoseHost(node int, host, detail string) {
	if detail != "" {
		detail = ": " + detail
	}
	s.mu.Lock()
	defer s.unlock()
	if node < 0 || node >= len(s.lost) || s.lost[node] {
		return
	}
	s.lost[node] = true
	s.event(Event{Kind: HostLost, Node: node, End: End{Rank: -1, Host: host, Cause: "was lost" + detail}})
	for rank, n := range s.nodeOf {
		if n == node && s.ranks[rank].end == nil {
			s.end(Died, End{Rank: rank, Host: host, Cause: "was lost with its host " + host + detail})
		}
	}
}

func (s *Store) endRank(kind EventKind, end End) {
	s.mu.Lock()
	defer s.unlock()
	if end.Rank < 0 || end.Rank >= s.size {
		return
	}
	s.end(kind, end)
}

func (s *Store) end(kind EventKind, end End) {
	r := &s.ranks[end.Rank]
	if r.end != nil {
		// Only a failure after a goodbye is news.
		if kind == Died && r.left && r.end.Left {
			r.end = &end
			s.died++
			s.event(Event{Kind: Died, Node: s.nodeOf[end.Rank], End: end})
		}
		return
	}
	s.ended++
	r.end, r.left, r.order = &end, end.Left, s.ended
	if kind == Died {
		s.died++
	}
	if kind != 0 {
		s.event(Event{Kind: kind, Node: s.nodeOf[end.Rank], End: end})
	}

	// Its own waits go, and the waits of others for it.
	for id, w := range s.pending {
		if id.rank == end.Rank {
			s.drop(w)
			s.settle(w, Reply{Err: &Error{Kind: Ended, End: end}})
		}
	}
	for _, g := range s.groups {
		if m, ok := g.member(end.Rank); ok {
			for _, gen := range g.gens {
				if !gen.arrived[m] && gen.err == nil {
					s.fail(gen, &Error{Kind: Ended, End: *s.firstEnd(gen.missing())})
				}
			}
			s.forget(g)
		}
	}
	for _, table := range []map[string]*entry{s.keys, s.ids} {
		for _, e := range table {
			if !e.set {
				s.failOrphans(e)
			}
		}
	}
}

// firstEnd is the end to name of those that have ended among ranks: the first death, else the first to leave.
func (s *Store) firstEnd(ranks []int) *End {
	var first *rank
	for _, n := range ranks {
		r := &s.ranks[n]
		if r.end == nil {
			continue
		}
		if first == nil || first.end.Left && !r.end.Left ||
			first.end.Left == r.end.Left && r.order < first.order {
			first = r
		}
	}
	if first == nil {
		return nil
	}
	return first.end
}

// Status reports how far a rank is; end is nil while it lives.
func (s *Store) Status(rank int) (joined bool, end *End) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if rank < 0 || rank >= s.size {
		return false, nil
	}
	r := &s.ranks[rank]
	if r.end == nil {
		return r.joined, nil
	}
	e := *r.end
	return r.joined, &e
}

// Lost reports whether a host was given up.
func (s *Store) Lost(node int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost[node]
}

// Over reports whether all ranks have ended.
func (s *Store) Over() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended == s.size
}

func (s *Store) event(e Event) {
	s.events = append(s.events, e)
	close(s.changed)
	s.changed = make(chan struct{})
}

// Events returns the history from an index on, and a channel that is closed when there is more.
func (s *Store) Events(from int) ([]Event, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events[min(from, len(s.events)):len(s.events):len(s.events)], s.changed
}

// Apply enters an event that another host's store had: this store is its replica.
func (s *Store) Apply(e Event) error {
	s.mu.Lock()
	defer s.unlock()
	if e.Kind != HostLost && (e.End.Rank < 0 || e.End.Rank >= s.size) {
		return fmt.Errorf("event of rank %d in a job of %d", e.End.Rank, s.size)
	}
	switch e.Kind {
	case Joined:
		if r := &s.ranks[e.End.Rank]; !r.joined {
			r.joined = true
			s.event(e)
		}
	case Left, Died:
		s.end(e.Kind, e.End)
	case HostLost:
		if e.Node < 0 || e.Node >= len(s.lost) {
			return fmt.Errorf("event of host %d in a job on %d", e.Node, len(s.lost))
		}
		if !s.lost[e.Node] {
			s.lost[e.Node] = true
			s.event(e)
		}
	default:
		return fmt.Errorf("event of unknown kind %d", e.Kind)
	}
	return nil
}
