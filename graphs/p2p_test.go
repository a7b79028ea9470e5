package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// TestTransfers captures sends and receives in the forms that are right. Rank r starts with a = 100r + i.
func TestTransfers(t *testing.T) {
	const n = 8
	part := func(b *cuda.Buffer[float32], i int) cuda.Slice[float32] { return b.Slice(i*n, (i+1)*n) }
	for _, tt := range []struct {
		name  string
		ranks int
		fn    func(r *rank, s *cuda.Stream) error
		from  func(me, size int) []int // whose a the parts of b are then; -1: nobody's
	}{
		{"one way", 2, func(r *rank, s *cuda.Stream) error {
			if r.comm.Rank() == 0 {
				return nccl.Send(r.comm, part(r.a, 0), 1, s)
			}
			return nccl.Recv(r.comm, part(r.b, 0), 0, s)
		}, func(me, size int) []int { return []int{[]int{-1, 0}[me]} }},
		{"ring", 4, func(r *rank, s *cuda.Stream) error {
			me, size := r.comm.Rank(), r.comm.Size()
			return nccl.Group(func() error {
				return errors.Join(nccl.Send(r.comm, part(r.a, 0), (me+1)%size, s), nccl.Recv(r.comm, part(r.b, 0), (me+size-1)%size, s))
			}, r.comm)
		}, func(me, size int) []int { return []int{(me + size - 1) % size} }},
		{"all to all, with itself", 3, func(r *rank, s *cuda.Stream) error {
			return nccl.Group(func() error {
				var errs []error
				for p := range r.comm.Size() {
					errs = append(errs, nccl.Send(r.comm, part(r.a, p), p, s), nccl.Recv(r.comm, part(r.b, p), p, s))
				}
				return errors.Join(errs...)
			}, r.comm)
		}, func(me, size int) []int { return []int{0, 1, 2} }},
		{"a group against two calls", 2, func(r *rank, s *cuda.Stream) error {
			if r.comm.Rank() == 0 {
				return nccl.Group(func() error {
					return errors.Join(nccl.Send(r.comm, part(r.a, 0), 1, s), nccl.Recv(r.comm, part(r.b, 0), 1, s))
				}, r.comm)
			}
			return errors.Join(nccl.Recv(r.comm, part(r.b, 0), 0, s), nccl.Send(r.comm, part(r.a, 0), 0, s))
		}, func(me, size int) []int { return []int{1 - me} }},
		{"a chain", 3, func(r *rank, s *cuda.Stream) error {
			me := r.comm.Rank()
			if me > 0 {
				if err := nccl.Recv(r.comm, part(r.b, 0), me-1, s); err != nil {
					return err
				}
			}
			if me < 2 {
				return nccl.Send(r.comm, part(r.a, 0), me+1, s)
			}
			return nil
		}, func(me, size int) []int { return []int{me - 1} }},
		{"between collectives", 3, func(r *rank, s *cuda.Stream) error {
			me := r.comm.Rank()
			if err := nccl.AllReduce(r.comm, part(r.b, 1), part(r.b, 1), nccl.Sum, s); err != nil {
				return err
			}
			var err error
			switch me {
			case 0:
				err = nccl.Send(r.comm, part(r.a, 0), 2, s)
			case 2:
				err = nccl.Recv(r.comm, part(r.b, 0), 0, s)
			}
			return errors.Join(err, nccl.AllReduce(r.comm, part(r.b, 2), part(r.b, 2), nccl.Sum, s))
		}, func(me, size int) []int { return []int{[]int{-1, -1, 0}[me]} }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onRanks(t, tt.ranks, func(ctx context.Context, r *rank) error {
				me := r.comm.Rank()
				for i := range elements {
					r.a.All().Host()[i] = float32(100*me + i)
				}
				g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return tt.fn(r, s) }, graphs.Comms(r.comm))
				if err != nil {
					return err
				}
				for range 2 {
					clear(r.b.All().Host())
					if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
						return err
					}
					for p, from := range tt.from(me, r.comm.Size()) {
						for i, got := range part(r.b, p).Host() {
							want := float32(0)
							if from >= 0 {
								at := i
								if tt.ranks == 3 && len(tt.from(me, 3)) == 3 {
									at += me * n // all to all: my part of the sender's buffer
								}
								want = float32(100*from + at)
							}
							if got != want {
								return fmt.Errorf("part %d, element %d: %v, want %v", p, i, got, want)
							}
						}
					}
				}
				if s := r.comm.Stats(); s.BytesStaged != 0 {
					return fmt.Errorf("%+v, want nothing staged", s)
				}
				return errors.Join(g.Close(), r.comm.Drain(ctx), empty(r.comm))
			})
		})
	}
}

// TestLargeGroupOfTransfers describes more on one rank than fits into one message, and little on the other.
func TestLargeGroupOfTransfers(t *testing.T) {
	const n = 1500
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		one := func(i int) error {
			if r.comm.Rank() == 0 {
				r.a.All().Host()[i%elements] = float32(i % elements)
				return nccl.Send(r.comm, r.a.Slice(i%elements, i%elements+1), 1, r.stream)
			}
			return nccl.Recv(r.comm, r.b.Slice(i%elements, i%elements+1), 0, r.stream)
		}
		some := func(from, to int) error {
			return nccl.Group(func() error {
				for i := from; i < to; i++ {
					if err := one(i); err != nil {
						return err
					}
				}
				return nil
			}, r.comm)
		}
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			if r.comm.Rank() == 0 {
				return some(0, n)
			}
			return errors.Join(some(0, 10), some(10, n-10), some(n-10, n))
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close()); err != nil {
			return err
		}
		for i, got := range r.b.All().Host() {
			if r.comm.Rank() == 1 && got != float32(i) {
				return fmt.Errorf("element %d: %v", i, got)
			}
		}
		return nil
	})
}

