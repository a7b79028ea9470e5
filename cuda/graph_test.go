package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// capture records what fn enqueues.
func capture(t testing.TB, s *Stream, fn func()) *Graph {
	t.Helper()
	check(t, s.BeginCapture(CaptureThreadLocal))
	fn()
	g, err := s.EndCapture()
	check(t, err)
	return g
}

// destroyLater is for graphs whose end is not what is tested.
func destroyLater(t testing.TB, g *Graph, execs ...*GraphExec) {
	t.Cleanup(func() {
		for _, x := range execs {
			check(t, x.Destroy())
		}
		check(t, g.Destroy())
	})
}

func TestGraphOperations(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	const n = 300_000 // several pieces
	a, b := malloc[float32](t, d, n), malloc[float32](t, d, n)
	in, out := make([]float32, n), make([]float32, n)
	k := must(NewKernel(d, axpy))
	var called atomic.Int32
	var none Slice[float32]
	g := capture(t, s, func() {
		check(t, CopyToDevice(a.All(), in, s))
		check(t, Fill(b.All(), 1, s))
		check(t, s.Memset(b.Slice(0, 1).Range(), 0))
		check(t, k.Launch(s, Grid{N: n}, axpyArgs{A: 3, X: a.All(), Y: b.All()}))
		check(t, k.Launch(s, Grid{}, axpyArgs{}))
		check(t, s.HostFunc(func() { called.Add(1) }))
		check(t, Copy(none, none, s))
		check(t, CopyToHost(out, b.All(), s))
	})
	if g.NumNodes() != 8 {
		t.Errorf("%d nodes", g.NumNodes())
	}
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	if called.Load() != 0 || a.All().Host()[0] != 0 {
		t.Error("the capture carried something out")
	}
	for run := range 3 {
		for i := range in {
			in[i] = float32(run + i%7)
		}
		check(t, x.Launch(s))
		check(t, s.Synchronize(testContext(t)))
		for i, got := range out {
			want := 3*in[i] + 1
			if i == 0 {
				want--
			}
			if got != want {
				t.Fatalf("run %d: element %d is %v, want %v", run, i, got, want)
			}
		}
		if got := called.Load(); int(got) != run+1 {
			t.Errorf("the host function was called %d times in %d runs", got, run+1)
		}
	}
}

func TestGraphEmpty(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	e := newEvent(t, d)
	g := capture(t, s, func() { check(t, s.Record(e)); check(t, s.Wait(e)) })
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	if g.NumNodes() != 0 || !strings.HasSuffix(g.String(), "(0 nodes)") {
		t.Errorf("got %s", g)
	}
	for range 3 {
		check(t, x.Launch(s))
	}
	check(t, s.Synchronize(testContext(t)))
}

// step is a node of TestGraphOrder: it needs a random number of steps and notes when it started and ended.
type step struct {
	n, steps, left int
	log            *[]string
}

func (n *step) Start() { n.left = n.steps; *n.log = append(*n.log, fmt.Sprint("start ", n.n)) }
func (n *step) Step() (bool, error) {
	if n.left--; n.left >= 0 {
		return false, nil
	}
	*n.log = append(*n.log, fmt.Sprint("end ", n.n))
	return true, nil
}

