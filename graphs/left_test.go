package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// Two ranks wait for messages of one whose capture ends without them: one of them is in a circle of waits with it, the other is not, and must not wait
// for ever. The rank that left does nothing on the communicator meanwhile.
func TestLeftPair(t *testing.T) {
	ranktest.RunEither(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := newRank(ctx, job)
		if err != nil {
			return err
		}
		me, c, base := job.Rank(), r.comm, ctx
		for _, tt := range []struct {
			name string
			root func(s *cuda.Stream) error // what rank 1 does where the others send to it
			want error                      // on rank 1
			text string                     // on the others
		}{
			{"fails", func(*cuda.Stream) error { return errOwn }, errOwn, errOwn.Error()},
			{"ends early", func(*cuda.Stream) error { return nil }, nccl.ErrMismatch, "its end without a call"},
		} {
			ctx, cancel := context.WithTimeout(ctx, 2*room)
			_, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				if me == 1 {
					return tt.root(s)
				}
				return nccl.Send(c, r.a.All(), 1, s)
			}, graphs.Comms(c))
			in := ctx.Err()
			cancel()
			switch {
			case in != nil:
				return fmt.Errorf("%s: Capture ended with its context: %w", tt.name, err)
			case err == nil:
				return fmt.Errorf("%s: a graph", tt.name)
			case me == 1 && !errors.Is(err, tt.want):
				return fmt.Errorf("%s: %w, want %w", tt.name, err, tt.want)
			case me != 1 && !errors.Is(err, graphs.ErrPeer) && !errors.Is(err, nccl.ErrMismatch):
				return fmt.Errorf("%s: %w, want that rank 1 left", tt.name, err)
			}
			if err := wantText(err, tt.text); me != 1 && err != nil {
				return fmt.Errorf("%s: %w", tt.name, err)
			}
			if err := job.Barrier(base); err != nil {
				return err
			}
		}
		return errors.Join(r.works(base, c), r.close())
	})
}
