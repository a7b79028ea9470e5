package cusys

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// saxpyPTX is y = a*x + y for any device since 2018.
const saxpyPTX = `
.version 7.0
.target sm_75
.address_size 64
.visible .entry saxpy(.param .u64 y, .param .u64 x, .param .f32 a, .param .u32 n)
{
	.reg .pred %p<2>;
	.reg .f32 %f<5>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [y];
	ld.param.u64 %rd2, [x];
	ld.param.f32 %f1, [a];
	ld.param.u32 %r1, [n];
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mov.u32 %r4, %tid.x;
	mad.lo.s32 %r5, %r2, %r3, %r4;
	setp.ge.u32 %p1, %r5, %r1;
	@%p1 bra DONE;
	cvta.to.global.u64 %rd3, %rd1;
	cvta.to.global.u64 %rd4, %rd2;
	mul.wide.u32 %rd5, %r5, 4;
	add.s64 %rd6, %rd3, %rd5;
	add.s64 %rd7, %rd4, %rd5;
	ld.global.f32 %f2, [%rd7];
	ld.global.f32 %f3, [%rd6];
	fma.rn.f32 %f4, %f1, %f2, %f3;
	st.global.f32 [%rd6], %f4;
DONE:
	ret;
}
`

const saxpySource = `
extern "C" __global__ void saxpy(float *y, const float *x, float a, unsigned n) {
	unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		y[i] += a * x[i];
}
`

// gpuDone receives the arguments of gpuCallback.
var gpuDone = make(chan uint64, 64)
var gpuCallback = Callback(func(arg uint64) {
	select {
	case gpuDone <- arg:
	default: // a callback never blocks; the test misses the number
	}
})

// gpu is the real driver with device 0 current on a locked thread.
type gpu struct {
	*testing.T
	d   *Driver
	dev Device
	s   Stream
}

func (g gpu) must(err error) {
	g.Helper()
	if err != nil {
		g.Fatal(err)
	}
}

// wait polls the stream, bounded.
func (g gpu) wait() {
	g.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Microsecond) {
		done, err := g.d.StreamQuery(g.s)
		g.must(err)
		if done {
			return
		}
		if time.Now().After(end) {
			g.Fatal("the stream is not done in 30 s")
		}
	}
}

func (g gpu) callback(want uint64) {
	g.Helper()
	select {
	case got := <-gpuDone:
		if got != want {
			g.Errorf("callback with %d, want %d", got, want)
		}
	case <-time.After(30 * time.Second):
		g.Errorf("no callback with %d", want)
	}
}

// TestGPU runs every part of the binding on a real CUDA device. GORUN_REQUIRE_GPU=1 makes a machine without one a failure.
func TestGPU(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err != nil {
		if os.Getenv("GORUN_REQUIRE_GPU") == "1" {
			t.Fatalf("no GPU, and GORUN_REQUIRE_GPU=1 demands one: %v", err)
		}
		t.Skip("no GPU: /dev/nvidiactl is missing")
	}
	d, err := Open(CUDA)
	if err != nil {
		t.Fatal(err)
	}
	g := gpu{T: t, d: d}
	t.Log(d)
	for _, e := range (fake{Driver: d}).entries() {
		if e.Func == 0 {
			t.Logf("missing: %s", e.Name)
		}
	}
	g.must(d.Init())
	n, err := d.DeviceCount()
	if err != nil || n == 0 {
		t.Fatalf("%d devices, %v", n, err)
	}
	g.dev = mustOf(g, d.Device, 0)
	t.Logf("%d devices; 0: %s, %s, UUID %x, %d MiB, %d multiprocessors, compute capability %d.%d, VMM %d, fabric %d, RDMA with VMM %d", n,
		mustOf(g, d.DeviceName, g.dev), mustOf(g, d.DevicePCIBusID, g.dev), mustOf(g, d.DeviceUUID, g.dev), mustOf(g, d.DeviceMemory, g.dev)>>20,
		g.attribute(AttrMultiprocessors), g.attribute(AttrCCMajor), g.attribute(AttrCCMinor), g.attribute(AttrVMM), g.attribute(AttrFabricHandles), g.attribute(AttrRDMAWithVMM))
	if n > 1 {
		reach, err := d.CanAccessPeer(0, 1)
		g.must(err)
		t.Logf("0 can access 1: %t", reach)
	}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx := mustOf(g, d.PrimaryCtxRetain, g.dev)
	defer func() { g.must(d.PrimaryCtxRelease(g.dev)) }()
	g.must(d.CtxSetCurrent(ctx))
	if got, err := d.CtxCurrent(); err != nil || got != ctx {
		t.Errorf("current context %#x, %v, want %#x", got, err, ctx)
	}
	g.s = mustOf(g, d.StreamCreate, uint32(StreamNonBlocking))
	defer func() { g.must(d.StreamDestroy(g.s)) }()

	for _, part := range []struct {
		name string
		run  func(gpu)
	}{{"copies", gpu.copies}, {"shareable memory", gpu.vmm}, {"kernels", gpu.kernels}, {"compiler", gpu.compiler}, {"graph", gpu.graph}, {"broken capture", gpu.broken}} {
		t.Run(part.name, func(t *testing.T) {
			runtime.LockOSThread() // a subtest is a goroutine of its own
			defer runtime.UnlockOSThread()
			g := g
			g.T = t
			g.must(d.CtxSetCurrent(ctx))
			part.run(g)
			g.wait()
		})
	}
}

