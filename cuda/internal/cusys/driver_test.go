package cusys

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// fake is a driver library that a test built.
type fake struct {
	*Driver
	t testing.TB
}

// newFake builds and opens a vendor's library; args may be -DOLD and -DVERSION=n.
func newFake(t testing.TB, v *Vendor, args ...string) fake {
	t.Helper()
	all := append([]string{"-I../../dl/dltest", "-D" + v.Name}, args...)
	if v == HIP && !strings.Contains(strings.Join(args, " "), "VERSION") {
		all = append(all, "-DVERSION=70200000")
	}
	t.Setenv(v.Driver.Env, dltest.Build(t, "testdata/driver.c", v.Driver.Sonames[0], all...))
	d, err := Open(v)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return fake{d, t}
}

// log gives the calls since the last log and forgets them, and any failure asked for.
func (f fake) log() string {
	s := dl.GoString(f.lib.Lookup("fake_log").Call())
	f.lib.Lookup("fake_reset").Call()
	return s
}

func (f fake) failNext(r Result) { f.lib.Lookup("fake_fail").Call(uintptr(r)) }

// call is a call of a wrapper, with what C sees of it and what Go gets.
type call struct {
	names string // CUDA's, MUSA's and HIP's; "-" for none; by "+", two calls
	args  string // as C saw them
	do    func(d *Driver) (any, error)
	want  any
}

var callbackArg uint64
var callback = Callback(func(arg uint64) { callbackArg = arg })

const (
	handle = 0x5555666677778888
	base   = 0x7000000000
	shared = 0xaaaabbbbccccdddd
)

func none(err error) (any, error)                    { return nil, err }
func one[T any](v T, err error) (any, error)         { return v, err }
func two[T, U any](v T, u U, err error) (any, error) { return []any{v, u}, err }

var testProp = MemProp{Type: AllocPinned, Handles: HandleFD, Location: MemLocation{Type: LocationDevice, ID: 3}, RDMA: 1, Usage: 5}

const testPropText = "type=1 handles=1 loc=1,3 win32=(nil) comp=0 rdma=1 usage=5"

