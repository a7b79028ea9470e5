package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

func fill(s cuda.Slice[int32], of func(i int) int32) {
	for i := range s.Host() {
		s.Host()[i] = of(i)
	}
}

func check(s cuda.Slice[int32], of func(i int) int32) error {
	for i, v := range s.Host() {
		if v != of(i) {
			return fmt.Errorf("element %d is %d, want %d", i, v, of(i))
		}
	}
	return nil
}

// Every rank sends to the next and receives from the one before, itself included in a ring of one.
func TestRing(t *testing.T) {
	for _, n := range rankCounts(t) {
		for _, registered := range []bool{false, true} {
			t.Run(fmt.Sprintf("ranks=%d/registered=%v", n, registered), func(t *testing.T) {
				ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						const most = 100_003
						b, done, err := openBuffers(w, 4*most+4096, registered)
						defer done()
						if err != nil {
							return err
						}
						me := w.comm.Rank()
						next, before := (me+1)%n, (me+n-1)%n
						for round, count := range []int{0, 1, most, 5} {
							send, _ := cuda.SliceOf[int32](b.send, 64, count)
							recv, _ := cuda.SliceOf[int32](b.recv, 128, count)
							fill(send, func(i int) int32 { return int32(me*1000_000 + round*1000 + i) })
							err := nccl.Group(func() error {
								return errors.Join(nccl.Send(w.comm, send, next, w.stream), nccl.Recv(w.comm, recv, before, w.stream))
							}, w.comm)
							if err := outcome(ctx, w.stream, err); err != nil {
								return err
							}
							if err := check(recv, func(i int) int32 { return int32(before*1000_000 + round*1000 + i) }); err != nil {
								return err
							}
						}
						st := w.comm.Stats()
						if want := uint64(2 * 4 * (1 + most + 5)); registered && st.BytesDirect != want || !registered && n > 1 && st.BytesStaged != want {
							return fmt.Errorf("%+v, want %d bytes one way", st, want)
						}
						return nil
					})
				})
			})
		}
	}
}

// All to all with several messages for each pair, of random sizes, in random order of the calls, mixed with collectives.
func TestManyMessages(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	ranktest.Run(t, 4, func(ctx context.Context, job *bootstrap.Job) error { return manyMessages(ctx, job, seed) })
}

// manyMessages is the part of one rank; the seed is the same on all.
func manyMessages(ctx context.Context, job *bootstrap.Job, seed uint64) error {
	const size = 200 << 10
	n := job.Size()
	return with(ctx, job, nil, func(w *world) error {
		me := w.comm.Rank()
		same := rand.New(rand.NewPCG(seed, 0))
		own := rand.New(rand.NewPCG(seed, uint64(me)+1))
		rounds := 20
		if raceEnabled {
			rounds = 8
		}
		for round := range rounds {
			registered := round%2 == 0
			b, done, err := openBuffers(w, 2*n*size, registered)
			if err != nil {
				done()
				return err
			}
			type msg struct{ from, to, k, count int }
			var msgs []msg
			for from := range n {
				for to := range n {
					for k := range same.IntN(3) {
						msgs = append(msgs, msg{from, to, k, same.IntN(1 << same.IntN(16))})
					}
				}
			}
			value := func(m msg) func(i int) int32 {
				return func(i int) int32 { return int32(i + 1000*m.k + 100_000*m.from + 10_000_000*m.to + round) }
			}
			slot := func(mem *cuda.Memory, peer, k, count int) cuda.Slice[int32] {
				s, err := cuda.SliceOf[int32](mem, uint64((peer*2+k)*size), count)
				if err != nil {
					panic(err)
				}
				return s
			}
			// The messages of a pair keep their order, all else is shuffled.
			order := own.Perm(2 * n)
			err = nccl.Group(func() error {
				if err := nccl.AllReduce(w.comm, slot(b.send, n-1, 1, 1), slot(b.recv, n-1, 1, 1), nccl.Sum, w.stream); err != nil {
					return err
				}
				for _, o := range order {
					for _, m := range msgs {
						switch {
						case o < n && m.from == me && m.to == o:
							s := slot(b.send, m.to, m.k, m.count)
							fill(s, value(m))
							if err := nccl.Send(w.comm, s, m.to, w.stream); err != nil {
								return err
							}
						case o >= n && m.to == me && m.from == o-n:
							if err := nccl.Recv(w.comm, slot(b.recv, m.from, m.k, m.count), m.from, w.stream); err != nil {
								return err
							}
						}
					}
				}
				return nil
			}, w.comm)
			if err := outcome(ctx, w.stream, err); err != nil {
				return fmt.Errorf("seed %#x: %w", seed, err)
			}
			for _, m := range msgs {
				if m.to == me {
					if err := check(slot(b.recv, m.from, m.k, m.count), value(m)); err != nil {
						return fmt.Errorf("seed %#x: round %d, %+v: %w", seed, round, m, err)
					}
				}
			}
			done()
		}
		return nil
	})
}

