package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// exchanges does a gather, a scatter and an all-to-all, out of place and in place, eager and captured, from and to each root.
func exchanges(w *world) error {
	size, me := w.comm.Size(), w.comm.Rank()
	for _, registered := range []bool{false, true} {
		b, done, err := openBuffers(w, 4*size*1000, registered)
		defer done()
		if err != nil {
			return err
		}
		for _, n := range []int{0, 1, 1000} {
			send, _ := cuda.SliceOf[int32](b.send, 0, size*n)
			recv, _ := cuda.SliceOf[int32](b.recv, 0, size*n)
			part := func(s cuda.Slice[int32], i int) cuda.Slice[int32] { return s.Slice(i*n, (i+1)*n) }
			// Part p of rank r's send holds 100r+p, its recv -1.
			was := func(rank, p int) int32 { return int32(100*rank + p) }
			none := func(int) int32 { return -1 }
			do := func(what string, call func(s *cuda.Stream) error, from cuda.Slice[int32], want func(p int) int32) error {
				fill := func() error {
					v := make([]int32, size*n)
					for i := range v {
						v[i] = was(me, i/n)
					}
					return errors.Join(cuda.CopyToDevice(send, v, w.stream), cuda.Fill(recv, -1, w.stream))
				}
				look := func() error {
					got := make([]int32, size*n)
					if err := errors.Join(cuda.CopyToHost(got, from, w.stream), w.stream.Synchronize(w.ctx)); err != nil {
						return err
					}
					for i, v := range got {
						if v != want(i/n) {
							return fmt.Errorf("element %d is %d, want %d", i, v, want(i/n))
						}
					}
					return nil
				}
				eager := errors.Join(fill(), call(w.stream), look())
				g, err := graphs.Capture(w.ctx, w.stream, call, graphs.Comms(w.comm))
				if err == nil {
					err = errors.Join(fill(), g.Launch(w.stream), look(), g.Close())
				}
				if err := errors.Join(eager, err); err != nil {
					return fmt.Errorf("%s of %d elements, registered=%t: %w", what, n, registered, err)
				}
				return nil
			}
			for root := range size {
				at := func(rank int, of, other func(p int) int32) func(p int) int32 {
					if me == rank {
						return of
					}
					return other
				}
				own := func(p int) int32 { return was(me, p) }
				gathered := at(root, func(p int) int32 { return was(p, me) }, none)
				scattered := func(p int) int32 {
					if p == me {
						return was(root, p)
					}
					return -1
				}
				err := errors.Join(
					do("gather", func(s *cuda.Stream) error { return nccl.Gather(w.comm, part(send, root), recv, root, s) }, recv,
						at(root, func(p int) int32 { return was(p, root) }, none)),
					do("gather in place", func(s *cuda.Stream) error {
						if me == root {
							return nccl.Gather(w.comm, part(send, me), send, root, s)
						}
						return nccl.Gather(w.comm, part(send, root), cuda.Slice[int32]{}, root, s)
					}, send, at(root, gathered, own)),
					do("scatter", func(s *cuda.Stream) error { return nccl.Scatter(w.comm, send, part(recv, me), root, s) }, recv, scattered),
					do("scatter in place", func(s *cuda.Stream) error {
						if me == root {
							return nccl.Scatter(w.comm, send, part(send, me), root, s)
						}
						return nccl.Scatter(w.comm, cuda.Slice[int32]{}, part(recv, me), root, s)
					}, recv, at(root, none, scattered)))
				if err != nil {
					return err
				}
			}
			if err := do("all-to-all", func(s *cuda.Stream) error { return nccl.AllToAll(w.comm, send, recv, s) }, recv,
				func(p int) int32 { return was(p, me) }); err != nil {
				return err
			}
		}
	}
	return nil
}

func TestExchanges(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprint("ranks=", n), func(t *testing.T) {
			ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error { return with(ctx, job, nil, exchanges) })
		})
	}
}

func TestLibraryExchanges(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error { return errors.Join(exchanges(w), released(w)) })
	}, nil)
}

// What a rank alone can see to be wrong is an error before anything is enqueued, and the communicator goes on.
func TestExchangeArguments(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 4096, false)
			defer done()
			if err != nil {
				return err
			}
			of := func(off, n int) cuda.Slice[float32] {
				s, _ := cuda.SliceOf[float32](b.send, uint64(4*off), n)
				return s
			}
			c, s, me := w.comm, w.stream, w.comm.Rank()
			var none *nccl.Comm
			for _, bad := range []struct {
				err  error
				want string
			}{
				{nccl.Gather(c, of(0, 4), of(4, 7), me, s), "gather on communicator world, rank %d: invalid argument: recv has 7 elements, not 2 ranks x 4"},
				{nccl.Gather(c, of(0, 4), of(4, 8), 2, s), "gather on communicator world, rank %d: invalid argument: root 2 is no rank of a communicator of 2"},
				{nccl.Gather(c, of(2, 4), of(0, 8), me, s), "gather on communicator world, rank %d: invalid argument: send range [8,24) of 4096-byte allocation 1 and recv range [0,32) of 4096-byte allocation 1 overlap; in place send is part %[1]d of recv"},
				{nccl.Scatter(c, of(0, 7), of(20, 4), me, s), "scatter on communicator world, rank %d: invalid argument: send has 7 elements, not 2 ranks x 4"},
				{nccl.Scatter(c, of(0, 8), of(20, 4), -1, s), "scatter on communicator world, rank %d: invalid argument: root -1 is no rank of a communicator of 2"},
				{nccl.Scatter(c, of(0, 8), of(7, 4), me, s), "scatter on communicator world, rank %d: invalid argument: send range [0,32) of 4096-byte allocation 1 and recv range [28,44) of 4096-byte allocation 1 overlap; in place recv is part %[1]d of send"},
				{nccl.AllToAll(c, of(0, 8), of(8, 6), s), "all-to-all on communicator world, rank %d: invalid argument: send has 8 elements, recv 6"},
				{nccl.AllToAll(c, of(0, 7), of(8, 7), s), "all-to-all on communicator world, rank %d: invalid argument: send has 7 elements, not as many for each of 2 ranks"},
				{nccl.AllToAll(c, of(0, 8), of(0, 8), s), "all-to-all on communicator world, rank %d: invalid argument: send range [0,32) of 4096-byte allocation 1 and recv range [0,32) of 4096-byte allocation 1 overlap; they must be apart"},
				{nccl.Gather(none, of(0, 4), of(4, 8), 0, s), "gather: invalid argument: the communicator is nil: this rank has none (Split with a negative color gives nil)"},
				{nccl.Scatter(none, of(0, 8), of(8, 4), 0, s), "scatter: invalid argument: the communicator is nil: this rank has none (Split with a negative color gives nil)"},
				{nccl.AllToAll(none, of(0, 8), of(8, 8), s), "all-to-all: invalid argument: the communicator is nil: this rank has none (Split with a negative color gives nil)"},
			} {
				want := strings.ReplaceAll(bad.want, "allocation 1", fmt.Sprint("allocation ", b.send.ID()))
				if e, ok := errors.AsType[*nccl.Error](bad.err); ok && e.Rank >= 0 {
					want = fmt.Sprintf(want, me)
				}
				if !errors.Is(bad.err, nccl.ErrArgument) || bad.err.Error() != "nccl: "+want {
					return fmt.Errorf("got %v, want nccl: %s", bad.err, want)
				}
			}
			return outcome(ctx, s, nccl.AllToAll(c, of(0, 8), of(8, 8), s))
		})
	})
}