func calls() []call {
	access := []MemAccess{{Location: MemLocation{Type: LocationDevice, ID: 3}, Flags: AccessBoth}, {Location: MemLocation{Type: LocationDevice, ID: 4}, Flags: 1}}
	return []call{
		{"cuInit muInit hipInit", "flags=0", func(d *Driver) (any, error) { return none(d.Init()) }, nil},
		{"cuDeviceGetCount muDeviceGetCount hipGetDeviceCount", "n=1", func(d *Driver) (any, error) { return one(d.DeviceCount()) }, 3},
		{"cuDeviceGet muDeviceGet hipDeviceGet", "ordinal=5", func(d *Driver) (any, error) { return one(d.Device(5)) }, Device(2)},
		{"cuDeviceGetUuid_v2 muDeviceGetUuid_v2 hipDeviceGetUuid", "dev=2", func(d *Driver) (any, error) { return one(d.DeviceUUID(2)) }, UUID([]byte(strings.Repeat("\xab", 16)))},
		{"cuDeviceGetName muDeviceGetName hipDeviceGetName", "len=255 dev=2", func(d *Driver) (any, error) { return one(d.DeviceName(2)) }, "H200"},
		{"cuDeviceTotalMem_v2 muDeviceTotalMem_v2 hipDeviceTotalMem", "dev=2", func(d *Driver) (any, error) { return one(d.DeviceMemory(2)) }, uint64(1 << 40)},
		{"cuDeviceGetPCIBusId muDeviceGetPCIBusId hipDeviceGetPCIBusId", "len=255 dev=2", func(d *Driver) (any, error) { return one(d.DevicePCIBusID(2)) }, "0000:1b:00.0"},
		{"cuDeviceCanAccessPeer muDeviceCanAccessPeer hipDeviceCanAccessPeer", "dev=2 peer=7", func(d *Driver) (any, error) { return one(d.CanAccessPeer(2, 7)) }, true},
		{"cuDeviceGetP2PAttribute muDeviceGetP2PAttribute -", "what=3 dev=2 peer=7", func(d *Driver) (any, error) { return one(d.PeerAtomics(2, 7)) }, true},
		{"cuDevicePrimaryCtxRetain muDevicePrimaryCtxRetain -", "dev=4", func(d *Driver) (any, error) { return one(d.PrimaryCtxRetain(4)) }, Context(0x1111222233334444)},
		{"cuDevicePrimaryCtxRelease_v2 muDevicePrimaryCtxRelease_v2 -", "dev=4", func(d *Driver) (any, error) { return none(d.PrimaryCtxRelease(4)) }, nil},
		{"cuCtxGetCurrent muCtxGetCurrent -", "out=1", func(d *Driver) (any, error) { return one(d.CtxCurrent()) }, Context(0x1111222233334444)},
		{"cuCtxSetCurrent muCtxSetCurrent -", "ctx=0x1111222233334444", func(d *Driver) (any, error) { return none(d.CtxSetCurrent(0x1111222233334444)) }, nil},

		{"cuMemAlloc_v2 muMemAlloc_v2 hipMalloc", "bytes=8589934592", func(d *Driver) (any, error) { return one(d.MemAlloc(1 << 33)) }, DevicePtr(base + 1)},
		{"cuMemFree_v2 muMemFree_v2 hipFree", "p=7000000001", func(d *Driver) (any, error) { return none(d.MemFree(base + 1)) }, nil},
		{"cuMemGetInfo_v2 muMemGetInfo_v2 hipMemGetInfo", "out=1", func(d *Driver) (any, error) { return two(d.MemInfo()) }, []any{uint64(5), uint64(6)}},
		{"cuMemAllocHost_v2+cuMemFreeHost muMemAllocHost_v2+muMemFreeHost hipHostMalloc+hipHostFree", "bytes=64 flags=0+log=1", func(d *Driver) (any, error) {
			p, err := d.MemAllocHost(64)
			if err != nil {
				return nil, err
			}
			return none(d.MemFreeHost(p))
		}, nil},
		{"cuMemcpyHtoDAsync_v2 muMemcpyHtoDAsync_v2 hipMemcpyHtoDAsync", "dst=7000000000 src=hello stream=0x5555666677778888", func(d *Driver) (any, error) {
			b := []byte("hello, world")
			return none(d.CopyToDevice(base, unsafe.Pointer(&b[0]), 5, handle))
		}, nil},
		{"cuMemcpyDtoHAsync_v2 muMemcpyDtoHAsync_v2 hipMemcpyDtoHAsync", "src=7000000000 bytes=3 stream=0x5555666677778888", func(d *Driver) (any, error) {
			b := []byte("....")
			err := d.CopyToHost(unsafe.Pointer(&b[0]), base, 3, handle)
			return string(b), err
		}, "zzz."},
		{"cuMemcpyDtoDAsync_v2 muMemcpyDtoDAsync_v2 hipMemcpyDtoDAsync", "dst=7000000000 src=6000000000 bytes=4294967296 stream=0x5555666677778888", func(d *Driver) (any, error) {
			return none(d.Copy(base, 0x6000000000, 1<<32, handle))
		}, nil},
		{"cuMemsetD8Async muMemsetD8Async hipMemsetD8Async", "dst=7000000000 v=255 n=9 stream=0x5555666677778888", func(d *Driver) (any, error) { return none(d.Set8(base, 255, 9, handle)) }, nil},
		{"cuMemsetD32Async muMemsetD32Async hipMemsetD32Async", "dst=7000000000 v=4294967295 n=9 stream=0x5555666677778888", func(d *Driver) (any, error) { return none(d.Set32(base, 1<<32-1, 9, handle)) }, nil},
		{"cuPointerGetAttributes muPointerGetAttributes hipDrvPointerGetAttributes", "n=6 p=7000000123 attrs=2,9,10,11,12,14,", func(d *Driver) (any, error) { return one(d.PointerInfo(base + 0x123)) },
			PointerInfo{Type: MemoryDevice, Device: 3, Base: base, Size: 1 << 33, Handles: HandleFD | HandleFabric, LegacyIPC: true}},

		{"cuMemGetAllocationGranularity muMemGetAllocationGranularity hipMemGetAllocationGranularity", testPropText + " opt=1", func(d *Driver) (any, error) {
			p := testProp
			return one(d.MemGranularity(&p, GranularityRecommended))
		}, uint64(2 << 20)},
		{"cuMemCreate muMemCreate hipMemCreate", "bytes=8589934592 " + testPropText + " flags=0", func(d *Driver) (any, error) {
			p := testProp
			return one(d.MemCreate(1<<33, &p))
		}, AllocHandle(shared)},
		{"cuMemRelease muMemRelease hipMemRelease", "h=aaaabbbbccccdddd", func(d *Driver) (any, error) { return none(d.MemRelease(shared)) }, nil},
		{"cuMemAddressReserve muMemAddressReserve hipMemAddressReserve", "bytes=8589934592 align=2097152 addr=0 flags=0", func(d *Driver) (any, error) { return one(d.MemReserve(1<<33, 2<<20)) }, DevicePtr(base)},
		{"cuMemAddressFree muMemAddressFree hipMemAddressFree", "p=7000000000 bytes=8589934592", func(d *Driver) (any, error) { return none(d.MemUnreserve(base, 1<<33)) }, nil},
		{"cuMemMap muMemMap hipMemMap", "p=7000000000 bytes=8589934592 off=0 h=aaaabbbbccccdddd flags=0", func(d *Driver) (any, error) { return none(d.MemMap(base, 1<<33, shared)) }, nil},
		{"cuMemUnmap muMemUnmap hipMemUnmap", "p=7000000000 bytes=8589934592", func(d *Driver) (any, error) { return none(d.MemUnmap(base, 1<<33)) }, nil},
		{"cuMemSetAccess muMemSetAccess hipMemSetAccess", "p=7000000000 bytes=8589934592 count=2 first=1,3,3 last=1,4,1", func(d *Driver) (any, error) { return none(d.MemSetAccess(base, 1<<33, access)) }, nil},
		{"cuMemRetainAllocationHandle muMemRetainAllocationHandle hipMemRetainAllocationHandle", "p=7000000000", func(d *Driver) (any, error) { return one(d.MemRetain(base)) }, AllocHandle(shared)},
		{"cuMemExportToShareableHandle muMemExportToShareableHandle hipMemExportToShareableHandle", "h=aaaabbbbccccdddd type=1 flags=0", func(d *Driver) (any, error) { return one(d.MemExportFD(shared)) }, 77},
		{"cuMemImportFromShareableHandle muMemImportFromShareableHandle hipMemImportFromShareableHandle", "fd=77 type=1", func(d *Driver) (any, error) { return one(d.MemImportFD(77)) }, AllocHandle(shared)},

		{"cuStreamCreate muStreamCreate hipStreamCreateWithFlags", "flags=1", func(d *Driver) (any, error) { return one(d.StreamCreate(StreamNonBlocking)) }, Stream(handle)},
		{"cuStreamDestroy_v2 muStreamDestroy_v2 hipStreamDestroy", "s=0x5555666677778888", func(d *Driver) (any, error) { return none(d.StreamDestroy(handle)) }, nil},
		{"cuStreamQuery muStreamQuery hipStreamQuery", "s=0x5555666677778888", func(d *Driver) (any, error) { return one(d.StreamQuery(handle)) }, true},
		{"cuStreamWaitEvent muStreamWaitEvent hipStreamWaitEvent", "s=0x5555666677778888 e=0x7 flags=0", func(d *Driver) (any, error) { return none(d.StreamWaitEvent(handle, 7)) }, nil},
		{"cuEventCreate muEventCreate hipEventCreateWithFlags", "flags=2", func(d *Driver) (any, error) { return one(d.EventCreate(EventDisableTiming)) }, Event(handle)},
		{"cuEventDestroy_v2 muEventDestroy_v2 hipEventDestroy", "e=0x5555666677778888", func(d *Driver) (any, error) { return none(d.EventDestroy(handle)) }, nil},
		{"cuEventRecord muEventRecord hipEventRecord", "e=0x5555666677778888 s=0x7", func(d *Driver) (any, error) { return none(d.EventRecord(handle, 7)) }, nil},
		{"cuEventQuery muEventQuery hipEventQuery", "e=0x5555666677778888", func(d *Driver) (any, error) { return one(d.EventQuery(handle)) }, true},
		{"cuLaunchHostFunc muLaunchHostFunc hipLaunchHostFunc", "s=0x5555666677778888 arg=0x2a", func(d *Driver) (any, error) {
			callbackArg = 0
			err := d.LaunchHostFunc(handle, callback, 42)
			return callbackArg, err
		}, uint64(42)},

		{"cuStreamBeginCapture_v2 muStreamBeginCapture_v2 hipStreamBeginCapture", "s=0x5555666677778888 mode=1", func(d *Driver) (any, error) { return none(d.StreamBeginCapture(handle, CaptureThreadLocal)) }, nil},
		{"cuStreamEndCapture muStreamEndCapture hipStreamEndCapture", "s=0x7", func(d *Driver) (any, error) { return one(d.StreamEndCapture(7)) }, Graph(handle)},
		{"cuStreamIsCapturing muStreamIsCapturing hipStreamIsCapturing", "s=0x7", func(d *Driver) (any, error) { return one(d.StreamCaptureStatus(7)) }, CaptureActive},
		{"cuThreadExchangeStreamCaptureMode muThreadExchangeStreamCaptureMode hipThreadExchangeStreamCaptureMode", "was=2 .out=1", func(d *Driver) (any, error) { return one(d.ExchangeCaptureMode(CaptureRelaxed)) }, CaptureGlobal},
		{"cuGraphInstantiateWithFlags muGraphInstantiateWithFlags hipGraphInstantiateWithFlags", "g=0x7 flags=0", func(d *Driver) (any, error) { return one(d.GraphInstantiate(7)) }, GraphExec(handle)},
		{"cuGraphLaunch muGraphLaunch hipGraphLaunch", "x=0x5555666677778888 s=0x7", func(d *Driver) (any, error) { return none(d.GraphLaunch(handle, 7)) }, nil},
		{"cuGraphExecDestroy muGraphExecDestroy hipGraphExecDestroy", "x=0x5555666677778888", func(d *Driver) (any, error) { return none(d.GraphExecDestroy(handle)) }, nil},
		{"cuGraphDestroy muGraphDestroy hipGraphDestroy", "g=0x5555666677778888", func(d *Driver) (any, error) { return none(d.GraphDestroy(handle)) }, nil},
		{"cuGraphGetNodes muGraphGetNodes hipGraphGetNodes", "g=0x7 nodes=0 n=1", func(d *Driver) (any, error) { return one(d.GraphNodes(7)) }, 2},
		{"cuUserObjectCreate muUserObjectCreate hipUserObjectCreate", "arg=0x2b count=1 flags=1", func(d *Driver) (any, error) {
			callbackArg = 0
			o, err := d.UserObjectCreate(callback, 43)
			return []any{o, callbackArg}, err
		}, []any{UserObject(handle), uint64(43)}},
		{"cuUserObjectRelease muUserObjectRelease hipUserObjectRelease", "o=0x7 n=2", func(d *Driver) (any, error) { return none(d.UserObjectRelease(7, 2)) }, nil},
		{"cuGraphRetainUserObject muGraphRetainUserObject hipGraphRetainUserObject", "g=0x7 o=0x5555666677778888 n=1 flags=1", func(d *Driver) (any, error) { return none(d.GraphGiveUserObject(7, handle)) }, nil},

		{"cuModuleLoadDataEx muModuleLoadDataEx hipModuleLoadDataEx", "image=.version 8.0 n=2 options=5,6 size=8191", func(d *Driver) (any, error) { return one(d.ModuleLoad([]byte(".version 8.0"))) }, Module(handle)},
		{"cuModuleUnload muModuleUnload hipModuleUnload", "m=0x5555666677778888", func(d *Driver) (any, error) { return none(d.ModuleUnload(handle)) }, nil},
		{"cuModuleGetFunction muModuleGetFunction hipModuleGetFunction", "m=0x7 name=saxpy", func(d *Driver) (any, error) { return one(d.ModuleFunction(7, "saxpy")) }, Function(handle)},
		{"cuLaunchKernel muLaunchKernel hipModuleLaunchKernel", "f=0x5555666677778888 grid=1,2,3 block=4,5,6 smem=7 s=0x8 params=-9,2.5 extra=0", func(d *Driver) (any, error) {
			i, f := int32(-9), 2.5
			return none(d.LaunchKernel(handle, Dim{1, 2, 3}, Dim{4, 5, 6}, 7, 8, []unsafe.Pointer{unsafe.Pointer(&i), unsafe.Pointer(&f)}))
		}, nil},
	}
}

