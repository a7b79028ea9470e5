package cuda

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// Waiting for a GPU is asking its driver again and again: a blocking call could not be ended when a collective's peer does not come.
// A query costs 1.4 µs. The first waitSpin are spent asking, with the core offered to others now and then: what is waited for is mostly shorter, and who
// sleeps wakes up late, which in a measurement, or a loop that waits for each step, is part of the time. After that the goroutine sleeps between two queries,
// for a small part of what it has waited so far.
const (
	waitSpin     = 10 * time.Millisecond
	shortestNap  = 20 * time.Microsecond
	longestNap   = 500 * time.Microsecond
	napFraction  = 64
	spinPerCheck = 8                // queries between two looks at the clock and the context
	spinPerLook  = time.Millisecond // how often, while it spins, those who watch are asked
)

// driverWait is one wait's progress.
type driverWait struct {
	start  time.Time
	n      uint
	spent  bool          // the spinning is over
	looked time.Duration // since start, when those who watch were asked last
	look   bool          // they are to be asked
}

// spin reports whether to ask again at once.
func (w *driverWait) spin() bool {
	w.look = w.spent
	if w.spent {
		return false
	}
	if w.n++; w.n%spinPerCheck != 0 {
		return true
	}
	if w.start.IsZero() {
		w.start = time.Now()
		return true
	}
	unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	waited := time.Since(w.start)
	w.spent = waited > waitSpin
	if w.look = w.spent || waited-w.looked >= spinPerLook; w.look {
		w.looked = waited
	}
	return !w.spent
}

// nap is how long to sleep.
func (w *driverWait) nap() time.Duration {
	return min(max(time.Since(w.start)/napFraction, shortestNap), longestNap)
}

// doze sleeps. Where nothing else runs time.Sleep takes a millisecond at least, the kernel 50 µs more than it is told.
func doze(d time.Duration) {
	t := unix.NsecToTimespec(d.Nanoseconds())
	unix.Nanosleep(&t, nil) // a signal may end it early, which does no harm
}

// pause spins or sleeps.
func (w *driverWait) pause() {
	if !w.spin() {
		doze(w.nap())
	}
}

// pollable is what can be waited for.
type pollable interface {
	ready() (bool, error) // asks the driver; bound
	broken(done bool, before looks) (looks, error)
}

// wait asks until p is ready, fails, or ctx ends. The goroutine keeps its thread while it spins only. Generic, as ask, so that p is not boxed.
func wait[P pollable](ctx context.Context, g *driverDevice, p P) error {
	before, err := p.broken(false, looks{})
	if err != nil {
		settle(ctx, g, p)
		return err
	}
	in, err := g.enter(true)
	if err != nil {
		return err
	}
	var w driverWait
	for {
		done, err := p.ready()
		err = g.cause(err)
		if !done {
			w.spin()
		}
		if err == nil && (done || w.look) {
			if before, err = p.broken(done, before); err != nil && !done {
				in.leave()
				settle(ctx, g, p)
				return err
			}
		}
		if err != nil || done {
			in.leave()
			return err
		}
		if w.n%spinPerCheck != 0 {
			continue
		}
		err = g.dev.Err()
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			in.leave()
			return err
		}
		if !w.spent {
			continue
		}
		in.leave()
		doze(w.nap())
		if in, err = g.enter(true); err != nil {
			return err
		}
	}
}

// failureGrace is how long a wait that has failed, and the close of a stream that has, still wait for the device: mostly what was enqueued ends at once then, and whoever is told of a failure frees what it used.
const failureGrace = 50 * time.Millisecond

// settle is that wait. What the device says is not of interest: the wait has its error.
func settle[P pollable](ctx context.Context, g *driverDevice, p P) {
	for start := time.Now(); time.Since(start) < failureGrace && ctx.Err() == nil && g.dev.Err() == nil; doze(shortestNap) {
		in, err := g.enter(true)
		if err != nil {
			return
		}
		done, err := p.ready()
		in.leave()
		if done || err != nil {
			return
		}
	}
}

// ask asks once.
func ask[P pollable](g *driverDevice, p P) (bool, error) {
	before, err := p.broken(false, looks{})
	if err != nil {
		return false, err
	}
	in, err := g.enter(true)
	if err != nil {
		return false, err
	}
	defer in.leave()
	done, err := p.ready()
	if err = g.cause(err); err == nil && done {
		_, err = p.broken(true, before)
	}
	return done && err == nil, err
}
