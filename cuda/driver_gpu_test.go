package cuda

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// The tests of this file run on a real GPU where there is one, and on the driver library of testdata, which TestFakeDriver builds, in a
// process of its own: see openGPU.

// fakeVariable says that the libraries that the environment names are those of testdata.
const fakeVariable = "GORUN_CUDA_TEST_FAKE"

func onFake() bool { return os.Getenv(fakeVariable) == "1" }

// openGPU opens the GPU; closing it at the end of the test must work.
func openGPU(t testing.TB) *Device {
	t.Helper()
	token := ""
	if onFake() {
		token = "0"
	} else if os.Getenv("GORUN_DEVICE") == "host" {
		t.Skip("GORUN_DEVICE=host")
	} else if hw := findHardware("/"); hw == nil {
		if os.Getenv("GORUN_REQUIRE_GPU") == "1" {
			t.Fatal("no GPU, and GORUN_REQUIRE_GPU=1 demands one")
		}
		t.Skip("no GPU on this machine")
	}
	d, err := Open(token)
	check(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err) // not Fatal, which would hide a panic
			return
		}
		if onFake() {
			live := drivers.open[d.Platform()].Library().Lookup("fake_live")
			eventually(t, "everything given back to the driver", func() bool { return live.Call() == 0 })
		}
	})
	return d
}

// TestFakeDriver runs this file's tests, and those of what is the same on both platforms, on driver libraries that work without a GPU.
func TestFakeDriver(t *testing.T) {
	if onFake() {
		t.Skip("runs on it already")
	}
	self, err := os.Executable()
	check(t, err)
	const all = "^Test(GPU|Holds$|AllocErrors|DeviceClose|Copies|Fill)"
	for _, c := range []struct {
		name   string
		vendor *cusys.Vendor
		env    string
		run    string
		least  int
	}{
		{"CUDA", cusys.CUDA, "FAKE_DEVICES=2", all, 31},
		{"CUDA, fabric handles are refused", cusys.CUDA, "FAKE_FABRIC=1", "^TestGPU(Memory|Qualifies)", 2},
		{"MUSA", cusys.MUSA, "FAKE_DEVICES=2", all, 29},
		{"HIP", cusys.HIP, "FAKE_DEVICES=1", all, 29},
	} {
		t.Run(c.name, func(t *testing.T) {
			if testing.Short() && c.vendor != cusys.CUDA {
				t.Skip("-short: the same code with a library of other names")
			}
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute) // against hanging only
			defer cancel()
			cmd := exec.CommandContext(ctx, self, "-test.run="+c.run, "-test.v", "-test.timeout=5m", fmt.Sprintf("-test.short=%t", testing.Short()))
			cmd.Env = append(os.Environ(), fakeVariable+"=1", "GORUN_DEVICE=", c.env,
				c.vendor.Driver.Env+"="+buildFake(t, c.vendor, "testdata/driver.c", c.vendor.Driver.Sonames[0]),
				c.vendor.Compiler.Env+"="+buildFake(t, c.vendor, "testdata/rtc.c", c.vendor.Compiler.Sonames[0]))
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if n := strings.Count(string(out), "\n--- PASS: Test"); n < c.least {
				t.Errorf("only %d tests ran:\n%s", n, out)
			}
		})
	}
}

// buildFake compiles a library of testdata, which is written with CUDA's names, with a vendor's.
func buildFake(t testing.TB, v *cusys.Vendor, source, soname string) string {
	t.Helper()
	return dltest.Build(t, source, soname, append(dltest.Maker(t, v.Name, source), "-pthread")...)
}

// fetch reads device memory.
func fetch[T Element](t testing.TB, s *Stream, from Slice[T]) []T {
	t.Helper()
	out := make([]T, from.Len())
	check(t, CopyToHost(out, from, s))
	check(t, s.Synchronize(testContext(t)))
	return out
}

// block enqueues a host function that runs until the test lets it.
func block(t testing.TB, s *Stream) (let func()) {
	t.Helper()
	ch := make(chan struct{})
	let = sync.OnceFunc(func() { close(ch) })
	t.Cleanup(let)
	check(t, s.HostFunc(func() { <-ch }))
	return let
}

func shareable[T Element](t testing.TB, d *Device, n int) *Buffer[T] {
	t.Helper()
	b, err := AllocBuffer[T](d, n, Shareable)
	check(t, err)
	t.Cleanup(func() {
		if !b.Memory().Freed() {
			check(t, b.Free())
		}
	})
	return b
}

func TestGPUOpen(t *testing.T) {
	d := openGPU(t)
	i := d.Info()
	t.Logf("%s: %+v", d, i)
	if d.Platform() == Host || i.Platform != d.Platform() || i.Name == "" || i.Memory == 0 || i.Multiprocessors == 0 || i.Driver == "" || !strings.HasPrefix(i.Library, "/") {
		t.Errorf("%s: %+v", d, i)
	}
	if want := fmt.Sprintf("%s device %d (%s)", i.Platform, i.Index, i.Name); d.String() != want {
		t.Errorf("got %q, want %q", d, want)
	}
	free, total, err := d.MemoryInfo()
	if err != nil || total == 0 || free > total {
		t.Errorf("memory: %d of %d free, %v", free, total, err)
	}
	if length := len("GPU-00000000-0000-0000-0000-000000000000"); i.Major == 0 || i.PCIBusID == "" || d.Platform() == CUDA && len(i.UUID) != length {
		t.Errorf("%+v", i)
	}
	for _, token := range []string{fmt.Sprint(i.Index), i.UUID, strings.ToUpper(i.UUID[:3]) + i.UUID[3:16]} {
		again, err := Open(token)
		check(t, err)
		if diff := cmp.Diff(again.Info(), i); diff != "" {
			t.Errorf("device %q (-got +want):\n%s", token, diff)
		}
		check(t, again.Close())
	}
	for token, want := range map[string]string{"4711": "no device 4711: the driver shows", "GPU-ffffffff-dead": "no device GPU-ffffffff-dead"} {
		_, err := Open(token)
		wantText(t, err, want)
	}
}

func TestGPUChoice(t *testing.T) {
	d := openGPU(t)
	if d.Platform() != CUDA {
		t.Skip("the variables are CUDA's")
	}
	n := must(drivers.open[CUDA].DeviceCount())
	for _, c := range []struct {
		local, foreign, visible string
		want                    int
		errText                 string
	}{
		{want: 0},
		{local: "0", want: 0},
		{local: fmt.Sprint(n - 1), foreign: "77", want: n - 1},
		{foreign: fmt.Sprint(n - 1), want: n - 1},
		{local: fmt.Sprint(n), want: -1, errText: fmt.Sprintf("local rank %d has none left: the driver shows %d", n, n)},
		{local: "many", want: -1, errText: "GORUN_LOCAL_RANK=many is no rank"},
	} {
		t.Setenv("GORUN_LOCAL_RANK", c.local)
		t.Setenv("LOCAL_RANK", c.foreign)
		got, err := chooseDevice(drivers.open[CUDA], CUDA, "")
		if c.errText != "" {
			if n > 1 || c.local == "many" {
				wantText(t, err, c.errText)
			}
			continue
		}
		check(t, err)
		if got != c.want {
			t.Errorf("local rank %q, %q: device %d, want %d", c.local, c.foreign, got, c.want)
		}
	}
}

func TestGPUBind(t *testing.T) {
	d := openGPU(t)
	b := d.Bind()
	check(t, b.Err())
	inner := d.Bind()
	g := d.plat.(*driverDevice)
	if c, err := g.drv.CtxCurrent(); err != nil || c != g.ctx {
		t.Errorf("current context %#x, %v, want %#x", c, err, g.ctx)
	}
	inner.Release()
	b.Release()
	e := must(Open("host")).Bind()
	check(t, e.Err())
	e.Release()
}

