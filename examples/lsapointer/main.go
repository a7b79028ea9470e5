// Lsapointer shows a window's addresses: every rank asks for the address of each other rank's part, and a kernel of its own reads
// the others' memory through them, without a collective.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/nccl"
)

const about = `lsapointer: each rank reads the others' memory by the addresses that a window gives.

  gorun -np 2 ./examples/lsapointer

On GPUs it needs NCCL 2.29.2 or newer.`

func main() { program.Main("lsapointer", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("lsapointer", flag.ContinueOnError)
	n := fs.Int("n", 1<<16, "number of `elements` (float32)")
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
	return lsaPointer(ctx, job, *n, stdout)
}

// readArgs are the kernel's arguments: an address in another rank's memory, and where its contents go.
type readArgs struct {
	Peer uint64
	Out  cuda.Slice[float32]
}

var read = cuda.KernelSpec[readArgs]{
	Name: "read",
	CUDA: `extern "C" __global__ void read(read_args a, long long n) {
	long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (i < n)
		a.Out[i] = ((const float *)a.Peer)[i];
}`,
	Host: func(_ cuda.Grid, lo, hi int, a readArgs) {
		copy(a.Out.Host()[lo:hi], floatsAt(a.Peer, hi)[lo:])
	},
}

// floatsAt is memory of the host platform by its address.
func floatsAt(address uint64, n int) []float32 {
	return unsafe.Slice(*(**float32)(unsafe.Pointer(&address)), n)
}

func lsaPointer(ctx context.Context, job *bootstrap.Job, n int, stdout io.Writer) error {
	if job.Rank() != 0 {
		stdout = io.Discard
	}
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	defer dev.Close()
	buf, err := nccl.Alloc[float32](dev, n)
	if err != nil {
		return err
	}
	defer buf.Free()
	out, err := cuda.Malloc[float32](dev, n)
	if err != nil {
		return err
	}
	defer out.Free()
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

	window, err := comm.Window(ctx, buf.All().Range())
	if err != nil {
		return err
	}
	defer window.Close(ctx)
	if window == nil {
		_, why := comm.WindowSupport()
		fmt.Fprintln(stdout, "no window:", why)
		return nil
	}
	if err := cuda.Fill(buf.All(), float32(job.Rank()+1), stream); err != nil {
		return err
	}
	if err := stream.Synchronize(ctx); err != nil {
		return err
	}
	// All parts are written before any is read.
	if err := job.Barrier(ctx); err != nil {
		return err
	}
	kernel, err := cuda.NewKernel(dev, read)
	if err != nil {
		return err
	}
	for rank := range job.Size() {
		address, err := window.LSADevicePtr(rank)
		if errors.Is(err, nccl.ErrUnsupported) {
			fmt.Fprintf(stdout, "no address of rank %d's part: %v\n", rank, err)
			break
		}
		if err != nil {
			return err
		}
		if err := kernel.Launch(stream, cuda.Grid{N: n}, readArgs{uint64(address), out.All()}); err != nil {
			return err
		}
		got := make([]float32, n)
		if err := cuda.CopyToHost(got, out.All(), stream); err != nil {
			return err
		}
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		for i, v := range got {
			if want := float32(rank + 1); v != want {
				return fmt.Errorf("element %d of rank %d is %v, want %v", i, rank, v, want)
			}
		}
		fmt.Fprintf(stdout, "rank %d's part is at %#x here: %d elements read, each %v\n", rank, address, n, got[0])
	}
	// Nobody's window ends while another rank reads it.
	return job.Barrier(ctx)
}
