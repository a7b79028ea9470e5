package graphs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// onRanks runs f on n ranks in this process, each with what a rank needs, and closes that.
func onRanks(t *testing.T, n int, f func(ctx context.Context, r *rank) error) {
	t.Helper()
	before := memfds(t)
	ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := newRank(ctx, job)
		if err != nil {
			return err
		}
		if err := f(ctx, r); err != nil {
			return err
		}
		return r.close()
	})
	if after := memfds(t); after != before {
		t.Errorf("%d mappings of shared memory, %d before", after, before)
	}
}

// reduceGraph captures one all-reduce.
func reduceGraph(ctx context.Context, r *rank, o ...graphs.Option) (*graphs.Graph, error) {
	return graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return allReduce(r, s) }, append(o, graphs.Comms(r.comm))...)
}

func wantText(err error, texts ...string) error {
	if err == nil {
		return fmt.Errorf("no error, want one with %q", texts)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			return fmt.Errorf("error %q has no %q", err, text)
		}
	}
	return nil
}

func TestCaptureLaunchClose(t *testing.T) {
	for n := 1; n <= 4; n++ {
		t.Run(fmt.Sprint(n, " ranks"), func(t *testing.T) {
			onRanks(t, n, func(ctx context.Context, r *rank) error { return r.works(ctx, r.comm) })
		})
	}
}

func TestCalls(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		private, err := cuda.Malloc[float32](r.dev, 4)
		if err != nil {
			return err
		}
		own, err := nccl.Alloc[float32](r.dev, 64)
		if err != nil {
			return err
		}
		reg, err := r.comm.Register(own.Memory())
		if err != nil {
			return err
		}
		off := 4 * r.comm.Rank()
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return errors.Join(
				nccl.AllReduce(r.comm, r.a.Slice(0, 4), r.b.Slice(0, 4), nccl.Sum, s),
				nccl.AllReduce(r.comm, r.a.Slice(off, off+4), r.b.Slice(0, 4), nccl.Max, s),
				nccl.AllReduce(r.comm, own.Slice(off, off+4), own.Slice(32, 36), nccl.Sum, s),
				nccl.AllReduce(r.comm, private.All(), private.All(), nccl.Sum, s),
				nccl.Broadcast(r.comm, r.a.Slice(0, 0), r.b.Slice(0, 0), 1, s),
				nccl.Group(func() error {
					return errors.Join(
						nccl.AllReduce(r.comm, r.a.Slice(0, 4), r.b.Slice(0, 4), nccl.Sum, s),
						nccl.AllReduce(r.comm, private.All(), private.All(), nccl.Sum, s),
						nccl.Send(r.comm, own.Slice(0, 8), 1-r.comm.Rank(), s),
						nccl.Recv(r.comm, own.Slice(8, 16), 1-r.comm.Rank(), s))
				}, r.comm))
		}, graphs.Comms(r.comm), graphs.Name("calls"))
		if err != nil {
			return err
		}
		peer := 1 - r.comm.Rank()
		want := []string{
			"all-reduce of 4 float32, sum: window, registered by the capture, at the same offsets on all ranks",
			"all-reduce of 4 float32, max: graph, registered by the capture; no window: the send buffer is at offset 16 on rank 1, 0 on rank 0",
			"all-reduce of 4 float32, sum: local, registered by the program; no window: the send buffer is at offset 16 on rank 1, 0 on rank 0",
			"all-reduce of 4 float32, sum: plain, the send buffer is private memory (nccl.Alloc makes memory that can be registered)",
			"broadcast of 0 float32, from rank 1: plain, no data",
			"all-reduce of 4 float32, sum: plain, registered by the capture, at the same offsets on all ranks; but one call with others: the send buffer is private memory (nccl.Alloc makes memory that can be registered)",
			"all-reduce of 4 float32, sum: plain, the send buffer is private memory (nccl.Alloc makes memory that can be registered)",
			fmt.Sprintf("send of 8 float32, to rank %d: local, registered by the program", peer),
			fmt.Sprintf("recv of 8 float32, from rank %d: local, registered by the program", peer),
		}
		var got []string
		for _, c := range g.Calls() {
			got = append(got, fmt.Sprintf("%s: %v, %s", c.Call, c.Mode, c.Reason))
			if c.Comm != "world" || !strings.HasPrefix(c.Place, "graph_test.go:") {
				return fmt.Errorf("call %q of communicator %q at %q", c.Call, c.Comm, c.Place)
			}
		}
		if d := cmp.Diff(got, want); d != "" {
			return fmt.Errorf("calls (-got +want):\n%s", d)
		}
		if s := g.String(); !strings.HasPrefix(s, `graph "calls" captured at graph_test.go:`) {
			return fmt.Errorf("name %q", s)
		}
		// a, b and own are registered by the graph, own by the program as well.
		if s := r.comm.Stats(); s.Registrations != 3 || s.GraphHolds != 3 {
			return fmt.Errorf("with the graph: %+v, want 3 registrations and 3 of graphs", s)
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close()); err != nil {
			return err
		}
		if s := r.comm.Stats(); s.Registrations != 1 || s.GraphHolds+s.PendingRelease != 0 {
			return fmt.Errorf("after Close: %+v, want the program's registration", s)
		}
		return errors.Join(reg.Close(), r.comm.Drain(ctx), empty(r.comm), own.Free(), private.Free())
	})
}

