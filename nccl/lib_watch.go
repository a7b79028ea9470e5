package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// use is what this communicator has enqueued on a stream.
type use struct {
	l        *library
	s        *cuda.Stream
	remove   func()
	issued   atomic.Uint64 // operations that calls were made for
	enqueued atomic.Uint64 // of them those whose call has come back: only they are known to be on the stream
	done     atomic.Uint64 // of those the ones that the stream was seen to be through with, while the communicator worked
	what     atomic.Uint64 // the last operation: op in the top byte, then its record

	waitFor  atomic.Uint64 // the record that who waits for the stream waits for
	waitFrom atomic.Int64  // since when, ns of the Unix epoch
}

// opReplay is a launch of a graph, in use.what.
const opReplay Op = 0xff

// used notes an operation on a stream, before it is enqueued; cameBack follows when it is.
func (l *library) used(s *cuda.Stream, op Op, seq uint64) (*use, error) {
	u := l.last.Load()
	if u == nil || u.s != s {
		var err error
		if u, err = l.turnTo(s); err != nil {
			return nil, err
		}
	}
	u.note(1, op, seq)
	if !l.watching.Load() {
		l.beWatched()
	}
	return u, nil
}

// turnTo makes the use of a stream the last one.
func (l *library) turnTo(s *cuda.Stream) (*use, error) {
	if err := l.turn(s); err != nil {
		return nil, err
	}
	u := l.useOf(s)
	l.last.Store(u)
	return u, nil
}

// cameBack notes that what was noted of a stream is enqueued.
func (l *library) cameBack(s *cuda.Stream) {
	u := l.last.Load()
	if u == nil || u.s != s {
		u = l.useOf(s)
	}
	u.cameBack()
}

