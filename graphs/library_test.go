package graphs_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
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

// The tests of this file run on a collective library, two ranks that are processes with a device each: on libraries that the test builds, and
// on GPUs.

var long = flag.Bool("long", false, "more cycles")

// fakeVar marks the ranks of a test on the libraries that it has built.
const fakeVar = "GORUN_TEST_FAKE"

// fakeEnv builds a driver and a collective library that work without a GPU.
func fakeEnv(t *testing.T) []string {
	t.Helper()
	if os.Getenv(fakeVar) != "" {
		return nil // a rank: it has the paths
	}
	driver := dltest.Build(t, "../cuda/testdata/driver.c", "libcuda.so.1", "-lpthread")
	library := dltest.Build(t, "../nccl/testdata/nccl.c", "libnccl.so.2", "-lpthread", "-ldl")
	return append(dltest.LibraryOnly(), fakeVar+"=1", "GORUN_CUDA_LIB="+driver, "GORUN_NCCL_LIB="+library, "GORUN_DEVICE=", "FAKE_DEVICES=8")
}

func isFake() bool { return os.Getenv(fakeVar) != "" }

// onLibrary runs f as subtests "fake" and "GPU"; wants says how ranks end otherwise than well.
func onLibrary(t *testing.T, f func(ctx context.Context, job *bootstrap.Job) error, wants func(t *testing.T, results []ranktest.Result), env ...string) {
	t.Helper()
	if wants == nil {
		wants = allWell
	}
	onLibraryRanks(t, 2, f, wants, env...)
}

func onLibraryRanks(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error, wants func(t *testing.T, results []ranktest.Result), env ...string) {
	t.Helper()
	t.Run("fake", func(t *testing.T) {
		wants(t, ranktest.RunProcesses(t, n, f, append(fakeEnv(t), env...)...))
	})
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedGPUs(t, n)
		wants(t, ranktest.RunProcesses(t, n, f, append(dltest.GPUEnv(), env...)...))
	})
}

func allWell(t *testing.T, results []ranktest.Result) {
	t.Helper()
	for _, r := range results {
		if r.Code != 0 {
			t.Error(r)
		}
	}
}

// deviceRank is newRank on this rank's device. The test's library does nothing else for large buffers.
func deviceRank(ctx context.Context, job *bootstrap.Job, n int) (*rank, error) {
	if isFake() {
		n = min(n, 1<<16)
	}
	return newRankOn(ctx, job, dltest.DeviceOf(job.LocalRank()), "world", n)
}

// onDevices is onLibrary with what a rank needs.
func onDevices(t *testing.T, n int, f func(ctx context.Context, r *rank) error, env ...string) {
	t.Helper()
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := deviceRank(ctx, job, n)
		if err != nil {
			return err
		}
		if err := f(ctx, r); err != nil {
			return err
		}
		return r.close()
	}, nil, env...)
}

// noWindows is for tests that go on after an abort, which replays in windows do not let through before NCCL 2.30.7, and for those of when memory goes.
const noWindows = "GORUN_WINDOWS=off"

// everywhere runs f on two ranks of each platform.
func everywhere(t *testing.T, f func(ctx context.Context, r *rank) error, env ...string) {
	t.Helper()
	t.Run("host", func(t *testing.T) { onRanks(t, 2, f) })
	onDevices(t, elements, f, env...)
}

// TestLibraryRandomPrograms is TestRandomPrograms, the last ones with large buffers.
func TestLibraryRandomPrograms(t *testing.T) {
	t.Run("library", func(t *testing.T) { libraryRandomPrograms(t) })
	t.Run("peer memory", func(t *testing.T) { libraryRandomPrograms(t, "GORUN_PEER=auto") })
}

func libraryRandomPrograms(t *testing.T, env ...string) {
	onDevices(t, elements, func(ctx context.Context, r *rank) error {
		seeds, large := uint64(30), uint64(6)
		if isFake() {
			seeds, large = 8, 0
		}
		for seed := range seeds {
			p := randomProgramOf(seed, 2)
			if seed >= seeds-large {
				p = p.larger(4 << 20 / p.n)
			}
			if err := runBoth(ctx, r, p, seed); err != nil {
				return fmt.Errorf("seed %d: %w", seed, err)
			}
		}
		return nil
	}, env...)
}