// TestGraphOrder replays random graphs: each node once, after what it depends on, in the same order each time.
func TestGraphOrder(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var streams [4]*Stream
		for i := range streams {
			streams[i] = must(d.NewStream())
		}
		e := must(d.NewEvent())
		var log []string
		var deps [][]int
		ends := [4]map[int]bool{{}, {}, {}, {}}
		var joined [4]bool
		joined[0] = true
		sync := func(from, to int) { // order what comes on one stream after what is on the other
			check(t, streams[from].Record(e))
			check(t, streams[to].Wait(e))
			joined[to] = true
			for n := range ends[from] {
				ends[to][n] = true
			}
		}
		g := capture(t, streams[0], func() {
			for range 40 {
				i, j := rng.IntN(4), rng.IntN(4)
				switch {
				case !joined[i]:
				case rng.IntN(3) == 0:
					sync(i, j)
				default:
					n := len(deps)
					check(t, streams[i].Submit(&step{n: n, steps: rng.IntN(3), log: &log}))
					var on []int
					for d := range ends[i] {
						on = append(on, d)
					}
					deps = append(deps, on)
					ends[i] = map[int]bool{n: true}
				}
			}
			for i := 1; i < 4; i++ {
				if joined[i] {
					sync(i, 0)
				}
			}
		})
		if g.NumNodes() != len(deps) {
			t.Fatalf("seed %d: %d nodes, want %d", seed, g.NumNodes(), len(deps))
		}
		x := must(g.Instantiate())
		var first []string
		for run := range 3 {
			log = nil
			check(t, x.Launch(streams[run]))
			check(t, streams[run].Synchronize(testContext(t)))
			at := map[string]int{}
			for i, l := range log {
				at[l] = i + 1
			}
			if len(log) != 2*len(deps) || len(at) != len(log) {
				t.Fatalf("seed %d: %d entries for %d nodes: %q", seed, len(log), len(deps), log)
			}
			for n, on := range deps {
				for _, d := range on {
					if at[fmt.Sprint("end ", d)] > at[fmt.Sprint("start ", n)] {
						t.Fatalf("seed %d: node %d began before node %d ended: %q", seed, n, d, log)
					}
				}
			}
			if run == 0 {
				first = log
			} else if diff := cmp.Diff(log, first); diff != "" {
				t.Fatalf("seed %d: another order\n%s", seed, diff)
			}
		}
		check(t, errors.Join(x.Destroy(), g.Destroy(), e.Close()))
		for _, s := range streams {
			check(t, s.Close())
		}
	}
}

