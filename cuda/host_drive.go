package cuda

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// How work gets done. Streams hold tasks that never block; one goroutine at a time, the driver, steps the first task of every
// stream in turn. Whoever waits (Synchronize) becomes the driver if nobody is, and then drives all streams of the
// device: so a small operation costs no switch of goroutine, and two ranks that wait on different streams do not block each
// other. Others who wait park until their work is done or the driver leaves. When nobody waits, the device's own goroutine
// drives (background).
//
// rung is a hint that something may have become able to go on; the bell is what wakes a sleeping driver.
type driver struct {
	h *hostDevice

	lock    sync.Mutex   // held by the driver
	want    atomic.Int32 // goroutines that ask for lock: the driver lets go
	waiters atomic.Int32 // goroutines in wait
	rung    atomic.Bool

	firstSleep, longestSleep time.Duration // bounds of a sleep on the bell

	pmu     sync.Mutex // guards parked
	parked  []*parkedWaiter
	nparked atomic.Int32

	stepping *hostStream // the driver's: whose task is being run, for the account of a panic

	background background
}

type parkedWaiter struct {
	s      *hostStream
	target uint64
	ch     chan struct{}
}

var parkedPool = sync.Pool{New: func() any { return &parkedWaiter{ch: make(chan struct{}, 1)} }}

func (d *driver) init(h *hostDevice) {
	d.h = h
	d.firstSleep, d.longestSleep = firstSleep, longestSleep
	d.background.init(d)
}

func (d *driver) stop() { d.background.stop() }

// wait returns nil when the first target tasks of the stream have ended, or the cause of ctx. Whether they
// ended well is the stream's business.
func (d *driver) wait(ctx context.Context, s *hostStream, target uint64) error {
	if s.ended.Load() >= target {
		return nil
	}
	d.waiters.Add(1)
	defer d.leftWaiting()
	for {
		var err error
		if d.lock.TryLock() {
			err = d.driveLocked(ctx, s, target)
		} else if !d.park(ctx, s, target) {
			err = context.Cause(ctx)
		}
		switch {
		case s.ended.Load() >= target:
			return nil
		case err != nil:
			return err
		}
		for i := 0; d.want.Load() > 0 && i < 1000; i++ {
			runtime.Gosched() // who wants the lock gets it before this goroutine tries again
		}
	}
}

// leftWaiting hands what is still to do to the device's goroutine, if nobody else waits.
func (d *driver) leftWaiting() {
	if d.waiters.Add(-1) == 0 && d.h.pending() {
		d.background.wake()
	}
}

// acquire takes the driver's place, to look at what only the driver may look at.
func (d *driver) acquire() {
	if d.lock.TryLock() {
		return
	}
	d.want.Add(1)
	d.h.ring()
	d.lock.Lock()
	d.want.Add(-1)
}

// release gives the driver's place up and wakes a parked waiter to take it.
func (d *driver) release() {
	d.lock.Unlock()
	if d.nparked.Load() == 0 {
		return
	}
	d.pmu.Lock()
	defer d.pmu.Unlock()
	d.wakeNext()
}

// wakeNext wakes the first of the parked whose work has not ended: another one would only leave, and the place stay empty. pmu is held.
func (d *driver) wakeNext() {
	for _, w := range d.parked {
		if w.s.ended.Load() < w.target {
			w.wake()
			return
		}
	}
}

func (w *parkedWaiter) wake() {
	select {
	case w.ch <- struct{}{}:
	default:
	}
}

