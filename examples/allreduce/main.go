// Allreduce is the smallest program with everything in it: the ranks find each other, capture an all-reduce into a
// graph, launch it a few times and look at the sum.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

const about = `allreduce: each of n ranks contributes its rank + 1, all get the sum n(n+1)/2.

  gorun -np 4 ./examples/allreduce`

func main() { program.Main("allreduce", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("allreduce", flag.ContinueOnError)
	n := fs.Int("n", 1<<20, "number of `elements` (float32)")
	launches := fs.Int("launches", 20, "how often the graph is launched")
	if err := program.Parse(fs, about, args, stdout); err != nil {
		return err
	}
	if *n < 1 || *launches < 1 {
		return program.Usagef("-n and -launches must be at least 1")
	}
	job, err := bootstrap.Join(ctx) // rank, size, the others
	if err != nil {
		return err
	}
	defer job.Close()
	return allReduce(ctx, job, *n, *launches, stdout)
}

func allReduce(ctx context.Context, job *bootstrap.Job, n, launches int, stdout io.Writer) error {
	dev, err := cuda.Open(job.Device()) // this rank's GPU; the host device where the machine has none
	if err != nil {
		return err
	}
	defer dev.Close()
	grad, err := nccl.Alloc[float32](dev, n) // memory that can be registered
	if err != nil {
		return err
	}
	defer grad.Free()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	comm, err := nccl.Init(ctx, job, dev) // the unique id travels by gossip
	if err != nil {
		return err
	}
	defer comm.Close()
	graph, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
		if err := cuda.Fill(grad.All(), float32(job.Rank()+1), s); err != nil {
			return err
		}
		return nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Sum, s)
	}, graphs.Comms(comm))
	if err != nil {
		return err
	}
	defer graph.Close() // its registrations go with it
	for range launches {
		if err := graph.Launch(stream); err != nil {
			return err
		}
	}
	sum := make([]float32, n)
	if err := cuda.CopyToHost(sum, grad.All(), stream); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	want := float32(job.Size() * (job.Size() + 1) / 2)
	for i, v := range sum {
		if v != want {
			return fmt.Errorf("element %d is %v, want %v", i, v, want)
		}
	}
	if job.Rank() == 0 {
		fmt.Fprintf(stdout, "%d launches on rank 0 of %d (%v): %d elements, each is %v as it should be\n", launches, job.Size(), dev, n, want)
	}
	return nil
}
