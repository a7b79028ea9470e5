package main

import (
	"context"
	"fmt"
	"io"
	"testing"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/examples/internal/exampletest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWinUserPtr(t *testing.T) {
	for _, ranks := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			out := exampletest.InProcess(t, ranks, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error {
				return winUserPtr(ctx, job, 1000, stdout)
			})
			exampletest.Contains(t, out, "windows: yes\n", "the window's user pointer is 0x", "the library has the same")
		})
	}
}

func TestProcesses(t *testing.T) {
	exampletest.Processes(t, 2, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error {
		return winUserPtr(ctx, job, 5000, stdout)
	})
}

func TestAlone(t *testing.T) { exampletest.Alone(t, run, "-n", "100") }
