package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// fakeDriver is what the test's driver library has for tests.
type fakeDriver struct{ refuse, live dl.Func }

func openFakeDriver() (*fakeDriver, error) {
	lib, err := dl.Open(dl.Spec{Name: "the test's driver", Search: gpulib.CUDA, Symbol: "fake_refuse"})
	if err != nil {
		return nil, err
	}
	return &fakeDriver{lib.Lookup("fake_refuse"), lib.Lookup("fake_live")}, nil
}

// fail has a call of the driver not be done, after so many that are. It reports whether the last one that was asked for has come.
func (d *fakeDriver) fail(call string, after int) bool {
	name := dl.CString(call)
	return d.refuse.Call(uintptr(unsafe.Pointer(&name[0])), uintptr(after)) != 0
}

// Whatever the driver refuses one rank on the way to peer memory, all ranks go without, say why, and leave nothing.
func TestLibraryPeerOpenFails(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		driver, err := openFakeDriver()
		if err != nil {
			return err
		}
		if err := peerOpenFails(ctx, job, driver, 0, "none", 0, false, "yes: "); err != nil { // opens what the process keeps
			return err
		}
		undo := nccl.SetPeerSwap(10 * room)
		round := 0
		for _, c := range []struct {
			call string
			from int // of the first that matters
			n    int // how many there are
		}{
			{"cuModuleLoadDataEx", 0, 1}, {"cuModuleGetFunction", 0, 1}, // the kernel
			{"cuMemCreate", 0, 1}, {"cuMemRetainAllocationHandle", 0, 1}, {"cuMemExportToShareableHandle", 0, 1}, // this rank's memory
			{"cuMemImportFromShareableHandle", 0, 2},          // the others'
			{"cuMemAddressReserve", 0, 3}, {"cuMemMap", 0, 3}, // of both
			{"cuMemSetAccess", 1, 2},                               // of the others': one's own is tried twice
			{"cuMemAllocHost_v2", 0, 1}, {"cuMemsetD8Async", 0, 3}, // the stop word; what is new is cleared
			{"cuMemAlloc_v2", 0, 1}, {"cuStreamCreate", 0, 2}, {"cuEventCreate", 0, 2}, // the order of all calls, too
			{"cuLaunchKernel", 0, 1}, // the first call, in which the others do not wait for this rank
		} {
			for after := c.from; after <= c.from+c.n; after++ {
				last := after == c.from+c.n // which is not called any more
				culprits := []int{round % job.Size()}
				if !last && (after > 0 || c.call == "cuMemCreate" || c.call == "cuLaunchKernel") {
					culprits = []int{0, 1, 2}
				}
				round++
				for _, culprit := range culprits {
					if err := peerOpenFails(ctx, job, driver, culprit, c.call, after, !last, fmt.Sprintf("no: rank %d: ", culprit), c.call+": "); err != nil {
						return fmt.Errorf("%s after %d, of rank %d: %w", c.call, after, culprit, err)
					}
				}
			}
		}
		// What has come of the first call is looked at.
		for culprit := range job.Size() {
			who := 0
			if culprit == 0 {
				who = 1
			}
			err := peerOpenFails(ctx, job, driver, culprit, "right lines", 0, true, fmt.Sprintf("no: rank %d: the first call: rank %d has sent its number, and 0x10%d has come", who, culprit, culprit+1))
			if err != nil {
				return fmt.Errorf("wrong lines of rank %d: %w", culprit, err)
			}
		}
		undo()
		defer nccl.SetPeerSwap(2 * time.Second)()
		if err := peerOpenFails(ctx, job, driver, 2, "lines", 0, true, "no: rank 0: the first call: ", "context deadline exceeded"); err != nil {
			return fmt.Errorf("no lines of rank 2: %w", err)
		}
		return nil
	}, append(fakeLibraries(t), byPeer)...))
}

