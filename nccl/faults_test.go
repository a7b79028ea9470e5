package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// outcome is the first error of a call, or of the wait for it.
func outcome(ctx context.Context, s *cuda.Stream, callErr error) error {
	err := s.Synchronize(ctx) // also after a failed call: what was enqueued before it ends with the failure
	if callErr != nil {
		return callErr
	}
	return err
}

// What members do differently, and what all of them must be told.
func TestMismatch(t *testing.T) {
	type args struct {
		w          *world
		send, recv cuda.Slice[float32] // 3 x 12 elements
	}
	sum := func(a args, count int) error {
		return nccl.AllReduce(a.w.comm, a.send.Slice(0, count), a.recv.Slice(0, count), nccl.Sum, a.w.stream)
	}
	ints := func(a args, count int) error {
		send, err := cuda.SliceOf[int32](a.send.Range().Mem, 0, count)
		if err != nil {
			return err
		}
		recv, err := cuda.SliceOf[int32](a.recv.Range().Mem, 0, count)
		if err != nil {
			return err
		}
		return nccl.AllReduce(a.w.comm, send, recv, nccl.Sum, a.w.stream)
	}
	cases := []struct {
		name  string
		right func(a args) error
		wrong func(a args) error // on the culprit
		parts []string           // CULPRIT and FIRST stand for the ranks
	}{
		{"count", func(a args) error { return sum(a, 12) }, func(a args) error { return sum(a, 11) },
			[]string{"all-reduce of 11 float32, sum", "all-reduce of 12 float32, sum"}},
		{"zero count", func(a args) error { return sum(a, 12) }, func(a args) error { return sum(a, 0) },
			[]string{"all-reduce of 0 float32, sum", "all-reduce of 12 float32, sum"}},
		{"type", func(a args) error { return sum(a, 12) }, func(a args) error { return ints(a, 12) },
			[]string{"all-reduce of 12 int32, sum", "all-reduce of 12 float32, sum"}},
		{"reduction", func(a args) error { return sum(a, 12) }, func(a args) error {
			return nccl.AllReduce(a.w.comm, a.send, a.recv, nccl.Max, a.w.stream)
		}, []string{"float32, max", "float32, sum"}},
		{"operation", func(a args) error { return sum(a, 12) }, func(a args) error {
			return nccl.ReduceScatter(a.w.comm, a.send.Slice(0, 36), a.recv.Slice(0, 12), nccl.Sum, a.w.stream)
		}, []string{"reduce-scatter of 12 float32, sum", "all-reduce of 12 float32, sum"}},
		{"root", func(a args) error { return nccl.Broadcast(a.w.comm, a.send, a.recv, 0, a.w.stream) },
			func(a args) error { return nccl.Broadcast(a.w.comm, a.send, a.recv, 1, a.w.stream) },
			[]string{"broadcast of 36 float32, from rank 1", "broadcast of 36 float32, from rank 0"}},
		{"order", func(a args) error {
			return errors.Join(sum(a, 12), nccl.Broadcast(a.w.comm, a.send, a.recv, 0, a.w.stream))
		}, func(a args) error {
			return errors.Join(nccl.Broadcast(a.w.comm, a.send, a.recv, 0, a.w.stream), sum(a, 12))
		}, []string{"broadcast of 36 float32, from rank 0", "all-reduce of 12 float32, sum"}},
		{"group", func(a args) error {
			return nccl.Group(func() error { return errors.Join(sum(a, 12), sum(a, 3)) }, a.w.comm)
		}, func(a args) error {
			return nccl.Group(func() error { return errors.Join(sum(a, 12), sum(a, 4)) }, a.w.comm)
		}, []string{"all-reduce of 3 float32, sum, call 2 of its group", "all-reduce of 4 float32, sum, call 2 of its group"}},
		{"group or not", func(a args) error { return sum(a, 12) }, func(a args) error {
			return nccl.Group(func() error { return errors.Join(sum(a, 12), sum(a, 4)) }, a.w.comm)
		}, []string{"a group of 2 calls", "all-reduce of 12 float32, sum"}},
	}
	for _, tc := range cases {
		for _, culprit := range []int{0, 1, 2} {
			for _, registered := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/culprit=%d/registered=%v", tc.name, culprit, registered), func(t *testing.T) {
					ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
						return with(ctx, job, nil, func(w *world) error {
							b, done, err := openBuffers(w, 4096, registered)
							defer done()
							if err != nil {
								return err
							}
							a := args{w: w}
							a.send, _ = cuda.SliceOf[float32](b.send, 0, 36)
							a.recv, _ = cuda.SliceOf[float32](b.recv, 0, 36)
							for i := range a.recv.Host() {
								a.recv.Host()[i] = 42
							}
							do := tc.right
							if job.Rank() == culprit {
								do = tc.wrong
							}
							if err := job.Barrier(ctx); err != nil { // all are ready before one fails
								return err
							}
							parts := append([]string{fmt.Sprintf("rank %d", culprit)}, tc.parts...)
							if err := wantErr(outcome(ctx, w.stream, do(a)), nccl.ErrMismatch, parts...); err != nil {
								return err
							}
							for i, v := range a.recv.Host() {
								if v != 42 {
									return fmt.Errorf("element %d was written: %v", i, v)
								}
							}
							// The failure stays.
							if err := wantErr(w.comm.Err(), nccl.ErrMismatch); err != nil {
								return err
							}
							return wantErr(sum(a, 12), nccl.ErrMismatch)
						})
					})
				})
			}
		}
	}
}

