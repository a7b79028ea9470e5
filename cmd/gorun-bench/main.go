// Command gorun-bench measures collectives: how long they take and whether their results are right. It is a rank program;
// gorun bench starts it.
//
// Sizes, bandwidths and flags mean what they mean in nccl-tests, so that figures can be compared.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/rankenv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the next signal acts as if there were no handler
	os.Exit(realMain(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// realMain runs the program and returns its exit code: 1 for an error or a wrong result, 2 for a wrong command line.
func realMain(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	env, envErr := rankenv.Current()
	first := envErr != nil || env.Rank == 0
	rank := ""
	if envErr == nil && env.Launcher != "" {
		rank = fmt.Sprintf("rank %d: ", env.Rank)
	}
	c, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		if first {
			io.WriteString(stdout, helpText)
		}
		return 0
	case err != nil:
		if first { // all ranks were given the same
			fmt.Fprintf(stderr, "gorun-bench: %v\n", err)
		}
		return 2
	}
	err = run(ctx, c, stdout)
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[*wrongError](err); !ok || first {
		fmt.Fprintf(stderr, "gorun-bench: %s%v\n", rank, err)
	}
	return 1
}

func run(ctx context.Context, c *config, stdout io.Writer) error {
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	return runJob(ctx, job, c, stdout)
}

// runJob measures what c asks for. Rank 0 writes to stdout.
func runJob(ctx context.Context, job *bootstrap.Job, c *config, stdout io.Writer) error {
	if job.Rank() != 0 {
		stdout = io.Discard
	}
	if c.root >= job.Size() {
		return fmt.Errorf("-root %d: there are %d ranks", c.root, job.Size())
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
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer comm.Close()
	b := &bencher{config: c, job: job, dev: dev, stream: stream, comm: comm}
	b.out = newReport(stdout, c, dev, job.Size())
	if err := types[c.dtype](ctx, b); err != nil {
		return err
	}
	if b.wrong > 0 {
		return &wrongError{b.wrong, b.checked}
	}
	return nil
}

// wrongError says that results were wrong. Every rank has it.
type wrongError struct{ wrong, checked int }

func (e *wrongError) Error() string {
	return fmt.Sprintf("wrong results in %d of %d measurements", e.wrong, e.checked)
}
