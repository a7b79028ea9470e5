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

// stopper keeps a device from going on with anything, from when all that was enqueued before it has had a step.
type stopper struct {
	steps         int
	stopped, free chan struct{}
}

func (s *stopper) Start() {}

func (s *stopper) Step() (bool, error) {
	if s.steps++; s.steps == 1 {
		return false, nil
	}
	close(s.stopped)
	<-s.free
	return true, nil
}

// A replay that all members have done their part of is done, although one of them fails right after it.
func TestReplayDoneBeforeFailure(t *testing.T) {
	stop := &stopper{stopped: make(chan struct{}), free: make(chan struct{})}
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) (err error) {
		r, err := newRank(ctx, job)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.close()) }()
		if r.side, err = r.dev.NewStream(); err != nil { // stepped after r.stream
			return err
		}
		private, err := r.dev.Alloc(64, cuda.Private)
		if err != nil {
			return err
		}
		defer private.Free()
		buf, err := cuda.SliceOf[float32](private, 0, 16)
		if err != nil {
			return err
		}
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return nccl.AllReduce(r.comm, buf, buf, nccl.Sum, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		defer g.Close()
		if job.Rank() == 1 {
			<-stop.stopped
		}
		if err := g.Launch(r.stream); err != nil {
			return err
		}
		if job.Rank() == 0 {
			if err := r.side.Submit(stop); err != nil {
				return err
			}
			<-stop.stopped
			if _, err := job.Get(ctx, "aborted"); err != nil {
				return err
			}
			close(stop.free)
		}
		if err := r.stream.Synchronize(ctx); err != nil {
			return fmt.Errorf("a replay that all did their part of: %w", err)
		}
		if job.Rank() == 1 {
			r.comm.Abort(errors.New("enough"))
			if err := job.Put(ctx, "aborted", nil); err != nil {
				return err
			}
		}
		if err := g.Launch(r.stream); !errors.Is(err, nccl.ErrAborted) {
			return fmt.Errorf("the next launch gives %v, want %v", err, nccl.ErrAborted)
		}
		return nil
	})
}
