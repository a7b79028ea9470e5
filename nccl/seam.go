package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// What follows is for libraries above, package graphs first of all.

// Mode is how a call reaches the users' buffers.
type Mode uint8

const (
	Plain  Mode = iota + 1 // through staging
	Local                  // straight, by Comm.Register
	Graph                  // straight, registered by the capture
	Window                 // straight, and at the same offsets on every rank
	Peer                   // through memory that all ranks have mapped: small calls on GPUs, where no mode is demanded
)

func (m Mode) String() string {
	switch m {
	case Plain:
		return "plain"
	case Local:
		return "local"
	case Graph:
		return "graph"
	case Window:
		return "window"
	case Peer:
		return "peer"
	}
	return fmt.Sprintf("mode %d", uint8(m))
}

// Gate decides about each captured call of a communicator that it leases. A Group is one slice, which is the gate's to keep; its Sends and
// Recvs come last. It may wait for the other members. It registers what the mode needs before it returns. The mode is for the collectives;
// a Send or Recv is direct where both ends have registered their memory.
type Gate interface {
	Admit(c *Comm, group []Call) (Mode, error)
}

// SetGate leases the communicator for a capture: captured calls go through g, eager ones are refused with an error that names where (g's String, if it
// has one). It takes a sequence number of kind Capture in the ledger. restore ends the lease; it may be called twice. For libraries.
func (c *Comm) SetGate(g Gate) (restore func(), err error) {
	if err := c.usable(); err != nil {
		return nil, c.errorf("capture", err)
	}
	c.mu.Lock()
	if c.gate != nil {
		who := whoText(c.gate)
		c.mu.Unlock()
		return nil, c.errorf("capture", fmt.Errorf("%w: %s", ErrInUse, who))
	}
	// The goroutine that makes the calls is here: nobody appends meanwhile.
	rec := bootstrap.Record{Kind: bootstrap.Capture}
	rec.Seq = c.acct.Append(rec.Kind, rec.Desc)
	c.gate, c.gateSeq = g, rec.Seq
	c.leased.Store(true)
	c.mu.Unlock()
	restore = sync.OnceFunc(func() {
		c.mu.Lock()
		c.gate, c.gateSeq = nil, 0
		c.leased.Store(false)
		groups := c.meetings
		c.meetings = map[int]*bootstrap.Group{}
		c.mu.Unlock()
		for _, g := range groups {
			g.Close()
		}
	})
	if err := c.compare(rec); err != nil {
		restore()
		return nil, c.errorf("capture", err)
	}
	return restore, nil
}

// lease is the gate, nil without one. Most calls look without taking mu.
func (c *Comm) lease() Gate {
	if !c.leased.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gate
}

// Holder is what keeps the communicator in use: a graph. Break is called when the communicator fails (from Abort, on its goroutine): the
// holder must give up its executable graphs. A Holder may also have a method Drain(), called by Comm.Drain and Comm.Close with no
// lock held, in which it releases what it can and may detach itself.
type Holder interface {
	Break(cause error)
	String() string
}

type holding struct{ Holder }

// Attach makes h hold the communicator until detach is called; that may be twice. For libraries.
func (c *Comm) Attach(h Holder) (detach func(), err error) {
	if err := c.usable(); err != nil {
		return nil, c.errorf("attach "+h.String(), err)
	}
	k := &holding{h}
	c.mu.Lock()
	c.holders[k] = struct{}{}
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		delete(c.holders, k)
		c.mu.Unlock()
	}, nil
}

// meetPoll is how often Meet looks at the other members' ledgers: rarely enough to cost nothing, often enough that a person sees no delay.
const meetPoll = 3 * time.Millisecond

// Meet is an all-gather among the members at a point that all reach in the same order (bootstrap.Group.Meet), which also ends, with the error
// that tells it, when a member's ledger shows that it does something else (an eager call or replay where this rank captures), or the communicator
// fails. bootstrap's errors are in its errors (errors.As); the end of ctx or a circle of waits do not fail the communicator. For libraries.
func (c *Comm) Meet(ctx context.Context, value []byte, what string) ([][]byte, error) {
	return c.meet(ctx, everybody, value, what)
}

