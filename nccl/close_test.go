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

// A second Close returns when the first has ended: what the communicator uses can be closed behind either.
func TestCloseAtOnce(t *testing.T) {
	closing := make(chan struct{})
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			if job.Rank() == 1 {
				<-closing
				return w.comm.Close()
			}
			first := make(chan error, 1)
			go func() { first <- w.comm.Close() }()
			for end := time.Now().Add(room); !shut(w.comm); {
				if time.Now().After(end) {
					return errors.New("the first Close does not begin")
				}
			}
			close(closing)
			if err := w.comm.Close(); err != nil {
				return err
			}
			if err := wantErr(w.comm.Err(), nccl.ErrClosed); err != nil {
				return fmt.Errorf("after the second Close: %w", err)
			}
			return <-first
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

// shut reports whether a Close has begun.
func shut(c *nccl.Comm) bool {
	op, err := nccl.PreMulSum(c, float32(1)) // a call that only this rank makes
	if err == nil {
		c.DestroyRedOp(op)
	}
	return errors.Is(err, nccl.ErrClosed)
}
