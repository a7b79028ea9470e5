package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// One member alone cannot come to the library's init: the others, which would wait in it, have its error at once, and all go on.
func TestLibraryInitFailsAlone(t *testing.T) {
	dltest.Parallel(t)
	for culprit := range 3 {
		t.Run(fmt.Sprintf("rank %d", culprit), func(t *testing.T) {
			t.Parallel()
			allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				ctx, cancel := context.WithTimeout(ctx, 4*room)
				defer cancel()
				return withDevice(ctx, job, &nccl.Config{Timeout: 3 * room}, func(w *world) error {
					fails := func(what string, f func() (*nccl.Comm, error)) error {
						text := fmt.Sprintf("rank %d: ", culprit)
						if job.Rank() == culprit {
							// It takes itself for one that makes an id, and cannot.
							nccl.SetRanksPerRoot(max(1, culprit))
							os.Setenv("FAKE_NCCL", "no-id")
							text = "init on communicator "
						}
						start := time.Now()
						c, err := f()
						took := time.Since(start)
						os.Setenv("FAKE_NCCL", "")
						nccl.SetRanksPerRoot(128)
						if err == nil {
							return errors.Join(fmt.Errorf("%s: no error", what), c.Close())
						}
						if err := wantErr(err, nil, text, "no address for the root"); err != nil {
							return fmt.Errorf("%s: %w", what, err)
						}
						if took > room {
							return fmt.Errorf("%s: after %v", what, took)
						}
						return nil
					}
					err := errors.Join(
						fails("init", func() (*nccl.Comm, error) {
							return nccl.InitConfig(ctx, job, w.dev, &nccl.Config{Name: "another", Timeout: 3 * room})
						}),
						fails("split", func() (*nccl.Comm, error) { return w.comm.Split(ctx, 0, 0) }),
						fails("shrink", func() (*nccl.Comm, error) { return w.comm.Shrink(ctx, nil) }))
					if err != nil {
						return err
					}
					part, err := w.comm.Split(ctx, 0, 0)
					if err != nil {
						return err
					}
					return errors.Join(members(ctx, part, []int{0, 1, 2}), part.Close(), members(ctx, w.comm, []int{0, 1, 2}))
				})
			}, append(fakeLibraries(t), "NCCL_COMM_SPLIT_SHARE_RESOURCES=1")...)) // else the library makes a part of its own
		})
	}
}

// A root that has made its id when its context ends tells the others that none comes.
func TestLibraryIDTooLate(t *testing.T) {
	dltest.Parallel(t)
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			ctx, cancel := context.WithTimeout(ctx, room)
			defer cancel()
			if job.Rank() == 0 {
				over, end := context.WithCancel(ctx)
				end()
				return wantErr(nccl.PublishID(over, w.comm, "late"), context.Canceled, "publish id")
			}
			id, err := job.UniqueID(ctx, "late")
			if err == nil && id != (bootstrap.UniqueID{}) {
				err = errors.New("an id has come")
			}
			return err
		})
	}, fakeLibraries(t)...))
}
