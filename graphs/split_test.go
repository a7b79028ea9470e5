package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// splitRank, for four ranks or more, has a communicator of all ranks, one of each half, and one of all ranks but the first, which is alone: graphs over two of them, a mistake in one of them
// that the others do not feel, and in the end the death of the last rank, which those that it is not part of do not feel.
func splitRank(n int) func(ctx context.Context, job *bootstrap.Job) error {
	return func(ctx context.Context, job *bootstrap.Job) error {
		r, err := newRankOn(ctx, job, dltest.DeviceOf(job.LocalRank()), "world", n)
		if err != nil {
			return err
		}
		me, size := r.comm.Rank(), r.comm.Size()
		lower := 2*me < size
		color := 0
		if !lower {
			color = 1
		}
		half, err := r.comm.Split(ctx, color, -me)
		if err != nil {
			return err
		}
		odd, err := r.comm.Split(ctx, min(me, 1), me)
		if err != nil {
			return err
		}
		none := -1
		if me%2 == 0 {
			none = 7
		}
		even, err := r.comm.Split(ctx, none, me)
		if err != nil || (even == nil) != (none < 0) {
			return fmt.Errorf("split of the even ranks: %v, %w", even, err)
		}
		for _, c := range []*nccl.Comm{half, odd, even} {
			if c == nil {
				continue
			}
			if err := r.works(ctx, c); err != nil {
				return fmt.Errorf("%v: %w", c, err)
			}
		}
		if err := even.Close(); err != nil {
			return err
		}

		// First the half's sum, then the sum of those over all ranks: each half counts as often as it has members.
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return errors.Join(nccl.AllReduce(half, r.a.All(), r.b.All(), nccl.Sum, s), nccl.AllReduce(r.comm, r.b.All(), r.b.All(), nccl.Sum, s))
		}, graphs.Comms(half, r.comm))
		if err != nil {
			return err
		}
		want := 0
		for rank := range size {
			members := 0
			for other := range size {
				if (2*other < size) == (2*rank < size) {
					members++
				}
			}
			want += members * (rank + 1)
		}
		replay := func() error {
			if err := errors.Join(r.fill(ctx, r.a.All(), func(i int) float32 { return float32(me + 1) }), g.Launch(r.stream)); err != nil {
				return err
			}
			return r.holds(ctx, r.b.All(), func(int) float32 { return float32(want) })
		}
		for range 3 {
			if err := replay(); err != nil {
				return fmt.Errorf("graph over two communicators: %w", err)
			}
		}
		// A capture over two that one rank of the upper half gets wrong: all ranks of both are told, and nothing else is harmed.
		_, err = graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			count := n
			if me == size-1 {
				count = n / 2
			}
			return errors.Join(nccl.AllReduce(half, r.a.Slice(0, count), r.b.Slice(0, count), nccl.Sum, s), nccl.AllReduce(r.comm, r.b.All(), r.b.All(), nccl.Sum, s))
		}, graphs.Comms(half, r.comm))
		if err := wantText(err, fmt.Sprintf("all-reduce of %d float32", n/2), "on communicator world/1"); err != nil {
			return err
		}
		if err := replay(); err != nil {
			return fmt.Errorf("after a capture that failed: %w", err)
		}

		// An eager contradiction on the communicator of all but one: that one ends; the others go on.
		if me > 0 {
			count := n
			if me == 1 {
				count = n / 2
			}
			err := nccl.AllReduce(odd, r.a.Slice(0, count), r.b.Slice(0, count), nccl.Sum, r.stream)
			if err = eventually(ctx, func() error { return wantText(errors.Join(err, odd.Err()), "rank 0: all-reduce of") }); err == nil && !errors.Is(odd.Err(), nccl.ErrMismatch) {
				err = fmt.Errorf("the failed communicator has %v, want %v", odd.Err(), nccl.ErrMismatch)
			}
			if err != nil {
				return err
			}
		}
		if err := odd.Close(); err != nil {
			return err
		}
		s, err := r.dev.NewStream() // the old one tells of the failure
		if err != nil {
			return err
		}
		old := r.stream
		r.stream = s
		if err := errors.Join(old.Close(), r.job.Barrier(ctx), replay()); err != nil {
			return fmt.Errorf("after a contradiction on another communicator: %w", err)
		}
		if err := errors.Join(g.Close(), r.works(ctx, half), r.works(ctx, r.comm), r.job.Barrier(ctx)); err != nil {
			return err
		}

		// The last rank dies: its communicators end, the lower half's does not.
		if me == size-1 {
			ranktest.Kill(job, "killed")
		}
		err = eventually(ctx, func() error { return wantText(r.comm.Err(), "rank "+strconv.Itoa(size-1), "killed") })
		if err != nil {
			return err
		}
		if lower {
			if err := r.works(ctx, half); err != nil {
				return fmt.Errorf("the half without the dead rank: %w", err)
			}
		} else if err := eventually(ctx, func() error { return wantText(half.Err(), "killed") }); err != nil {
			return err
		}
		r.others = append(r.others, half)
		return r.close()
	}
}

// TestSplit: communicators of halves and odd groups, beside that of all ranks.
func TestSplit(t *testing.T) {
	ended := func(t *testing.T, results []ranktest.Result) {
		t.Helper()
		last := len(results) - 1
		allWell(t, results[:last])
		if results[last].Signal != "SIGKILL" {
			t.Error(results[last])
		}
	}
	for _, n := range []int{4, 5, 8} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			t.Run("fake", func(t *testing.T) {
				if testing.Short() && n != 5 {
					t.Skip("-short")
				}
				ended(t, ranktest.RunProcesses(t, n, splitRank(elements), append(fakeEnv(t), noWindows)...))
			})
			t.Run("GPU", func(t *testing.T) {
				dltest.NeedGPUs(t, n)
				ended(t, ranktest.RunProcesses(t, n, splitRank(1<<20), append(dltest.GPUEnv(), noWindows)...))
			})
		})
	}
}
