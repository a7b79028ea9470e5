package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// scaleAtArgs are those of a kernel that multiplies N floats at an address, whatever is there.
type scaleAtArgs struct {
	Pad     int16
	Address uint64
	N       int64
	By      float32
}

const scaleAtPTX = `.version 7.0
.target sm_75
.address_size 64
// void scale(scale_args a, long long n)
.visible .entry scale(.param .align 8 .b8 a[32], .param .u64 n)
{
	.reg .f32 %f<3>;
	.reg .b64 %rd<3>;
	ld.param.u64 %rd1, [a+8];
	ld.param.f32 %f1, [a+24];
	cvta.to.global.u64 %rd2, %rd1;
	ld.global.f32 %f2, [%rd2];
	mul.f32 %f2, %f2, %f1;
	st.global.f32 [%rd2], %f2;
	ret;
}
`

// breakDevice enqueues a kernel that writes where there is no memory: the driver gives the device up for the rest of the process.
func breakDevice(w *world) error {
	k, err := cuda.NewKernel(w.dev, cuda.KernelSpec[scaleAtArgs]{Name: "scale", PTX: scaleAtPTX})
	if err != nil {
		return err
	}
	return k.Launch(w.stream, cuda.Grid{N: 1, Block: 1}, scaleAtArgs{Address: 0x10, N: 1, By: 2})
}

// A kernel of one rank loses its device (trials 6a): every rank gets an error that names the rank and the cause. With the rank there is no new communicator,
// which all are told; without it there is.
func TestLibraryLostDevice(t *testing.T) {
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
			err = withComm(ctx, job, dev, nil, func(w *world) error {
				a.world = w
				if err := errors.Join(a.works(), job.Barrier(ctx)); err != nil {
					return err
				}
				begin := time.Now()
				want := told{nccl.ErrAborted, []string{"by rank CULPRIT: its device has failed", "illegal"}}
				if isCulprit {
					if err := breakDevice(w); err != nil {
						return err
					}
					want = told{cuda.ErrIllegalAddress, []string{"illegal"}}
				}
				err := a.wait(a.sum(n))
				took := time.Since(begin)
				line(fmt.Sprintf("lost device (culprit %d)", culprit), took, err)
				if took > deathBound && !isFake() || took > room {
					return fmt.Errorf("after %v: %w", took, err)
				}
				return want.check(err, culprit)
			})
			if err != nil {
				return err
			}
			// With it: an error on all.
			err = withComm(ctx, job, dev, &nccl.Config{Name: "with it", Timeout: room}, func(*world) error { return errors.New("a communicator on a lost device") })
			if err := (told{nil, []string{"communicator with it", "device failed", "illegal"}}).check(err, culprit); err != nil {
				return err
			}
			if isCulprit {
				return job.Barrier(ctx)
			}
			var rest []int
			for r := range job.Size() {
				if r != culprit {
					rest = append(rest, r)
				}
			}
			err = withComm(ctx, job, dev, &nccl.Config{Name: "without it", Ranks: rest}, func(w *world) error { a.world = w; return a.works() })
			return errors.Join(err, job.Barrier(ctx))
		}
	}
	for i, n := range []int{2, 4} {
		culprit := positions(n)[i]
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			ended := func(t *testing.T, results []ranktest.Result) {
				var ts times
				ts.parse(results)
				ts.log(t)
				allWell(t, results)
			}
			t.Run("fake", func(t *testing.T) {
				ended(t, ranktest.RunProcesses(t, n, rank(culprit, 1<<14), fakeLibraries(t)...))
			})
			t.Run("GPU", func(t *testing.T) {
				dltest.NeedGPUs(t, n)
				ended(t, ranktest.RunProcesses(t, n, rank(culprit, 2<<20), dltest.GPUEnv()...))
			})
		})
	}
}
