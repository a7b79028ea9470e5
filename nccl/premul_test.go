package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// premul is one type's pre-multiplied sum: each rank's own scalar, all operations that reduce, in and out of place, eager and captured.
func premul[T cuda.Element](w *world, registered bool, count int, of func(float64) T, to func(T) float64) error {
	n, rank := w.comm.Size(), w.comm.Rank()
	size := n * count * cuda.DTypeOf[T]().Size()
	b, done, err := openBuffers(w, size+128, registered)
	defer done()
	if err != nil {
		return err
	}
	scalar := func(r int) float64 { return float64(r + 2) }
	value := func(r, i int) float64 { return float64((r+i)%3 + 1) }
	op, err := nccl.PreMulSum(w.comm, of(scalar(rank)))
	if err != nil {
		return err
	}
	for _, s := range []spec{{op: nccl.OpAllReduce}, {op: nccl.OpAllReduce, inPlace: true}, {op: nccl.OpReduce, root: n - 1}, {op: nccl.OpReduceScatter}, {op: nccl.OpReduceScatter, inPlace: true}} {
		s.red, s.count = op, count
		send, recv, err := place[T](b, s, rank, n)
		if err != nil {
			return err
		}
		run := func(call func() error) error {
			mine, got := make([]T, send.Len()), make([]T, recv.Len())
			for i := range mine {
				mine[i] = of(value(rank, i))
			}
			if err := errors.Join(cuda.CopyToDevice(send, mine, w.stream), call(), cuda.CopyToHost(got, recv, w.stream)); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(w.ctx, room)
			defer cancel()
			if err := w.stream.Synchronize(ctx); err != nil {
				return err
			}
			if s.op == nccl.OpReduce && rank != s.root {
				return nil
			}
			for i, g := range got {
				at := i
				if s.op == nccl.OpReduceScatter {
					at += rank * count
				}
				want := 0.0
				for r := range n {
					want += scalar(r) * value(r, at)
				}
				if to(g) != want {
					return fmt.Errorf("element %d is %v, want %v", i, to(g), want)
				}
			}
			return nil
		}
		call := func() error { return enqueue(w.comm, s, send, recv, w.stream) }
		if err := run(call); err != nil {
			return fmt.Errorf("%v of %v: %w", s, cuda.DTypeOf[T](), err)
		}
		g, err := graphs.Capture(w.ctx, w.stream, func(*cuda.Stream) error { return call() }, graphs.Comms(w.comm))
		if err != nil {
			return err
		}
		if mode := g.Calls()[0].Mode; mode != nccl.Plain {
			return fmt.Errorf("captured %v: mode %v", s, mode)
		}
		for range 2 {
			if err := run(func() error { return g.Launch(w.stream) }); err != nil {
				return fmt.Errorf("captured %v of %v: %w", s, cuda.DTypeOf[T](), err)
			}
		}
		if err := g.Close(); err != nil {
			return err
		}
	}
	if err := w.comm.DestroyRedOp(op); err != nil {
		return err
	}
	s := spec{op: nccl.OpAllReduce, red: op, count: count}
	send, recv, err := place[T](b, s, rank, n)
	if err != nil {
		return err
	}
	return errors.Join(wantErr(enqueue(w.comm, s, send, recv, w.stream), nccl.ErrArgument, "is not of communicator world, or was destroyed"),
		wantErr(w.comm.DestroyRedOp(op), nccl.ErrArgument, "was destroyed"))
}

func premuls(w *world, all bool) error {
	for _, registered := range []bool{false, true} {
		for _, count := range []int{5, 20_000} { // in one chunk, and in several
			err := premul(w, registered, count, func(f float64) int32 { return int32(f) }, func(v int32) float64 { return float64(v) })
			if all {
				err = errors.Join(err, premul(w, registered, count, func(f float64) cuda.Float16 { return cuda.Float16FromFloat32(float32(f)) }, func(v cuda.Float16) float64 { return float64(v.Float32()) }))
			}
			if !raceEnabled { // races do not depend on the type
				err = errors.Join(err,
					premul(w, registered, count, func(f float64) uint64 { return uint64(f) }, func(v uint64) float64 { return float64(v) }),
					premul(w, registered, count, func(f float64) float32 { return float32(f) }, func(v float32) float64 { return float64(v) }),
					premul(w, registered, count, func(f float64) float64 { return f }, func(v float64) float64 { return v }))
			}
			if !raceEnabled && all {
				err = errors.Join(err,
					premul(w, registered, count, func(f float64) int8 { return int8(f) }, func(v int8) float64 { return float64(v) }),
					premul(w, registered, count, func(f float64) cuda.BFloat16 { return cuda.BFloat16FromFloat32(float32(f)) }, func(v cuda.BFloat16) float64 { return float64(v.Float32()) }))
			}
			if err != nil {
				return fmt.Errorf("registered %t, count %d: %w", registered, count, err)
			}
		}
	}
	return nil
}

func TestPreMulSum(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error { return premuls(w, true) })
			})
		})
	}
}

// Members on two hosts: the scalars travel with the calls.
func TestHostsPreMulSum(t *testing.T) {
	allWell(t, ranktest.RunHosts(t, []int{0, 0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error { return premuls(w, true) })
	}))
}