// larger is the program with k times the elements.
func (p program) larger(k int) program {
	p.n *= k
	for i := range p.steps {
		p.steps[i].n *= k
	}
	return p
}

// usage is what must not grow with the number of graphs.
type usage struct {
	device uint64 // bytes that are not free
	host   uint64 // resident bytes
	files  int
}

func (r *rank) usage() (u usage, err error) {
	debug.FreeOSMemory()
	free, total, err := r.dev.MemoryInfo()
	if err != nil {
		return u, err
	}
	u.device = total - free
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return u, err
	}
	var size uint64
	if _, err := fmt.Sscan(string(b), &size, &u.host); err != nil {
		return u, err
	}
	u.host *= uint64(os.Getpagesize())
	fds, err := os.ReadDir("/proc/self/fd")
	u.files = len(fds)
	return u, err
}

const cyclesVar = "GORUN_TEST_CYCLES"

// TestLibraryCycles captures, replays, closes and drains again and again: nothing may grow.
func TestLibraryCycles(t *testing.T) {
	cycles := 50
	if *long {
		cycles = 1000
	}
	onDevices(t, 4<<20, func(ctx context.Context, r *rank) error {
		cycles, err := strconv.Atoi(os.Getenv(cyclesVar))
		if err != nil {
			return err
		}
		c := r.comm
		half := r.a.Len() / 2
		cycle := func(i int) error {
			if i%10 == 0 {
				return r.works(ctx, c)
			}
			small, err := nccl.Alloc[float32](r.dev, 64) // in a window
			if err != nil {
				return err
			}
			g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return errors.Join(allReduce(r, s), nccl.AllGather(c, r.a.Slice(0, half), r.b.All(), s),
					nccl.Broadcast(c, r.b.All(), r.a.All(), i%2, s), nccl.AllReduce(c, small.All(), small.All(), nccl.Max, s))
			}, graphs.Comms(c))
			if err != nil {
				return err
			}
			if n := c.Stats().Windows; n > 1 {
				return fmt.Errorf("%d windows, want the present one", n)
			}
			for range 2 {
				if err := g.Launch(r.stream); err != nil {
					return err
				}
			}
			// Closed in flight every other time.
			if i%2 == 0 {
				if err := r.stream.Synchronize(ctx); err != nil {
					return err
				}
			}
			return errors.Join(g.Close(), r.stream.Synchronize(ctx), small.Free(), c.Drain(ctx), empty(c))
		}
		var before usage
		const warm = 20
		for i := range warm + cycles {
			if i == warm {
				if before, err = r.usage(); err != nil {
					return err
				}
			}
			if err := cycle(i); err != nil {
				return fmt.Errorf("cycle %d: %w", i, err)
			}
		}
		if err := r.job.Barrier(ctx); err != nil {
			return err
		}
		after, err := r.usage()
		if err != nil {
			return err
		}
		fmt.Printf("rank %d: %+v after %d cycles, %+v before\n", c.Rank(), after, cycles, before)
		// The device's memory is counted for all its processes; the collector keeps some of the host's.
		growth := uint64(32 << 20)
		if raceEnabled {
			growth *= 8 // the detector's own memory
		}
		if after.device > before.device+4<<20 || after.host > before.host+growth || after.files > before.files {
			return fmt.Errorf("%+v after %d cycles, %+v before", after, cycles, before)
		}
		return nil
	}, fmt.Sprintf("%s=%d", cyclesVar, cycles))
}

var (
	logRegistered   = regexp.MustCompile(`- IPC (local |graph )?regist(er|ered) buffer (0x[0-9a-f]+)`)
	logDeregistered = regexp.MustCompile(`IPC deregistered buffer (0x[0-9a-f]+)`)
	logRefused      = regexp.MustCompile(`.*failed to (NVLS|IPC|NET) register.*|.*Skipping (graph )?registration.*`)
)

