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
	"slices"
	"syscall"
	"time"

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

// realMain runs the program and returns its exit code: 1 for an error or a wrong result, 2 for a wrong command line, 3 where a check has found faults,
// 4 where gorun bench has asked about flags that are refused.
func realMain(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if code, ok := runCheck(ctx, args, stdout, stderr); ok {
		return code
	}
	if len(args) > 0 && args[0] == "flags" {
		return flagsMain(args[1:], stdout)
	}
	if len(args) > 0 && args[0] == "compare" {
		return compareMain(args[1:], stdout, stderr)
	}
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
	err = run(ctx, c, stdout, stderr)
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[*wrongError](err); !ok || first {
		fmt.Fprintf(stderr, "gorun-bench: %s%v\n", rank, err)
	}
	return 1
}

func run(ctx context.Context, c *config, stdout, stderr io.Writer) error {
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	return runJob(ctx, job, c, stdout, stderr)
}

// runJob measures what c asks for. Rank 0 writes: measurements to stdout, to stderr how far it is.
func runJob(ctx context.Context, job *bootstrap.Job, c *config, stdout, stderr io.Writer) (err error) {
	if err := c.fits(job.Size()); err != nil {
		return err
	}
	b, done, err := newBencher(ctx, job, c, stdout, stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, done()) }()
	if err := types[c.dtype](ctx, b); err != nil {
		return err
	}
	if b.wrong > 0 {
		return &wrongError{b.wrong, b.checked}
	}
	return nil
}

// newBencher opens what a rank measures with; done closes it.
func newBencher(ctx context.Context, job *bootstrap.Job, c *config, stdout, stderr io.Writer) (b *bencher, done func() error, err error) {
	if job.Rank() != 0 {
		stdout, stderr = io.Discard, io.Discard
	}
	var open []io.Closer
	closeAll := func() error {
		var errs []error
		for _, c := range slices.Backward(open) {
			errs = append(errs, c.Close())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll())
		}
	}()
	b = &bencher{config: c, job: job, on: newProgress(stderr, time.Now)}
	if b.dev, err = cuda.Open(job.Device()); err != nil {
		return nil, nil, err
	}
	open = append(open, b.dev)
	if b.stream, err = b.dev.NewStream(); err != nil {
		return nil, nil, err
	}
	open = append(open, b.stream)
	auto := slices.Contains(c.modes, "auto")
	if b.comm, err = nccl.InitConfig(ctx, job, b.dev, &nccl.Config{Check: c.compare, NoPeer: !auto}); err != nil {
		return nil, nil, err
	}
	open = append(open, b.comm)
	b.library = b.comm
	if _, ok := b.comm.Library(); ok && auto && len(c.modes) > 1 {
		if b.library, err = nccl.InitConfig(ctx, job, b.dev, &nccl.Config{Name: "library", Check: c.compare, NoPeer: true}); err != nil {
			return nil, nil, err
		}
		open = append(open, b.library)
	}
	b.out = newReport(stdout, c, b.dev, b.comm)
	return b, closeAll, nil
}

// wrongError says that results were wrong. Every rank has it.
type wrongError struct{ wrong, checked int }

func (e *wrongError) Error() string {
	return fmt.Sprintf("wrong results in %d of %d measurements", e.wrong, e.checked)
}
