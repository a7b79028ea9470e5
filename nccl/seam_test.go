package nccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// gate is package graphs in small: it registers what a call uses, lets the members meet, and prepares.
type gate struct {
	w    *world
	mode nccl.Mode
	regs []*nccl.Registration
	seen []string
}

func (g *gate) String() string { return "capture at seam_test.go:1" }

func (g *gate) Admit(c *nccl.Comm, group []nccl.Call) (nccl.Mode, error) {
	for _, call := range group {
		g.seen = append(g.seen, call.String())
		if g.mode == nccl.Plain {
			continue
		}
		for _, r := range []cuda.Range{call.Send, call.Recv} {
			if r.Mem == nil {
				continue
			}
			reg, err := c.RegisterGraph(r.Mem)
			if err != nil {
				return 0, err
			}
			g.regs = append(g.regs, reg)
		}
	}
	l, err := c.Layout(group)
	if err != nil {
		return 0, err
	}
	all, err := c.Meet(g.w.ctx, l, "capture")
	if err != nil {
		return 0, err
	}
	return g.mode, c.Prepare(g.w.ctx, group, all)
}

// capture runs fn under a lease and a capture.
func (g *gate) capture(fn func(s *cuda.Stream) error) (*cuda.Graph, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	restore, err := g.w.comm.SetGate(g)
	if err != nil {
		return nil, err
	}
	defer restore()
	if err := g.w.stream.BeginCapture(cuda.CaptureThreadLocal); err != nil {
		return nil, err
	}
	err = fn(g.w.stream)
	graph, endErr := g.w.stream.EndCapture()
	return graph, errors.Join(err, endErr)
}

func replay(w *world, key uint64, x *cuda.GraphExec) error {
	r, err := w.comm.BeginReplay(key, "the graph")
	if err != nil {
		return err
	}
	return errors.Join(r.Before(w.stream), x.Launch(w.stream), r.After(w.stream))
}

// A graph of collectives and messages on two streams is replayed, eager calls in between; its memory is direct, and everything goes with it.
func TestCaptured(t *testing.T) {
	for _, mode := range []nccl.Mode{nccl.Plain, nccl.Graph} {
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%v/ranks=%d", mode, n), func(t *testing.T) {
				ranktest.RunEither(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						const count = 50_000
						me := w.comm.Rank()
						b, done, err := openBuffers(w, 4*count*8, false)
						defer done()
						if err != nil {
							return err
						}
						other, err := w.dev.NewStream()
						if err != nil {
							return err
						}
						defer other.Close()
						fork, err := w.dev.NewEvent()
						if err != nil {
							return err
						}
						defer fork.Close()
						at := func(m *cuda.Memory, k int) cuda.Slice[int32] {
							s, err := cuda.SliceOf[int32](m, uint64(k*count*4), count)
							if err != nil {
								panic(err)
							}
							return s
						}
						g := &gate{w: w, mode: mode}
						graph, err := g.capture(func(s *cuda.Stream) error {
							return errors.Join(
								nccl.AllReduce(w.comm, at(b.send, 0), at(b.recv, 0), nccl.Sum, s),
								s.Record(fork), other.Wait(fork),
								// The order of one communicator's calls is kept across streams.
								nccl.AllReduce(w.comm, at(b.recv, 0), at(b.recv, 1), nccl.Max, other),
								nccl.Group(func() error {
									return errors.Join(
										nccl.Broadcast(w.comm, at(b.send, 1), at(b.recv, 2), n-1, s),
										nccl.Send(w.comm, at(b.recv, 1), (me+1)%n, s),
										nccl.Recv(w.comm, at(b.recv, 3), (me+n-1)%n, s))
								}, w.comm),
								other.Record(fork), s.Wait(fork))
						})
						if err != nil {
							return err
						}
						exec, err := graph.Instantiate()
						if err != nil {
							return err
						}
						for round := range 5 {
							fill(at(b.send, 0), func(i int) int32 { return int32(me + i + round) })
							fill(at(b.send, 1), func(i int) int32 { return int32(7*me + i + round) })
							if err := replay(w, 77, exec); err != nil {
								return err
							}
							// In between, on the other stream, without waiting.
							if err := nccl.AllReduce(w.comm, at(b.send, 0), at(b.recv, 4), nccl.Min, other); err != nil {
								return err
							}
							if err := errors.Join(w.stream.Synchronize(ctx), other.Synchronize(ctx)); err != nil {
								return err
							}
							total := func(i int) int32 { return int32(n*(n-1)/2 + n*(i+round)) }
							if err := errors.Join(check(at(b.recv, 0), total), check(at(b.recv, 1), total), check(at(b.recv, 3), total),
								check(at(b.recv, 2), func(i int) int32 { return int32(7*(n-1) + i + round) }),
								check(at(b.recv, 4), func(i int) int32 { return int32(i + round) })); err != nil {
								return fmt.Errorf("round %d: %w", round, err)
							}
						}
						want := []string{
							"all-reduce of 50000 int32, sum", "all-reduce of 50000 int32, max",
							fmt.Sprintf("broadcast of 50000 int32, from rank %d", n-1),
							fmt.Sprintf("send of 50000 int32, to rank %d", (me+1)%n), fmt.Sprintf("recv of 50000 int32, from rank %d", (me+n-1)%n)}
						if d := cmp.Diff(g.seen, want); d != "" {
							return errors.New(d)
						}
						st := w.comm.Stats()
						// The eager calls are staged: graphs' registrations are none of theirs.
						if n > 1 && mode == nccl.Graph && (st.BytesStaged != 5*8*count || st.PeerMappings == 0) {
							return fmt.Errorf("%+v", st)
						}
						if err := errors.Join(exec.Destroy(), graph.Destroy()); err != nil {
							return err
						}
						for _, r := range g.regs {
							if err := r.Close(); err != nil {
								return err
							}
						}
						if st := w.comm.Stats(); st.Registrations+st.GraphHolds+st.PeerMappings != 0 {
							return fmt.Errorf("left: %+v", st)
						}
						return nil
					})
				})
			})
		}
	}
}

