package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// patience is the deadline of ranks that wait for one which does not come. The others of n are to be there by then: they would be named, too.
func patience(n int) time.Duration {
	if n > 2 {
		return time.Second
	}
	return 300 * time.Millisecond
}

// replayMistakes are those that ranks make with graphs that all of them have, and captures that a rank does not make.
func replayMistakes() []mistake {
	same := func(o outcome) (outcome, outcome) { return o, o }
	var all []mistake
	add := func(m mistake) {
		m.graphs = true
		all = append(all, m)
	}
	launch := func(ctx context.Context, r *rank, gs ...*graphs.Graph) error {
		for _, g := range gs {
			if err := g.Launch(r.stream); err != nil {
				return err
			}
		}
		return r.stream.Synchronize(ctx)
	}
	// with captures n graphs on all ranks, which are closed after fn.
	with := func(n int, fn func(ctx context.Context, r *rank, gs []*graphs.Graph) error) func(context.Context, *rank) error {
		return func(ctx context.Context, r *rank) (err error) {
			var gs []*graphs.Graph
			for range n {
				g, err := reduceGraph(ctx, r)
				if err != nil {
					return err
				}
				defer g.Close()
				gs = append(gs, g)
			}
			// Together once: nothing is left to connect.
			if err := errors.Join(launch(ctx, r, gs...), r.job.Barrier(ctx)); err != nil {
				return err
			}
			return fn(ctx, r, gs)
		}
	}
	{
		m := mistake{name: "replays in another order", ruined: true,
			right: with(2, func(ctx context.Context, r *rank, gs []*graphs.Graph) error { return launch(ctx, r, gs...) }),
			wrong: with(2, func(ctx context.Context, r *rank, gs []*graphs.Graph) error { return launch(ctx, r, gs[1], gs[0]) })}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d: a replay of graph"}})
		add(m)
	}
	{
		m := mistake{name: "an eager call in place of a replay", ruined: true,
			right: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error { return launch(ctx, r, gs...) }),
			wrong: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
				return errors.Join(allReduce(r, r.stream), r.stream.Synchronize(ctx))
			})}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d: all-reduce of", "a replay of graph"}})
		add(m)
	}
	add(mistake{name: "closed in place of a replay", ruined: true,
		right: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error { return launch(ctx, r, gs...) }),
		wrong: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
			return errors.Join(gs[0].Close(), r.comm.Close())
		}),
		good: outcome{nccl.ErrClosed, []string{"rank %[1]d closed communicator world after call #"}}})
	// One that does not come: the deadline of the others names it. Whoever gives up first aborts, and the late one is told so.
	{
		m := mistake{name: "a replay that does not come", ruined: true,
			right: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
				short, cancel := context.WithTimeout(ctx, patience(r.job.Size()))
				defer cancel()
				err := launch(short, r, gs...)
				if errors.Is(err, context.DeadlineExceeded) { // else another one has been first
					if err := wantText(err, "replay", "waits for rank", "communicator world"); err != nil {
						return err
					}
					r.comm.Abort(context.Cause(short))
				}
				return errors.Join(r.comm.Err(), r.job.Barrier(ctx))
			}),
			wrong: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
				return errors.Join(r.job.Barrier(ctx), launch(ctx, r, gs...))
			})}
		m.bad, m.good = same(outcome{nccl.ErrAborted, []string{"aborted by rank", "deadline exceeded", "a replay of graph", "waits for rank %[1]d ("}})
		add(m)
	}
	add(mistake{name: "a capture that does not come",
		right: func(ctx context.Context, r *rank) error {
			short, cancel := context.WithTimeout(ctx, patience(r.job.Size()))
			defer cancel()
			_, err := reduceGraph(short, r)
			return errors.Join(err, r.job.Barrier(ctx))
		},
		wrong: func(ctx context.Context, r *rank) error {
			err := r.job.Barrier(ctx)
			if err == nil {
				_, err = reduceGraph(ctx, r)
			}
			return err
		},
		bad: outcome{graphs.ErrPeer, []string{"gave up its wait for rank %[1]d"}}, good: outcome{isAny{}, []string{"rank %[1]d"}}})

	// A graph that lives keeps what it uses.
	kept := func(name string, fn func(ctx context.Context, r *rank, g *graphs.Graph) error) {
		add(mistake{name: name,
			right: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
				return errors.Join(r.job.Barrier(ctx), launch(ctx, r, gs[0]))
			}),
			wrong: with(1, func(ctx context.Context, r *rank, gs []*graphs.Graph) error {
				// The refusal harms nothing.
				return errors.Join(fn(ctx, r, gs[0]), r.job.Barrier(ctx), launch(ctx, r, gs[0]))
			})})
	}
	kept("Close with a live graph", func(ctx context.Context, r *rank, g *graphs.Graph) error {
		return wantText(r.comm.Close(), "close on communicator world", "in use by", g.String())
	})
	kept("memory of a live graph freed", func(ctx context.Context, r *rank, g *graphs.Graph) error {
		err := r.a.Free()
		if _, ok := errors.AsType[*cuda.HeldError](err); !ok {
			return fmt.Errorf("free: %v, want a *cuda.HeldError", err)
		}
		return wantText(err, r.a.Memory().String(), g.String())
	})
	// A window that the graph of one rank uses: no rank may end it. The host platform's windows are apart from its graphs.
	window := func(live bool) func(ctx context.Context, r *rank) error {
		return func(ctx context.Context, r *rank) error {
			if ok, _ := r.comm.WindowSupport(); !ok || r.dev.Platform() == cuda.Host {
				return nil
			}
			w, err := r.comm.Window(ctx, r.a.All().Range())
			if w == nil {
				return err
			}
			g, err := reduceGraph(ctx, r)
			if err != nil {
				return err
			}
			if !live {
				err = g.Close()
			}
			if err := errors.Join(err, r.job.Barrier(ctx)); err != nil {
				return err
			}
			if err := wantText(w.Close(ctx), "close window on communicator world", fmt.Sprintf("rank %d: ", r.culprit), "in use by", "graph captured at"); err != nil {
				return err
			}
			if live {
				if err := g.Close(); err != nil {
					return err
				}
			}
			return errors.Join(r.job.Barrier(ctx), r.comm.Drain(ctx), r.job.Barrier(ctx), w.Close(ctx))
		}
	}
	add(mistake{name: "window of a live graph closed", panes: true, right: window(false), wrong: window(true)})
	return all
}

