package cuda

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// waitParked waits until n goroutines are parked behind the device's driver.
func waitParked(t *testing.T, d *Device, n int32) {
	t.Helper()
	drv := &d.plat.(*hostDevice).driver
	for end := time.Now().Add(hang); drv.nparked.Load() != n || drv.waiters.Load() != n+1; runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines are parked, want %d", drv.nparked.Load(), n)
		}
	}
}

// The driver leaves together with a goroutine that was parked: a second one, whose work is not done, must take the driver's place.
func TestParkedTakesOver(t *testing.T) {
	d := newDevice(t)
	streams := [3]*Stream{newStream(t, d), newStream(t, d), newStream(t, d)}
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	for range 30 {
		gates := [3]*gate{newGate(d, "first"), newGate(d, "second"), newGate(d, "third")}
		var wg sync.WaitGroup
		for i, s := range streams {
			check(t, s.Submit(gates[i]))
			wg.Go(func() {
				if err := s.Synchronize(ctx); err != nil {
					t.Errorf("stream %d: %v", i, err)
				}
			})
			waitParked(t, d, int32(i)) // the first drives
		}
		gates[1].open.Store(true)
		gates[0].open.Store(true)
		d.Ring()
		for drv := &d.plat.(*hostDevice).driver; drv.waiters.Load() > 1; runtime.Gosched() {
			if ctx.Err() != nil {
				t.Fatal("the two whose work is done do not leave")
			}
		}
		gates[2].open.Store(true)
		d.Ring()
		wg.Wait()
		if t.Failed() {
			return
		}
	}
}

// A parked goroutine whose work has ended was told so, and has not looked yet: the driver that leaves wakes the one behind it.
func TestReleaseWakesWhoDrives(t *testing.T) {
	d := newDevice(t)
	drv := &d.plat.(*hostDevice).driver
	done, open := newStream(t, d).raw.(*hostStream), newStream(t, d).raw.(*hostStream)
	told := &parkedWaiter{s: done, target: 0, ch: make(chan struct{}, 1)}
	next := &parkedWaiter{s: open, target: 1, ch: make(chan struct{}, 1)}
	told.wake()
	drv.lock.Lock()
	drv.pmu.Lock()
	drv.parked = append(drv.parked, told, next)
	drv.nparked.Store(2)
	drv.pmu.Unlock()
	drv.release()
	drv.pmu.Lock()
	drv.parked = nil
	drv.nparked.Store(0)
	drv.pmu.Unlock()
	select {
	case <-next.ch:
	default:
		t.Error("the driver has left, and nobody was woken to take its place")
	}
}

// Two communicators that are made at the same time both give the device the rank's bell.
func TestSetBellAtOnce(t *testing.T) {
	for range 300 {
		var bell Bell
		d, err := Open("host")
		check(t, err)
		var wg sync.WaitGroup
		start := make(chan struct{})
		for range 4 {
			wg.Go(func() {
				<-start
				if err := d.SetBell(&bell); err != nil {
					t.Error(err)
				}
			})
		}
		close(start)
		wg.Wait()
		if p, ok := parkers.Load(&bell); !ok || p != d.plat.(*hostDevice).parker {
			t.Error("the bell does not lead to the device's sleeper")
		}
		check(t, d.Close())
		if _, ok := parkers.Load(&bell); ok {
			t.Error("the bell of a closed device still leads to it")
		}
		if t.Failed() {
			return
		}
	}
}

// A bell that is given while the device is closed, or afterwards, is kept by nobody.
func TestSetBellBesideClose(t *testing.T) {
	given := givenBells.Load()
	for range 300 {
		var bell Bell
		d, err := Open("host")
		check(t, err)
		var wg sync.WaitGroup
		start := make(chan struct{})
		wg.Go(func() {
			<-start
			if err := d.SetBell(&bell); err != nil && !errors.Is(err, ErrClosed) {
				t.Error(err)
			}
		})
		close(start)
		check(t, d.Close())
		wg.Wait()
		wantError(t, d.SetBell(&bell), ErrClosed)
		check(t, d.SetBell(nil))
		if _, ok := parkers.Load(&bell); ok || givenBells.Load() != given {
			t.Errorf("the bell leads to the closed device: %v; %d bells are given more", ok, givenBells.Load()-given)
		}
		if t.Failed() {
			return
		}
	}
}

// A rank that is alone in its process may have another device beside its own: a ring from another process, which finds no goroutine to wake, only the futex, wakes it
// all the same.
func TestRingFromElsewhere(t *testing.T) {
	newDevice(t)
	d := newDevice(t)
	sleepLong(d)
	var bell Bell
	check(t, d.SetBell(&bell))
	s := newStream(t, d)
	g := newGate(d, "asleep")
	check(t, s.Submit(g))
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(context.Background(), hang/3)
	defer cancel()
	go func() { done <- s.Synchronize(ctx) }()
	// It counts itself in, looks once more, and sleeps: by the time that it is still there after a while it does.
	for since := time.Now(); time.Since(since) < 20*time.Millisecond; runtime.Gosched() {
		if !asleep(d) {
			since = time.Now()
		}
	}
	g.open.Store(true)
	atomic.AddUint32(&bell.seq, 1)
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&bell.seq)), futexWake, 1<<30, 0, 0, 0)
	check(t, <-done)
	if ctx.Err() != nil {
		t.Error("the ring has woken nobody: only the end of the context did")
	}
}
