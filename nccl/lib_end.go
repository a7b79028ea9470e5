package nccl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

const (
	finalizeWait = 2 * time.Second // for the library's good end
	// destroyWait is for destroy and abort: each takes half a second, mostly.
	destroyWait = 5 * time.Second
	apartWait   = 2 * time.Second       // for one abort before the next
	insideWait  = 50 * time.Millisecond // for calls that come out of the library by themselves
	ownWait     = 2 * time.Second       // for this package's own stream, which waits for the program's, too
)

// failing follows a failure at once, on whatever goroutine saw it: the abort begins on a thread of its own. It returns when the graphs that hold the
// communicator are broken, which happens meanwhile.
func (l *library) failing() {
	l.ending.Store(true)
	l.peer.letGo()
	l.aborting.Do(func() { go l.abort() })
}

// abort ends the library's communicators. After a lost context it is left out: the library does not come back from it.
func (l *library) abort() {
	l.peer.breakOff()
	for end := time.Now().Add(insideWait); l.inside() && time.Now().Before(end); {
		time.Sleep(50 * time.Microsecond)
	}
	comms := l.comms()
	if l.abortCrashes() {
		if l.behind() > 0 {
			close(l.abandoned) // with what is enqueued, and the device
			return
		}
		comms = comms[1:]
	}
	defer close(l.aborted)
	if l.c.dev.Err() == nil {
		// One after the other where memory is registered: the library then reads what it has freed (fault "abort-with-registrations"), and nobody else should
		// have taken that meanwhile. Not for ever: it waits for graphs, and a replay with calls on both communicators ends when both are aborted.
		apart := l.c.userRegs.Load() > 0
		var wg sync.WaitGroup
		for _, comm := range comms {
			gone := make(chan struct{})
			wg.Go(func() {
				defer close(gone)
				l.abortOne(comm) // what it says changes nothing
			})
			if apart {
				select {
				case <-gone:
				case <-time.After(apartWait):
				}
			}
		}
		wg.Wait()
	}
	l.releaseDead()
}

// releaseDead gives back the memory that waits, when the library has nothing registered any more.
func (l *library) releaseDead() {
	l.rmu.Lock()
	l.ended = true
	holds := l.dead
	for _, f := range l.freeing {
		if f.hold != nil {
			holds = append(holds, f.hold)
		}
	}
	l.dead, l.freeing, l.undone = nil, nil, 0
	l.waiting.Store(0)
	l.giving++
	l.rmu.Unlock()
	l.give(holds)
}

// give lets memory go. Who took it off the lists has counted it in giving, in the same hold of rmu: who finds it on no list waits for that.
func (l *library) give(holds []*cuda.Hold) {
	releaseHolds(holds...)
	l.rmu.Lock()
	l.giving--
	l.rmu.Unlock()
}

// awaitGiven waits until the memory that other goroutines took off the lists is gone, at most releaseWait: what is called when memory goes may
// call here.
func (l *library) awaitGiven() {
	for start := time.Now(); time.Since(start) < releaseWait; time.Sleep(20 * time.Microsecond) {
		l.rmu.Lock()
		n := l.giving
		l.rmu.Unlock()
		if n == 0 {
			return
		}
	}
}

// keep holds memory until the communicators are gone; false where they are.
func (l *library) keep(hold *cuda.Hold) bool {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	if !l.ended {
		l.dead = append(l.dead, hold)
	}
	return !l.ended
}

func (l *library) abortOne(comm ncclsys.Comm) error {
	return l.onThread(func() error { return l.sys.CommAbort(comm) })
}

// onThread makes a call that may take long on a thread of its own.
func (l *library) onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		b := l.c.dev.Bind()
		defer b.Release()
		if err := b.Err(); err != nil {
			done <- err
			return
		}
		done <- result(f())
	}()
	return <-done
}

// waitEnded waits until the abort is through; once only where it does not come to an end, as in the fault "window-abort". What the library then still has
// is not given back.
func (l *library) waitEnded() {
	if l.stuck.Load() {
		return
	}
	late := time.NewTimer(destroyWait)
	defer late.Stop()
	select {
	case <-l.aborted:
		return
	case <-l.abandoned:
	case <-late.C:
		go func() {
			<-l.aborted
			occupied.clear(l.c)
		}()
	}
	l.stuck.Store(true)
	occupied.set(l.c)
	l.c.dev.Abandon(occupied.check(l.c))
}

