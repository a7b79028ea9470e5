// Arena shows one large block that is allocated and registered once, and carved into the buffers of a program.
// The same carvings give the same offsets on every rank.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/nccl"
)

const about = `arena: one registered block, carved into a send buffer of float32, a receive buffer that the ranks gather
into, and a buffer of int64 that is reduced in place.

  gorun -np 4 ./examples/arena`

func main() { program.Main("arena", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("arena", flag.ContinueOnError)
	n := fs.Int("n", 1000, "number of `elements` that each rank contributes")
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
	return arena(ctx, job, *n, stdout)
}

func arena(ctx context.Context, job *bootstrap.Job, n int, stdout io.Writer) error {
	if job.Rank() != 0 {
		stdout = io.Discard
	}
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	defer dev.Close()
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

	size := job.Size()
	const align = 256 // of each carving
	block, err := nccl.NewArena(dev, uint64(4*n+4*n*size+8*n+3*align), comm)
	if err != nil {
		return err
	}
	defer block.Close()
	send, err := nccl.Carve[float32](block, n)
	if err != nil {
		return err
	}
	recv, err := nccl.Carve[float32](block, n*size)
	if err != nil {
		return err
	}
	counts, err := nccl.Carve[int64](block, n)
	if err != nil {
		return err
	}

	// The offsets are the same everywhere, since everyone carved the same.
	offsets := []uint64{send.Range().Off, recv.Range().Off, counts.Range().Off}
	var value []byte
	for _, o := range offsets {
		value = binary.LittleEndian.AppendUint64(value, o)
	}
	all, err := job.AllGather(ctx, value)
	if err != nil {
		return err
	}
	for r, theirs := range all {
		if !bytes.Equal(theirs, value) {
			return fmt.Errorf("rank %d carved other offsets", r)
		}
	}
	fmt.Fprintf(stdout, "one block of %d bytes, %d used: send at %d, recv at %d, counts at %d on each rank of %d\n",
		block.Memory().Size(), block.Used(), offsets[0], offsets[1], offsets[2], size)

	if err := cuda.Fill(send, float32(job.Rank()), stream); err != nil {
		return err
	}
	if err := cuda.Fill(counts, int64(job.Rank()), stream); err != nil {
		return err
	}
	if err := nccl.AllGather(comm, send, recv, stream); err != nil {
		return err
	}
	if err := nccl.AllReduce(comm, counts, counts, nccl.Max, stream); err != nil {
		return err
	}
	gathered, most := make([]float32, n*size), make([]int64, n)
	if err := cuda.CopyToHost(gathered, recv, stream); err != nil {
		return err
	}
	if err := cuda.CopyToHost(most, counts, stream); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	for i, v := range gathered {
		if v != float32(i/n) {
			return fmt.Errorf("gathered element %d is %v, want %d", i, v, i/n)
		}
	}
	for i, v := range most {
		if v != int64(size-1) {
			return fmt.Errorf("count %d is %d, want %d", i, v, size-1)
		}
	}
	s := comm.Stats()
	fmt.Fprintf(stdout, "%d registration: %d bytes direct, %d bytes staged\n", s.Registrations, s.BytesDirect, s.BytesStaged)
	if s.Registrations != 1 || s.BytesStaged != 0 {
		return fmt.Errorf("%d registrations and %d staged bytes, want 1 and 0", s.Registrations, s.BytesStaged)
	}
	return block.Close()
}