// MeetPair is the same between this rank and one peer, for Send and Recv in a capture. It also ends (*bootstrap.GaveUpError) when the capture is over because
// all members have not met in it. For libraries.
func (c *Comm) MeetPair(ctx context.Context, peer int, value []byte, what string) (theirs []byte, err error) {
	if peer < 0 || peer >= len(c.ranks) {
		return nil, c.errorf(what, causef(ErrArgument, "peer %d is no rank of a communicator of %d", peer, len(c.ranks)))
	}
	if peer == c.rank {
		return value, nil
	}
	all, err := c.meet(ctx, peer, value, what)
	if err != nil {
		return nil, err
	}
	if peer < c.rank {
		return all[0], nil
	}
	return all[1], nil
}

const everybody = -1 // as a peer to meet

// meeting is the group in which a peer is met. A lease has groups of its own, named by its record: a capture that a member left early cannot
// put the meetings of the next one out of step.
func (c *Comm) meeting(peer int) (*bootstrap.Group, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gate == nil {
		if peer != everybody {
			return nil, causef(ErrArgument, "pairs meet in a capture only")
		}
		return c.group, nil
	}
	if g := c.meetings[peer]; g != nil {
		return g, nil
	}
	name, ranks := fmt.Sprintf("nccl %s capture %d", c.key, c.gateSeq), c.ranks
	if peer != everybody {
		lo, hi := min(c.rank, peer), max(c.rank, peer)
		name, ranks = fmt.Sprintf("%s pair %d-%d", name, lo, hi), []int{c.ranks[lo], c.ranks[hi]}
	}
	g, err := c.job.GroupOnce(name, ranks)
	if err == nil {
		c.meetings[peer] = g
	}
	return g, err
}

// contradicted is the end of a Meet by another member's ledger.
type contradicted struct{ error }

func (c *Comm) meet(ctx context.Context, peer int, value []byte, what string) ([][]byte, error) {
	if err := c.usable(); err != nil {
		return nil, c.errorf(what, err)
	}
	g, err := c.meeting(peer)
	if err != nil {
		return nil, c.errorf(what, err)
	}
	c.acct.SetBusy(what)
	defer c.acct.SetBusy("")
	c.mu.Lock()
	rec := bootstrap.Record{Kind: bootstrap.Capture, Seq: c.gateSeq} // 0 outside of a lease
	c.mu.Unlock()

	began := time.Now()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var mu sync.Mutex // orders the last look and the end of the poll
	over := false
	var timer *time.Timer
	look := func() {
		mu.Lock()
		defer mu.Unlock()
		if over {
			return
		}
		if err := c.usable(); err != nil {
			cancel(contradicted{err})
			return
		}
		c.askFar(rec.Seq, time.Since(began))
		for r := range c.ranks {
			if r == c.rank || peer != everybody && r != peer || rec.Seq == 0 {
				continue
			}
			if err := c.contradiction(rec, r); err != nil {
				cancel(contradicted{c.fail(err, true, false)})
				return
			}
		}
		timer.Reset(meetPoll)
	}
	mu.Lock()
	timer = time.AfterFunc(meetPoll, look)
	mu.Unlock()
	if peer != everybody {
		defer c.listenOver(ctx, cancel, rec.Seq)()
	}
	all, err := g.Meet(ctx, value, what)
	mu.Lock()
	over = true
	timer.Stop()
	mu.Unlock()
	if err == nil {
		return all, nil
	}
	err = c.meetFailure(ctx, err)
	if over, ok := errors.AsType[*captureOver](context.Cause(ctx)); ok {
		// A circle that this rank is in has its own error, which comes first.
		if _, ok := errors.AsType[*bootstrap.WaitError](err); ok {
			err = over.GaveUpError
		}
	}
	if peer == everybody && rec.Seq != 0 && c.usable() == nil { // the communicator's failure reaches all by itself
		c.sayOver(ctx, rec.Seq, what, err)
	}
	return nil, c.errorf(what, err)
}

// captureOver ends a wait for a peer in a capture that is over.
type captureOver struct{ *bootstrap.GaveUpError }

// overWait is how long a rank waits for its peer in a capture before it listens for the end of that capture: longer than most waits last, and about as long
// as it takes until a circle of waits is told. As long it waits then for the circle's own word, if it is part of that.
const overWait = 250 * time.Millisecond

// sayWait bounds sayOver: it takes a fraction of a millisecond, unless the host's node does not answer.
const sayWait = 500 * time.Millisecond

func (c *Comm) overKey(seq uint64) string { return fmt.Sprintf("nccl %s capture %d over", c.key, seq) }