// A registered buffer on one rank and none on another: an error on all that names ranks and buffers, and nothing moves.
func TestMixedRegistration(t *testing.T) {
	cases := map[string]struct{ send, recv func(rank int) bool }{
		"one rank not":        {func(r int) bool { return r != 1 }, func(r int) bool { return r != 1 }},
		"one rank only":       {func(r int) bool { return r == 2 }, func(r int) bool { return r == 2 }},
		"send only":           {func(r int) bool { return true }, func(r int) bool { return false }},
		"recv of one missing": {func(r int) bool { return true }, func(r int) bool { return r != 0 }},
	}
	for name, tc := range cases {
		for _, op := range collectives {
			t.Run(fmt.Sprintf("%s/%v", name, op), func(t *testing.T) {
				ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						b, done, err := openBuffers(w, 4096, false)
						defer done()
						if err != nil {
							return err
						}
						if tc.send(job.Rank()) {
							r, err := w.comm.Register(b.send)
							if err != nil {
								return err
							}
							defer r.Close()
						}
						if tc.recv(job.Rank()) {
							r, err := w.comm.Register(b.recv)
							if err != nil {
								return err
							}
							defer r.Close()
						}
						// Of rooted operations some ranks use one buffer only: then a case may be no mix.
						used := func(r int, send bool) bool {
							return !(op == nccl.OpReduce && !send && r != 0 || op == nccl.OpBroadcast && send && r != 0)
						}
						with, without := false, false
						for r := range 3 {
							with = with || used(r, true) && tc.send(r) || used(r, false) && tc.recv(r)
							without = without || used(r, true) && !tc.send(r) || used(r, false) && !tc.recv(r)
						}
						s := spec{op: op, count: 12}
						err = outcome(ctx, w.stream, types[6].call(w, b, s, w.stream))
						if !with || !without {
							return errors.Join(err, types[6].verify(w, b, s))
						}
						if err := wantErr(err, nccl.ErrMixed, "rank 0: ", "rank 1: ", "not registered", "allocation"); err != nil {
							return err
						}
						for i, v := range (cuda.Range{Mem: b.recv, Len: 4096}).Bytes() {
							if v != 0 {
								return fmt.Errorf("byte %d was written: %v", i, v)
							}
						}
						return nil
					})
				})
			})
		}
	}
}