// beWatched has the watcher look. Whether it does is asked after an operation was noted, never before: it looks for one once more when it has said that it stops.
func (l *library) beWatched() {
	if l.watching.CompareAndSwap(false, true) {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// note counts operations before their calls are made. What the last is comes after: who finds it has also found that there are more.
func (u *use) note(operations int, op Op, seq uint64) {
	u.issued.Add(uint64(operations))
	u.what.Store(uint64(op)<<56 | seq)
}

// cameBack follows, on the same goroutine, when the calls for what was noted have come back without an error.
func (u *use) cameBack() { u.enqueued.Store(u.issued.Load()) }

func (l *library) useOf(s *cuda.Stream) *use {
	l.umu.Lock()
	u := l.uses[s]
	l.umu.Unlock()
	if u != nil {
		return u
	}
	u = &use{l: l, s: s}
	unwatch, stay := s.Watch(u.check, u.doing), s.BeforeLeaving(func() { l.moveFrom(s) })
	u.remove = func() { unwatch(); stay() }
	l.umu.Lock()
	other := l.uses[s]
	if other == nil {
		l.uses[s] = u
	}
	l.umu.Unlock()
	if other != nil {
		u.remove()
		return other
	}
	return u
}

// check is asked by who waits for the stream. After a failure everything that was not done before it has failed, whatever the stream says:
// it reports success for what an abort has ended. The members whose part is done have written it to their ledgers: so nothing is done before those agree.
// What it returns is how much was enqueued before the driver is asked: that, and no more, is done when the driver says so. An operation whose call has not come back
// may reach the stream later.
func (u *use) check(seen uint64, done bool) (now uint64, err error) {
	now = u.enqueued.Load()
	open := u.issued.Load() > u.done.Load()
	c := u.l.c
	u.waits(!done && open)
	if f := c.failed.Load(); f != nil {
		if open {
			return now, c.errorf(u.name(), f.err)
		}
		return now, nil
	}
	if open {
		if err := c.look(); err != nil {
			return now, c.errorf(u.name(), u.l.failUnlocked(err))
		}
	}
	if done && raise(&u.done, seen) {
		c.lookout.due.Store(true)
		if seq := u.what.Load() << 8 >> 8; u.issued.Load() == seen {
			c.acct.SetDone(seq) // tells the others how far this rank is
		}
	}
	return now, nil
}

// raise stores n unless as much is there, and reports whether it did.
func raise(to *atomic.Uint64, n uint64) bool {
	for {
		old := to.Load()
		if n <= old {
			return false
		}
		if to.CompareAndSwap(old, n) {
			return true
		}
	}
}

// forMessages is what a wait for messages is for, in place of a record.
const forMessages = 1 << 62

// waits notes in the ledger that this rank waits for the stream's last operation, when it has done so for a while.
func (u *use) waits(is bool) {
	seq := u.what.Load() << 8 >> 8
	messages := seq == 0
	if messages {
		seq = forMessages
	}
	if !is {
		if u.waitFor.Load() != 0 {
			u.waitFor.Store(0)
			u.l.c.acct.ClearMessage()
		}
		return
	}
	if u.waitFor.Load() != seq {
		u.waitFrom.Store(time.Now().UnixNano())
		u.waitFor.Store(seq)
		u.l.c.acct.ClearMessage()
		return
	}
	switch d := time.Duration(time.Now().UnixNano() - u.waitFrom.Load()); {
	case d <= longWait:
	case messages:
		u.l.messages.ask(true)
		u.l.c.askFar(u.l.c.acct.Last(), d)
		if text, op, peer := u.l.messages.first(); text != "" {
			u.l.c.acct.SetMessage(text, u.l.c.ranks[peer], op == OpRecv, d)
		} else {
			u.l.c.acct.ClearMessage()
		}
	default:
		u.l.c.acct.SetWait(seq, d)
		u.l.c.askFar(seq, d)
	}
}

// doing says, where a wait was given up, which members have not come.
func (u *use) doing() string {
	if u.issued.Load() == u.done.Load() {
		return ""
	}
	c := u.l.c
	text := fmt.Sprintf("%s on communicator %s", u.name(), c.name)
	seq := u.what.Load() << 8 >> 8
	if seq == 0 { // point to point
		if waits := u.l.messages.waiting(); waits != "" {
			text += ": " + waits
		}
		return text
	}
	joint := ": waits for "
	for r := range c.peers {
		if c.behind(r, seq) {
			text += joint + c.member(r)
			joint = ", "
		}
	}
	return text
}

func (u *use) name() string {
	w := u.what.Load()
	op, seq := Op(w>>56), w<<8>>8
	name := op.String()
	if op == opReplay {
		name = "replay"
	}
	if seq > 0 {
		name += fmt.Sprintf(" #%d", seq)
	}
	return name
}

// behind is how many operations are not known to be done, without asking a stream.
func (l *library) behind() int {
	l.umu.Lock()
	defer l.umu.Unlock()
	n := 0
	for _, u := range l.uses {
		n += int(u.issued.Load() - u.done.Load())
	}
	return n
}

// outstanding asks the streams. A stream that has failed or is closed has nothing left to wait for.
func (l *library) outstanding() int {
	if l.c.failed.Load() != nil {
		return 0
	}
	l.umu.Lock()
	var open []*use
	for _, u := range l.uses {
		if u.issued.Load() > u.done.Load() {
			open = append(open, u)
		}
	}
	l.umu.Unlock()
	n := 0
	for _, u := range open {
		left := int(u.issued.Load() - u.done.Load())
		if u.s.Capture() != nil {
			n += left // it must not be asked
			continue
		}
		if done, err := u.s.Query(); err == nil && !done {
			n += left
		} else if err != nil && l.c.failed.Load() == nil {
			l.forget(u)
		}
	}
	return n
}

// mark notes the last use of the user's registrations of a call.
func (l *library) mark(c *Call) {
	u := l.useOf(c.Stream)
	for _, r := range [...]cuda.Range{c.Send, c.Recv} {
		reg := l.c.userRegistered(r)
		if reg == nil {
			continue
		}
		l.umu.Lock()
		if reg.marks == nil {
			reg.marks = map[*use]uint64{}
		}
		reg.marks[u] = u.issued.Load()
		l.umu.Unlock()
		reg.last.Store(uint64(c.Op)<<56 | c.Seq)
	}
}

// busy reports whether enqueued operations may still use a registration. It asks the streams.
func (l *library) busy(r *registered) bool {
	l.umu.Lock()
	var open []*use
	for u, n := range r.marks {
		if u.done.Load() < n && l.uses[u.s] == u {
			open = append(open, u)
		}
	}
	l.umu.Unlock()
	for _, u := range open {
		if u.s.Capture() != nil {
			return true
		}
		if done, err := u.s.Query(); err == nil && !done {
			return true
		}
	}
	return false
}

// forget is for streams that the user has closed, or that have failed: those may still have something to do.
func (l *library) forget(u *use) {
	l.forgot.Store(true)
	l.moveFrom(u.s)
	u.remove()
	l.umu.Lock()
	defer l.umu.Unlock()
	delete(l.uses, u.s)
}

const (
	// watchPause is how often the others' ledgers are looked at while something is enqueued: a contradiction is told within a second.
	watchPause    = 20 * time.Millisecond
	watchPauseMax = 200 * time.Millisecond // while nothing changes
	// farPatience is how long, after the last call, members of other hosts are asked whether they have made the same, where nothing is enqueued any more: those that come
	// later ask themselves.
	farPatience = 3 * time.Second
)

// watch looks, while operations are enqueued, for what the library does not tell: what other members have enqueued since, that they have closed,
// the library's own errors, and the device's.
func (l *library) watch() {
	ctx := l.c.ctx
	timer := time.NewTimer(watchPause)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		}
		seen, pause, since := uint64(0), watchPause, time.Now()
		for {
			timer.Reset(pause)
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
			if err := l.look(); err != nil {
				l.awaitDeath(err)
				l.c.fail(err, true, false)
				return
			}
			open := l.lookFar() && time.Since(since) < farPatience
			if l.behind() == 0 && !open {
				l.watching.Store(false)
				if l.behind() == 0 || !l.watching.CompareAndSwap(false, true) {
					break
				}
			}
			if n := l.c.acct.Last(); n != seen {
				seen, pause, since = n, watchPause, time.Now()
			} else {
				pause = min(pause*5/4, watchPauseMax)
			}
		}
	}
}