// TestLibraryRegistrationLog reads what NCCL says itself: each capture has its buffers registered, and they are deregistered after Close and Drain. NCCL's
// symmetric kernels use windows instead.
func TestLibraryRegistrationLog(t *testing.T) {
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedOwnGPUs(t, 2)
		dir := t.TempDir()
		env := append(dltest.GPUEnv(), "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=REG", "NCCL_DEBUG_FILE="+filepath.Join(dir, "nccl.%p"))
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			r, err := deviceRank(ctx, job, 4<<20)
			if err != nil {
				return err
			}
			file := strings.ReplaceAll(os.Getenv("NCCL_DEBUG_FILE"), "%p", strconv.Itoa(os.Getpid()))
			// At different offsets on the two ranks there is no window.
			off := 1024 * job.Rank()
			n, seen := r.a.Len()-2048, 0
			for i := range 5 {
				g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
					return nccl.AllReduce(r.comm, r.a.Slice(off, off+n), r.b.Slice(off, off+n), nccl.Sum, s)
				}, graphs.Comms(r.comm))
				if err != nil {
					return err
				}
				if m := g.Calls()[0].Mode; m != nccl.Graph {
					return fmt.Errorf("mode %v, want %v: %s", m, nccl.Graph, g.Calls()[0].Reason)
				}
				if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
					return err
				}
				if err := errors.Join(g.Close(), r.comm.Drain(ctx), empty(r.comm)); err != nil {
					return err
				}
				b, err := os.ReadFile(file)
				if err != nil {
					return err
				}
				if refused := logRefused.FindString(string(b)); refused != "" {
					return fmt.Errorf("the library refuses: %s", refused)
				}
				up, down := len(logRegistered.FindAll(b, -1)), len(logDeregistered.FindAll(b, -1))
				fmt.Printf("rank %d, graph %d: %d registered, %d deregistered\n", job.Rank(), i, up, down)
				if up <= seen || down < up {
					return fmt.Errorf("graph %d: %d registered, %d before; %d deregistered:\n%s", i, up, seen, down, b)
				}
				seen = up
			}
			return r.close()
		}, env...))
	})
}

// TestLibraryEnds is TestEnds, with what two ranks can do.
func TestLibraryEnds(t *testing.T) {
	for i, e := range ends {
		if e.three {
			continue
		}
		t.Run(e.name, func(t *testing.T) {
			culprit := i % 2
			onLibrary(t, e.rank(culprit, func(ctx context.Context, job *bootstrap.Job) (*rank, error) { return deviceRank(ctx, job, 4<<20) }),
				func(t *testing.T, results []ranktest.Result) { e.check(t, culprit, results) })
		})
	}
}

// TestReplayDeadline: a replay whose peer does not come is given up with an error that names it. The communicator is aborted then, and a
// new one works in the same processes.
func TestReplayDeadline(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		c, err := r.another(ctx, "lonely")
		if err != nil {
			return err
		}
		s, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		g, err := graphs.Capture(ctx, s, func(s *cuda.Stream) error {
			return nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s)
		}, graphs.Comms(c))
		if err != nil {
			return err
		}
		// Once together: nothing is left to connect.
		if err := errors.Join(g.Launch(s), s.Synchronize(ctx), r.job.Barrier(ctx)); err != nil {
			return err
		}
		if r.job.Rank() == 0 {
			short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
			defer cancel()
			err := errors.Join(g.Launch(s), s.Synchronize(short))
			if !errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("a lone replay: %v, want %v", err, context.DeadlineExceeded)
			}
			if err := wantText(err, "replay", "communicator lonely", "rank 1"); err != nil {
				return err
			}
			begin := time.Now()
			if err := c.Abort(err); err != nil {
				return err
			}
			if took := time.Since(begin); took > room {
				return fmt.Errorf("the abort took %v: the graph held it", took)
			}
			if err := wantText(s.Synchronize(ctx), "abort"); err != nil {
				return err
			}
		} else if err := eventually(ctx, func() error { return wantText(c.Err(), "aborted by rank 0", "deadline exceeded") }); err != nil {
			return err
		}
		if err := wantText(g.Launch(s), "abort", "rank 0"); err != nil {
			return err
		}
		if err := errors.Join(g.Close(), c.Close(), s.Close()); err != nil {
			return err
		}
		if c, err = r.another(ctx, "anew"); err != nil {
			return err
		}
		return errors.Join(r.works(ctx, c), r.works(ctx, r.comm))
	}, noWindows)
}

