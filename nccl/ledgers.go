package nccl

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gorun-dev/gorun/bootstrap"
)

// Each rank writes what it enqueues to its ledger, before it does, and reads those of the other members: on its host in their memory, of those on other hosts what
// was heard last (far.go).
//
// The host's backend compares every record when it is written. A library's calls are so short that reading the peers' memory is a part of what they
// cost: it moves the memory from core to core, here and when the peer writes it again. So there it is read at the first of lookEvery calls, at the first
// call after a wait, before a wait says that all is done, and by the watcher, and of all records since the last look only the newest is: its sum says
// whether the others agree.

// compareAtOnce is how many peers' ledgers a call looks at, where it compares its own record: all of a small communicator; of a large one some at each
// call, so that the cost has a bound.
const compareAtOnce = 8

// compare looks at the peers' ledgers: a record that contradicts the own one ends the communicator, as does a peer that has closed before it.
func (c *Comm) compare(own bootstrap.Record) error {
	n := len(c.ranks)
	for range min(n-1, compareAtOnce) {
		c.watchFrom++
		if c.watchFrom >= n {
			c.watchFrom = 0
		}
		if c.watchFrom == c.rank {
			if c.watchFrom++; c.watchFrom >= n {
				c.watchFrom = 0
			}
		}
		look := c.contradiction
		if c.peers[c.watchFrom].far {
			look = c.closedBefore // the rest is looked at when something was heard
		}
		if err := look(own, c.watchFrom); err != nil {
			return c.fail(err, true, false)
		}
	}
	return nil
}

// lookEvery is the number of calls of a library from one look at the peers' ledgers to the next, without a wait between them.
const lookEvery = 64 // a quarter of what a ledger keeps

// lookout is what the looks at the peers' ledgers have found.
type lookout struct {
	calls int         // since the last look; the goroutine that makes the calls has it
	due   atomic.Bool // a wait has ended

	mu     sync.Mutex // guards agreed
	agreed []uint64   // by peer: the newest record that is the same on both, with all before it
}

// lookDue reports whether a call of a library is to look.
func (c *Comm) lookDue() bool {
	o := &c.lookout
	if o.calls++; o.calls < lookEvery && !o.due.Load() {
		return false
	}
	o.calls = 0
	o.due.Store(false)
	return true
}

// lookNow is look, and the end of the communicator by what it finds.
func (c *Comm) lookNow() error {
	if err := c.look(); err != nil {
		return c.fail(err, true, false)
	}
	return nil
}

// look compares all records that are new since the last look. It returns the first contradiction, and fails nothing.
func (c *Comm) look() error {
	o := &c.lookout
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.agreed == nil {
		o.agreed = make([]uint64, len(c.ranks))
	}
	last := c.acct.Last()
	for r, p := range c.peers {
		if r == c.rank {
			continue
		}
		if n, closed := c.be.peerClosed(r); closed && n < last {
			own, ok := c.acct.At(n + 1)
			if !ok {
				own, _ = c.acct.At(last)
			}
			if err := c.closedBefore(own, r); err != nil {
				return err
			}
		}
		if p.acct == nil || c.check == Trust || min(last, p.acct.Last()) <= o.agreed[r] {
			continue
		}
		theirs, ok := p.acct.Newest(last)
		if !ok || theirs.Seq <= o.agreed[r] {
			continue
		}
		own, mine := c.acct.At(theirs.Seq)
		if !mine {
			continue // one is more than 256 records ahead, or the account has been released
		}
		if own.Sum == theirs.Sum {
			o.agreed[r] = theirs.Seq
			continue
		}
		if from := o.agreed[r] + 1; c.detailed(r, from, theirs.Seq) {
			if err := c.firstDifference(from, theirs.Seq, r); err != nil {
				return err
			}
		}
	}
	if l, ok := c.be.(*library); ok {
		return l.messages.look()
	}
	return nil
}

// firstDifference is the contradiction among the records from one to another, which a peer does not have all the same.
func (c *Comm) firstDifference(from, to uint64, r int) error {
	for seq := from; seq <= to; seq++ {
		if own, ok := c.acct.At(seq); ok {
			if err := c.contradiction(own, r); err != nil {
				return err
			}
		}
	}
	if _, closed := c.be.peerClosed(r); closed {
		return nil // its account may be another communicator's by now
	}
	return causef(ErrMismatch, "rank %d and rank %d have made different calls somewhere from #%d to #%d, longer ago than the ledgers go back", max(r, c.rank), min(r, c.rank), from, to)
}

// contradiction is what a peer's ledger says against a record of this rank, nil if nothing (yet).
func (c *Comm) contradiction(own bootstrap.Record, r int) error {
	if err := c.closedBefore(own, r); err != nil {
		return err
	}
	if c.check == Trust || c.peers[r].acct == nil {
		return nil
	}
	theirs, ok := c.peers[r].acct.At(own.Seq)
	if !ok || sameRecord(own, theirs) || c.be.explains() && sameGroup(own, theirs) {
		return nil
	}
	// The account may have been released meanwhile, and its slot taken by another communicator.
	if _, closed := c.be.peerClosed(r); closed {
		return c.closedBefore(own, r)
	}
	// The lower rank comes second, as in all messages: both sides give the same text.
	a, b, at, bt := c.rank, r, own, theirs
	if a > b {
		a, b, at, bt = b, a, bt, at
	}
	kind := ErrMismatch
	if onlyRegistration(own, theirs) {
		kind = ErrMixed
	}
	return causef(kind, "call #%d: rank %d: %s; rank %d: %s", own.Seq, b, recordText(bt), a, recordText(at))
}

func (c *Comm) closedBefore(own bootstrap.Record, r int) error {
	if n, closed := c.be.peerClosed(r); closed && n < own.Seq {
		return &cause{kind: ErrClosed, by: c.ranks[r] + 1, text: fmt.Sprintf("rank %d closed communicator %s %s; this is #%d: %s",
			r, c.name, afterCall(n), own.Seq, recordText(own))}
	}
	return nil
}

// afterCall says when a communicator was closed, of whose calls n was the last.
func afterCall(n uint64) string {
	if n == 0 {
		return "before any collective"
	}
	return fmt.Sprintf("after call #%d", n)
}

// closedUnmet says that member r closed the communicator without the other end of a message of this rank.
func (c *Comm) closedUnmet(r int, n uint64, message string) string {
	when := ""
	if n > 0 {
		when = " " + afterCall(n)
	}
	return fmt.Sprintf("rank %d closed communicator %s%s and does not meet rank %d's %s", r, c.name, when, c.rank, message)
}

// whereabouts says what a member's ledger tells of it.
func (c *Comm) whereabouts(r int) string {
	a := c.peers[r].acct
	if n, closed := c.be.peerClosed(r); closed {
		return "closed " + afterCall(n)
	}
	if a == nil || !a.Known() {
		return "its host has not been asked yet"
	}
	if busy := a.Busy(); busy != "" {
		return "in " + busy
	}
	last := a.Last()
	if rec, ok := a.At(last); ok {
		return fmt.Sprintf("last enqueued #%d, %s; done: %d", last, recordText(rec), a.Done())
	}
	return "has enqueued no collective"
}