// lines is the log that a call should leave, "" if the vendor has no such function.
func (c call) lines(v *Vendor) string {
	name := strings.Fields(c.names)[v.id]
	if name == "-" {
		return ""
	}
	var b strings.Builder
	args := strings.Split(c.args, "+")
	for i, n := range strings.Split(name, "+") {
		if before, rest, ok := strings.Cut(args[i], "."); ok && strings.HasPrefix(before, "was=") { // noted before the name
			fmt.Fprintf(&b, "%s%s %s\n", before, n, rest)
			continue
		}
		fmt.Fprintf(&b, "%s %s\n", n, args[i])
	}
	return b.String()
}

func TestEveryCallOfEveryVendor(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v)
			f.log()
			seen := map[string]bool{"GetErrorName": true, "GetErrorString": true, "DriverGetVersion": true, "DeviceGetAttribute": true}
			for _, c := range calls() {
				got, err := c.do(f.Driver)
				log := f.log()
				want := c.lines(v)
				if want == "" {
					continue // the vendor's own tests
				}
				if err != nil {
					t.Errorf("%s: %v", c.names, err)
				}
				if diff := cmp.Diff(log, want); diff != "" {
					t.Errorf("C saw (-got +want):\n%s", diff)
				}
				if diff := cmp.Diff(got, c.want); diff != "" {
					t.Errorf("%s: result (-got +want):\n%s", c.names, diff)
				}
				for _, e := range f.entries() {
					for _, line := range strings.Split(log, "\n") {
						if strings.HasPrefix(strings.TrimPrefix(line, "was=2 "), e.Name+" ") {
							seen[e.field] = true
						}
					}
				}
			}
			for _, e := range f.entries() {
				if e.Func != 0 && !seen[e.field] && !(v == HIP && strings.HasPrefix(e.field, "Ctx")) {
					t.Errorf("%s (%s) is never called by this test", e.field, e.Name)
				}
				if e.Func == 0 && !(v == HIP && (strings.HasPrefix(e.field, "PrimaryCtx") || e.field == "DeviceGetP2PAttribute")) {
					t.Errorf("%s is not bound", e.field)
				}
			}
		})
	}
}