// TestAbortUnderGraphs: the graphs of an aborted communicator are open, with and without a replay, and the program closes none of them. The
// library's abort waits for whatever has its registrations.
func TestAbortUnderGraphs(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		c, err := r.another(ctx, "doomed")
		if err != nil {
			return err
		}
		var gs []*graphs.Graph
		for i := range 3 {
			g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s)
			}, graphs.Comms(c))
			if err != nil {
				return err
			}
			if i > 0 {
				if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
					return err
				}
			}
			gs = append(gs, g)
		}
		if err := r.job.Barrier(ctx); err != nil {
			return err
		}
		begin := time.Now()
		if err := c.Abort(errOwn); err != nil {
			return err
		}
		if took := time.Since(begin); took > room {
			return fmt.Errorf("the abort took %v: the graphs held it", took)
		}
		if err := errors.Join(wantText(gs[0].Launch(r.stream), "abort"), c.Close()); err != nil {
			return err
		}
		for _, g := range gs {
			if err := g.Close(); err != nil {
				return err
			}
		}
		return r.works(ctx, r.comm)
	}, noWindows)
}

// TestLibraryAbortMixedReplay: a replay waits for a rank in collectives and messages, for which the library has a communicator each, and a buffer is registered: then these are
// aborted one after the other. The first abort waits for the replay, which ends with the second.
func TestLibraryAbortMixedReplay(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := deviceRank(ctx, job, elements)
		if err != nil {
			return err
		}
		c, err := r.another(ctx, "doomed")
		if err != nil {
			return err
		}
		some, err := nccl.Alloc[float32](r.dev, elements)
		if err != nil {
			return err
		}
		reg, err := c.Register(some.Memory())
		if err != nil {
			return err
		}
		me := job.Rank()
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return errors.Join(nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s),
				nccl.Group(func() error { return errors.Join(nccl.Send(c, r.a.All(), 1-me, s), nccl.Recv(c, r.b.All(), 1-me, s)) }, c))
		}, graphs.Comms(c))
		if err != nil {
			return err
		}
		if me == 0 {
			err = g.Launch(r.stream)
		}
		if err := errors.Join(err, job.Barrier(ctx)); err != nil {
			return err
		}
		if me == 1 {
			err = c.Abort(errOwn)
		} else {
			err = wantText(r.stream.Synchronize(ctx), "aborted by rank 1")
		}
		// The device works for the next one.
		if err := errors.Join(err, g.Close(), reg.Close(), c.Close(), r.stream.Close(), some.Free(), r.dev.Err()); err != nil {
			return err
		}
		if r.stream, err = r.dev.NewStream(); err != nil {
			return err
		}
		return errors.Join(r.works(ctx, r.comm), r.close())
	}, fakeEnv(t)...))
}

// TestLibraryLaunchThatFails: a rank's launch fails when the others have been told of it. The abort that follows waits for the graph, which the launch must
// have let go: the device stays well, and the ranks go on with a new communicator.
func TestLibraryLaunchThatFails(t *testing.T) {
	onDevices(t, elements, func(ctx context.Context, r *rank) error {
		g, err := reduceGraph(ctx, r)
		if err != nil {
			return err
		}
		if r.comm.Rank() == 1 {
			closed, err := r.dev.NewStream()
			if err != nil {
				return err
			}
			if err := errors.Join(closed.Close(), wantText(g.Launch(closed), "launch graph captured at", "already closed"), wantText(g.Launch(r.stream), "abort")); err != nil {
				return err
			}
		} else {
			err := g.Launch(r.stream)
			if err == nil {
				err = r.stream.Synchronize(ctx)
			}
			if err := wantText(err, "aborted by rank 1", "already closed"); err != nil {
				return err
			}
		}
		if err := r.dev.Err(); err != nil {
			return fmt.Errorf("the device is given up: %w", err)
		}
		if err := errors.Join(g.Close(), r.comm.Close(), r.stream.Close()); err != nil {
			return err
		}
		if r.comm, err = nccl.InitConfig(ctx, r.job, r.dev, &nccl.Config{Name: "again"}); err != nil {
			return err
		}
		if r.stream, err = r.dev.NewStream(); err != nil {
			return err
		}
		return r.works(ctx, r.comm)
	}, noWindows)
}