// mustOf is f(arg), which must not fail.
func mustOf[A, T any](g gpu, f func(A) (T, error), arg A) T {
	g.Helper()
	v, err := f(arg)
	g.must(err)
	return v
}

func (g gpu) attribute(a Attribute) int {
	g.Helper()
	v, err := g.d.DeviceAttribute(g.dev, a)
	g.must(err)
	return v
}

func (g gpu) copies() {
	d := g.d
	const n = 1 << 20
	a, b := mustOf(g, d.MemAlloc, uint64(n)), mustOf(g, d.MemAlloc, uint64(n))
	pinned := mustOf(g, d.MemAllocHost, uint64(n))
	host := unsafe.Slice((*byte)(pinned), n)
	event := mustOf(g, d.EventCreate, uint32(EventDisableTiming))
	g.must(d.Set32(a, 0x04030201, n/4, g.s))
	g.must(d.Set8(a, 9, 2, g.s))
	g.must(d.Copy(b, a, n, g.s))
	g.must(d.CopyToHost(pinned, b, n, g.s))
	g.must(d.EventRecord(event, g.s))
	g.must(d.StreamWaitEvent(g.s, event))
	g.wait()
	if done, err := d.EventQuery(event); err != nil || !done {
		g.Errorf("the event is done: %t, %v", done, err)
	}
	if want := []byte{9, 9, 3, 4, 1, 2, 3, 4}; !bytes.Equal(host[:8], want) || !bytes.Equal(host[n-4:], want[4:]) {
		g.Errorf("copied %v … %v, want %v", host[:8], host[n-4:], want)
	}
	info := mustOf(g, d.PointerInfo, a+100)
	if info.Type != MemoryDevice || info.Device != g.dev || !info.LegacyIPC || info.Handles != HandleNone || info.Base > a || uint64(a-info.Base)+n > info.Size {
		g.Errorf("ordinary memory at %#x: %+v", a, info)
	}
	if info := mustOf(g, d.PointerInfo, DevicePtr(uintptr(pinned))); info.Type != MemoryHost {
		g.Errorf("pinned memory: %+v", info)
	}
	if info := mustOf(g, d.PointerInfo, DevicePtr(4096)); info.Type != MemoryUnknown {
		g.Errorf("no memory: %+v", info)
	}
	if _, err := d.MemRetain(a); !errors.Is(err, ErrInvalidValue) {
		g.Errorf("retain of ordinary memory: %v, want ErrInvalidValue", err)
	}
	free, total, err := d.MemInfo()
	if err != nil || free == 0 || free > total {
		g.Errorf("memory %d of %d, %v", free, total, err)
	}
	if _, err := d.MemAlloc(total * 2); !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "CUDA_ERROR_OUT_OF_MEMORY") {
		g.Errorf("too much: %v", err)
	}
	g.must(errors.Join(d.EventDestroy(event), d.MemFreeHost(pinned), d.MemFree(a), d.MemFree(b)))
}

