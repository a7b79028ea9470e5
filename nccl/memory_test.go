package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// Register counts; what enqueued operations use stays; the free waits for the deregistration; peers' mappings go.
func TestRegistration(t *testing.T) {
	ranktest.RunEither(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[int32](w.dev, 1000)
			if err != nil {
				return err
			}
			first, err := w.comm.Register(b.Memory())
			if err != nil {
				return err
			}
			second, err := w.comm.Register(b.Memory())
			if err != nil {
				return err
			}
			if first.Memory() != b.Memory() {
				return errors.New("Memory is another one")
			}
			want := func(step string, s nccl.Stats) error {
				got := w.comm.Stats()
				got.Calls, got.BytesDirect, got.BytesStaged = 0, 0, 0
				if d := cmp.Diff(got, s); d != "" {
					return fmt.Errorf("%s: %s", step, d)
				}
				return nil
			}
			if err := want("registered twice", nccl.Stats{Registrations: 1}); err != nil {
				return err
			}
			if w.comm.Rank() == 0 {
				if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
					return err
				}
				if err := first.Close(); err != nil {
					return err
				}
				if err := wantErr(second.Close(), nil, "1 enqueued operations use it, the last is all-reduce #1"); err != nil {
					return err
				}
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if w.comm.Rank() == 1 {
				if err := nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream); err != nil {
					return err
				}
			}
			if err := w.stream.Synchronize(ctx); err != nil {
				return err
			}
			if err := want("used", nccl.Stats{Registrations: 1, PeerMappings: 1}); err != nil {
				return err
			}
			// Nobody gives up what the other still has in use, and counts.
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if err := b.Free(); err != nil { // carried out below
				return err
			}
			if err := errors.Join(first.Close(), second.Close(), second.Close()); err != nil {
				return err
			}
			if err := want("deregistered", nccl.Stats{}); err != nil {
				return err
			}
			// A peer that holds its own buffer but whose peer deregistered lets go at Drain.
			c, err := nccl.Alloc[int32](w.dev, 1000)
			if err != nil {
				return err
			}
			defer c.Free()
			reg, err := w.comm.Register(c.Memory())
			if err != nil {
				return err
			}
			defer reg.Close()
			if err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, c.All(), c.All(), nccl.Sum, w.stream)); err != nil {
				return err
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if w.comm.Rank() == 0 {
				if err := reg.Close(); err != nil {
					return err
				}
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if w.comm.Rank() == 1 {
				if err := want("peer deregistered", nccl.Stats{Registrations: 1, PeerMappings: 1}); err != nil {
					return err
				}
				if err := w.comm.Drain(ctx); err != nil {
					return err
				}
				return want("drained", nccl.Stats{Registrations: 1})
			}
			return want("closed", nccl.Stats{})
		})
	})
}

// A rank that keeps one buffer while another registers ever new ones keeps few mappings.
func TestMappingsAreBounded(t *testing.T) {
	ranktest.RunEither(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			var b *cuda.Buffer[int32]
			var reg *nccl.Registration
			for i := range 20 {
				if i == 0 || job.Rank() == 0 {
					var err error
					if b, err = nccl.Alloc[int32](w.dev, 100); err != nil {
						return err
					}
					if reg, err = w.comm.Register(b.Memory()); err != nil {
						return err
					}
				}
				if err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream)); err != nil {
					return err
				}
				if n := w.comm.Stats().PeerMappings; n > 2 { // none where rank 0 was faster
					return fmt.Errorf("round %d: %d mappings", i, n)
				}
				if i == 19 || job.Rank() == 0 {
					if err := errors.Join(reg.Close(), b.Free()); err != nil {
						return err
					}
				}
			}
			return nil
		})
	})
}

// Registrations for graphs are not seen by eager calls, and are counted apart.
func TestGraphRegistration(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, err := nccl.Alloc[int32](w.dev, 1000)
			if err != nil {
				return err
			}
			defer b.Free()
			reg, err := w.comm.RegisterGraph(b.Memory())
			if err != nil {
				return err
			}
			if err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, b.All(), b.All(), nccl.Sum, w.stream)); err != nil {
				return err
			}
			st := w.comm.Stats()
			if st.BytesDirect != 0 || st.BytesStaged != 8000 || st.Registrations != 1 || st.GraphHolds != 1 || st.PendingRelease != 0 {
				return fmt.Errorf("held: %+v", st)
			}
			reg.SetPending()
			reg.SetPending()
			if st := w.comm.Stats(); st.PendingRelease != 1 {
				return fmt.Errorf("pending: %+v", st)
			}
			if err := reg.Close(); err != nil {
				return err
			}
			if st := w.comm.Stats(); st.Registrations+st.GraphHolds+st.PendingRelease != 0 {
				return fmt.Errorf("closed: %+v", st)
			}
			return nil
		})
	})
}

