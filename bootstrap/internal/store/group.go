package store

import (
	"slices"

	"github.com/gorun-dev/gorun/rankenv"
)

type groupKey struct {
	name    string
	opening uint32
}

// A group is one opening of a name by all its members.
type group struct {
	groupKey
	ranks    []int       // nil: all ranks
	index    map[int]int // rank to member; nil: all ranks
	size     int
	by       int // the rank whose list this is
	conflict *Error
	gens     map[uint64]*generation
	closed   map[int]bool
}

// A generation is one meeting of a group.
type generation struct {
	group   *group
	barrier bool
	first   int // the rank that came first
	values  [][]byte
	arrived []bool
	n       int     // how many have arrived
	waits   []*wait // by member
	err     *Error  // it cannot complete: the reply to all who come
}

func (s *Store) newGroup(key groupKey, by int, ranks []int) (*group, *Error) {
	g := &group{groupKey: key, by: by, size: s.size, gens: map[uint64]*generation{}, closed: map[int]bool{}}
	if ranks == nil {
		return g, nil
	}
	g.ranks, g.size, g.index = slices.Clone(ranks), len(ranks), make(map[int]int, len(ranks))
	for i, r := range ranks {
		if _, twice := g.index[r]; twice || r < 0 || r >= s.size {
			return nil, refused("group %q: rank %d is listed twice or is not in the job of %d", key.name, r, s.size)
		}
		g.index[r] = i
	}
	return g, nil
}

// rank is the job rank of a member.
func (g *group) rank(member int) int {
	if g.ranks == nil {
		return member
	}
	return g.ranks[member]
}

func (g *group) member(rank int) (int, bool) {
	if g.ranks == nil {
		return rank, true
	}
	i, ok := g.index[rank]
	return i, ok
}

func (g *generation) missing() []int {
	var ranks []int
	for i, here := range g.arrived {
		if !here {
			ranks = append(ranks, g.group.rank(i))
		}
	}
	slices.Sort(ranks)
	return ranks
}

// groupOf is the group of a rank's request, and the rank's place in it. One that a member has with other ranks is no group for anybody any more.
func (s *Store) groupOf(rank int, q *Request) (g *group, member int, err *Error) {
	key := groupKey{q.Name, q.Opening}
	if g = s.groups[key]; g == nil {
		if g, err = s.newGroup(key, rank, q.Ranks); err != nil {
			return nil, 0, err
		}
		s.groups[key] = g
	}
	if g.conflict == nil && !sameRanks(g.ranks, q.Ranks, s.size) {
		g.conflict = refused("group %q: rank %d has it with %s, rank %d with %s",
			q.Name, g.by, listOf(g.ranks), rank, listOf(q.Ranks))
		for _, gen := range g.gens {
			s.fail(gen, g.conflict)
		}
	}
	if g.conflict != nil {
		return nil, 0, g.conflict
	}
	member, ok := g.member(rank)
	if !ok {
		return nil, 0, refused("group %q: rank %d is not in it", q.Name, rank)
	}
	return g, member, nil
}

// gather is a member's part in a meeting of its group.
func (s *Store) gather(rank int, id uint64, q *Request, done func(Reply)) {
	fail := func(err *Error) { s.reply(done, Reply{Err: err}) }
	g, member, err := s.groupOf(rank, q)
	if err != nil {
		fail(err)
		return
	}
	gen := g.gens[q.Gen]
	if gen == nil {
		gen = &generation{
			group: g, barrier: q.Barrier, first: rank,
			values: make([][]byte, g.size), arrived: make([]bool, g.size), waits: make([]*wait, g.size),
		}
		g.gens[q.Gen] = gen
	}
	if gen.arrived[member] {
		fail(refused("group %q: rank %d came twice to generation %d", q.Name, rank, q.Gen))
		return
	}
	gen.arrived[member] = true
	gen.values[member] = append([]byte{}, q.Value...)
	gen.n++
	if gen.n == g.size {
		delete(g.gens, q.Gen)
	}
	if gen.err == nil && gen.barrier != q.Barrier {
		word := map[bool]string{true: "barrier", false: "all-gather"}
		s.fail(gen, refused("rank %d is in %s #%d, rank %d in %s #%d",
			gen.first, word[gen.barrier], q.Gen, rank, word[q.Barrier], q.Gen))
	}
	if gen.err != nil {
		fail(gen.err)
		return
	}
	if gen.n == g.size {
		r := Reply{Values: gen.values, Coded: &Coded{}}
		if gen.barrier {
			r.Values = nil
		}
		for _, w := range gen.waits {
			if w != nil {
				s.settle(w, r)
			}
		}
		s.reply(done, r)
		return
	}
	if s.ended > 0 {
		if end := s.firstEnd(gen.missing()); end != nil {
			// Who came before could not know yet only if the end is new: fail covers both.
			s.fail(gen, &Error{Kind: Ended, End: *end})
			fail(gen.err)
			return
		}
	}
	w := &wait{waitID: waitID{rank, id}, done: done, gen: gen, member: member, what: q.What}
	gen.waits[member] = w
	s.pending[w.waitID] = w
	if w.what != "" {
		s.blocked++
		s.watchCycles(w)
	}
}

// fail ends a generation for all who wait in it and all who come.
func (s *Store) fail(g *generation, err *Error) {
	if g.err != nil {
		return
	}
	g.err = err
	g.values = make([][]byte, len(g.arrived)) // those that were given are of no use
	for i, w := range g.waits {
		if w != nil {
			g.waits[i] = nil
			s.settle(w, Reply{Err: err})
		}
	}
}

func (s *Store) closeGroup(rank int, q *Request) {
	g := s.groups[groupKey{q.Name, q.Opening}]
	if g == nil {
		return // it was never met in, or all others have ended
	}
	if m, ok := g.member(rank); ok {
		g.closed[m] = true
		s.forget(g)
	}
}

// forget drops a group that no member can use any more.
func (s *Store) forget(g *group) {
	if len(g.closed)+s.ended < g.size {
		return
	}
	for m := range g.size {
		if !g.closed[m] && s.ranks[g.rank(m)].end == nil {
			return
		}
	}
	delete(s.groups, g.groupKey)
}

func sameRanks(a, b []int, size int) bool {
	if len(a) == 0 && len(b) == 0 {
		return true
	}
	if a == nil || b == nil {
		// One says "all": the other may have listed them.
		list := a
		if a == nil {
			list = b
		}
		if len(list) != size {
			return false
		}
		for i, r := range list {
			if i != r {
				return false
			}
		}
		return true
	}
	return slices.Equal(a, b)
}

func listOf(ranks []int) string {
	if ranks == nil {
		return "all ranks"
	}
	if len(ranks) > 16 {
		return rankenv.RankText(ranks[:16]) + ",..."
	}
	return rankenv.RankText(ranks)
}