// TestTransferMistakes: the two ends of a transfer disagree, or one does not come. Every rank gets an error.
func TestTransferMistakes(t *testing.T) {
	send := func(n, to int) func(*rank, *cuda.Stream) error {
		return func(r *rank, s *cuda.Stream) error { return nccl.Send(r.comm, r.a.Slice(0, n), to, s) }
	}
	recv := func(n, from int) func(*rank, *cuda.Stream) error {
		return func(r *rank, s *cuda.Stream) error { return nccl.Recv(r.comm, r.b.Slice(0, n), from, s) }
	}
	nothing := func(*rank, *cuda.Stream) error { return nil }
	for _, tt := range []struct {
		name  string
		fns   [3]func(*rank, *cuda.Stream) error
		is    error // of ranks 0 and 1
		text  []string
		third []string // of rank 2, which is not concerned
	}{
		{"count", [3]func(*rank, *cuda.Stream) error{send(8, 1), recv(9, 0), nothing}, nccl.ErrMismatch,
			[]string{"rank 0 sends 8 float32 (p2p_test.go:", "to rank 1, which receives 9 float32"}, []string{"rank 0 sends 8 float32"}},
		{"send without recv", [3]func(*rank, *cuda.Stream) error{send(8, 1), nothing, nothing}, nccl.ErrMismatch,
			[]string{"wait for each other", "rank 0 is in", "send of 8 float32, to rank 1", "rank 1 is in", "its end"}, []string{"send of 8 float32, to rank 1"}},
		{"recv without send", [3]func(*rank, *cuda.Stream) error{nothing, recv(8, 0), nothing}, nccl.ErrMismatch,
			[]string{"wait for each other", "recv of 8 float32, from rank 0"}, []string{"recv of 8 float32, from rank 0"}},
		{"both send first", [3]func(*rank, *cuda.Stream) error{
			func(r *rank, s *cuda.Stream) error {
				if err := send(8, 1)(r, s); err != nil {
					return err
				}
				return recv(8, 1)(r, s)
			},
			func(r *rank, s *cuda.Stream) error {
				if err := send(8, 0)(r, s); err != nil {
					return err
				}
				return recv(8, 0)(r, s)
			}, nothing}, nccl.ErrMismatch, []string{"make them one Group"}, []string{"make them one Group"}},
		{"send against a collective", [3]func(*rank, *cuda.Stream) error{send(8, 1), allReduce, allReduce}, nccl.ErrMismatch,
			[]string{"wait for each other", "send of 8 float32, to rank 1", "all-reduce"}, []string{"send of 8 float32, to rank 1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onRanks(t, 3, func(ctx context.Context, r *rank) error {
				me := r.comm.Rank()
				err := capture(ctx, r, func(s *cuda.Stream) error { return tt.fns[me](r, s) })
				want := tt.text
				if me == 2 {
					want = tt.third
				} else if !errors.Is(err, tt.is) {
					return fmt.Errorf("error %v, want %v", err, tt.is)
				}
				if err := errors.Join(wantText(err, want...), empty(r.comm)); err != nil {
					return err
				}
				// The ends of the pair that did not meet must not disturb the next ones.
				if err := capture(ctx, r, func(s *cuda.Stream) error {
					switch me {
					case 0:
						return send(8, 1)(r, s)
					case 1:
						return recv(8, 0)(r, s)
					}
					return nil
				}); err != nil {
					return fmt.Errorf("afterwards: %w", err)
				}
				return r.works(ctx, r.comm)
			})
		})
	}
}

// TestMixedTransfer: the two ends of a transfer must both be registered by the program, or none; where one end cannot be registered
// the transfer goes through staging.
func TestMixedTransfer(t *testing.T) {
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		p, err := cuda.Malloc[float32](r.dev, 8)
		if err != nil {
			return err
		}
		transfer := func(s *cuda.Stream) error {
			if r.comm.Rank() == 0 {
				return nccl.Send(r.comm, r.a.Slice(0, 8), 1, s)
			}
			return nccl.Recv(r.comm, p.All(), 0, s)
		}
		if r.comm.Rank() == 0 {
			reg, err := r.comm.Register(r.a.Memory())
			if err != nil {
				return err
			}
			err = capture(ctx, r, transfer)
			if !errors.Is(err, nccl.ErrMixed) {
				return fmt.Errorf("error %v, want %v", err, nccl.ErrMixed)
			}
			if err := errors.Join(wantText(err, "rank 0 passes a send buffer in registered memory", "rank 1 a recv buffer in private memory"), reg.Close()); err != nil {
				return err
			}
		} else if err := capture(ctx, r, transfer); !errors.Is(err, nccl.ErrMixed) {
			return fmt.Errorf("error %v, want %v", err, nccl.ErrMixed)
		}

		r.a.All().Host()[7] = float32(r.comm.Rank() + 5)
		g, err := graphs.Capture(ctx, r.stream, transfer, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if c := g.Calls()[0]; c.Mode != nccl.Plain {
			return fmt.Errorf("mode %v, want %v", c.Mode, nccl.Plain)
		}
		if s := r.comm.Stats(); s.GraphHolds != 0 {
			return fmt.Errorf("%+v, want nothing registered", s)
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close()); err != nil {
			return err
		}
		if got := p.All().Host()[7]; r.comm.Rank() == 1 && got != 5 {
			return fmt.Errorf("received %v, want 5", got)
		}
		return errors.Join(p.Free(), r.works(ctx, r.comm))
	})
}