// Branches of a graph run beside each other: one that waits does not hold up the other.
func TestGraphBranches(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	ga, gb := newGate(d, "a"), newGate(d, "b")
	g := capture(t, a, func() {
		check(t, a.Record(fork))
		check(t, b.Wait(fork))
		check(t, a.Submit(ga))
		check(t, b.Submit(gb))
		check(t, b.Submit(do(func() error { ga.let(); return nil })))
		check(t, b.Record(join))
		check(t, a.Wait(join))
	})
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	check(t, x.Launch(a))
	eventually(t, "start of both", func() bool { return ga.started.Load() == 1 && gb.started.Load() == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	wantError(t, a.Synchronize(ctx), context.DeadlineExceeded, "a graph of 3 nodes, node 0: gate a")
	gb.let()
	check(t, a.Synchronize(testContext(t)))
}

// Launches of a template's executables do not overlap, on whatever streams, and run in the order of the calls.
func TestGraphLaunchesDoNotOverlap(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	var running, runs int
	g := capture(t, s, func() {
		check(t, s.Submit(do(func() error {
			if running++; running > 1 {
				return errors.New("two launches at once")
			}
			return nil
		})))
		check(t, s.HostFunc(func() { time.Sleep(100 * time.Microsecond) }))
		check(t, s.Submit(do(func() error { running--; runs++; return nil })))
	})
	execs := []*GraphExec{must(g.Instantiate()), must(g.Instantiate())}
	destroyLater(t, g, execs...)
	var wg sync.WaitGroup
	ctx := testContext(t)
	for i := range 6 {
		own := newStream(t, d)
		wg.Go(func() {
			for range 20 {
				if err := execs[i%2].Launch(own); err != nil {
					t.Error(err)
				}
			}
			if err := own.Synchronize(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if runs != 120 {
		t.Errorf("%d runs, want 120", runs)
	}
}

// The launch that was called first runs first, although the other's stream is free earlier.
func TestGraphLaunchOrder(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	runs := 0
	g := capture(t, a, func() { check(t, a.Submit(do(func() error { runs++; return nil }))) })
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	hold := newGate(d, "hold")
	check(t, a.Submit(hold))
	check(t, x.Launch(a))
	check(t, x.Launch(b))
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	wantError(t, b.Synchronize(ctx), context.DeadlineExceeded, "waiting for its previous launch")
	hold.let()
	check(t, b.Synchronize(testContext(t)))
	check(t, a.Synchronize(testContext(t)))
	if runs != 2 {
		t.Errorf("%d runs", runs)
	}
}

func TestGraphFailure(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	bad, beside, after := newGate(d, "bad"), newGate(d, "beside"), newGate(d, "after")
	bad.fail = errors.New("rank 3 died")
	g := capture(t, a, func() {
		check(t, a.Record(fork))
		check(t, b.Wait(fork))
		check(t, a.Submit(bad))
		check(t, b.Submit(beside))
		check(t, b.Record(join))
		check(t, a.Wait(join))
		check(t, a.Submit(after))
	})
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	// Two more launches wait, one on the stream that will fail, one elsewhere.
	check(t, x.Launch(a))
	check(t, x.Launch(a))
	check(t, x.Launch(b))
	eventually(t, "start", func() bool { return bad.started.Load() == 1 })
	beside.open.Store(false)
	bad.let()
	wantError(t, a.Synchronize(testContext(t)), bad.fail)
	wantError(t, beside.cancelCause(), bad.fail)
	if bad.canceled.Load() != nil || after.canceled.Load() != nil || after.started.Load() != 0 {
		t.Error("a node was told that had failed or not begun")
	}
	// The graph itself is fine: the third launch runs, and fails by itself.
	wantError(t, b.Synchronize(testContext(t)), bad.fail)
	if n := bad.started.Load(); n != 2 {
		t.Errorf("the node was started %d times, want 2", n)
	}
	c := newStream(t, d)
	bad.fail = nil
	beside.open.Store(true)
	after.open.Store(true)
	check(t, x.Launch(c))
	check(t, c.Synchronize(testContext(t)))
}

func TestGraphPanic(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	g := capture(t, s, func() { check(t, s.Submit(do(func() error { panic("in a node") }))) })
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	check(t, x.Launch(s))
	wantText(t, s.Synchronize(testContext(t)), "a graph of 1 nodes", "node 0", "in a node")
}

func TestGraphUseAfterFree(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector memory is on the heap, and stays")
	}
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	b := must(Malloc[float32](d, 1000))
	g := capture(t, s, func() { check(t, Fill(b.All(), 1, s)) })
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	check(t, x.Launch(s))
	check(t, s.Synchronize(testContext(t)))
	check(t, b.Free())
	check(t, x.Launch(s))
	wantError(t, s.Synchronize(testContext(t)), ErrIllegalAddress, b.Memory().String(), "freed")
}

// TestGraphRelease destroys template, executables and lets launches end in every order, and checks after each step that
// the callbacks that should have run have, once and in order.
func TestGraphRelease(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	// "early" was attached before both executables, "middle" between them, "late" after.
	covers := map[string][]string{
		"early":  {"template", "first", "second", "launch"},
		"middle": {"template", "second"},
		"late":   {"template"},
	}
	names := []string{"early", "middle", "late"}
	for _, order := range permutations([]string{"template", "first", "second", "launch"}) {
		t.Run(strings.Join(order, " "), func(t *testing.T) {
			lockThread(t)
			hold := newGate(d, "hold")
			var mu sync.Mutex
			var released []string
			g := capture(t, s, func() { check(t, s.Submit(hold)) })
			attach := func(name string) {
				check(t, g.OnRelease(func() {
					// With no lock held: a callback may use the device.
					g.NumNodes()
					if _, err := s.Query(); err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					released = append(released, name)
				}))
			}
			attach("early")
			first := must(g.Instantiate())
			attach("middle")
			second := must(g.Instantiate())
			attach("late")
			check(t, first.Launch(s)) // "launch" holds what the first executable holds
			left := map[string]bool{"template": true, "first": true, "second": true, "launch": true}
			for _, what := range order {
				switch what {
				case "template":
					check(t, g.Destroy())
					wantError(t, g.Destroy(), ErrClosed)
					wantError(t, g.OnRelease(func() {}), ErrClosed)
					_, err := g.Instantiate()
					wantError(t, err, ErrClosed)
				case "first":
					check(t, first.Destroy())
					wantError(t, first.Destroy(), ErrClosed)
					wantError(t, first.Launch(s), ErrClosed)
				case "second":
					check(t, second.Destroy())
				case "launch":
					hold.let()
					check(t, s.Synchronize(testContext(t)))
				}
				delete(left, what)
				var want []string
				for _, name := range names {
					if !slices.ContainsFunc(covers[name], func(holder string) bool { return left[holder] }) {
						want = append(want, name)
					}
				}
				var got []string
				enough := func() bool {
					mu.Lock()
					defer mu.Unlock()
					got = slices.Clone(released)
					return len(got) >= len(want)
				}
				if what == "launch" {
					eventually(t, "release after the launch", enough)
				} else {
					enough() // Destroy calls them itself
				}
				slices.SortFunc(got, func(a, b string) int { return slices.Index(names, a) - slices.Index(names, b) })
				if diff := cmp.Diff(got, want); diff != "" {
					t.Fatalf("after %s: got - want +\n%s", what, diff)
				}
			}
			if len(released) != 3 {
				t.Errorf("released %q", released)
			}
		})
	}
}

func permutations(items []string) (all [][]string) {
	if len(items) == 0 {
		return [][]string{nil}
	}
	for i := range items {
		rest := slices.Delete(slices.Clone(items), i, i+1)
		for _, p := range permutations(rest) {
			all = append(all, append([]string{items[i]}, p...))
		}
	}
	return all
}

func TestGraphReleaseOrder(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	g := capture(t, s, func() {})
	var order []int
	for i := range 10 {
		check(t, g.OnRelease(func() { order = append(order, i) }))
	}
	wantText(t, g.OnRelease(nil), "nil")
	x := must(g.Instantiate())
	check(t, g.Destroy())
	if order != nil {
		t.Errorf("released %v under the executable", order)
	}
	check(t, x.Destroy())
	if diff := cmp.Diff(order, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}); diff != "" {
		t.Error(diff)
	}
}

// A graph whose stream and device failed still releases.
func TestGraphReleaseAfterFailure(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	stuck := newGate(d, "stuck")
	g := capture(t, s, func() { check(t, s.Submit(stuck)) })
	released := make(chan struct{})
	check(t, g.OnRelease(func() { close(released) }))
	x := must(g.Instantiate())
	check(t, x.Launch(s))
	check(t, x.Launch(s))
	eventually(t, "start", func() bool { return stuck.started.Load() == 1 })
	check(t, errors.Join(x.Destroy(), g.Destroy()))
	select {
	case <-released:
		t.Error("released under its launch")
	default:
	}
	d.Fail(errors.New("broken"))
	select {
	case <-released:
	case <-time.After(hang):
		t.Fatal("not released")
	}
	wantText(t, stuck.cancelCause(), "broken")
}

func TestGraphOfAnotherDevice(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	g := capture(t, s, func() {})
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	wantText(t, x.Launch(newStream(t, newDevice(t))), "another device")
}

// A long graph of tasks that are ready lets the other streams go on between.
func TestGraphGivesWay(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	var inGraph, seen atomic.Int32
	g := capture(t, a, func() {
		for range 10_000 {
			check(t, a.Submit(do(func() error { inGraph.Add(1); return nil })))
		}
	})
	x := must(g.Instantiate())
	destroyLater(t, g, x)
	hold := newGate(d, "hold")
	check(t, a.Submit(hold))
	check(t, x.Launch(a))
	check(t, b.Submit(&sees{cond: func() bool {
		n := inGraph.Load()
		if n > 0 && n < 10_000 {
			seen.Store(n)
		}
		return n == 10_000
	}}))
	hold.let()
	check(t, a.Synchronize(testContext(t)))
	check(t, b.Synchronize(testContext(t)))
	if seen.Load() == 0 {
		t.Error("the other stream was not stepped while the graph ran")
	}
}

// sees is a task that ends when a condition is true.
type sees struct{ cond func() bool }

func (s *sees) Start()              {}
func (s *sees) Step() (bool, error) { return s.cond(), nil }

func BenchmarkGraphReplay20(b *testing.B) {
	lockThread(b)
	d := newDevice(b)
	s := newStream(b, d)
	g := capture(b, s, func() {
		for i := range 20 {
			check(b, s.Submit(nop(i)))
		}
	})
	x := must(g.Instantiate())
	destroyLater(b, g, x)
	b.ReportAllocs()
	for b.Loop() {
		x.Launch(s)
		s.Synchronize(b.Context())
	}
}
