package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// stopper keeps a device from going on with anything, from when all that was enqueued before it has had a step.
type stopper struct {
	steps         int
	stopped, free chan struct{}
}

func newStopper() *stopper {
	return &stopper{stopped: make(chan struct{}), free: make(chan struct{})}
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

// What a member did for a call is no less done when that member fails right after it: the call succeeds on all, the next one does not.
func TestDoneBeforeFailure(t *testing.T) {
	sum := func(w *world, b buffers) error {
		send, _ := cuda.SliceOf[float32](b.send, 0, 16)
		recv, _ := cuda.SliceOf[float32](b.recv, 0, 16)
		return nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream)
	}
	message := func(w *world, b buffers) error {
		buf, _ := cuda.SliceOf[float32](b.send, 0, 16)
		if w.comm.Rank() == 0 {
			return nccl.Send(w.comm, buf, 1, w.stream)
		}
		return nccl.Recv(w.comm, buf, 0, w.stream)
	}
	for _, tc := range []struct {
		name       string
		call       func(*world, buffers) error
		registered bool
		ahead      bool // rank 1 has posted its call before rank 0 comes to it
	}{
		{"all-reduce", sum, false, false},
		{"registered all-reduce", sum, true, true},
		{"send", message, false, true},
		{"registered send", message, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			stoppers := [2]*stopper{newStopper(), newStopper()}
			aborted := make(chan struct{})
			ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error {
					b, done, err := openBuffers(w, 4096, tc.registered)
					defer done()
					if err != nil {
						return err
					}
					side, err := w.dev.NewStream() // stepped after w.stream
					if err != nil {
						return err
					}
					defer side.Close()
					// Once before, so that the memory is mapped.
					if err := errors.Join(tc.call(w, b), w.stream.Synchronize(ctx), job.Barrier(ctx)); err != nil {
						return err
					}
					own, other := stoppers[job.Rank()], stoppers[1-job.Rank()]
					if tc.ahead == (job.Rank() == 0) {
						<-other.stopped
					}
					err = tc.call(w, b)
					if tc.ahead || job.Rank() == 0 {
						err = errors.Join(err, side.Submit(own))
					}
					if err != nil {
						return err
					}
					if job.Rank() == 0 {
						<-own.stopped
						if tc.ahead {
							close(other.free)
						}
						<-aborted
						close(own.free)
					}
					if err := w.stream.Synchronize(ctx); err != nil {
						return fmt.Errorf("a call that all did their part of: %w", err)
					}
					if job.Rank() == 1 {
						w.comm.Abort(errors.New("enough"))
						close(aborted)
					}
					return wantErr(tc.call(w, b), nccl.ErrAborted, "by rank 1: enough")
				})
			})
		})
	}
}