func TestDirectWithoutStaging(t *testing.T) {
	onRanks(t, 3, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		for range 10 {
			if err := g.Launch(r.stream); err != nil {
				return err
			}
		}
		if err := r.stream.Synchronize(ctx); err != nil {
			return err
		}
		if s := r.comm.Stats(); s.BytesStaged != 0 || s.BytesDirect == 0 {
			return fmt.Errorf("%+v, want all bytes direct", s)
		}
		return g.Close()
	})
}

func TestFreeMemoryOfLiveGraph(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		buf, err := nccl.Alloc[float32](r.dev, 8)
		if err != nil {
			return err
		}
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Sum, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		err = buf.Free()
		if held, ok := errors.AsType[*cuda.HeldError](err); !ok || len(held.Holders) != 1 || held.Holders[0] != g.String() {
			return fmt.Errorf("free of a live graph's memory: %v, want that %s holds it", err, g)
		}
		// Nothing was freed.
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
			return err
		}
		return errors.Join(g.Close(), buf.Free())
	})
}

func TestFreeInCapture(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			if err := allReduce(r, s); err != nil {
				return err
			}
			// Here the device refuses it; from elsewhere the graph does.
			freed := make(chan error)
			go func() { freed <- r.a.Free() }()
			if err := wantText(<-freed, "graph captured at graph_test.go:"); err != nil {
				return err
			}
			return allReduce(r, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		return g.Close()
	})
}

// TestCloseInFlight closes a graph, and frees its memory, while a replay of it runs: both wait for it without being waited for.
func TestCloseInFlight(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		buf, err := nccl.Alloc[float32](r.dev, 8)
		if err != nil {
			return err
		}
		freed := make(chan struct{})
		buf.Memory().OnFree(func() { close(freed) })
		hold, begun := make(chan struct{}), make(chan struct{})
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			err := s.HostFunc(func() { close(begun); <-hold })
			return errors.Join(err, nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Sum, s))
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if err := g.Launch(r.stream); err != nil {
			return err
		}
		<-begun
		if err := g.Close(); err != nil {
			return err
		}
		if s := r.comm.Stats(); s.PendingRelease != 1 || s.GraphHolds != 1 {
			return fmt.Errorf("closed in flight: %+v, want one registration pending", s)
		}
		if err := buf.Free(); err != nil {
			return err
		}
		select {
		case <-freed:
			return errors.New("memory was freed under a replay")
		default:
		}
		close(hold)
		if err := r.stream.Synchronize(ctx); err != nil {
			return err
		}
		err = eventually(ctx, func() error { return errors.Join(r.comm.Drain(ctx), empty(r.comm)) })
		select {
		case <-freed:
		case <-ctx.Done():
			return fmt.Errorf("memory was not freed: %w", errors.Join(ctx.Err(), err))
		}
		return err
	}, noWindows)
}