func TestGPUMemory(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	for _, kind := range []AllocKind{Private, Shareable} {
		for _, size := range []uint64{0, 1, 4097, 3<<20 + 5} {
			for round := range 2 { // the second gets memory that was used
				m, err := d.Alloc(size, kind)
				check(t, err)
				if m.Size() != size || m.Pointer() == 0 || m.Pointer()%256 != 0 || kind == Shareable && m.Pointer()%(2<<20) != 0 {
					t.Errorf("%d bytes of %s memory at %#x", m.Size(), kind, m.Pointer())
				}
				all := must(SliceOf[uint8](m, 0, int(size)))
				for i, v := range fetch(t, s, all) {
					if v != 0 {
						t.Fatalf("round %d: byte %d of %d is %d", round, i, size, v)
					}
				}
				check(t, s.Memset(all.Range(), 0xee))
				check(t, s.Synchronize(testContext(t)))
				check(t, m.Free())
				wantError(t, m.Free(), ErrClosed)
				if size > 0 {
					wantError(t, s.Memset(all.Range(), 0), ErrIllegalAddress, "was freed")
				}
			}
		}
		_, err := d.Alloc(1<<45, kind)
		wantError(t, err, ErrOutOfMemory, "allocate", kind.String(), "the device has")
		_, err = d.Alloc(d.Info().Memory, kind)
		wantError(t, err, ErrOutOfMemory, "allocate", kind.String(), map[Platform]string{
			CUDA: "CUDA_ERROR_OUT_OF_MEMORY 2", MUSA: "MUSA_ERROR_OUT_OF_MEMORY 2", HIP: "hipErrorOutOfMemory 2"}[d.Platform()])
	}
	m := must(d.Alloc(16, Shareable))
	_, err := m.Share()
	wantText(t, err, "communication library")
	check(t, m.Free())
	defer func() {
		if r := recover(); r == nil {
			t.Error("Host of GPU memory did not panic")
		}
	}()
	malloc[int8](t, d, 1).All().Host()
}

func TestGPUQualifies(t *testing.T) {
	d := openGPU(t)
	const n = 3 << 20
	good, plain := shareable[uint8](t, d, n), malloc[uint8](t, d, n)
	check(t, good.All().Range().Qualifies())
	check(t, good.Slice(12345, n-7).Range().Qualifies())
	check(t, d.Qualifies(good.Memory().Pointer()+99, 1000))
	wantText(t, plain.All().Range().Qualifies(), "private memory", "Shareable")
	wantText(t, d.Qualifies(plain.Memory().Pointer(), n), "plain allocator")
	wantText(t, d.Qualifies(good.Memory().Pointer(), 1<<30), "reach beyond their allocation")
	wantText(t, Range{Mem: good.Memory(), Off: n, Len: 1}.Qualifies(), "outside the allocation")
	wantText(t, Range{}.Qualifies(), "no memory")
	wantText(t, d.Qualifies(reflect.ValueOf(new(int64)).Pointer(), 8), "no memory of the driver")
	g := d.plat.(*driverDevice)
	check(t, g.bind())
	piece, err := g.pinned.get(100)
	g.unbind()
	check(t, err)
	wantText(t, d.Qualifies(uintptr(piece.p), 8), "host memory")
	g.pinned.put(piece, 0)

	gone := shareable[uint8](t, d, n)
	r := gone.All().Range()
	check(t, gone.Free())
	wantError(t, r.Qualifies(), ErrIllegalAddress)
	wantText(t, d.Qualifies(r.Pointer(), 1), "no memory of the driver")

	// Memory that cannot be shared.
	check(t, g.bind())
	defer g.unbind()
	other := vmm{g: g, grain: g.vmm.grain, prop: g.vmm.prop, access: g.vmm.access[:1]}
	other.prop.Handles = 0
	base, size, err := other.alloc(1)
	check(t, err)
	wantText(t, d.Qualifies(uintptr(base), 1), "NONE")
	check(t, other.free(base, size))
	check(t, other.close())
}

func TestGPUCopies(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	for _, n := range []int{0, 1, 3, 4096, 1<<20 + 3, 9<<20 + 1} {
		a, b := malloc[uint8](t, d, n), shareable[uint8](t, d, n)
		in, out := make([]uint8, n), make([]uint8, n)
		for i := range in {
			in[i] = uint8(i * 7)
		}
		want := slices.Clone(in)
		check(t, CopyToDevice(a.All(), in, s))
		clear(in) // the copy has them already
		check(t, Copy(b.All(), a.All(), s))
		check(t, CopyToHost(out, b.All(), s))
		check(t, s.Synchronize(testContext(t)))
		if !slices.Equal(out, want) {
			t.Errorf("%d bytes came back wrong", n)
		}
	}
	// Many at once, of all sizes, in one stream.
	x := malloc[int32](t, d, 1<<16)
	type job struct{ out, want []int32 }
	var jobs []job
	for i := range 200 {
		n := 1 + i*i
		in, out := make([]int32, n), make([]int32, n)
		for j := range in {
			in[j] = int32(i + j)
		}
		check(t, CopyToDevice(x.Slice(0, n), in, s))
		check(t, CopyToHost(out, x.Slice(0, n), s))
		jobs = append(jobs, job{out, in})
	}
	check(t, s.Synchronize(testContext(t)))
	for i, j := range jobs {
		if !slices.Equal(j.out, j.want) {
			t.Fatalf("copy %d came back wrong", i)
		}
	}
}

// TestGPUPinnedMemory wants copies to be enqueued also when all pinned memory is in use, and used again when it is not.
func TestGPUPinnedMemory(t *testing.T) {
	d := openGPU(t)
	s, other := newStream(t, d), newStream(t, d)
	pool := &d.plat.(*driverDevice).pinned
	pool.limit = 8 << 20
	const n = 16 << 20
	x, y := malloc[uint8](t, d, n), malloc[uint8](t, d, n)
	in, out := make([]uint8, n), make([]uint8, n)
	for i := range in {
		in[i] = uint8(i >> 8)
	}
	let := block(t, s)
	check(t, CopyToDevice(x.All(), in, s))
	check(t, CopyToHost(out, x.All(), s))
	if pool.total < 2*n {
		t.Errorf("%d bytes pinned for %d in use", pool.total, 2*n)
	}
	let()
	check(t, s.Synchronize(testContext(t)))
	if !slices.Equal(in, out) {
		t.Error("the bytes came back wrong")
	}
	// Pieces come back while the stream goes on, without a wait for it.
	total := pool.total
	for range 8 {
		done := make(chan struct{}) // closed by the stream, which may be slow to begin
		check(t, errors.Join(CopyToDevice(y.All(), in, other), other.HostFunc(func() { close(done) })))
		select {
		case <-done:
		case <-time.After(hang):
			t.Fatal("the copy does not end")
		}
	}
	if pool.total > total+2*n {
		t.Errorf("%d bytes pinned, before %d", pool.total, total)
	}
	if got := fetch(t, other, y.All()); !slices.Equal(got, in) {
		t.Error("the bytes of a busy stream came back wrong")
	}
}

