package ncclsys

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// fake is a library that a test built.
type fake struct {
	*Library
	t testing.TB
}

func build(t testing.TB, v *Vendor, version Version, args ...string) string {
	all := append([]string{"-I../../../cuda/dl/dltest", "-D" + v.Name, fmt.Sprintf("-DVERSION=%d", version)}, args...)
	return dltest.Build(t, "testdata/nccl.c", v.Spec.Sonames[0], all...)
}

func newFake(t testing.TB, v *Vendor, version Version, args ...string) fake {
	t.Helper()
	t.Setenv(v.Spec.Env, build(t, v, version, args...))
	l, err := Open(v)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	f := fake{l, t}
	f.log()
	return f
}

func (f fake) log() string {
	s := dl.GoString(f.lib.Lookup("fake_log").Call())
	f.lib.Lookup("fake_reset").Call()
	return s
}

func (f fake) failNext(r Result) { f.lib.Lookup("fake_fail").Call(uintptr(r)) }

const (
	comm   = Comm(0x1111222233334444)
	window = Window(0x5555666677778888)
	base   = 0x7000000000
	stream = Stream(0x99)
)

// testID has its index in each byte.
func testID() (id UniqueID) {
	for i := range id {
		id[i] = byte(i)
	}
	return id
}

func hexOf(b []byte) string { return hex.EncodeToString(b) }

// call is a wrapper's call: what C sees (without the prefix of the name) and what Go gets.
type call struct {
	log  string
	do   func(l *Library) (any, error)
	want any
}

func none(err error) (any, error)            { return nil, err }
func one[T any](v T, err error) (any, error) { return v, err }
func made[T ~uintptr](p *Pending[T], err error) (any, error) {
	if err != nil {
		return nil, err
	}
	p.Done()
	return p.Handle(), nil
}

const (
	plain     = " config size=120 magic=cafebeef version=23206"
	tail      = " comm=0x1111222233334444 stream=0x99"
	bufs      = "send=0x7000000000 recv=0x6000000000 n=4294967296 type=7"
	otherBase = 0x6000000000
)

