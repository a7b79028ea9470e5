package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// onOtherThread runs fn on a thread of its own.
func onOtherThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		fn()
	}()
	<-done
}

// nop is a task that does nothing; the number tells tasks apart.
type nop int

func (nop) Start()              {}
func (nop) Step() (bool, error) { return true, nil }
func (n nop) String() string    { return fmt.Sprintf("nop %d", int(n)) }

// TestCaptureForbidden makes each forbidden call in each mode, on the capturing thread and on another.
func TestCaptureForbidden(t *testing.T) {
	type env struct {
		d                      *Device
		s, idle                *Stream
		captured, outside, new *Event
		mem                    *Memory
		exec                   *GraphExec
	}
	const (
		always  = "always"  // whatever the mode and thread
		byMode  = "by mode" // potentially unsafe
		allowed = "allowed"
	)
	ctx := context.Background()
	calls := []struct {
		name string
		when string
		call func(e *env) error
	}{
		{"synchronize the stream", always, func(e *env) error { return e.s.Synchronize(ctx) }},
		{"query the stream", always, func(e *env) error { _, err := e.s.Query(); return err }},
		{"close the stream", always, func(e *env) error { return e.s.Close() }},
		{"synchronize an event of the capture", always, func(e *env) error { return e.captured.Synchronize(ctx) }},
		{"query an event of the capture", always, func(e *env) error { _, err := e.captured.Query(); return err }},
		{"wait for an event from outside", always, func(e *env) error { return e.s.Wait(e.outside) }},
		{"launch a graph", always, func(e *env) error { return e.exec.Launch(e.s) }},
		{"allocate", byMode, func(e *env) error {
			m, err := e.d.Alloc(1, Private)
			if err == nil {
				check(t, m.Free())
			}
			return err
		}},
		{"free", byMode, func(e *env) error {
			err := e.mem.Free()
			if err == nil {
				e.mem = nil
			}
			return err
		}},
		{"query an event", byMode, func(e *env) error { _, err := e.outside.Query(); return err }},
		{"synchronize an event", byMode, func(e *env) error { return e.outside.Synchronize(ctx) }},
		{"synchronize another stream", allowed, func(e *env) error { return e.idle.Synchronize(ctx) }},
		{"query another stream", allowed, func(e *env) error { _, err := e.idle.Query(); return err }},
		{"record an event elsewhere", allowed, func(e *env) error { return e.idle.Record(e.new) }},
		{"wait for an event never recorded", allowed, func(e *env) error { return e.s.Wait(e.new) }},
		{"launch elsewhere", allowed, func(e *env) error { return e.exec.Launch(e.idle) }},
		{"make and close a stream", allowed, func(e *env) error {
			s, err := e.d.NewStream()
			if err != nil {
				return err
			}
			return s.Close()
		}},
	}
	for _, mode := range []CaptureMode{CaptureGlobal, CaptureThreadLocal, CaptureRelaxed} {
		for _, other := range []bool{false, true} {
			for _, c := range calls {
				where := "capturing thread"
				if other {
					where = "other thread"
				}
				t.Run(fmt.Sprintf("%s/%s/%s", mode, where, c.name), func(t *testing.T) {
					lockThread(t)
					d := newDevice(t)
					e := &env{d: d, s: newStream(t, d), idle: newStream(t, d), captured: newEvent(t, d), outside: newEvent(t, d), new: newEvent(t, d),
						mem: must(d.Alloc(1, Private))}
					check(t, e.idle.Record(e.outside))
					check(t, e.idle.BeginCapture(CaptureRelaxed))
					empty := must(e.idle.EndCapture())
					e.exec = must(empty.Instantiate())
					defer func() {
						check(t, errors.Join(e.exec.Destroy(), empty.Destroy()))
						if e.mem != nil {
							check(t, e.mem.Free())
						}
						check(t, e.idle.Synchronize(ctx))
					}()

					check(t, e.s.BeginCapture(mode))
					check(t, e.s.Submit(nop(1)))
					check(t, e.s.Record(e.captured))
					capture := e.s.Capture()
					var err error
					if other {
						onOtherThread(func() { err = c.call(e) })
					} else {
						err = c.call(e)
					}
					forbidden := c.when == always || c.when == byMode && (mode == CaptureGlobal || mode == CaptureThreadLocal && !other)
					want := CaptureActive
					if forbidden {
						want = CaptureInvalidated
						wantError(t, err, ErrCaptureUnsafe)
					} else {
						check(t, err)
					}
					if got := capture.State(); got != want {
						t.Errorf("state %s, want %s", got, want)
					}
					if forbidden {
						wantError(t, e.s.Submit(nop(2)), ErrCaptureInvalidated)
					}
					g, endErr := e.s.EndCapture()
					if capture.State() != CaptureNone || e.s.Capture() != nil {
						t.Error("the capture has not ended")
					}
					if forbidden {
						if g != nil {
							t.Error("a graph in spite of the error")
						}
						wantError(t, endErr, ErrCaptureInvalidated)
						wantText(t, endErr, err.Error()[len("cuda: "):][:10]) // the cause
					} else {
						check(t, endErr)
						check(t, g.Destroy())
					}
					check(t, e.s.Submit(nop(3)))
					check(t, e.s.Synchronize(ctx))
				})
			}
		}
	}
}

