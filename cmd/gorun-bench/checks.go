package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"

	"github.com/gorun-dev/gorun/rankenv"
)

// checks are the programs behind gorun check, by their first argument.
var checks = map[string]struct {
	run  func(ctx context.Context, args []string, stdout, stderr io.Writer) error
	help string
}{
	"probe":        {probeMain, probeHelp},
	"registration": {registrationMain, registrationHelp},
}

// runCheck runs a check, if args name one, and returns its exit code.
func runCheck(ctx context.Context, args []string, stdout, stderr io.Writer) (code int, ok bool) {
	if len(args) == 0 {
		return 0, false
	}
	c, ok := checks[args[0]]
	if !ok {
		return 0, false
	}
	env, envErr := rankenv.Current()
	first := envErr != nil || env.Rank == 0
	err := c.run(ctx, args[1:], stdout, stderr)
	if err == nil {
		return 0, true
	}
	if _, ok := errors.AsType[*faultsError](err); ok {
		return exitFaults, true
	}
	usage, isUsage := errors.AsType[*usageError](err)
	switch {
	case errors.Is(err, flag.ErrHelp):
		if first {
			io.WriteString(stdout, c.help)
		}
		return 0, true
	case isUsage:
		if first { // all ranks were given the same
			fmt.Fprintf(stderr, "gorun-bench %s: %v\n", args[0], usage)
		}
		return 2, true
	}
	rank := ""
	if envErr == nil && env.Launcher != "" {
		rank = fmt.Sprintf("rank %d: ", env.Rank)
	}
	fmt.Fprintf(stderr, "gorun-bench: %s%s\n", rank, strings.TrimSuffix(err.Error(), "\n"))
	return 1, true
}

// usageError is a wrong command line.
type usageError struct{ error }

func usagef(format string, args ...any) error {
	return &usageError{fmt.Errorf(format+"; -h shows the flags", args...)}
}

// parseFlags parses the arguments of a command that takes flags only; flag.ErrHelp comes back as it is.
func parseFlags(fs *flag.FlagSet, args []string) error {
	fs.SetOutput(io.Discard)
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return err
	case err != nil:
		return usagef("%w", err)
	case fs.NArg() > 0:
		return usagef("unexpected argument %q", fs.Arg(0))
	}
	return nil
}
