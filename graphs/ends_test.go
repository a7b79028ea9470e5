package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
)

// TestProcesses runs captures and replays on ranks that are processes, with memory of their own.
func TestProcesses(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint(n, " ranks"), func(t *testing.T) {
			for _, res := range ranktest.RunProcesses(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				before := memfds(t)
				r, err := newRank(ctx, job)
				if err != nil {
					return err
				}
				ready := memfds(t)
				for range 3 {
					if err := r.works(ctx, r.comm); err != nil {
						return err
					}
					if after := memfds(t); after != ready {
						return fmt.Errorf("%d mappings of shared memory after Close and Drain, %d before the capture", after, ready)
					}
				}
				g, err := reduceGraph(ctx, r)
				if err != nil {
					return err
				}
				// The buffers of the others, two a rank, are there before the first replay.
				if s := r.comm.Stats(); s.PeerMappings != 2*(n-1) || memfds(t) != ready+2*(n-1) {
					return fmt.Errorf("captured: %+v and %d mappings, %d before; want %d of peers", s, memfds(t), ready, 2*(n-1))
				}
				if err := errors.Join(g.Close(), r.comm.Drain(ctx)); err != nil {
					return err
				}
				if s := r.comm.Stats(); s.BytesStaged != 0 || s.BytesDirect == 0 {
					return fmt.Errorf("%+v, want all bytes direct", s)
				}
				if err := r.close(); err != nil {
					return err
				}
				if after := memfds(t); after != before {
					return fmt.Errorf("%d mappings of shared memory at the end, %d at the begin", after, before)
				}
				return nil
			}) {
				if res.Code != 0 {
					t.Error(res)
				}
			}
		})
	}
}

// TestRandomProcesses is TestRandomPrograms with processes.
func TestRandomProcesses(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			for _, res := range ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				r, err := newRank(ctx, job)
				if err != nil {
					return err
				}
				for i := range uint64(8) {
					if err := runBoth(ctx, r, randomProgramOf(100*seed+i, 3), i); err != nil {
						return fmt.Errorf("program %d: %w", i, err)
					}
				}
				return r.close()
			}) {
				if res.Code != 0 {
					t.Error(res)
				}
			}
		})
	}
}

// An end is a way in which a rank of three leaves the others alone. The others must learn it, on GPUs within 3 s, by an error that names the rank.
type end struct {
	name    string
	culprit func(ctx context.Context, r *rank, g *graphs.Graph) error
	other   func(ctx context.Context, r *rank, g *graphs.Graph) error // its error is looked at
	code    int                                                       // of the culprit
	output  string                                                    // in the culprit's
	texts   []string                                                  // in the others' errors, besides the rank
	three   bool                                                      // it needs three ranks
}

// at prints when the culprit ends: the others' time runs from there.
func at() { fmt.Printf("AT %d\n", time.Now().UnixNano()) }

// captures waits in a capture of two calls.
func captures(ctx context.Context, r *rank, _ *graphs.Graph) error {
	return calls(func(*rank, *cuda.Stream) error { return nil })(ctx, r)
}

// replays launches and waits, for ever.
func replays(ctx context.Context, r *rank, g *graphs.Graph) error {
	for {
		if err := g.Launch(r.stream); err != nil {
			return err
		}
		if err := r.stream.Synchronize(ctx); err != nil {
			return err
		}
	}
}

// inCapture is a culprit's capture with something between its two calls.
func inCapture(fn func(cancel func())) func(context.Context, *rank, *graphs.Graph) error {
	return func(ctx context.Context, r *rank, _ *graphs.Graph) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return calls(func(*rank, *cuda.Stream) error {
			at()
			fn(cancel)
			return nil
		})(ctx, r)
	}
}

// finish closes as a program's defers do.
func finish(r *rank, g *graphs.Graph, err error) error {
	return errors.Join(err, g.Close(), r.comm.Close())
}