// transferMistakes are those of captured Sends and Recvs. The culprit is one end, the first of the others the other one.
func transferMistakes() []mistake {
	first := func(r *rank) int {
		if r.culprit == 0 {
			return 1
		}
		return 0
	}
	send := func(r *rank, n, to int, s *cuda.Stream) error { return nccl.Send(r.comm, r.a.Slice(0, n), to, s) }
	recv := func(r *rank, n, from int, s *cuda.Stream) error { return nccl.Recv(r.comm, r.b.Slice(0, n), from, s) }
	pair := func(name string, is error, text []string, first_, culprit func(r *rank, s *cuda.Stream) error) mistake {
		return mistake{name: name,
			right: func(ctx context.Context, r *rank) error {
				return capture(ctx, r, func(s *cuda.Stream) error {
					if r.comm.Rank() == first(r) {
						return first_(r, s)
					}
					return nil
				})
			},
			wrong: func(ctx context.Context, r *rank) error {
				return capture(ctx, r, func(s *cuda.Stream) error { return culprit(r, s) })
			},
			bad: outcome{is, text}, good: outcome{isAny{}, text}}
	}
	return []mistake{
		pair("message, count", nccl.ErrMismatch, []string{"sends 8 float32 (mistakes_test.go:", "to rank %[1]d, which receives 9 float32"},
			func(r *rank, s *cuda.Stream) error { return send(r, 8, r.culprit, s) },
			func(r *rank, s *cuda.Stream) error { return recv(r, 9, first(r), s) }),
		pair("message, not received", nccl.ErrMismatch, []string{"send of 8 float32, to rank %[1]d"},
			func(r *rank, s *cuda.Stream) error { return send(r, 8, r.culprit, s) },
			func(r *rank, s *cuda.Stream) error { return nil }),
		pair("message, not sent", nccl.ErrMismatch, []string{"recv of 8 float32, from rank %[1]d"},
			func(r *rank, s *cuda.Stream) error { return recv(r, 8, r.culprit, s) },
			func(r *rank, s *cuda.Stream) error { return nil }),
	}
}

// places are where the culprit stands: first, in the middle, last.
func places(n int) []int { return slices.Compact([]int{0, n / 2, n - 1}) }

