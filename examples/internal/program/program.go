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
	"syscall"

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
	rank := ""
	if env, e := rankenv.Current(); e == nil && env.Launcher != "" {
		rank = fmt.Sprintf("rank %d: ", env.Rank)
	}
	fmt.Fprintf(w, "%s: %s%v\n", name, rank, err)
	return code
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
