package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

type axpyArgs struct {
	A    float32
	X, Y Slice[float32]
}

var axpy = KernelSpec[axpyArgs]{Name: "axpy", Host: func(g Grid, lo, hi int, a axpyArgs) {
	x, y := a.X.Host(), a.Y.Host()
	for i := lo; i < hi; i++ {
		y[i] += a.A * x[i]
	}
}}

func TestKernel(t *testing.T) {
	for _, cores := range []string{"1", "1000"} { // ranks that share the machine
		t.Run(cores+" local ranks", func(t *testing.T) {
			t.Setenv("GORUN_LOCAL_SIZE", cores)
			d := newDevice(t)
			s := newStream(t, d)
			k := must(NewKernel(d, axpy))
			many := 3_000_000
			if raceEnabled {
				many /= 10
			}
			for _, n := range []int{0, 1, 63, 1000, 100_000, many} {
				x, y := malloc[float32](t, d, n), malloc[float32](t, d, n)
				check(t, Fill(x.All(), 2, s))
				const launches = 5
				for range launches {
					check(t, k.Launch(s, Grid{N: n}, axpyArgs{A: 0.5, X: x.All(), Y: y.All()}))
				}
				check(t, s.Synchronize(testContext(t)))
				for i, v := range y.All().Host() {
					if v != launches {
						t.Fatalf("%d items: item %d is %v", n, i, v)
					}
				}
			}
		})
	}
}

// Each item is done once, whatever the cost of items.
func TestKernelParts(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	type args struct {
		counts *[200]atomic.Int32
		slow   time.Duration
	}
	k := must(NewKernel(d, KernelSpec[args]{Name: "parts", Host: func(g Grid, lo, hi int, a args) {
		if g.N != 200 || g.Block != 256 || lo < 0 || hi > g.N || lo >= hi {
			panic(fmt.Sprintf("grid %v, part %d to %d", g, lo, hi))
		}
		for i := lo; i < hi; i++ {
			for start := time.Now(); time.Since(start) < a.slow; {
			}
			a.counts[i].Add(1)
		}
	}}))
	for _, slow := range []time.Duration{0, 10 * time.Microsecond, time.Millisecond, time.Millisecond, 0, 0} {
		var counts [200]atomic.Int32
		check(t, k.Launch(s, Grid{N: 200}, args{&counts, slow}))
		check(t, s.Synchronize(testContext(t)))
		for i := range counts {
			if n := counts[i].Load(); n != 1 {
				t.Fatalf("items of %v: item %d done %d times", slow, i, n)
			}
		}
	}
}

func TestKernelErrors(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	_, err := NewKernel(d, KernelSpec[int]{})
	wantText(t, err, "no name")
	_, err = NewKernel(d, KernelSpec[int]{Name: "gpu only", CUDA: "__global__ …"})
	wantText(t, err, "load kernel gpu only", "Host function")
	k := must(NewKernel(d, KernelSpec[int]{Name: "nothing", Host: func(Grid, int, int, int) {}}))
	wantText(t, k.Launch(s, Grid{N: -1}, 0), "launch kernel: nothing", "-1 items")
	wantText(t, k.Launch(newStream(t, newDevice(t)), Grid{N: 1}, 0), "another device")
	d.Fail(errors.New("broken"))
	_, err = NewKernel(d, axpy)
	wantText(t, err, "broken")
	wantText(t, k.Launch(s, Grid{N: 1}, 0), "broken")
}

func TestKernelPanic(t *testing.T) {
	for name, at := range map[string]int{"on the driver": 0, "somewhere": 9_999_999} {
		t.Run(name, func(t *testing.T) {
			d := newDevice(t)
			s := newStream(t, d)
			k := must(NewKernel(d, KernelSpec[int]{Name: "divide", Host: func(g Grid, lo, hi int, zero int) {
				for i := lo; i < hi; i++ {
					if i == at {
						_ = i / zero
					}
				}
			}}))
			check(t, k.Launch(s, Grid{N: 10_000_000}, 0))
			behind := newGate(d, "behind")
			check(t, s.Submit(behind))
			err := s.Synchronize(testContext(t))
			wantText(t, err, "kernel divide: panic at kernel_test.go:", "divide by zero")
			wantText(t, d.Err(), "kernel divide")
			wantText(t, fmt.Errorf("%+v", err), "TestKernelPanic")
			wantText(t, behind.cancelCause(), "kernel divide")
		})
	}
}

// A kernel that ends its goroutine (t.Fatal does) fails the device, whichever goroutine that was; nobody else hangs for it.
func TestKernelGoexit(t *testing.T) {
	kernel := func(d *Device, slow time.Duration) *Kernel[bool] {
		return must(NewKernel(d, KernelSpec[bool]{Name: "quits", Host: func(_ Grid, _, _ int, quit bool) {
			if quit {
				runtime.Goexit()
			}
			for start := time.Now(); time.Since(start) < slow; {
			}
		}}))
	}
	const slow = 4 * heavyItem // for the workers to do
	for name, c := range map[string]struct {
		slow time.Duration
		wait bool // a first waiter drives, and is ended
	}{"in a waiter": {0, true}, "in the background": {0, false}, "in a worker": {slow, false}} {
		t.Run(name, func(t *testing.T) {
			d := newDevice(t)
			s := newStream(t, d)
			k := kernel(d, c.slow)
			for range 3 { // its pace is known then
				check(t, k.Launch(s, Grid{N: 1}, false))
				check(t, s.Synchronize(testContext(t)))
			}
			other := newGate(d, "on another stream")
			check(t, newStream(t, d).Submit(other))
			if c.wait {
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					k.Launch(s, Grid{N: 1}, true)
					s.Synchronize(testContext(t))
				}()
				<-ended
			} else {
				check(t, k.Launch(s, Grid{N: 1}, true))
			}
			// The device's goroutine goes on: nobody waits for this.
			eventually(t, "the other stream fails", func() bool { return other.canceled.Load() != nil })
			wantText(t, s.Synchronize(testContext(t)), "quits", "runtime.Goexit")
			wantText(t, d.Err(), "quits", "runtime.Goexit")
		})
	}
}

// While a long kernel runs, another stream of the same device goes on, even on one core: a rank that computes does not
// keep its peer waiting. The kernel ends only after the other stream has made a hundred exchanges with the peer.
func TestKernelBesideExchange(t *testing.T) {
	t.Setenv("GORUN_LOCAL_SIZE", "1000") // one core
	mine, peer := newDevice(t), newDevice(t)
	const rounds = 100
	p := newPingPong(mine, peer, rounds)
	compute, comm, peerComm := newStream(t, mine), newStream(t, mine), newStream(t, peer)
	var parts atomic.Int32
	k := must(NewKernel(mine, KernelSpec[int]{Name: "long", Host: func(g Grid, lo, hi int, _ int) {
		for start := time.Now(); time.Since(start) < 20*time.Microsecond; {
		}
		parts.Add(1)
	}}))
	check(t, k.Launch(compute, Grid{N: 1_000_000}, 0))
	done := newGate(mine, "kernel done")
	check(t, compute.Submit(done))
	done.open.Store(true)
	check(t, comm.Submit(p.side(0)))
	check(t, peerComm.Submit(p.side(1)))
	waited := make(chan error)
	go func() { waited <- peerComm.Synchronize(testContext(t)) }()
	check(t, comm.Synchronize(testContext(t)))
	check(t, <-waited)
	if parts.Load() == 0 {
		t.Error("the kernel did not run beside the exchange")
	}
	check(t, compute.Synchronize(testContext(t)))
}
