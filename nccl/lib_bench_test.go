package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// benchRank is a rank with a communicator of this package, and beside it one of the library's own, which knows nothing of it.
type benchRank struct {
	*world
	sys        *ncclsys.Library
	raw        ncclsys.Comm
	send, recv *cuda.Buffer[float32]
}

// BenchmarkLibraryAllReduce is what an eager call costs the calling thread: by this package, and by the library's function alone. Without a GPU it runs on two
// ranks of this process and libraries that do nothing. On GPUs the launcher starts a process for each rank, and all make the same number of calls:
//
//	gorun -np 2 nccl.test -test.run '^$' -test.bench LibraryAllReduce -test.benchtime 20000x
func BenchmarkLibraryAllReduce(b *testing.B) {
	ranks, sizes := benchRanks(b)
	for _, bytes := range sizes {
		n := bytes / 4 // elements
		b.Run(fmt.Sprintf("%d/raw", bytes), func(b *testing.B) {
			b.ReportAllocs()
			benchCalls(b, ranks, func(r *benchRank) (call func() error, done func(), err error) {
				bound := r.dev.Bind()
				send, recv := ncclsys.DevicePtr(r.send.Memory().Pointer()), ncclsys.DevicePtr(r.recv.Memory().Pointer())
				s := ncclsys.Stream(r.stream.Handle())
				return func() error {
					return r.sys.AllReduce(send, recv, uint64(n), ncclsys.Float32, ncclsys.Sum, r.raw, s)
				}, bound.Release, bound.Err()
			})
		})
		for _, locked := range []bool{false, true} {
			name := map[bool]string{false: "nccl", true: "nccl-locked"}[locked]
			b.Run(fmt.Sprintf("%d/%s", bytes, name), func(b *testing.B) {
				b.ReportAllocs()
				benchCalls(b, ranks, func(r *benchRank) (call func() error, done func(), err error) {
					if done = func() {}; locked {
						runtime.LockOSThread()
						done = runtime.UnlockOSThread
					}
					send, recv := r.send.Slice(0, n), r.recv.Slice(0, n)
					return func() error { return nccl.AllReduce(r.comm, send, recv, nccl.Sum, r.stream) }, done, nil
				})
			})
		}
	}
}

// BenchmarkLibrarySendRecv is the same for a message to the next rank and one from the rank before, together.
func BenchmarkLibrarySendRecv(b *testing.B) {
	ranks, _ := benchRanks(b)
	const n = 2
	b.Run("raw", func(b *testing.B) {
		b.ReportAllocs()
		benchCalls(b, ranks, func(r *benchRank) (call func() error, done func(), err error) {
			bound := r.dev.Bind()
			send, recv := ncclsys.DevicePtr(r.send.Memory().Pointer()), ncclsys.DevicePtr(r.recv.Memory().Pointer())
			s, to, from := ncclsys.Stream(r.stream.Handle()), r.next(1), r.next(-1)
			return func() error {
				err := r.sys.GroupStart()
				if err == nil {
					err = r.sys.Send(send, n, ncclsys.Float32, to, r.raw, s)
				}
				if err == nil {
					err = r.sys.Recv(recv, n, ncclsys.Float32, from, r.raw, s)
				}
				if err == nil {
					err = r.sys.GroupEnd()
				}
				return err
			}, bound.Release, bound.Err()
		})
	})
	b.Run("nccl", func(b *testing.B) {
		b.ReportAllocs()
		benchCalls(b, ranks, func(r *benchRank) (call func() error, done func(), err error) {
			send, recv := r.send.Slice(0, n), r.recv.Slice(0, n)
			to, from := r.next(1), r.next(-1)
			both := func() error {
				if err := nccl.Send(r.comm, send, to, r.stream); err != nil {
					return err
				}
				return nccl.Recv(r.comm, recv, from, r.stream)
			}
			return func() error { return nccl.Group(both, r.comm) }, func() {}, nil
		})
	})
}

