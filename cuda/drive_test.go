package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pingPong are two tasks of two devices that take turns: neither ends without the other.
type pingPong struct {
	turn    atomic.Int32
	rounds  int32
	devices [2]*Device
}

func newPingPong(a, b *Device, rounds int) *pingPong {
	return &pingPong{rounds: int32(rounds), devices: [2]*Device{a, b}}
}

type pingPongSide struct {
	p *pingPong
	i int32
}

func (p *pingPong) side(i int32) Task { return &pingPongSide{p, i} }

func (s *pingPongSide) Start() {}

func (s *pingPongSide) Step() (bool, error) {
	turn := s.p.turn.Load()
	if turn < 2*s.p.rounds && turn%2 == s.i {
		s.p.turn.Store(turn + 1)
		s.p.devices[1-s.i].Ring()
		turn++
	}
	return turn >= 2*s.p.rounds-s.i, nil
}

func (s *pingPongSide) Waiting() string { return fmt.Sprintf("turn %d", s.p.turn.Load()) }

// Two ranks have the same two operations on two streams and wait for them in opposite order.
func TestOppositeOrder(t *testing.T) {
	a, b := newDevice(t), newDevice(t)
	for range 50 {
		p, q := newPingPong(a, b, 10), newPingPong(a, b, 10)
		ctx := testContext(t)
		var wg sync.WaitGroup
		for i, d := range []*Device{a, b} {
			s1, s2 := must(d.NewStream()), must(d.NewStream())
			check(t, s1.Submit(p.side(int32(i))))
			check(t, s2.Submit(q.side(int32(i))))
			if i == 1 {
				s1, s2 = s2, s1
			}
			wg.Go(func() {
				for _, s := range []*Stream{s1, s2} {
					if err := s.Synchronize(ctx); err != nil {
						t.Error(err)
						return
					}
				}
				if s1.Close() != nil || s2.Close() != nil {
					t.Error("close")
				}
			})
		}
		wg.Wait()
	}
}

// A rank enqueues and goes to compute: its peer, which waits, is served by the device's own goroutine.
func TestServedWhileComputing(t *testing.T) {
	a, b := newDevice(t), newDevice(t)
	p := newPingPong(a, b, 100)
	sa, sb := newStream(t, a), newStream(t, b)
	check(t, sa.Submit(p.side(0)))
	check(t, sb.Submit(p.side(1)))
	check(t, sb.Synchronize(testContext(t))) // nobody waits on a
	check(t, sa.Synchronize(testContext(t)))
}

// barrier is a sense-reversing barrier in memory that ranks share, with their bells.
type barrier struct {
	arrived atomic.Int32
	sense   atomic.Int32
	bells   [8]Bell
}

// barrierTask passes the barrier a number of times.
type barrierTask struct {
	b       *barrier
	n       int32
	rounds  int32
	round   int32
	waiting bool
}

func (t *barrierTask) Start() { t.round, t.waiting = 0, false }

func (t *barrierTask) Step() (bool, error) {
	for t.round < t.rounds {
		if !t.waiting {
			t.waiting = true
			if t.b.arrived.Add(1) == t.n {
				t.b.arrived.Store(0)
				t.b.sense.Add(1)
				for i := range t.n {
					t.b.bells[i].Ring()
				}
			}
		}
		if t.b.sense.Load() <= t.round {
			return false, nil
		}
		t.round++
		t.waiting = false
	}
	return true, nil
}

func (t *barrierTask) Waiting() string {
	return fmt.Sprintf("barrier %d of %d, %d arrived", t.round, t.rounds, t.b.arrived.Load())
}

const (
	barrierRanks  = 8
	barrierRounds = 2000
)