func calls() []call {
	id := testID()
	idText := hexOf(id[:])
	const n = 1 << 32
	one64 := 2.5
	return []call{
		{"GetUniqueId out=1", func(l *Library) (any, error) { return one(l.GetUniqueID()) }, id},
		{"CommInitRank n=8 id=" + idText + " rank=3", func(l *Library) (any, error) { return made(l.CommInitRank(8, id, 3, nil)) }, comm},
		{"CommInitRankConfig n=8 id=" + idText + " rank=3" + plain, func(l *Library) (any, error) { return made(l.CommInitRank(8, id, 3, NewConfig())) }, comm},
		{"CommInitRankConfig n=8 id=" + idText + " rank=3" + plain + " blocking=1 cga=2 minCTAs=3 maxCTAs=4 splitShare=1 trafficClass=105 commName=world collnet=1 ctaPolicy=3 shrinkShare=1 nvlsCTAs=16 netChannels=17 nvlinkSched=1 graphUsage=1 rmaCtx=18 maxP2p=19 graphOrder=0 launchOrder=1 rmaSig=20 rmaEager=1 hostCft=3 nvlsHost=2",
			func(l *Library) (any, error) {
				c := NewConfig()
				c.Blocking, c.CGAClusterSize, c.MinCTAs, c.MaxCTAs, c.SplitShare, c.TrafficClass, c.CommName = 1, 2, 3, 4, 1, 105, "world"
				c.CollnetEnable, c.CTAPolicy, c.ShrinkShare, c.NVLSCTAs, c.ChannelsPerNetPeer, c.NVLinkCentricSched = 1, 3, 1, 16, 17, 1
				c.GraphUsageMode, c.NumRMAContexts, c.MaxP2PPeers, c.GraphStreamOrdering, c.LaunchOrderImplicit, c.NumRMASignals = 1, 18, 19, 0, 1, 20
				c.RMAEagerInit, c.HostCFTMode, c.NVLSHostMode = 1, 3, 2
				return made(l.CommInitRank(8, id, 3, c))
			}, comm},
		{"CommInitRankScalable n=8 rank=3 nid=2 last=" + idText + plain, func(l *Library) (any, error) {
			return made(l.CommInitRankScalable(8, 3, []UniqueID{{}, id}, NewConfig()))
		}, comm},
		{"CommSplit comm=0x1111222233334444 color=-1 key=-7 config=none", func(l *Library) (any, error) { return made(l.CommSplit(comm, NoColor, -7, nil)) }, comm},
		{"CommSplit comm=0x1111222233334444 color=2 key=1" + plain, func(l *Library) (any, error) { return made(l.CommSplit(comm, 2, 1, NewConfig())) }, comm},
		{"CommShrink comm=0x1111222233334444 n=2 first=1 last=6 flags=0 config=none", func(l *Library) (any, error) {
			return made(l.CommShrink(comm, []int32{1, 6}, nil, 0))
		}, comm},
		{"CommFinalize comm=0x1111222233334444", func(l *Library) (any, error) { return none(l.CommFinalize(comm)) }, nil},
		{"CommDestroy comm=0x1111222233334444", func(l *Library) (any, error) { return none(l.CommDestroy(comm)) }, nil},
		{"CommAbort comm=0x1111222233334444", func(l *Library) (any, error) { return none(l.CommAbort(comm)) }, nil},
		{"CommGetAsyncError comm=0x1111222233334444", func(l *Library) (any, error) { return one(l.CommAsyncError(comm)) }, ErrInProgress},

		{"MemAlloc bytes=4294967296", func(l *Library) (any, error) { return one(l.MemAlloc(n)) }, DevicePtr(base)},
		{"MemFree p=0x7000000000", func(l *Library) (any, error) { return none(l.MemFree(base)) }, nil},
		{"CommRegister comm=0x1111222233334444 p=0x7000000000 bytes=4294967296", func(l *Library) (any, error) { return one(l.CommRegister(comm, base, n)) }, Registration(0x77)},
		{"CommRegister comm=0x1111222233334444 p=0x7000000000 bytes=1", func(l *Library) (any, error) { return one(l.CommRegister(comm, base, 1)) }, Registration(0)}, // success, not written
		{"CommDeregister comm=0x1111222233334444 h=0x77", func(l *Library) (any, error) { return none(l.CommDeregister(comm, 0x77)) }, nil},
		{"CommWindowRegister comm=0x1111222233334444 p=0x7000000000 bytes=4294967296 flags=1", func(l *Library) (any, error) {
			return made(l.CommWindowRegister(comm, base, n, WindowCollective))
		}, window},
		{"CommWindowRegister comm=0x1111222233334444 p=0x7000000000 bytes=1 flags=0", func(l *Library) (any, error) { return made(l.CommWindowRegister(comm, base, 1, 0)) }, Window(0)},
		{"CommWindowDeregister comm=0x1111222233334444 w=0x5555666677778888", func(l *Library) (any, error) { return none(l.CommWindowDeregister(comm, window)) }, nil},
		{"WinGetUserPtr comm=0x1111222233334444 w=0x5555666677778888", func(l *Library) (any, error) { return one(l.WindowUserPtr(comm, window)) }, DevicePtr(base)},
		{"GetLsaDevicePointer w=0x5555666677778888 off=4294967296 rank=3", func(l *Library) (any, error) { return one(l.LSAPtr(window, n, 3)) }, DevicePtr(base)},
		{"TeamLsa comm=0x1111222233334444", func(l *Library) (any, error) { return one(l.TeamLSA(comm)) }, Team{4, -3, 2}},

		{"AllReduce " + bufs + " op=4" + tail, func(l *Library) (any, error) {
			return none(l.AllReduce(base, otherBase, n, Float32, Avg, comm, stream))
		}, nil},
		{"Reduce " + bufs + " op=2 root=5" + tail, func(l *Library) (any, error) {
			return none(l.Reduce(base, otherBase, n, Float32, Max, 5, comm, stream))
		}, nil},
		{"Broadcast " + bufs + " root=5" + tail, func(l *Library) (any, error) { return none(l.Broadcast(base, otherBase, n, Float32, 5, comm, stream)) }, nil},
		{"AllGather " + bufs + tail, func(l *Library) (any, error) { return none(l.AllGather(base, otherBase, n, Float32, comm, stream)) }, nil},
		{"ReduceScatter " + bufs + " op=0" + tail, func(l *Library) (any, error) {
			return none(l.ReduceScatter(base, otherBase, n, Float32, Sum, comm, stream))
		}, nil},
		{"Send buf=0x7000000000 n=4294967296 type=7 peer=5" + tail, func(l *Library) (any, error) { return none(l.Send(base, n, Float32, 5, comm, stream)) }, nil},
		{"Recv buf=0x7000000000 n=4294967296 type=7 peer=5" + tail, func(l *Library) (any, error) { return none(l.Recv(base, n, Float32, 5, comm, stream)) }, nil},
		{"GroupStart -", func(l *Library) (any, error) { return none(l.GroupStart()) }, nil},
		{"GroupEnd -", func(l *Library) (any, error) { return none(l.GroupEnd()) }, nil},
		{"RedOpCreatePreMulSum scalar=2.5 type=8 where=1 comm=0x1111222233334444", func(l *Library) (any, error) {
			return one(l.RedOpCreatePreMulSum(unsafe.Pointer(&one64), Float64, OnHost, comm))
		}, RedOp(77)},
		{"RedOpDestroy op=77 comm=0x1111222233334444", func(l *Library) (any, error) { return none(l.RedOpDestroy(77, comm)) }, nil},
	}
}