// TestGPULanding wants the bytes of a copy to Go memory to be there whoever finds out that it is done.
func TestGPULanding(t *testing.T) {
	d := openGPU(t)
	ctx := testContext(t)
	s, s2, s3 := newStream(t, d), newStream(t, d), newStream(t, d)
	e, e2 := newEvent(t, d), newEvent(t, d)
	x := malloc[int32](t, d, 1000)
	value := int32(0)
	begin := func() []int32 {
		value++
		out := make([]int32, x.Len())
		check(t, Fill(x.All(), value, s))
		check(t, CopyToHost(out, x.All(), s))
		return out
	}
	landed := func(how string, out []int32) {
		t.Helper()
		if out[0] != value || out[999] != value {
			t.Errorf("%s: %d … %d, want %d", how, out[0], out[999], value)
		}
	}
	poll := func(query func() (bool, error)) {
		t.Helper()
		eventually(t, "done", func() bool { return must(query()) })
	}

	out := begin()
	poll(s.Query)
	landed("query", out)

	out = begin()
	check(t, s.Record(e))
	let := block(t, s)
	later := begin()
	check(t, e.Synchronize(ctx))
	if out[0] != value-1 || later[0] != 0 {
		t.Errorf("event: %d and %d, want %d and nothing of the copy behind it", out[0], later[0], value-1)
	}
	let()
	check(t, s.Synchronize(ctx))
	landed("the later one", later)

	out = begin()
	check(t, s.Record(e))
	poll(e.Query)
	landed("event query", out)

	out = begin()
	check(t, s.Record(e))
	check(t, s2.Wait(e))
	check(t, s2.Record(e2))
	check(t, s3.Wait(e2))
	check(t, s3.Synchronize(ctx))
	landed("a stream that waited for a stream that waited", out)

	out = begin()
	var seen atomic.Int32
	check(t, s.HostFunc(func() { seen.Store(out[999]) }))
	eventually(t, "the host function", func() bool { return seen.Load() != 0 })
	if seen.Load() != value {
		t.Errorf("the host function saw %d, want %d", seen.Load(), value)
	}
	check(t, s.Synchronize(ctx))
}

func TestGPUFill(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	x := malloc[uint8](t, d, 4096)
	testFill := func(width int, fill func(off, n int) error, value []byte) {
		t.Helper()
		for _, off := range []int{0, 1, 2, 3, 8} {
			for _, n := range []int{0, 1, 2, 3, 5, 63, 256} {
				want := make([]byte, 4096)
				for i := range want {
					want[i] = 0x11
				}
				for i := range n {
					copy(want[(off+i)*width:], value)
				}
				check(t, s.Memset(x.All().Range(), 0x11))
				check(t, fill(off, n))
				if got := fetch(t, s, x.All()); !slices.Equal(got, want) {
					t.Errorf("%d elements of %d bytes from element %d are wrong", n, width, off)
				}
			}
		}
	}
	testFill(1, func(off, n int) error { return Fill(must(SliceOf[int8](x.Memory(), uint64(off), n)), -3, s) }, []byte{0xfd})
	testFill(2, func(off, n int) error {
		return Fill(must(SliceOf[BFloat16](x.Memory(), uint64(2*off), n)), BFloat16{0x1234}, s)
	}, []byte{0x34, 0x12})
	testFill(2, func(off, n int) error {
		return Fill(must(SliceOf[Float16](x.Memory(), uint64(2*off), n)), Float16{0x5555}, s)
	}, []byte{0x55, 0x55})
	testFill(4, func(off, n int) error {
		return Fill(must(SliceOf[uint32](x.Memory(), uint64(4*off), n)), 0x04030201, s)
	}, []byte{1, 2, 3, 4})
	testFill(8, func(off, n int) error {
		return Fill(must(SliceOf[uint64](x.Memory(), uint64(8*off), n)), 0x0807060504030201, s)
	}, []byte{1, 2, 3, 4, 5, 6, 7, 8})
	testFill(8, func(off, n int) error {
		return Fill(must(SliceOf[int64](x.Memory(), uint64(8*off), n)), -1, s)
	}, slices.Repeat([]byte{0xff}, 8))
}