// A member that comes late is no error, however late; one that ends, leaves or closes is, and is named.
func TestEnds(t *testing.T) {
	allReduce := func(w *world) (err error) {
		b, err := nccl.Alloc[float32](w.dev, 4)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, b.Free()) }()
		return outcome(w.ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream))
	}
	const culprit = 1
	cases := []struct {
		name     string
		do       func(w *world) error // on the culprit, after a first all-reduce
		sentinel error
		parts    []string
	}{
		{"dies", func(w *world) error { ranktest.Kill(w.job, "killed by SIGKILL"); return nil }, nccl.ErrRank, []string{"rank 1", "killed by SIGKILL"}},
		{"leaves", func(w *world) error { return w.job.Close() }, nccl.ErrRank, []string{"rank 1 left the job without closing communicator world"}},
		{"closes", func(w *world) error { return w.comm.Close() }, nccl.ErrClosed, []string{"rank 1 closed communicator world after call #1"}},
		{"aborts", func(w *world) error { return w.comm.Abort(errors.New("out of data")) }, nccl.ErrAborted, []string{"by rank 1", "out of data"}},
		{"stream fails", func(w *world) error {
			b, err := nccl.Alloc[float32](w.dev, 4)
			if err != nil {
				return err
			}
			k, err := cuda.NewKernel(w.dev, cuda.KernelSpec[int]{Name: "bad", Host: func(cuda.Grid, int, int, int) { panic("division by zero") }})
			if err != nil {
				return err
			}
			if err := k.Launch(w.stream, cuda.Grid{N: 1}, 0); err != nil {
				return err
			}
			err = outcome(w.ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream))
			b.Free()
			return wantErr(err, nil, "division by zero")
		}, nccl.ErrAborted, []string{"by rank 1", "division by zero"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			// Kill and Close of a job are an error in Run, and the failed kernel's device is: the culprit does not return what they give.
			var others sync.WaitGroup // the culprit's defers wait: a Close is a better end than a death
			others.Add(2)
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				var inner error
				if job.Rank() != culprit {
					defer others.Done()
				}
				outer := with(ctx, job, nil, func(w *world) error {
					if inner = errors.Join(allReduce(w), job.Barrier(ctx)); inner != nil {
						return nil
					}
					if job.Rank() == culprit {
						inner = tc.do(w)
						others.Wait()
						return nil
					}
					start := time.Now()
					err := allReduce(w)
					if took := time.Since(start); took > room {
						inner = fmt.Errorf("the error came after %v: %v", took, err)
						return nil
					}
					inner = wantErr(err, tc.sentinel, tc.parts...)
					if inner == nil {
						inner = wantErr(w.comm.Err(), tc.sentinel, tc.parts...)
					}
					if tc.sentinel == nccl.ErrRank && inner == nil {
						if _, ok := errors.AsType[*bootstrap.RankError](err); !ok {
							inner = fmt.Errorf("no *bootstrap.RankError in %v", err)
						}
					}
					return nil
				})
				if job.Rank() == culprit {
					return inner
				}
				return errors.Join(inner, outer)
			})
		})
	}
}

// A deadline names the member that has not come, and what it did last; the operation stays and is done when it comes.
func TestDeadline(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[float32](w.dev, 4)
			if err != nil {
				return err
			}
			defer b.Free()
			if job.Rank() == 0 {
				if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
					return err
				}
				short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
				defer cancel()
				if err := wantErr(w.stream.Synchronize(short), context.DeadlineExceeded, "all-reduce #1 of 4 float32 on communicator world: waits for rank 1 (has enqueued no collective)"); err != nil {
					return err
				}
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if job.Rank() == 1 {
				if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
					return err
				}
			}
			return w.stream.Synchronize(ctx)
		})
	})
}