// What the lease refuses.
func TestLease(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[int32](w.dev, 8)
			if err != nil {
				return err
			}
			defer b.Free()
			other, err := w.dev.NewStream()
			if err != nil {
				return err
			}
			defer other.Close()
			g := &gate{w: w, mode: nccl.Plain}
			graph, err := g.capture(func(s *cuda.Stream) error {
				_, err := w.comm.SetGate(g)
				if err := wantErr(err, nccl.ErrInUse, g.String()); err != nil {
					return err
				}
				_, err = w.comm.BeginReplay(1, "a graph")
				if err := wantErr(err, nccl.ErrInUse, g.String()); err != nil {
					return err
				}
				if err := wantErr(w.comm.Close(), nccl.ErrInUse, g.String()); err != nil {
					return err
				}
				return wantErr(nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, other), nccl.ErrInUse, g.String(), "does not capture")
			})
			if err != nil {
				return err
			}
			if err := graph.Destroy(); err != nil {
				return err
			}
			// A capture without a lease.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if err := w.stream.BeginCapture(cuda.CaptureThreadLocal); err != nil {
				return err
			}
			err = wantErr(nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream), nccl.ErrArgument, "graphs.Comms")
			if graph, end := w.stream.EndCapture(); end != nil {
				err = errors.Join(err, end)
			} else {
				err = errors.Join(err, graph.Destroy())
			}
			return errors.Join(err, outcome(ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream)))
		})
	})
}