// A rank that loses its device in the first call ends Init on all.
func TestLibraryPeerOpenLost(t *testing.T) {
	t.Parallel()
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		driver, err := openFakeDriver()
		if err != nil {
			return err
		}
		dev, err := device(job)
		if err != nil {
			return err
		}
		if job.Rank() == 1 {
			driver.fail("context", 0)
		}
		nccl.SetPeerSwap(10 * room) // nobody waits for it
		ctx, cancel := context.WithTimeout(ctx, 2*room)
		defer cancel()
		comm, err := nccl.Init(ctx, job, dev)
		if err == nil {
			return errors.Join(errors.New("no error"), comm.Close())
		}
		if job.Rank() == 1 {
			dev.Close() // what the driver says of a lost device is not of interest
			return wantErr(err, cuda.ErrIllegalAddress, "init on communicator world, rank 1: ")
		}
		if text := err.Error(); !strings.Contains(text, ": rank 1: ") || !strings.Contains(text, "CUDA_ERROR_ILLEGAL_ADDRESS") {
			return fmt.Errorf("init: %w, want that rank 1 has lost its device", err)
		}
		return errors.Join(dev.Close(), nothingLeft(driver, -1))
	}, append(fakeLibraries(t), byPeer)...))
}

// A rank that dies on the way to peer memory ends Init on the others, which do not wait for it, and leave nothing.
func TestLibraryPeerOpenDeath(t *testing.T) {
	for _, call := range []string{"cuMemCreate", "cuMemImportFromShareableHandle", "cuLaunchKernel"} { // before each meeting
		t.Run(call, func(t *testing.T) {
			t.Parallel()
			results := ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				driver, err := openFakeDriver()
				if err != nil {
					return err
				}
				dev, err := device(job)
				if err != nil {
					return err
				}
				if job.Rank() == 1 {
					driver.fail("!"+call, 0)
				}
				nccl.SetPeerSwap(10 * room)
				ctx, cancel := context.WithTimeout(ctx, room)
				defer cancel()
				comm, err := nccl.Init(ctx, job, dev)
				if err == nil {
					comm.Close()
				}
				var died *bootstrap.RankError
				if !errors.As(err, &died) || died.Rank != 1 || ctx.Err() != nil {
					return fmt.Errorf("init: %v, want that rank 1 died; the deadline: %v", err, ctx.Err())
				}
				return errors.Join(dev.Close(), nothingLeft(driver, -1))
			}, append(fakeLibraries(t), byPeer)...)
			for _, r := range results {
				if r.Rank == 1 && r.Signal != "SIGKILL" || r.Rank != 1 && r.Code != 0 {
					t.Errorf("%v\n%s", r, r.Err)
				}
			}
		})
	}
}

// nothingLeft waits until the driver has nothing any more, and there are no more descriptors than some number.
func nothingLeft(driver *fakeDriver, files int) error {
	for end := time.Now().Add(room); driver.live.Call() != 0 || files >= 0 && fdCount() > files; time.Sleep(time.Millisecond) { // streams end behind their work
		if time.Now().After(end) {
			return fmt.Errorf("the driver has %d things, there are %d descriptors, %d before", driver.live.Call(), fdCount(), files)
		}
	}
	return nil
}

// hiddenDevice is this rank's device where it sees no other.
func hiddenDevice(job *bootstrap.Job) (*cuda.Device, error) {
	own := strconv.Itoa(job.LocalRank())
	os.Setenv("FAKE_VISIBLE", own)
	if all := os.Getenv("CUDA_VISIBLE_DEVICES"); all != "" {
		own = strings.Split(all, ",")[job.LocalRank()]
	}
	os.Setenv("CUDA_VISIBLE_DEVICES", own)
	return cuda.Open("0")
}