func TestGPUStreams(t *testing.T) {
	d := openGPU(t)
	s, s2 := newStream(t, d), newStream(t, d)
	if s.Handle() == 0 || s.Handle() == s2.Handle() {
		t.Errorf("handles %#x and %#x", s.Handle(), s2.Handle())
	}
	check(t, s.Synchronize(testContext(t)))
	wantText(t, s.Submit(do(func() error { return nil })), "tasks run on the host platform")

	let := block(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	wantError(t, s.Synchronize(ctx), context.DeadlineExceeded, "stream synchronize", s.String())
	canceled, stop := context.WithCancelCause(t.Context())
	stop(errors.New("changed my mind"))
	wantText(t, s.Synchronize(canceled), "changed my mind")
	if done, err := s.Query(); done || err != nil {
		t.Errorf("query of a blocked stream: %t, %v", done, err)
	}
	wantText(t, s.Close(), "its work is not done: synchronize first")
	check(t, s2.Synchronize(testContext(t))) // on its own

	e := newEvent(t, d)
	if done, err := e.Query(); !done || err != nil {
		t.Errorf("query of an event never recorded: %t, %v", done, err)
	}
	check(t, s2.Wait(e))
	check(t, e.Synchronize(testContext(t)))
	check(t, s.Record(e))
	check(t, s2.Wait(e))
	if done, err := e.Query(); done || err != nil {
		t.Errorf("query of an event behind a block: %t, %v", done, err)
	}
	if done, err := s2.Query(); done || err != nil {
		t.Errorf("query of a stream that waits: %t, %v", done, err)
	}
	let()
	check(t, s2.Synchronize(testContext(t)))
	check(t, e.Synchronize(testContext(t)))
	check(t, s.Synchronize(testContext(t)))

	other := must(d.NewStream())
	check(t, other.Close())
	wantError(t, other.Close(), ErrClosed)
	wantError(t, other.HostFunc(func() {}), ErrClosed)
	wantError(t, other.Synchronize(testContext(t)), ErrClosed)
	_, err := other.Query()
	wantError(t, err, ErrClosed)
	gone := must(d.NewEvent())
	check(t, gone.Close())
	wantError(t, gone.Close(), ErrClosed)
	wantError(t, s.Record(gone), ErrClosed)
	wantError(t, s.Wait(gone), ErrClosed)
	_, err = gone.Query()
	wantError(t, err, ErrClosed)
}

func TestGPUWatch(t *testing.T) {
	d := openGPU(t)
	comm, compute, idle := must(d.NewStream()), must(d.NewStream()), newStream(t, d)
	e := newEvent(t, d)
	broken := errors.New("rank 1 has died")
	var failed, empty atomic.Bool
	var asked atomic.Int32
	remove := comm.Watch(func(seen uint64, done bool) (uint64, error) {
		asked.Add(1)
		if done {
			empty.Store(true)
		}
		if failed.Load() {
			return 0, broken
		}
		return 0, nil
	}, nil)
	ctx := testContext(t)
	check(t, comm.Synchronize(ctx))
	if asked.Load() == 0 || !empty.Load() {
		t.Error("a wait for an empty stream did not ask, or did not say so")
	}
	let := block(t, comm)
	check(t, comm.Record(e))
	check(t, compute.Wait(e))
	result := make(chan error, 3)
	go func() { result <- comm.Synchronize(ctx) }()
	go func() { result <- compute.Synchronize(ctx) }()
	go func() { result <- e.Synchronize(ctx) }()
	n := asked.Load()
	eventually(t, "the waits ask", func() bool { return asked.Load() > n+6 })
	failed.Store(true)
	for range 3 {
		wantError(t, <-result, broken)
	}
	wantError(t, comm.HostFunc(func() {}), broken)
	wantError(t, compute.HostFunc(func() {}), broken)
	let()
	// The stream gets ready, and is still broken: after an abort that says nothing.
	eventually(t, "the work is done", func() bool {
		g := d.plat.(*driverDevice)
		check(t, g.bind())
		defer g.unbind()
		return must(comm.raw.(*driverStream).ready())
	})
	_, err := comm.Query()
	wantError(t, err, broken, comm.String())
	wantError(t, comm.Synchronize(ctx), broken)
	check(t, idle.Synchronize(ctx))
	check(t, comm.Close())
	check(t, compute.Close())
	remove()

	again := newStream(t, d)
	remove = again.Watch(func(uint64, bool) (uint64, error) { return 0, broken }, nil)
	remove()
	check(t, again.Synchronize(ctx))
}

func TestGPUHostFunc(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	var order []int
	for i := range 1000 {
		check(t, s.HostFunc(func() { order = append(order, i) }))
	}
	check(t, s.HostFunc(runtime.Goexit)) // ends nothing but the function
	check(t, s.Synchronize(testContext(t)))
	if len(order) != 1000 || !slices.IsSorted(order) {
		t.Errorf("%d host functions ran, in order %t", len(order), slices.IsSorted(order))
	}
	if len(hostCalls.m) != 0 {
		t.Errorf("%d host functions are still known", len(hostCalls.m))
	}

	lost := must(Open(fmt.Sprint(d.Info().Index)))
	ls := must(lost.NewStream())
	check(t, ls.HostFunc(func() { panic("no way") }))
	eventually(t, "the panic", func() bool { return lost.Err() != nil })
	wantText(t, ls.Synchronize(testContext(t)), "host function", "no way")
	if text := fmt.Sprintf("%+v", lost.Err()); !strings.Contains(text, "driver_gpu_test.go") {
		t.Errorf("no stack in %s", text)
	}
	check(t, ls.Close())
	check(t, lost.Close())
}

// captured runs fn in a thread-local capture of s.
func captured(t testing.TB, s *Stream, fn func()) (*Graph, error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check(t, s.BeginCapture(CaptureThreadLocal))
	ended := false
	defer func() {
		if !ended { // the test ends in fn: the thread goes on without the capture
			s.EndCapture()
		}
	}()
	fn()
	ended = true
	return s.EndCapture()
}

func TestGPUCapture(t *testing.T) {
	d := openGPU(t)
	ctx := testContext(t)
	s, side := newStream(t, d), newStream(t, d)
	fork, join := newEvent(t, d), newEvent(t, d)
	a, b := malloc[int32](t, d, 1000), shareable[int32](t, d, 1000)
	in, out := make([]int32, 1000), make([]int32, 1000)
	var calls atomic.Int32
	g, err := captured(t, s, func() {
		c := s.Capture()
		if c == nil || c.State() != CaptureActive || c.ID() == 0 || side.Capture() != nil {
			t.Errorf("capture %v", c)
		}
		check(t, CopyToDevice(a.All(), in, s))
		check(t, s.Record(fork))
		check(t, side.Wait(fork))
		if side.Capture() != c {
			t.Error("the other stream has not joined")
		}
		check(t, Fill(b.Slice(0, 500), 5, side))
		check(t, Copy(b.Slice(500, 1000), a.Slice(0, 500), s))
		check(t, side.Record(join))
		check(t, s.Wait(join))
		check(t, s.HostFunc(func() { calls.Add(1) }))
		check(t, CopyToHost(out, b.All(), s))
		c.After(s, "key")
		c.Mark(s, "key")
	})
	check(t, err)
	if s.Capture() != nil || side.Capture() != nil {
		t.Error("streams still capture")
	}
	if n := g.NumNodes(); n < 5 {
		t.Errorf("%d nodes", n)
	}
	var released atomic.Bool
	check(t, g.OnRelease(func() { released.Store(true) }))
	x := must(g.Instantiate())
	check(t, g.Destroy())
	for round := range int32(5) {
		for i := range in {
			in[i] = 100*round + int32(i)
		}
		check(t, x.Launch(s))
		check(t, s.Synchronize(ctx))
		for i, v := range out {
			want := int32(5)
			if i >= 500 {
				want = in[i-500]
			}
			if v != want {
				t.Fatalf("launch %d: element %d is %d, want %d", round, i, v, want)
			}
		}
		if calls.Load() != round+1 {
			t.Errorf("the host function ran %d times in %d launches", calls.Load(), round+1)
		}
	}
	if released.Load() {
		t.Error("released while the executable lives")
	}
	check(t, x.Destroy())
	wantError(t, x.Destroy(), ErrClosed)
	wantError(t, g.Destroy(), ErrClosed)
	wantError(t, x.Launch(s), ErrClosed)
	eventually(t, "the release", released.Load)
	if len(hostCalls.m) != 0 || len(releases.m) != 0 {
		t.Errorf("%d host functions and %d callbacks are still known", len(hostCalls.m), len(releases.m))
	}
}

func TestGPUCaptureForbidden(t *testing.T) {
	d := openGPU(t)
	ctx := testContext(t)
	s, other := newStream(t, d), newStream(t, d)
	outside, inside := newEvent(t, d), newEvent(t, d)
	check(t, other.Record(outside))
	mem, exported := malloc[int8](t, d, 100), shareable[int8](t, d, 100)
	g, err := captured(t, s, func() { check(t, s.Memset(mem.All().Range(), 1)) })
	check(t, err)
	exec := must(g.Instantiate())
	cause := errors.New("ranks differ")
	for _, c := range []struct {
		name    string
		call    func() error // forbidden
		ends    error
		endText string
	}{
		{"synchronize", func() error { return s.Synchronize(ctx) }, ErrCaptureInvalidated, "stream synchronize"},
		{"query", func() error { _, err := s.Query(); return err }, ErrCaptureInvalidated, "stream query"},
		{"close", s.Close, ErrCaptureInvalidated, "close stream"},
		{"allocate", func() error { _, err := d.Alloc(16, Shareable); return err }, ErrCaptureInvalidated, "allocate"},
		{"allocate privately", func() error { _, err := d.Alloc(16, Private); return err }, ErrCaptureInvalidated, "allocate"},
		{"free", mem.Free, ErrCaptureInvalidated, "free"},
		{"event query", func() error { _, err := outside.Query(); return err }, ErrCaptureInvalidated, "event query"},
		{"event synchronize", func() error { check(t, s.Record(inside)); return inside.Synchronize(ctx) }, ErrCaptureInvalidated, "recorded in a capture"},
		{"wait for the outside", func() error { return s.Wait(outside) }, ErrCaptureInvalidated, "recorded outside the capture"},
		{"launch", func() error { return exec.Launch(s) }, ErrCaptureInvalidated, "a launch cannot be captured"},
		{"kernel", func() error {
			_, err := NewKernel(d, KernelSpec[struct{}]{Name: "late", CUDA: "…"})
			return err
		}, ErrCaptureInvalidated, "load kernel late"},
		{"end on a joined stream", func() error {
			check(t, s.Record(inside))
			check(t, other.Wait(inside))
			_, err := other.EndCapture()
			return err
		}, ErrCaptureInvalidated, "only joined"},
		{"unjoined", func() error {
			check(t, s.Record(inside))
			check(t, other.Wait(inside))
			check(t, other.Memset(mem.All().Range(), 2))
			return ErrCaptureUnsafe
		}, ErrCaptureUnjoined, other.String()},
		{"invalidated", func() error { s.Capture().Invalidate(cause); return ErrCaptureUnsafe }, cause, "ranks differ"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g, err := captured(t, s, func() {
				check(t, s.Memset(mem.All().Range(), 1))
				wantError(t, c.call(), ErrCaptureUnsafe)
				if st := s.Capture().State(); st != CaptureInvalidated && c.ends != ErrCaptureUnjoined {
					t.Errorf("state %s", st)
				}
				if c.ends == ErrCaptureInvalidated {
					wantError(t, s.Memset(mem.All().Range(), 1), ErrCaptureInvalidated)
				}
			})
			wantError(t, err, c.ends, "end capture", c.endText)
			if g != nil {
				t.Error("a graph")
			}
			// The streams are usable afterwards.
			check(t, s.Memset(mem.All().Range(), 3))
			check(t, s.Synchronize(ctx))
			check(t, other.Synchronize(ctx))
		})
	}
	_, err = s.EndCapture()
	wantText(t, err, "not capturing")

	// The capturing thread may use other streams, and other threads may do what it may not.
	g2, err := captured(t, s, func() {
		in, out := make([]int8, 100), make([]int8, 100)
		in[99] = 7
		check(t, CopyToDevice(mem.All(), in, other))
		check(t, CopyToHost(out, mem.All(), other))
		check(t, exec.Launch(other))
		check(t, other.Synchronize(ctx))
		if out[99] != 7 {
			t.Errorf("a copy beside a capture brought %d", out[99])
		}
		s3, e3, x3 := must(d.NewStream()), must(d.NewEvent()), must(g.Instantiate())
		check(t, g.OnRelease(func() {}))
		check(t, errors.Join(s3.Record(e3), other.Wait(e3), s3.HostFunc(func() {}), x3.Launch(s3), s3.Synchronize(ctx), x3.Destroy(), e3.Close(), s3.Close()))
		_, _, err := d.MemoryInfo()
		check(t, err)
		check(t, d.Qualifies(exported.Memory().Pointer(), 100))
		if st := s.Capture().State(); st != CaptureActive {
			t.Errorf("what is allowed has left the capture %s", st)
		}
		done := make(chan error)
		go func() {
			m, err := d.Alloc(100, Shareable)
			if err == nil {
				err = errors.Join(other.Memset(Range{Mem: m, Len: 100}, 1), other.Synchronize(ctx), m.Free())
			}
			done <- err
		}()
		check(t, <-done)
		wantText(t, s.BeginCapture(CaptureRelaxed), "capturing already")
		check(t, s.Memset(mem.All().Range(), 4))
	})
	check(t, err)
	check(t, g2.Destroy())
	check(t, exec.Destroy())
	check(t, g.Destroy())
}

