package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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

// farJob is a rank of a job on several hosts, with its device.
type farJob struct {
	ctx context.Context
	job *bootstrap.Job
	dev *cuda.Device
}

// farWorld is a world with one send and one receive buffer.
type farWorld struct {
	*world
	send, recv cuda.Slice[float32]
}

func (w *farWorld) sum(red nccl.RedOp) error {
	return nccl.AllReduce(w.comm, w.send, w.recv, red, w.stream)
}

// capture makes a graph of an all-reduce.
func (w *farWorld) capture() (*graphs.Graph, error) {
	return graphs.Capture(w.ctx, w.stream, func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, w.send, w.recv, nccl.Sum, s) }, graphs.Comms(w.comm))
}

// end waits, d at most, for all that is enqueued and then for the communicator's failure.
func (w *farWorld) end(err error, d time.Duration) error {
	ctx, cancel := context.WithTimeout(w.ctx, d)
	defer cancel()
	if err == nil {
		err = w.stream.Synchronize(ctx)
	}
	for err == nil && ctx.Err() == nil {
		time.Sleep(5 * time.Millisecond)
		err = w.comm.Err()
	}
	return err
}

// giveUp waits, again and again, until the error of a wait that is given up has the parts in it: what is known of other hosts may come late.
func (w *farWorld) giveUp(parts ...string) error {
	var err error
	for end := time.Now().Add(room); time.Now().Before(end); {
		ctx, cancel := context.WithTimeout(w.ctx, 300*time.Millisecond)
		err = wantErr(w.stream.Synchronize(ctx), context.DeadlineExceeded, parts...)
		cancel()
		if err == nil {
			return nil
		}
	}
	return err
}