// line is the log that the call leaves with a maker's library.
func (c call) line(v *Vendor) string { return prefixes[v] + c.log + "\n" }

// function is the name of the C function.
func (c call) function(v *Vendor) string {
	name, _, _ := strings.Cut(c.line(v), " ")
	return name
}

var prefixes = map[*Vendor]string{NCCL: "nccl", RCCL: "nccl", MCCL: "mccl"}

func TestEveryCallOfEveryVendor(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v, Newest)
			seen := map[string]bool{}
			for _, c := range calls() {
				got, err := c.do(f.Library)
				if err != nil {
					t.Errorf("%s: %v", c.function(v), err)
				}
				if diff := cmp.Diff(f.log(), c.line(v)); diff != "" {
					t.Errorf("C saw (-got +want):\n%s", diff)
				}
				if diff := cmp.Diff(got, c.want); diff != "" {
					t.Errorf("%s: result (-got +want):\n%s", c.function(v), diff)
				}
				seen[c.function(v)] = true
			}
			s := reflect.ValueOf(&f.f).Elem()
			for i := range s.NumField() {
				e := s.Field(i).Addr().Interface().(*dl.Entry)
				field := s.Type().Field(i).Name
				if e.Func == 0 {
					t.Errorf("%s is not bound", field)
				}
				switch field {
				case "GetVersion", "GetErrorString", "GetLastError": // called by all
				default:
					if !seen[e.Name] {
						t.Errorf("%s (%s) is never called by this test", field, e.Name)
					}
				}
			}
			if len(f.pending) != 0 {
				t.Errorf("%d handles are still pending", len(f.pending))
			}
		})
	}
}

func TestEveryCallFails(t *testing.T) {
	for _, v := range Vendors {
		t.Run(v.Name, func(t *testing.T) {
			f := newFake(t, v, Newest)
			prefix := prefixes[v]
			for _, c := range calls() {
				name := c.function(v)
				if name == prefix+"TeamLsa" {
					continue // returns no result code
				}
				f.failNext(5)
				_, err := c.do(f.Library)
				f.log()
				want := name + ": invalid usage (run with NCCL_DEBUG=WARN for details) (" + prefix + "InvalidUsage 5): Duplicate GPU detected"
				if err == nil || err.Error() != want || !errors.Is(err, ErrInvalidUsage) {
					t.Errorf("error = %v, want %s", err, want)
				}
				f.failNext(7)
				if _, err := c.do(f.Library); err != ErrInProgress && !strings.Contains(name, "Init") && !strings.Contains(name, "Split") &&
					!strings.Contains(name, "Shrink") && !strings.Contains(name, "WindowRegister") {
					t.Errorf("%s in progress: %v, want ErrInProgress itself", name, err)
				}
				f.log()
			}
		})
	}
}

