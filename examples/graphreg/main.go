// Graphreg shows registration by graph capture: two all-reduces in one graph, from one buffer at two offsets to
// another one. Nobody registers anything; the capture does, and the end of the graph and a drain take it back.
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

const about = `graphreg: two all-reduces captured into one graph; their buffers are registered by the capture and
deregistered when the graph is closed and the communicator drained.

  gorun -np 2 ./examples/graphreg`

func main() { program.Main("graphreg", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("graphreg", flag.ContinueOnError)
	n := fs.Int("n", 1<<18, "number of `elements` (float32) of each all-reduce")
	if err := program.Parse(fs, about, args, stdout); err != nil {
		return err
	}
	if *n < 1 {
		return program.Usagef("-n must be at least 1")
	}
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	return graphReg(ctx, job, *n, stdout)
}

func graphReg(ctx context.Context, job *bootstrap.Job, n int, stdout io.Writer) error {
	if job.Rank() != 0 {
		stdout = io.Discard // one rank tells
	}
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	defer dev.Close()
	send, err := nccl.Alloc[float32](dev, 2*n)
	if err != nil {
		return err
	}
	defer send.Free()
	recv, err := nccl.Alloc[float32](dev, 2*n)
	if err != nil {
		return err
	}
	defer recv.Free()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	// Small calls go by the library, too: they would need no registration otherwise.
	comm, err := nccl.InitConfig(ctx, job, dev, &nccl.Config{NoPeer: true})
	if err != nil {
		return err
	}
	defer comm.Close()

	rank, size := float32(job.Rank()), float32(job.Size())
	if err := cuda.Fill(send.Slice(0, n), rank, stream); err != nil {
		return err
	}
	if err := cuda.Fill(send.Slice(n, 2*n), -rank, stream); err != nil {
		return err
	}
	show := func(when string) nccl.Stats {
		s := comm.Stats()
		fmt.Fprintf(stdout, "%-15s %d registrations, %d held by graphs, %d pending release, %d mappings of peers' memory\n",
			when+":", s.Registrations, s.GraphHolds, s.PendingRelease, s.PeerMappings)
		return s
	}
	if s := show("before"); s.Registrations != 0 {
		return fmt.Errorf("%d registrations before the capture, want none", s.Registrations)
	}
	graph, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
		if err := nccl.AllReduce(comm, send.Slice(0, n), recv.Slice(0, n), nccl.Sum, s); err != nil {
			return err
		}
		return nccl.AllReduce(comm, send.Slice(n, 2*n), recv.Slice(n, 2*n), nccl.Sum, s)
	}, graphs.Comms(comm))
	if err != nil {
		return err
	}
	defer graph.Close()
	if s := show("captured"); s.GraphHolds != 2 {
		return fmt.Errorf("%d registrations held by the graph, want 2: the buffers", s.GraphHolds)
	}
	for _, c := range graph.Calls() {
		fmt.Fprintf(stdout, "  %s: mode %v: %s\n", c.Call, c.Mode, c.Reason)
	}

	for range 10 {
		if err := graph.Launch(stream); err != nil {
			return err
		}
	}
	got := make([]float32, 2*n)
	if err := cuda.CopyToHost(got, recv.All(), stream); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	for i, v := range got {
		want := size * (size - 1) / 2
		if i >= n {
			want = -want
		}
		if v != want {
			return fmt.Errorf("element %d is %v, want %v", i, v, want)
		}
	}
	s := show("launched")
	fmt.Fprintf(stdout, "  %d bytes direct, %d bytes staged\n", s.BytesDirect, s.BytesStaged)
	if s.BytesStaged != 0 {
		return fmt.Errorf("%d bytes were staged, want none: the buffers are registered", s.BytesStaged)
	}

	if err := graph.Close(); err != nil {
		return err
	}
	// On a GPU the registrations are still pending here: the driver tells a moment later that the graph is gone, and NCCL lets go when it is driven on.
	show("graph closed")
	if err := comm.Drain(ctx); err != nil {
		return err
	}
	if s := show("drained"); s.Registrations != 0 || s.PendingRelease != 0 || s.PeerMappings != 0 {
		return fmt.Errorf("the closed graph left, after a drain, %d registrations, %d pending, %d mappings", s.Registrations, s.PendingRelease, s.PeerMappings)
	}
	return nil
}
