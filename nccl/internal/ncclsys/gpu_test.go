package ncclsys

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// gpuDriver are the driver's functions that the test needs; package cuda's binding cannot be seen from here.
type gpuDriver struct {
	Init, DeviceGetCount, DeviceGet, PrimaryCtxRetain, CtxSetCurrent, MemcpyHtoD, MemcpyDtoH, CtxSynchronize dl.Entry
	StreamCreate, StreamDestroy, StreamQuery, BeginCapture, EndCapture                                       dl.Entry
	Instantiate, Launch, ExecDestroy, GraphDestroy                                                           dl.Entry
}

func openGPUDriver(t *testing.T) *gpuDriver {
	t.Helper()
	lib, err := dl.Open(dl.Spec{Name: "the CUDA driver", Search: gpulib.CUDA, Symbol: "cuInit", Sole: "libcuda.so"})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", lib)
	d := &gpuDriver{}
	need := func(e *dl.Entry, name string) dl.Symbol {
		return dl.Symbol{Entry: e, Names: []string{name}, Required: true}
	}
	if err := lib.Bind([]dl.Symbol{
		need(&d.Init, "cuInit"), need(&d.DeviceGetCount, "cuDeviceGetCount"), need(&d.DeviceGet, "cuDeviceGet"),
		need(&d.PrimaryCtxRetain, "cuDevicePrimaryCtxRetain"),
		need(&d.CtxSetCurrent, "cuCtxSetCurrent"), need(&d.MemcpyHtoD, "cuMemcpyHtoD_v2"), need(&d.MemcpyDtoH, "cuMemcpyDtoH_v2"),
		need(&d.CtxSynchronize, "cuCtxSynchronize"),
		need(&d.StreamCreate, "cuStreamCreate"), need(&d.StreamDestroy, "cuStreamDestroy_v2"), need(&d.StreamQuery, "cuStreamQuery"),
		need(&d.BeginCapture, "cuStreamBeginCapture_v2"), need(&d.EndCapture, "cuStreamEndCapture"),
		need(&d.Instantiate, "cuGraphInstantiateWithFlags"), need(&d.Launch, "cuGraphLaunch"),
		need(&d.ExecDestroy, "cuGraphExecDestroy"), need(&d.GraphDestroy, "cuGraphDestroy"),
	}); err != nil {
		t.Fatal(err)
	}
	return d
}

// ok makes a driver's result an error.
func ok(e *dl.Entry, rc int32) error {
	if rc != 0 {
		return fmt.Errorf("%s: result %d", e.Name, rc)
	}
	return nil
}

// gpuWait bounds each wait of TestGPU: what takes longer hangs.
const gpuWait = 60 * time.Second

// until polls until ready says so or fails.
func until(what string, ready func() (bool, error)) error {
	for end := time.Now().Add(gpuWait); ; {
		done, err := ready()
		if err != nil || done {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: not done in %v", what, gpuWait)
		}
		time.Sleep(20 * time.Microsecond) // between two questions to the driver
	}
}

// gpuProcessVar marks the process in which TestGPU does its work.
const gpuProcessVar = "GORUN_TEST_GPU_PROCESS"

// TestGPU runs the real libraries: all-reduce on two GPUs of one process (one, if there is only one), eager and captured.
// GORUN_REQUIRE_GPU=1 makes a machine without a GPU a failure.
func TestGPU(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		if os.Getenv("GORUN_REQUIRE_GPU") == "1" {
			t.Fatalf("no GPU, and GORUN_REQUIRE_GPU=1 demands one: %v", err)
		}
		t.Skip("no GPU: /dev/nvidiactl is missing")
	}
	// In a process of its own: no second library is opened beside a real one.
	if os.Getenv(gpuProcessVar) == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, self, "-test.run=^TestGPU$", "-test.v")
		cmd.Env = append(os.Environ(), gpuProcessVar+"=1")
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	// NVLink multicast stays off: it needs more of the machine than this test may ask for.
	for k, v := range map[string]string{"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"} {
		t.Setenv(k, v)
	}
	d := openGPUDriver(t)
	l, err := Open(NCCL)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, by %s", l, l.Library().From().From)
	for _, tried := range l.Library().Tried() {
		t.Logf("tried before: %s (%s): %v", tried.Path, tried.From, tried.Err)
	}
	for _, f := range l.Faults() {
		t.Logf("known fault: %s: %s", f.ID, f.What)
	}
	for f := range gates {
		if err := l.Need(f); err != nil {
			t.Logf("missing: %v", err)
		}
	}
	warn, err := gpulib.CheckSettings(NCCL.Settings(), NCCL.Lookup(), true)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range warn {
		t.Logf("setting: %s", w)
	}
	if err := ok(&d.Init, d.Init.Result3(0, 0, 0)); err != nil {
		t.Fatal(err)
	}
	var count int32
	if err := ok(&d.DeviceGetCount, d.DeviceGetCount.Result3(uintptr(unsafe.Pointer(&count)), 0, 0)); err != nil || count == 0 {
		t.Fatalf("%d devices, %v", count, err)
	}
	ranks := min(int(count), 2)
	t.Logf("%d GPUs, %d ranks", count, ranks)

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	// The primary contexts stay to the end of the process: the library's own threads may use them after a destroy.
	var ctx uintptr
	if err := ok(&d.PrimaryCtxRetain, d.PrimaryCtxRetain.Result3(uintptr(unsafe.Pointer(&ctx)), 0, 0)); err != nil {
		t.Fatal(err)
	}
	if err := ok(&d.CtxSetCurrent, d.CtxSetCurrent.Result3(ctx, 0, 0)); err != nil {
		t.Fatal(err)
	}
	id, err := l.GetUniqueID()
	if err != nil {
		t.Fatal(err)
	}
	if id == (UniqueID{}) {
		t.Fatal("the unique id is all zeros")
	}

	phases := &barrier{n: ranks, wait: make(chan struct{})}
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for r := range ranks {
		wg.Go(func() {
			runtime.LockOSThread()
			g := &gpuRank{t: t, d: d, l: l, rank: r, size: ranks, meet: phases}
			errs[r] = g.run(id)
			if errs[r] != nil {
				phases.fail()
				return // the thread, whose state is not known, ends with the goroutine
			}
			runtime.UnlockOSThread()
		})
	}
	wg.Wait()
	for r, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
}