// occupied are the devices on which a communicator does not end: what is enqueued there, and a new communicator, would wait for ever.
var occupied occupations

type occupations struct {
	sync.Mutex
	by map[*Comm]string // the device
}

func (o *occupations) set(c *Comm) {
	o.Lock()
	defer o.Unlock()
	if o.by == nil {
		o.by = map[*Comm]string{}
	}
	o.by[c] = deviceID(c)
}

func (o *occupations) clear(c *Comm) {
	o.Lock()
	defer o.Unlock()
	delete(o.by, c)
}

func (o *occupations) check(c *Comm) error {
	o.Lock()
	defer o.Unlock()
	id := deviceID(c)
	for other, dev := range o.by {
		if dev == id {
			return fmt.Errorf("%s is still occupied by communicator %s, whose abort does not come to an end: it is free again when this process ends", id, other.name)
		}
	}
	return nil
}

func deviceID(c *Comm) string {
	i := c.dev.Info()
	return fmt.Sprintf("%s (%s, %s)", i.Name, i.PCIBusID, i.UUID)
}

// release ends the communicator: in good order where all members have closed it together, else by an abort.
func (l *library) release() {
	l.rmu.Lock()
	l.undrainable = true
	l.rmu.Unlock()
	if l.c.failed.Load() == nil && l.together && l.main != 0 {
		l.drains.Wait() // none may be in the library when the communicators go
		if l.finalize() != nil {
			l.failing()
		} else {
			l.aborting.Do(func() { l.abortDone() })
		}
	} else {
		l.failing()
	}
	l.waitEnded()
	l.rmu.Lock()
	l.closing = true
	l.rmu.Unlock()
	l.tellers.Wait()
	l.drains.Wait()
	l.closeOwn()
	if l.closings != nil {
		l.closings.Close()
	}
	l.umu.Lock()
	uses := l.uses
	l.uses = map[*cuda.Stream]*use{}
	l.umu.Unlock()
	for _, u := range uses {
		if l.c.failed.Load() == nil {
			u.remove() // after a failure streams go on to tell it
		}
	}
	l.messages.release()
}

// abortDone stands for an abort where the communicators are gone in good order.
func (l *library) abortDone() {
	l.ending.Store(true)
	l.main, l.p2p = 0, 0
	l.abort()
}

// finalize lets the library end by itself: finalize, which is done when it says so, and destroy, which takes half a second.
func (l *library) finalize() error {
	comms := l.comms()
	if err := l.sys.Need(ncclsys.NonBlocking); err == nil {
		done := make(chan error, 1)
		late := time.After(finalizeWait)
		for _, comm := range comms {
			go func() { done <- l.onThread(func() error { return l.sys.CommFinalize(comm) }) }()
			select {
			case err := <-done:
				if err == nil {
					err = l.settle(context.Background(), comm, finalizeWait)
				}
				if err != nil {
					return err
				}
			case <-late:
				return nil // the thread stays in it: an abort of what is being finalized would make it worse
			}
		}
	}
	l.ending.Store(true)
	done := make(chan error, len(comms))
	for _, comm := range comms {
		go func() { done <- l.onThread(func() error { return l.sys.CommDestroy(comm) }) }()
	}
	late := time.After(destroyWait)
	var errs []error
	for range comms {
		select {
		case err := <-done:
			errs = append(errs, err)
		case <-late:
			return nil // the thread stays in it: an abort of what is being destroyed would make it worse
		}
	}
	errors.Join(errs...) // it is gone either way
	return nil
}

// freeing is a registration on its way back.
type freeing struct {
	handle ncclsys.Registration
	hold   *cuda.Hold
	graph  bool
}