// BenchmarkLibraryCPU is the processor time of a call on the calling thread, without the other rank's calls: of the first rank only, on libraries that do nothing. It
// says the same on a busy machine, and with GORUN_BENCH_COLD=1 behind a call that has used the caches.
func BenchmarkLibraryCPU(b *testing.B) {
	if os.Getenv("GORUN_RANK") != "" {
		b.Skip("runs without a launcher")
	}
	ranks, _ := benchRanks(b)
	r := ranks[0]
	send, recv, all := r.send.Slice(0, 1), r.recv.Slice(0, 1), r.recv.Slice(0, 2)
	rawSend, rawRecv := ncclsys.DevicePtr(r.send.Memory().Pointer()), ncclsys.DevicePtr(r.recv.Memory().Pointer())
	s := ncclsys.Stream(r.stream.Handle())
	both := func() error {
		return errors.Join(nccl.Send(r.comm, send, 1, r.stream), nccl.Recv(r.comm, recv, 1, r.stream))
	}
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"all-reduce/raw", func() error { return r.sys.AllReduce(rawSend, rawRecv, 1, ncclsys.Float32, ncclsys.Sum, r.raw, s) }},
		{"all-reduce/nccl", func() error { return nccl.AllReduce(r.comm, send, recv, nccl.Sum, r.stream) }},
		{"broadcast/nccl", func() error { return nccl.Broadcast(r.comm, send, recv, 0, r.stream) }},
		{"all-gather/nccl", func() error { return nccl.AllGather(r.comm, send, all, r.stream) }},
		{"sendrecv/raw", func() error {
			return errors.Join(r.sys.GroupStart(), r.sys.Send(rawSend, 1, ncclsys.Float32, 1, r.raw, s), r.sys.Recv(rawRecv, 1, ncclsys.Float32, 1, r.raw, s), r.sys.GroupEnd())
		}},
		{"sendrecv/nccl", func() error { return nccl.Group(both, r.comm) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			start := threadTime()
			for range b.N {
				if err := c.call(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(threadTime()-start)/float64(b.N), "cpu-ns/op")
			if err := r.stream.Synchronize(r.ctx); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// threadTime is the thread's processor time.
func threadTime() time.Duration {
	var t unix.Timespec
	unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t)
	return time.Duration(t.Nano())
}

func (r *benchRank) next(by int) int { return (r.comm.Rank() + by + r.comm.Size()) % r.comm.Size() }

// benchCalls makes b.N calls on each rank, and waits for the device now and then: its queue has an end.
func benchCalls(b *testing.B, ranks []*benchRank, prepare func(*benchRank) (call func() error, done func(), err error)) {
	const together = 100
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() {
			errs[i] = func() error {
				all, err := r.job.AllGather(r.ctx, strconv.AppendInt(nil, int64(b.N), 10))
				if err != nil {
					return err
				}
				for other, n := range all {
					if string(n) != strconv.Itoa(b.N) {
						return fmt.Errorf("rank %d makes %s calls, this one %d: use -test.benchtime NUMBERx", other, n, b.N)
					}
				}
				call, done, err := prepare(r)
				defer done()
				if err != nil {
					return err
				}
				for range 2 {
					if err := errors.Join(call(), r.stream.Synchronize(r.ctx)); err != nil {
						return err
					}
				}
				if err := r.job.Barrier(r.ctx); err != nil {
					return err
				}
				if i == 0 {
					b.ResetTimer()
				}
				for n := range b.N {
					if err := call(); err != nil {
						return err
					}
					if n%together == together-1 {
						if err := r.stream.Synchronize(r.ctx); err != nil {
							return err
						}
					}
				}
				if i == 0 {
					b.StopTimer()
				}
				return r.stream.Synchronize(r.ctx)
			}()
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
}

// benchRanks are this process's ranks, and the sizes to measure in bytes.
func benchRanks(b *testing.B) ([]*benchRank, []int) {
	var jobs []*bootstrap.Job
	sizes := []int{8, 4 << 10, 64 << 10}
	if os.Getenv("GORUN_RANK") != "" {
		job, err := bootstrap.Join(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		jobs = append(jobs, job)
	} else {
		flags := []string{"-DNOWORK", "-O2"}
		if os.Getenv("GORUN_BENCH_COLD") != "" {
			flags = append(flags, "-DCOLD")
		}
		for _, kv := range fakeLibraries(b, flags...) {
			k, v, _ := strings.Cut(kv, "=")
			b.Setenv(k, v)
		}
		jobs, sizes = bootstrap.InProcess(2), sizes[:1]
	}
	ranks := make([]*benchRank, len(jobs))
	errs := make([]error, len(jobs))
	var wg sync.WaitGroup
	for i, job := range jobs {
		b.Cleanup(func() { job.Close() })
		wg.Go(func() { ranks[i], errs[i] = newBenchRank(b, job, sizes[len(sizes)-1]) })
	}
	wg.Wait()
	b.Cleanup(func() { // all together: a communicator's end waits for the others
		var wg sync.WaitGroup
		for _, r := range ranks {
			if r != nil {
				wg.Go(func() {
					if err := r.close(); err != nil {
						b.Error(err)
					}
				})
			}
		}
		wg.Wait()
	})
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	return ranks, sizes
}

func newBenchRank(b *testing.B, job *bootstrap.Job, bytes int) (*benchRank, error) {
	ctx := context.Background()
	r := &benchRank{world: &world{ctx: ctx, job: job}}
	token := ""
	if os.Getenv("GORUN_RANK") == "" {
		token = strconv.Itoa(job.Rank()) // all in this process
	}
	var err error
	if r.dev, err = cuda.Open(token); err != nil {
		return nil, err
	}
	if r.dev.Platform() == cuda.Host {
		return r, errors.New("no GPU, and no library that stands for it")
	}
	if r.comm, err = nccl.Init(ctx, job, r.dev); err != nil {
		return r, err
	}
	if r.stream, err = r.dev.NewStream(); err != nil {
		return r, err
	}
	if r.send, err = nccl.Alloc[float32](r.dev, bytes/4); err != nil {
		return r, err
	}
	if r.recv, err = nccl.Alloc[float32](r.dev, bytes/4); err != nil {
		return r, err
	}
	return r, r.initRaw()
}

func (r *benchRank) initRaw() error {
	sys, err := ncclsys.Open(ncclsys.NCCL)
	if err != nil {
		return err
	}
	bound := r.dev.Bind()
	defer bound.Release()
	if err := bound.Err(); err != nil {
		return err
	}
	const name = "raw communicator"
	var id ncclsys.UniqueID
	if r.job.Rank() == 0 {
		if id, err = sys.GetUniqueID(); err != nil {
			return err
		}
		if err := r.job.PublishID(r.ctx, name, bootstrap.UniqueID(id)); err != nil {
			return err
		}
	} else {
		got, err := r.job.UniqueID(r.ctx, name)
		if err != nil {
			return err
		}
		id = ncclsys.UniqueID(got)
	}
	cfg := ncclsys.NewConfig()
	cfg.Blocking = 1
	p, err := sys.CommInitRank(r.job.Size(), id, r.job.Rank(), cfg)
	if err != nil {
		return err
	}
	r.sys, r.raw = sys, p.Handle()
	p.Done()
	return nil
}

func (r *benchRank) close() error {
	var errs []error
	if r.raw != 0 {
		bound := r.dev.Bind()
		errs = append(errs, r.sys.CommDestroy(r.raw))
		bound.Release()
	}
	if r.comm != nil {
		errs = append(errs, r.comm.Close())
	}
	for _, buf := range []*cuda.Buffer[float32]{r.send, r.recv} {
		if buf != nil {
			errs = append(errs, buf.Free())
		}
	}
	if r.stream != nil {
		errs = append(errs, r.stream.Close())
	}
	return errors.Join(append(errs, r.dev.Close())...)
}