// onFar runs f on ranks of several hosts: on the host platform, and on the test's library. beside is done in the test's process, and then the signal is given.
func onFar(t *testing.T, nodeOf []int, f func(j *farJob) error, wants func(t *testing.T, results []ranktest.Result), beside func(hosts []ranktest.Host)) {
	t.Helper()
	run := func(t *testing.T, open func(job *bootstrap.Job) (*cuda.Device, error), env ...string) {
		signal := filepath.Join(t.TempDir(), "go on")
		wants(t, ranktest.RunHostsBeside(t, nodeOf, func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := open(job)
			if err != nil {
				return err
			}
			return errors.Join(f(&farJob{ctx, job, dev}), dev.Close())
		}, func(hosts []ranktest.Host) {
			if beside != nil {
				beside(hosts)
			}
			if err := os.WriteFile(signal, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, append(env, signalVar+"="+signal)...))
	}
	// At once: they wait for deadlines, mostly.
	t.Run("host", func(t *testing.T) {
		t.Parallel()
		run(t, func(*bootstrap.Job) (*cuda.Device, error) { return cuda.Open("host") })
	})
	t.Run("library", func(t *testing.T) {
		t.Parallel()
		run(t, func(job *bootstrap.Job) (*cuda.Device, error) { return cuda.Open(strconv.Itoa(job.Rank())) }, fakeLibraries(t)...)
	})
}

// with runs f on a communicator on which one broadcast has been done.
func (j *farJob) with(name string, f func(w *farWorld) error) error {
	return j.withConfig(nccl.Config{Name: name}, f)
}

func (j *farJob) withConfig(cfg nccl.Config, f func(w *farWorld) error) error {
	err := withComm(j.ctx, j.job, j.dev, &cfg, func(w *world) error {
		b, done, err := openBuffers(w, 4096, false)
		defer done()
		if err != nil {
			return err
		}
		fw := &farWorld{world: w}
		fw.send, _ = cuda.SliceOf[float32](b.send, 0, 8)
		fw.recv, _ = cuda.SliceOf[float32](b.recv, 0, 8)
		if err := errors.Join(nccl.Broadcast(w.comm, fw.send, fw.recv, 0, w.stream), w.stream.Synchronize(j.ctx)); err != nil {
			return err
		}
		defer w.comm.Close() // before the buffers go
		return f(fw)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", cfg.Name, err)
	}
	return nil
}

// A wait that is given up says which ranks have not come, on which host they are, and where they were last. To be late is no fault.
func TestFarLate(t *testing.T) {
	dltest.Parallel(t)
	onFar(t, []int{0, 0, 1, 1}, func(j *farJob) error {
		return j.with("world", func(w *farWorld) error {
			const late = "rank 3 (host host1; last enqueued #1, broadcast of 8 float32, from rank 0; done: 1)"
			if w.job.Rank() != 3 {
				if err := w.sum(nccl.Sum); err != nil {
					return err
				}
				if err := w.giveUp("all-reduce #2", "waits for "+late); err != nil {
					return err
				}
			}
			if _, err := w.job.AllGather(w.ctx, nil); err != nil {
				return err
			}
			if w.job.Rank() == 3 {
				if err := w.sum(nccl.Sum); err != nil {
					return err
				}
			}
			if err := w.stream.Synchronize(w.ctx); err != nil {
				return err
			}
			// An abort because of a deadline says it, too.
			if w.job.Rank() == 0 {
				ctx, cancel := context.WithTimeout(w.ctx, 500*time.Millisecond)
				defer cancel()
				err := w.sum(nccl.Sum)
				if err == nil {
					err = w.stream.Synchronize(ctx)
				}
				if err := wantErr(err, context.DeadlineExceeded); err != nil {
					return err
				}
				w.comm.Abort(err)
			}
			return wantErr(w.end(nil, room), nccl.ErrAborted, "aborted by rank 0", "rank 3 (host host1; last enqueued #")
		})
	}, allWell, nil)
}

// What a rank of another host does otherwise is an error on all within about a second, which names it: also where the library, and so the wait, notices nothing.
func TestFarMistakes(t *testing.T) {
	dltest.Parallel(t)
	eager := func(w *farWorld) error { return w.sum(nccl.Sum) }
	capture := func(w *farWorld) error {
		g, err := w.capture()
		if g != nil {
			err = errors.Join(err, g.Close())
		}
		return err
	}
	launch := func(w *farWorld, gs ...*graphs.Graph) (err error) {
		for _, g := range gs {
			if err == nil {
				err = g.Launch(w.stream)
			}
		}
		return err
	}
	type does func(w *farWorld, g []*graphs.Graph) error
	plain := func(f func(w *farWorld) error) does {
		return func(w *farWorld, _ []*graphs.Graph) error { return f(w) }
	}
	for _, nodeOf := range [][]int{{0, 1}, {0, 0, 1, 2, 3}} {
		t.Run(fmt.Sprint(nodeOf), func(t *testing.T) {
			culprit := len(nodeOf) / 2
			by := fmt.Sprintf("rank %d", culprit)
			onFar(t, nodeOf, func(j *farJob) error {
				for _, tc := range []struct {
					name         string
					right, wrong does
					graphs       int
					is           error
					text         []string
				}{
					{name: "another operation", is: nccl.ErrMismatch, text: []string{"call #5: ", by + ": all-reduce of 8 float32, max", ": all-reduce of 8 float32, sum"},
						right: func(w *farWorld, _ []*graphs.Graph) (err error) {
							for range 9 {
								err = errors.Join(err, w.sum(nccl.Sum))
							}
							return err
						},
						wrong: func(w *farWorld, _ []*graphs.Graph) (err error) {
							for i := range 9 {
								red := nccl.Sum
								if i == 3 {
									red = nccl.Max
								}
								err = errors.Join(err, w.sum(red))
							}
							return err
						}},
					{name: "eager instead of capture", right: plain(capture), wrong: plain(eager), is: nccl.ErrMismatch, text: []string{by + ": all-reduce of 8 float32, sum", ": a capture"}},
					{name: "capture instead of eager", right: plain(eager), wrong: plain(capture), is: nccl.ErrMismatch, text: []string{by + ": a capture", ": all-reduce of 8 float32, sum"}},
					{name: "another graph", graphs: 2, is: nccl.ErrMismatch, text: []string{by + ": ", "replay of graph"},
						right: func(w *farWorld, g []*graphs.Graph) error { return launch(w, g[0], g[1]) },
						wrong: func(w *farWorld, g []*graphs.Graph) error { return launch(w, g[1], g[0]) }},
					{name: "closes", right: plain(eager), is: nccl.ErrClosed, text: []string{by + " closed communicator closes after call #1"},
						wrong: plain(func(w *farWorld) error {
							if err := w.comm.Close(); err != nil {
								return err
							}
							return &nccl.Error{Op: by + " closed communicator closes after call #1", Err: nccl.ErrClosed}
						})},
				} {
					if err := j.with(tc.name, func(w *farWorld) error {
						var gs []*graphs.Graph
						for range tc.graphs {
							g, err := w.capture()
							if err != nil {
								return err
							}
							defer g.Close()
							gs = append(gs, g)
						}
						if err := j.job.Barrier(j.ctx); err != nil {
							return err
						}
						start := time.Now()
						do := tc.right
						if j.job.Rank() == culprit {
							do = tc.wrong
						}
						err := w.end(do(w, gs), room)
						if took := time.Since(start); took > room {
							return fmt.Errorf("after %v: %v", took, err)
						}
						return wantErr(err, tc.is, tc.text...)
					}); err != nil {
						return err
					}
				}
				return nil
			}, allWell, nil)
		})
	}
}

// The host of a rank for which the others wait goes away: they have an error that names it.
func TestFarHostLost(t *testing.T) {
	nodeOf := []int{0, 0, 1, 1}
	onFar(t, nodeOf, func(j *farJob) error {
		return j.with("world", func(w *farWorld) error {
			if w.job.Rank() >= 2 {
				if w.job.Rank() == 2 {
					w.sum(nccl.Sum)
				}
				<-w.ctx.Done() // killed before
				return w.ctx.Err()
			}
			err := w.end(w.sum(nccl.Sum), room)
			return wantErr(err, nccl.ErrRank, "host1")
		})
	}, func(t *testing.T, results []ranktest.Result) {
		allWell(t, results[:2])
	}, func(hosts []ranktest.Host) {
		awaitReport(t, hosts, nodeOf, "rank 3 of 4 (host h1) has not entered all-reduce #2")
		if err := hosts[1].Kill(); err != nil {
			t.Error(err)
		}
	})
}

// An init of the library that fails on one host's rank ends on the others.
func TestFarInitFails(t *testing.T) {
	results := ranktest.RunHosts(t, []int{0, 0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := cuda.Open(strconv.Itoa(job.Rank()))
		if err != nil {
			return err
		}
		start := time.Now()
		c, err := nccl.InitConfig(ctx, job, dev, &nccl.Config{Timeout: 2 * room})
		if took := time.Since(start); took > room {
			err = errors.Join(err, fmt.Errorf("after %v", took))
		}
		if err == nil {
			err = errors.Join(errors.New("no error"), c.Close())
		}
		return errors.Join(err, dev.Close())
	}, append(fakeLibraries(t), "FAKE_NCCL=init-fails")...)
	for _, r := range results {
		if r.Code != 1 || strings.Contains(r.Err, "after ") || r.Rank < 2 && !strings.Contains(r.Err, "rank 2") {
			t.Errorf("rank %d: %q", r.Rank, r.Err)
		}
	}
}

// Every wait of this package and of the job for ranks that do not come, between hosts, names them and their host.
func TestFarMissing(t *testing.T) {
	dltest.Parallel(t)
	onFar(t, []int{0, 0, 1, 1}, func(j *farJob) error {
		const missing = "rank 3 (host host1)"
		patience := time.Second // in which the others are there
		if raceEnabled {
			patience *= 2
		}
		late := j.job.Rank() == 3
		short := func(f func(ctx context.Context) error) error {
			// Together: who comes to it later than the deadline would be missing, too.
			if err := j.job.Barrier(j.ctx); err != nil || late {
				return err
			}
			ctx, cancel := context.WithTimeout(j.ctx, patience)
			defer cancel()
			return wantErr(f(ctx), nil, missing)
		}
		for _, tc := range []struct {
			name string
			does func(ctx context.Context) error
		}{
			{"barrier", func(ctx context.Context) error {
				g, err := j.job.GroupOnce("late", []int{0, 1, 2, 3})
				if err != nil {
					return err
				}
				defer g.Close()
				return g.Barrier(ctx)
			}},
			{"init", func(ctx context.Context) error {
				c, err := nccl.InitConfig(j.ctx, j.job, j.dev, &nccl.Config{Name: "late", Timeout: patience})
				if err == nil {
					err = errors.Join(errors.New("no error"), c.Close())
				}
				return err
			}},
		} {
			if err := short(tc.does); err != nil {
				return fmt.Errorf("%s: %w", tc.name, err)
			}
		}
		for _, tc := range []struct {
			name string
			does func(ctx context.Context, w *farWorld) error
		}{
			{"split", func(ctx context.Context, w *farWorld) error {
				_, err := w.comm.Split(ctx, 0, 0)
				return err
			}},
			{"shrink", func(ctx context.Context, w *farWorld) error {
				_, err := w.comm.Shrink(ctx, nil)
				return err
			}},
			{"window", func(ctx context.Context, w *farWorld) error {
				m, err := w.dev.Alloc(4096, cuda.Shareable)
				if err != nil {
					return err
				}
				defer m.Free()
				_, err = w.comm.Window(ctx, cuda.Range{Mem: m, Len: 4096})
				return err
			}},
			{"capture", func(ctx context.Context, w *farWorld) error {
				_, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, w.send, w.recv, nccl.Sum, s) }, graphs.Comms(w.comm))
				return err
			}},
			{"strict", nil},
		} {
			cfg := nccl.Config{Name: tc.name}
			if tc.does == nil {
				cfg.Check, cfg.Timeout = nccl.Strict, 3*time.Second // also for its Init
			}
			if err := j.withConfig(cfg, func(w *farWorld) error {
				err := short(func(ctx context.Context) error {
					if tc.does == nil {
						return w.sum(nccl.Sum)
					}
					return tc.does(ctx, w)
				})
				return errors.Join(err, j.job.Barrier(j.ctx)) // or the late one's Close would end the waits
			}); err != nil {
				return err
			}
		}
		return nil
	}, allWell, nil)
}

