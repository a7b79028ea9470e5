package nccl

import (
	"context"
	"fmt"
	"slices"

	"github.com/gorun-dev/gorun/bootstrap"
)

// Group makes the calls of fn on the given communicators one call: its Sends and Recvs go on together. Nothing is issued if fn fails.
// The collectives of a group run in the order of their calls, its Sends and Recvs after them, on one stream for each communicator.
// Groups nest: the outermost issues. Calls on other communicators are issued at once.
func Group(fn func() error, comms ...*Comm) (err error) {
	var own []*Comm // each once
	for _, c := range comms {
		if c == nil {
			return c.errorf("group", errNoComm)
		}
		if !slices.Contains(own, c) {
			own = append(own, c)
		}
	}
	before := make([]int, len(own))
	for i, c := range own {
		c.grouping++
		before[i] = len(c.collected)
	}
	good := false
	defer func() {
		for i, c := range own {
			if !good {
				c.collected = c.collected[:before[i]]
			}
			c.grouping--
		}
	}()
	if err := fn(); err != nil {
		return err
	}
	good = true
	var mine []*Comm // those for which this is the outermost group
	for _, c := range own {
		if c.grouping == 1 && len(c.collected) > 0 {
			mine = append(mine, c)
		}
	}
	// In an order that is the same on all members.
	slices.SortFunc(mine, func(a, b *Comm) int { return slices.Compare(a.uid[:], b.uid[:]) })
	calls := make([][]Call, len(mine))
	for i, c := range mine {
		// Sends and Recvs last. The slice is the gate's and the backend's to keep.
		for _, p2p := range []bool{false, true} {
			for _, call := range c.collected {
				if call.Op.p2p() == p2p {
					calls[i] = append(calls[i], call)
				}
			}
		}
		c.collected = c.collected[:0]
	}
	for i, c := range mine {
		if err := c.validateGroup(calls[i]); err != nil {
			return err
		}
	}
	modes := make([]Mode, len(mine))
	for i, c := range mine {
		if modes[i], err = c.admit(calls[i]); err != nil {
			return err
		}
	}
	for i, c := range mine {
		if err := c.issue(calls[i], modes[i]); err != nil {
			return err
		}
	}
	return nil
}

// enqueue is every call's way: collected by a Group, or issued.
func (c *Comm) enqueue(call Call) error {
	if c == nil {
		return c.errorf(call.Op.String(), errNoComm)
	}
	if c.grouping > 0 {
		c.collected = append(c.collected, call)
		return nil
	}
	c.one[0] = call
	calls := c.one[:]
	if err := c.validateGroup(calls); err != nil {
		return err
	}
	mode, err := c.admit(calls)
	if err != nil {
		return err
	}
	return c.issue(calls, mode)
}

func (c *Comm) validateGroup(calls []Call) error {
	if err := c.usable(); err != nil {
		return c.errorf(calls[0].Op.String(), err)
	}
	captured := false
	var p2p *Call
	var self [2][]*Call // to and from this rank itself
	for i := range calls {
		call := &calls[i]
		if err := c.validate(call); err != nil {
			return err
		}
		if is := call.Stream.Capture() != nil; i == 0 {
			captured = is
		} else if is != captured {
			return c.badCall(call.Op, "some streams of the group capture, some do not")
		}
		if !call.Op.p2p() {
			continue
		}
		if p2p == nil {
			p2p = call
		} else if p2p.Stream != call.Stream {
			return c.badCall(call.Op, "the sends and receives of a group on one communicator go to one stream")
		}
		if int(call.Root) == c.rank {
			self[call.Op-OpSend] = append(self[call.Op-OpSend], call)
		}
	}
	for i := range max(len(self[0]), len(self[1])) {
		switch {
		case i >= len(self[0]):
			return c.badCall(OpRecv, "from this rank itself without a send to it in the same group")
		case i >= len(self[1]):
			return c.badCall(OpSend, "to this rank itself without a recv from it in the same group")
		case self[0][i].Count != self[1][i].Count || self[0][i].Type != self[1][i].Type:
			return c.badCall(OpSend, "to itself: %v meets %v", self[0][i], self[1][i])
		}
	}
	return nil
}

// admit asks the lease's gate about captured calls and refuses what the lease does not allow. Mode 0 is an eager call.
func (c *Comm) admit(calls []Call) (Mode, error) {
	gate := c.lease()
	if calls[0].Stream.Capture() == nil {
		if gate != nil {
			return 0, c.errorf(calls[0].Op.String(), fmt.Errorf("%w: %s; the stream of this call does not capture", ErrInUse, whoText(gate)))
		}
		if c.check == Strict {
			return 0, c.strict(calls)
		}
		return 0, nil
	}
	if gate == nil {
		return 0, c.errorf(calls[0].Op.String(), causef(ErrArgument, "the stream captures, but not by graphs.Capture with this communicator in graphs.Comms"))
	}
	mode, err := gate.Admit(c, slices.Clone(calls))
	if err != nil {
		return 0, err
	}
	if mode < Plain || mode > Window {
		return 0, c.errorf(calls[0].Op.String(), fmt.Errorf("the gate chose unknown mode %d", mode))
	}
	return mode, nil
}

// strict compares the calls with those of all members before they are issued.
func (c *Comm) strict(calls []Call) error {
	if !hasCollective(calls) || len(c.ranks) == 1 {
		return nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, c.timeout)
	defer cancel()
	name := calls[0].Op.String()
	all, err := c.Meet(ctx, Describe(calls), callsText(calls))
	if err != nil {
		return err
	}
	for r := range all {
		if d := ExplainDifference(0, all[0], r, all[r]); d != "" {
			return c.errorf(name, causef(ErrMismatch, "%s", d))
		}
	}
	return nil
}

func hasCollective(calls []Call) bool { return !calls[0].Op.p2p() } // p2p calls come last

// issue writes the ledger and hands the calls to the backend.
func (c *Comm) issue(calls []Call, mode Mode) error {
	if mode == 0 && hasCollective(calls) {
		rec := bootstrap.Record{Kind: bootstrap.Enqueued}
		l, isLibrary := c.be.(*library)
		if isLibrary {
			var err error
			if rec.Desc, err = l.record(calls); err != nil {
				return c.errorf(opName(calls), c.fail(err, true, false))
			}
		} else {
			rec.Desc = packRecord(calls)
		}
		rec.Seq = c.acct.Append(rec.Kind, rec.Desc)
		for i := range calls {
			calls[i].Seq = rec.Seq
		}
		var err error
		if !isLibrary {
			err = c.compare(rec)
		} else if c.lookDue() {
			err = c.lookNow()
		}
		if err != nil {
			return c.errorf(opName(calls), err)
		}
	}
	if err := c.be.issue(calls, mode); err != nil {
		return c.errorf(opName(calls), err)
	}
	return nil
}

// opName is "all-reduce #7".
func opName(calls []Call) string {
	s := calls[0].Op.String()
	if len(calls) > 1 {
		s = fmt.Sprintf("group of %d calls", len(calls))
	}
	if calls[0].Seq > 0 {
		s += fmt.Sprintf(" #%d", calls[0].Seq)
	}
	return s
}