func TestCaptureForkJoin(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	check(t, a.BeginCapture(CaptureThreadLocal))
	check(t, a.Submit(nop(0)))
	check(t, a.Record(fork))
	check(t, b.Wait(fork))
	if a.Capture() == nil || a.Capture() != b.Capture() {
		t.Fatal("the stream did not join")
	}
	check(t, a.Submit(nop(1)))
	check(t, b.Submit(nop(2)))
	check(t, b.Record(join))
	check(t, a.Wait(join))
	check(t, a.Submit(nop(3)))
	_, err := b.EndCapture()
	wantError(t, err, ErrCaptureUnsafe, "only joined")
	_, err = a.EndCapture()
	wantError(t, err, ErrCaptureInvalidated, "only joined")

	// Once more without the mistake.
	check(t, a.BeginCapture(CaptureThreadLocal))
	check(t, a.Submit(nop(0)))
	check(t, a.Record(fork))
	check(t, b.Wait(fork))
	check(t, a.Submit(nop(1)))
	check(t, b.Submit(nop(2)))
	check(t, b.Record(join))
	check(t, a.Wait(join))
	check(t, a.Submit(nop(3)))
	g := must(a.EndCapture())
	if b.Capture() != nil {
		t.Error("the forked stream still captures")
	}
	if diff := cmp.Diff(edgesOf(g), [][2]int{{0, 1}, {0, 2}, {1, 3}, {2, 3}}); diff != "" {
		t.Error(diff)
	}
	// The events belong to a capture that is over.
	_, err = fork.Query()
	wantError(t, err, ErrCaptureUnsafe)
	wantError(t, b.Wait(fork), ErrCaptureUnsafe)
	check(t, a.Record(fork))
	check(t, fork.Synchronize(testContext(t)))
	check(t, g.Destroy())
}

// edgesOf lists the edges of a graph in order.
func edgesOf(g *Graph) (edges [][2]int) {
	for i, n := range g.raw.(*hostGraph).nodes {
		for _, next := range n.next {
			edges = append(edges, [2]int{i, int(next)})
		}
	}
	slices.SortFunc(edges, func(a, b [2]int) int { return slices.Compare(a[:], b[:]) })
	return edges
}

func TestCaptureUnjoined(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	fork := newEvent(t, d)
	for _, work := range []bool{false, true} {
		check(t, a.BeginCapture(CaptureThreadLocal))
		check(t, a.Record(fork))
		check(t, b.Wait(fork))
		if work {
			check(t, b.Submit(nop(7)))
		}
		g, err := a.EndCapture()
		if work {
			wantError(t, err, ErrCaptureUnjoined, b.String(), "nop 7")
		} else {
			check(t, err) // a fork without work needs no join
			check(t, g.Destroy())
		}
		check(t, b.Submit(nop(0)))
		check(t, b.Synchronize(testContext(t)))
	}
}