func TestResultNames(t *testing.T) {
	for v, want := range map[*Vendor][]string{
		NCCL: {"ncclUnhandledCudaError", "ncclSystemError", "ncclTimeout", "ncclResult_t"},
		MCCL: {"mcclUnhandledMusaError", "mcclSystemError", "mcclTimeout", "mcclResult_t"},
		RCCL: {"ncclUnhandledCudaError", "ncclSystemError", "ncclTimeout", "ncclResult_t"},
	} {
		l := &Library{vendor: v}
		got := []string{l.resultName(ErrUnhandledDevice), l.resultName(ErrSystem), l.resultName(ErrTimeout), l.resultName(99)}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("%s (-got +want):\n%s", v.Name, diff)
		}
	}
	f := newFake(t, NCCL, Newest)
	f.failNext(99)
	if err := f.GroupStart(); err == nil || err.Error() != "ncclGroupStart: result 99 (ncclResult_t 99): Duplicate GPU detected" {
		t.Errorf("unknown result: %v", err)
	}
	f.log()
	if err := f.AsyncError(ErrRemote); err == nil || !errors.Is(err, ErrRemote) || !strings.HasPrefix(err.Error(), "asynchronous error: some error (ncclRemoteError 6)") {
		t.Errorf("asynchronous: %v", err)
	}
	if err := f.AsyncError(Success); err != nil {
		t.Error(err)
	}
	if err := f.AsyncError(ErrInProgress); err != ErrInProgress {
		t.Errorf("in progress: %v", err)
	}
}

// TestConfigOfEveryVersion gives the newest struct to libraries of all older layouts.
func TestConfigOfEveryVersion(t *testing.T) {
	fields := []struct {
		since Version
		text  string
	}{
		{21405, " blocking=0"}, {21700, " maxCTAs=4"}, {21801, " splitShare=1"}, {22602, " trafficClass=105"},
		{22703, " commName=world"}, {22703, " nvlsCTAs=16"}, {22803, " nvlinkSched=1"}, {22902, " graphUsage=1"}, {23003, " maxP2p=19"},
		{23005, " graphOrder=1"}, {23102, " hostCft=3"}, {23200, " nvlsHost=2"},
	}
	for _, version := range []Version{21405, 21700, 21801, 22602, 22703, 22803, 22902, 23003, 23007, 23102, 23206} {
		t.Run(version.String(), func(t *testing.T) {
			f := newFake(t, NCCL, version)
			c := NewConfig()
			c.Blocking, c.MaxCTAs, c.SplitShare, c.TrafficClass, c.CommName, c.NVLSCTAs, c.NVLinkCentricSched = 0, 4, 1, 105, "world", 16, 1
			c.GraphUsageMode, c.MaxP2PPeers, c.GraphStreamOrdering, c.HostCFTMode, c.NVLSHostMode = 1, 19, 1, 3, 2
			id := testID()
			p, err := f.CommInitRank(2, id, 1, c)
			if err != nil {
				t.Fatal(err)
			}
			want := "ncclCommInitRankConfig n=2 id=" + hexOf(id[:]) + " rank=1 config size=120 magic=cafebeef version=23206"
			for _, field := range fields {
				if version >= field.since {
					want += field.text
				}
			}
			if diff := cmp.Diff(f.log(), want+"\n"); diff != "" {
				t.Errorf("C saw (-got +want):\n%s", diff)
			}
			p.Done()
		})
	}
}

// TestLateHandle is a non-blocking creation: the library reads the settings and writes the handle after the call.
func TestLateHandle(t *testing.T) {
	f := newFake(t, NCCL, Newest)
	c := NewConfig()
	c.Blocking, c.CommName = 0, "late"
	f.failNext(ErrInProgress)
	p, err := f.CommInitRank(2, testID(), 1, c)
	if err != ErrInProgress || p == nil || p.Handle() != 0 {
		t.Fatalf("init: %v, %v, want a handle to come and ErrInProgress", p, err)
	}
	*c = Config{} // the library has its own
	f.log()
	var garbage [][]byte
	for range 1000 {
		garbage = append(garbage, make([]byte, 1000))
	}
	_ = garbage
	f.lib.Lookup("fake_finish").Call()
	if p.Handle() != comm {
		t.Errorf("handle = %#x, want %#x", p.Handle(), comm)
	}
	if got, want := f.log(), "finish"+plain+" blocking=0 commName=late\n"; got != want {
		t.Errorf("at the end C saw %q, want %q", got, want)
	}
	if len(f.pending) != 1 {
		t.Errorf("%d pending, want 1", len(f.pending))
	}
	p.Done()
	p.Done()
	if len(f.pending) != 0 {
		t.Errorf("%d pending after Done, want 0", len(f.pending))
	}
	f.failNext(ErrInvalidUsage)
	if p, err := f.CommInitRank(2, testID(), 1, c); p != nil || !errors.Is(err, ErrInvalidUsage) || len(f.pending) != 0 {
		t.Errorf("failed init: %v, %v, %d pending", p, err, len(f.pending))
	}
}

