package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// The first call on registered buffers is compared before the library sees it: where only one rank has registered them, that rank issues nothing.
func TestLibraryFirstRegisteredCall(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls")
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 8192, job.Rank() == 1)
			defer done()
			if err != nil {
				return err
			}
			defer w.comm.Close()
			send, _ := cuda.SliceOf[float32](b.send, 0, 100)
			recv, _ := cuda.SliceOf[float32](b.recv, 0, 100)
			a := &attempt{world: w}
			err = a.fails(nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream))
			if err := wantErr(err, nccl.ErrMixed, "rank 1", "in registered buffers"); err != nil {
				return err
			}
			issued := strings.Count(strings.Join(libraryLog(), "\n"), "AllReduce n=100")
			if job.Rank() == 1 && issued != 0 {
				return errors.New("the call has reached the library")
			}
			return nil
		})
	}, append(fakeLibraries(t), "FAKE_LOG="+log)...))
}

// A rank that comes late to the first call on registered buffers holds up the others for a while, not for ever.
func TestLibraryFirstRegisteredCallLate(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 8192, true)
			defer done()
			if err != nil {
				return err
			}
			a := &attempt{world: w, n: 1000, mem: b}
			a.send, _ = cuda.SliceOf[float32](b.send, 0, 1000)
			a.recv, _ = cuda.SliceOf[float32](b.recv, 0, 1000)
			// Rank 1 comes when rank 0's call has returned. Messages connect nothing that it waits for.
			if job.Rank() == 0 {
				if isFake() { // the real one waits in its first call for the others
					if err := a.sum(1000); err != nil {
						return err
					}
				}
				if err := job.Barrier(ctx); err != nil {
					return err
				}
			} else if err := job.Barrier(ctx); err != nil {
				return err
			} else if isFake() {
				if err := a.sum(1000); err != nil {
					return err
				}
			}
			begin := time.Now()
			if err := a.works(); err != nil {
				return err
			}
			if took := time.Since(begin); took > room {
				return fmt.Errorf("took %v", took)
			}
			return nil
		})
	}, nil)
}

// A communicator that ends by an abort while its buffers are registered, and used. With two ranks the processes go on. With more the library would lose them (fault
// "abort-with-registrations"): the error comes to all ranks, but those that wait for something cannot make a new communicator, and say why.
func TestLibraryAbortRegistered(t *testing.T) {
	rank := func(ctx context.Context, job *bootstrap.Job) (err error) {
		dev, err := device(job)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dev.Close()) }()
		n := large()
		for round := range 3 {
			culprit := round % job.Size()
			err := withComm(ctx, job, dev, &nccl.Config{Name: fmt.Sprint("round ", round)}, func(w *world) error {
				b, done, err := openBuffers(w, 4*n, true)
				defer done()
				if err != nil {
					return err
				}
				defer w.comm.Close() // before the buffers go
				a := &attempt{world: w, n: n, mem: b}
				a.send, _ = cuda.SliceOf[float32](b.send, 0, n)
				a.recv, _ = cuda.SliceOf[float32](b.recv, 0, n)
				if err := errors.Join(a.works(), a.wait(a.sum(n)), job.Barrier(ctx)); err != nil {
					return err
				}
				if job.Rank() == culprit {
					return errors.Join(job.Barrier(ctx), w.comm.Abort(errors.New("out of patience")))
				}
				sum := a.sum(n)
				if err := job.Barrier(ctx); err != nil { // all others wait for the culprit
					return err
				}
				return wantErr(a.wait(sum), nccl.ErrAborted, fmt.Sprintf("by rank %d: out of patience", culprit))
			})
			if round > 0 && job.Size() > 2 {
				return wantErr(err, nil, "init on communicator round 1", "still occupied by communicator round 0")
			}
			if err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		return nil
	}
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			t.Run("fake", func(t *testing.T) { allWell(t, ranktest.RunProcesses(t, n, rank, fakeLibraries(t)...)) })
			t.Run("GPU", func(t *testing.T) {
				dltest.NeedGPUs(t, n)
				allWell(t, ranktest.RunProcesses(t, n, rank, dltest.GPUEnv()...))
			})
		})
	}
}