// A member that does something else where others capture or replay: all are told.
func TestLedgerContradiction(t *testing.T) {
	const culprit = 1
	eager := func(w *world, b *cuda.Buffer[int32]) error {
		return outcome(w.ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream))
	}
	capture := func(w *world, b *cuda.Buffer[int32]) error {
		g := &gate{w: w, mode: nccl.Plain}
		graph, err := g.capture(func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, s) })
		if graph != nil {
			err = errors.Join(err, graph.Destroy())
		}
		return err
	}
	launch := func(key uint64) func(w *world, b *cuda.Buffer[int32]) error {
		return func(w *world, b *cuda.Buffer[int32]) error {
			r, err := w.comm.BeginReplay(key, "the graph")
			if err != nil {
				return err
			}
			// In place of a graph: what a graph would wait for.
			err = errors.Join(r.Before(w.stream), r.After(w.stream))
			return outcome(w.ctx, w.stream, errors.Join(err, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream)))
		}
	}
	cases := []struct {
		name         string
		right, wrong func(w *world, b *cuda.Buffer[int32]) error
		wrongText    string
		rightText    string
	}{
		{"eager instead of capture", capture, eager, "rank 1: all-reduce of 8 int32, sum", ": a capture"},
		{"capture instead of eager", eager, capture, "rank 1: a capture", ": all-reduce of 8 int32, sum"},
		{"replay instead of eager", eager, launch(5), "rank 1: a replay of graph 5", ": all-reduce of 8 int32, sum"},
		{"another graph", launch(4), launch(5), "rank 1: a replay of graph 5", ": a replay of graph 4"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error {
					b, err := nccl.Alloc[int32](w.dev, 8)
					if err != nil {
						return err
					}
					defer b.Free()
					if err := job.Barrier(ctx); err != nil {
						return err
					}
					do := tc.right
					if job.Rank() == culprit {
						do = tc.wrong
					}
					start := time.Now()
					err = do(w, b)
					if took := time.Since(start); took > room {
						return fmt.Errorf("the error came after %v: %v", took, err)
					}
					// Which other rank is named depends on who saw it first.
					return wantErr(err, nccl.ErrMismatch, "call #1", tc.wrongText, tc.rightText)
				})
			})
		})
	}
}

type holder struct {
	broken  atomic.Pointer[error]
	drained func()
}

func (h *holder) Break(cause error) { h.broken.Store(&cause) }
func (h *holder) String() string    { return "graph captured at x.go:7" }
func (h *holder) Drain() {
	if h.drained != nil {
		h.drained()
	}
}

func TestHolders(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			live, garbage := &holder{}, &holder{}
			detach, err := w.comm.Attach(live)
			if err != nil {
				return err
			}
			defer detach()
			garbage.drained, err = w.comm.Attach(garbage)
			if err != nil {
				return err
			}
			err = wantErr(w.comm.Close(), nil, "in use by graph captured at x.go:7; close it first")
			if err != nil {
				return err
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if job.Rank() == 0 {
				if err := w.comm.Abort(errors.New("no more")); err != nil {
					return err
				}
				if p := live.broken.Load(); p == nil || !errors.Is(*p, nccl.ErrAborted) {
					return errors.New("Abort returned before the holder was broken")
				}
			}
			for live.broken.Load() == nil { // rank 1 learns of it when it looks
				if err := ctx.Err(); err != nil {
					return err
				}
				w.comm.Err()
				time.Sleep(time.Millisecond)
			}
			if garbage.broken.Load() != nil {
				return errors.New("a holder that had detached itself was broken")
			}
			return wantErr(*live.broken.Load(), nccl.ErrAborted, "by rank 0: no more")
		})
	})
}

func TestMeet(t *testing.T) {
	ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			me := w.comm.Rank()
			all, err := w.comm.Meet(ctx, []byte{byte(me)}, "a meeting")
			if err != nil {
				return err
			}
			if d := cmp.Diff(all, [][]byte{{0}, {1}, {2}}); d != "" {
				return errors.New(d)
			}
			// A lease meets by itself; one that a member left early does not disturb the next.
			for round := range 2 {
				restore, err := w.comm.SetGate(&gate{w: w})
				if err != nil {
					return err
				}
				for _, peer := range []int{0, 1, 2} {
					if round == 0 && me == 2 {
						break
					}
					if round == 0 && peer == 2 {
						continue
					}
					theirs, err := w.comm.MeetPair(ctx, peer, []byte{byte(10 + me)}, "a pair")
					if err != nil {
						return err
					}
					if !bytes.Equal(theirs, []byte{byte(10 + peer)}) {
						return fmt.Errorf("rank %d sent %v", peer, theirs)
					}
				}
				restore()
				restore()
			}
			if _, err := w.comm.MeetPair(ctx, (me+1)%3, nil, "a pair"); !errors.Is(err, nccl.ErrArgument) {
				return fmt.Errorf("pair outside of a lease: %v", err)
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			short, cancel := context.WithTimeout(ctx, time.Second) // rank 0 and 2 meet in it
			defer cancel()
			if me == 1 {
				return job.Barrier(ctx)
			}
			_, err = w.comm.Meet(short, nil, "a meeting that rank 1 misses")
			if err := wantErr(err, nil, "rank 1"); err != nil {
				return err
			}
			return errors.Join(w.comm.Err(), job.Barrier(ctx)) // the communicator works on
		})
	})
}
