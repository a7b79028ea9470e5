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

// Messages in great number, the receiver far behind the sender: none is taken for another, and one of them that is wrong is found, however long ago.
func TestLibraryManyMessages(t *testing.T) {
	const messages = 270 // a ledger keeps 256; a device's queue has room for them
	for _, bad := range []int{0, 10, messages} {
		t.Run(fmt.Sprintf("bad=%d", bad), func(t *testing.T) {
			onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
				return withDevice(ctx, job, nil, func(w *world) error {
					b, done, err := openBuffers(w, 8192, false)
					defer done()
					if err != nil {
						return err
					}
					small, _ := cuda.SliceOf[int32](b.send, 0, 256)
					count := func(i int) int { return 1 + i*i%200 }
					if job.Rank() == 0 {
						for i := range messages {
							if err := nccl.Send(w.comm, small.Slice(0, count(i)), 1, w.stream); err != nil {
								return wantErr(err, nccl.ErrMismatch)
							}
							if i == 0 { // the other is there: the library connects the two in their first message
								if err := w.stream.Synchronize(ctx); err != nil {
									return err
								}
							}
						}
					}
					if job.Rank() == 1 {
						if err := errors.Join(nccl.Recv(w.comm, small.Slice(0, count(0)), 0, w.stream), w.stream.Synchronize(ctx)); err != nil {
							return err
						}
					}
					if err := job.Barrier(ctx); err != nil {
						return err
					}
					if job.Rank() == 1 {
						for i := 1; i < messages && err == nil; i++ {
							n := count(i)
							if i == bad-1 {
								n++
							}
							err = nccl.Recv(w.comm, small.Slice(0, n), 0, w.stream)
						}
					}
					defer w.comm.Close() // before the buffers go: what is enqueued uses them
					a := &attempt{world: w}
					if bad == 0 {
						return a.wait(err)
					}
					text := []string{"rank 0", "rank 1", fmt.Sprintf("message #%d", messages)}
					if bad < messages {
						text = []string{"the messages from rank 0 to rank 1 differ in count or type somewhere before message #"}
					}
					return wantErr(a.fails(err), nccl.ErrMismatch, text...)
				})
			}, nil)
		})
	}
}
