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

func TestLSAPointer(t *testing.T) {
	for _, ranks := range []int{1, 2, 4} {
		for _, n := range []int{1, 100_000} {
			t.Run(fmt.Sprintf("%d ranks, %d elements", ranks, n), func(t *testing.T) {
				out := exampletest.InProcess(t, ranks, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error {
					return lsaPointer(ctx, job, n, stdout)
				})
				exampletest.Contains(t, out, fmt.Sprintf("rank %d's part is at 0x", ranks-1), fmt.Sprintf("%d elements read, each %d\n", n, ranks))
			})
		}
	}
}

func TestProcesses(t *testing.T) {
	exampletest.Processes(t, 2, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error {
		return lsaPointer(ctx, job, 5000, stdout)
	})
}

func TestAlone(t *testing.T) { exampletest.Alone(t, run, "-n", "100") }