// TestRegisterInCapture registers memory while a capture goes on, and makes a window.
func TestRegisterInCapture(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		own, err := nccl.Alloc[float32](r.dev, r.a.Len())
		if err != nil {
			return err
		}
		var reg *nccl.Registration
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			if err := allReduce(r, s); err != nil {
				return err
			}
			var err error
			if reg, err = r.comm.Register(own.Memory()); err != nil {
				return err
			}
			return nccl.AllReduce(r.comm, own.All(), own.All(), nccl.Sum, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if call := g.Calls()[0]; r.dev.Platform() != cuda.Host &&
			(call.Mode != nccl.Window || !strings.HasPrefix(call.Reason, "registered by the capture, at the same offsets on all ranks; window: in memory of up to 32 KiB")) {
			return fmt.Errorf("mode %v: %s", call.Mode, call.Reason)
		}
		me := r.comm.Rank()
		if err := errors.Join(r.fill(ctx, own.All(), func(i int) float32 { return float32(i%100 + me) }), g.Launch(r.stream)); err != nil {
			return err
		}
		if err := r.holds(ctx, own.All(), func(i int) float32 { return float32(2*(i%100) + 1) }); err != nil {
			return err
		}
		return errors.Join(g.Close(), reg.Close(), r.comm.Drain(ctx), empty(r.comm), own.Free())
	})
}

