package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestStreamOrder(t *testing.T) {
	d := newDevice(t)
	var streams [3]*Stream
	var got [3][]int
	for i := range streams {
		streams[i] = newStream(t, d)
	}
	for n := range 1000 {
		i := n % 3
		check(t, streams[i].Submit(do(func() error { got[i] = append(got[i], n); return nil })))
	}
	for i, s := range streams {
		check(t, s.Synchronize(testContext(t)))
		if len(got[i]) < 333 || !slices.IsSorted(got[i]) {
			t.Errorf("%s ran %v", s, got[i])
		}
	}
}

// Enqueued work begins and ends though nobody waits.
func TestStreamUnattended(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	for range 20 {
		var ran atomic.Bool
		check(t, s.Submit(do(func() error { ran.Store(true); return nil })))
		eventually(t, "run", ran.Load)
	}
	e := newEvent(t, d)
	g := newGate(d, "a")
	check(t, s.Submit(g))
	check(t, s.Record(e))
	eventually(t, "start", func() bool { return g.started.Load() == 1 })
	if done, err := s.Query(); done || err != nil {
		t.Errorf("Query: %v, %v", done, err)
	}
	if done, err := e.Query(); done || err != nil {
		t.Errorf("event Query: %v, %v", done, err)
	}
	g.let()
	eventually(t, "end", func() bool { return must(s.Query()) })
	if !must(e.Query()) {
		t.Error("the stream is done, the event is not")
	}
}

// The device's goroutine comes to an end of its looking, and comes back.
func TestBackgroundParks(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	parked := &d.plat.(*hostDevice).driver.background.parked
	for range 5 {
		var ran atomic.Bool
		check(t, s.Submit(do(func() error { ran.Store(true); return nil })))
		eventually(t, "run", ran.Load)
		eventually(t, "park", parked.Load)
	}
}

func TestStreamFailureIsSticky(t *testing.T) {
	d := newDevice(t)
	s, other := newStream(t, d), newStream(t, d)
	bad := errors.New("rank 2 died")
	g := newGate(d, "bad")
	g.fail = bad
	before, behind, late := newGate(d, "before"), newGate(d, "behind"), newGate(d, "late")
	before.open.Store(true)
	e1, e2 := newEvent(t, d), newEvent(t, d)
	check(t, s.Submit(before))
	check(t, s.Record(e1))
	check(t, s.Submit(g))
	check(t, s.Submit(behind))
	check(t, s.Record(e2))
	check(t, other.Wait(e1)) // before the failure: fine
	g.let()
	wantError(t, s.Synchronize(testContext(t)), bad, s.String())
	wantError(t, s.Synchronize(testContext(t)), bad)
	wantError(t, s.Submit(late), bad)
	wantError(t, behind.cancelCause(), bad)
	_, err := s.Query()
	wantError(t, err, bad)
	if g.canceled.Load() != nil || late.canceled.Load() != nil || before.canceled.Load() != nil || behind.started.Load() != 0 {
		t.Error("a task that failed, ended or was not accepted was cancelled, or a cancelled one was run")
	}
	if d.Err() != nil {
		t.Errorf("the device failed: %v", d.Err())
	}
	check(t, other.Synchronize(testContext(t)))
	check(t, e1.Synchronize(testContext(t)))
	wantError(t, e2.Synchronize(testContext(t)), bad)
	check(t, other.Wait(e2))
	wantError(t, other.Synchronize(testContext(t)), bad, "failed before it")
}

