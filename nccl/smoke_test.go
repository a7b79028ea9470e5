package nccl_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/nccl"
)

func TestSmoke(t *testing.T) {
	for _, registered := range []bool{false, true} {
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("registered=%v/ranks=%d", registered, n), func(t *testing.T) {
				ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						b, err := nccl.Alloc[float32](w.dev, 1000)
						if err != nil {
							return err
						}
						defer b.Free()
						if registered {
							r, err := w.comm.Register(b.Memory())
							if err != nil {
								return err
							}
							defer r.Close()
						}
						for i := range b.All().Host() {
							b.All().Host()[i] = float32(i)
						}
						if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
							return err
						}
						if err := w.stream.Synchronize(ctx); err != nil {
							return err
						}
						for i, v := range b.All().Host() {
							if v != float32(n*i) {
								return fmt.Errorf("element %d is %v, want %v", i, v, n*i)
							}
						}
						return nil
					})
				})
			})
		}
	}
}