// deathWait is how long what the library says of the network is kept back for a better cause. It notices a peer's death by the end of its connections, gorun when
// the kernel is through with the process: with its memory on a GPU, 0.1 to 0.35 s later (2 × H200).
const deathWait = 1500 * time.Millisecond

// networkError reports whether a peer's death may be behind an error of the library.
func networkError(err error) bool {
	return errors.Is(err, ncclsys.ErrRemote) || errors.Is(err, ncclsys.ErrSystem)
}

// awaitDeath waits, after an error of the network, until the communicator fails for another cause, at most for deathWait. That cause wins.
func (l *library) awaitDeath(err error) {
	if !networkError(err) {
		return
	}
	select {
	case <-l.c.ctx.Done():
	case <-time.After(deathWait):
	}
}

func (l *library) look() error {
	c := l.c
	if lost := l.deviceFailed(); lost != nil {
		return lost
	}
	if err := c.look(); err != nil {
		return err
	}
	// Not beside a call that waits for the same: the library ends what is in progress in here, once.
	if !l.mu.TryLock() {
		return nil
	}
	defer l.unlock()
	for _, comm := range l.comms() {
		if l.enter() != nil {
			return nil
		}
		state, err := l.sys.CommAsyncError(comm)
		l.leave()
		if err == nil && state != ncclsys.Success && state != ncclsys.ErrInProgress {
			err = l.sys.AsyncError(state)
		}
		if err = result(err); err != nil {
			return &cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: %v", ErrAborted, c.rank, err)}
		}
	}
	return nil
}

func (l *library) failureKey() string { return "nccl " + l.c.key + " failure" }

// tellWait bounds the telling of a failure.
const tellWait = time.Second

