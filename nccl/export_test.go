package nccl

import (
	"context"
	"errors"
	"time"

	"github.com/gorun-dev/gorun/cuda"
)

import "fmt"

// SetRanksPerRoot makes so many ranks meet at one root.
func SetRanksPerRoot(n int) { ranksPerRoot = n }

// PublishID publishes an id of the library for others.
func PublishID(ctx context.Context, c *Comm, name string) error {
	_, err := c.be.(*library).publishID(ctx, name, nil)
	return err
}

// SetStrangeLimit makes so many connections at once prove the key.
func SetStrangeLimit(n int) { strangeLimit = n }

// SetStraight says whether eager calls that can go straight do.
func SetStraight(c *Comm, on bool) {
	c.lib = nil
	if on {
		c.lib, _ = c.be.(*library)
	}
}

// GoesStraight reports whether a call does.
func GoesStraight(c *Comm, call Call) bool { return c.lib != nil && c.lib.straight(&call) }

// GoStraight reports whether messages of one group do.
func GoStraight(c *Comm, calls ...Call) bool { return c.lib != nil && c.lib.straightMessages(calls) }

// Notes tells what a library's communicator keeps of its messages and counts of its calls, and what else is to be equal whichever way a call goes.
func Notes(c *Comm) string {
	l := c.be.(*library)
	text := fmt.Sprintf("%d calls, %d bytes direct, %d staged; %d issued, %d records of collectives, %d collected\n",
		c.calls.Load(), c.direct.Load(), c.staged.Load(), l.last.Load().issued.Load(), c.acct.Last(), len(c.collected))
	for seq := uint64(1); seq <= l.messages.acct.Last(); seq++ {
		r, ok := l.messages.acct.At(seq)
		text += fmt.Sprintf("%t %+v\n", ok, r)
	}
	for r, t := range l.messages.with {
		if t != nil {
			text += fmt.Sprintf("rank %d: %d sent, sum %x; %d received, sum %x\n", r, t.out.mine.n, t.out.mine.sum, t.in.mine.n, t.in.mine.sum)
		}
	}
	return text
}

// HoldStep is a step on the host platform that lasts until end is called.
func HoldStep(c *Comm) (end func()) {
	h := c.be.(*host)
	h.mu.Lock()
	return h.mu.Unlock
}

// Undone is how many operations a library's communicator does not know to be done.
func Undone(c *Comm) int { return c.be.(*library).behind() }

// ByPeerCalls is how many calls this rank has made, or captured, by peer memory.
func ByPeerCalls(c *Comm) uint64 {
	l := c.be.(*library)
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peer.calls
}

// PeerMost is the largest part that goes by peer memory; 0: none does.
func PeerMost(c *Comm) int { return int(c.be.(*library).peer.limit.Load()) }

// BreakPeer makes the next launch by peer memory fail.
func BreakPeer(c *Comm) { c.be.(*library).peer.args.capacity = 0 }

// PeerLeft reports whether this rank still has its buffers for peer memory.
func PeerLeft(c *Comm) bool {
	p := &c.be.(*library).peer
	p.hmu.Lock()
	defer p.hmu.Unlock()
	return p.stop != nil
}

// SetPeerSwap sets how long a rank waits for the others on the way to peer memory, until undo.
func SetPeerSwap(d time.Duration) (undo func()) {
	old := peerSwap
	peerSwap = d
	return func() { peerSwap = old }
}

// Ordered reports whether calls on several streams are ordered one behind the other.
func Ordered(c *Comm) bool {
	o := &c.be.(*library).order
	o.Lock()
	defer o.Unlock()
	return o.home != nil
}

// SetPeerCounts has this rank's blocks go on as if each had done n calls by peer memory. Nothing may be enqueued.
func SetPeerCounts(ctx context.Context, c *Comm, n uint32) error {
	p := &c.be.(*library).peer
	counts, err := cuda.SliceOf[uint32](p.own, p.args.counts-p.args.bufs[p.args.rank], peerBlocks)
	if err != nil {
		return err
	}
	return errors.Join(cuda.Fill(counts, n, p.aside), p.aside.Synchronize(ctx))
}
