package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// exhaust takes the device's memory until there is none: in large pieces first, then in small ones. It returns the last error of each kind of allocation.
func exhaust(dev *cuda.Device) (taken []*cuda.Memory, shareable, private error, err error) {
	free, _, err := dev.MemoryInfo()
	if err != nil {
		return nil, nil, nil, err
	}
	if isFake() {
		// Its memory is this machine's.
		_, shareable = dev.Alloc(free+2<<20, cuda.Shareable)
		_, private = dev.Alloc(free+2<<20, cuda.Private)
		return nil, shareable, private, nil
	}
	for size := free / 4; size >= 2<<20; size /= 2 {
		for {
			m, err := dev.Alloc(size, cuda.Shareable)
			if err != nil {
				shareable = err
				break
			}
			taken = append(taken, m)
		}
	}
	for size := uint64(64 << 20); size >= 64<<10; size /= 2 { // the driver has some of it in smaller pieces
		for {
			m, err := dev.Alloc(size, cuda.Private)
			if err != nil {
				private = err
				break
			}
			taken = append(taken, m)
		}
	}
	return taken, shareable, private, nil
}

// A rank's device has no memory left. Its allocations say how much was asked for and how much there is; the communicator that is there works on, a new one is an error on
// all ranks that names the rank, and when there is memory again one can be made.
func TestLibraryOutOfMemory(t *testing.T) {
	rank := func(culprit, n int) func(ctx context.Context, job *bootstrap.Job) error {
		return func(ctx context.Context, job *bootstrap.Job) (err error) {
			dev, err := device(job)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, dev.Close()) }()
			a := &attempt{culprit: culprit, n: n}
			for _, m := range []**cuda.Memory{&a.mem.send, &a.mem.recv} {
				if *m, err = dev.Alloc(uint64(4*n), cuda.Shareable); err != nil {
					return err
				}
				defer func() { err = errors.Join(err, (*m).Free()) }()
			}
			a.send, _ = cuda.SliceOf[float32](a.mem.send, 0, n)
			a.recv, _ = cuda.SliceOf[float32](a.mem.recv, 0, n)
			isCulprit := job.Rank() == culprit
			return withComm(ctx, job, dev, nil, func(w *world) error {
				a.world = w
				// With all that the library takes at the first large call.
				if err := errors.Join(a.works(), a.wait(a.sum(n)), job.Barrier(ctx)); err != nil {
					return err
				}
				var taken []*cuda.Memory
				if isCulprit {
					var shareable, private error
					if taken, shareable, private, err = exhaust(dev); err != nil {
						return err
					}
					for kind, err := range map[string]error{"shareable": shareable, "private": private} {
						if err := wantErr(err, cuda.ErrOutOfMemory, "cuda: allocate: ", " bytes of "+kind+" memory: ", " bytes are free: ", "OUT_OF_MEMORY 2"); err != nil {
							return err
						}
						fmt.Println("TEXT", err)
					}
					_, size, err := dev.MemoryInfo()
					if err != nil {
						return err
					}
					ask := size / 2 / 4096 * 4096
					if isFake() {
						ask = size + 4<<20
					}
					_, arena := nccl.NewArena(dev, ask, w.comm)
					_, alloc := nccl.Alloc[float32](dev, int(ask/4))
					for what, err := range map[string]error{"arena": arena, "buffer": alloc} {
						if err := wantErr(err, cuda.ErrOutOfMemory, fmt.Sprintf("%d bytes of shareable memory", ask), "are free"); err != nil {
							return fmt.Errorf("%s: %w", what, err)
						}
					}
				}
				if err := errors.Join(job.Barrier(ctx), a.works(), a.wait(a.sum(n)), job.Barrier(ctx)); err != nil {
					return fmt.Errorf("the communicator that was there: %w", err)
				}
				if isFake() {
					os.Setenv("FAKE_NCCL", "init-fails")
				}
				begin := time.Now()
				// 20 s: the library's memory is small; it may fit in what the driver has kept back.
				err := withComm(ctx, job, dev, &nccl.Config{Name: "without memory", Timeout: 20 * time.Second}, func(*world) error { return nil })
				took := time.Since(begin)
				line(fmt.Sprintf("init without memory (culprit %d)", culprit), took, err)
				if isFake() {
					os.Setenv("FAKE_NCCL", "")
				}
				if err == nil && isFake() {
					return errors.New("init without memory: no error")
				}
				if err != nil {
					text := "out of memory"
					if !isCulprit {
						text = fmt.Sprintf("rank %d: ", culprit)
					}
					if err := wantErr(err, nil, "init on communicator without memory", text); err != nil {
						return fmt.Errorf("after %v: %w", took, err)
					}
				}
				for _, m := range taken {
					if err := m.Free(); err != nil {
						return err
					}
				}
				if err := errors.Join(job.Barrier(ctx), a.works()); err != nil {
					return fmt.Errorf("the communicator that was there, with memory again: %w", err)
				}
				return withComm(ctx, job, dev, &nccl.Config{Name: "with memory again"}, func(w *world) error {
					b := *a
					b.world = w
					return b.works()
				})
			})
		}
	}
	for i, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			ended := func(t *testing.T, results []ranktest.Result) {
				var ts times
				ts.parse(results)
				ts.log(t)
				allWell(t, results)
			}
			t.Run("fake", func(t *testing.T) {
				ended(t, ranktest.RunProcesses(t, n, rank(n-1, 1<<14), fakeLibraries(t)...)) // the library refuses the last rank
			})
			t.Run("GPU", func(t *testing.T) {
				dltest.NeedGPUs(t, n)
				ended(t, ranktest.RunProcesses(t, n, rank(positions(n)[i], 2<<20), slices.Concat(dltest.GPUEnv(), []string{"NCCL_DEBUG=WARN"})...))
			})
		})
	}
}