// tell writes the failure to the job's store, where the first one stays. The others' goroutines wait for it there.
func (l *library) tell(err error) error {
	l.rmu.Lock()
	closing := l.closing
	if !closing {
		l.tellers.Add(1)
	}
	l.rmu.Unlock()
	if closing {
		return err
	}
	done := make(chan struct{})
	l.telling.CompareAndSwap(nil, &done)
	go func() {
		defer l.tellers.Done()
		defer close(done)
		ctx, cancel := context.WithTimeout(context.Background(), tellWait)
		defer cancel()
		l.c.job.Put(ctx, l.failureKey(), encodeFailure(err, l.c.jobRankOf(err))) // refused where another member was first
	}()
	return err
}

// awaitTold waits until the others can know of this rank's failure.
func (l *library) awaitTold() {
	if done := l.telling.Load(); done != nil {
		<-*done
	}
}

// failUnlocked is fail for callers that may hold the communicator's lock: the graphs are broken on a goroutine of its own.
func (l *library) failUnlocked(err error) error {
	err, first := l.c.failOnce(err, true)
	l.rmu.Lock()
	defer l.rmu.Unlock()
	if first && !l.closing { // else there are no graphs any more
		l.tellers.Go(func() { l.c.breakHolders(err, false) })
	}
	return err
}

// leaveWait is how long the word of a member's leaving is kept back: what it told before may be on its way on another goroutine.
const leaveWait = 100 * time.Millisecond

// afterLastWords calls f then, unless the communicator is over.
func (l *library) afterLastWords(f func()) {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	if !l.closing {
		l.c.afterwards(&l.tellers, leaveWait, f)
	}
}

// listen waits for a failure that another member tells.
func (l *library) listen() {
	b, err := l.c.job.Listen(l.c.ctx, l.failureKey())
	if err != nil {
		return
	}
	l.c.fail(l.decodeFailure(b), false, false)
}

// told: the listener makes it the communicator's failure.
func (l *library) told() error { return nil }

func encodeFailure(err error, jobRank int) []byte {
	b := binary.LittleEndian.AppendUint32(nil, codeOf(err))
	b = binary.LittleEndian.AppendUint32(b, uint32(int32(jobRank)))
	text := err.Error()
	return append(b, text[:min(len(text), 8<<10)]...)
}

func (l *library) decodeFailure(b []byte) error {
	if len(b) < 8 {
		return causef(ErrAborted, "a member told a failure of %d bytes", len(b))
	}
	code, rank := binary.LittleEndian.Uint32(b), int(int32(binary.LittleEndian.Uint32(b[4:])))
	var re *bootstrap.RankError
	if code == codeRank && rank >= 0 && rank < l.c.job.Size() {
		re = l.c.job.RankErr(rank)
	}
	return told(code, rank, string(b[8:]), re)
}

// declareClosed tells members of other hosts: all meet. Those of this host see it in the ledger.
func (l *library) declareClosed(n uint64) {
	l.messages.close(n)
	if l.closings == nil {
		return
	}
	l.tellers.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeWait)
		defer cancel()
		all, err := l.closings.AllGather(ctx, binary.LittleEndian.AppendUint64(nil, n))
		if err != nil {
			return // they did not all come: Close ends without them
		}
		closed := make([]uint64, len(all))
		for r, b := range all {
			if len(b) != 8 {
				return
			}
			closed[r] = binary.LittleEndian.Uint64(b)
		}
		l.closedAt.Store(&closed)
	})
}

func (l *library) peerClosed(r int) (uint64, bool) {
	if l.c.peers == nil {
		return 0, false
	}
	if all := l.closedAt.Load(); all != nil {
		return (*all)[r], true
	}
	return l.c.peers[r].acct.Closed()
}

// jobRankOf is the rank that a failure is about: the one that has ended or closed, else this one.
func (c *Comm) jobRankOf(err error) int {
	if r := originOf(err); r >= 0 {
		return r
	}
	return c.ranks[c.rank]
}
