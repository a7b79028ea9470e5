// Winuserptr shows the user pointer of a window: the address that the window was made of, as its owner and the library have it, and the
// probe for machines that have no windows.
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

const about = `winuserptr: a window gives back the address of the buffer that it was made of.

  gorun -np 2 ./examples/winuserptr`

func main() { program.Main("winuserptr", run) }

func run(ctx context.Context, args []string, stdout io.Writer) error {
	fs := flag.NewFlagSet("winuserptr", flag.ContinueOnError)
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
	return winUserPtr(ctx, job, *n, stdout)
}

func winUserPtr(ctx context.Context, job *bootstrap.Job, n int, stdout io.Writer) error {
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
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer comm.Close()

	if ok, why := comm.WindowSupport(); ok {
		fmt.Fprintln(stdout, "windows: yes")
	} else {
		fmt.Fprintln(stdout, "windows: no:", why)
	}
	// Without windows it is nil, on all ranks, and no error.
	window, err := comm.Window(ctx, buf.All().Range())
	if err != nil {
		return err
	}
	defer window.Close(ctx)
	if window == nil {
		fmt.Fprintf(stdout, "no window; its user pointer is %#x\n", window.UserPtr())
		return nil
	}
	if got, want := window.UserPtr(), buf.All().Range().Pointer(); got != want {
		return fmt.Errorf("user pointer %#x, the buffer is at %#x", got, want)
	}
	fmt.Fprintf(stdout, "the window's user pointer is %#x, the buffer's address\n", window.UserPtr())
	switch err := window.CheckUserPtr(); {
	case errors.Is(err, nccl.ErrUnsupported):
		fmt.Fprintln(stdout, "the library does not tell it:", err)
	case err != nil:
		return err
	default:
		fmt.Fprintln(stdout, "the library has the same")
	}
	return nil
}