type namedEntry struct {
	*dl.Entry
	field string
}

func (f fake) entries() []namedEntry {
	var out []namedEntry
	s := reflect.ValueOf(&f.f).Elem()
	for i := range s.NumField() {
		out = append(out, namedEntry{s.Field(i).Addr().Interface().(*dl.Entry), s.Type().Field(i).Name})
	}
	return out
}

// TestEveryCallFails lets each function fail once: the error must carry the function, the vendor's name and text.
func TestEveryCallFails(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v)
			for _, c := range calls() {
				name, _, _ := strings.Cut(strings.Fields(c.names)[v.id], "+")
				if name == "-" {
					continue
				}
				f.failNext(2)
				_, err := c.do(f.Driver)
				f.log()
				var e *Error
				if !errors.As(err, &e) || !errors.Is(err, ErrOutOfMemory) {
					t.Errorf("%s: error %v (%T), want *Error with ErrOutOfMemory", name, err, err)
					continue
				}
				code := map[*Vendor]string{CUDA: "CUDA_ERROR_OUT_OF_MEMORY", MUSA: "MUSA_ERROR_OUT_OF_MEMORY", HIP: "hipErrorOutOfMemory"}[v]
				want := name + ": out of memory (" + code + " 2)"
				got := err.Error()
				if strings.HasSuffix(name, "ModuleLoadDataEx") {
					want = strings.Replace(want, "memory (", "memory: ptxas: line 3 (", 1)
				}
				if got != want {
					t.Errorf("error = %q, want %q", got, want)
				}
			}
		})
	}
}