func TestGPUCaptureSetting(t *testing.T) {
	t.Setenv("CUDA_LAUNCH_BLOCKING", "1")
	d := openGPU(t)
	if d.Platform() != CUDA {
		t.Skip("the setting is CUDA's")
	}
	s := newStream(t, d)
	lockThread(t)
	wantText(t, s.BeginCapture(CaptureThreadLocal), "begin capture", "CUDA_LAUNCH_BLOCKING=1", "unset")
	check(t, s.Synchronize(testContext(t)))
}

func TestGPUCaptureThread(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	lockThread(t)
	check(t, s.BeginCapture(CaptureThreadLocal))
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		_, err := s.EndCapture()
		done <- err
	}()
	wantError(t, <-done, ErrCaptureUnsafe, "must end there")
	_, err := s.EndCapture()
	wantError(t, err, ErrCaptureInvalidated, "must end there")

	check(t, s.BeginCapture(CaptureRelaxed))
	m, err := d.Alloc(100, Shareable) // nobody forbids it
	check(t, err)
	var g *Graph
	go func() {
		var err error
		g, err = s.EndCapture()
		done <- err
	}()
	check(t, <-done)
	if g.NumNodes() != 0 {
		t.Errorf("%d nodes in an empty graph", g.NumNodes())
	}
	x := must(g.Instantiate())
	check(t, x.Launch(s))
	check(t, s.Synchronize(testContext(t)))
	check(t, x.Destroy())
	check(t, g.Destroy())
	check(t, m.Free())
}

// TestGPURelease destroys in every order and wants each callback once, in order, when the last is gone.
func TestGPURelease(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	for _, order := range []string{"gx", "xg", "gLx", "Lgx", "xLg", "g"} {
		g, err := captured(t, s, func() { check(t, s.HostFunc(func() {})) })
		check(t, err)
		var mu sync.Mutex
		var got []int
		for i := range 3 {
			check(t, g.OnRelease(func() {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, i)
			}))
		}
		var x *GraphExec
		if order != "g" {
			x = must(g.Instantiate())
		}
		let := func() {}
		for _, c := range order {
			mu.Lock()
			if len(got) > 0 {
				t.Errorf("%s: released before %c", order, c)
			}
			mu.Unlock()
			switch c {
			case 'g':
				check(t, g.Destroy())
			case 'x':
				check(t, x.Destroy())
			case 'L': // a launch that does not end
				if order == "xLg" {
					wantError(t, x.Launch(s), ErrClosed)
					continue
				}
				let = block(t, s)
				check(t, x.Launch(s))
			}
		}
		let()
		check(t, s.Synchronize(testContext(t)))
		eventually(t, order+": release", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(got) == 3
		})
		if !slices.Equal(got, []int{0, 1, 2}) {
			t.Errorf("%s: released in order %v", order, got)
		}
		wantError(t, g.OnRelease(func() {}), ErrClosed)
	}

	// A callback that frees the last memory, and a device that is closed at once.
	d2 := must(Open(fmt.Sprint(d.Info().Index)))
	s2 := must(d2.NewStream())
	m := must(d2.Alloc(100, Shareable))
	g, err := captured(t, s2, func() { check(t, s2.Memset(Range{Mem: m, Len: 100}, 1)) })
	check(t, err)
	h := must(m.Hold("the graph", false))
	check(t, g.OnRelease(h.Release))
	x := must(g.Instantiate())
	check(t, x.Launch(s2))
	check(t, s2.Synchronize(testContext(t)))
	check(t, m.Free())
	check(t, s2.Close())
	wantText(t, d2.Close(), m.String(), g.String())
	check(t, errors.Join(g.Destroy(), x.Destroy()))
	check(t, d2.Close())
}

const scaleSource = `extern "C" __global__ void scale(scale_args a, long long n) {
	long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (i < n)
		a.X[i] *= a.A;
}
`

type scaleArgs struct {
	Pad int16
	X   Slice[float32]
	A   float32
}

var scaleSpec = KernelSpec[scaleArgs]{
	Name: "scale", CUDA: scaleSource,
	Host: func(_ Grid, lo, hi int, a scaleArgs) {
		for i, x := range a.X.Host()[lo:hi] {
			a.X.Host()[lo+i] = x * a.A
		}
	},
}

// scaleKernel loads the kernel, or skips where the machine has no compiler.
func scaleKernel(t testing.TB, d *Device) *Kernel[scaleArgs] {
	t.Helper()
	k, err := NewKernel(d, scaleSpec)
	if err != nil && strings.Contains(err.Error(), "no usable library") && !onFake() {
		t.Skip(err)
	}
	check(t, err)
	return k
}

func TestGPUKernel(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	k := scaleKernel(t, d)
	x := malloc[float32](t, d, 1001)
	want := make([]float32, 1001)
	for i := range want {
		want[i] = float32(i)
	}
	check(t, CopyToDevice(x.All(), want, s))
	check(t, k.Launch(s, Grid{N: 1000}, scaleArgs{X: x.All(), A: 3}))
	check(t, k.Launch(s, Grid{N: 10, Block: 1}, scaleArgs{X: x.Slice(5, 1001), A: 2}))
	check(t, k.Launch(s, Grid{}, scaleArgs{}))
	for i := range 1000 {
		want[i] *= 3
		if i >= 5 && i < 15 {
			want[i] *= 2
		}
	}
	if diff := cmp.Diff(fetch(t, s, x.All()), want); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
	overlap := Copy(x.Slice(0, 10), x.Slice(5, 15), s)
	wantText(t, overlap, "copy", "overlap")
	again := must(NewKernel(d, scaleSpec)) // loaded once
	if again.raw.(*driverKernel).fn != k.raw.(*driverKernel).fn {
		t.Error("the same kernel was loaded twice")
	}

	fresh := scaleSpec // its first launch is in a capture
	fresh.CUDA += "// another module\n"
	k = must(NewKernel(d, fresh))
	g, err := captured(t, s, func() { check(t, k.Launch(s, Grid{N: 1}, scaleArgs{X: x.All(), A: 2})) })
	check(t, err)
	check(t, Fill(x.All(), 1, s))
	e := must(g.Instantiate())
	for range 3 {
		check(t, e.Launch(s))
	}
	if got := fetch(t, s, x.All()); got[0] != 8 || got[1] != 1 {
		t.Errorf("got %v, want 8 1", got[:2])
	}
	check(t, errors.Join(e.Destroy(), g.Destroy()))
}

