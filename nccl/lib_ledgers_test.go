package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// One call of a run is another operation on one rank, of which the library notices nothing: it is done, with wrong data. No wait says that it is well, wherever in the
// run the call was, and the error tells which it was.
func TestLibraryMismatchInRun(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		defer dev.Close()
		for i, at := range []int{1, 2, 9, 64, 65, 66, 140} {
			byEvent := i%2 == 1
			err := withComm(ctx, job, dev, &nccl.Config{Name: fmt.Sprint("call ", at)}, func(w *world) error {
				b, done, err := openBuffers(w, 4096, false)
				defer done()
				if err != nil {
					return err
				}
				send, _ := cuda.SliceOf[float32](b.send, 0, 8)
				recv, _ := cuda.SliceOf[float32](b.recv, 0, 8)
				for i := 1; i <= 140; i++ {
					red := nccl.Sum
					if i == at && job.Rank() == 1 {
						red = nccl.Max
					}
					if err = nccl.AllReduce(w.comm, send, recv, red, w.stream); err != nil {
						break
					}
				}
				defer w.comm.Close() // before the buffers go: calls that were enqueued before the error still use them
				ctx, cancel := context.WithTimeout(ctx, room)
				defer cancel()
				if err == nil && byEvent {
					err = waitEvent(ctx, w)
				} else if err == nil {
					err = w.stream.Synchronize(ctx)
				}
				return wantErr(err, nccl.ErrMismatch,
					fmt.Sprintf("call #%d: rank 1: all-reduce of 8 float32, max; rank 0: all-reduce of 8 float32, sum", at))
			})
			if err != nil {
				return fmt.Errorf("call %d: %w", at, err)
			}
		}
		return nil
	}, nil)
}

// waitEvent waits for all that is enqueued, by an event.
func waitEvent(ctx context.Context, w *world) error {
	e, err := w.dev.NewEvent()
	if err != nil {
		return err
	}
	return errors.Join(w.stream.Record(e), e.Synchronize(ctx), e.Close())
}