func TestLibraryPreMulSum(t *testing.T) {
	f := func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error { return premuls(w, !isFake()) })
	}
	for _, n := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			t.Run("fake", func(t *testing.T) { allWell(t, ranktest.RunProcesses(t, n, f, fakeLibraries(t)...)) })
			t.Run("GPU", func(t *testing.T) {
				dltest.NeedGPUs(t, n)
				allWell(t, ranktest.RunProcesses(t, n, f, dltest.GPUEnv()...))
			})
		})
	}
}

// What the library is told.
func TestLibraryPreMulSumCalls(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls")
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			a, err := nccl.PreMulSum(w.comm, 0.5)
			if err != nil {
				return err
			}
			if _, err := nccl.PreMulSum(w.comm, int32(3)); err != nil {
				return err
			}
			if err := w.comm.DestroyRedOp(a); err != nil {
				return err
			}
			log := libraryLog()
			for _, want := range []string{"RedOpCreatePreMulSum type=8 where=1 number=0", "RedOpCreatePreMulSum type=2 where=1 number=1", "RedOpDestroy number=0"} {
				if !slices.Contains(log, want) {
					return fmt.Errorf("calls %q, want %q in it", log, want)
				}
			}
			return nil
		})
	}, append(fakeLibraries(t), "FAKE_LOG="+log)...))
}

// A reduction of another communicator or type, and ranks that use different ones.
func TestPreMulSumMistakes(t *testing.T) {
	mistakes := func(w *world) error {
		other, err := nccl.InitConfig(w.ctx, w.job, w.dev, &nccl.Config{Name: "other"})
		if err != nil {
			return err
		}
		defer other.Close()
		theirs, err := nccl.PreMulSum(other, float32(2))
		if err != nil {
			return err
		}
		whole, err := nccl.PreMulSum(w.comm, int32(2))
		if err != nil {
			return err
		}
		mine, err := nccl.PreMulSum(w.comm, float32(2))
		if err != nil {
			return err
		}
		again, err := nccl.PreMulSum(w.comm, float32(2))
		if err != nil {
			return err
		}
		b, err := nccl.Alloc[float32](w.dev, 4)
		if err != nil {
			return err
		}
		defer b.Free()
		sum := func(op nccl.RedOp) error { return nccl.AllReduce(w.comm, b.All(), b.All(), op, w.stream) }
		if err := errors.Join(wantErr(sum(theirs), nccl.ErrArgument, "is not of communicator world"),
			wantErr(sum(whole), nccl.ErrArgument, "pre-multiplied sum 1 was made for int32, the data is float32"),
			wantErr(w.comm.DestroyRedOp(nccl.Sum), nccl.ErrArgument, "unknown reduction 0"),
			wantErr(w.comm.DestroyRedOp(theirs), nccl.ErrArgument, "is not of communicator world"),
			outcome(w.ctx, w.stream, sum(mine))); err != nil {
			return err
		}
		op := mine
		if w.comm.Rank() == 1 {
			op = again
		}
		err = sum(op)
		ctx, cancel := context.WithTimeout(w.ctx, room)
		defer cancel()
		return wantErr(outcome(ctx, w.stream, err), nccl.ErrMismatch, "rank 1: all-reduce of 4 float32, pre-multiplied sum 3; rank 0: all-reduce of 4 float32, pre-multiplied sum 2")
	}
	t.Run("host", func(t *testing.T) {
		ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error { return with(ctx, job, nil, mistakes) })
	})
	t.Run("library", func(t *testing.T) {
		onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error { return withDevice(ctx, job, nil, mistakes) }, nil)
	})
}

// The numbers of reductions go round, and there is an end to them.
func TestPreMulSumNumbers(t *testing.T) {
	ranktest.Run(t, 1, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			seen := map[nccl.RedOp]bool{}
			for range 600 {
				op, err := nccl.PreMulSum(w.comm, int8(1))
				if err != nil || seen[op] {
					return fmt.Errorf("%v, again %t: %w", op, seen[op], err)
				}
				seen[op] = true
				if err := w.comm.DestroyRedOp(op); err != nil {
					return err
				}
			}
			for range 251 {
				if _, err := nccl.PreMulSum(w.comm, int8(1)); err != nil {
					return err
				}
			}
			_, err := nccl.PreMulSum(w.comm, int8(1))
			return wantErr(err, nccl.ErrArgument, "there are 251 reductions")
		})
	})
}

func ExamplePreMulSum() {
	jobs := bootstrap.InProcess(2) // a program calls bootstrap.Join
	run := func(job *bootstrap.Job) error {
		defer job.Close()
		return with(context.Background(), job, nil, func(w *world) error {
			b, err := nccl.Alloc[float32](w.dev, 2)
			if err != nil {
				return err
			}
			defer b.Free()
			copy(b.All().Host(), []float32{1, 2})
			op, err := nccl.PreMulSum(w.comm, []float32{0.5, 10}[w.comm.Rank()])
			if err != nil {
				return err
			}
			err = errors.Join(nccl.AllReduce(w.comm, b.All(), b.All(), op, w.stream), w.comm.DestroyRedOp(op), w.stream.Synchronize(w.ctx))
			if err == nil && w.comm.Rank() == 0 {
				fmt.Println(b.All().Host())
			}
			return err
		})
	}
	done := make(chan error)
	for _, job := range jobs {
		go func() { done <- run(job) }()
	}
	for range jobs {
		if err := <-done; err != nil {
			fmt.Println(err)
		}
	}
	// Output: [10.5 21]
}
