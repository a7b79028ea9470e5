package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// A rank that splits where the others call a collective is told so, as they are, without a bound on the wait.
func TestSplitAgainstCollective(t *testing.T) {
	nodeOf := []int{0, 1, 0}
	run := func(t *testing.T, open func(job *bootstrap.Job) (*cuda.Device, error), env ...string) {
		allWell(t, ranktest.RunHostsBeside(t, nodeOf, func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := open(job)
			if err != nil {
				return err
			}
			return errors.Join(withComm(ctx, job, dev, nil, func(w *world) error {
				b, done, err := openBuffers(w, 4096, false)
				defer done()
				if err != nil {
					return err
				}
				part, err := w.comm.Split(ctx, 0, 0)
				if err != nil {
					return err
				}
				if err := part.Close(); err != nil {
					return err
				}
				send, _ := cuda.SliceOf[float32](b.send, 0, 8)
				recv, _ := cuda.SliceOf[float32](b.recv, 0, 8)
				if job.Rank() == 1 {
					_, err = w.comm.Split(ctx, 0, 0)
				} else {
					err = outcome(ctx, w.stream, nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream))
				}
				if ctx.Err() != nil || !errors.Is(err, nccl.ErrMismatch) || !strings.Contains(err.Error(), "all-reduce of 8 float32, sum") || !strings.Contains(err.Error(), "rank 1: split #2") {
					return fmt.Errorf("got %v, want a mismatch of rank 1's split and an all-reduce", err)
				}
				return nil
			}), dev.Close())
		}, func([]ranktest.Host) {}, env...))
	}
	t.Run("host", func(t *testing.T) {
		run(t, func(*bootstrap.Job) (*cuda.Device, error) { return cuda.Open("host") })
	})
	t.Run("library", func(t *testing.T) {
		run(t, func(job *bootstrap.Job) (*cuda.Device, error) { return cuda.Open(strconv.Itoa(job.Rank())) }, fakeLibraries(t)...)
	})
}
