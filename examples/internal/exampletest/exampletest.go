// Package exampletest runs the examples in tests.
package exampletest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/examples/internal/program"
)

// Program is what a rank of an example does after it has joined.
type Program func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error

// InProcess runs n ranks in this process and returns what rank 0 printed. The others are to print nothing.
func InProcess(t *testing.T, n int, f Program) string {
	t.Helper()
	var out bytes.Buffer
	ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
		if job.Rank() == 0 {
			return f(ctx, job, &out)
		}
		var other bytes.Buffer
		err := f(ctx, job, &other)
		if err == nil && other.Len() > 0 {
			err = fmt.Errorf("it prints %q, which is for rank 0 to do", other.String())
		}
		return err
	})
	return out.String()
}

// Processes runs n ranks, each in a process of its own.
func Processes(t *testing.T, n int, f Program) {
	t.Helper()
	for _, r := range ranktest.RunProcesses(t, n, func(ctx context.Context, job *bootstrap.Job) error {
		return f(ctx, job, io.Discard)
	}) {
		if r.Code != 0 || r.Signal != "" {
			t.Errorf("rank %d: code %d, signal %q: %s\n%s", r.Rank, r.Code, r.Signal, r.Err, r.Output)
		}
	}
}

// Alone runs a whole program as a job of one, without launcher, and has it refuse -n 0.
func Alone(t *testing.T, run func(ctx context.Context, args []string, stdout io.Writer) error, args ...string) {
	t.Helper()
	var out bytes.Buffer
	if err := run(t.Context(), args, &out); err != nil {
		t.Fatal(err)
	}
	if out.Len() == 0 {
		t.Error("it printed nothing")
	}
	if err := run(t.Context(), []string{"-n", "0"}, io.Discard); !errors.Is(err, program.ErrUsage) || !strings.Contains(err.Error(), "-n") {
		t.Errorf("-n 0: got error %v, want one about usage", err)
	}
}

// Contains fails the test for each of the parts that out lacks.
func Contains(t *testing.T, out string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(out, p) {
			t.Errorf("output lacks %q:\n%s", p, out)
		}
	}
}