func TestMessageFaults(t *testing.T) {
	cases := []struct {
		name     string
		send     int  // elements that rank 0 sends to rank 1
		asFloat  bool // and receives as another type
		mixed    bool
		closes   bool // rank 1 closes instead
		sentinel error
		parts    []string
	}{
		{"count", 10, false, false, false, nccl.ErrMismatch, []string{"rank 0: send of 10 int32, to rank 1; rank 1: recv of 12 int32, from rank 0"}},
		{"type", 12, true, false, false, nccl.ErrMismatch, []string{"send of 12 int32", "recv of 12 float32"}},
		{"mixed", 12, false, true, false, nccl.ErrMixed, []string{"rank 0: send allocation", "rank 1: recv allocation", "not registered"}},
		{"closed", 12, false, false, true, nccl.ErrClosed, []string{"rank 1 closed communicator world"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error {
					b, done, err := openBuffers(w, 4096, tc.mixed && job.Rank() == 0)
					defer done()
					if err != nil {
						return err
					}
					if err := job.Barrier(ctx); err != nil {
						return err
					}
					ints, _ := cuda.SliceOf[int32](b.send, 0, 12)
					floats, _ := cuda.SliceOf[float32](b.recv, 0, 12)
					switch {
					case job.Rank() == 0:
						err = nccl.Send(w.comm, ints.Slice(0, tc.send), 1, w.stream)
					case job.Rank() == 2:
						// No part of the pair: it is told at its next call.
						err = nccl.AllReduce(w.comm, ints, ints, nccl.Sum, w.stream)
					case tc.closes:
						return w.comm.Close()
					case tc.asFloat:
						err = nccl.Recv(w.comm, floats, 0, w.stream)
					default:
						err = nccl.Recv(w.comm, ints, 0, w.stream)
					}
					return wantErr(outcome(ctx, w.stream, err), tc.sentinel, tc.parts...)
				})
			})
		})
	}
}

func TestGroupRules(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 4096, false)
			defer done()
			if err != nil {
				return err
			}
			other, err := w.dev.NewStream()
			if err != nil {
				return err
			}
			defer other.Close()
			x, _ := cuda.SliceOf[int32](b.send, 0, 12)
			y, _ := cuda.SliceOf[int32](b.recv, 0, 12)
			peer := 1 - w.comm.Rank()
			oops := errors.New("oops")
			// Nothing is issued if the function fails, or panics.
			err = nccl.Group(func() error {
				return errors.Join(nccl.Send(w.comm, x, peer, w.stream), oops)
			}, w.comm)
			if err := wantErr(err, oops); err != nil {
				return err
			}
			func() {
				defer func() { recover() }()
				nccl.Group(func() error {
					nccl.AllReduce(w.comm, x.Slice(0, 1+w.comm.Rank()), y.Slice(0, 1+w.comm.Rank()), nccl.Sum, w.stream)
					panic("x")
				}, w.comm)
			}()
			err = nccl.Group(func() error {
				return errors.Join(nccl.Send(w.comm, x, peer, w.stream), nccl.Recv(w.comm, y, peer, other))
			}, w.comm)
			if err := wantErr(err, nccl.ErrArgument, "one stream"); err != nil {
				return err
			}
			err = nccl.Group(func() error {
				return errors.Join(nccl.Send(w.comm, x, w.comm.Rank(), w.stream), nccl.Recv(w.comm, y.Slice(0, 3), w.comm.Rank(), w.stream))
			}, w.comm)
			if err := wantErr(err, nccl.ErrArgument, "to itself"); err != nil {
				return err
			}
			// Two communicators, called in a different order on the two ranks: one call.
			second, err := nccl.InitConfig(ctx, job, w.dev, &nccl.Config{Name: "second"})
			if err != nil {
				return err
			}
			defer second.Close()
			comms := []*nccl.Comm{w.comm, second}
			fill(x, func(i int) int32 { return int32(i) })
			err = nccl.Group(func() error {
				a, b := peer, 1-peer
				nccl.Group(func() error { // a failed part is left out
					return errors.Join(nccl.AllReduce(comms[a], x, y, nccl.Max, w.stream), oops)
				}, comms[a])
				return errors.Join(
					nccl.Group(func() error { // nested: part of the outer one
						return nccl.AllReduce(comms[a], x, x, nccl.Sum, w.stream)
					}, comms[a], comms[a]),
					nccl.AllReduce(comms[b], x, x, nccl.Sum, w.stream))
			}, comms...)
			if err := outcome(ctx, w.stream, err); err != nil {
				return err
			}
			if err := check(x, func(i int) int32 { return int32(4 * i) }); err != nil {
				return err
			}
			return nccl.Group(func() error { return nil }, comms...)
		})
	})
}

// A group of very many messages takes time in proportion to them, and keeps their order.
func TestLargeGroup(t *testing.T) {
	const n = 8000
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 4*n, false)
			defer done()
			if err != nil {
				return err
			}
			send, _ := cuda.SliceOf[int32](b.send, 0, n)
			recv, _ := cuda.SliceOf[int32](b.recv, 0, n)
			for i := range send.Host() {
				send.Host()[i] = int32(job.Rank()*n + i)
			}
			other := 1 - job.Rank()
			err = nccl.Group(func() error {
				for i := range n {
					if err := errors.Join(nccl.Send(w.comm, send.Slice(i, i+1), other, w.stream), nccl.Recv(w.comm, recv.Slice(n-1-i, n-i), other, w.stream)); err != nil {
						return err
					}
				}
				return nil
			}, w.comm)
			if err := errors.Join(err, w.stream.Synchronize(ctx)); err != nil {
				return err
			}
			for i, v := range recv.Host() {
				if want := int32(other*n + n - 1 - i); v != want {
					return fmt.Errorf("element %d is %d, want %d", i, v, want)
				}
			}
			return nil
		})
	})
}
