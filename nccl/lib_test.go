package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// fakeVar makes the processes of a test ranks on the libraries that the test has built.
const fakeVar = "GORUN_TEST_FAKE"

// fakeLibraries builds a driver and a collective library that work without a GPU, once for a test; its ranks get their paths.
func fakeLibraries(t testing.TB, args ...string) []string {
	t.Helper()
	if os.Getenv(fakeVar) != "" {
		return nil
	}
	return append(dltest.LibraryOnly(), append(makerOf(t).libraries(t, args...), fakeVar+"=1", "GORUN_DEVICE=", "FAKE_DEVICES=8")...)
}

// onLibrary runs f on two ranks, each a process with its own device: with the test's libraries, and on real GPUs. wants says how ranks end otherwise than well.
func onLibrary(t *testing.T, f func(ctx context.Context, job *bootstrap.Job) error, wants func(t *testing.T, results []ranktest.Result), env ...string) {
	t.Helper()
	if wants == nil {
		wants = allWell
	}
	t.Run("fake", func(t *testing.T) {
		wants(t, ranktest.RunProcesses(t, 2, f, append(fakeLibraries(t), env...)...))
	})
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedGPUs(t, 2)
		wants(t, ranktest.RunProcesses(t, 2, f, append(dltest.GPUEnv(), env...)...))
	})
}

func allWell(t *testing.T, results []ranktest.Result) {
	t.Helper()
	for _, r := range results {
		if r.Code != 0 {
			t.Errorf("%v\n%s", r, r.Err)
		}
	}
}

// device opens this rank's device.
func device(job *bootstrap.Job) (*cuda.Device, error) {
	return cuda.Open(dltest.DeviceOf(job.LocalRank()))
}

// withDevice is with, on a device of the library's platform.
func withDevice(ctx context.Context, job *bootstrap.Job, cfg *nccl.Config, f func(w *world) error) (err error) {
	dev, err := device(job)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	return withComm(ctx, job, dev, cfg, f)
}

func withComm(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, cfg *nccl.Config, f func(w *world) error) (err error) {
	comm, err := nccl.InitConfig(ctx, job, dev, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	return f(&world{ctx, job, dev, comm, stream})
}

func isFake() bool { return os.Getenv(fakeVar) != "" }

// large is a number of elements at which libraries use registered buffers. The test's library does nothing else for large ones.
func large() int {
	if isFake() {
		return 1 << 18
	}
	return 4 << 20
}

// libTyped is typed for memory that only the device reaches.
type libTyped struct {
	name   string
	size   int
	fake   bool // whether the test's library can reduce it
	write  func(*world, buffers, spec) error
	call   func(*world, buffers, spec) error
	verify func(*world, buffers, spec) error
}

func libTypedOf[T cuda.Element](e element[T], fake bool) libTyped {
	return libTyped{cuda.DTypeOf[T]().String(), cuda.DTypeOf[T]().Size(), fake,
		func(w *world, b buffers, s spec) error {
			send, recv, err := place[T](b, s, w.comm.Rank(), w.comm.Size())
			if err != nil {
				return err
			}
			none, zero := make([]T, recv.Len()), e.of(0)
			for i := range none {
				none[i] = zero
			}
			mine := make([]T, send.Len())
			for i := range mine {
				mine[i] = e.at(w.comm.Rank(), s.salt, i)
			}
			return errors.Join(cuda.CopyToDevice(recv, none, w.stream), cuda.CopyToDevice(send, mine, w.stream))
		},
		func(w *world, b buffers, s spec) error {
			send, recv, err := place[T](b, s, w.comm.Rank(), w.comm.Size())
			if err != nil {
				return err
			}
			return enqueue(w.comm, s, send, recv, w.stream)
		},
		func(w *world, b buffers, s spec) error {
			n, rank := w.comm.Size(), w.comm.Rank()
			_, recv, err := place[T](b, s, rank, n)
			if err != nil {
				return err
			}
			if s.op == nccl.OpReduce && rank != s.root {
				return nil
			}
			all := make([]T, recv.Len())
			ctx, cancel := context.WithTimeout(w.ctx, room) // so that what hangs is named
			defer cancel()
			if err := errors.Join(cuda.CopyToHost(all, recv, w.stream), w.stream.Synchronize(ctx)); err != nil {
				return fmt.Errorf("%v of %v: %w", s, cuda.DTypeOf[T](), err)
			}
			return e.check(s, n, rank, all)
		}}
}

var libTypes = []libTyped{
	libTypedOf(numeric[int8](), true), libTypedOf(numeric[uint8](), true), libTypedOf(numeric[int32](), true), libTypedOf(numeric[uint32](), true),
	libTypedOf(numeric[int64](), true), libTypedOf(numeric[uint64](), true), libTypedOf(numeric[float32](), true), libTypedOf(numeric[float64](), true),
	libTypedOf(small(cuda.Float16FromFloat32, cuda.Float16.Float32), false), libTypedOf(small(cuda.BFloat16FromFloat32, cuda.BFloat16.Float32), false),
	libTypedOf(small(cuda.F8E4M3FromFloat32, cuda.F8E4M3.Float32), false), libTypedOf(small(cuda.F8E5M2FromFloat32, cuda.F8E5M2.Float32), false),
}

const libF32 = 6 // float32 in libTypes

// Every operation with every type and reduction, in and out of place, registered or not, eager.
func TestLibraryCollectives(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			const large = 3 << 20
			start := time.Now()
			for _, registered := range []bool{false, true} {
				b, done, err := openBuffers(w, 2*large+4096, registered)
				defer done()
				if err != nil {
					return err
				}
				salt := 0
				for i, ty := range libTypes {
					fmt.Fprintf(os.Stderr, "%v registered=%t %s\n", time.Since(start), registered, ty.name)
					counts := []int{0, 1, 17, 333}
					if i == libF32 {
						counts = append(counts, large/4-64)
					}
					for _, op := range collectives {
						for red := nccl.Sum; red <= nccl.Avg; red++ {
							moves := op == nccl.OpBroadcast || op == nccl.OpAllGather
							if red > nccl.Sum && moves || isFake() && !ty.fake && !moves {
								continue
							}
							for _, count := range counts {
								if count > 1000 && red > nccl.Sum || op == nccl.OpReduceScatter && count > 1000 {
									continue
								}
								for _, inPlace := range []bool{false, true} {
									salt++
									s := spec{op: op, red: red, count: count, inPlace: inPlace, salt: salt, root: salt % 2}
									nccl.SetStraight(w.comm, salt/2>>job.Rank()&1 == 0) // both, one, none: their records must be the same
									if err := errors.Join(ty.write(w, b, s), ty.call(w, b, s)); err != nil {
										return fmt.Errorf("%v of %s: %w", s, ty.name, err)
									}
									if err := ty.verify(w, b, s); err != nil {
										return err
									}
								}
							}
						}
					}
				}
				fmt.Fprintf(os.Stderr, "%v registered=%t: done\n", time.Since(start), registered)
				st := w.comm.Stats()
				if registered != (st.BytesDirect > 0) {
					return fmt.Errorf("registered %t: %+v", registered, st)
				}
				done()
			}
			return nil
		})
	}, nil)
}

