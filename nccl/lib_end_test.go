package nccl_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// What gives back a closed graph's registrations takes its time on a stream of the communicator's own. Close leaves nothing of it open.
func TestLibraryCloseBehindDrain(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error { // it closes communicator and device
			b, done, err := openBuffers(w, 4096, false)
			defer done()
			if err != nil {
				return err
			}
			send, _ := cuda.SliceOf[float32](b.send, 0, 16)
			recv, _ := cuda.SliceOf[float32](b.recv, 0, 16)
			g, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, send, recv, nccl.Sum, s) }, graphs.Comms(w.comm))
			if err != nil {
				return err
			}
			return errors.Join(g.Close(), w.comm.Drain(ctx))
		})
	}, append(fakeLibraries(t), "FAKE_NCCL="+os.Getenv("FAKE_NCCL")+"self-late")...))
}