// park waits until something has changed for the waiter: its work is done or the driver's place may be free. It returns false when ctx ended.
func (d *driver) park(ctx context.Context, s *hostStream, target uint64) bool {
	w := parkedPool.Get().(*parkedWaiter)
	w.s, w.target = s, target
	d.pmu.Lock()
	d.parked = append(d.parked, w)
	d.nparked.Store(int32(len(d.parked)))
	d.pmu.Unlock()
	defer d.unpark(w)

	if s.ended.Load() >= target {
		return true
	}
	// The driver may have left before it could see this waiter.
	if d.lock.TryLock() {
		d.lock.Unlock()
		return true
	}
	if d.background.driving.Load() {
		// It lets go when somebody waits, and mostly at once: that is cheaper to wait for than to be woken.
		d.h.ring()
		for range minYields {
			if !d.background.driving.Load() {
				return true
			}
			yield()
		}
	}
	select {
	case <-w.ch:
		return true
	case <-ctx.Done():
		return false
	}
}

func (d *driver) unpark(w *parkedWaiter) {
	d.pmu.Lock()
	for i := range d.parked {
		if d.parked[i] == w {
			d.parked = append(d.parked[:i], d.parked[i+1:]...)
			break
		}
	}
	d.nparked.Store(int32(len(d.parked)))
	// A wake that came too late for this waiter belongs to the next.
	select {
	case <-w.ch:
		d.wakeNext()
	default:
	}
	d.pmu.Unlock()
	w.s = nil
	parkedPool.Put(w)
}

// wakeDone wakes the parked whose work has ended.
func (d *driver) wakeDone() {
	d.pmu.Lock()
	defer d.pmu.Unlock()
	for _, w := range d.parked {
		if w.s.ended.Load() >= w.target {
			w.wake()
		}
	}
}

// driveLocked is drive and the end of it, which also comes where a task ends this goroutine.
func (d *driver) driveLocked(ctx context.Context, s *hostStream, target uint64) error {
	defer d.release()
	return d.drive(ctx, s, target)
}

// drive steps all streams until the first target tasks of s have ended, ctx ends (its cause is returned) or
// the place is wanted by another. Without s it drives until somebody waits or nothing is left to do. The lock is held.
func (d *driver) drive(ctx context.Context, s *hostStream, target uint64) error {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	idle := idler{d: d, s: s, target: target}
	if s != nil {
		idle.spin = d.h.spin
	}
	defer idle.end()
	done := ctx.Done()
	for {
		progress := d.pass()
		if idle.over() {
			return nil
		}
		if done != nil {
			select {
			case <-done:
				return context.Cause(ctx)
			default:
			}
		}
		if progress {
			idle.reset()
			continue
		}
		idle.wait(ctx)
	}
}

// pass steps every stream once and reports whether anything went on.
func (d *driver) pass() (progress bool) {
	defer d.recovered(&progress)
	if d.rung.Load() {
		d.rung.Store(false)
		progress = true
	}
	for _, s := range d.h.streams.all() {
		if s.pending() {
			d.stepping = s
			if s.step() {
				progress = true
			}
		}
	}
	d.stepping = nil
	if progress && d.nparked.Load() > 0 {
		d.wakeDone()
	}
	return progress
}

// errGoexit is what a kernel's function did that ended its goroutine: t.Fatal in a test does.
var errGoexit = errors.New("the function ended its goroutine (runtime.Goexit)")

// recovered makes a panic of a task, or its end of this goroutine, the device's sticky error.
func (d *driver) recovered(progress *bool) {
	if d.stepping == nil {
		return // nothing of a task's was running
	}
	r := recover()
	what := "task"
	if s := d.stepping; s.running {
		what = s.current.String()
	}
	d.stepping = nil
	*progress = true
	d.h.dev.Fail(d.h.panicked(what, r))
}

// panicked is the error for a panic in what. A fault in device memory is CUDA's illegal address.
func (h *hostDevice) panicked(what string, r any) *Error {
	stack := string(debug.Stack())
	switch e := r.(type) {
	case nil:
		return &Error{Op: what, Err: errGoexit, Stack: stack}
	case *Error:
		return &Error{Op: what, Detail: "panic" + atPlace(), Err: e, Stack: stack}
	case interface {
		runtime.Error
		Addr() uintptr
	}:
		return &Error{Op: what, Detail: h.space.find(e.Addr()) + atPlace(), Err: ErrIllegalAddress, Stack: stack}
	}
	return &Error{Op: what, Detail: "panic" + atPlace(), Err: fmt.Errorf("%v", r), Stack: stack}
}

