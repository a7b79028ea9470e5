package graphs_test

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

// onHosts runs f on the host platform, two ranks on each of two hosts.
func onHosts(t *testing.T, f func(ctx context.Context, r *rank) error) {
	t.Helper()
	allWell(t, ranktest.RunHosts(t, []int{0, 0, 1, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := newRank(ctx, job)
		if err != nil {
			return err
		}
		if err := f(ctx, r); err != nil {
			return err
		}
		return r.close()
	}, "GORUN_DEVICE=host"))
}

// TestHostsRandomPrograms is TestRandomPrograms on two hosts.
func TestHostsRandomPrograms(t *testing.T) {
	onHosts(t, func(ctx context.Context, r *rank) error {
		for seed := range uint64(6) {
			if err := runBoth(ctx, r, randomProgramOf(seed, 4), seed); err != nil {
				return fmt.Errorf("seed %d: %w", seed, err)
			}
		}
		return nil
	})
}

// TestHosts: between hosts captured calls are staged, on all members alike, and within one they are not; mistakes are told on both.
func TestHosts(t *testing.T) {
	onHosts(t, func(ctx context.Context, r *rank) error {
		const why = "the members are on several hosts"
		me, c := r.comm.Rank(), r.comm
		sum := func(s *cuda.Stream) error { return allReduce(r, s) }
		message := func(peer int) func(s *cuda.Stream) error {
			return func(s *cuda.Stream) error {
				return nccl.Group(func() error {
					return errors.Join(nccl.Send(c, r.a.All(), peer, s), nccl.Recv(c, r.b.All(), peer, s))
				}, c)
			}
		}
		if err := errors.Join(
			r.wantMode(ctx, "all-reduce", sum, nccl.Plain, why),
			r.wantMode(ctx, "message within the host", message(me^1), nccl.Graph, "registered by the capture"),
			r.wantMode(ctx, "message between hosts", message(me^2), nccl.Plain, why),
			empty(c),
		); err != nil {
			return err
		}
		if s := c.Stats(); s.BytesStaged == 0 {
			return fmt.Errorf("%+v, want staged bytes", s)
		}
		for _, m := range []nccl.Mode{nccl.Graph, nccl.Window} {
			if _, _, err := r.mode(ctx, sum, graphs.Require(m)); !errors.Is(err, graphs.ErrMode) || wantText(err, fmt.Sprintf("mode %v is required, but "+why, m)) != nil {
				return fmt.Errorf("all-reduce that requires %v: %v", m, err)
			}
			if _, _, err := r.mode(ctx, message(me^2), graphs.Require(m)); !errors.Is(err, graphs.ErrMode) || wantText(err, why) != nil {
				return fmt.Errorf("message between hosts that requires %v: %v", m, err)
			}
		}

		// One rank, of the second host, does something else.
		for culprit := range 4 {
			_, _, err := r.mode(ctx, func(s *cuda.Stream) error {
				if me == culprit {
					return nccl.Broadcast(c, r.a.All(), r.b.All(), 0, s)
				}
				return allReduce(r, s)
			})
			if !errors.Is(err, nccl.ErrMismatch) || wantText(err, fmt.Sprint("rank ", culprit), "broadcast", "all-reduce") != nil {
				return fmt.Errorf("rank %d calls a broadcast: %v", culprit, err)
			}
			_, _, err = r.mode(ctx, func(s *cuda.Stream) error {
				if err := allReduce(r, s); err != nil || me != culprit {
					return err
				}
				return errOwn
			})
			if want := map[bool]error{true: errOwn, false: graphs.ErrPeer}[me == culprit]; !errors.Is(err, want) || !strings.Contains(err.Error(), errOwn.Error()) {
				return fmt.Errorf("the function of rank %d fails: %v, want %v", culprit, err, want)
			}
		}

		// Graphs that live keep the communicator; closed in flight they go with the replay.
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if err := wantText(c.Close(), g.String()); err != nil {
			return err
		}
		for range 20 {
			if err := g.Launch(r.stream); err != nil {
				return err
			}
		}
		return errors.Join(g.Close(), r.stream.Synchronize(ctx), c.Drain(ctx), empty(c), r.works(ctx, c))
	})
}
