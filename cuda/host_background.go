package cuda

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// background is the device's own goroutine: it drives when there is work and nobody waits. It parks when the device is idle,
// and the first enqueue after that wakes it. It then looks after a short pause, because mostly the caller goes on to
// wait, and drives itself. While callers do so for everything that they enqueue it looks less and less
// often, down to once in longestPause, as each look takes a core from a rank that computes; when it
// finds work that nobody waits for, it is back at firstPause, which is an enqueue carried out within 100 µs.
type background struct {
	d       *driver
	parked  atomic.Bool // only wake gets it going
	driving atomic.Bool
	quit    atomic.Bool
	kick    chan struct{}
	nap     Bell // between looks
	parker  *parker

	mu      sync.Mutex // guards started, and quit against a start
	started bool
	ended   chan struct{}
}

const (
	firstPause   = 25 * time.Microsecond // the kernel adds up to 50
	longestPause = time.Millisecond
	quietLooks   = 4
)

func (b *background) init(d *driver) {
	b.d = d
	b.kick = make(chan struct{}, 1)
	b.ended = make(chan struct{})
	b.parked.Store(true)
	b.parker = newParker()
	parkers.Store(&b.nap, b.parker)
}

// wake makes the goroutine look for work at once, or after the first pause if it was parked.
func (b *background) wake() {
	if !b.parked.Load() || !b.parked.CompareAndSwap(true, false) {
		b.nap.Ring()
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.quit.Load() {
		return
	}
	if !b.started {
		b.started = true
		go b.run()
	}
	b.kick <- struct{}{} // has room: parked was true, so the last one was received
}

// stop ends the goroutine.
func (b *background) stop() {
	b.mu.Lock()
	b.quit.Store(true)
	started := b.started
	b.mu.Unlock()
	if started {
		close(b.kick)
		b.nap.Ring()
		<-b.ended
	}
	parkers.Delete(&b.nap)
}

func (b *background) run() {
	ended := false
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if ended || b.quit.Load() {
			close(b.ended)
			return
		}
		// A task has ended this goroutine while it drove: another looks at what that left.
		b.kick <- struct{}{} // has room: this one was not parked
		go b.run()
	}()
	for range b.kick {
		for b.look() && !b.quit.Load() {
		}
	}
	ended = true
}

// drive does what is there to do. The driver's lock is held.
func (b *background) drive() {
	b.driving.Store(true)
	defer b.d.release()
	defer b.driving.Store(false)
	b.d.drive(context.Background(), nil, 0)
}

// look serves the device until it has been quiet for some looks, and then parks. It returns true when it must look again at once.
func (b *background) look() bool {
	d := b.d
	pause, quiet, seen := firstPause, 0, uint64(0)
	for quiet < quietLooks && !b.quit.Load() {
		seq := b.nap.enter()
		if !b.quit.Load() {
			b.parker.sleep(&b.nap, seq, pause)
		}
		b.nap.leave()
		if d.waiters.Load() == 0 && d.h.pending() && d.lock.TryLock() {
			b.drive()
			pause, quiet = firstPause, 0
			continue
		}
		if n := d.h.enqueued(); n != seen {
			seen, quiet = n, 0
		} else {
			quiet++
		}
		pause = min(2*pause, longestPause)
	}
	b.parked.Store(true)
	// What was enqueued before that has woken nobody.
	return d.waiters.Load() == 0 && d.h.pending() && b.parked.CompareAndSwap(true, false)
}
