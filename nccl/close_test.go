package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/nccl"
)

// Close is bounded: it does not wait for a member that goes on without the communicator, and that one has no error, as it makes no call.
func TestCloseIsBounded(t *testing.T) {
	closed := make(chan struct{})
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[int32](w.dev, 8)
			if err != nil {
				return err
			}
			defer b.Free()
			if err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream)); err != nil {
				return err
			}
			if job.Rank() == 0 {
				defer close(closed)
				start := time.Now()
				err := w.comm.Close()
				if took := time.Since(start); took > room {
					return fmt.Errorf("Close took %v", took)
				}
				return errors.Join(err, w.comm.Close())
			}
			<-closed
			if err := w.comm.Err(); err != nil {
				return err
			}
			return w.comm.Close()
		})
	})
}

// Operations that the others never joined end with Close, which says so; the others are told.
func TestCloseWithWork(t *testing.T) {
	closed := make(chan struct{})
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[int32](w.dev, 8)
			if err != nil {
				return err
			}
			defer b.Free()
			if job.Rank() == 1 {
				<-closed
				return wantErr(nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream), nccl.ErrAborted, "rank 0 closed")
			}
			defer close(closed)
			if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
				return err
			}
			if err := wantErr(w.comm.Close(), nccl.ErrAborted, "1 enqueued operations"); err != nil {
				return err
			}
			return wantErr(w.stream.Synchronize(ctx), nccl.ErrAborted, "all-reduce #1")
		})
	})
}