// idler is a driver's waiting policy while no task goes on. Measured on two cores: a barrier among 4 processes takes 3 to 4 µs with yields
// of the core, 25 to 30 with sleeping at once, and milliseconds with the Go scheduler's own yield.
type idler struct {
	d      *driver
	s      *hostStream // nil: the device's own goroutine drives
	target uint64
	spin   int
	n      int
	since  time.Time
	sleep  time.Duration
	stop   func() bool // of the context's ring

	computed int // how often to sleep, and not to yield: the core is shared with one that computes
}

const (
	minYields = 20
	yieldFor  = 50 * time.Microsecond
	longPass  = 2 * time.Microsecond // a pass that takes longer has done some work

	// A yield to ranks that wait takes microseconds; a program that computes keeps the core for milliseconds, each time. Who sleeps gets it back at its
	// wake-up: beside 4 programs that compute, on two cores, a barrier of 8 processes takes 1 ms so, and 4 to 15 with yields.
	longYield    = 500 * time.Microsecond
	computedLong = 8 // sleeps, which cost some 50 µs each where nobody computes any more

	firstSleep   = 10 * time.Millisecond
	longestSleep = 100 * time.Millisecond
)

// over reports whether the driver has no reason to go on.
func (w *idler) over() bool {
	d := w.d
	switch {
	case d.want.Load() > 0:
		return true
	case w.s != nil:
		return w.s.ended.Load() >= w.target
	}
	return d.waiters.Load() > 0 || d.background.quit.Load() || !d.h.pending()
}

func (w *idler) reset() { w.n, w.sleep = 0, 0 }

func (w *idler) end() {
	if w.stop != nil {
		w.stop()
	}
}

// wait lets some time pass, more and more as it is called again.
func (w *idler) wait(ctx context.Context) {
	w.n++
	if crowded() {
		// Ranks of one process: the Go scheduler knows who else can run.
		if w.n <= 16 {
			runtime.Gosched()
			return
		}
		w.sleepOn(ctx)
		return
	}
	if w.computed > 0 {
		w.computed--
		w.sleepOn(ctx)
		return
	}
	n := w.n - w.spin
	switch {
	case n <= 0:
		return
	case n == 1:
		w.since = time.Now()
	case n >= minYields && n%8 == 0 && time.Since(w.since) > yieldFor:
		w.sleepOn(ctx)
		return
	}
	if n%16 == 0 {
		runtime.Gosched()
	}
	begin := time.Now()
	yield()
	w.yielded(time.Since(begin))
}

// yielded takes note of how long a yield took.
func (w *idler) yielded(took time.Duration) {
	if took > longYield {
		w.computed = computedLong
	}
}

// yield lets another thread of the machine run, or another goroutine where ranks share the process. The raw call keeps this goroutine's place in its
// own scheduler, which would take its time.
func yield() {
	if crowded() {
		runtime.Gosched()
		return
	}
	unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

// sleepOn sleeps until the bell rings. The time is bounded, so that a ring that its sender never sent (it was killed in between)
// cannot hang this rank.
func (w *idler) sleepOn(ctx context.Context) {
	d := w.d
	if w.stop == nil && ctx.Done() != nil {
		w.stop = context.AfterFunc(ctx, d.h.ring)
	}
	w.sleep = min(max(2*w.sleep, d.firstSleep), d.longestSleep)

	bell := d.h.bell.Load()
	seq := bell.enter()
	defer bell.leave()
	start := time.Now()
	if d.pass() || time.Since(start) > longPass || w.over() || ctx.Err() != nil || d.h.bell.Load() != bell {
		w.n = 0
		return
	}
	d.h.parker.sleep(bell, seq, w.sleep)
}