func TestArguments(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			other, err := cuda.Open("host")
			if err != nil {
				return err
			}
			defer other.Close()
			ob, err := nccl.Alloc[float32](other, 8)
			if err != nil {
				return err
			}
			defer ob.Free()
			os, err := other.NewStream()
			if err != nil {
				return err
			}
			defer os.Close()
			b, err := nccl.Alloc[float32](w.dev, 64)
			if err != nil {
				return err
			}
			defer b.Free()
			freed, err := nccl.Alloc[float32](w.dev, 8)
			if err != nil {
				return err
			}
			freed.Free()
			private, err := cuda.Malloc[float32](w.dev, 8)
			if err != nil {
				return err
			}
			defer private.Free()
			c, s := w.comm, w.stream
			at := func(i, j int) cuda.Slice[float32] { return b.Slice(i, j) }
			_, regErr := c.Register(private.Memory())
			_, regOther := c.Register(ob.Memory())
			cases := map[string]error{
				"recv 7":                          nccl.AllReduce(c, at(0, 8), at(8, 15), nccl.Sum, s),
				"overlap":                         nccl.AllReduce(c, at(0, 8), at(4, 12), nccl.Sum, s),
				"unknown reduction 9":             nccl.AllReduce(c, at(0, 8), at(8, 16), nccl.RedOp(9), s),
				"no stream":                       nccl.AllReduce(c, at(0, 8), at(8, 16), nccl.Sum, nil),
				"the stream is of another device": nccl.AllReduce(c, at(0, 8), at(8, 16), nccl.Sum, os),
				"is of another device":            nccl.AllReduce(c, ob.All(), at(8, 16), nccl.Sum, s),
				"was freed":                       nccl.AllReduce(c, freed.All(), at(8, 16), nccl.Sum, s),
				"not 2 ranks x 8":                 nccl.AllGather(c, at(0, 8), at(8, 16), s),
				"not 2 ranks x 4":                 nccl.ReduceScatter(c, at(0, 7), at(8, 12), nccl.Sum, s),
				"in place send is part":           nccl.AllGather(c, at(1, 9), at(0, 16), s),
				"in place recv is part":           nccl.ReduceScatter(c, at(0, 16), at(1, 9), nccl.Sum, s),
				"root 2":                          nccl.Broadcast(c, at(0, 8), at(8, 16), 2, s),
				"root -1":                         nccl.Reduce(c, at(0, 8), at(8, 16), nccl.Sum, -1, s),
				"peer 5":                          nccl.Send(c, at(0, 8), 5, s),
				"without a recv":                  nccl.Send(c, at(0, 8), job.Rank(), s),
				"without a send":                  nccl.Recv(c, at(0, 8), job.Rank(), s),
				"nccl.Alloc":                      regErr,
				"device than the communicator":    regOther,
			}
			for part, err := range cases {
				if err := wantErr(err, nccl.ErrArgument, part); err != nil {
					return err
				}
			}
			// Nothing of it has reached the others.
			return outcome(ctx, s, nccl.AllReduce(c, at(0, 8), at(8, 16), nccl.Sum, s))
		})
	})
}

// What Init refuses.
func TestInit(t *testing.T) {
	t.Run("check modes differ", func(t *testing.T) {
		ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			cfg := &nccl.Config{Check: nccl.CheckMode(job.Rank())}
			return wantErr(with(ctx, job, cfg, func(*world) error { return nil }), nccl.ErrMismatch, "check mode")
		})
	})
	t.Run("a member never comes", func(t *testing.T) {
		ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
			if err := job.Barrier(ctx); err != nil { // who comes late to Init would be missing, too
				return err
			}
			if job.Rank() == 2 {
				return job.Barrier(ctx)
			}
			err := with(ctx, job, &nccl.Config{Timeout: 2 * time.Second}, func(*world) error { return nil })
			return errors.Join(wantErr(err, nil, "rank 2"), job.Barrier(ctx))
		})
	})
	t.Run("a member dies", func(t *testing.T) {
		ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
			if job.Rank() == 2 {
				ranktest.Kill(job, "killed by SIGSEGV")
				return nil
			}
			err := with(ctx, job, nil, func(*world) error { return nil })
			return wantErr(err, nil, "rank 2", "SIGSEGV")
		})
	})
	for leaver := range 3 {
		t.Run(fmt.Sprintf("rank %d leaves", leaver), func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				if job.Rank() == leaver {
					return nil // its job is closed
				}
				err := with(ctx, job, nil, func(*world) error { return nil })
				return wantErr(err, nil, fmt.Sprintf("rank %d", leaver), "left the job")
			})
		})
	}
	// Who comes when that has ended another member, too, gets the first of the two as the cause.
	for _, dies := range []bool{true, false} {
		t.Run(fmt.Sprintf("a late member, dies %t", dies), func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				cause := "left the job"
				if dies {
					cause = "killed by SIGSEGV"
				}
				ended := func(rank int) error {
					for end := time.Now().Add(room); job.RankErr(rank) == nil; time.Sleep(time.Millisecond) {
						if time.Now().After(end) {
							return fmt.Errorf("rank %d does not end", rank)
						}
					}
					return nil
				}
				switch job.Rank() {
				case 2:
					if dies {
						ranktest.Kill(job, cause)
					}
					return nil
				case 0: // who makes the id
					return ended(2)
				}
				if err := errors.Join(ended(2), ended(0)); err != nil {
					return err
				}
				return wantErr(with(ctx, job, nil, func(*world) error { return nil }), nil, "rank 2", cause)
			})
		})
	}
	t.Run("a member cannot", func(t *testing.T) {
		ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
			if job.Rank() != 1 {
				err := with(ctx, job, nil, func(*world) error { return nil })
				return wantErr(err, nil, "rank 1: ", "accounts of rank 1 are in use")
			}
			own, err := job.Ledger(1)
			if err != nil {
				return err
			}
			for id := uint64(1); err == nil; id++ {
				var a *bootstrap.Account
				if a, err = own.OpenAccount(id); err == nil {
					defer a.Release()
				}
			}
			err = with(ctx, job, nil, func(*world) error { return nil })
			return wantErr(err, nil, "accounts of rank 1 are in use")
		})
	})
	t.Run("no member", func(t *testing.T) {
		ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			for _, ranks := range [][]int{{1 - job.Rank()}, {job.Rank(), job.Rank()}, {job.Rank(), 7}} {
				err := with(ctx, job, &nccl.Config{Ranks: ranks}, func(*world) error { return nil })
				if err := wantErr(err, nccl.ErrArgument); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// Strict compares before anything is issued: the communicator works on.
func TestStrict(t *testing.T) {
	ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, &nccl.Config{Check: nccl.Strict}, func(w *world) error {
			b, err := nccl.Alloc[float32](w.dev, 16)
			if err != nil {
				return err
			}
			defer b.Free()
			err = nccl.AllReduce(w.comm, b.Slice(0, 8+job.Rank()/2), b.Slice(0, 8+job.Rank()/2), nccl.Sum, w.stream)
			if err := wantErr(err, nccl.ErrMismatch, "rank 2: all-reduce of 9 float32, sum; rank 0: all-reduce of 8 float32, sum"); err != nil {
				return err
			}
			return outcome(ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream))
		})
	})
}