// TestOldLibraries runs all calls on libraries that lack the optional functions.
func TestOldLibraries(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			version := "-DVERSION=11000"
			if v == HIP {
				version = "-DVERSION=50100000"
			}
			f := newFake(t, v, "-DOLD", version)
			missing := 0
			for _, c := range calls() {
				_, err := c.do(f.Driver)
				f.log()
				if err != nil && !IsMissing(err) {
					t.Errorf("%s: %v", c.names, err)
				}
				if IsMissing(err) {
					missing++
				}
			}
			want := 15
			if v == HIP {
				want++ // it never has DeviceGetP2PAttribute
			}
			if missing != want {
				t.Errorf("%d calls were refused as missing, want %d", missing, want)
			}
			if id, err := f.DeviceUUID(2); err != nil || id[0] != 0xab {
				t.Errorf("DeviceUUID by the old name: %x, %v", id, err)
			}
			f.log()
			if err := f.StreamBeginCapture(handle, CaptureThreadLocal); err != nil {
				t.Error(err)
			}
			if want := map[*Vendor]string{CUDA: "cuStreamBeginCapture_v2", MUSA: "muStreamBeginCapture", HIP: "hipStreamBeginCapture"}[v] + " s=0x5555666677778888 mode=1\n"; f.log() != want {
				t.Errorf("the capture did not begin as %q", want)
			}
			if _, err := f.GraphInstantiate(7); err != nil {
				t.Error(err)
			}
			line := map[*Vendor]string{CUDA: "cuGraphInstantiate_v2", MUSA: "muGraphInstantiate", HIP: "hipGraphInstantiateWithFlags"}[v] + " g=0x7 node=1 log=1024\n"
			if v == HIP {
				return // the same form in all versions
			}
			if got := f.log(); got != line {
				t.Errorf("instantiate: %q, want %q", got, line)
			}
			f.failNext(2)
			if _, err := f.GraphInstantiate(7); err == nil || !strings.Contains(err.Error(), "a node is wrong") {
				t.Errorf("error = %v, want the log in it", err)
			}
		})
	}
}

