package graphs_test

import (
	"context"
	"fmt"
	"log"
	"sync"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// Two ranks of one process capture an all-reduce and replay it three times. A program under gorun has one rank a process,
// and gets its job from bootstrap.Join.
func Example() {
	var ranks sync.WaitGroup
	for _, job := range bootstrap.InProcess(2) {
		ranks.Go(func() {
			if err := run(context.Background(), job); err != nil {
				log.Printf("rank %d: %v", job.Rank(), err)
			}
		})
	}
	ranks.Wait()
	// Output:
	// all-reduce of 4 float32, sum on world at example_test.go:60: mode window: registered by the capture, at the same offsets on all ranks
	// [8 8 8 8]
	// registered with the graph: 1, after Close: 0
}

func run(ctx context.Context, job *bootstrap.Job) error {
	defer job.Close()
	dev, err := cuda.Open("host")
	if err != nil {
		return err
	}
	defer dev.Close()
	grad, err := nccl.Alloc[float32](dev, 4)
	if err != nil {
		return err
	}
	defer grad.Free()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer comm.Close()
	if err := cuda.Fill(grad.All(), 1, stream); err != nil {
		return err
	}

	g, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
		return nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Sum, s)
	}, graphs.Comms(comm))
	if err != nil {
		return err
	}
	defer g.Close()
	for range 3 { // 1 on each rank, then 2, 4, 8
		if err := g.Launch(stream); err != nil {
			return err
		}
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}

	if job.Rank() == 0 {
		for _, c := range g.Calls() {
			fmt.Println(c)
		}
		fmt.Println(grad.All().Host())
		held := comm.Stats().Registrations
		if err := g.Close(); err != nil {
			return err
		}
		fmt.Printf("registered with the graph: %d, after Close: %d\n", held, comm.Stats().Registrations)
	}
	return nil
}
