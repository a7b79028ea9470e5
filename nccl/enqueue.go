package nccl

import (
	"context"
	"fmt"
	"slices"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// Group makes the calls of fn on the given communicators one call: its Sends and Recvs go on together. Nothing is issued if fn fails.
// The collectives of a group run in the order of their calls, its Sends and Recvs after them, on one stream for each communicator.
// Groups nest: the outermost issues. Calls on other communicators are issued at once.
func Group(fn func() error, comms ...*Comm) error {
	if len(comms) == 1 && comms[0] != nil {
		c := comms[0]
		if err := c.collect(fn); err != nil || c.grouping > 0 || len(c.collected) == 0 {
			return err
		}
		return c.issueCollected()
	}
	return groupAll(fn, comms)
}

// groupAll is Group for any number of communicators.
func groupAll(fn func() error, comms []*Comm) (err error) {
	var few [2]grouped // no allocation
	own := few[:0]     // each once
	for _, c := range comms {
		if c == nil {
			return c.errorf("group", errNoComm)
		}
		if !slices.ContainsFunc(own, func(g grouped) bool { return g.c == c }) {
			own = append(own, grouped{c: c, before: len(c.collected)})
		}
	}
	for _, g := range own {
		g.c.grouping++
	}
	good := false
	defer func() {
		for _, g := range own {
			if !good {
				g.c.collected = g.c.collected[:g.before]
			}
			g.c.grouping--
		}
	}()
	if err := fn(); err != nil {
		return err
	}
	good = true
	var fewer [2]grouped
	mine := fewer[:0] // those for which this is the outermost group
	for _, g := range own {
		if g.c.grouping == 1 && len(g.c.collected) > 0 {
			mine = append(mine, g)
		}
	}
	if len(mine) > 1 { // in an order that is the same on all members
		slices.SortFunc(mine, func(a, b grouped) int { return slices.Compare(a.c.uid[:], b.c.uid[:]) })
	}
	for _, g := range mine {
		g.c.sortCollected()
	}
	for _, g := range mine {
		if err := g.c.validateGroup(g.c.sorted); err != nil {
			return err
		}
	}
	for i, g := range mine {
		if mine[i].mode, err = g.c.admit(g.c.sorted); err != nil {
			return err
		}
	}
	for _, g := range mine {
		if err := g.c.issue(g.c.sorted, g.mode); err != nil {
			return err
		}
	}
	return nil
}

// issueCollected issues what a Group on this communicator alone has collected.
func (c *Comm) issueCollected() error {
	if l := c.lib; l != nil && l.straightMessages(c.collected) {
		calls := c.collected
		c.collected = calls[:0]
		return l.issueMessages(calls)
	}
	c.sortCollected()
	return c.enqueueTogether(c.sorted)
}

// collect calls fn and keeps its calls on the communicator, none of them if it fails.
func (c *Comm) collect(fn func() error) (err error) {
	before := len(c.collected)
	c.grouping++
	good := false
	defer func() {
		if !good {
			c.collected = c.collected[:before]
		}
		c.grouping--
	}()
	err = fn()
	good = err == nil
	return err
}

// grouped is a communicator in a Group.
type grouped struct {
	c      *Comm
	before int // calls that an outer group has collected
	mode   Mode
}

// sortCollected makes sorted of what was collected: Sends and Recvs last.
func (c *Comm) sortCollected() {
	c.sorted = c.sorted[:0]
	for _, p2p := range [...]bool{false, true} {
		for i := range c.collected {
			if c.collected[i].Op.p2p() == p2p {
				c.sorted = append(c.sorted, c.collected[i])
			}
		}
	}
	c.collected = c.collected[:0]
}

// enqueue is every call's way: collected by a Group, or issued.
func (c *Comm) enqueue(call Call) error {
	if c == nil {
		return c.errorf(call.Op.String(), errNoComm)
	}
	if l := c.lib; l != nil && l.straight(&call) {
		return l.issueStraight(&call)
	}
	return c.enqueueAny(&call)
}

func (c *Comm) enqueueAny(call *Call) error {
	if c.grouping > 0 {
		c.collected = append(c.collected, *call)
		return nil
	}
	c.one[0] = *call
	return c.enqueueTogether(c.one[:])
}

// message is enqueue for a Send or Recv. Its arguments are as many as there are registers for, and no more.
func (c *Comm) message(op Op, t cuda.DType, peer int32, count uint64, mem *cuda.Memory, off, length uint64, s *cuda.Stream) error {
	if c == nil {
		return c.errorf(op.String(), errNoComm)
	}
	call := &c.one[0]
	if c.grouping > 0 {
		n := len(c.collected)
		if n == cap(c.collected) {
			c.collected = slices.Grow(c.collected, 1)
		}
		c.collected = c.collected[:n+1]
		call = &c.collected[n]
	}
	call.Op, call.Type, call.Red, call.Root, call.Count, call.Seq = op, t, 0, peer, count, 0
	r, none := &call.Recv, &call.Send
	if op == OpSend {
		r, none = none, r
	}
	r.Mem, r.Off, r.Len = mem, off, length
	none.Mem, none.Off, none.Len = nil, 0, 0
	call.Stream = s
	if c.grouping > 0 {
		return nil
	}
	if l := c.lib; l != nil && l.straightMessages(c.one[:]) {
		return l.issueMessages(c.one[:])
	}
	return c.enqueueTogether(c.one[:])
}

// enqueueTogether validates, admits and issues the calls of a group, of which Sends and Recvs are the last.
func (c *Comm) enqueueTogether(calls []Call) error {
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
	if mode < Plain || mode > Peer {
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
		if err == nil && isLibrary {
			err = l.agreeFirst(rec, calls)
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