// TestTransferThenCollective uses a buffer for point to point first and for a collective then, in one graph and in two: NCCL below 2.29.2 hangs there when both
// are registered with one communicator.
func TestTransferThenCollective(t *testing.T) {
	onDevices(t, 4<<20, func(ctx context.Context, r *rank) error {
		me := r.comm.Rank()
		swap := func(s *cuda.Stream) error {
			return nccl.Group(func() error {
				return errors.Join(nccl.Send(r.comm, r.a.All(), 1-me, s), nccl.Recv(r.comm, r.b.All(), 1-me, s))
			}, r.comm)
		}
		sum := func(s *cuda.Stream) error { return nccl.AllReduce(r.comm, r.b.All(), r.a.All(), nccl.Sum, s) }
		short, cancel := context.WithTimeout(ctx, room)
		defer cancel()
		both := func(s *cuda.Stream) error { return errors.Join(swap(s), sum(s)) }
		for _, parts := range [][]func(*cuda.Stream) error{{both}, {swap, sum}} {
			var gs []*graphs.Graph
			for _, part := range parts {
				g, err := graphs.Capture(short, r.stream, part, graphs.Comms(r.comm))
				if err != nil {
					return err
				}
				gs = append(gs, g)
			}
			for i := range 3 {
				if err := r.fill(ctx, r.a.All(), func(i int) float32 { return float32(i%1000 + 5*me) }); err != nil {
					return err
				}
				for _, g := range gs {
					if err := g.Launch(r.stream); err != nil {
						return err
					}
				}
				if err := r.stream.Synchronize(short); err != nil {
					return err
				}
				if err := r.holds(ctx, r.a.All(), func(i int) float32 { return float32(2*(i%1000) + 5) }); err != nil {
					return fmt.Errorf("%d graphs, replay %d: %w", len(gs), i, err)
				}
			}
			for _, g := range gs {
				if err := g.Close(); err != nil {
					return err
				}
			}
			if err := errors.Join(r.comm.Drain(ctx), empty(r.comm)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestFreeUnderGraph: what would lose the device is refused while the graph lives, and carried out afterwards.
func TestFreeUnderGraph(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		buf, err := nccl.Alloc[float32](r.dev, large())
		if err != nil {
			return err
		}
		freed := make(chan struct{})
		buf.Memory().OnFree(func() {
			time.Sleep(10 * time.Millisecond) // a Drain that does not wait for whoever gives the memory back would be over
			close(freed)
		})
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Sum, s)
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if err := wantText(buf.Free(), g.String()); err != nil {
			return err
		}
		if err := wantText(r.comm.Close(), g.String()); err != nil {
			return err
		}
		for range 20 {
			if err := g.Launch(r.stream); err != nil {
				return err
			}
		}
		// The replays still run, or have not begun.
		if err := errors.Join(g.Close(), buf.Free(), r.stream.Synchronize(ctx), r.comm.Drain(ctx), empty(r.comm)); err != nil {
			return err
		}
		select {
		case <-freed:
		default:
			return errors.New("the memory is still there after Close, Free and Drain")
		}
		return r.works(ctx, r.comm)
	})
}

// TestLibraryRandomEnds aborts the communicator at a random place in a run of replays: the other rank gets the error, and all can be closed.
func TestLibraryRandomEnds(t *testing.T) {
	onDevices(t, 1<<20, func(ctx context.Context, r *rank) error {
		rng := rand.New(rand.NewPCG(1, 2)) // the same on both ranks
		for round := range 6 {
			c, err := r.another(ctx, fmt.Sprint("round ", round))
			if err != nil {
				return err
			}
			s, err := r.dev.NewStream()
			if err != nil {
				return err
			}
			g, err := graphs.Capture(ctx, s, func(s *cuda.Stream) error {
				return nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s)
			}, graphs.Comms(c))
			if err != nil {
				return err
			}
			at, culprit := rng.IntN(40), rng.IntN(2)
			err = nil
			for i := 0; err == nil; i++ {
				if r.job.Rank() == culprit && i == at {
					runtime.Gosched()
					if err := c.Abort(errOwn); err != nil {
						return err
					}
				}
				if err = g.Launch(s); err == nil && i%4 == 3 {
					err = s.Synchronize(ctx)
				}
			}
			if err := wantText(err, "aborted by rank "+fmt.Sprint(culprit)); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			if err := errors.Join(g.Close(), c.Close(), s.Close()); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		return r.works(ctx, r.comm)
	})
}

// TestRegistrationUnderGraph has a buffer registered by the program and by a graph. Whichever goes first, replays stay right, and nothing is left in the end.
func TestRegistrationUnderGraph(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		buf, err := nccl.Alloc[float32](r.dev, large())
		if err != nil {
			return err
		}
		replay := func(g *graphs.Graph) error {
			me := r.comm.Rank()
			if err := errors.Join(r.fill(ctx, buf.All(), func(i int) float32 { return float32(i%512 + me) }), g.Launch(r.stream)); err != nil {
				return err
			}
			if err := r.holds(ctx, buf.All(), func(i int) float32 { return float32(2*(i%512) + 1) }); err != nil {
				return err
			}
			return r.job.Barrier(ctx)
		}
		for _, graphFirst := range []bool{false, true} {
			reg, err := r.comm.Register(buf.Memory())
			if err != nil {
				return err
			}
			g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Sum, s)
			}, graphs.Comms(r.comm))
			if err != nil {
				return err
			}
			if err := replay(g); err != nil {
				return err
			}
			if graphFirst {
				if err := errors.Join(g.Close(), r.comm.Drain(ctx)); err != nil {
					return err
				}
				if s := r.comm.Stats(); s.Registrations != 1 || s.GraphHolds+s.PendingRelease != 0 {
					return fmt.Errorf("after the graph: %+v, want the program's registration", s)
				}
				// Eager, straight in registered memory.
				if err := errors.Join(nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Max, r.stream), r.stream.Synchronize(ctx), reg.Close()); err != nil {
					return err
				}
			} else {
				if err := reg.Close(); err != nil {
					return err
				}
				if err := replay(g); err != nil {
					return fmt.Errorf("after the program's registration has gone: %w", err)
				}
				if err := errors.Join(g.Close(), r.comm.Drain(ctx)); err != nil {
					return err
				}
			}
			if err := empty(r.comm); err != nil {
				return err
			}
		}
		return errors.Join(buf.Free(), r.works(ctx, r.comm))
	})
}