// isMissing reports whether err says that the library lacks a function.
func isMissing(err error) bool {
	_, ok := errors.AsType[*dl.NeedError](err)
	return ok
}

// TestOldLibraries runs all calls on old versions: what is missing must be refused with both versions.
func TestOldLibraries(t *testing.T) {
	tests := []struct {
		v       *Vendor
		version Version
		missing int // calls
	}{{NCCL, 20708, 20}, {NCCL, 21405, 15}, {NCCL, 22803, 2}, {MCCL, 20708, 20}, {MCCL, 22809, 2}, {RCCL, 22105, 8}}
	for _, tt := range tests {
		t.Run(tt.v.Name+" "+tt.version.String(), func(t *testing.T) {
			f := newFake(t, tt.v, tt.version)
			if f.Version() != tt.version {
				t.Errorf("version = %v, want %v", f.Version(), tt.version)
			}
			missing := 0
			for _, c := range calls() {
				name := c.function(tt.v)
				lacks := f.lib.Lookup(name) == 0
				_, err := c.do(f.Library)
				f.log()
				if err != nil && !isMissing(err) || isMissing(err) != lacks {
					t.Errorf("%s: %v, want it refused: %v", name, err, lacks)
				}
				if !isMissing(err) {
					continue
				}
				missing++
				if s := err.Error(); !strings.HasPrefix(s, name+" needs "+tt.v.Name+" 2.") || !strings.HasSuffix(s, ", found "+tt.v.Name+" "+tt.version.String()+" ("+f.lib.Path()+")") {
					t.Errorf("error = %q, want both versions and the path", s)
				}
			}
			if missing != tt.missing {
				t.Errorf("%d calls are missing, want %d", missing, tt.missing)
			}
		})
	}
}

func TestFeatures(t *testing.T) {
	f := newFake(t, NCCL, 22105)
	for feature, want := range map[Feature]string{
		Windows:       "windows needs NCCL 2.27.3, found NCCL 2.21.5 (" + f.lib.Path() + ")",
		Float8:        "8-bit floats needs NCCL 2.24.0, found NCCL 2.21.5 (" + f.lib.Path() + ")",
		GraphRegister: "", Register: "", Sharp: "",
	} {
		err := f.Need(feature)
		if got := errText(err); got != want {
			t.Errorf("%s: %q, want %q", feature, got, want)
		}
	}
	m := newFake(t, MCCL, 22809)
	for _, feature := range []Feature{Register, GraphRegister, Sharp, Windows} { // its manual has them
		if err := m.Need(feature); err != nil {
			t.Errorf("MCCL, %s: %v", feature, err)
		}
	}
	t.Run("the version has it, the library does not", func(t *testing.T) {
		broken := newFake(t, RCCL, 22803, "-DncclCommWindowRegister=gone")
		if err := broken.Need(Windows); err == nil || !strings.HasPrefix(err.Error(), "windows is not in RCCL 2.28.3 (") {
			t.Errorf("error = %v", err)
		}
	})
	all := newFake(t, RCCL, Newest)
	for feature, g := range gates {
		err := all.Need(feature)
		if (feature == Sharp) != (err != nil) {
			t.Errorf("newest RCCL, %s: %v", feature, err)
		}
		if g.since < 20900 || g.since > Newest {
			t.Errorf("%s: since %v", feature, g.since)
		}
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestFaults(t *testing.T) {
	ids := func(v Version) []string {
		out := []string{}
		for _, f := range FaultsOf(v) {
			out = append(out, f.ID)
		}
		return out
	}
	for v, want := range map[Version][]string{
		22105: {"abort-with-registrations"},
		22304: {"p2p-then-collective", "message-registered-alone", "abort-with-registrations"},
		22803: {"p2p-then-collective", "message-registered-alone", "window-abort", "abort-with-registrations", "graph-reclaim-interval"},
		22809: {"p2p-then-collective", "message-registered-alone", "revoke", "window-abort", "abort-with-registrations", "graph-reclaim-interval"},
		22902: {"message-registered-alone", "window-abort", "abort-with-registrations", "graph-reclaim-interval", "first-one-sided"},
		23007: {"message-registered-alone", "abort-with-registrations", "graph-reclaim-interval"},
	} {
		if diff := cmp.Diff(ids(v), want); diff != "" {
			t.Errorf("%v (-got +want):\n%s", v, diff)
		}
	}
}

func TestDecodeVersion(t *testing.T) {
	for code, want := range map[int32]string{2708: "2.7.8", 2804: "2.8.4", 20906: "2.9.6", 21904: "2.19.4", 23007: "2.30.7", 23203: "2.32.3"} {
		if got := DecodeVersion(code).String(); got != want {
			t.Errorf("%d = %s, want %s", code, got, want)
		}
	}
}

func TestLoadRefusesOtherLibraries(t *testing.T) {
	tests := []struct {
		name string
		v    *Vendor
		args []string
		want string
	}{
		{"RCCL as NCCL", NCCL, []string{"-DncclCommCount=ncclAllReduceWithBias"}, "it is RCCL (it has ncclAllReduceWithBias)"},
		{"MetaX's as MCCL", MCCL, []string{"-DmcclCommCount=mcclCommMcDevice"}, "it is MetaX's MCCL (it has mcclCommMcDevice)"},
		{"something else as MCCL", MCCL, []string{"-DmcclCommMuDevice=other"}, "it is not MCCL (it lacks mcclCommMuDevice)"},
		{"without functions", NCCL, []string{"-DncclSend=gone", "-DncclRecv=gone2"}, " lacks ncclSend, ncclRecv"},
		{"without a version", NCCL, []string{"-UVERSION", "-DVERSION=0"}, " tells version 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(tt.v.Spec.Env, build(t, tt.v, Newest, tt.args...))
			if _, err := Open(tt.v); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error = %v, want %q in it", err, tt.want)
			}
		})
	}
}

