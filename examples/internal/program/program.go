// Package program is what the examples have in common: the end of a program by a signal or an error, and its -h text.
package program

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

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/rankenv"
)

// ErrUsage is wrapped by errors about the command line, which end a program with code 2.
var ErrUsage = errors.New("usage")

// Main runs a program. SIGINT and SIGTERM end run's context, a second one the process. An error is printed as
// "NAME: rank R: ..." and ends the process with code 1.
func Main(name string, run func(ctx context.Context, args []string, stdout io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the next signal acts as if there were no handler
	err := run(ctx, os.Args[1:], os.Stdout)
	os.Exit(report(os.Stderr, name, err))
}

// report prints how a program ended and returns its exit code.
func report(w io.Writer, name string, err error) (code int) {
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, ErrUsage):
		code = 2
	default:
		code = 1
	}
	if errors.As(err, new(told)) {
		return code
	}
	rank := ""
	if env, e := rankenv.Current(); e == nil && env.Launcher != "" {
		rank = fmt.Sprintf("rank %d: ", env.Rank)
	}
	fmt.Fprintf(w, "%s: %s%v\n", name, rank, err)
	return code
}

// common is an error that all ranks know of. One of them tells it.
type common struct {
	error
	teller int
}

func (c common) Unwrap() error { return c.error }

// told is an error that another rank tells.
type told struct{ error }

func (t told) Unwrap() error { return t.error }

// Common marks an error that all ranks have come to from the same facts: rank 0 is to tell it. See Tell.
func Common(err error) error { return common{err, 0} }

// Agree is for what each rank finds out by itself, such as a file that cannot be read: if a rank has an error, all get one. The first rank that has an error is
// to tell it, also for others with the same and for those with none. Collective. See Tell.
func Agree(ctx context.Context, job *bootstrap.Job, err error) error {
	text := ""
	if err != nil {
		text = err.Error()
	}
	all, e := job.AllGather(ctx, []byte(text))
	if e != nil {
		return errors.Join(err, e)
	}
	teller := slices.IndexFunc(all, func(t []byte) bool { return len(t) > 0 && (err == nil || string(t) == text) })
	switch {
	case teller < 0:
		return nil
	case err == nil:
		err = fmt.Errorf("rank %d: %s", teller, all[teller])
	}
	return common{err, teller}
}

// Tell ends a rank's part in a job: Main will not print an error of Agree or Common if another rank is to tell it. Such a rank waits here until
// one has left the job, so that the first failure of the job is one with a text.
func Tell(ctx context.Context, job *bootstrap.Job, err error) error {
	var c common
	if errors.As(err, &c) && c.teller != job.Rank() {
		job.Barrier(ctx)
		return told{err}
	}
	return err
}

// Parse reads the command line. -h prints about and the flags to stdout and gives flag.ErrHelp.
func Parse(fs *flag.FlagSet, about string, args []string, stdout io.Writer) error {
	fs.Init(fs.Name(), flag.ContinueOnError)
	fs.SetOutput(io.Discard) // Main prints the error, once
	fs.Usage = func() {}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		if env, e := rankenv.Current(); e == nil && env.Rank != 0 {
			return err // one rank tells
		}
		fmt.Fprintf(stdout, "%s\n\nFlags:\n", about)
		fs.SetOutput(stdout)
		fs.PrintDefaults()
		return err
	case err != nil:
		return fmt.Errorf("%w: %v (-h shows the flags)", ErrUsage, err)
	case fs.NArg() > 0:
		return fmt.Errorf("%w: unexpected argument %q (-h shows the flags)", ErrUsage, fs.Arg(0))
	}
	return nil
}

// Usagef is an error about a flag's value.
func Usagef(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrUsage, fmt.Sprintf(format, args...))
}