// register notes memory for the user's collectives. For a graph the library registers by itself, in the capture. A communicator that is for point to point
// only does not get it: there the library would use the registration of one end without the other's and lose the message, and eager messages are not compared.
func (l *library) register(m *cuda.Memory, user bool) error {
	if !user {
		return nil
	}
	if err := l.sys.Need(ncclsys.Register); err != nil {
		return err
	}
	whole := cuda.Range{Mem: m, Len: m.Size()}
	if m.Size() == 0 {
		return causef(ErrArgument, "%v is empty", m)
	}
	if err := whole.Qualifies(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.unlock()
	b := l.c.dev.BindRelaxed()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	if err := l.enter(); err != nil {
		return err
	}
	defer l.leave()
	h, err := l.sys.CommRegister(l.main, ncclsys.DevicePtr(m.Pointer()), m.Size())
	if err = result(err); err == nil && h == 0 {
		err = fmt.Errorf("%v was not registered: %s", m, l.whyNot())
	}
	if err != nil {
		return err
	}
	l.rmu.Lock()
	l.handles[m.ID()] = h
	l.rmu.Unlock()
	return nil
}

// whyNot guesses why a registration came back without a handle.
func (l *library) whyNot() string {
	for _, f := range l.warned {
		return f.String()
	}
	return "the library took it for memory that it cannot register, or peers cannot reach this device's memory directly"
}

// deregister lets the user's, or the last graph's, registration go. What graphs had registered goes when the library has been driven on: see drain.
func (l *library) deregister(m *cuda.Memory, user bool, hold *cuda.Hold) (after func() error) {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	f := freeing{hold: hold, graph: !user}
	if user {
		f.handle = l.handles[m.ID()]
		delete(l.handles, m.ID())
	}
	l.freeing = append(l.freeing, f)
	l.waiting.Add(1)
	return l.flush
}

// unlock ends the use of the library's communicators and gives back what has waited for it.
func (l *library) unlock() {
	l.mu.Unlock()
	l.flush()
}

// flush gives back what waits, unless another goroutine is in the library: that one does it then.
func (l *library) flush() error {
	var errs []error
	for l.waiting.Load() > 0 && l.mu.TryLock() {
		holds, err := l.flushLocked()
		l.mu.Unlock()
		errs = append(errs, err)
		l.give(holds)
	}
	return errors.Join(errs...)
}

// flushLocked deregisters what waits for it. mu is held. The memory that is left over is for give.
func (l *library) flushLocked() (holds []*cuda.Hold, err error) {
	l.rmu.Lock()
	list := l.freeing
	l.freeing = nil
	l.waiting.Store(0)
	l.giving++
	graphs := false
	for _, f := range list {
		if f.graph && !l.ended {
			l.undone++
			graphs = true
		}
	}
	// Memory of which a closed graph may still have a registration stays until the drain.
	keep := l.undone > 0
	if keep {
		for _, f := range list {
			if f.hold != nil {
				l.dead = append(l.dead, f.hold)
			}
		}
	}
	l.rmu.Unlock()
	var errs []error
	for _, f := range list {
		if f.handle != 0 {
			errs = append(errs, l.deregisterHandle(f.handle))
		}
		if !keep && f.hold != nil {
			holds = append(holds, f.hold)
		}
	}
	if graphs {
		l.drainSoon()
	}
	return holds, errors.Join(errs...)
}

func (l *library) deregisterHandle(h ncclsys.Registration) error {
	b := l.c.dev.BindRelaxed()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	if l.enter() != nil {
		return nil // the abort undoes it
	}
	defer l.leave()
	return result(l.sys.CommDeregister(l.main, h))
}

// drainPause is how often a drain that has to wait for a capture looks again.
const drainPause = 5 * time.Millisecond

// drainSoon makes the library let go of closed graphs' registrations, on a goroutine of its own. mu is held.
func (l *library) drainSoon() {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	if l.draining || l.undrainable || l.ending.Load() {
		return
	}
	l.draining = true
	l.drains.Go(func() {
		defer func() {
			l.rmu.Lock()
			l.draining = false
			l.rmu.Unlock()
		}()
		for l.c.leased.Load() {
			select {
			case <-l.c.ctx.Done():
				return
			case <-time.After(drainPause):
			}
		}
		l.drain()
	})
}

// drainGroups are enough for the library to look at what closed graphs have left: it does so at every 11th launch.
const drainGroups = 11

// drain makes the library let go of closed graphs' registrations without the other members, by sending from this rank to itself, in place, and then
// gives back the memory. Elsewhere than in NCCL's line it happens when the communicator ends.
func (l *library) drain() {
	l.mu.Lock()
	freed, _ := l.flushLocked()
	defer l.awaitGiven()
	defer l.give(freed)
	l.rmu.Lock()
	n, holds := l.undone, l.dead
	l.rmu.Unlock()
	if n == 0 {
		l.unlock()
		return
	}
	err := l.drainLocked()
	if err == nil {
		l.rmu.Lock()
		if l.ended {
			holds = nil // the end of the communicator came in between, and has given them back
		} else {
			l.undone -= n
			l.dead = l.dead[len(holds):]
		}
		l.giving++
		l.rmu.Unlock()
	}
	l.unlock()
	if err == nil {
		l.give(holds)
	}
}

func (l *library) drainLocked() error {
	if l.sys.Vendor() == ncclsys.MCCL {
		return nil // it registers nothing in a capture
	}
	p, s, err := l.ownStream()
	if err != nil {
		return err
	}
	b := l.c.dev.Bind()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	for _, comm := range l.comms() {
		for range drainGroups {
			if err := l.enter(); err != nil {
				return err
			}
			err := l.selfGroup(comm, p, p, 1, ncclsys.Stream(s.Handle())) // in place the library launches nothing
			l.leave()
			if err = l.finish(err, comm); err != nil {
				return err
			}
		}
	}
	return nil
}

// ownStream is a stream, and a little memory, for operations of this rank alone. mu is held.
func (l *library) ownStream() (ncclsys.DevicePtr, *cuda.Stream, error) {
	if l.drainStream == nil {
		s, err := l.c.dev.NewStream()
		if err != nil {
			return 0, nil, err
		}
		l.drainStream = s
	}
	if l.drainBuf == nil {
		m, err := l.c.dev.Alloc(4096, cuda.Private)
		if err != nil {
			return 0, nil, err
		}
		l.drainBuf = m
	}
	return ncclsys.DevicePtr(l.drainBuf.Pointer()), l.drainStream, nil
}

// selfGroup sends n bytes from this rank to itself.
func (l *library) selfGroup(comm ncclsys.Comm, from, to ncclsys.DevicePtr, n uint64, s ncclsys.Stream) error {
	if err := l.sys.GroupStart(); err != nil {
		return err
	}
	err := l.sys.Send(from, n, ncclsys.Uint8, l.c.rank, comm, s)
	if err == nil || err == error(ncclsys.ErrInProgress) {
		err = l.sys.Recv(to, n, ncclsys.Uint8, l.c.rank, comm, s)
	}
	if end := l.sys.GroupEnd(); err == nil || err == error(ncclsys.ErrInProgress) {
		err = end
	}
	return err
}

// quiet reports whether nothing of the communicator is enqueued here any more, as far as is known without asking.
func (l *library) quiet() bool { return !l.forgot.Load() && l.behind() == 0 }

// closeOwn gives back what this package has on the device for the communicator, when the device is through with that: where other work keeps it from that, on a goroutine
// that waits as long. Where the abort has not ended everything is left: the driver would not come back either.
func (l *library) closeOwn() {
	if l.stuck.Load() {
		return
	}
	quiet := l.quiet()
	if !quiet && l.peer.limit.Load() > 0 {
		l.peer.letGo()
		l.peer.home() // behind all; an error is that of a lost device
	}
	l.leaveHome()
	l.mu.Lock()
	s, buf := l.drainStream, l.drainBuf
	l.drainStream, l.drainBuf = nil, nil
	l.mu.Unlock()
	done := make(chan struct{})
	go func() { // what is given back may wait for the device, as the driver decides
		defer close(done)
		if quiet {
			l.peer.release()
		}
		if s != nil {
			s.Synchronize(context.Background())
		}
		l.peer.release()
		if s != nil {
			s.Close()
		}
		if buf != nil {
			buf.Free()
		}
	}()
	select {
	case <-done:
	case <-time.After(ownWait):
	}
}

// pendingRelease is how many registrations of closed graphs the library still has.
func (l *library) pendingRelease() int {
	l.rmu.Lock()
	defer l.rmu.Unlock()
	n := l.undone
	for _, f := range l.freeing {
		if f.graph {
			n++
		}
	}
	return n
}