// Captured by package graphs: all types, three replays each, then nothing is left registered.
func TestLibraryCaptured(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			large := 4 * large()
			b, done, err := openBuffers(w, 2*large+4096, false)
			defer done()
			if err != nil {
				return err
			}
			salt := 0
			for i, ty := range libTypes {
				counts := []int{17}
				if i == libF32 {
					counts = append(counts, 100_003, large/4-64)
				}
				for _, op := range collectives {
					if isFake() && !ty.fake && op != nccl.OpBroadcast && op != nccl.OpAllGather {
						continue
					}
					for _, count := range counts {
						for _, inPlace := range []bool{false, true} {
							if op == nccl.OpReduceScatter || op == nccl.OpAllGather {
								count = min(count, large/8-64)
							}
							salt++
							s := spec{op: op, count: count, inPlace: inPlace, salt: salt, root: salt % 2}
							g, err := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error { return ty.call(w, b, s) }, graphs.Comms(w.comm))
							if err != nil {
								return fmt.Errorf("%v of %s: %w", s, ty.name, err)
							}
							for range 3 {
								if err := errors.Join(ty.write(w, b, s), g.Launch(w.stream)); err != nil {
									return fmt.Errorf("%v of %s: %w", s, ty.name, err)
								}
								if err := ty.verify(w, b, s); err != nil {
									return fmt.Errorf("captured %w", err)
								}
							}
							if err := g.Close(); err != nil {
								return err
							}
						}
					}
				}
			}
			return released(w)
		})
	}, nil)
}

// released waits until nothing is registered any more.
func released(w *world) error {
	for end := time.Now().Add(room); ; {
		if err := w.comm.Drain(w.ctx); err != nil {
			return err
		}
		s := w.comm.Stats()
		if s.Registrations+s.GraphHolds+s.PendingRelease == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("still registered: %+v", s)
		}
		time.Sleep(time.Millisecond)
	}
}

