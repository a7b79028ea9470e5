package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// inProcess runs f on n ranks of this process, for benchmarks.
func inProcess(tb testing.TB, n int, f func(w *world) error) {
	tb.Helper()
	var wg sync.WaitGroup
	errs := make([]error, n)
	for r, job := range bootstrap.InProcess(n) {
		wg.Go(func() {
			errs[r] = with(context.Background(), job, nil, f)
			job.Close()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		tb.Fatal(err)
	}
}

// All-reduce on two ranks, registered (straight between the users' buffers) and staged.
func BenchmarkAllReduce(b *testing.B) {
	for _, bytes := range []int{8, 1 << 10, 64 << 10, 1 << 20, 64 << 20} {
		for _, registered := range []bool{true, false} {
			name := map[bool]string{true: "registered", false: "staged"}[registered]
			b.Run(fmt.Sprintf("%d/%s", bytes, name), func(b *testing.B) {
				b.SetBytes(int64(bytes))
				b.ReportAllocs()
				inProcess(b, 2, func(w *world) error {
					bufs, done, err := openBuffers(w, bytes, registered)
					defer done()
					if err != nil {
						return err
					}
					send, _ := cuda.SliceOf[float32](bufs.send, 0, bytes/4)
					recv, _ := cuda.SliceOf[float32](bufs.recv, 0, bytes/4)
					for i := range b.N + 2 {
						if i == 2 { // mapped, pages there
							if err := w.job.Barrier(w.ctx); err != nil {
								return err
							}
							if w.comm.Rank() == 0 {
								b.ResetTimer()
							}
						}
						if err := nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream); err != nil {
							return err
						}
						if err := w.stream.Synchronize(w.ctx); err != nil {
							return err
						}
					}
					if w.comm.Rank() == 0 {
						b.StopTimer()
					}
					st := w.comm.Stats()
					if registered && st.BytesStaged > 0 || !registered && st.BytesDirect > 0 {
						return fmt.Errorf("%+v", st)
					}
					return nil
				})
			})
		}
	}
}

// An eager call allocates nothing once its task is there.
func TestNoAllocation(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	for _, registered := range []bool{true, false} {
		var per float64
		const runs = 2000
		inProcess(t, 2, func(w *world) error {
			bufs, done, err := openBuffers(w, 4096, registered)
			defer done()
			if err != nil {
				return err
			}
			x, _ := cuda.SliceOf[float32](bufs.send, 0, 2)
			one := func() {
				if err := nccl.AllReduce(w.comm, x, x, nccl.Sum, w.stream); err != nil {
					panic(err)
				}
				if err := w.stream.Synchronize(w.ctx); err != nil {
					panic(err)
				}
			}
			for range 10 {
				one()
			}
			if err := w.job.Barrier(w.ctx); err != nil {
				return err
			}
			if w.comm.Rank() == 1 {
				for range runs + 1 { // AllocsPerRun warms up with one
					one()
				}
				return nil
			}
			per = testing.AllocsPerRun(runs, one)
			return nil
		})
		if per > 0 {
			t.Errorf("registered %v: %v allocations for a call on two ranks", registered, per)
		}
	}
}