func (g gpu) vmm() {
	d := g.d
	if g.attribute(AttrVMM) == 0 {
		g.Skip("the device has no virtual memory management")
	}
	prop := PinnedProp(g.dev, HandleFD)
	if g.attribute(AttrFabricHandles) == 1 {
		prop.Handles |= HandleFabric
	}
	if g.attribute(AttrRDMAWithVMM) == 1 {
		prop.RDMA = 1
	}
	size, err := d.MemGranularity(&prop, GranularityRecommended)
	g.must(err)
	h, err := d.MemCreate(size, &prop)
	if errors.Is(err, ErrNotPermitted) || errors.Is(err, ErrNotSupported) {
		g.Logf("without fabric handles: %v", err)
		prop.Handles = HandleFD
		h, err = d.MemCreate(size, &prop)
	}
	g.must(err)
	g.Logf("granularity %d, handles %d", size, prop.Handles)
	access := []MemAccess{{Location: prop.Location, Flags: AccessBoth}}
	m := func(h AllocHandle) DevicePtr {
		p, err := d.MemReserve(size, size)
		g.must(err)
		g.must(d.MemMap(p, size, h))
		g.must(d.MemSetAccess(p, size, access))
		return p
	}
	a := m(h)
	info := mustOf(g, d.PointerInfo, a+4096)
	if info.Type != MemoryDevice || info.LegacyIPC || info.Handles != prop.Handles || info.Base != a || info.Size != size {
		g.Errorf("info %+v of %#x, %d bytes, handles %d", info, a, size, prop.Handles)
	}
	again := mustOf(g, d.MemRetain, a+4096)
	g.must(d.MemRelease(again))

	fd := mustOf(g, d.MemExportFD, h)
	imported := mustOf(g, d.MemImportFD, fd)
	g.must(syscall.Close(fd))
	b := m(imported)
	g.must(errors.Join(d.MemRelease(h), d.MemRelease(imported)))
	out := make([]byte, 4)
	g.must(d.Set8(a, 0x5a, size, g.s))
	g.must(d.CopyToHost(unsafe.Pointer(&out[0]), b+DevicePtr(size)-4, 4, g.s))
	g.wait()
	if !bytes.Equal(out, []byte{0x5a, 0x5a, 0x5a, 0x5a}) {
		g.Errorf("the second mapping reads %x", out)
	}
	for _, p := range []DevicePtr{a, b} {
		g.must(errors.Join(d.MemUnmap(p, size), d.MemUnreserve(p, size)))
	}
	if info := mustOf(g, d.PointerInfo, a); info.Type != MemoryUnknown {
		g.Errorf("after unmap: %+v", info)
	}
}

// saxpy launches f on n elements of y and x and returns y.
func (g gpu) saxpy(f Function) []float32 {
	g.Helper()
	d := g.d
	const n = 1000
	x, y := make([]float32, n), make([]float32, n)
	for i := range x {
		x[i], y[i] = float32(i), 1
	}
	dx, dy := mustOf(g, d.MemAlloc, uint64(4*n)), mustOf(g, d.MemAlloc, uint64(4*n))
	g.must(d.CopyToDevice(dx, unsafe.Pointer(&x[0]), 4*n, g.s))
	g.must(d.CopyToDevice(dy, unsafe.Pointer(&y[0]), 4*n, g.s))
	a, count := float32(2), uint32(n)
	params := []unsafe.Pointer{unsafe.Pointer(&dy), unsafe.Pointer(&dx), unsafe.Pointer(&a), unsafe.Pointer(&count)}
	g.must(d.LaunchKernel(f, Dim{(n + 127) / 128, 1, 1}, Dim{128, 1, 1}, 0, g.s, params))
	g.must(d.CopyToHost(unsafe.Pointer(&y[0]), dy, 4*n, g.s))
	g.wait()
	for i, v := range y {
		if want := 2*float32(i) + 1; v != want {
			g.Fatalf("element %d = %v, want %v", i, v, want)
		}
	}
	g.must(errors.Join(d.MemFree(dx), d.MemFree(dy)))
	return y
}