// calls is what the test's library was called with in this process, since its beginning.
func libraryLog() []string {
	b, err := os.ReadFile(fmt.Sprintf("%s.%d", os.Getenv("FAKE_LOG"), os.Getpid()))
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// The order of the library's calls from Init to Close, by a library that writes them down.
func TestLibraryCalls(t *testing.T) {
	log := filepath.Join(t.TempDir(), "calls")
	results := ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		err := withDevice(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 8192, true)
			defer done()
			if err != nil {
				return err
			}
			s := spec{op: nccl.OpAllReduce, count: 4}
			ty := libTypes[libF32]
			if err := errors.Join(ty.call(w, b, s), w.stream.Synchronize(ctx)); err != nil {
				return err
			}
			send, _ := cuda.SliceOf[int32](b.send, 0, 5)
			recv, _ := cuda.SliceOf[int32](b.recv, 0, 5)
			if err := nccl.Group(func() error {
				return errors.Join(nccl.Send(w.comm, send, 1-job.Rank(), w.stream), nccl.Recv(w.comm, recv, 1-job.Rank(), w.stream))
			}, w.comm); err != nil {
				return err
			}
			g, err := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error { return ty.call(w, b, s) }, graphs.Comms(w.comm))
			if err != nil {
				return err
			}
			if err := errors.Join(g.Launch(w.stream), w.stream.Synchronize(ctx), g.Close()); err != nil {
				return err
			}
			done()
			return released(w)
		})
		if err != nil {
			return err
		}
		var want []string
		add := func(lines ...string) { want = append(want, lines...) }
		if job.Rank() == 0 {
			add("GetUniqueId", "GetUniqueId")
		}
		for range 2 { // the second is for point to point: the version's fault
			add("GRAPH_MIXING_SUPPORT=0", fmt.Sprintf("CommInitRankConfig n=2 rank=%d size=120 magic=cafebeef blocking=1 name=world cga=1", job.Rank()))
		}
		add("CommRegister bytes=8192", "CommRegister bytes=8192") // not with the one for point to point
		add("AllReduce n=4 type=7 red=0 root=0")
		add("GroupStart", fmt.Sprintf("Send n=5 type=2 peer=%d", 1-job.Rank()), fmt.Sprintf("Recv n=5 type=2 peer=%d", 1-job.Rank()), "GroupEnd")
		add("CommWindowRegister bytes=8192 flags=1", "CommWindowRegister bytes=8192 flags=1") // small memory, captured
		add("AllReduce n=4 type=7 red=0 root=0")
		got := libraryLog()
		if n := len(want); len(got) < n || !slices.Equal(got[:n], want) {
			return fmt.Errorf("calls:\n%s\nwant first:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		rest := got[len(want):]
		// Drain and deregistration are on different goroutines; the end comes last.
		count := map[string]int{}
		for _, line := range rest {
			count[line]++
		}
		self := fmt.Sprintf("Send n=1 type=1 peer=%d", job.Rank())
		if count["CommDeregister h=0x77"] != 2 || count[self] == 0 || count[self]%22 != 0 || count["CommAbort"] != 0 ||
			count["CommWindowDeregister"] != 2 || count[fmt.Sprintf("Send n=16 type=1 peer=%d", job.Rank())] != 2 {
			return fmt.Errorf("after the capture:\n%s", strings.Join(rest, "\n"))
		}
		end := rest[len(rest)-4:]
		if want := []string{"CommFinalize", "CommFinalize", "CommDestroy", "CommDestroy"}; !slices.Equal(end, want) {
			return fmt.Errorf("the end is %v, want %v", end, want)
		}
		return nil
	}, append(fakeLibraries(t), "FAKE_LOG="+log, "NCCL_NET_DISABLE_INTRA=1")...)
	allWell(t, results)
}

// An eager call allocates nothing. What is counted here and there is of goroutines beside it.
func TestLibraryAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 8192, false)
			defer done()
			if err != nil {
				return err
			}
			send, _ := cuda.SliceOf[float32](b.send, 0, 2)
			recv, _ := cuda.SliceOf[float32](b.recv, 0, 2)
			call := func() error { return nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream) }
			if err := errors.Join(call(), w.stream.Synchronize(ctx)); err != nil {
				return err
			}
			const calls = 200
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := time.Now()
			for range calls {
				if err := call(); err != nil {
					return err
				}
			}
			took := time.Since(start)
			runtime.ReadMemStats(&after)
			if n := float64(after.Mallocs-before.Mallocs) / calls; n > 0.1 {
				return fmt.Errorf("%.1f allocations, %.0f bytes a call", n, float64(after.TotalAlloc-before.TotalAlloc)/calls)
			}
			fmt.Fprintf(os.Stderr, "%v a call\n", took/calls)
			return w.stream.Synchronize(ctx)
		})
	}, func(t *testing.T, results []ranktest.Result) {
		allWell(t, results)
		t.Log(results[0].Output)
	})
}