// scalePTX is scaleSource by hand.
const scalePTX = `.version 7.0
.target sm_75
.address_size 64
// void scale(scale_args a, long long n)
.visible .entry scale(.param .align 8 .b8 a[32], .param .u64 n)
{
	.reg .pred %p<2>;
	.reg .f32 %f<4>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<8>;
	ld.param.u64 %rd1, [a+8];
	ld.param.f32 %f1, [a+24];
	ld.param.u64 %rd2, [n];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %ntid.x;
	mov.u32 %r3, %tid.x;
	mul.wide.u32 %rd3, %r1, %r2;
	cvt.u64.u32 %rd4, %r3;
	add.s64 %rd5, %rd3, %rd4;
	setp.ge.s64 %p1, %rd5, %rd2;
	@%p1 bra DONE;
	shl.b64 %rd6, %rd5, 2;
	add.s64 %rd7, %rd1, %rd6;
	cvta.to.global.u64 %rd7, %rd7;
	ld.global.f32 %f2, [%rd7];
	mul.f32 %f3, %f2, %f1;
	st.global.f32 [%rd7], %f3;
DONE:
	ret;
}
`

func TestGPUKernelPTX(t *testing.T) {
	d := openGPU(t)
	if d.Platform() != CUDA {
		t.Skip("PTX is NVIDIA's")
	}
	s := newStream(t, d)
	k := must(NewKernel(d, KernelSpec[scaleArgs]{Name: "scale", PTX: scalePTX}))
	x := malloc[float32](t, d, 1001)
	check(t, Fill(x.All(), 2, s))
	check(t, k.Launch(s, Grid{N: 1000, Block: 64}, scaleArgs{X: x.All(), A: 1.5}))
	got := fetch(t, s, x.All())
	if got[0] != 3 || got[999] != 3 || got[1000] != 2 {
		t.Errorf("got %v %v %v, want 3 3 2", got[0], got[999], got[1000])
	}
}

func TestGPUKernelErrors(t *testing.T) {
	d := openGPU(t)
	k := scaleKernel(t, d)
	s := newStream(t, d)
	fails := func(err error, text ...string) {
		t.Helper()
		wantText(t, err, text...)
	}
	_, err := NewKernel(d, KernelSpec[scaleArgs]{Name: "scale", Host: scaleSpec.Host})
	fails(err, "load kernel scale", "no CUDA source")
	_, err = NewKernel(d, KernelSpec[int]{Name: "scale", CUDA: scaleSource})
	fails(err, "type int", "one struct")
	_, err = NewKernel(d, KernelSpec[struct{ P *int }]{Name: "scale", CUDA: scaleSource})
	fails(err, "argument P is of type *int")
	_, err = NewKernel(d, KernelSpec[struct{ A [5000]byte }]{Name: "scale", CUDA: scaleSource})
	fails(err, "5000 bytes")
	_, err = NewKernel(d, KernelSpec[scaleArgs]{Name: "scale me", CUDA: scaleSource})
	fails(err, "no identifier")
	_, err = NewKernel(d, KernelSpec[scaleArgs]{Name: "scale", CUDA: "#error wrong\n" + scaleSource})
	fails(err, "compile scale.cu", "scale.cu(1)")
	_, err = NewKernel(d, KernelSpec[scaleArgs]{Name: "other", CUDA: scaleSource + "struct scale_args {};"})
	if err == nil {
		t.Error("a kernel that is not in its source was found")
	}
	_, err = NewKernel(d, KernelSpec[scaleArgs]{Name: "scale", PTX: ".version 8.0\nbroken"})
	fails(err, "ModuleLoadDataEx", "ptxas")

	x := must(Malloc[float32](d, 10))
	fails(k.Launch(s, Grid{N: -1}, scaleArgs{}), "grid of -1")
	check(t, x.Free())
	err = k.Launch(s, Grid{N: 10}, scaleArgs{X: x.All()})
	wantError(t, err, ErrIllegalAddress, "X is in "+x.Memory().String())
	h := newDevice(t)
	y := malloc[float32](t, h, 10)
	fails(k.Launch(s, Grid{N: 10}, scaleArgs{X: y.All()}), "another device")
}

func TestGPUAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	d := openGPU(t)
	ctx := testContext(t)
	s := newStream(t, d)
	k := scaleKernel(t, d)
	e := newEvent(t, d)
	x, y := malloc[float32](t, d, 1000), malloc[float32](t, d, 1000)
	g, err := captured(t, s, func() { check(t, Copy(x.All(), y.All(), s)) })
	check(t, err)
	exec := must(g.Instantiate())
	host := make([]float32, 1000)
	for name, fn := range map[string]func() error{
		"copy":         func() error { return Copy(x.All(), y.All(), s) },
		"to device":    func() error { return CopyToDevice(x.All(), host, s) },
		"to host":      func() error { return CopyToHost(host, x.All(), s) },
		"fill":         func() error { return Fill(x.All(), 1, s) },
		"record":       func() error { return s.Record(e) },
		"wait":         func() error { return s.Wait(e) },
		"kernel":       func() error { return k.Launch(s, Grid{N: 1000}, scaleArgs{X: x.All(), A: 1}) },
		"launch":       func() error { return exec.Launch(s) },
		"synchronize":  func() error { return s.Synchronize(ctx) },
		"event":        func() error { return e.Synchronize(ctx) },
		"query":        func() error { _, err := s.Query(); return err },
		"bind":         func() error { b := d.Bind(); b.Release(); return b.Err() },
		"bind call":    func() error { b, err := d.BindCall(); b.Release(); return err },
		"qualifies no": func() error { return nil },
	} {
		for range 10 { // pools get warm
			check(t, fn())
			check(t, s.Synchronize(ctx))
		}
		n := testing.AllocsPerRun(100, func() {
			if err := fn(); err != nil {
				t.Error(err)
			}
			if err := s.Synchronize(ctx); err != nil {
				t.Error(err)
			}
		})
		if n > 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
	check(t, errors.Join(exec.Destroy(), g.Destroy()))
}