func TestMissingFunctionNamesVersions(t *testing.T) {
	f := newFake(t, CUDA, "-DOLD", "-DVERSION=11000")
	_, err := f.UserObjectCreate(callback, 1)
	want := "cuUserObjectCreate needs CUDA 11.3, found CUDA 11.0 (" + f.lib.Path() + ")"
	if err == nil || err.Error() != want {
		t.Errorf("error = %v, want %s", err, want)
	}
}

func TestHIPAdapters(t *testing.T) {
	f := newFake(t, HIP)
	f.log()
	c, err := f.PrimaryCtxRetain(0)
	if err != nil || c == 0 {
		t.Fatalf("context %v, %v: want one that is not 0", c, err)
	}
	c, err = f.PrimaryCtxRetain(4)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.CtxSetCurrent(c); err != nil {
		t.Error(err)
	}
	cur, err := f.CtxCurrent()
	if err != nil || cur != c { // the library's current device is always 4
		t.Errorf("current = %v, %v, want %v", cur, err, c)
	}
	if err := f.CtxSetCurrent(0); err != nil {
		t.Error(err)
	}
	if err := f.PrimaryCtxRelease(4); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(f.log(), "hipSetDevice dev=4\nhipGetDevice dev=1\n"); diff != "" {
		t.Errorf("C saw (-got +want):\n%s", diff)
	}
	old := newHIPBefore71(t)
	old.log()
	if h, err := old.MemImportFD(77); err != nil || h != shared {
		t.Errorf("import = %x, %v", h, err)
	}
	if got := old.log(); got != "hipMemImportFromShareableHandle fd=77 type=1\n" {
		t.Errorf("before 7.1 C saw %q", got)
	}
}

