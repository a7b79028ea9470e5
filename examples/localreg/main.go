// Localreg shows local registration: a buffer is registered before its first collective, used many times, and
// deregistered. Nothing is copied through the library's own buffers meanwhile.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/nccl"
)

const about = `localreg: buffers are registered once, used by many all-reduces, and deregistered.

  gorun -np 2 ./examples/localreg`

func main() { program.Main("localreg", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("localreg", flag.ContinueOnError)
	n := fs.Int("n", 1<<18, "number of `elements` (float32)")
	calls := fs.Int("calls", 50, "number of all-reduces")
	if err := program.Parse(fs, about, args, stdout); err != nil {
		return err
	}
	if *n < 1 || *calls < 1 {
		return program.Usagef("-n and -calls must be at least 1")
	}
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	return localReg(ctx, job, *n, *calls, stdout)
}

func localReg(ctx context.Context, job *bootstrap.Job, n, calls int, stdout io.Writer) error {
	if job.Rank() != 0 {
		stdout = io.Discard
	}
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	defer dev.Close()
	send, err := nccl.Alloc[float32](dev, n)
	if err != nil {
		return err
	}
	defer send.Free()
	recv, err := nccl.Alloc[float32](dev, n)
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

	reduce := func(calls int) error {
		if err := cuda.Fill(recv.All(), 0, stream); err != nil {
			return err
		}
		for range calls {
			if err := nccl.AllReduce(comm, send.All(), recv.All(), nccl.Sum, stream); err != nil {
				return err
			}
		}
		got := make([]float32, n)
		if err := cuda.CopyToHost(got, recv.All(), stream); err != nil {
			return err
		}
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		want := float32(job.Size() * (job.Size() + 1) / 2)
		for i, v := range got {
			if v != want {
				return fmt.Errorf("element %d is %v, want %v", i, v, want)
			}
		}
		return nil
	}
	if err := cuda.Fill(send.All(), float32(job.Rank()+1), stream); err != nil {
		return err
	}

	// Every rank registers its buffers: a registered buffer on one rank and an unregistered one on another is an error.
	sendReg, err := comm.Register(send.Memory())
	if err != nil {
		return err
	}
	defer sendReg.Close()
	recvReg, err := comm.Register(recv.Memory())
	if err != nil {
		return err
	}
	defer recvReg.Close()
	if err := reduce(calls); err != nil {
		return err
	}
	with := comm.Stats()
	fmt.Fprintf(stdout, "%d registrations, %d calls: %d bytes direct, %d bytes staged\n", with.Registrations, calls, with.BytesDirect, with.BytesStaged)
	if with.BytesStaged != 0 {
		return fmt.Errorf("%d bytes were staged, want none", with.BytesStaged)
	}

	if err := errors.Join(sendReg.Close(), recvReg.Close()); err != nil {
		return err
	}
	if err := reduce(1); err != nil {
		return err
	}
	without := comm.Stats()
	fmt.Fprintf(stdout, "%d registrations, 1 call: %d bytes direct, %d bytes staged\n",
		without.Registrations, without.BytesDirect-with.BytesDirect, without.BytesStaged)
	if without.Registrations != 0 {
		return fmt.Errorf("%d registrations are left", without.Registrations)
	}
	if job.Size() > 1 && without.BytesStaged == 0 {
		return errors.New("no byte of the unregistered call was staged")
	}
	return nil
}