// mistakesRank makes one mistake after the other in the same processes, on buffers of n elements. The culprit changes its place; shift is where it begins. From and to
// are the first and the last mistake.
func mistakesRank(n, shift, from, to int) func(ctx context.Context, job *bootstrap.Job) error {
	return func(ctx context.Context, job *bootstrap.Job) error {
		var r *rank
		var err error
		fresh := true
		p := places(job.Size())
		for i, m := range mistakes(n)[from:to] {
			culprit := p[(from+i+shift)%len(p)]
			if m.panes && dltest.Sharing() {
				continue // there are no windows
			}
			if fresh {
				if r, err = newRankOn(ctx, job, dltest.DeviceOf(job.LocalRank()), "world", n); err != nil {
					return fmt.Errorf("before %q: %w", m.name, err)
				}
			}
			r.got = ""
			if err := errors.Join(job.Barrier(ctx), m.on(ctx, r, culprit)); err != nil {
				return fmt.Errorf("%s, culprit %d: %w", m.name, culprit, err)
			}
			fmt.Printf("TOOK %d\t%s (culprit %d)\t%s\n", r.took.Nanoseconds(), m.name, culprit, strings.ReplaceAll(r.got, "\n", " | "))
			// With windows the kernels of NCCL 2.28 do not see an abort: what the mistakes after it enqueue could not be ended.
			if fresh = m.ruined || m.panes; fresh {
				if err := r.close(); err != nil {
					return fmt.Errorf("after %q: %w", m.name, err)
				}
				continue
			}
			for _, c := range r.others {
				if err := c.Close(); err != nil {
					return fmt.Errorf("after %q: %w", m.name, err)
				}
			}
			if r.others = nil; r.side != nil {
				if err := r.side.Close(); err != nil {
					return fmt.Errorf("after %q: %w", m.name, err)
				}
				r.side = nil
			}
		}
		if fresh {
			return nil
		}
		return r.close()
	}
}

// logTimes logs for each mistake how long it took until its error was there on the last rank, and what that says.
func logTimes(t *testing.T, results []ranktest.Result) {
	t.Helper()
	took, text := map[string]time.Duration{}, map[string]string{}
	for _, r := range results {
		for l := range strings.Lines(r.Output) {
			rest, ok := strings.CutPrefix(strings.TrimSuffix(l, "\n"), "TOOK ")
			f := strings.SplitN(rest, "\t", 3)
			if !ok || len(f) != 3 {
				continue
			}
			ns, _ := strconv.ParseInt(f[0], 10, 64)
			if d := time.Duration(ns); d >= took[f[1]] && f[2] != "" {
				took[f[1]], text[f[1]] = d, f[2]
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(took)) {
		t.Logf("%-50s %8v  %s", name, took[name].Round(100*time.Microsecond), text[name])
	}
}

// TestLibraryMistakes is TestMistakes with ranks that are processes on a collective library, one mistake after the other. Large: the library registers
// nothing for small calls, so what hangs it does so with large ones only.
func TestLibraryMistakes(t *testing.T) {
	dltest.Parallel(t)
	ended := func(t *testing.T, results []ranktest.Result) {
		t.Helper()
		logTimes(t, results)
		allWell(t, results)
	}
	all := len(mistakes(elements))
	for _, ranks := range []int{2, 4, 8} {
		for shift := range places(ranks) {
			t.Run(fmt.Sprintf("%d ranks/%d", ranks, shift), func(t *testing.T) {
				dltest.Parallel(t)
				t.Run("fake", func(t *testing.T) {
					if ranks > 4 && shift > 0 || testing.Short() && ranks != 2+2*shift {
						t.Skip("the same as on fewer ranks, and in other places")
					}
					ended(t, ranktest.RunProcesses(t, ranks, mistakesRank(elements, shift, 0, all), append(fakeEnv(t), noWindows)...))
				})
				for _, n := range []int{elements, 4 << 20} {
					t.Run(fmt.Sprintf("GPU/%d bytes", 4*n), func(t *testing.T) {
						dltest.NeedGPUs(t, ranks)
						if n == elements && shift > 0 || testing.Short() && (ranks > 2 || shift > 0) {
							t.Skip("the same as with large buffers, in other places")
						}
						// In parts: a run of processes has a minute.
						const part = 20
						for from := 0; from < all; from += part {
							t.Run(fmt.Sprint(from), func(t *testing.T) {
								ended(t, ranktest.RunProcesses(t, ranks, mistakesRank(n, shift, from, min(from+part, all)), append(dltest.GPUEnv(), noWindows)...))
							})
						}
					})
				}
			})
		}
	}
}
