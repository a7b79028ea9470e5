package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Lines as these versions write them. 0 is a line that does not concern the check.
var recordedLines = []struct {
	version version
	line    string
	want    logEvent // without Text
}{
	{22104, "node-a:77:77 [0] NCCL INFO rank 0 successfully local-registered NVLS sendbuff 0x7f0000200000, recvbuff 0x7f0000400000, sendbuff size 1048576, recvbuff size 1048576, reg sendbuff 0x1, reg recvbuff 0x2",
		logEvent{Kind: registered, Way: wayNVLS, Peer: -1, Addr: [2]uint64{0x7f0000200000, 0x7f0000400000}, MC: [2]uint64{1, 2}}},
	{21903, "node-a:77:77 [0] NCCL INFO rank 2 successfully graph-registered sendbuff 0x7f0000200000, recvbuff 0x7f0000400000, sendbuff size 4 (register size 2097152, sendGran 2097152), recvbuff size 4 (register size 2097152, recvGran 2097152), reg sendbuff 0x1, reg recvbuff 0x2",
		logEvent{Kind: registered, Way: wayNVLS, Rank: 2, Peer: -1, Addr: [2]uint64{0x7f0000200000, 0x7f0000400000}, MC: [2]uint64{1, 2}}},
	{22205, "node-a:77:90 [3] NCCL INFO rank 3 - deregistered buffer 0x7f0000200000 on device 3, size 2097152",
		logEvent{Kind: deregistered, Way: wayNVLS, Rank: 3, Peer: -1, Addr: [2]uint64{0x7f0000200000}}},
	{22105, "node-a:77:77 [0] NCCL INFO rank 1 successfully registered collNet sendbuff 0x7f0000200000 (handle 0x55aa), sendbuff size 64, recvbuff 0x7f0000400000 (handle 0x55bb), recvbuff size 64",
		logEvent{Kind: registered, Way: waySHARP, Rank: 1, Peer: -1, Addr: [2]uint64{0x7f0000200000, 0x7f0000400000}, Handle: 0x55aa, Size: 64}},

	{22304, "node-a:77:77 [0] NCCL INFO register comm 0x5566 buffer 0x7f0000200000 size 16777216", logEvent{Kind: noted, Rank: -1, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Size: 16777216}},
	{22304, "node-a:77:77 [0] NCCL INFO rank 0 - IPC graph register buffer 0x7f0000200000 size 16777216 (baseAddr 0x7f0000200000 size 16777216) to peer 1 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}, Size: 16777216}},
	{22304, "node-a:77:77 [0] NCCL INFO rank 0 - IPC local register buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 16777216) to peer 1 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{22304, "node-a:77:78 [0] NCCL INFO Proxy rank 1 register succeeds, regAddr 0x7f1000000000 size 64 offset 0 legacyIpcCap 0 sameProcess 0", logEvent{}},

	{22403, "node-a:77:77 [1] NCCL INFO rank 1 - IPC register buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 0 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Rank: 1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{22403, "node-a:77:77 [1] transport/p2p.cc:942 NCCL WARN rank 1 failed to IPC register userbuff 0x7f0000200000 buffSize 64 nPeers 1 isLegacyIpc (nil)",
		logEvent{Kind: refused, Way: wayIPC, Rank: 1, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{22403, "node-a:77:77 [1] NCCL INFO rank 1 successfully registered NVLS sendbuff (nil), recvbuff 0x7f0000400000, sendbuff size 0, recvbuff size 64, reg sendbuff (nil), reg recvbuff 0x2",
		logEvent{Kind: registered, Way: wayNVLS, Rank: 1, Peer: -1, Addr: [2]uint64{0, 0x7f0000400000}, MC: [2]uint64{0, 2}}},
	{22403, "node-a:77:77 [1] NCCL INFO rank 1 - NVLS deregistered buffer 0x7f0000400000 on device 1, size 2097152",
		logEvent{Kind: deregistered, Way: wayNVLS, Rank: 1, Peer: -1, Addr: [2]uint64{0x7f0000400000}}},
	{22403, "node-a:77:77 [1] NCCL INFO rank 1 - COLLNET register userbuff 0x7f0000400000 (handle 0x55aa), buffSize 64, type Recv",
		logEvent{Kind: registered, Way: waySHARP, Rank: 1, Peer: -1, Addr: [2]uint64{0x7f0000400000}, Handle: 0x55aa}},

	{22603, "node-a:77:77 [0] NCCL INFO rank 0 - IPC registering buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 1", logEvent{}},
	{22603, "node-a:77:77 [0] NCCL INFO rank 0 - IPC registered buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 1 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{22603, "node-a:77:77 [0] NCCL INFO rank 0 failed to NVLS register sendbuff 0x7f0000200000 sendbuffSize 64 recvbuff 0x7f0000400000 recvbuffSize 64",
		logEvent{Kind: refused, Way: wayNVLS, Peer: -1, Addr: [2]uint64{0x7f0000200000, 0x7f0000400000}, Size: 64}},

	{22803, "node-a:77:77 [0] NCCL INFO rank 0 - IPC register buffer 0x7f0000200000 size 16777216 (baseAddr 0x7f0000200000 size 16777216) to peer 1 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}, Size: 16777216}},
	{22803, "node-a:77:77 [0] NCCL INFO rank 0 - IPC reuse buffer 0x7f0000200400 size 64 (baseAddr 0x7f0000200000 size 16777216) to peer 1 regAddr 0x7f1000000000",
		logEvent{Kind: reused, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200400}, Size: 64}},
	{22803, "[2026-11-29 20:00:00] node-a:77:77 [0] NCCL INFO rank 0 - IPC deregistered buffer 0x7f0000200000 peer 1 ipc remote buffer 0x7f1000000000",
		logEvent{Kind: deregistered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}}},
	{22803, "node-a:77:77 [1] NCCL INFO rank 1 failed to IPC register userbuff 0x7f0000200000 buffSize 16777216 nPeers 1 isLegacyIpc 0 type POSIX_FD",
		logEvent{Kind: refused, Way: wayIPC, Rank: 1, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Size: 16777216}},
	{22803, "node-a:77:77 [0] NCCL INFO AllGather [Symmetric]: 16777216 Bytes -> Kernel AllGather_LL nchannels 9 nthreads 512 nWorks 1", logEvent{Kind: inWindow, Rank: -1, Peer: -1}},
	{22803, "node-a:77:77 [0] NCCL INFO AllReduce: 16777216 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}", logEvent{}},
	{22803, "node-a:77:78 [0] NCCL INFO Proxy rank 1 register success regAddr 0x7f1000000000 size 16777216 offset 0 legacyIpcCap 0 sameProcess 0", logEvent{}},
	{22809, "node-a:77:77 [0] NCCL INFO Skipping registration for buffer 0x7f0000200000 size 64 (LocalRegister=0, P2pUsesMemcpy=0)",
		logEvent{Kind: refused, Rank: -1, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{22809, "node-a:77:77 [0] NCCL INFO rank 0 - NET register userbuff 0x7f0000200000 (handle 0x55aa), buffSize 64",
		logEvent{Kind: registered, Way: wayNet, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Handle: 0x55aa}},
	{22809, "node-a:77:77 [0] NCCL INFO rank 0 - deregistered net buffer handle 0x55aa", logEvent{Kind: deregistered, Way: wayNet, Peer: -1, Handle: 0x55aa}},
	{22809, "node-a:77:77 [0] NCCL INFO rank 0 failed to NET register userbuff 0x7f0000200000 buffSize 64 GDR flag 0",
		logEvent{Kind: refused, Way: wayNet, Peer: -1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},

	{22809, "node-a:77:77 [0] register/register.cc:94 NCCL WARN rank 0 deregister IPC buffer 0x7f0000200000 peerRank 1 failed",
		logEvent{Kind: notGivenBack, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}}},

	{23007, "node-a:77:77 [0] NCCL INFO rank 0 - IPC register buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 totalSize 2097152 numSegments 1) to peer 1 regAddr 0x7f1000000000 offsetOut 0",
		logEvent{Kind: registered, Way: wayIPC, Peer: 1, Addr: [2]uint64{0x7f0000200000}, Size: 64}},
	{23007, "node-a:77:77 [0] NCCL INFO AllGather [Copy Engine]: 16777216 Bytes -> cudaMemcpy", logEvent{Kind: inWindow, Rank: -1, Peer: -1}},
	{23007, "node-a:77:77 [0] NCCL INFO [0] Segment 0, Type : 1, numSegments : 1, Segment size : 2097152, memHandle : 1", logEvent{}},

	// A form of another version is told as unknown, not taken for what it resembles.
	{22803, "node-a:77:77 [0] NCCL INFO rank 0 - IPC registered buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 1", logEvent{Kind: unknownForm, Rank: -1, Peer: -1}},
	{23007, "node-a:77:77 [0] NCCL INFO rank 0 - IPC register buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 1", logEvent{Kind: unknownForm, Rank: -1, Peer: -1}},
	{22803, "node-a:77:77 [0] NCCL INFO rank x - IPC register buffer 0x7f0000200000 size 64 (baseAddr 0x7f0000200000 size 2097152) to peer 1", logEvent{Kind: unknownForm, Rank: -1, Peer: -1}},

	{22803, "node-a:77:77 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", logEvent{}},
	{22803, "rank 0 - IPC register buffer 0x7f0000200000", logEvent{}}, // not NCCL's
	{22803, "", logEvent{}},
}

func TestParseLine(t *testing.T) {
	for _, tt := range recordedLines {
		got, ok := parseLine(tt.version, tt.line+"\n")
		if ok != (tt.want.Kind != 0) {
			t.Errorf("%v: %s: concerns registration: %v", tt.version, tt.line, ok)
			continue
		}
		if ok && (got.Text == "" || !strings.HasSuffix(tt.line, got.Text)) {
			t.Errorf("%v: %s: text %q", tt.version, tt.line, got.Text)
		}
		got.Text = ""
		if !ok {
			got = logEvent{}
		}
		if d := cmp.Diff(got, tt.want); d != "" {
			t.Errorf("%v: %s: got - want +:\n%s", tt.version, tt.line, d)
		}
	}
}

// TestForms holds that of one version's forms no two read the same text, so that their order means nothing.
func TestForms(t *testing.T) {
	sample := strings.NewReplacer("{rank}", "1", "{peer}", "0", "{size}", "64", "{x}", "64", "{mc}", "0x4000", "{mc2}", "(nil)", "{buf}", "0x1000", "{buf2}", "0x2000", "{handle}", "0x3000")
	for _, v := range []version{21903, 22005, 22105, 22203, 22304, 22403, 22501, 22602, 22703, 22803, 22809, 22902, 22907, 23003, 23007} {
		n := 0
		for i, f := range forms {
			if v < f.from || v >= f.before {
				continue
			}
			n++
			text := sample.Replace(f.text) + " and more"
			for j, g := range forms {
				if _, ok := g.match(text); v >= g.from && v < g.before && ok != (i == j) {
					t.Errorf("%v: %q and %q: %q is read: %v", v, f.text, g.text, text, ok)
				}
			}
		}
		if n == 0 || !v.known() {
			t.Errorf("%v has %d forms, known: %v", v, n, v.known())
		}
	}
	for _, v := range []version{21805, 23008, 23206} {
		if v.known() {
			t.Errorf("%v is known", v)
		}
	}
}

func TestParseVersion(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want version
	}{{"2.28.3", 22803}, {"2.30.7", 23007}, {"2.28", 0}, {"2.28.3.1", 0}, {"", 0}, {"2.x.3", 0}, {"2.-1.3", 0}, {"2.128.3", 0}} {
		got, err := parseVersion(tt.in)
		if got != tt.want || (err == nil) != (tt.want != 0) {
			t.Errorf("%q: got %v, %v; want %v", tt.in, got, err, tt.want)
		}
		if err == nil && got.String() != tt.in {
			t.Errorf("%q comes back as %q", tt.in, got)
		}
	}
}

func FuzzParseLine(f *testing.F) {
	for _, l := range recordedLines {
		f.Add(int(l.version), l.line)
	}
	f.Add(22803, "NCCL INFO  NCCL INFO rank 99999999999999999999 - IPC deregistered buffer 0xfffffffffffffffffff peer 1")
	f.Fuzz(func(t *testing.T, v int, line string) {
		e, ok := parseLine(version(v), line)
		if !ok {
			return
		}
		if e.Kind == 0 || e.Kind > unknownForm || e.Rank < -1 || e.Peer < -1 || !strings.Contains(line, e.Text) {
			t.Errorf("%d: %q: %+v", v, line, e)
		}
		if (e.Kind == registered || e.Kind == reused) && (e.Way == "" || e.Rank < 0) {
			t.Errorf("%d: %q: registered, nothing is known of it: %+v", v, line, e)
		}
	})
}

// TestRecordedLogs goes through what rank 0 of two wrote in a whole run of the check, on two H200: nothing is unknown, and what was registered was given back.
func TestRecordedLogs(t *testing.T) {
	files, err := filepath.Glob("testdata/registration/nccl-*.log")
	if err != nil || len(files) < 2 {
		t.Fatalf("recorded logs: %v %v", files, err)
	}
	for _, file := range files {
		v, err := parseVersion(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "nccl-"), ".log"))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		count := map[eventKind]int{}
		open := map[uint64]int{} // by the head of the allocation, which is that of the range noted last
		var head uint64
		for line := range strings.Lines(string(b)) {
			e, ok := parseLine(v, line)
			if !ok || e.Rank > 0 {
				t.Errorf("%s: %s: %v, rank %d", file, line, ok, e.Rank)
			}
			count[e.Kind]++
			switch e.Kind {
			case noted:
				head = e.Addr[0]
			case registered:
				open[head]++
			case deregistered:
				open[e.Addr[0]]--
			}
		}
		if d := cmp.Diff(count, map[eventKind]int{noted: 10, refused: 1, registered: 5, deregistered: 5, inWindow: 1}); d != "" {
			t.Errorf("%s: got - want +:\n%s", file, d)
		}
		for addr, n := range open {
			if n != 0 {
				t.Errorf("%s: %#x: %d more registered than given back", file, addr, n)
			}
		}
	}
}