// newHIPBefore71 is opened when no other HIP library is left in the process.
func newHIPBefore71(t *testing.T) (f fake) {
	t.Helper()
	spec := HIP.Driver
	HIP.Driver.Sole = ""
	defer func() { HIP.Driver = spec }()
	return newFake(t, HIP, "-DVERSION=60241133")
}

func TestFabricOnlyWhereItIs(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v)
			p := PinnedProp(3, HandleFD|HandleFabric)
			_, err := f.MemCreate(4096, &p)
			if v != HIP && err != nil {
				t.Error(err)
			}
			if v == HIP && (!errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), v.Name+" has no fabric handles")) {
				t.Errorf("error = %v", err)
			}
		})
	}
}

func TestAttributeNumbers(t *testing.T) {
	tests := []struct {
		a               Attribute
		cuda, musa, hip int // -1: not asked, 0
	}{
		{AttrMultiprocessors, 16, 16, 63}, {AttrCCMajor, 75, 75, 23}, {AttrCCMinor, 76, 76, 61}, {AttrVMM, 102, 102, 89}, {AttrFDHandles, 103, 103, 89},
		{AttrRDMAWithVMM, 110, 110, -1}, {AttrFabricHandles, 128, 128, -1},
	}
	for i, v := range Vendors {
		f := newFake(t, v)
		f.log()
		for _, tt := range tests {
			number := []int{tt.cuda, tt.musa, tt.hip}[i]
			got, err := f.DeviceAttribute(2, tt.a)
			log := f.log()
			if err != nil {
				t.Error(err)
			}
			if number == -1 {
				if got != 0 || log != "" {
					t.Errorf("%s attribute %d: %d by %q, want 0 without a call", v.Name, tt.a, got, log)
				}
				continue
			}
			want := fmt.Sprintf("%s attr=%d dev=2\n", []string{"cuDeviceGetAttribute", "muDeviceGetAttribute", "hipDeviceGetAttribute"}[i], number)
			if got != 9 || log != want {
				t.Errorf("%s attribute %d: %d by %q, want 9 by %q", v.Name, tt.a, got, log, want)
			}
		}
	}
}

func TestNotReadyIsNoError(t *testing.T) {
	f := newFake(t, CUDA)
	for name, query := range map[string]func() (bool, error){
		"stream": func() (bool, error) { return f.StreamQuery(1) },
		"event":  func() (bool, error) { return f.EventQuery(1) },
	} {
		f.failNext(600)
		if ready, err := query(); ready || err != nil {
			t.Errorf("%s: %v, %v, want not ready without error", name, ready, err)
		}
		f.failNext(700)
		ready, err := query()
		if ready || !errors.Is(err, ErrIllegalAddress) || !ErrIllegalAddress.Sticky() || ErrNotReady.Sticky() {
			t.Errorf("%s: %v, %v", name, ready, err)
		}
		if want := ": unknown error (700)"; err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: error %v, want %q at its end for a code that the library does not know", name, err, want)
		}
		f.log()
	}
	f.failNext(34)
	if err := f.Init(); err == nil || !strings.Contains(err.Error(), "the toolkit's stub") {
		t.Errorf("stub: %v", err)
	}
}

func TestVersions(t *testing.T) {
	if got := cudaVersion(12040); got != (Version{12, 4}) {
		t.Errorf("12040 = %v", got)
	}
	if got := hipVersion(60241133); got != (Version{6, 2}) {
		t.Errorf("60241133 = %v", got)
	}
	if got := newFake(t, CUDA).Version(); got != (Version{13, 0}) {
		t.Errorf("driver's = %v", got)
	}
	if !(Version{7, 0}).Less(Version{7, 1}) || (Version{7, 1}).Less(Version{7, 1}) || !(Version{6, 9}).Less(Version{7, 0}) {
		t.Error("Less is wrong")
	}
}