func TestCloseCommWithLiveGraphs(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r, graphs.Name("one"))
		if err != nil {
			return err
		}
		h, err := reduceGraph(ctx, r, graphs.Name("two"))
		if err != nil {
			return err
		}
		if err := wantText(r.comm.Close(), g.String(), h.String()); err != nil {
			return err
		}
		if err := wantText(r.dev.Close(), "graph"); err != nil {
			return err
		}
		// Nothing was closed.
		if err := errors.Join(g.Launch(r.stream), h.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
			return err
		}
		return errors.Join(g.Close(), h.Close())
	})
}

func TestClosedGraph(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if err := errors.Join(g.Close(), g.Close()); err != nil {
			return err
		}
		err = g.Launch(r.stream)
		if !errors.Is(err, graphs.ErrClosed) {
			return fmt.Errorf("launch after Close: %v, want %v", err, graphs.ErrClosed)
		}
		if err := wantText(err, g.String()); err != nil {
			return err
		}
		return r.works(ctx, r.comm)
	})
}

func TestAbortBreaksGraphs(t *testing.T) {
	onRanks(t, 3, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
			return err
		}
		if err := r.job.Barrier(ctx); err != nil {
			return err
		}
		if r.comm.Rank() == 1 {
			r.comm.Abort(errOwn)
		}
		err = eventually(ctx, func() error { return wantText(g.Launch(r.stream), "rank 1", errOwn.Error()) })
		if err != nil {
			return err
		}
		return errors.Join(g.Close(), g.Close())
	})
}

// TestReplayOrder launches two graphs in another order on one rank.
func TestReplayOrder(t *testing.T) {
	for culprit := range 3 {
		t.Run(fmt.Sprint("rank ", culprit), func(t *testing.T) {
			onRanks(t, 3, func(ctx context.Context, r *rank) error {
				g, err := reduceGraph(ctx, r)
				if err != nil {
					return err
				}
				h, err := reduceGraph(ctx, r)
				if err != nil {
					return err
				}
				first, second := g, h
				if r.comm.Rank() == culprit {
					first, second = h, g
				}
				err = first.Launch(r.stream)
				if err == nil {
					err = second.Launch(r.stream)
				}
				if err == nil {
					err = r.stream.Synchronize(ctx)
				}
				if !errors.Is(err, nccl.ErrMismatch) {
					return fmt.Errorf("replays in another order: %v, want %v", err, nccl.ErrMismatch)
				}
				return errors.Join(wantText(err, fmt.Sprintf("rank %d", culprit)), g.Close(), h.Close())
			})
		})
	}
}

func TestLaunchWhereItMustNot(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		// In a capture, which leases the communicator, from any stream.
		outside, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		h, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			if err := g.Launch(s); !errors.Is(err, cuda.ErrCaptureUnsafe) {
				return fmt.Errorf("launch on the capturing stream: %v, want %v", err, cuda.ErrCaptureUnsafe)
			}
			if err := g.Launch(outside); !errors.Is(err, nccl.ErrInUse) {
				return fmt.Errorf("launch while the communicator is leased: %v, want %v", err, nccl.ErrInUse)
			}
			_, err := graphs.Capture(ctx, outside, func(*cuda.Stream) error { return nil }, graphs.Comms(r.comm))
			if !errors.Is(err, nccl.ErrInUse) {
				return fmt.Errorf("capture while the communicator is leased: %v, want %v", err, nccl.ErrInUse)
			}
			return allReduce(r, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		return errors.Join(g.Launch(r.stream), h.Launch(r.stream), r.stream.Synchronize(ctx), g.Close(), h.Close(), outside.Close())
	})
}

// TestLaunchThatFails: the others have been told of a replay that then does not come, and must not wait for it.
func TestLaunchThatFails(t *testing.T) {
	onRanks(t, 3, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if r.comm.Rank() == 1 {
			closed, err := r.dev.NewStream()
			if err != nil {
				return err
			}
			if err := closed.Close(); err != nil {
				return err
			}
			if err := wantText(g.Launch(closed), "launch graph captured at graph_test.go:"); err != nil {
				return err
			}
			return errors.Join(wantText(g.Launch(r.stream), "abort"), g.Close())
		}
		err = g.Launch(r.stream)
		if err == nil {
			err = r.stream.Synchronize(ctx)
		}
		return errors.Join(wantText(err, "aborted by rank 1", "already closed"), g.Close())
	})
}