func TestSynchronizeContext(t *testing.T) {
	d := newDevice(t)
	s, other := newStream(t, d), newStream(t, d)
	g := newGate(d, "seven")
	check(t, s.Submit(g))
	late := errors.New("too late")
	const waiters = 4 // one of them drives, the others park
	var ctxs [waiters]context.Context
	var cancels [waiters]context.CancelCauseFunc
	errs := make(chan error, waiters)
	for i := range waiters {
		ctxs[i], cancels[i] = context.WithCancelCause(t.Context())
		go func() { errs <- s.Synchronize(ctxs[i]) }()
	}
	eventually(t, "start", func() bool { return g.started.Load() == 1 })
	eventually(t, "sleep", func() bool { return d.plat.(*hostDevice).driver.nparked.Load() == waiters-1 })
	for i := range waiters {
		cancels[i](late)
		select {
		case err := <-errs:
			wantError(t, err, late, s.String(), "gate seven")
		case <-time.After(hang):
			t.Fatal("a cancelled context does not wake who waits")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	wantError(t, s.Synchronize(ctx), context.DeadlineExceeded, "gate seven")
	// An ended context does not matter to what is done.
	check(t, other.Synchronize(ctx))
	// The work is still there.
	g.let()
	check(t, s.Synchronize(testContext(t)))
}

func TestStreamClose(t *testing.T) {
	d := newDevice(t)
	s := must(d.NewStream())
	g := newGate(d, "blocker")
	check(t, s.Submit(g))
	check(t, s.Submit(newGate(d, "second")))
	eventually(t, "start", func() bool { return g.started.Load() == 1 })
	wantText(t, s.Close(), "gate blocker", "2 operations are not done")
	g.fail = errors.New("bad")
	g.let()
	wantError(t, s.Synchronize(testContext(t)), g.fail)
	check(t, s.Close()) // a failed stream closes
	wantError(t, s.Close(), ErrClosed)
	wantError(t, s.Submit(g), ErrClosed)
	wantError(t, s.Record(newEvent(t, d)), ErrClosed)
	wantError(t, s.BeginCapture(CaptureRelaxed), ErrClosed)

	// What is only a matter of carrying on is no reason to complain.
	s = must(d.NewStream())
	b := malloc[byte](t, d, 4*piece) // several Steps, and little beside the time that Close gives them, on a busy machine too
	check(t, Fill(b.All(), 1, s))
	check(t, s.Close())
	if h := b.All().Host(); h[len(h)-1] != 1 {
		t.Error("closed before the work was done")
	}
}

func TestEvents(t *testing.T) {
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	check(t, b.Wait(e)) // never recorded: nothing to wait for
	check(t, e.Synchronize(testContext(t)))

	ga, gb := newGate(d, "a"), newGate(d, "b")
	check(t, a.Submit(ga))
	check(t, a.Record(e))
	check(t, b.Wait(e))
	check(t, b.Submit(gb))
	// A second record is another point: who waited before waits for the first.
	ga2 := newGate(d, "a2")
	check(t, a.Submit(ga2))
	check(t, a.Record(e))
	gb.open.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	wantError(t, b.Synchronize(ctx), context.DeadlineExceeded, "wait for an event of "+a.String())
	ga.let()
	check(t, b.Synchronize(testContext(t)))
	if done, err := e.Query(); done || err != nil {
		t.Errorf("Query of the second record: %v, %v", done, err)
	}
	wantError(t, e.Synchronize(ctx), context.DeadlineExceeded, "gate a2")
	ga2.let()
	check(t, e.Synchronize(testContext(t)))

	other := newDevice(t)
	wantText(t, newStream(t, other).Record(e), "another device")
	wantText(t, newStream(t, other).Wait(e), "another device")
	closed := must(d.NewEvent())
	check(t, closed.Close())
	wantError(t, closed.Close(), ErrClosed)
	wantError(t, a.Record(closed), ErrClosed)
	wantError(t, a.Wait(closed), ErrClosed)
	_, err := closed.Query()
	wantError(t, err, ErrClosed)
}

func TestHostFunc(t *testing.T) {
	d := newDevice(t)
	s, other := newStream(t, d), newStream(t, d)
	var order []string
	release := make(chan struct{})
	check(t, s.Submit(do(func() error { order = append(order, "before"); return nil })))
	check(t, s.HostFunc(func() { <-release; order = append(order, "function") }))
	check(t, s.Submit(do(func() error { order = append(order, "after"); return nil })))
	// A slow function stops nothing else.
	var ran atomic.Bool
	check(t, other.HostFunc(func() { ran.Store(true) }))
	check(t, other.Synchronize(testContext(t)))
	if !ran.Load() {
		t.Error("not run")
	}
	close(release)
	check(t, s.Synchronize(testContext(t)))
	if diff := cmp.Diff(order, []string{"before", "function", "after"}); diff != "" {
		t.Error(diff)
	}
	wantText(t, s.HostFunc(nil), "nil")

	check(t, s.HostFunc(func() { panic("out of paper") }))
	err := s.Synchronize(testContext(t))
	wantText(t, err, "host function: panic at stream_test.go:", "out of paper")
	wantText(t, d.Err(), "out of paper")
	wantText(t, fmt.Errorf("%+v", err), "TestHostFunc")
}

func TestTaskPanic(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	check(t, s.Submit(do(func() error { panic(errors.New("a bug")) })))
	behind := newGate(d, "behind")
	check(t, s.Submit(behind))
	wantText(t, s.Synchronize(testContext(t)), "cuda.do", "panic at stream_test.go:", "a bug")
	wantText(t, behind.cancelCause(), "a bug")
}

// panicky panics when it is told that it will not be run.
type panicky struct{ gate }

func (p *panicky) Cancel(error) { panic("in Cancel") }

func TestCancelPanic(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	g, behind := newGate(d, "bad"), newGate(d, "behind")
	g.fail = errors.New("the cause")
	check(t, s.Submit(g))
	check(t, s.Submit(&panicky{}))
	check(t, s.Submit(behind))
	g.let()
	wantError(t, s.Synchronize(testContext(t)), g.fail)
	wantError(t, behind.cancelCause(), g.fail)
	wantText(t, d.Err(), "in Cancel")
}

// A launch leaves its graph also where a task panics when it is told to: the graph is released.
func TestCancelPanicInGraph(t *testing.T) {
	lockThread(t)
	d, err := Open("host")
	check(t, err)
	s := must(d.NewStream())
	var task panicky
	g := capture(t, s, func() { check(t, s.Submit(&task)) })
	released := make(chan struct{})
	check(t, g.OnRelease(func() { close(released) }))
	x := must(g.Instantiate())
	check(t, x.Launch(s))
	eventually(t, "start", func() bool { return task.started.Load() > 0 }) // the device's own goroutine drives
	d.Fail(errors.New("the cause"))
	wantText(t, s.Synchronize(testContext(t)), "the cause")
	check(t, s.Close())
	check(t, x.Destroy())
	check(t, g.Destroy())
	check(t, d.Close())
	select {
	case <-released:
	default:
		t.Error("the graph was not released")
	}
}

func TestCopies(t *testing.T) {
	d := openTest(t)
	s := newStream(t, d)
	for _, n := range []int{0, 1, 7, 1000, piece / 4, piece/4 + 1, 3*piece/4 + 5} {
		a, b := malloc[float32](t, d, n), malloc[float32](t, d, n)
		src, dst := make([]float32, n), make([]float32, n)
		for i := range src {
			src[i] = float32(i) + 0.5
		}
		check(t, CopyToDevice(a.All(), src, s))
		check(t, Copy(b.All(), a.All(), s))
		check(t, CopyToHost(dst, b.All(), s))
		check(t, s.Synchronize(testContext(t)))
		if !slices.Equal(dst, src) {
			t.Errorf("%d elements: %s", n, cmp.Diff(dst, src))
		}
	}
	a := malloc[float32](t, d, 4)
	wantText(t, Copy(a.Slice(0, 3), a.Slice(0, 2), s), "copy", "2 elements into 3")
	wantText(t, CopyToHost(make([]float32, 5), a.All(), s), "4 elements into 5")
	wantText(t, CopyToDevice(a.All(), nil, s), "0 elements into 4")
	wantText(t, s.Memset(Range{Mem: a.Memory(), Off: 10, Len: 10}, 0), "outside")
	wantText(t, Fill(a.All(), 1, newStream(t, newDevice(t))), "another device")
	var none Slice[float32]
	check(t, Copy(none, none, s))
	check(t, CopyToDevice(none, nil, s))
	check(t, Fill(none, 1, s))
	check(t, s.Memset(Range{}, 1))
	check(t, s.Synchronize(testContext(t)))
}

func TestCopyOverlap(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	const n = 3 * piece
	for _, shift := range []int{1, piece / 2, piece, 2*piece + 1} {
		for _, up := range []bool{true, false} {
			b := malloc[uint8](t, d, n+shift)
			x := b.All().Host()
			for i := range x {
				x[i] = uint8(i * i >> 3)
			}
			want := slices.Clone(x)
			from, to := b.Slice(0, n), b.Slice(shift, n+shift)
			if up {
				copy(want[shift:], want[:n])
			} else {
				from, to = to, from
				copy(want[:n], want[shift:])
			}
			check(t, Copy(to, from, s))
			check(t, s.Synchronize(testContext(t)))
			if !slices.Equal(x, want) {
				t.Errorf("shift %d, up %v: wrong", shift, up)
			}
		}
	}
}

func fillCase[T Element](t *testing.T, d *Device, s *Stream, v T) {
	for _, n := range []int{1, 3, 1000, piece + 3} {
		b := malloc[T](t, d, n+2)
		check(t, Fill(b.Slice(1, n+1), v, s))
		var zero T
		for i, got := range fetch(t, s, b.All()) {
			want := v
			if i == 0 || i == n+1 {
				want = zero
			}
			if got != want {
				t.Fatalf("%T, %d elements: element %d is %v, want %v", v, n, i, got, want)
			}
		}
	}
}

func TestFill(t *testing.T) {
	d := openTest(t)
	s := newStream(t, d)
	fillCase(t, d, s, int8(-3))
	fillCase(t, d, s, Float16FromFloat32(1.25))
	fillCase(t, d, s, float32(3.14))
	fillCase(t, d, s, 2.718281828)
	fillCase(t, d, s, int64(-7))
	b := malloc[uint8](t, d, 5)
	check(t, s.Memset(Range{Mem: b.Memory(), Off: 1, Len: 3}, 9))
	if diff := cmp.Diff(fetch(t, s, b.All()), []uint8{0, 9, 9, 9, 0}); diff != "" {
		t.Error(diff)
	}
}

// Many goroutines enqueue on and wait for a few streams of one device.
func TestStreamsShared(t *testing.T) {
	d := newDevice(t)
	var streams [4]*Stream
	var counts [4]int // only its stream's tasks touch it
	for i := range streams {
		streams[i] = newStream(t, d)
	}
	ctx := testContext(t)
	var wg sync.WaitGroup
	const goroutines, rounds = 8, 200
	for g := range goroutines {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(g)))
			for range rounds {
				i := rng.IntN(4)
				for range 4 {
					if err := streams[i].Submit(do(func() error { counts[i]++; return nil })); err != nil {
						t.Error(err)
					}
				}
				if err := streams[i].Synchronize(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, s := range streams {
		check(t, s.Synchronize(ctx))
	}
	if n := counts[0] + counts[1] + counts[2] + counts[3]; n != goroutines*rounds*4 {
		t.Errorf("%d tasks ran, want %d", n, goroutines*rounds*4)
	}
}

func TestEnqueueAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	d := newDevice(t)
	s, other := newStream(t, d), newStream(t, d)
	b := malloc[float32](t, d, 1000)
	host := make([]float32, 1000)
	e := newEvent(t, d)
	k := must(NewKernel(d, KernelSpec[Slice[float32]]{Name: "nothing", Host: func(Grid, int, int, Slice[float32]) {}}))
	g := newGate(d, "open")
	g.open.Store(true)
	ctx := testContext(t)
	lockThread(t)
	check(t, s.BeginCapture(CaptureThreadLocal))
	check(t, Fill(b.All(), 1, s))
	check(t, k.Launch(s, Grid{N: 1000}, b.All()))
	check(t, s.Submit(g))
	graph := must(s.EndCapture())
	exec := must(graph.Instantiate())
	defer func() { check(t, errors.Join(exec.Destroy(), graph.Destroy())) }()
	for name, fn := range map[string]func() error{
		"submit": func() error { return s.Submit(g) },
		"copies": func() error {
			return errors.Join(CopyToDevice(b.All(), host, s), Copy(b.Slice(0, 500), b.Slice(500, 1000), s), CopyToHost(host, b.All(), s))
		},
		"fill":   func() error { return Fill(b.All(), 2, s) },
		"events": func() error { return errors.Join(other.Submit(g), other.Record(e), s.Wait(e)) },
		"kernel": func() error { return k.Launch(s, Grid{N: 1000}, b.All()) },
		"graph":  func() error { return exec.Launch(s) },
	} {
		n := testing.AllocsPerRun(1000, func() {
			for range 3 {
				if err := fn(); err != nil {
					t.Error(err)
				}
			}
			if err := s.Synchronize(ctx); err != nil {
				t.Error(err)
			}
		})
		if n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
