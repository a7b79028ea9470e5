package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl"
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
		if err := peerOpenFails(ctx, job, driver, 0, "none", 0, false); err != nil { // opens what the process keeps
			return err
		}
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
		} {
			for after := c.from; after <= c.from+c.n; after++ {
				last := after == c.from+c.n // which is not called any more
				culprits := []int{round % job.Size()}
				if !last && (after > 0 || c.call == "cuMemCreate") {
					culprits = []int{0, 1, 2}
				}
				round++
				for _, culprit := range culprits {
					if err := peerOpenFails(ctx, job, driver, culprit, c.call, after, !last); err != nil {
						return fmt.Errorf("%s after %d, of rank %d: %w", c.call, after, culprit, err)
					}
				}
			}
		}
		return nil
	}, append(fakeLibraries(t), byPeer)...))
}

// peerOpenFails makes a communicator while the culprit's driver refuses a call, which it does not come to if fails is false.
func peerOpenFails(ctx context.Context, job *bootstrap.Job, driver *fakeDriver, culprit int, call string, after int, fails bool) error {
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
		if why := fmt.Sprintf("no: rank %d: ", culprit); fails && (!strings.Contains(text, why) || !strings.Contains(text, call+": ")) {
			return fmt.Errorf("want %q and %q in%s", why, call, text)
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
	for end := time.Now().Add(room); driver.live.Call() != 0 || fdCount() > files; time.Sleep(time.Millisecond) { // streams end behind their work
		if time.Now().After(end) {
			return fmt.Errorf("the driver has %d things, there are %d descriptors, %d before", driver.live.Call(), fdCount(), files)
		}
	}
	return nil
}
