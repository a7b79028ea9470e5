package nccl

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

func TestCompareFacts(t *testing.T) {
	good := func() []facts {
		var all []facts
		for _, id := range []string{"GPU-a", "GPU-b", "GPU-c"} {
			all = append(all, facts{Platform: "CUDA", Device: id, Model: "H200", Version: "NCCL 2.28.3", File: "libnccl.so.2.28.3", Settings: map[string]string{"NCCL_ALGO": "RING"}})
		}
		return all
	}
	cases := []struct {
		name   string
		change func(all []facts)
		want   string
	}{
		{"all well", func([]facts) {}, ""},
		{"hosts without devices", func(all []facts) {
			for i := range all {
				all[i] = facts{Platform: "host"}
			}
		}, ""},
		{"platform", func(all []facts) { all[2] = facts{Platform: "host"} }, "rank 2 has a host device, rank 0 a CUDA device"},
		{"version", func(all []facts) { all[1].Version, all[1].File = "NCCL 2.28.9", "libnccl.so.2" },
			"rank 1 has NCCL 2.28.9 (libnccl.so.2), rank 0 NCCL 2.28.3 (libnccl.so.2.28.3)"},
		{"device", func(all []facts) { all[2].Device = "GPU-b" }, "ranks 1 and 2 both have GPU-b (H200)"},
		{"a device, shared by what the library takes for two hosts", func(all []facts) { all[2].Device, all[2].HostID = "GPU-b", "other" }, ""},
		{"a device, shared by two of one such host", func(all []facts) { all[1].HostID, all[2].Device, all[2].HostID = "a", "GPU-b", "a" }, "ranks 1 and 2 both have GPU-b (H200)"},
		{"setting", func(all []facts) { all[1].Settings = map[string]string{"NCCL_ALGO": "TREE"} }, "rank 1 has NCCL_ALGO=TREE, rank 0 NCCL_ALGO=RING"},
		{"setting of one", func(all []facts) { all[2].Settings["NCCL_PROTO"] = "LL" }, "rank 2 has NCCL_PROTO=LL, rank 0 NCCL_PROTO unset"},
		{"setting that one lacks", func(all []facts) { all[1].Settings = nil }, "rank 1 has NCCL_ALGO unset, rank 0 NCCL_ALGO=RING"},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			all := good()
			tc.change(all)
			err := compareFacts(all)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) || !errors.Is(err, ErrMismatch) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestSettingsOf(t *testing.T) {
	t.Setenv("NCCL_CONF_FILE", "/nowhere")
	t.Setenv("NCCL_GRAPH_REGISTER", "0")
	got := settingsOf(ncclsys.NCCL, []string{"NCCL_ALGO=RING", "NCCL_DEBUG=INFO", "NCCL_DEBUG_FILE=/tmp/x", "NCCL_SOCKET_IFNAME=eth0", "PATH=/bin", "NCCL_EMPTY=", "MCCL_ALGO=TREE"})
	want := map[string]string{"NCCL_ALGO": "RING", "NCCL_EMPTY": "", "NCCL_GRAPH_REGISTER": "0"}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("got(-) want(+):\n%s", d)
	}
}

func TestAgreeWindow(t *testing.T) {
	a := windowOffer{off: 4096, len: 100, memory: 3}
	cases := []struct {
		name string
		b    windowOffer
		able bool
		is   error
	}{
		{"equal", windowOffer{off: 4096, len: 100, memory: 9}, true, nil},
		{"offset", windowOffer{off: 8192, len: 100}, false, ErrMismatch},
		{"length", windowOffer{off: 4096, len: 101}, false, ErrMismatch},
		{"unable", windowOffer{off: 4096, len: 100, unable: true, text: "NCCL 2.21"}, false, nil},
		{"wrong", windowOffer{text: "an empty range"}, false, ErrArgument},
		{"unable, and another offset", windowOffer{off: 0, len: 100, unable: true, text: "x"}, false, ErrMismatch},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			able, err := agreeWindow([]windowOffer{a, tc.b})
			if !errors.Is(err, tc.is) {
				t.Errorf("error %v, want %v", err, tc.is)
			}
			if err == nil && able != tc.able {
				t.Errorf("able %t", able)
			}
		})
	}
}

func FuzzWindowOffer(f *testing.F) {
	f.Add(windowOffer{off: 4096, len: 100, memory: 3, text: "x"}.encode())
	f.Add([]byte{2})
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := decodeWindowOffer(b)
		if err != nil {
			return
		}
		if got := o.encode(); string(got) != string(b) {
			t.Errorf("got %x, want %x", got, b)
		}
	})
}