// sayOver tells that all members have not met in the capture of record seq, which therefore fails on all: who waits for a peer that has left it would
// wait for ever. The first member that says it counts. what is how this rank's wait was called, err what became of it.
func (c *Comm) sayOver(ctx context.Context, seq uint64, what string, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sayWait)
	defer cancel()
	text := fmt.Sprintf("rank %d left %s", c.rank, what)
	if circle, ok := errors.AsType[*bootstrap.CycleError](err); ok {
		text = circle.Error()
	} else if gone, ok := errors.AsType[*bootstrap.GaveUpError](err); ok {
		text = gone.Text
	}
	c.job.Put(ctx, c.overKey(seq), []byte(strings.ToValidUTF8(text[:min(len(text), maxOver)], ""))) // refused where another member was first
}

// maxOver bounds what sayOver says.
const maxOver = 4 << 10

// listenOver ends the wait for a peer, by cancel, when the capture of record seq is over. stop ends the listening.
func (c *Comm) listenOver(ctx context.Context, cancel context.CancelCauseFunc, seq uint64) (stop func()) {
	ctx, end := context.WithCancel(ctx)
	var listening sync.WaitGroup
	listening.Add(1)
	timer := time.AfterFunc(overWait, func() {
		defer listening.Done()
		text, err := c.job.Listen(ctx, c.overKey(seq))
		if err != nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(overWait):
			cancel(&captureOver{&bootstrap.GaveUpError{Text: string(text)}})
		}
	})
	return func() {
		end()
		if timer.Stop() {
			listening.Done()
		}
		listening.Wait()
	}
}

// meetFailure is what the end of a meeting with err means: the communicator's failure, where that led to it. ctx is the meeting's.
func (c *Comm) meetFailure(ctx context.Context, err error) error {
	if told, ok := errors.AsType[contradicted](context.Cause(ctx)); ok {
		return told.error
	}
	// What ended the communicator comes before what that led to: a member that told why it failed, and then left, or gave up its wait. Its word may be on its way.
	if ctx.Err() == nil {
		_, gaveUp := errors.AsType[*bootstrap.GaveUpError](err)
		for end := time.Now().Add(leaveWait); ; time.Sleep(time.Millisecond) {
			if told := c.usable(); told != nil {
				return told
			}
			if !gaveUp || ctx.Err() != nil || time.Now().After(end) {
				break
			}
		}
	}
	// A member that has ended is the communicator's failure, with the better text.
	if re, ok := errors.AsType[*bootstrap.RankError](err); ok {
		for r, j := range c.ranks {
			if j == re.Rank {
				if h, ok := c.be.(*host); ok && h.links != nil {
					h.links.awaitLastWords(r)
				}
				if told := c.usable(); told != nil {
					return told
				}
				if failure := c.ended(r, re); failure != nil {
					return c.fail(failure, true, false)
				}
			}
		}
	}
	return err
}

// Replay is one launch of a captured graph that uses the communicator.
type Replay struct {
	c      *Comm
	seq    uint64
	key    uint64
	ticket uint64
}

// BeginReplay takes the communicator's next place for a launch of the graph (key: equal on all members for the same graph) and writes it
// to the ledger. It fails at once if a member is known to do something else there. who names the graph in messages. After it Before, the launch and After
// must follow; if one of them fails the place cannot be given back: Abort. For libraries.
func (c *Comm) BeginReplay(key uint64, who string) (Replay, error) {
	if err := c.usable(); err != nil {
		return Replay{}, c.errorf("replay of "+who, err)
	}
	if gate := c.lease(); gate != nil {
		return Replay{}, c.errorf("replay of "+who, fmt.Errorf("%w: %s", ErrInUse, whoText(gate)))
	}
	rec := bootstrap.Record{Kind: bootstrap.Replay, Desc: [2]uint64{recReplay, key}}
	rec.Seq = c.acct.Append(rec.Kind, rec.Desc)
	if err := c.compare(rec); err != nil {
		return Replay{}, c.errorf(fmt.Sprintf("replay #%d of %s", rec.Seq, who), err)
	}
	return Replay{c: c, seq: rec.Seq, key: key, ticket: c.be.ticket()}, nil
}

// Before and After are enqueued on the stream around the launch: replays and eager calls of one communicator do not overlap.
func (r Replay) Before(s *cuda.Stream) error { return r.c.be.before(r, s) }

// After ends the replay, see Before.
func (r Replay) After(s *cuda.Stream) error { return r.c.be.after(r, s) }