// Messages between hosts that the library loses, or waits for, are told as those within one.
func TestFarMessages(t *testing.T) {
	dltest.Parallel(t)
	send := func(w *farWorld, n, to int) error { return nccl.Send(w.comm, w.send.Slice(0, n), to, w.stream) }
	recv := func(w *farWorld, n, from int) error { return nccl.Recv(w.comm, w.recv.Slice(0, n), from, w.stream) }
	results := ranktest.RunHosts(t, []int{0, 0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := cuda.Open(strconv.Itoa(job.Rank()))
		if err != nil {
			return err
		}
		j := &farJob{ctx, job, dev}
		me := job.Rank()
		for _, tc := range []struct {
			name string
			does func(w *farWorld) error
		}{
			{"right", func(w *farWorld) (err error) {
				for i := range 600 { // more than a ledger keeps
					err = errors.Join(err, map[int]func() error{
						0: func() error { return send(w, 1+i%8, 2) },
						1: func() error { return nil },
						2: func() error { return recv(w, 1+i%8, 0) },
					}[me]())
					if i%50 == 0 {
						err = errors.Join(err, w.stream.Synchronize(ctx))
					}
				}
				err = errors.Join(err, w.stream.Synchronize(ctx), job.Barrier(ctx))
				time.Sleep(600 * time.Millisecond) // the watchers look
				return errors.Join(err, w.comm.Err(), job.Barrier(ctx))
			}},
			{"late", func(w *farWorld) (err error) {
				switch me {
				case 0:
					err = errors.Join(recv(w, 8, 2), w.giveUp(
						"waits for rank 2 (host host1) for message #1, recv of 8 float32, from rank 2 (last enqueued #1, broadcast of 8 float32, from rank 0"), job.Barrier(ctx))
				case 1:
					err = job.Barrier(ctx)
				case 2:
					err = errors.Join(job.Barrier(ctx), send(w, 8, 0))
				}
				return errors.Join(err, w.stream.Synchronize(ctx), job.Barrier(ctx))
			}},
			{"another count", func(w *farWorld) (err error) {
				switch me {
				case 0:
					err = send(w, 8, 2)
				case 2:
					err = recv(w, 7, 0)
				}
				return wantErr(w.end(err, room), nccl.ErrMismatch, "message #1: rank 0: send of 8 float32, to rank 2; rank 2: recv of 7 float32, from rank 0")
			}},
			{"no other end", func(w *farWorld) (err error) {
				if me == 2 {
					return w.comm.Close()
				}
				if me == 0 {
					err = send(w, 8, 2)
				}
				return wantErr(w.end(err, room), nccl.ErrClosed, "rank 2 closed communicator no other end after call #1 and does not meet rank 0's message #1, send of 8 float32, to rank 2")
			}},
		} {
			if err := errors.Join(j.with(tc.name, tc.does), job.Barrier(ctx)); err != nil {
				return err
			}
		}
		return dev.Close()
	}, fakeLibraries(t)...)
	allWell(t, results)
}