func TestDependent(t *testing.T) {
	a, b := new(cuda.Memory), new(cuda.Memory)
	r := func(m *cuda.Memory, off uint64) cuda.Range { return cuda.Range{Mem: m, Off: off, Len: 100} }
	cases := []struct {
		name   string
		second Call
		want   bool
	}{
		{"apart", Call{Send: r(a, 200), Recv: r(b, 200)}, false},
		{"same send", Call{Send: r(a, 0), Recv: r(b, 200)}, false},
		{"reads the result", Call{Send: r(b, 50), Recv: r(b, 200)}, true},
		{"writes the source", Call{Send: r(a, 200), Recv: r(a, 99)}, true},
		{"writes the result", Call{Send: r(a, 200), Recv: r(b, 0)}, true},
	}
	for _, tc := range cases {
		if got := dependent([]Call{{Send: r(a, 0), Recv: r(b, 0)}, tc.second}); got != tc.want {
			t.Errorf("%s: %t", tc.name, got)
		}
	}
}

func TestWindowKeys(t *testing.T) {
	a, b := new(cuda.Memory), new(cuda.Memory) // of size 0
	layout := func(op Op, send, recv, size uint64) []byte {
		l := layoutCall{op: op, buffers: []layoutBuf{{flags: layoutSend, memory: send, memLen: size}, {memory: recv, memLen: size}}}
		return l.encodeForTest()
	}
	call := Call{Op: OpAllReduce, Count: 1, Send: cuda.Range{Mem: a}, Recv: cuda.Range{Mem: b}}
	got, whole, err := windowKeys([]Call{call}, [][]byte{layout(OpAllReduce, 1, 2, 0), layout(OpAllReduce, 7, 7, 0)})
	if err != nil || !whole {
		t.Fatalf("whole %t, error %v, want true and none", whole, err)
	}
	var ids []string
	for _, k := range got {
		ids = append(ids, k.ids)
	}
	if d := cmp.Diff(ids, []string{"1 7 ", "2 7 "}); d != "" {
		t.Errorf("got(-) want(+):\n%s", d)
	}
	if got, whole, err := windowKeys([]Call{call}, [][]byte{layout(OpAllReduce, 1, 2, 0), layout(OpAllReduce, 7, 7, 4096)}); got != nil || whole || err != nil {
		t.Errorf("sizes that differ: %v, %t, %v", got, whole, err)
	}
	call.Op = OpBroadcast
	if got, whole, err := windowKeys([]Call{call}, [][]byte{layout(OpBroadcast, 1, 2, 0), layout(OpBroadcast, 7, 7, 0)}); got != nil || whole || err != nil {
		t.Errorf("broadcast: %v, %t, %v", got, whole, err)
	}
	if _, _, err := windowKeys([]Call{call}, [][]byte{{1, 2}}); err == nil {
		t.Error("a broken layout is no error")
	}
}

func TestWindowLimit(t *testing.T) {
	for ranks, want := range map[int]uint64{1: 0, 2: 32 << 10, 3: 32 << 10, 4: 32 << 10, 5: 0, 8: 0} {
		if got := windowLimit(ranks); got != want {
			t.Errorf("%d ranks: got %d, want %d", ranks, got, want)
		}
	}
	for _, tc := range []struct {
		ranks int
		size  uint64
		want  string
	}{
		{2, 32, ""},
		{3, 32 << 10, ""},
		{2, 32<<10 + 1, "it would be of 32769 bytes, and with more than 32 KiB a call in it can be slower"},
		{4, 2 << 20, "it would be of 2 MiB, and with more than 32 KiB a call in it can be slower"},
		{8, 32, "whether windows are faster with 8 ranks was not measured"},
	} {
		if got := unasked(tc.ranks, tc.size); got != tc.want {
			t.Errorf("%d ranks, %d bytes: got %q, want %q", tc.ranks, tc.size, got, tc.want)
		}
	}
}

// encodeForTest is what Layout writes for one call.
func (c layoutCall) encodeForTest() []byte {
	b := []byte{layoutVersion, 1, 0, byte(c.op), 0, 0, 0, 0, byte(len(c.buffers))}
	for _, buf := range c.buffers {
		b = append(b, buf.flags, byte(cuda.Shareable))
		for _, w := range []uint64{buf.off, buf.len, buf.memory, buf.memLen, buf.window} {
			for i := range 8 {
				b = append(b, byte(w>>(8*i)))
			}
		}
	}
	return b
}