func TestBarrierInProcess(t *testing.T) {
	b := new(barrier)
	ctx := testContext(t)
	var wg sync.WaitGroup
	for i := range barrierRanks {
		d := newDevice(t)
		check(t, d.SetBell(&b.bells[i]))
		check(t, d.SetBell(&b.bells[i]))
		s := newStream(t, d)
		wg.Go(func() {
			if err := s.Submit(&barrierTask{b: b, n: barrierRanks, rounds: barrierRounds}); err != nil {
				t.Error(err)
			}
			if err := s.Synchronize(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestBarrierProcesses is the same among processes; each is this test binary in the role "barrier".
func TestBarrierProcesses(t *testing.T) {
	d := newDevice(t)
	if raceEnabled {
		t.Skip("under the race detector shared memory is on the heap of one process")
	}
	m := must(d.Alloc(uint64(unsafe.Sizeof(barrier{})), Shareable))
	defer func() { check(t, m.Free()) }()
	fd, err := unix.FcntlInt(uintptr(must(m.Share()).FD), unix.F_DUPFD_CLOEXEC, 0)
	check(t, err)
	shared := os.NewFile(uintptr(fd), "shared memory")
	defer shared.Close()

	ctx := testContext(t)
	var ranks []*exec.Cmd
	for i := range barrierRanks {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), roleVariable+"=barrier", "RANK="+strconv.Itoa(i), "GORUN_LOCAL_SIZE="+strconv.Itoa(barrierRanks))
		cmd.ExtraFiles = []*os.File{shared}
		cmd.Stderr = os.Stderr
		check(t, cmd.Start())
		ranks = append(ranks, cmd)
	}
	for i, cmd := range ranks {
		if err := cmd.Wait(); err != nil {
			t.Errorf("rank %d: %v", i, err)
		}
	}
}

func runBarrierRank() error {
	rank, err := strconv.Atoi(os.Getenv("RANK"))
	if err != nil {
		return err
	}
	d, err := Open("host")
	if err != nil {
		return err
	}
	p, err := d.MapShared(SharedMemory{FD: 3, Size: uint64(unsafe.Sizeof(barrier{}))})
	if err != nil {
		return err
	}
	b := (*barrier)(unsafe.Pointer(unsafe.SliceData(p.Bytes())))
	if err := d.SetBell(&b.bells[rank]); err != nil {
		return err
	}
	s, err := d.NewStream()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	defer cancel()
	if err := s.Submit(&barrierTask{b: b, n: barrierRanks, rounds: barrierRounds}); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	for _, closer := range []func() error{s.Close, func() error { return d.SetBell(nil) }, p.Close, d.Close} {
		if err := closer(); err != nil {
			return err
		}
	}
	return nil
}

// Beside a program that computes, which a yield gives the core to for long, a driver sleeps, and tries yields again after a time.
func TestYieldToOneThatComputes(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	h := d.plat.(*hostDevice)
	w := idler{d: &h.driver, s: s.raw.(*hostStream), target: 1}
	w.yielded(longYield / 2)
	if w.computed != 0 {
		t.Errorf("after a short yield it is to sleep %d times", w.computed)
	}
	w.yielded(2 * longYield)
	for n := range computedLong {
		w.sleep = 0 // else the next one is longer
		if w.wait(t.Context()); w.sleep == 0 {
			t.Fatalf("%d. wait after a long yield: it did not sleep", n+1)
		}
	}
	if w.computed != 0 {
		t.Errorf("it is to sleep %d times more", w.computed)
	}
	w.end()
}

// TestBell has one who sleeps for each change and one who changes and rings: a ring that is lost would cost the whole bound of a sleep.
func TestBell(t *testing.T) {
	// With one processor the sleeper keeps it from who rings until the runtime's watchdog takes it away, up to 10 ms in each round. In a program these are two processes.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(2, runtime.GOMAXPROCS(0))))
	var b Bell
	var value, seen atomic.Int64
	rounds := int64(3000)
	if raceEnabled {
		rounds = 1000
	}
	done := make(chan struct{})
	var lost int
	go func() {
		defer close(done)
		for want := int64(1); want <= rounds; want++ {
			for value.Load() < want {
				seq := b.enter()
				if value.Load() < want {
					start := time.Now()
					b.sleep(seq, hang)
					if time.Since(start) > hang-hang/10 {
						lost++
					}
				}
				b.leave()
			}
			seen.Store(want)
		}
	}()
	rng := rand.New(rand.NewPCG(1, 2))
	for want := int64(1); want <= rounds; want++ {
		for n := rng.IntN(200); n > 0; n-- { // to hit every place in the sleeper's path
			_ = seen.Load()
		}
		value.Store(want)
		b.Ring()
		for seen.Load() < want {
			runtime.Gosched()
		}
	}
	<-done
	if lost > 0 {
		t.Errorf("%d rings were lost", lost)
	}
	if b.sleepers != 0 {
		t.Errorf("%d sleepers are left", b.sleepers)
	}
}

func TestBellAt(t *testing.T) {
	var words [2]uint32
	BellAt(unsafe.Pointer(&words)).Ring()
	if words != [2]uint32{} {
		t.Errorf("a ring without a sleeper wrote %v", words)
	}
	words[1] = 1
	BellAt(unsafe.Pointer(&words)).Ring()
	if words != [2]uint32{1, 1} {
		t.Errorf("a ring with a sleeper gave %v", words)
	}
	if unsafe.Sizeof(Bell{}) != 8 {
		t.Errorf("a bell takes %d bytes", unsafe.Sizeof(Bell{}))
	}
}

func TestSetBell(t *testing.T) {
	d, other := newDevice(t), newDevice(t)
	var a, b Bell
	check(t, d.SetBell(nil))
	check(t, d.SetBell(&b))
	check(t, d.SetBell(nil))
	check(t, d.SetBell(&a))
	check(t, d.SetBell(&a))
	wantText(t, d.SetBell(&b), "another bell already")
	wantText(t, other.SetBell(&a), "bell of another device")
	check(t, other.SetBell(&b))
}

// A driver that sleeps on the device's own bell when it gets another one goes over to it.
func TestSetBellWhileAsleep(t *testing.T) {
	d := newDevice(t)
	sleepLong(d)
	s := newStream(t, d)
	g := newGate(d, "asleep")
	check(t, s.Submit(g))
	done := make(chan error)
	go func() { done <- s.Synchronize(testContext(t)) }()
	own := &d.plat.(*hostDevice).own
	eventually(t, "sleep", func() bool { return atomic.LoadUint32(&own.sleepers) > 0 })
	var bell Bell
	check(t, d.SetBell(&bell))
	eventually(t, "sleep on the new bell", func() bool { return atomic.LoadUint32(&bell.sleepers) > 0 })
	g.open.Store(true)
	bell.Ring()
	check(t, <-done)
}

// sleepLong makes the device sleep longer than any test may take, so that a test hangs where a ring is missing.
func sleepLong(d *Device) {
	driver := &d.plat.(*hostDevice).driver
	driver.firstSleep, driver.longestSleep = 10*hang, 10*hang
}

func asleep(d *Device) bool {
	return atomic.LoadUint32(&d.plat.(*hostDevice).bell.Load().sleepers) > 0
}

// One who waits for a stream that gets nowhere drives, and sleeps; all that must wake it does.
func TestWakeTheDriver(t *testing.T) {
	for _, devices := range []int{1, 2} { // futex, and parking
		t.Run(fmt.Sprint(devices, " devices"), func(t *testing.T) {
			for range devices - 1 {
				newDevice(t)
			}
			d := newDevice(t)
			sleepLong(d)
			stuck := newGate(d, "stuck")
			s, other := newStream(t, d), newStream(t, d)
			check(t, s.Submit(stuck))
			ctx, cancel := context.WithCancel(t.Context())
			driving := make(chan error, 1)
			go func() { driving <- s.Synchronize(ctx) }()
			untilAsleep := func() {
				for start := time.Now(); !asleep(d) && time.Since(start) < hang; {
					time.Sleep(100 * time.Microsecond)
				}
			}
			var ran atomic.Int32
			count := do(func() error { ran.Add(1); return nil })
			for want, wake := range []struct {
				name string
				do   func() error
			}{
				{"submit", func() error { return other.Submit(count) }},
				{"host function", func() error { return errors.Join(other.HostFunc(untilAsleep), other.Submit(count)) }},
				{"another waiter", func() error {
					return errors.Join(other.Submit(count), other.Synchronize(testContext(t)))
				}},
				{"waiting for an event", func() error {
					e := newEvent(t, d)
					return errors.Join(other.Record(e), other.Wait(e), other.Submit(count))
				}},
				{"closing a stream", func() error {
					s := must(d.NewStream())
					return errors.Join(s.Close(), other.Submit(count))
				}},
			} {
				eventually(t, "sleep before: "+wake.name, func() bool { return asleep(d) })
				check(t, wake.do())
				eventually(t, wake.name, func() bool { return int(ran.Load()) == want+1 })
			}
			eventually(t, "sleep before the end of the context", func() bool { return asleep(d) })
			cancel()
			select {
			case err := <-driving:
				wantError(t, err, context.Canceled, "gate stuck")
			case <-time.After(hang):
				t.Fatal("the end of the context wakes nobody")
			}
			stuck.let()
			check(t, s.Synchronize(testContext(t)))
		})
	}
}

// Who parks beside a driver that gets nowhere returns when its own work is done.
func TestParkedBesideStuckDriver(t *testing.T) {
	d := newDevice(t)
	sleepLong(d)
	a, b := newGate(d, "a"), newGate(d, "b")
	sa, sb := newStream(t, d), newStream(t, d)
	check(t, sa.Submit(a))
	check(t, sb.Submit(b))
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { first <- sa.Synchronize(testContext(t)) }()
	eventually(t, "drive", func() bool { return a.started.Load() == 1 && asleep(d) })
	go func() { second <- sb.Synchronize(testContext(t)) }()
	eventually(t, "park", func() bool { return d.plat.(*hostDevice).driver.nparked.Load() == 1 })
	b.let()
	check(t, <-second)
	a.let()
	check(t, <-first)
}

// When the one who waited leaves, the device's goroutine takes over what is left, though it had parked.
func TestTakeOverFromWaiter(t *testing.T) {
	d := newDevice(t)
	a, b := newGate(d, "a"), newGate(d, "b")
	sa, sb := newStream(t, d), newStream(t, d)
	done := make(chan error, 1)
	check(t, sa.Submit(a))
	go func() { done <- sa.Synchronize(testContext(t)) }()
	eventually(t, "wait", func() bool { return d.plat.(*hostDevice).driver.waiters.Load() == 1 })
	check(t, sb.Submit(b))
	eventually(t, "park", d.plat.(*hostDevice).driver.background.parked.Load)
	a.let()
	check(t, <-done)
	b.open.Store(true) // and nobody rings
	eventually(t, "take over", func() bool { return b.ended.Load() == 1 })
}

func BenchmarkSubmitSynchronize(b *testing.B) {
	d := newDevice(b)
	s := newStream(b, d)
	g := newGate(d, "open")
	g.open.Store(true)
	b.ReportAllocs()
	for b.Loop() {
		s.Submit(g)
		s.Synchronize(b.Context())
	}
}

func BenchmarkPingPongInProcess(b *testing.B) {
	x, y := newDevice(b), newDevice(b)
	sx, sy := newStream(b, x), newStream(b, y)
	p := newPingPong(x, y, b.N)
	sx.Submit(p.side(0))
	sy.Submit(p.side(1))
	done := make(chan error)
	b.ResetTimer()
	go func() { done <- sy.Synchronize(b.Context()) }()
	check(b, sx.Synchronize(b.Context()))
	check(b, <-done)
}

func BenchmarkKernel(b *testing.B) {
	for _, n := range []int{1000, 100_000, 10_000_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			d := newDevice(b)
			s := newStream(b, d)
			k := must(NewKernel(d, axpy))
			args := axpyArgs{A: 0.5, X: malloc[float32](b, d, n).All(), Y: malloc[float32](b, d, n).All()}
			b.SetBytes(int64(12 * n))
			b.ReportAllocs()
			for b.Loop() {
				k.Launch(s, Grid{N: n}, args)
				s.Synchronize(b.Context())
			}
		})
	}
}

func BenchmarkCopy(b *testing.B) {
	for _, n := range []int{8, 64 << 10, 64 << 20} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			d := newDevice(b)
			s := newStream(b, d)
			dst, src := malloc[uint8](b, d, n), malloc[uint8](b, d, n)
			check(b, Fill(src.All(), 1, s))
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				Copy(dst.All(), src.All(), s)
				s.Synchronize(b.Context())
			}
		})
	}
}
