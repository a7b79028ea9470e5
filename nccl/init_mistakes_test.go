package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// TestLibraryInitMistakes: one rank's mistake in Init is every rank's error, and Init works afterwards in the same processes.
func TestLibraryInitMistakes(t *testing.T) {
	dltest.Parallel(t)
	rank := func(culprit int) func(ctx context.Context, job *bootstrap.Job) error {
		return func(ctx context.Context, job *bootstrap.Job) (err error) {
			dev, err := device(job)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, dev.Close()) }()
			isCulprit := job.Rank() == culprit
			first := firstOther(culprit)
			lo, hi := min(first, culprit), max(first, culprit)
			on := func(token string, f func(dev *cuda.Device) error) error {
				other, err := cuda.Open(token)
				if err != nil {
					return err
				}
				return errors.Join(f(other), other.Close())
			}
			init := func(dev *cuda.Device, name string, cfg nccl.Config) error {
				cfg.Name = name
				return withComm(ctx, job, dev, &cfg, func(*world) error { return errors.New("no error") })
			}
			for _, tc := range []struct {
				name  string
				wrong func() error
				cfg   nccl.Config // of the others
				is    error
				text  []string
			}{
				{name: "one GPU for two", is: nccl.ErrMismatch, text: []string{fmt.Sprintf("ranks %d and %d both have GPU-", lo, hi), "each rank needs a GPU of its own"},
					wrong: func() error {
						return on(strconv.Itoa(first), func(d *cuda.Device) error { return init(d, "one GPU for two", nccl.Config{}) })
					}},
				{name: "host device", is: nccl.ErrMismatch, text: []string{fmt.Sprintf("rank %d has a ", max(culprit, 1)), "all ranks of a communicator have the same kind"},
					wrong: func() error {
						return on("host", func(d *cuda.Device) error { return init(d, "host device", nccl.Config{}) })
					}},
				{name: "setting", is: nccl.ErrMismatch, text: []string{fmt.Sprintf("rank %d has NCCL_GRAPH_REGISTER", max(culprit, 1)), "such settings must be equal on all ranks"},
					wrong: func() error {
						os.Setenv("NCCL_GRAPH_REGISTER", "0")
						defer os.Unsetenv("NCCL_GRAPH_REGISTER")
						return init(dev, "setting", nccl.Config{})
					}},
				{name: "check mode", is: nccl.ErrMismatch, text: []string{fmt.Sprintf("rank %d: check mode", max(culprit, 1))},
					wrong: func() error { return init(dev, "check mode", nccl.Config{Check: nccl.Strict}) }},
				{name: "never comes", cfg: nccl.Config{Timeout: patience(job.Size())}, text: []string{fmt.Sprintf("rank %d", culprit)}},
			} {
				if tc.name == "one GPU for two" && dltest.Sharing() {
					continue
				}
				if err := job.Barrier(ctx); err != nil {
					return err
				}
				begin := time.Now()
				switch {
				case !isCulprit:
					err = init(dev, tc.name, tc.cfg)
				case tc.wrong != nil:
					err = tc.wrong()
				default:
					continue
				}
				took := time.Since(begin)
				line(fmt.Sprintf("init: %s (culprit %d)", tc.name, culprit), took, err)
				if err := wantErr(err, tc.is, append(tc.text, "init on communicator "+tc.name)...); err != nil {
					return fmt.Errorf("%s: %w", tc.name, err)
				}
				if took > room {
					return fmt.Errorf("%s: after %v", tc.name, took)
				}
			}
			return withComm(ctx, job, dev, &nccl.Config{Name: "afterwards"}, func(w *world) error {
				b, done, err := openBuffers(w, 4096, false)
				defer done()
				if err != nil {
					return err
				}
				a := &attempt{world: w, mem: b}
				a.send, _ = cuda.SliceOf[float32](b.send, 0, 1000)
				a.recv, _ = cuda.SliceOf[float32](b.recv, 0, 1000)
				return a.works()
			})
		}
	}
	for _, n := range []int{2, 4, 8} {
		for at, culprit := range positions(n) {
			t.Run(fmt.Sprintf("%d ranks/rank %d", n, culprit), func(t *testing.T) {
				ended := func(t *testing.T, results []ranktest.Result) {
					var ts times
					ts.parse(results)
					ts.log(t)
					allWell(t, results)
				}
				t.Run("fake", func(t *testing.T) {
					if n > 4 && at > 0 || testing.Short() && n != 2+2*at {
						t.Skip("the same as on fewer ranks, and in other places")
					}
					ended(t, ranktest.RunProcesses(t, n, rank(culprit), fakeLibraries(t)...))
				})
				t.Run("GPU", func(t *testing.T) {
					dltest.NeedGPUs(t, n)
					if testing.Short() && (n > 2 || at > 0) {
						t.Skip("-short")
					}
					ended(t, ranktest.RunProcesses(t, n, rank(culprit), dltest.GPUEnv()...))
				})
			})
		}
	}
}