func TestCaptureMerge(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	check(t, a.BeginCapture(CaptureRelaxed))
	check(t, b.BeginCapture(CaptureRelaxed))
	check(t, a.Record(e))
	wantError(t, b.Wait(e), ErrCaptureUnsafe, a.Capture().raw.(*hostCapture).String())
	for _, s := range []*Stream{a, b} {
		_, err := s.EndCapture()
		wantError(t, err, ErrCaptureInvalidated)
	}
}

func TestCaptureThreads(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	for _, mode := range []CaptureMode{CaptureGlobal, CaptureThreadLocal, CaptureRelaxed} {
		check(t, s.BeginCapture(mode))
		check(t, s.Submit(nop(0)))
		var g *Graph
		var err error
		onOtherThread(func() {
			check(t, s.Submit(nop(1))) // anybody may enqueue
			g, err = s.EndCapture()
		})
		if mode == CaptureRelaxed {
			check(t, err)
			check(t, g.Destroy())
		} else {
			wantError(t, err, ErrCaptureUnsafe, "thread")
		}
		check(t, s.Submit(nop(2)))
		check(t, s.Synchronize(testContext(t)))
	}
}

func TestCaptureStates(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	_, err := s.EndCapture()
	wantText(t, err, "not capturing")
	wantText(t, s.BeginCapture(3), "mode(3)")
	check(t, s.BeginCapture(CaptureThreadLocal))
	wantText(t, s.BeginCapture(CaptureThreadLocal), "capturing already")
	c := s.Capture()
	if c.State() != CaptureActive || c.ID() == 0 {
		t.Errorf("capture %d is %s", c.ID(), c.State())
	}
	mine := errors.New("rank 1 has called something else")
	c.Invalidate(mine)
	c.Invalidate(errors.New("a consequence"))
	_, err = s.EndCapture()
	wantError(t, err, mine)
	wantError(t, err, ErrCaptureInvalidated)
	c.Invalidate(mine) // too late: nothing
	if c.State() != CaptureNone {
		t.Errorf("an ended capture is %s", c.State())
	}
	c.After(s, 1)
	c.Mark(s, 1)

	// A failed device and a failed stream still end their captures.
	check(t, s.BeginCapture(CaptureThreadLocal))
	d.Fail(errors.New("broken"))
	wantText(t, s.Submit(nop(0)), "broken")
	_, err = s.EndCapture()
	wantText(t, err, "broken")
	if s.Capture() != nil {
		t.Error("the capture has not ended")
	}
	for i, want := range []string{"none", "active", "invalidated", "state(3)"} {
		if got := CaptureState(i).String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Work that was enqueued before the capture is no part of it, and goes on.
func TestCaptureBehindWork(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	s := newStream(t, d)
	g := newGate(d, "before")
	check(t, s.Submit(g))
	check(t, s.BeginCapture(CaptureThreadLocal))
	check(t, s.Submit(nop(0)))
	g.let()
	eventually(t, "end", func() bool { return g.ended.Load() == 1 })
	graph := must(s.EndCapture())
	if graph.NumNodes() != 1 {
		t.Errorf("%d nodes", graph.NumNodes())
	}
	check(t, graph.Destroy())
}

// After and Mark order nodes of streams that have nothing else in common.
func TestCaptureKeys(t *testing.T) {
	lockThread(t)
	d := newDevice(t)
	a, b := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	type comm struct{ id int }
	x, y := comm{1}, comm{2}
	check(t, a.BeginCapture(CaptureThreadLocal))
	c := a.Capture()
	check(t, a.Record(fork))
	check(t, b.Wait(fork))
	call := func(s *Stream, key any, n int) {
		c.After(s, key)
		check(t, s.Submit(nop(n)))
		c.Mark(s, key)
	}
	call(a, x, 0)
	call(b, y, 1)
	call(b, x, 2) // after 0 by the key
	call(a, y, 3) // after 1 by the key
	check(t, b.Record(join))
	check(t, a.Wait(join))
	g := must(a.EndCapture())
	if diff := cmp.Diff(edgesOf(g), [][2]int{{0, 2}, {0, 3}, {1, 2}, {1, 3}}); diff != "" {
		t.Error(diff)
	}
	check(t, g.Destroy())
}

// captureModel is a plain restatement of the rules, one capture at a time per stream, for TestCaptureRandom.
type captureModel struct {
	streams  [4]int // capture of each stream, 0 none
	ends     [4]map[int]bool
	events   [4]eventModel
	captures map[int]*capModel
	next     int
}

type eventModel struct {
	recorded bool
	capture  int // 0: outside
	ends     map[int]bool
}

type capModel struct {
	mode        CaptureMode
	origin      int
	invalidated bool
	deps        []map[int]bool
	over        bool
}

func clone(m map[int]bool) map[int]bool {
	c := map[int]bool{}
	for k := range m {
		c[k] = true
	}
	return c
}

// TestCaptureRandom makes random calls on a few streams and events, and compares what each returns, and the graphs, with the model.
func TestCaptureRandom(t *testing.T) {
	for seed := range uint64(300) {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { captureRandom(t, rand.New(rand.NewPCG(seed, 1))) }) {
			return
		}
	}
}

func captureRandom(t *testing.T, rng *rand.Rand) {
	lockThread(t) // a subtest has a goroutine of its own
	d := newDevice(t)
	ctx := testContext(t)
	var streams [4]*Stream
	var events [4]*Event
	m := captureModel{captures: map[int]*capModel{}}
	for i := range streams {
		streams[i], events[i] = newStream(t, d), newEvent(t, d)
		m.ends[i] = map[int]bool{}
	}
	var log []string
	expect := func(err error, want error) {
		t.Helper()
		if want == nil && err != nil || want != nil && !errors.Is(err, want) {
			for _, l := range log {
				t.Log(l)
			}
			t.Fatalf("got %v, want %v", err, want)
		}
	}
	// forbid is what a forbidden call does to a capture.
	forbid := func(c int) error { m.captures[c].invalidated = true; return ErrCaptureUnsafe }
	// unsafeCall is the rule for potentially unsafe calls.
	unsafeCall := func(other bool) (want error) {
		for id, c := range m.captures {
			if !c.over && (c.mode == CaptureGlobal || c.mode == CaptureThreadLocal && !other) {
				want = forbid(id)
			}
		}
		return want
	}
	end := func(i int) {
		g, err := streams[i].EndCapture()
		id := m.streams[i]
		if id == 0 {
			wantText(t, err, "not capturing")
			return
		}
		c := m.captures[id]
		if c.origin != i {
			expect(err, forbid(id))
			return
		}
		var want error
		if c.invalidated {
			want = ErrCaptureInvalidated
		} else {
			seen := map[int]bool{}
			var visit func(map[int]bool)
			visit = func(set map[int]bool) {
				for n := range set {
					if !seen[n] {
						seen[n] = true
						visit(c.deps[n])
					}
				}
			}
			visit(m.ends[i])
			if len(seen) < len(c.deps) {
				want = ErrCaptureUnjoined
			}
		}
		expect(err, want)
		c.over = true
		for j := range m.streams {
			if m.streams[j] == id {
				m.streams[j], m.ends[j] = 0, map[int]bool{}
			}
		}
		if want != nil {
			return
		}
		var edges [][2]int
		for n, deps := range c.deps {
			for d := range deps {
				edges = append(edges, [2]int{d, n})
			}
		}
		slices.SortFunc(edges, func(a, b [2]int) int { return slices.Compare(a[:], b[:]) })
		if diff := cmp.Diff(edgesOf(g), edges); diff != "" || g.NumNodes() != len(c.deps) {
			t.Fatalf("%d nodes, want %d; edges got - want +\n%s", g.NumNodes(), len(c.deps), diff)
		}
		x := must(g.Instantiate())
		check(t, x.Launch(streams[i]))
		check(t, x.Destroy())
		check(t, g.Destroy())
	}
	for range 60 {
		i, e := rng.IntN(4), rng.IntN(4)
		s, ev := streams[i], events[e]
		id := m.streams[i]
		op := rng.IntN(14)
		other := rng.IntN(2) == 0
		log = append(log, fmt.Sprintf("op %d stream %d (capture %d) event %d (%+v) other thread %v", op, i, id, e, m.events[e], other))
		invalid := id != 0 && m.captures[id].invalidated
		switch op {
		case 0, 1: // begin
			mode := CaptureMode(rng.IntN(3))
			err := s.BeginCapture(mode)
			if id != 0 {
				wantText(t, err, "capturing already")
				continue
			}
			expect(err, nil)
			m.next++
			m.captures[m.next] = &capModel{mode: mode, origin: i}
			m.streams[i], m.ends[i] = m.next, map[int]bool{}
		case 2:
			end(i)
		case 3, 4, 5: // submit
			var want error
			if invalid {
				want = ErrCaptureInvalidated
			} else if id != 0 {
				c := m.captures[id]
				c.deps = append(c.deps, clone(m.ends[i]))
				m.ends[i] = map[int]bool{len(c.deps) - 1: true}
			}
			expect(s.Submit(nop(0)), want)
		case 6, 7: // record
			var want error
			if invalid {
				want = ErrCaptureInvalidated
			} else {
				m.events[e] = eventModel{true, id, clone(m.ends[i])}
			}
			expect(s.Record(ev), want)
		case 8, 9: // wait
			rec := m.events[e]
			var want error
			switch {
			case !rec.recorded:
			case rec.capture == 0 && id == 0:
			case rec.capture == 0:
				want = forbid(id)
			case id != 0 && id != rec.capture:
				want = forbid(id)
				if c := m.captures[rec.capture]; !c.over {
					c.invalidated = true
				}
			case m.captures[rec.capture].over:
				want = ErrCaptureUnsafe
			case m.captures[rec.capture].invalidated:
				want = ErrCaptureInvalidated
			default:
				m.streams[i] = rec.capture
				for n := range rec.ends {
					m.ends[i][n] = true
				}
			}
			expect(s.Wait(ev), want)
		case 10: // synchronize
			var want error
			if id != 0 {
				want = forbid(id)
			}
			expect(s.Synchronize(ctx), want)
		case 11: // event
			var want error
			if rec := m.events[e]; rec.capture != 0 {
				want = ErrCaptureUnsafe
				if c := m.captures[rec.capture]; !c.over {
					c.invalidated = true
				}
			} else {
				want = unsafeCall(false)
			}
			expect(ev.Synchronize(ctx), want)
		case 12: // allocate, rarely: it spoils most captures
			if rng.IntN(4) > 0 {
				continue
			}
			want := unsafeCall(other)
			var err error
			alloc := func() {
				var mem *Memory
				if mem, err = d.Alloc(1, Private); err == nil {
					err = mem.Free()
				}
			}
			if other {
				onOtherThread(alloc)
			} else {
				alloc()
			}
			expect(err, want)
		case 13: // query
			var want error
			if id != 0 {
				want = forbid(id)
			}
			_, err := s.Query()
			expect(err, want)
		}
		for j := range streams {
			if (streams[j].Capture() != nil) != (m.streams[j] != 0) {
				t.Fatalf("stream %d: capturing %v, want %v", j, streams[j].Capture() != nil, m.streams[j] != 0)
			}
			if c := streams[j].Capture(); c != nil {
				if got := c.State() == CaptureInvalidated; got != m.captures[m.streams[j]].invalidated {
					t.Fatalf("after %s: stream %d: invalidated %v", log[len(log)-1], j, got)
				}
			}
		}
	}
	for i := range streams {
		if id := m.streams[i]; id != 0 && m.captures[id].origin == i {
			end(i)
		}
	}
	for _, s := range streams {
		check(t, s.Synchronize(ctx))
	}
}
