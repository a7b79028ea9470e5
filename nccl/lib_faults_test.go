package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
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

// works shows that collectives work.
func works(w *world) error {
	b, done, err := openBuffers(w, 8192, false)
	defer done()
	if err != nil {
		return err
	}
	s := spec{op: nccl.OpAllReduce, count: 1000}
	ty := libTypes[libF32]
	if err := errors.Join(ty.write(w, b, s), ty.call(w, b, s)); err != nil {
		return err
	}
	return ty.verify(w, b, s)
}

// What members do differently in a capture is told before the library sees it, and the communicator works on.
func TestLibraryCapturedMismatch(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 16<<20, false)
			defer done()
			if err != nil {
				return err
			}
			private, err := cuda.Malloc[float32](w.dev, 4<<20)
			if err != nil {
				return err
			}
			defer private.Free()
			send, _ := cuda.SliceOf[float32](b.send, 0, 4<<20)
			recv, _ := cuda.SliceOf[float32](b.recv, 0, 4<<20)
			odd := job.Rank() == 1
			cases := []struct {
				name     string
				call     func(s *cuda.Stream) error
				sentinel error
				parts    []string
			}{
				{"count", func(s *cuda.Stream) error {
					k := send.Len()
					if odd {
						k /= 2
					}
					return nccl.AllReduce(w.comm, send.Slice(0, k), recv.Slice(0, k), nccl.Sum, s)
				}, nccl.ErrMismatch, []string{"rank 1"}},
				{"kind of memory", func(s *cuda.Stream) error {
					from := send
					if odd {
						from = private.All()
					}
					return nccl.AllReduce(w.comm, from, recv, nccl.Sum, s)
				}, nccl.ErrMixed, []string{"rank 1", "private memory"}},
				{"error on one", func(s *cuda.Stream) error {
					if odd {
						return errors.New("no data")
					}
					return nccl.AllReduce(w.comm, send, recv, nccl.Sum, s)
				}, nil, []string{"no data"}},
				{"allocation inside", func(s *cuda.Stream) error {
					if odd {
						if m, err := cuda.Malloc[float32](w.dev, 1024); err == nil {
							m.Free()
							return errors.New("allocated in a capture")
						}
					}
					return nccl.AllReduce(w.comm, send, recv, nccl.Sum, s)
				}, nil, []string{"capturing"}},
			}
			for _, tc := range cases {
				g, err := graphs.Capture(ctx, w.stream, tc.call, graphs.Comms(w.comm))
				if err == nil {
					g.Close()
				}
				if err := wantErr(err, tc.sentinel, tc.parts...); err != nil {
					return fmt.Errorf("%s: %w", tc.name, err)
				}
				if err := works(w); err != nil {
					return fmt.Errorf("after %s: %w", tc.name, err)
				}
			}
			return released(w)
		})
	}, nil)
}

// A graph that lives refuses Close and the free of its memory; replays go on; after its Close both work.
func TestLibraryLiveGraph(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			b, _, err := openBuffers(w, 16<<20, false)
			if err != nil {
				return err
			}
			s := spec{op: nccl.OpAllReduce, count: 1 << 20}
			ty := libTypes[libF32]
			g, err := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error { return ty.call(w, b, s) }, graphs.Comms(w.comm))
			if err != nil {
				return err
			}
			if err := wantErr(w.comm.Close(), nil, "graph captured at lib_faults_test.go"); err != nil {
				return err
			}
			var held *cuda.HeldError
			if err := b.send.Free(); !errors.As(err, &held) {
				return fmt.Errorf("free of a live graph's memory: %v", err)
			}
			if err := errors.Join(ty.write(w, b, s), g.Launch(w.stream), ty.verify(w, b, s)); err != nil {
				return err
			}
			// Close and free with a replay in flight: nothing is given back before it has ended.
			if err := errors.Join(g.Launch(w.stream), g.Close(), b.send.Free(), b.recv.Free(), w.stream.Synchronize(ctx)); err != nil {
				return err
			}
			if err := released(w); err != nil {
				return err
			}
			return works(w)
		})
	}, nil)
}

// An abort that does not come to an end holds up neither Close nor the next Init, which says so on all ranks.
func TestLibraryStuckAbort(t *testing.T) {
	dltest.Parallel(t)
	results := ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		m, err := dev.Alloc(4096, cuda.Shareable)
		if err != nil {
			return err
		}
		s, err := dev.NewStream()
		if err != nil {
			return err
		}
		c, err := nccl.Init(ctx, job, dev)
		if err != nil {
			return err
		}
		if job.Rank() == 0 {
			c.Abort(errors.New("enough"))
		} else {
			c.Close()
		}
		if err := job.Barrier(ctx); err != nil {
			return err
		}
		again, err := nccl.Init(ctx, job, dev)
		if err == nil {
			return errors.Join(errors.New("a second communicator: no error"), again.Close())
		}
		if err := wantErr(err, nil, "still occupied by communicator world"); err != nil {
			return err
		}
		// Nothing else asks the driver, which may not come back; what a program's defers do works.
		_, alone := nccl.InitConfig(ctx, job, dev, &nccl.Config{Ranks: []int{job.Rank()}})
		_, stream := dev.NewStream()
		_, alloc := cuda.Malloc[float32](dev, 8)
		for _, err := range []error{alone, stream, alloc} {
			if err := wantErr(err, nil, "still occupied by communicator world"); err != nil {
				return err
			}
		}
		return errors.Join(m.Free(), s.Close(), dev.Close(), job.Barrier(ctx))
	}, append(fakeLibraries(t), "FAKE_NCCL=stuck")...)
	allWell(t, results)
}