func TestLibraryThatLacksRequiredFunctions(t *testing.T) {
	t.Setenv(CUDA.Driver.Env, dltest.Build(t, "testdata/driver.c", "libcuda.so.1", "-I../../dl/dltest", "-DcuMemAlloc_v2=cuGone", "-DcuGraphLaunch=cuGone2"))
	_, err := Open(CUDA)
	var m *dl.MissingError
	if !errors.As(err, &m) {
		t.Fatalf("error = %v, want *dl.MissingError", err)
	}
	if diff := cmp.Diff(m.Symbols, []string{"cuMemAlloc_v2", "cuGraphLaunch"}); diff != "" {
		t.Errorf("symbols (-got +want):\n%s", diff)
	}
}

func TestStructLayouts(t *testing.T) {
	var p MemProp
	var a MemAccess
	var l MemLocation
	got := map[string]uintptr{
		"prop": unsafe.Sizeof(p), "prop.type": unsafe.Offsetof(p.Type), "prop.handles": unsafe.Offsetof(p.Handles), "prop.location": unsafe.Offsetof(p.Location),
		"prop.win32": unsafe.Offsetof(p.Win32), "prop.compression": unsafe.Offsetof(p.Compression), "prop.rdma": unsafe.Offsetof(p.RDMA),
		"prop.usage": unsafe.Offsetof(p.Usage), "prop.reserved": unsafe.Offsetof(p.Reserved),
		"access": unsafe.Sizeof(a), "access.location": unsafe.Offsetof(a.Location), "access.flags": unsafe.Offsetof(a.Flags),
		"location": unsafe.Sizeof(l), "location.id": unsafe.Offsetof(l.ID),
		"uuid": unsafe.Sizeof(UUID{}),
	}
	want := map[string]uintptr{
		"prop": 32, "prop.type": 0, "prop.handles": 4, "prop.location": 8, "prop.win32": 16, "prop.compression": 24, "prop.rdma": 25, "prop.usage": 26, "prop.reserved": 28,
		"access": 12, "access.location": 0, "access.flags": 8, "location": 8, "location.id": 4, "uuid": 16,
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("layouts (-got +want):\n%s", diff)
	}
}

func TestHotCallsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop items on purpose")
	}
	f := newFake(t, CUDA)
	d := f.Driver
	i, x := int32(1), 2.0
	params := []unsafe.Pointer{unsafe.Pointer(&i), unsafe.Pointer(&x)}
	hot := map[string]func(){
		"StreamQuery":         func() { d.StreamQuery(1) },
		"EventQuery":          func() { d.EventQuery(1) },
		"EventRecord":         func() { d.EventRecord(1, 2) },
		"StreamWaitEvent":     func() { d.StreamWaitEvent(1, 2) },
		"GraphLaunch":         func() { d.GraphLaunch(1, 2) },
		"CtxSetCurrent":       func() { d.CtxSetCurrent(1) },
		"StreamCaptureStatus": func() { d.StreamCaptureStatus(1) },
		"PointerInfo":         func() { d.PointerInfo(1) },
		"Copy":                func() { d.Copy(1, 2, 3, 4) },
		"LaunchKernel":        func() { d.LaunchKernel(1, Dim{1, 1, 1}, Dim{1, 1, 1}, 0, 2, params) },
	}
	for name, fn := range hot {
		f.log()
		if got := testing.AllocsPerRun(100, fn); got != 0 {
			t.Errorf("%s: %v allocations, want 0", name, got)
		}
	}
	runtime.KeepAlive(params)
}

func TestSettings(t *testing.T) {
	for v, names := range map[*Vendor][]string{CUDA: {"CUDA_LAUNCH_BLOCKING"}, MUSA: {"MUSA_LAUNCH_BLOCKING"}, HIP: {"HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"}} {
		for _, name := range names {
			look := func(n string) (string, string) {
				if n == name {
					return "1", "environment"
				}
				return "", ""
			}
			if _, err := gpulib.CheckSettings(v.Settings(), look, true); err == nil || !strings.Contains(err.Error(), name+"=1: ") {
				t.Errorf("%s with graphs: %v", name, err)
			}
			if warn, err := gpulib.CheckSettings(v.Settings(), look, false); err != nil || len(warn) != 1 {
				t.Errorf("%s without graphs: %v, %v", name, warn, err)
			}
		}
	}
}