var ends = []end{
	{name: "returns early", other: captures, texts: []string{"closed communicator world"},
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error { at(); return finish(r, g, nil) }},
	{name: "returns early without Close", other: captures, texts: []string{"left the job"},
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error { at(); return nil }},
	{name: "panics in a capture", other: captures, code: 1, output: "boom 17", texts: []string{"panicked", "boom 17"},
		culprit: inCapture(func(func()) { panic("boom 17") })},
	{name: "panics between captures", other: captures, code: 2, output: "boom 18",
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error { at(); panic("boom 18") }},
	{name: "os.Exit in a capture", other: captures, culprit: inCapture(func(func()) { os.Exit(0) })},
	{name: "os.Exit between replays", other: replays,
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
				return err
			}
			at()
			os.Exit(0)
			return nil
		}},
	{name: "killed between replays", other: replays, code: -1,
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
				return err
			}
			at()
			ranktest.Kill(r.job, "killed")
			return nil
		}},
	{name: "returns from replays", other: replays, texts: []string{"closed communicator world"},
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx))
			at()
			return finish(r, g, err)
		}},
	{name: "cancels in a capture", other: captures, code: 1, output: "context canceled", texts: []string{"context canceled"},
		culprit: inCapture(func(cancel func()) { cancel() })},
	{name: "cancels while it waits in a capture", three: true, code: 1, output: "context canceled", texts: []string{"gave up"},
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			ctx, cancel := context.WithCancel(ctx)
			// When the one other rank waits, too. The other does not come before this one has given up.
			stop := context.AfterFunc(keyed(ctx, r, "waiting"), func() { at(); cancel() })
			defer stop()
			err := captures(ctx, r, g)
			return finish(r, g, errors.Join(err, r.job.Put(context.WithoutCancel(ctx), "gave up", nil)))
		},
		other: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			if r.job.Rank() == lowestOther(r) {
				if err := r.job.Put(ctx, "waiting", nil); err != nil {
					return err
				}
			} else if _, err := r.job.Get(ctx, "gave up"); err != nil {
				return err
			}
			return captures(ctx, r, g)
		}},
	{name: "cancels in Synchronize", three: true, code: 1, output: "context canceled",
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			ctx, cancel := context.WithCancel(ctx)
			stop := context.AfterFunc(keyed(ctx, r, "waiting"), func() { at(); cancel() })
			defer stop()
			err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx))
			return finish(r, g, err)
		},
		other: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			if r.job.Rank() != lowestOther(r) {
				// This one launches when the culprit is gone.
				gone := make(chan struct{})
				stop := r.job.Watch(func(e bootstrap.Event) {
					if e.Kind == bootstrap.RankLeft || e.Kind == bootstrap.RankDied {
						select {
						case <-gone:
						default:
							close(gone)
						}
					}
				})
				<-gone
				stop()
				return errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx))
			}
			if err := errors.Join(g.Launch(r.stream), r.job.Put(ctx, "waiting", nil)); err != nil {
				return err
			}
			return r.stream.Synchronize(ctx)
		}},
	{name: "cancels in Close", other: replays, code: 1, output: "context canceled",
		culprit: func(ctx context.Context, r *rank, g *graphs.Graph) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			at()
			return finish(r, g, context.Cause(ctx))
		}},
}

// lowestOther is the lowest rank that is not the culprit, by the name that the test gave it.
func lowestOther(r *rank) int {
	if r.culprit == 0 {
		return 1
	}
	return 0
}

// keyed is done when the key is there.
func keyed(ctx context.Context, r *rank, key string) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		r.job.Get(ctx, key)
		cancel()
	}()
	return ctx
}

func TestEnds(t *testing.T) {
	for i, e := range ends {
		culprit := i % 3
		t.Run(e.name, func(t *testing.T) {
			e.check(t, culprit, ranktest.RunProcesses(t, 3, e.rank(culprit, newRank)))
		})
	}
}

// rank is what each rank does.
func (e end) rank(culprit int, open func(context.Context, *bootstrap.Job) (*rank, error)) func(context.Context, *bootstrap.Job) error {
	return func(ctx context.Context, job *bootstrap.Job) error {
		r, err := open(ctx, job)
		if err != nil {
			return err
		}
		r.culprit = culprit
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if job.Rank() == culprit {
			return e.culprit(ctx, r, g)
		}
		err = e.other(ctx, r, g)
		fmt.Printf("GOT %d %v\n", time.Now().UnixNano(), err)
		return finish(r, g, nil)
	}
}

// check looks at how the ranks have ended.
func (e end) check(t *testing.T, culprit int, results []ranktest.Result) {
	t.Helper()
	bound := room
	if strings.HasSuffix(t.Name(), "/GPU") {
		bound = 3 * time.Second
	}
	begin, _ := stamp(t, results[culprit].Output, "AT ")
	if res := results[culprit]; res.Code != e.code || !strings.Contains(res.Output, e.output) {
		t.Errorf("culprit: code %d, want %d and %q in its output: %v", res.Code, e.code, e.output, res)
	}
	for r, res := range results {
		if r == culprit {
			continue
		}
		if res.Code != 0 {
			t.Errorf("%v", res)
		}
		got, text := stamp(t, res.Output, "GOT ")
		if d := time.Duration(got - begin); d > bound {
			t.Errorf("rank %d has its error %v after the end of rank %d, want %v", r, d, culprit, bound)
		}
		for _, want := range append(e.texts, fmt.Sprintf("rank %d", culprit)) {
			if !strings.Contains(text, want) {
				t.Errorf("rank %d: error %q has no %q", r, text, want)
			}
		}
		t.Logf("rank %d after %v: %s", r, time.Duration(got-begin).Round(time.Millisecond), text)
	}
}

// stamp finds a line with a time.
func stamp(t *testing.T, output, prefix string) (ns int64, text string) {
	t.Helper()
	for line := range strings.Lines(output) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			n, text, _ := strings.Cut(strings.TrimSpace(rest), " ")
			ns, err := strconv.ParseInt(n, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return ns, text
		}
	}
	t.Fatalf("no line %q in:\n%s", prefix, output)
	return 0, ""
}
