package nccl

import (
	"fmt"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
)

// The ledgers of members on other hosts are asked for (bootstrap.Far) by who waits for them, and by a library's watcher while it has not seen that they agree: what c.peers
// has of them is what was answered last. So on whichever host a contradiction is seen first, it is told to all.

// openFar prepares to ask for them; nil where all members are on this host.
func (c *Comm) openFar() *bootstrap.Far {
	if !c.spansHosts() {
		return nil
	}
	return c.job.Far(c.id, c.ranks, c.dev.Ring)
}

// askFar asks for them, for a wait for record seq that has lasted for d.
func (c *Comm) askFar(seq uint64, d time.Duration) {
	if c.far != nil && d > longWait {
		c.far.Ask(seq)
	}
}

// behind reports whether a member is known not to have come to record seq.
func (c *Comm) behind(r int, seq uint64) bool {
	a := c.peers[r].acct
	return r != c.rank && a != nil && a.Known() && a.Last() < seq
}

// member names a member, with its host where the job has several, and says what its ledger tells.
func (c *Comm) member(r int) string {
	if host := c.job.HostName(c.ranks[r]); host != "" {
		return fmt.Sprintf("rank %d (host %s; %s)", r, host, c.whereabouts(r))
	}
	return fmt.Sprintf("rank %d (%s)", r, c.whereabouts(r))
}

// named is a member with its host, where the job has several.
func (c *Comm) named(r int) string {
	if host := c.job.HostName(c.ranks[r]); host != "" {
		return fmt.Sprintf("rank %d (host %s)", r, host)
	}
	return fmt.Sprintf("rank %d", r)
}

// detailed reports whether the records of a member are there from one to another, as far as they can be; if not, they have been asked for.
func (c *Comm) detailed(r int, from, to uint64) bool {
	return !c.peers[r].far || c.far.Detail(c.ranks[r], from, to)
}

// lookFar asks, where nobody waits, for members that were not seen to agree up to the newest record. It reports whether there are any.
func (l *library) lookFar() bool {
	c := l.c
	if c.far == nil || c.check == Trust {
		return false
	}
	last := c.acct.Last()
	o := &c.lookout
	o.mu.Lock()
	open := false
	for r, p := range c.peers {
		open = open || p.far && (o.agreed == nil || o.agreed[r] < last)
	}
	o.mu.Unlock()
	if open {
		c.far.Look(last)
	}
	return l.messages.ask(false) || open
}