// TestGPUMany uses a device from many goroutines, with collections and stacks that move.
func TestGPUMany(t *testing.T) {
	d := openGPU(t)
	ctx := testContext(t)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				runtime.GC()
			}
		}
	}()
	for w := range 8 {
		wg.Go(func() {
			s := must(d.NewStream())
			e := must(d.NewEvent())
			x := must(AllocBuffer[int64](d, 1000, []AllocKind{Private, Shareable}[w%2]))
			var calls atomic.Int64
			for i := range 50 {
				in := make([]int64, 1000)
				for j := range in {
					in[j] = int64(w*1000 + i)
				}
				out := make([]int64, 1000)
				err := errors.Join(CopyToDevice(x.All(), in, s), s.Record(e), s.HostFunc(func() { calls.Add(1) }), CopyToHost(out, x.All(), s))
				if i%3 == 0 {
					err = errors.Join(err, e.Synchronize(ctx))
				}
				if err = errors.Join(err, s.Synchronize(ctx)); err != nil {
					t.Error(err)
					return
				}
				if !slices.Equal(in, out) || calls.Load() != int64(i+1) {
					t.Errorf("goroutine %d, round %d: got %d, %d calls", w, i, out[0], calls.Load())
					return
				}
			}
			if err := errors.Join(s.Close(), e.Close(), x.Free()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	close(stop)
}

func TestGPULeaksNothing(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	ctx := testContext(t)
	cycle := func() {
		x, y := must(AllocBuffer[int32](d, 1<<20, Shareable)), must(Malloc[int32](d, 1<<20))
		out := make([]int32, 1000)
		g, err := captured(t, s, func() {
			check(t, Fill(x.All(), 1, s))
			check(t, Copy(y.All(), x.All(), s))
			check(t, CopyToHost(out, y.Slice(0, 1000), s))
		})
		check(t, err)
		released := make(chan struct{})
		check(t, g.OnRelease(func() { close(released) }))
		e := must(g.Instantiate())
		check(t, e.Launch(s))
		check(t, s.Synchronize(ctx))
		check(t, errors.Join(g.Destroy(), e.Destroy()))
		<-released
		check(t, errors.Join(x.Free(), y.Free()))
	}
	for range 5 {
		cycle()
	}
	free, _, err := d.MemoryInfo()
	check(t, err)
	fds := countFDs(t)
	for range 100 {
		cycle()
	}
	after, _, err := d.MemoryInfo()
	check(t, err)
	const noise = 64 << 20 // others use the GPU too
	if after+noise < free {
		t.Errorf("%d bytes of device memory were free, now %d", free, after)
	}
	if n := countFDs(t); n > fds {
		t.Errorf("%d descriptors, before %d", n, fds)
	}
	if len(hostCalls.m) != 0 || len(releases.m) != 0 {
		t.Errorf("%d host functions and %d callbacks are still known", len(hostCalls.m), len(releases.m))
	}
}

// TestGPULost loses the context, in a process of its own because it does not come back.
func TestGPULost(t *testing.T) {
	openGPU(t)
	self, err := os.Executable()
	check(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), hang)
	defer cancel()
	cmd := exec.CommandContext(ctx, self)
	cmd.Env = append(os.Environ(), roleVariable+"=lost GPU")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// runLostGPU launches a graph whose memory was freed behind the runtime's back.
func runLostGPU() error {
	token := ""
	if onFake() {
		token = "0"
	}
	d, err := Open(token)
	if err != nil {
		return err
	}
	s, s2, e := must(d.NewStream()), must(d.NewStream()), must(d.NewEvent())
	m := must(d.Alloc(1<<20, Private))
	runtime.LockOSThread()
	if err := errors.Join(s.BeginCapture(CaptureThreadLocal), s.Memset(Range{Mem: m, Len: m.Size()}, 7)); err != nil {
		return err
	}
	g := must(s.EndCapture())
	runtime.UnlockOSThread()
	released := make(chan struct{})
	h := must(m.Hold("a graph", false))
	if err := g.OnRelease(func() { h.Release(); close(released) }); err != nil {
		return err
	}
	x := must(g.Instantiate())
	if err := m.raw.free(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), hang/2)
	defer cancel()
	if err := errors.Join(x.Launch(s), s.Synchronize(ctx)); !errors.Is(err, ErrIllegalAddress) || !strings.Contains(err.Error(), "700") {
		return fmt.Errorf("synchronize: %v, want ErrIllegalAddress with 700", err)
	}
	_, allocErr := d.Alloc(1, Private)
	_, queryErr := s2.Query()
	for i, err := range []error{d.Err(), allocErr, queryErr, s2.HostFunc(func() {}), s2.Synchronize(ctx), x.Launch(s2), s2.Record(e)} {
		if !errors.Is(err, ErrIllegalAddress) {
			return fmt.Errorf("call %d on a lost device: %v, want ErrIllegalAddress", i, err)
		}
	}
	// Only closing and freeing work.
	if err := errors.Join(x.Destroy(), g.Destroy()); err != nil {
		return err
	}
	select {
	case <-released:
	case <-ctx.Done():
		return errors.New("the release callback did not come")
	}
	// Nor can it be opened again in this process; what a GPU's driver does then is its matter.
	if again, err := Open(token); err == nil {
		again.Close()
	} else if onFake() && !errors.Is(err, ErrIllegalAddress) {
		return fmt.Errorf("open a lost device: %v, want ErrIllegalAddress", err)
	}
	return errors.Join(m.Free(), s.Close(), s2.Close(), e.Close(), d.Close())
}

// TestArgumentLayout compares the layout that kernels get with a C compiler's.
func TestArgumentLayout(t *testing.T) {
	type inner struct {
		A int8
		B Slice[float64]
		_ [3]byte
		C uint16
	}
	type all struct {
		B1  bool
		F64 float64
		I8  int8
		X   Slice[float32]
		U16 uint16
		H   Float16
		Q   F8E4M3
		N   int
		In  inner
		Arr [3]int16
		Two [2][3]uint8
		Ins [2]inner
		S   Slice[BFloat16]
		F32 float32
		e   struct{ V uint64 }
	}
	layout, err := layoutOf("k", reflect.TypeFor[all]())
	check(t, err)
	var b strings.Builder
	b.WriteString("#include <stddef.h>\n#include <stdbool.h>\nstruct gorun_slice { void *ptr; long long n; };\n")
	_, decl, _ := strings.Cut(layout.declaration, "struct k_args")
	decl, _, _ = strings.Cut("struct k_args"+decl, "#line")
	for _, e := range []string{"float", "double", "unsigned short"} {
		decl = strings.ReplaceAll(decl, "gorun_slice<"+e+">", "struct gorun_slice")
	}
	b.WriteString(decl)
	b.WriteString("#define API __attribute__((visibility(\"default\")))\nAPI size_t offset(int i) { switch (i) {\n")
	for i, p := range layout.parts {
		fmt.Fprintf(&b, "case %d: return offsetof(struct k_args, %s);\n", i, p.name)
	}
	b.WriteString("}; return sizeof(struct k_args); }\n")
	source := t.TempDir() + "/layout.c"
	check(t, os.WriteFile(source, []byte(b.String()), 0o644))
	lib := openLibrary(t, dltest.Build(t, source, "layout.so"))
	f := lib.Lookup("offset")
	for i, p := range layout.parts {
		if got := uintptr(f.Call(uintptr(i))); got != p.to {
			t.Errorf("%s is at %d in C, we put it at %d", p.name, got, p.to)
		}
	}
	if got := uintptr(f.Call(1000)); got != layout.size {
		t.Errorf("the struct has %d bytes in C, we think %d", got, layout.size)
	}

	// What Go has comes out where C wants it.
	d := newDevice(t)
	x := malloc[float32](t, d, 10)
	args := all{B1: true, F64: 1.5, X: x.Slice(2, 10), N: -1, Arr: [3]int16{1, 2, 3}, F32: 2.5}
	args.In.C, args.Ins[1].C, args.e.V = 7, 8, 9
	block := make([]byte, maxArgs)
	check(t, layout.fill(block, unsafe.Pointer(&args), d))
	for _, p := range layout.parts {
		at := unsafe.Pointer(&block[p.to])
		var got, want any
		switch p.name {
		case "F64":
			got, want = *(*float64)(at), 1.5
		case "X":
			got, want = *(*[2]uint64)(at), [2]uint64{uint64(x.Memory().Pointer()) + 8, 8}
		case "N":
			got, want = *(*int64)(at), int64(-1)
		case "Arr[2]":
			got, want = *(*int16)(at), int16(3)
		case "In.C":
			got, want = *(*uint16)(at), uint16(7)
		case "Ins[1].C":
			got, want = *(*uint16)(at), uint16(8)
		case "e.V":
			got, want = *(*uint64)(at), uint64(9)
		case "F32":
			got, want = *(*float32)(at), float32(2.5)
		}
		if got != want {
			t.Errorf("%s is %v, want %v", p.name, got, want)
		}
	}
}

// TestGPURandom runs random programs of several streams on the GPU and on the host platform, eager and captured, and wants the same memory from both.
func TestGPURandom(t *testing.T) {
	gpu, host := openGPU(t), newDevice(t)
	for seed := range uint64(30) {
		var got [2][][]int32
		for i, d := range []*Device{gpu, host} {
			got[i] = runRandom(t, d, seed)
		}
		if !reflect.DeepEqual(got[0], got[1]) {
			t.Fatalf("seed %d (-GPU +host):\n%s", seed, cmp.Diff(got[0], got[1]))
		}
	}
}

// runRandom runs the program of a seed: rounds of work on three streams, which fork from the first and join it again. Each stream has
// buffers of its own within a round, so that the result does not depend on time.
func runRandom(t *testing.T, d *Device, seed uint64) (results [][]int32) {
	r := rand.New(rand.NewPCG(seed, 1))
	ctx := testContext(t)
	const nStreams, nBuffers, n = 3, 2, 300
	var streams [nStreams]*Stream
	var buffers [nStreams][nBuffers]*Buffer[int32]
	for i := range streams {
		streams[i] = must(d.NewStream())
		for j := range buffers[i] {
			buffers[i][j] = must(AllocBuffer[int32](d, n, []AllocKind{Private, Shareable}[j]))
		}
	}
	fork, join := must(d.NewEvent()), must(d.NewEvent())
	main := streams[0]
	for range 8 {
		in := make([]int32, n)
		for i := range in {
			in[i] = r.Int32()
		}
		out := make([]int32, n)
		work := func() {
			check(t, main.Record(fork))
			for i, s := range streams {
				if i > 0 {
					check(t, s.Wait(fork))
				}
				for range 1 + r.IntN(4) {
					a, b := buffers[i][r.IntN(nBuffers)], buffers[i][r.IntN(nBuffers)]
					lo := r.IntN(n)
					hi := lo + r.IntN(n-lo+1)
					var err error
					switch r.IntN(5) {
					case 0:
						err = Fill(a.Slice(lo, hi), r.Int32(), s)
					case 1:
						if a == b {
							lo = hi
						}
						err = Copy(a.Slice(lo, hi), b.Slice(lo, hi), s)
					case 2:
						err = CopyToDevice(a.Slice(lo, hi), in[lo:hi], s)
					case 3:
						err = s.Memset(Range{Mem: a.Memory(), Off: uint64(lo), Len: uint64(hi - lo)}, byte(lo))
					case 4:
						half, err2 := SliceOf[int64](a.Memory(), uint64(lo&^1)*4, (hi-lo)/2)
						err = errors.Join(err2, Fill(half, r.Int64(), s))
					}
					check(t, err)
				}
				if i > 0 {
					check(t, s.Record(join))
					check(t, main.Wait(join))
				}
			}
			// What the others have made goes on to the first, and to Go.
			check(t, Copy(buffers[0][0].All(), buffers[1+r.IntN(nStreams-1)][r.IntN(nBuffers)].All(), main))
			check(t, CopyToHost(out, buffers[0][r.IntN(nBuffers)].All(), main))
		}
		if r.IntN(2) == 0 {
			work()
		} else {
			g, err := captured(t, main, work)
			check(t, err)
			x := must(g.Instantiate())
			check(t, g.Destroy())
			for range 1 + r.IntN(3) {
				check(t, x.Launch(main))
			}
			check(t, x.Destroy()) // the launches go on
		}
		check(t, main.Synchronize(ctx))
		results = append(results, out)
	}
	for i, s := range streams {
		check(t, s.Synchronize(ctx))
		for _, b := range buffers[i] {
			results = append(results, fetch(t, s, b.All()))
			check(t, b.Free())
		}
		check(t, s.Close())
	}
	check(t, errors.Join(fork.Close(), join.Close()))
	return results
}

// TestGPUHungClose closes a device whose last launch never ends: the wait for its release callback is bounded.
func TestGPUHungClose(t *testing.T) {
	if !onFake() {
		t.Skip("a real device would wait for its work when its context is destroyed")
	}
	openGPU(t) // for its check at the end
	d := must(Open("0"))
	s := must(d.NewStream())
	broken := errors.New("broken")
	var failed atomic.Bool
	s.Watch(func(uint64, bool) (uint64, error) {
		if failed.Load() {
			return 0, broken
		}
		return 0, nil
	}, nil)
	g, err := captured(t, s, func() { check(t, s.HostFunc(func() {})) })
	check(t, err)
	var released atomic.Bool
	check(t, g.OnRelease(func() { released.Store(true) }))
	x := must(g.Instantiate())
	let := block(t, s)
	check(t, x.Launch(s))
	failed.Store(true)
	wantError(t, s.Synchronize(testContext(t)), broken)
	check(t, errors.Join(x.Destroy(), g.Destroy(), s.Close()))
	time.AfterFunc(500*time.Millisecond, let)
	check(t, d.Close()) // waits for the callback as long as that may take
	if !released.Load() {
		t.Error("the device was closed before its release callback")
	}
}

func BenchmarkGPU(b *testing.B) {
	d := openGPU(b)
	ctx := context.Background()
	s, err := d.NewStream()
	check(b, err)
	defer s.Close()
	e := newEvent(b, d)
	x, y := malloc[float32](b, d, 1<<20), malloc[float32](b, d, 1<<20)
	host := make([]float32, 1<<20)
	k := scaleKernel(b, d)
	g, err := captured(b, s, func() {
		for range 20 {
			check(b, k.Launch(s, Grid{N: 1}, scaleArgs{X: x.All(), A: 1}))
		}
	})
	check(b, err)
	x20 := must(g.Instantiate())
	defer func() { check(b, errors.Join(x20.Destroy(), g.Destroy())) }()
	for _, c := range []struct {
		name string
		run  func() error
		sync bool
	}{
		{"synchronize idle", func() error { return nil }, true},
		{"record", func() error { return s.Record(e) }, false},
		{"kernel", func() error { return k.Launch(s, Grid{N: 1}, scaleArgs{X: x.All(), A: 1}) }, false},
		{"kernel and wait", func() error { return k.Launch(s, Grid{N: 1}, scaleArgs{X: x.All(), A: 1}) }, true},
		{"graph of 20 kernels", func() error { return x20.Launch(s) }, false},
		{"graph of 20 kernels and wait", func() error { return x20.Launch(s) }, true},
		{"host function and wait", func() error { return s.HostFunc(func() {}) }, true},
		{"4 bytes to host", func() error { return CopyToHost(host[:1], x.Slice(0, 1), s) }, true},
		{"4 bytes to device", func() error { return CopyToDevice(x.Slice(0, 1), host[:1], s) }, true},
		{"4 MiB to host", func() error { return CopyToHost(host, x.All(), s) }, true},
		{"4 MiB to device", func() error { return CopyToDevice(x.All(), host, s) }, true},
		{"4 MiB within", func() error { return Copy(y.All(), x.All(), s) }, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if err := c.run(); err != nil {
					b.Fatal(err)
				}
				if n++; c.sync || n%64 == 0 { // the queue of a stream is not endless
					if err := s.Synchronize(ctx); err != nil {
						b.Fatal(err)
					}
				}
			}
			check(b, s.Synchronize(ctx))
		})
	}
}
