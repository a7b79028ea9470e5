package cuda

import (
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A kernel's items are done in parts of about partTime: one part by each Step of the driver, so that the other streams go on between, and
// by the device's workers beside it when there is enough left to be worth waking them. Parts begin at multiples of
// partAlign items, so that two cores rarely write the same cache line.
const (
	partTime   = 50 * time.Microsecond
	partAlign  = 64
	helpAfter  = 30 * time.Microsecond  // of work left, that a worker's wake-up pays for
	heavyItem  = 200 * time.Microsecond // the driver leaves items like that to the workers
	firstGuess = 256                    // items in the first part of a kernel never run before
)

// kernelRun is the progress of one launch.
type kernelRun struct {
	h    *hostDevice
	name string
	n    int64
	pace *atomic.Int64 // picoseconds an item, of all launches of the kernel
	work parter

	next   atomic.Int64 // first item that nobody has taken
	done   atomic.Int64 // items done
	begun  bool         // this run; the driver's
	posted bool         // the workers know of it; the driver's
	active int          // workers in it; guarded by the pool's mu
}

type parter interface{ part(lo, hi int) }

func (r *kernelRun) init(h *hostDevice, name string, n int, pace *atomic.Int64, work parter) {
	r.h, r.name, r.n, r.pace, r.work = h, name, int64(n), pace, work
}

func (r *kernelRun) start() { r.begun = false }

// begin starts the run, unless a worker is still in an earlier one that was cancelled.
func (r *kernelRun) begin() bool {
	if r.posted && !r.h.pool.retract(r) {
		return false
	}
	r.next.Store(0)
	r.done.Store(0)
	r.begun, r.posted = true, false
	return true
}

// left is the time that the items not yet taken need on one core.
func (r *kernelRun) left() time.Duration {
	return time.Duration(max(0, r.n-r.next.Load()) * r.pace.Load() / 1000)
}

// takePart takes the next items; lo == hi when there are none.
func (r *kernelRun) takePart() (lo, hi int64) {
	size := int64(firstGuess)
	if pace := r.pace.Load(); pace > 0 {
		size = int64(partTime) * 1000 / pace
		if size >= partAlign {
			size &^= partAlign - 1
		}
	}
	size = min(max(size, 1), r.n)
	lo = min(r.next.Add(size)-size, r.n)
	return lo, min(lo+size, r.n)
}

// doPart does some items, and reports whether there were any.
func (r *kernelRun) doPart() bool {
	lo, hi := r.takePart()
	if lo == hi {
		return false
	}
	start := time.Now()
	r.work.part(int(lo), int(hi))
	// The mean of old and new: one part that was interrupted does not spoil the pace.
	pace := max(1, int64(time.Since(start))*1000/(hi-lo))
	if old := r.pace.Load(); old > 0 {
		pace = (old + pace + 1) / 2
	}
	r.pace.Store(pace)
	r.done.Add(hi - lo)
	return true
}

// step does a part, and reports whether all are done. The driver's.
func (r *kernelRun) step() bool {
	if !r.begun && !r.begin() {
		return false
	}
	pool := &r.h.pool
	heavy := time.Duration(r.pace.Load()/1000) > heavyItem
	if !heavy && r.doPart() {
		r.h.driver.rung.Store(true)
	}
	if !r.posted && (heavy || r.h.cores > 1 && r.left() > helpAfter) {
		r.posted = true
		pool.post(r)
	}
	if r.done.Load() < r.n {
		return false
	}
	if r.posted && !pool.retract(r) {
		return false
	}
	r.posted = false
	return true
}

func (r *kernelRun) cancel() {
	r.next.Store(r.n) // no more parts
	if r.posted {
		r.h.pool.retract(r)
	}
}

// workers are the goroutines that help with kernels; they start with the first kernel that needs them.
type workers struct {
	h *hostDevice

	mu      sync.Mutex // guards what follows
	more    sync.Cond  // a run was posted, or quit
	runs    []*kernelRun
	started int
	quit    bool
	wg      sync.WaitGroup
}

func (p *workers) init(h *hostDevice) {
	p.h = h
	p.more.L = &p.mu
}

// post offers a run to the workers. The driver's core works on it too, except where that is heavy, so one fewer than the cores are needed.
func (p *workers) post(r *kernelRun) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if want := max(1, p.h.cores-1); p.started < want && !p.quit {
		for ; p.started < want; p.started++ {
			p.wg.Go(p.work)
		}
	}
	p.runs = append(p.runs, r)
	p.more.Broadcast()
}

// retract takes a run back. It reports whether no worker is in it; one that is rings when it leaves.
func (p *workers) retract(r *kernelRun) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.runs = slices.DeleteFunc(p.runs, func(other *kernelRun) bool { return other == r })
	return r.active == 0
}

func (p *workers) stop() {
	p.mu.Lock()
	p.quit = true
	p.more.Broadcast()
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *workers) work() {
	debug.SetPanicOnFault(true)
	p.mu.Lock()
	defer func() {
		if !p.quit { // a kernel has ended this goroutine: another is started when one is needed
			p.started--
		}
		p.mu.Unlock()
	}()
	for {
		r := p.find()
		if r == nil {
			if p.quit {
				return
			}
			p.more.Wait()
			continue
		}
		p.help(r)
	}
}

// find is a run with items that nobody has taken. mu is held.
func (p *workers) find() *kernelRun {
	for _, r := range p.runs {
		if r.next.Load() < r.n {
			return r
		}
	}
	return nil
}

// help does parts of a run. mu is held, but not meanwhile.
func (p *workers) help(r *kernelRun) {
	r.active++
	p.mu.Unlock()
	over := false
	defer func() {
		if !over {
			p.h.dev.Fail(p.h.panicked("kernel "+r.name, recover()))
		}
		p.mu.Lock()
		r.active--
		p.h.ring()
	}()
	for r.doPart() {
	}
	over = true
}