func TestArena(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			a, err := nccl.NewArena(w.dev, 5000, w.comm)
			if err != nil {
				return err
			}
			defer a.Close()
			if got := a.Memory().Size(); got != 8192 {
				return fmt.Errorf("size %d, want two pages", got)
			}
			x, err := nccl.Carve[float32](a, 100)
			if err != nil {
				return err
			}
			y, err := nccl.Carve[int8](a, 3)
			if err != nil {
				return err
			}
			z, err := nccl.Carve[float64](a, 100)
			if err != nil {
				return err
			}
			got := []uint64{x.Range().Off, y.Range().Off, z.Range().Off, a.Used()}
			if d := cmp.Diff(got, []uint64{0, 512, 768, 1568}); d != "" {
				return errors.New(d)
			}
			_, err = nccl.Carve[float64](a, 900)
			if full, ok := errors.AsType[*nccl.FullError](err); !ok || full.Used != 1568 || full.Size != 8192 || full.Need != 224+7200 {
				return fmt.Errorf("carve too much: %v", err)
			}
			if _, err := nccl.Carve[float64](a, -1); !errors.Is(err, nccl.ErrArgument) {
				return fmt.Errorf("carve -1: %v", err)
			}
			for i := range x.Host() {
				x.Host()[i] = float32(i)
			}
			recv, err := nccl.Carve[float32](a, 100)
			if err != nil {
				return err
			}
			if err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, x, recv, nccl.Max, w.stream)); err != nil {
				return err
			}
			if d := cmp.Diff(recv.Host(), x.Host()); d != "" {
				return errors.New(d)
			}
			if st := w.comm.Stats(); st.BytesStaged != 0 || st.BytesDirect != 800 || st.Registrations != 1 {
				return fmt.Errorf("%+v", st)
			}
			a.Reset()
			if a.Used() != 0 {
				return fmt.Errorf("used %d after Reset", a.Used())
			}
			return errors.Join(a.Close(), a.Close())
		})
	})
}

// The whole life of a communicator, many times: no mapping, descriptor or goroutine stays (goleak looks at the latter).
func TestNothingLeft(t *testing.T) {
	ranktest.RunEither(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := cuda.Open("host")
		if err != nil {
			return err
		}
		defer dev.Close()
		var during int // mappings while all is open
		life := func(i int) (err error) {
			comm, err := nccl.InitConfig(ctx, job, dev, &nccl.Config{Name: fmt.Sprint("life ", i%2)})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, comm.Close()) }()
			s, err := dev.NewStream()
			if err != nil {
				return err
			}
			defer s.Close()
			b, err := nccl.Alloc[int32](dev, 100_000)
			if err != nil {
				return err
			}
			defer b.Free()
			reg, err := comm.Register(b.Memory())
			if err != nil {
				return err
			}
			if i%3 > 0 { // else Close deregisters
				defer reg.Close()
			}
			err = errors.Join(nccl.AllReduce(comm, b.All(), b.All(), nccl.Sum, s), s.Synchronize(ctx))
			during = mapCount()
			if i%5 == 4 {
				if err := job.Barrier(ctx); err != nil {
					return err
				}
				comm.Abort(errors.New("enough"))
			}
			return err
		}
		settle := func() (int, int, error) {
			// What other ranks of the process do in between is not this rank's.
			err := job.Barrier(ctx)
			maps, fds := mapCount(), fdCount()
			return maps, fds, errors.Join(err, job.Barrier(ctx))
		}
		for i := range 3 {
			if err := life(i); err != nil {
				return err
			}
		}
		maps, fds, err := settle()
		if err != nil {
			return err
		}
		for i := range 30 {
			if err := life(i); err != nil {
				return err
			}
		}
		maps2, fds2, err := settle()
		if err != nil {
			return err
		}
		if !raceEnabled && during < maps+3 {
			return fmt.Errorf("%d shared mappings in use, %d when nothing is open: the count is blind", during, maps)
		}
		if maps2 != maps || fds2 != fds {
			return fmt.Errorf("%d shared mappings and %d descriptors, before %d and %d", maps2, fds2, maps, fds)
		}
		return nil
	})
}

func TestSplit(t *testing.T) {
	ranktest.RunEither(t, 5, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			me := w.comm.Rank()
			// Twice: names are used again. Rank 4 takes no part; the even ranks are ordered backwards.
			for range 2 {
				color, key := me%2, -me
				if me == 4 {
					color = -1
				}
				sub, err := w.comm.Split(ctx, color, key)
				if err != nil {
					return err
				}
				if me == 4 {
					if sub != nil {
						return fmt.Errorf("got %v for a negative color", sub)
					}
					continue
				}
				want := fmt.Sprintf("communicator world/%d (rank %d of 2)", color, 1-me/2)
				if sub.String() != want || sub.JobRank(0) != 2+color || sub.JobRank(1) != color {
					return fmt.Errorf("%v of job ranks %d, %d, want %s", sub, sub.JobRank(0), sub.JobRank(1), want)
				}
				b, err := nccl.Alloc[int32](w.dev, 3)
				if err != nil {
					return err
				}
				fill(b.All(), func(i int) int32 { return int32(me) })
				if err := outcome(ctx, w.stream, nccl.AllReduce(sub, b.All(), b.All(), nccl.Sum, w.stream)); err != nil {
					return err
				}
				if err := check(b.All(), func(int) int32 { return int32(2 + 2*color) }); err != nil {
					return err
				}
				if err := errors.Join(b.Free(), sub.Close(), sub.Close()); err != nil {
					return err
				}
				if err := wantErr(sub.Err(), nccl.ErrClosed); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func ExampleInit() {
	jobs := bootstrap.InProcess(2) // a program calls bootstrap.Join
	run := func(job *bootstrap.Job) error {
		ctx := context.Background()
		defer job.Close()
		dev, err := cuda.Open("host") // job.Device()
		if err != nil {
			return err
		}
		defer dev.Close()
		grad, err := nccl.Alloc[float32](dev, 4)
		if err != nil {
			return err
		}
		defer grad.Free()
		comm, err := nccl.Init(ctx, job, dev)
		if err != nil {
			return err
		}
		defer comm.Close()
		stream, err := dev.NewStream()
		if err != nil {
			return err
		}
		defer stream.Close()
		for i := range grad.All().Host() {
			grad.All().Host()[i] = float32(i + comm.Rank())
		}
		if err := nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Sum, stream); err != nil {
			return err
		}
		if err := stream.Synchronize(ctx); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Println(grad.All().Host())
		}
		return nil
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
	// Output: [1 3 5 7]
}