// barrier lets the ranks of the process meet; after a failure it lets nobody through.
type barrier struct {
	mu     sync.Mutex
	n, in  int
	wait   chan struct{}
	failed bool
}

var errOther = errors.New("another rank failed")

func (b *barrier) meet() error {
	b.mu.Lock()
	if b.failed {
		b.mu.Unlock()
		return errOther
	}
	w := b.wait
	if b.in++; b.in == b.n {
		b.in, b.wait = 0, make(chan struct{})
		close(w)
	}
	b.mu.Unlock()
	select {
	case <-w:
	case <-time.After(gpuWait):
		return errors.New("the other ranks do not come")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failed {
		return errOther
	}
	return nil
}

func (b *barrier) fail() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.failed {
		b.failed = true
		close(b.wait)
	}
}

// gpuRank is one rank of TestGPU, on its own thread.
type gpuRank struct {
	t          *testing.T
	d          *gpuDriver
	l          *Library
	rank, size int
	meet       *barrier
	comm       Comm
	send, recv DevicePtr // of the library's allocator
	stream     Stream
}

func (g *gpuRank) run(id UniqueID) (err error) {
	d, l := g.d, g.l
	var ctx uintptr
	if err := ok(&d.PrimaryCtxRetain, d.PrimaryCtxRetain.Result3(uintptr(unsafe.Pointer(&ctx)), uintptr(g.rank), 0)); err != nil {
		return err
	}
	if err := ok(&d.CtxSetCurrent, d.CtxSetCurrent.Result3(ctx, 0, 0)); err != nil {
		return err
	}
	var s uintptr
	if err := ok(&d.StreamCreate, d.StreamCreate.Result3(uintptr(unsafe.Pointer(&s)), 1, 0)); err != nil {
		return err
	}
	g.stream = Stream(s)
	defer d.StreamDestroy.Result3(s, 0, 0)

	start := time.Now()
	c := NewConfig()
	c.Blocking, c.CommName = 0, "gputest"
	if err := l.GroupStart(); err != nil {
		return err
	}
	pending, err := l.CommInitRank(g.size, id, g.rank, c)
	if err != nil && err != ErrInProgress {
		return err
	}
	defer pending.Done()
	defer func() {
		if c := pending.Handle(); err != nil && c != 0 {
			err = errors.Join(err, l.CommAbort(c)) // the graphs are gone by now, or it would not return
		}
	}()
	if err := l.GroupEnd(); err != nil && err != ErrInProgress {
		return err
	}
	if err := until("init", func() (bool, error) {
		g.comm = pending.Handle()
		if g.comm == 0 {
			return false, nil
		}
		return g.ready()
	}); err != nil {
		return err
	}
	g.t.Logf("rank %d: init took %v", g.rank, time.Since(start).Round(time.Millisecond))
	const most = 1 << 20
	if g.send, err = l.MemAlloc(most * 4); err != nil {
		return err
	}
	if g.recv, err = l.MemAlloc(most * 4); err != nil {
		return err
	}
	for _, count := range []int{2, most} {
		if err := g.allReduce(count); err != nil {
			return fmt.Errorf("%d elements: %w", count, err)
		}
	}
	if err := g.meet.meet(); err != nil {
		return err
	}
	// Finalize gives back what the destroyed graphs registered; only then may the memory go.
	if err := g.done(l.CommFinalize(g.comm)); err != nil {
		return fmt.Errorf("finalize: %w", err)
	}
	if err := errors.Join(l.MemFree(g.send), l.MemFree(g.recv)); err != nil {
		return err
	}
	if err := g.meet.meet(); err != nil { // all ranks of a process destroy together
		return err
	}
	if err := l.CommDestroy(g.comm); err != nil && err != ErrInProgress {
		return fmt.Errorf("destroy: %w", err)
	}
	return nil
}