// A nil *Comm, which Split gives to who takes no part, is told by every call on it.
func TestNilComm(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[float32](w.dev, 8)
			if err != nil {
				return err
			}
			defer b.Free()
			c, err := w.comm.Split(ctx, -1-job.Rank(), 0)
			if c != nil || err != nil {
				return fmt.Errorf("split: %v, %v", c, err)
			}
			all, half := b.All(), b.Slice(0, 4)
			called := false
			_, registered := c.Register(b.Memory())
			_, split := c.Split(ctx, 0, 0)
			_, window := c.Window(ctx, b.All().Range())
			_, met := c.Meet(ctx, nil, "meeting")
			_, captured := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error { return nil }, graphs.Comms(c))
			for name, err := range map[string]error{
				"all-reduce":     nccl.AllReduce(c, all, all, nccl.Sum, w.stream),
				"reduce":         nccl.Reduce(c, all, all, nccl.Sum, 0, w.stream),
				"broadcast":      nccl.Broadcast(c, all, all, 0, w.stream),
				"all-gather":     nccl.AllGather(c, half, all, w.stream),
				"reduce-scatter": nccl.ReduceScatter(c, all, half, nccl.Sum, w.stream),
				"send":           nccl.Send(c, all, 0, w.stream),
				"recv":           nccl.Recv(c, all, 0, w.stream),
				"group":          nccl.Group(func() error { called = true; return nil }, w.comm, c),
				"register":       registered,
				"split":          split,
				"window":         window,
				"meeting":        met,
				"use":            c.Err(),
			} {
				if err := wantErr(err, nccl.ErrArgument, "nccl: "+name+": invalid argument: the communicator is nil", "Split with a negative color"); err != nil {
					return err
				}
			}
			if err := wantErr(captured, nil, "is nil"); err != nil {
				return err
			}
			if called {
				return errors.New("the group's function was called")
			}
			if c.Rank() != -1 || c.Size() != 0 || c.Device() != nil || c.Job() != nil || c.Stats() != (nccl.Stats{}) || !strings.Contains(nccl.Explain(c), "is nil") {
				return fmt.Errorf("%v: rank %d of %d", c, c.Rank(), c.Size())
			}
			return errors.Join(c.Drain(ctx), c.Abort(nil), c.Close(), outcome(ctx, w.stream, nccl.AllReduce(w.comm, all, all, nccl.Sum, w.stream)))
		})
	})
}

func TestErrorText(t *testing.T) {
	err := &nccl.Error{Op: "all-reduce #7", Comm: "world", Rank: 2, Err: nccl.ErrClosed}
	if got, want := err.Error(), "nccl: all-reduce #7 on communicator world, rank 2: communicator is closed"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if strings.Contains(nccl.OpRecv.String()+nccl.Window.String()+nccl.Avg.String(), "unknown") {
		t.Error("names missing")
	}
}
