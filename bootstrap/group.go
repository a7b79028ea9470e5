package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

const worldName = "world"

// Group is an ordered subset of the job's ranks that meets on its own: each operation carries a
// generation, so two in a row cannot race. All members create it under the same name with the same ranks.
type Group struct {
	job     *Job
	name    string
	opening uint32
	ranks   []int // nil: all
	index   int
	size    int
	gen     atomic.Uint64
	closed  atomic.Bool
}

// Group makes this rank's handle. ranks are job ranks, in group order, and contain this rank.
// It does not communicate; a member with another list under the same name makes the next Meet fail on all.
// A name can be open once at a time in a rank; "world" is the group of all ranks.
func (j *Job) Group(name string, ranks []int) (*Group, error) {
	fail := func(format string, args ...any) (*Group, error) {
		return nil, fmt.Errorf("group %q: %s", name, fmt.Sprintf(format, args...))
	}
	if name == "" || len(name) > store.MaxName {
		return fail("a name has 1 to %d bytes", store.MaxName)
	}
	seen := make(map[int]bool, len(ranks))
	for _, r := range ranks {
		if r < 0 || r >= j.size {
			return fail("rank %d of a job of %d", r, j.size)
		}
		if seen[r] {
			return fail("rank %d is listed twice", r)
		}
		seen[r] = true
	}
	index := slices.Index(ranks, j.rank)
	if index < 0 {
		return fail("rank %d makes it but is not in it", j.rank)
	}

	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, fmt.Errorf("group %q: %w", name, ErrClosed)
	}
	if j.groups[name] != nil {
		return fail("it is already open in rank %d", j.rank)
	}
	g := &Group{job: j, name: name, opening: j.openings[name], ranks: slices.Clone(ranks), index: index, size: len(ranks)}
	j.openings[name]++
	j.groups[name] = g
	return g, nil
}

func (g *Group) Name() string { return g.name }

// Rank is this rank's index in Ranks.
func (g *Group) Rank() int { return g.index }
func (g *Group) Size() int { return g.size }

// Ranks are the job ranks of the members; not to be changed.
func (g *Group) Ranks() []int {
	if g.ranks != nil {
		return g.ranks
	}
	all := make([]int, g.size)
	for i := range all {
		all[i] = i
	}
	return all
}

// Barrier waits for all members.
func (g *Group) Barrier(ctx context.Context) error {
	gen := g.gen.Add(1)
	_, err := g.gather(ctx, fmt.Sprintf("barrier #%d of group %s", gen, g.name), &store.Request{Gen: gen, Barrier: true})
	return err
}

// AllGather gives every member the values (at most 64 KiB each) of all, in group order.
//
// It ends with an error when ctx ends (naming the members that are missing: *WaitError), or when a member
// has died or left (naming it: *RankError) that had not given its value. After an error at one member the generation is over for
// that member only: its value stays given, so that the others may complete, and the group stays usable.
func (g *Group) AllGather(ctx context.Context, value []byte) ([][]byte, error) {
	gen := g.gen.Add(1)
	return g.gather(ctx, fmt.Sprintf("all-gather #%d of group %s", gen, g.name), &store.Request{Gen: gen, Value: value})
}

// Meet is AllGather for an operation that blocks its caller: what names it ("all-reduce #3 on comm world,
// train.go:41"), for the errors of others. A cycle of ranks that each wait in Meet for one that waits in
// another Meet is an error (*CycleError) on all of them, naming the operations; it comes when the circle has stood for a
// quarter of a second, since a rank with several goroutines may be about to break it.
//
// A Meet takes place for all members or for none: an error is one for all, also for those that come later, and where a member's ctx ended it
// names that member. So the group stays usable after any error but the end of a member.
func (g *Group) Meet(ctx context.Context, value []byte, what string) ([][]byte, error) {
	gen := g.gen.Add(1)
	if what == "" {
		what = fmt.Sprintf("meeting #%d of group %s", gen, g.name)
	}
	return g.gather(ctx, what, &store.Request{Gen: gen, Value: value, What: what})
}

func (g *Group) gather(ctx context.Context, op string, q *store.Request) ([][]byte, error) {
	if g.closed.Load() {
		return nil, fmt.Errorf("%s: the group is closed", op)
	}
	q.Kind, q.Name, q.Opening, q.Ranks = store.Gather, g.name, g.opening, g.ranks
	r, err := g.job.call(ctx, op, q)
	if err != nil {
		return nil, err
	}
	if q.Barrier {
		return nil, nil
	}
	if len(r.Values) != g.size {
		return nil, fmt.Errorf("%s: %w: %d values for %d members", op, ErrLost, len(r.Values), g.size)
	}
	return r.Values, nil
}

// Close gives up the handle; the name may be used again after all members have closed it.
// The group of all ranks stays open.
func (g *Group) Close() error {
	if g.name == worldName && g.ranks == nil || g.closed.Swap(true) {
		return nil
	}
	j := g.job
	j.mu.Lock()
	closed := j.closed
	if j.groups[g.name] == g {
		delete(j.groups, g.name)
	}
	j.mu.Unlock()
	if !closed {
		j.ctl.start(j.next.Add(1), &store.Request{Kind: store.CloseGroup, Name: g.name, Opening: g.opening}, func(store.Reply) {})
	}
	return nil
}