// Ranks that see their own device alone have peer memory, too, where NVML knows that all are joined.
func TestLibraryPeerHidden(t *testing.T) {
	nvml := func(t *testing.T) string {
		return "GORUN_NVML_LIB=" + dltest.Build(t, "../cuda/testdata/nvml.c", "libnvidia-ml.so.1")
	}
	ranks := func(yes bool, texts ...string) func(ctx context.Context, job *bootstrap.Job) error {
		return func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := hiddenDevice(job)
			if err != nil {
				return err
			}
			err = withComm(ctx, job, dev, nil, func(w *world) error {
				text := nccl.Explain(w.comm)
				if (nccl.PeerMost(w.comm) > 0) != yes {
					return fmt.Errorf("peer memory: %t\n%s", !yes, text)
				}
				for _, want := range texts {
					if !strings.Contains(text, want) {
						return fmt.Errorf("want %q in\n%s", want, text)
					}
				}
				before := nccl.ByPeerCalls(w.comm)
				if err := works(w); err != nil {
					return err
				}
				if n := nccl.ByPeerCalls(w.comm) - before; (n == 1) != yes {
					return fmt.Errorf("%d calls by peer memory", n)
				}
				return nil
			})
			return errors.Join(err, dev.Close())
		}
	}
	t.Run("fake", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 3, ranks(true, "yes: "), append(fakeLibraries(t), byPeer, nvml(t))...))
	})
	t.Run("one is not joined", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 3, ranks(false, "no: rank 0: its device is not joined by NVLink to that of rank 2, and without it was not measured"),
			append(fakeLibraries(t), byPeer, nvml(t), "FAKE_UNLINKED=2")...))
	})
	t.Run("no NVML", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 2, ranks(false, "no: rank 0: whether its device is joined by NVLink to that of rank 1 is not known: ",
			"to GPU-20212223-2425-2627-2829-2a2b2c2d2e2f: the driver does not show it: load NVML: no usable library; /nowhere/libnvidia-ml.so.1 (GORUN_NVML_LIB): "),
			append(fakeLibraries(t), byPeer, "GORUN_NVML_LIB=/nowhere/libnvidia-ml.so.1")...))
	})
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedOwnGPUs(t, 2)
		allWell(t, ranktest.RunProcesses(t, 2, ranks(true, "yes: "), append(dltest.GPUEnv(), byPeer)...))
	})
}

// peerOpenFails makes a communicator while the culprit's driver refuses a call, which it does not come to if fails is false.
func peerOpenFails(ctx context.Context, job *bootstrap.Job, driver *fakeDriver, culprit int, call string, after int, fails bool, texts ...string) error {
	files := fdCount()
	dev, err := device(job)
	if err != nil {
		return err
	}
	if job.Rank() == culprit {
		driver.fail(call, after)
	}
	comm, err := nccl.Init(ctx, job, dev)
	came := driver.fail("", 0)
	if err != nil {
		return err
	}
	err = func() (err error) {
		defer func() { err = errors.Join(err, comm.Close()) }()
		if came != (fails && job.Rank() == culprit) {
			return fmt.Errorf("it was called: %t", came)
		}
		stream, err := dev.NewStream()
		if err != nil {
			return err
		}
		defer stream.Close()
		w := &world{ctx, job, dev, comm, stream}
		_, text, _ := strings.Cut(nccl.Explain(w.comm), "small collectives by peers:")
		text, _, _ = strings.Cut(text, "\n")
		if (nccl.PeerMost(w.comm) == 0) != fails || nccl.PeerLeft(w.comm) == fails || nccl.Ordered(w.comm) == fails {
			return fmt.Errorf("up to %d bytes by peer memory; has buffers: %t; orders streams: %t;%s", nccl.PeerMost(w.comm), nccl.PeerLeft(w.comm), nccl.Ordered(w.comm), text)
		}
		for _, want := range texts {
			if fails && !strings.Contains(text, want) {
				return fmt.Errorf("want %q in%s", want, text)
			}
		}
		if err := works(w); err != nil {
			return err
		}
		buf, err := nccl.Alloc[float32](dev, 10)
		if err != nil {
			return err
		}
		defer buf.Free()
		g, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, s) }, graphs.Comms(w.comm))
		if err != nil {
			return err
		}
		if c := g.Calls()[0]; (c.Mode == nccl.Peer) == fails {
			err = fmt.Errorf("a captured call has mode %v: %s", c.Mode, c.Reason)
		}
		return errors.Join(err, g.Launch(w.stream), w.stream.Synchronize(ctx), g.Close())
	}()
	if err := errors.Join(err, dev.Close()); err != nil {
		return err
	}
	return nothingLeft(driver, files)
}
