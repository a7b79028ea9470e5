package nccl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// Shrink makes a communicator of the members that are not in exclude (ranks in this communicator), in the same order. Those in exclude do not call it, and may be dead:
// it works also when this communicator has failed, so that the survivors of a rank's end go on; whose end it was is in the failure (errors.AsType with
// *bootstrap.RankError, which has the rank in the job). All others call it with the same ranks, else all get an error (ErrMismatch), as when one that is
// not excluded has ended (ErrRank), or does not come before ctx ends or the communicator's timeout. After such an error all may call it again.
//
// On the host platform members write to each other's buffers, and after a failure one may be in the middle of it. When Shrink returns, no member of the new
// communicator is.
//
// This communicator stays as it is; close it (one that has failed, also before). After a failure take new streams for the new one: those of a failed communicator tell its failure.
// A library that can (NCCL 2.27.3) makes the new one from a communicator that works.
func (c *Comm) Shrink(ctx context.Context, exclude []int) (*Comm, error) {
	if c == nil {
		return nil, c.errorf("shrink", errNoComm)
	}
	c.shrinks++
	fail := func(err error) (*Comm, error) { return nil, c.errorf("shrink", err) }
	leave := slices.AppendSeq([]int{}, slices.Values(exclude))
	slices.Sort(leave)
	for i, r := range leave {
		switch {
		case r < 0 || r >= len(c.ranks):
			return fail(causef(ErrArgument, "exclude %v: rank %d is no rank of a communicator of %d", exclude, r, len(c.ranks)))
		case i > 0 && r == leave[i-1]:
			return fail(causef(ErrArgument, "exclude %v: rank %d is twice in it", exclude, r))
		case r == c.rank:
			return fail(causef(ErrArgument, "exclude %v: rank %d itself calls", exclude, r))
		}
	}
	if err := c.usable(); err != nil && c.failed.Load() == nil {
		return fail(err)
	}
	c.mu.Lock()
	gate := c.gate
	c.mu.Unlock()
	if gate != nil && c.failed.Load() == nil {
		return fail(fmt.Errorf("%w: %s", ErrInUse, whoText(gate)))
	}
	ctx, done := context.WithTimeout(ctx, c.timeout)
	defer done()
	meeting := fmt.Sprintf("%s shrink %d", c.key, c.shrinks)
	if err := c.agreeShrink(ctx, meeting, leave); err != nil {
		return fail(err)
	}
	if h, ok := c.be.(*host); ok {
		h.notice()
	}
	if c.failed.Load() != nil {
		c.waitEnded() // its abort comes first
	}
	set := Config{Name: shrunkName(c.name, leave), Timeout: c.timeout, Check: c.check, NoPeer: c.noPeer}
	for r, j := range c.ranks {
		if !slices.Contains(leave, r) {
			set.Ranks = append(set.Ranks, j)
		}
	}
	return initComm(ctx, c.job, c.dev, set, meeting, c.shrinkOrigin(leave))
}

// shrunkName is "world without 1, 3".
func shrunkName(name string, leave []int) string {
	switch {
	case len(leave) == 0:
		return name + " again"
	case len(leave) > 4:
		return fmt.Sprintf("%s without %d ranks", name, len(leave))
	}
	joint := " without "
	for _, r := range leave {
		name += fmt.Sprintf("%s%d", joint, r)
		joint = ", "
	}
	return name
}

// shrinkOrigin is nil where no library can make it, on all members alike. The library gives the same number to all that it makes so of one communicator: it does so once.
func (c *Comm) shrinkOrigin(leave []int) *origin {
	l, ok := c.be.(*library)
	if !ok || l.sys.Need(ncclsys.Shrink) != nil || len(leave) == 0 || c.shrinks > 1 {
		return nil
	}
	o := &origin{parent: c}
	for _, r := range leave {
		o.leave = append(o.leave, int32(r))
	}
	return o
}

// agreeShrink compares what the members that stay leave out. Each tells it to all that it would have with it.
func (c *Comm) agreeShrink(ctx context.Context, meeting string, leave []int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := func(rank int, err *bootstrap.RankError) error {
		r := slices.Index(c.ranks, rank)
		if err == nil || r < 0 || slices.Contains(leave, r) {
			return nil
		}
		return &cause{kind: ErrRank, err: err, text: fmt.Sprintf("rank %d is not left out, but has ended: %v", r, err)}
	}
	defer c.job.Watch(func(e bootstrap.Event) {
		if e.Kind == bootstrap.RankDied || e.Kind == bootstrap.RankLeft {
			if err := ended(e.Rank, e.Err); err != nil {
				cancel(err)
			}
		}
	})()
	// why is the end of a member where that has ended a wait.
	why := func(r int, err error) error {
		if died, ok := errors.AsType[*cause](context.Cause(ctx)); ok {
			return died
		}
		if died := ended(c.ranks[r], c.job.RankErr(c.ranks[r])); died != nil {
			return died
		}
		return err
	}
	own, err := json.Marshal(leave)
	if err != nil {
		return err
	}
	key := func(r int) string { return fmt.Sprintf("nccl %s rank %d", meeting, r) }
	if err := c.job.Put(ctx, key(c.rank), own); err != nil {
		return why(c.rank, err)
	}
	c.acct.SetBusy("shrink")
	defer c.acct.SetBusy("")
	low := c.rank // the lowest that is known to agree with this one
	for r := range c.ranks {
		if r == c.rank || slices.Contains(leave, r) {
			continue
		}
		theirs, err := c.job.Get(ctx, key(r))
		if err != nil {
			return why(r, fmt.Errorf("%s has not called it: %w", c.named(r), err))
		}
		if string(theirs) == string(own) {
			low = min(low, r)
			continue
		}
		a, b, av, bv := low, r, own, theirs
		if a > b {
			a, b, av, bv = b, a, bv, av
		}
		return causef(ErrMismatch, "rank %d excludes %s, rank %d %s", b, bv, a, av)
	}
	return nil
}
