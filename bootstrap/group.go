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
// A name can be open once at a time in a rank; "world" is the group of all ranks. The job remembers each name that
// was used, so that the name can be used again.
func (j *Job) Group(name string, ranks []int) (*Group, error) {
	return j.newGroup(name, ranks, false)
}

// GroupOnce is Group for a name that the job uses once and never again, such as one with a number in it: nothing of it is remembered after Close.
func (j *Job) GroupOnce(name string, ranks []int) (*Group, error) {
	return j.newGroup(name, ranks, true)
}

func (j *Job) newGroup(name string, ranks []int, once bool) (*Group, error) {
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
	if !once {
		j.openings[name]++
	}
	j.groups[name] = g
	return g, nil
}

// Name is the group's name.
func (g *Group) Name() string { return g.name }

// Rank is this rank's index in Ranks.
func (g *Group) Rank() int { return g.index }

// Size is the number of members.
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

// Barrier waits for all members. One that gives up (its context ended) gets a *WaitError and counts as having come: the others
// pass, so that the group stays usable.
func (g *Group) Barrier(ctx context.Context) error {
	_, err := g.gather(ctx, "barrier", &store.Request{Barrier: true})
	return err
}

// AllGather gives every member the values (at most 64 KiB each) of all, in group order.
//
// It ends with an error when ctx ends (naming the members that are missing: *WaitError), or when a member
// has died or left (naming it: *RankError) that had not given its value. After an error at one member the generation is over for
// that member only: its value stays given (even where ctx had ended before the call), so that the others may complete, and
// the group stays usable.
func (g *Group) AllGather(ctx context.Context, value []byte) ([][]byte, error) {
	return g.gather(ctx, "all-gather", &store.Request{Value: value})
}

// Meet is AllGather for an operation that blocks its caller: what names it ("all-reduce #3 on comm world,
// train.go:41"), for the errors of others. A cycle of ranks that each wait in Meet for one that waits in
// another Meet is an error (*CycleError) on all of them, naming the operations; it comes when the circle has stood for a
// quarter of a second, since a rank with several goroutines may be about to break it.
//
// A meeting takes place for all members or for none: an error is one for all of them, also for those that come later. Where a member's ctx ended,
// the others' error (*GaveUpError) names it. The group stays usable after both.
func (g *Group) Meet(ctx context.Context, value []byte, what string) ([][]byte, error) {
	if what == "" {
		what = "meeting of group " + g.name
	}
	return g.gather(ctx, "", &store.Request{Value: value, What: what})
}

// gather takes part in the next generation. word names the operation in errors, if q.What does not.
func (g *Group) gather(ctx context.Context, word string, q *store.Request) ([][]byte, error) {
	op := q.What
	if op == "" {
		op = fmt.Sprintf("%s of group %s", word, g.name)
	}
	// What never reaches the others must not count as a generation.
	if g.closed.Load() {
		return nil, fmt.Errorf("%s: the group is closed", op)
	}
	if err := checkSize(op, q); err != nil {
		return nil, err
	}
	q.Kind, q.Name, q.Opening, q.Ranks = store.Gather, g.name, g.opening, g.ranks
	q.Gen = g.gen.Add(1)
	if q.What == "" {
		op = fmt.Sprintf("%s #%d of group %s", word, q.Gen, g.name)
	}
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
