package nccl_test

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

// Whatever way an operation took to a stream, who has waited for that knows that it is done.
func TestLibraryDone(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			side, err := w.dev.NewStream()
			if err != nil {
				return err
			}
			defer side.Close()
			b, done, err := openBuffers(w, 4096, false)
			defer done()
			if err != nil {
				return err
			}
			send, _ := cuda.SliceOf[float32](b.send, 0, 16)
			recv, _ := cuda.SliceOf[float32](b.recv, 0, 16)
			sum := func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, send, recv, nccl.Sum, s) }
			exchange := func() error {
				peer := 1 - w.comm.Rank()
				return errors.Join(nccl.Send(w.comm, send, peer, w.stream), nccl.Recv(w.comm, recv, peer, w.stream))
			}
			replay := func(s *cuda.Stream) error { // last: no call goes straight beside the windows that a capture has got
				g, err := graphs.Capture(ctx, w.stream, sum, graphs.Comms(w.comm))
				if err != nil {
					return err
				}
				return errors.Join(g.Launch(s), g.Close())
			}
			for _, way := range []struct {
				name string
				call func() error
			}{
				{"straight", func() error { return sum(w.stream) }},
				{"straight, another stream", func() error { return sum(side) }},
				{"not straight", func() error {
					nccl.SetStraight(w.comm, false)
					defer nccl.SetStraight(w.comm, true)
					return sum(w.stream)
				}},
				{"group on two streams", func() error { return nccl.Group(func() error { return errors.Join(sum(w.stream), sum(side)) }, w.comm) }},
				{"messages", func() error { return nccl.Group(exchange, w.comm) }},
				{"replay", func() error { return replay(w.stream) }},
				{"replay on another stream", func() error { return replay(side) }},
			} {
				if err := errors.Join(way.call(), w.stream.Synchronize(ctx), side.Synchronize(ctx)); err != nil {
					return fmt.Errorf("%s: %w", way.name, err)
				}
				if n := nccl.Undone(w.comm); n != 0 {
					return fmt.Errorf("%s: %d operations are not done, and nothing is under way", way.name, n)
				}
			}
			return nil
		})
	}, fakeLibraries(t)...))
}