// TestLaunchOnOtherDevice is refused before anyone is told.
func TestLaunchOnOtherDevice(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		dev, err := cuda.Open("host")
		if err != nil {
			return err
		}
		s, err := dev.NewStream()
		if err != nil {
			return err
		}
		if err := wantText(g.Launch(s), "another device"); err != nil {
			return err
		}
		return errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close(), s.Close(), dev.Close())
	})
}

// TestMesh has four ranks with a communicator for each row and column. The failure of one reaches also the rank that shares none with it.
func TestMesh(t *testing.T) {
	for culprit := range 5 { // 4: nobody
		t.Run(fmt.Sprint("rank ", culprit), func(t *testing.T) {
			onRanks(t, 4, func(ctx context.Context, r *rank) error {
				me := r.comm.Rank()
				row, err := r.comm.Split(ctx, me/2, me)
				if err != nil {
					return err
				}
				col, err := r.comm.Split(ctx, me%2, me)
				if err != nil {
					return err
				}
				r.others = append(r.others, row, col)
				g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
					if me == culprit {
						return errOwn
					}
					return nil
				}, graphs.Comms(row, col))
				if culprit < 4 {
					return wantText(err, errOwn.Error())
				}
				if err != nil {
					return err
				}
				return errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close())
			})
		})
	}
}

// TestLostGraph drops a graph without Close.
func TestLostGraph(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil)))
	defer slog.SetDefault(old)

	for _, end := range []string{"drain", "close", "capture"} {
		t.Run(end, func(t *testing.T) {
			mu.Lock()
			log.Reset()
			mu.Unlock()
			var name string
			onRanks(t, 1, func(ctx context.Context, r *rank) error {
				if err := func() error {
					g, err := reduceGraph(ctx, r, graphs.Name("lost"))
					if err == nil {
						name = g.String()
					}
					return err
				}(); err != nil {
					return err
				}
				if err := eventually(ctx, func() error {
					runtime.GC()
					mu.Lock()
					defer mu.Unlock()
					return wantText(errors.New(log.String()), "graph was not closed", "captured at graph_test.go:")
				}); err != nil {
					return err
				}
				// The collector alone gives nothing back.
				if s := r.comm.Stats(); s.GraphHolds != 2 {
					return fmt.Errorf("after the collector: %+v, want both registrations", s)
				}
				if d := cmp.Diff(graphs.Live(), []string{name}); d != "" {
					return fmt.Errorf("live graphs (-got +want):\n%s", d)
				}
				switch end {
				case "drain":
					return errors.Join(r.comm.Drain(ctx), empty(r.comm))
				case "capture":
					return r.works(ctx, r.comm)
				}
				return nil // rank.close closes the communicator
			})
			if live := graphs.Live(); len(live) > 0 {
				t.Errorf("live graphs: %q", live)
			}
			mu.Lock()
			defer mu.Unlock()
			if n := strings.Count(log.String(), "graph was not closed"); n != 1 {
				t.Errorf("the loss was told %d times, want once:\n%s", n, log.String())
			}
		})
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	b  *bytes.Buffer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

// TestManyGraphs captures, launches and closes again and again: nothing may grow.
func TestManyGraphs(t *testing.T) {
	var before [2]int
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		if err := errors.Join(r.works(ctx, r.comm), r.job.Barrier(ctx)); err != nil {
			return err
		}
		count := func() [2]int { return [2]int{runtime.NumGoroutine(), openFiles(t)} }
		if r.comm.Rank() == 0 {
			before = count()
		}
		for i := range 100 {
			if err := r.works(ctx, r.comm); err != nil {
				return fmt.Errorf("graph %d: %w", i, err)
			}
		}
		if err := errors.Join(r.comm.Drain(ctx), r.job.Barrier(ctx)); err != nil {
			return err
		}
		if r.comm.Rank() == 0 {
			// The other rank waits in the barrier; what ends on its own time is given some.
			if err := eventually(ctx, func() error {
				if after := count(); after[0] > before[0] || after[1] > before[1] {
					return fmt.Errorf("%v goroutines and open files, %v before", after, before)
				}
				return nil
			}); err != nil {
				return err
			}
		}
		return r.job.Barrier(ctx)
	})
}