func TestSecondNCCLIsRefused(t *testing.T) {
	f := newFake(t, NCCL, Newest)
	t.Setenv(NCCL.Spec.Env, build(t, NCCL, 22803))
	if _, err := Open(NCCL); !errors.Is(err, dl.ErrSecondCopy) || !strings.Contains(err.Error(), f.lib.Path()) {
		t.Errorf("error = %v, want ErrSecondCopy with the first one's path", err)
	}
	newFake(t, RCCL, Newest) // with the same symbols, but no copy of it
}

func TestWheelIsFound(t *testing.T) {
	lib := build(t, NCCL, 22809)
	venv, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(venv, "lib/python3.12/site-packages/nvidia/nccl/lib")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(lib, filepath.Join(dir, "libnccl.so.2")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("VIRTUAL_ENV", venv)
	s := NCCL.Spec
	var found bool
	for _, c := range s.Places(gpulib.Here) {
		found = found || c.Path == filepath.Join(dir, "libnccl.so.2") && c.From == "wheel of VIRTUAL_ENV"
	}
	if !found {
		t.Errorf("the wheel is not among %v", s.Places(gpulib.Here))
	}
}

func TestLayouts(t *testing.T) {
	var c configLayout
	got := map[string]uintptr{
		"size": unsafe.Offsetof(c.size), "magic": unsafe.Offsetof(c.magic), "version": unsafe.Offsetof(c.version), "blocking": unsafe.Offsetof(c.Blocking),
		"cgaClusterSize": unsafe.Offsetof(c.CGAClusterSize), "minCTAs": unsafe.Offsetof(c.MinCTAs), "maxCTAs": unsafe.Offsetof(c.MaxCTAs),
		"netName": unsafe.Offsetof(c.netName), "splitShare": unsafe.Offsetof(c.SplitShare), "trafficClass": unsafe.Offsetof(c.TrafficClass),
		"commName": unsafe.Offsetof(c.commName), "collnetEnable": unsafe.Offsetof(c.CollnetEnable), "CTAPolicy": unsafe.Offsetof(c.CTAPolicy),
		"shrinkShare": unsafe.Offsetof(c.ShrinkShare), "nvlsCTAs": unsafe.Offsetof(c.NVLSCTAs), "nChannelsPerNetPeer": unsafe.Offsetof(c.ChannelsPerNetPeer),
		"nvlinkCentricSched": unsafe.Offsetof(c.NVLinkCentricSched), "graphUsageMode": unsafe.Offsetof(c.GraphUsageMode), "numRmaCtx": unsafe.Offsetof(c.NumRMAContexts),
		"maxP2pPeers": unsafe.Offsetof(c.MaxP2PPeers), "graphStreamOrdering": unsafe.Offsetof(c.GraphStreamOrdering), "launchOrderImplicit": unsafe.Offsetof(c.LaunchOrderImplicit),
		"numRmaSig": unsafe.Offsetof(c.NumRMASignals), "rmaEagerInit": unsafe.Offsetof(c.RMAEagerInit), "hostCftMode": unsafe.Offsetof(c.HostCFTMode),
		"nvlsHostMode": unsafe.Offsetof(c.NVLSHostMode), "sizeof": unsafe.Sizeof(c),
		"team": unsafe.Sizeof(Team{}), "id": unsafe.Sizeof(UniqueID{}),
	}
	want := map[string]uintptr{
		"size": 0, "magic": 8, "version": 12, "blocking": 16, "cgaClusterSize": 20, "minCTAs": 24, "maxCTAs": 28, "netName": 32, "splitShare": 40, "trafficClass": 44,
		"commName": 48, "collnetEnable": 56, "CTAPolicy": 60, "shrinkShare": 64, "nvlsCTAs": 68, "nChannelsPerNetPeer": 72, "nvlinkCentricSched": 76,
		"graphUsageMode": 80, "numRmaCtx": 84, "maxP2pPeers": 88, "graphStreamOrdering": 92, "launchOrderImplicit": 96, "numRmaSig": 100, "rmaEagerInit": 104,
		"hostCftMode": 108, "nvlsHostMode": 112, "sizeof": 120,
		"team": 12, "id": 128,
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("layouts (-got +want):\n%s", diff)
	}
	// Every setting of a new Config is undefined.
	n := reflect.ValueOf(NewConfig().configLayout)
	for i := range n.NumField() {
		if f := n.Type().Field(i); f.IsExported() && n.Field(i).Int() != Undef {
			t.Errorf("%s = %d, want Undef", f.Name, n.Field(i).Int())
		}
	}
}

func TestSettings(t *testing.T) {
	look := func(set map[string]string) gpulib.Lookup {
		return func(n string) (string, string) {
			if v, ok := set[n]; ok {
				return v, "environment"
			}
			return "", ""
		}
	}
	tests := []struct {
		v      *Vendor
		set    map[string]string
		graphs bool
		refuse string
		warn   int
	}{
		{NCCL, map[string]string{}, true, "", 0},
		{NCCL, map[string]string{"NCCL_LEGACY_CUDA_REGISTER": "1"}, false, "NCCL_LEGACY_CUDA_REGISTER=1: it registers memory", 0},
		{NCCL, map[string]string{"NCCL_LEGACY_CUDA_REGISTER": "0"}, false, "", 0},
		{NCCL, map[string]string{"NCCL_COMM_ID": "h:1"}, false, "NCCL_COMM_ID=h:1: every unique id", 0},
		{NCCL, map[string]string{"NCCL_LAUNCH_MODE": "group"}, true, "NCCL_LAUNCH_MODE=group", 0},
		{NCCL, map[string]string{"NCCL_LAUNCH_MODE": "GROUP"}, false, "", 1},
		{NCCL, map[string]string{"NCCL_LAUNCH_MODE": "PARALLEL", "NCCL_GRAPH_REGISTER": "1", "NCCL_CUMEM_ENABLE": "1"}, true, "", 0},
		{NCCL, map[string]string{"NCCL_GRAPH_REGISTER": "0", "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}, true, "", 3},
		{RCCL, map[string]string{"NCCL_COMM_ID": "h:1"}, false, "NCCL_COMM_ID", 0},
		{MCCL, map[string]string{"MCCL_LEGACY_MUSA_REGISTER": "1"}, false, "MCCL_LEGACY_MUSA_REGISTER=1", 0},
		{MCCL, map[string]string{"NCCL_COMM_ID": "h:1", "NCCL_LEGACY_CUDA_REGISTER": "1"}, true, "", 0},
		{MCCL, map[string]string{"MCCL_LOCAL_REGISTER": "0"}, true, "", 1},
	}
	for _, tt := range tests {
		warn, err := gpulib.CheckSettings(tt.v.Settings(), look(tt.set), tt.graphs)
		if tt.refuse == "" && err != nil || tt.refuse != "" && (err == nil || !strings.Contains(err.Error(), tt.refuse)) {
			t.Errorf("%s %v: error %v, want %q", tt.v.Name, tt.set, err, tt.refuse)
		}
		if len(warn) != tt.warn {
			t.Errorf("%s %v: warnings %v, want %d", tt.v.Name, tt.set, warn, tt.warn)
		}
	}
}

func TestSettingsFromFiles(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv("NCCL_CONF_FILE", "")
	t.Setenv("NCCL_DEBUG", "")
	conf := filepath.Join(home, ".nccl.conf")
	if err := os.WriteFile(conf, []byte("# mine\nNCCL_COMM_ID = host:5 # old\nNCCL_DEBUG=INFO\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := gpulib.CheckSettings(NCCL.Settings(), NCCL.Lookup(), false)
	if err == nil || !strings.Contains(err.Error(), "NCCL_COMM_ID=host:5 ("+conf+"): every unique id") {
		t.Errorf("error = %v, want the file named", err)
	}
	if v, from := NCCL.Lookup()("NCCL_DEBUG"); v != "" || from != "environment" {
		t.Errorf("NCCL_DEBUG = %q from %q, want the environment's empty value", v, from)
	}
	other := filepath.Join(home, "other.conf")
	if err := os.WriteFile(other, []byte("NCCL_LEGACY_CUDA_REGISTER=1"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("NCCL_CONF_FILE", other)
	_, err = gpulib.CheckSettings(NCCL.Settings(), NCCL.Lookup(), false)
	if err == nil || !strings.Contains(err.Error(), other) || strings.Contains(err.Error(), "COMM_ID") {
		t.Errorf("error = %v, want only the other file's", err)
	}
}

func TestParseConf(t *testing.T) {
	got := parseConf("A=1\n B = two words \n#C=3\nD=4#x\nA=9\nnothing\n=5\nE=a=b\r\n")
	want := map[string]string{"A": "1", "B": "two words", "D": "4", "E": "a=b"}
	if diff := cmp.Diff(got, want, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
}

func FuzzParseConf(f *testing.F) {
	f.Add("A=1\n#B=2\n")
	f.Add("=\n==\n a = b # c")
	f.Fuzz(func(t *testing.T, s string) {
		for k, v := range parseConf(s) {
			if k == "" || strings.ContainsAny(k, "=#\n") || strings.ContainsAny(v, "#\n") {
				t.Errorf("%q gives %q=%q", s, k, v)
			}
		}
	})
}

func TestHotCallsAllocateNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop items on purpose")
	}
	f := newFake(t, NCCL, Newest)
	l := f.Library
	for name, fn := range map[string]func(){
		"AllReduce":      func() { l.AllReduce(1, 2, 3, Float32, Sum, comm, stream) },
		"Reduce":         func() { l.Reduce(1, 2, 3, Float32, Sum, 0, comm, stream) },
		"Broadcast":      func() { l.Broadcast(1, 2, 3, Float32, 0, comm, stream) },
		"AllGather":      func() { l.AllGather(1, 2, 3, Float32, comm, stream) },
		"ReduceScatter":  func() { l.ReduceScatter(1, 2, 3, Float32, Sum, comm, stream) },
		"Send":           func() { l.Send(1, 2, Float32, 0, comm, stream) },
		"Group":          func() { l.GroupStart(); l.GroupEnd() },
		"CommAsyncError": func() { l.CommAsyncError(comm) },
	} {
		f.log()
		if got := testing.AllocsPerRun(100, fn); got != 0 {
			t.Errorf("%s: %v allocations, want 0", name, got)
		}
	}
	f.log()
	f.failNext(ErrInProgress)
	if got := testing.AllocsPerRun(100, func() { l.AllReduce(1, 2, 3, Float32, Sum, comm, stream) }); got != 0 {
		t.Errorf("in progress: %v allocations, want 0", got)
	}
}

func BenchmarkAllReduceCall(b *testing.B) {
	f := newFake(b, NCCL, Newest)
	reset := f.lib.Lookup("fake_reset")
	b.ReportAllocs()
	for b.Loop() {
		f.AllReduce(1, 2, 3, Float32, Sum, comm, stream)
		reset.Call3(0, 0, 0)
	}
}