func (g gpu) kernels() {
	d := g.d
	m := mustOf(g, d.ModuleLoad, []byte(saxpyPTX))
	f, err := d.ModuleFunction(m, "saxpy")
	g.must(err)
	g.saxpy(f)
	if _, err := d.ModuleFunction(m, "none"); !errors.Is(err, ErrNotFound) {
		g.Errorf("a function that is not there: %v", err)
	}
	g.must(d.ModuleUnload(m))
	if _, err := d.ModuleLoad([]byte(strings.Replace(saxpyPTX, "fma.rn.f32", "fma.wrong", 1))); err == nil || !strings.Contains(err.Error(), "ptxas") {
		g.Errorf("wrong PTX: %v, want the compiler's log", err)
	}
}

func (g gpu) compiler() {
	c, err := OpenCompiler(CUDA)
	if err != nil {
		g.Skipf("no run-time compiler: %v", err)
	}
	g.Log(c.lib)
	code, err := c.Compile(saxpySource, "saxpy.cu")
	g.must(err)
	m := mustOf(g, g.d.ModuleLoad, code)
	f, err := g.d.ModuleFunction(m, "saxpy")
	g.must(err)
	g.saxpy(f)
	g.must(g.d.ModuleUnload(m))
	var ce *CompileError
	if _, err := c.Compile("int f( {", "bad.cu"); !errors.As(err, &ce) || !strings.Contains(ce.Log, "bad.cu(1)") {
		g.Errorf("wrong source: %v", err)
	}
}

func (g gpu) graph() {
	d := g.d
	a := mustOf(g, d.MemAlloc, uint64(64))
	old := mustOf(g, d.ExchangeCaptureMode, CaptureThreadLocal)
	defer func() { mustOf(g, d.ExchangeCaptureMode, old) }()
	g.must(d.StreamBeginCapture(g.s, CaptureThreadLocal))
	g.must(d.Set8(a, 7, 64, g.s))
	g.must(d.LaunchHostFunc(g.s, gpuCallback, 1))
	if st := mustOf(g, d.StreamCaptureStatus, g.s); st != CaptureActive {
		g.Errorf("status %d while capturing", st)
	}
	o, err := d.UserObjectCreate(gpuCallback, 2)
	g.must(err)
	graph := mustOf(g, d.StreamEndCapture, g.s)
	g.must(d.GraphGiveUserObject(graph, o))
	if nodes := mustOf(g, d.GraphNodes, graph); nodes != 2 {
		g.Errorf("%d nodes, want 2", nodes)
	}
	x := mustOf(g, d.GraphInstantiate, graph)
	g.must(d.GraphDestroy(graph))
	for range 3 {
		g.must(d.GraphLaunch(x, g.s))
		g.wait()
		g.callback(1)
	}
	out := make([]byte, 2)
	g.must(d.CopyToHost(unsafe.Pointer(&out[0]), a, 2, g.s))
	g.wait()
	if out[0] != 7 || out[1] != 7 {
		g.Errorf("the graph wrote %v", out)
	}
	select {
	case n := <-gpuDone:
		g.Errorf("callback %d while an exec lives", n)
	default:
	}
	g.must(d.GraphExecDestroy(x))
	g.callback(2)
	g.must(d.MemFree(a))

	// A reference that is only ours.
	o, err = d.UserObjectCreate(gpuCallback, 3)
	g.must(err)
	g.must(d.UserObjectRelease(o, 1))
	g.callback(3)
}

func (g gpu) broken() {
	d := g.d
	g.must(d.StreamBeginCapture(g.s, CaptureThreadLocal))
	if _, err := d.StreamQuery(g.s); !errors.Is(err, ErrCaptureUnsupported) {
		g.Errorf("query in a capture: %v, want ErrCaptureUnsupported", err)
	}
	if st := mustOf(g, d.StreamCaptureStatus, g.s); st != CaptureInvalidated {
		g.Errorf("status %d, want invalidated", st)
	}
	graph, err := d.StreamEndCapture(g.s)
	if !errors.Is(err, ErrCaptureInvalidated) || graph != 0 {
		g.Errorf("end: graph %#x, %v, want ErrCaptureInvalidated", graph, err)
	}
	if done, err := d.StreamQuery(g.s); err != nil || !done {
		g.Errorf("the stream afterwards: %t, %v", done, err)
	}
}