// TestCloseWhileLaunching closes a graph that another goroutine launches.
func TestCloseWhileLaunching(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, r *rank) error {
		for range 20 {
			g, err := reduceGraph(ctx, r)
			if err != nil {
				return err
			}
			begun, ended := make(chan struct{}), make(chan error)
			go func() {
				var err error
				for i := 0; err == nil; i++ {
					if err = g.Launch(r.stream); i == 10 {
						close(begun)
					}
				}
				ended <- err
			}()
			<-begun
			if err := errors.Join(g.Close(), g.Close()); err != nil {
				return err
			}
			if err := <-ended; !errors.Is(err, graphs.ErrClosed) {
				return fmt.Errorf("launch: %v, want %v", err, graphs.ErrClosed)
			}
			if err := r.stream.Synchronize(ctx); err != nil {
				return err
			}
			if err := eventually(ctx, func() error { return empty(r.comm) }); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestWithoutCommunicators(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, r *rank) error {
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return cuda.Fill(r.a.All(), 3, s) })
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close()); err != nil {
			return err
		}
		if got := r.a.All().Host()[elements-1]; got != 3 {
			return fmt.Errorf("filled with %v, want 3", got)
		}
		return nil
	})
}

// TestLaunchAllocatesNothing: a replay is the hot path.
func TestLaunchAllocatesNothing(t *testing.T) {
	onRanks(t, 1, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if n := testing.AllocsPerRun(100, func() {
			if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
				t.Error(err)
			}
		}); n != 0 && !raceEnabled {
			return fmt.Errorf("%v allocations a replay", n)
		}
		return g.Close()
	})
}

// largeGroup captures a call whose description does not fit into one message of the control plane.
func largeGroup(ctx context.Context, r *rank) error {
	const n = 700
	g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
		return nccl.Group(func() error {
			for i := range n {
				at := r.a.Slice(i%elements, i%elements+1)
				if err := nccl.AllReduce(r.comm, at, at, nccl.Max, s); err != nil {
					return err
				}
			}
			return nil
		}, r.comm)
	}, graphs.Comms(r.comm))
	if err != nil {
		return err
	}
	if len(g.Calls()) != n {
		return fmt.Errorf("%d calls, want %d", len(g.Calls()), n)
	}
	at := r.a.Slice(5, 6)
	if err := errors.Join(put(ctx, r.stream, at, []float32{float32(r.comm.Rank() + 1)}), g.Launch(r.stream)); err != nil {
		return err
	}
	got, err := get(ctx, r.stream, at)
	if want := float32(r.comm.Size()); err == nil && got[0] != want {
		err = fmt.Errorf("maximum %v, want %v", got[0], want)
	}
	return errors.Join(err, g.Close())
}

func TestLargeGroup(t *testing.T) {
	t.Run("goroutines", func(t *testing.T) { everywhere(t, largeGroup) })
	t.Run("processes", func(t *testing.T) {
		for _, res := range ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
			r, err := newRank(ctx, job)
			if err != nil {
				return err
			}
			return errors.Join(largeGroup(ctx, r), r.close())
		}) {
			if res.Code != 0 {
				t.Error(res)
			}
		}
	})
}

// TestMissingRank: one rank does not come in time. Its late capture fails at once and names who gave up.
func TestMissingRank(t *testing.T) {
	for missing := range 3 {
		t.Run(fmt.Sprint("rank ", missing), func(t *testing.T) {
			var others sync.WaitGroup
			others.Add(2)
			onRanks(t, 3, func(ctx context.Context, r *rank) (err error) {
				if r.comm.Rank() == missing {
					others.Wait()
					_, err := reduceGraph(ctx, r)
					return errors.Join(wantText(err, "gave up its wait for rank "+fmt.Sprint(missing)), r.works(ctx, r.comm))
				}
				defer func() { // when the late one has come, and failed
					if err == nil {
						err = r.works(ctx, r.comm)
					}
				}()
				defer others.Done()
				short, cancel := context.WithTimeout(ctx, patience(3))
				defer cancel()
				_, err = reduceGraph(short, r)
				// One gives up first and the other is told so.
				if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, graphs.ErrPeer) {
					return fmt.Errorf("error %v, want %v or %v", err, context.DeadlineExceeded, graphs.ErrPeer)
				}
				return errors.Join(wantText(err, fmt.Sprint("rank ", missing)), empty(r.comm))
			})
		})
	}
}