// What Init refuses, on all ranks alike, and how it ends in a library that does not come back. TestLibraryInitMistakes has what one rank does wrong.
func TestLibraryInitRefuses(t *testing.T) {
	dltest.Parallel(t)
	all := func(parts ...string) func(*testing.T, []ranktest.Result) {
		return func(t *testing.T, results []ranktest.Result) {
			t.Helper()
			for _, r := range results {
				for _, p := range parts {
					if !strings.Contains(r.Err, p) {
						t.Errorf("rank %d: error %q has no %q", r.Rank, r.Err, p)
					}
				}
			}
		}
	}
	open := func(ctx context.Context, job *bootstrap.Job, token string, cfg *nccl.Config) error {
		dev, err := cuda.Open(token)
		if err != nil {
			return err
		}
		c, err := nccl.InitConfig(ctx, job, dev, cfg)
		if err == nil {
			err = errors.Join(errors.New("no error"), c.Close())
		}
		return errors.Join(err, dev.Close())
	}
	own := func(job *bootstrap.Job) string { return dltest.DeviceOf(job.LocalRank()) }
	t.Run("refused setting", func(t *testing.T) {
		onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error { return open(ctx, job, own(job), nil) },
			all("NCCL_COMM_ID", "every unique id becomes the same one"), "NCCL_COMM_ID=127.0.0.1:5000")
	})
	// Both are in the library, which does not bring them together.
	lost := func(ctx context.Context, job *bootstrap.Job) error {
		err := open(ctx, job, own(job), &nccl.Config{Timeout: time.Second})
		return errors.Join(err, job.Barrier(ctx)) // none leaves before the other has seen it
	}
	want := func(t *testing.T, results []ranktest.Result) {
		for r, got := range results {
			if !strings.Contains(got.Err, fmt.Sprint("rank ", 1-r)) || !strings.Contains(got.Err, "deadline") {
				t.Errorf("rank %d: error %q", r, got.Err)
			}
		}
	}
	t.Run("the library hangs", func(t *testing.T) {
		want(t, ranktest.RunProcesses(t, 2, lost, append(fakeLibraries(t), "FAKE_NCCL=lost")...))
	})
	t.Run("no unique id", func(t *testing.T) {
		all("no address for the root")(t, ranktest.RunProcesses(t, 2, lost, append(fakeLibraries(t), "FAKE_NCCL=no-id")...))
	})
}

// The end of a member that is to make the unique id is told at once by those that wait for it, whatever other ranks of the job do.
func TestLibraryIDDies(t *testing.T) {
	dltest.Parallel(t)
	results := ranktest.RunProcesses(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		if job.Rank() == 0 { // is no member, and goes on
			for _, key := range []string{"2", "3"} {
				if _, err := job.Get(ctx, key); err != nil {
					return err
				}
			}
			return nil
		}
		dev, err := cuda.Open(dltest.DeviceOf(job.LocalRank()))
		if err != nil {
			return err
		}
		c, err := nccl.InitConfig(ctx, job, dev, &nccl.Config{Name: "part", Ranks: []int{1, 2, 3}, Timeout: 30 * time.Second})
		if err == nil {
			return errors.Join(errors.New("no error"), c.Close(), dev.Close())
		}
		return errors.Join(wantErr(err, nccl.ErrRank, "communicator part", "rank 1", "SIGKILL"), job.Put(ctx, fmt.Sprint(job.Rank()), nil), dev.Close())
	}, append(fakeLibraries(t), "FAKE_NCCL=id-dies")...)
	if results[1].Code != -1 {
		t.Errorf("rank 1, which was to be killed: %v", results[1])
	}
	results[1] = results[0]
	allWell(t, results)
}

// What the library says of the network is the cause where no rank has ended. A watch sees it while something is enqueued.
func TestLibraryNetworkError(t *testing.T) {
	torn := tornVar + "=" + filepath.Join(t.TempDir(), "torn")
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		mem, err := dev.Alloc(4<<10, cuda.Shareable)
		if err != nil {
			return err
		}
		buf, err := cuda.SliceOf[float32](mem, 0, 1<<10)
		if err != nil {
			return err
		}
		err = withComm(ctx, job, dev, nil, func(w *world) error {
			a := &attempt{world: w}
			var err error
			if job.Rank() == 1 {
				tear()
			} else {
				err = nccl.AllReduce(w.comm, buf, buf, nccl.Sum, w.stream)
			}
			return wantErr(a.fails(err), nccl.ErrAborted, "by rank 0: asynchronous error", "ncclRemoteError 6")
		})
		return errors.Join(err, mem.Free(), dev.Close())
	}, append(fakeLibraries(t), torn)...))
}