// ready reports whether the communicator has no call in progress.
func (g *gpuRank) ready() (bool, error) {
	state, err := g.l.CommAsyncError(g.comm)
	if err != nil {
		return false, err
	}
	if state == ErrInProgress {
		return false, nil
	}
	return true, g.l.AsyncError(state)
}

// done waits for a call on the non-blocking communicator.
func (g *gpuRank) done(err error) error {
	if err != ErrInProgress {
		return err
	}
	return until("call", g.ready)
}

func (g *gpuRank) synchronize() error {
	return until("stream", func() (bool, error) {
		rc := g.d.StreamQuery.Result3(uintptr(g.stream), 0, 0)
		if rc == 600 {
			return false, nil
		}
		return true, ok(&g.d.StreamQuery, rc)
	})
}

func (g *gpuRank) allReduce(count int) (err error) {
	d, l := g.d, g.l
	bytes := uint64(count) * 4
	send, recv := g.send, g.recv
	reg, err := l.CommRegister(g.comm, send, bytes)
	if err := g.done(err); err != nil {
		return err
	}
	reg2, err := l.CommRegister(g.comm, recv, bytes)
	if err := g.done(err); err != nil {
		return err
	}
	g.t.Logf("rank %d: registered %d bytes: %t, %t", g.rank, bytes, reg != 0, reg2 != 0)

	in, zero, out := make([]float32, count), make([]float32, count), make([]float32, count)
	for i := range in {
		in[i] = float32(i%7 + g.rank + 1)
	}
	// The copy of memory that is not pinned may return before the device has it all, and this stream waits for no other.
	settled := func() error { return ok(&d.CtxSynchronize, d.CtxSynchronize.Result3(0, 0, 0)) }
	if err := ok(&d.MemcpyHtoD, d.MemcpyHtoD.Result3(uintptr(send), uintptr(unsafe.Pointer(&in[0])), uintptr(bytes))); err != nil {
		return err
	}
	clear := func() error {
		if err := ok(&d.MemcpyHtoD, d.MemcpyHtoD.Result3(uintptr(recv), uintptr(unsafe.Pointer(&zero[0])), uintptr(bytes))); err != nil {
			return err
		}
		return settled()
	}
	check := func(what string) error {
		if err := ok(&d.MemcpyDtoH, d.MemcpyDtoH.Result3(uintptr(unsafe.Pointer(&out[0])), uintptr(recv), uintptr(bytes))); err != nil {
			return err
		}
		for i, v := range out {
			want := float32(g.size*(i%7) + g.size*(g.size+1)/2)
			if v != want {
				return fmt.Errorf("%s: element %d = %v, want %v", what, i, v, want)
			}
		}
		return nil
	}

	if err := clear(); err != nil {
		return err
	}
	if err := g.done(l.AllReduce(send, recv, uint64(count), Float32, Sum, g.comm, g.stream)); err != nil {
		return err
	}
	if err := g.synchronize(); err != nil {
		return err
	}
	if err := check("eager"); err != nil {
		return err
	}

	if err := g.meet.meet(); err != nil {
		return err
	}
	const threadLocal = 1
	if err := ok(&d.BeginCapture, d.BeginCapture.Result3(uintptr(g.stream), threadLocal, 0)); err != nil {
		return err
	}
	callErr := g.done(l.AllReduce(send, recv, uint64(count), Float32, Sum, g.comm, g.stream))
	var graph, exec uintptr
	endErr := ok(&d.EndCapture, d.EndCapture.Result3(uintptr(g.stream), uintptr(unsafe.Pointer(&graph)), 0))
	if err := errors.Join(callErr, endErr); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	defer func() {
		err = errors.Join(err, ok(&d.GraphDestroy, d.GraphDestroy.Result3(graph, 0, 0)))
		err = errors.Join(err, g.done(l.CommDeregister(g.comm, reg)), g.done(l.CommDeregister(g.comm, reg2)))
	}()
	if err := ok(&d.Instantiate, d.Instantiate.Result3(uintptr(unsafe.Pointer(&exec)), graph, 0)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ok(&d.ExecDestroy, d.ExecDestroy.Result3(exec, 0, 0))) }()
	for i := range 3 {
		if err := clear(); err != nil {
			return err
		}
		if err := ok(&d.Launch, d.Launch.Result3(exec, uintptr(g.stream), 0)); err != nil {
			return err
		}
		if err := g.synchronize(); err != nil {
			return err
		}
		if err := check(fmt.Sprintf("replay %d", i)); err != nil {
			return err
		}
	}
	return g.meet.meet() // nobody frees what a peer may still use
}