// TestLibraryWindows captures with windows, which all ranks make and end together, while the ranks close their graphs at different times; then without, on
// memory that had windows.
func TestLibraryWindows(t *testing.T) {
	onDevices(t, 1<<20, func(ctx context.Context, r *rank) error {
		me, c := r.comm.Rank(), r.comm
		if ok, why := c.WindowSupport(); !ok {
			if isFake() {
				return errors.New("no windows: " + why)
			}
			fmt.Println("no windows:", why)
			return nil
		}
		sum := func(b *cuda.Buffer[float32], count int, o ...graphs.Option) (*graphs.Graph, error) {
			return graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return nccl.AllReduce(c, b.Slice(0, count), r.b.Slice(0, count), nccl.Sum, s)
			}, append(o, graphs.Comms(c))...)
		}
		check := func(g *graphs.Graph, b *cuda.Buffer[float32], count int) error {
			if err := r.fill(ctx, b.Slice(0, count), func(i int) float32 { return float32(i%4096 + 3*me) }); err != nil {
				return err
			}
			if err := errors.Join(r.job.Barrier(ctx), g.Launch(r.stream)); err != nil {
				return err
			}
			return r.holds(ctx, r.b.Slice(0, count), func(i int) float32 { return float32(2*(i%4096) + 3) })
		}
		var late []*graphs.Graph // rank 1 closes its graphs two rounds later
		for i, count := range []int{2, 1000, 1 << 16, r.a.Len(), 2, 1000} {
			fresh, err := nccl.Alloc[float32](r.dev, r.a.Len())
			if err != nil {
				return err
			}
			for _, b := range []*cuda.Buffer[float32]{r.a, fresh} {
				g, err := sum(b, count, graphs.Require(nccl.Window))
				if err != nil {
					return fmt.Errorf("round %d: %w", i, err)
				}
				if err := check(g, b, count); err != nil {
					return fmt.Errorf("round %d, %d elements: %w", i, count, err)
				}
				late = append(late, g)
			}
			n := 0
			if me == 1 {
				n = 4
			}
			for len(late) > n {
				if err := late[0].Close(); err != nil {
					return err
				}
				late = late[1:]
			}
			// Without a demand the same calls run as they otherwise would.
			g, err := sum(r.a, count)
			if err != nil {
				return err
			}
			if err := errors.Join(check(g, r.a, count), g.Close()); err != nil {
				return fmt.Errorf("round %d, without windows: %w", i, err)
			}
			// At other offsets the library would take the window all the same, and give wrong data.
			if _, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return nccl.AllReduce(c, r.a.Slice(me, me+2), r.b.Slice(0, 2), nccl.Sum, s)
			}, graphs.Comms(c)); !errors.Is(err, nccl.ErrMixed) || wantText(err, "the buffers are in windows") != nil {
				return fmt.Errorf("round %d, offsets that differ: %v", i, err)
			}
			if me == 0 {
				if err := fresh.Free(); err != nil {
					return err
				}
			} else {
				defer fresh.Free()
			}
		}
		for _, g := range late {
			if err := g.Close(); err != nil {
				return err
			}
		}
		return errors.Join(r.job.Barrier(ctx), c.Drain(ctx))
	})
}

// TestLibraryAlone: a communicator of one rank has no library below it.
func TestLibraryAlone(t *testing.T) {
	onLibraryRanks(t, 1, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := deviceRank(ctx, job, 4<<20)
		if err != nil {
			return err
		}
		for range 5 {
			if err := r.works(ctx, r.comm); err != nil {
				return err
			}
		}
		return errors.Join(runBoth(ctx, r, randomProgramOf(1, 1), 1), r.close())
	}, allWell)
}

// TestLibraryLostGraph drops a graph without Close: a drain after the collector has found it gives its registrations back.
func TestLibraryLostGraph(t *testing.T) {
	onDevices(t, 4<<20, func(ctx context.Context, r *rank) error {
		if err := func() error {
			g, err := reduceGraph(ctx, r)
			if err != nil {
				return err
			}
			return errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx))
		}(); err != nil {
			return err
		}
		if len(graphs.Live()) != 1 {
			return fmt.Errorf("live graphs: %q, want one", graphs.Live())
		}
		return eventually(ctx, func() error {
			runtime.GC()
			return errors.Join(r.comm.Drain(ctx), empty(r.comm))
		})
	})
}
