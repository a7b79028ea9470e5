package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// buffers of a trial: two halves of one allocation at 0x100000.
func newTrial(mode nccl.Mode, lines ...string) *trial {
	t := &trial{memory: "nccl.Alloc", call: "all-gather, captured", mode: mode, reason: "why", version: 22803, closing: "Window.Close", operations: 7,
		sends: span{0x100000, 0x1000, 0x100000, 0x2000}, recvs: span{0x101000, 0x1000, 0x100000, 0x2000}}
	at := atCall
	for _, l := range lines {
		if n, err := strconv.Atoi(l); err == nil {
			at = stage(n)
			continue
		}
		e, ok := parseLine(t.version, "h:1:1 [0] NCCL INFO "+l)
		if !ok {
			panic("not a line about registration: " + l)
		}
		t.events = append(t.events, seen{e, at})
	}
	return t
}

func TestJudge(t *testing.T) {
	const (
		reg     = "rank 0 - IPC register buffer 0x101000 size 4096 (baseAddr 0x100000 size 8192) to peer 1 regAddr 0x7f"
		regTwo  = "rank 0 - IPC register buffer 0x101000 size 4096 (baseAddr 0x100000 size 8192) to peer 2 regAddr 0x7f"
		dereg   = "rank 0 - IPC deregistered buffer 0x100000 peer 1 ipc remote buffer 0x7f"
		deregAt = "rank 0 - IPC deregistered buffer 0x200000 peer 1 ipc remote buffer 0x7f"
		refusal = "rank 0 failed to IPC register userbuff 0x101000 buffSize 4096 nPeers 1 isLegacyIpc 0 type POSIX_FD"
		list    = "register comm 0x5 buffer 0x100000 size 8192"
		nvls    = "rank 0 successfully registered NVLS sendbuff 0x100000, recvbuff 0x101000, sendbuff size 1, recvbuff size 1, reg sendbuff 0x900000, reg recvbuff 0x901000"
		nvlsBad = "rank 0 - NVLS deregistered buffer 0x100000 on device 0 ucsize 1 mcsize 1" // an address that it did not have
		kept    = "rank 0 deregister IPC buffer 0x100000 peerRank 1 failed"
		nvlsEnd = "rank 0 - NVLS deregistered buffer 0x900000 on device 0 ucsize 1 mcsize 1"
		net     = "rank 0 - NET register userbuff 0x100000 (handle 0xaa), buffSize 4096"
		netEnd  = "rank 0 - deregistered net buffer handle 0xaa"
		odd     = "rank 0 - IPC registriert buffer 0x101000"
	)
	type got struct{ Registered, Released, Problem string }
	for _, tt := range []struct {
		name       string
		trial      *trial
		send, recv got
	}{
		{"graph closed", newTrial(nccl.Graph, list, reg, "1", dereg), got{"noted", "", ""}, got{"graph, IPC", "graph closed", ""}},
		{"operations", newTrial(nccl.Graph, reg, "1", "3", dereg), got{"none", "", ""}, got{"graph, IPC", "after 7 operations", ""}},
		{"drain", newTrial(nccl.Graph, reg, "4", dereg), got{"none", "", ""}, got{"graph, IPC", "Comm.Drain", ""}},
		{"finalize", newTrial(nccl.Graph, reg, "5", dereg), got{"none", "", ""}, got{"graph, IPC", "at finalize", ""}},
		{"explicit", newTrial(nccl.Local, list, reg, "2", dereg), got{"noted", "", ""}, got{"local, IPC", "Window.Close", ""}},
		{"kept", newTrial(nccl.Graph, reg), got{"none", "", ""}, got{"graph, IPC", "NOT RELEASED", "the library has not given the registration back"}},
		{"other memory's end", newTrial(nccl.Graph, reg, "1", deregAt), got{"none", "", ""}, got{"graph, IPC", "NOT RELEASED", "the library has not given the registration back"}},
		{"one of two peers kept", newTrial(nccl.Graph, reg, regTwo, "1", dereg), got{"none", "", ""}, got{"graph, IPC", "NOT RELEASED", "the library has not given the registration back"}},
		{"both by switch", newTrial(nccl.Graph, nvls, "1", nvlsEnd), got{"graph, NVLS", "graph closed", ""}, got{"graph, NVLS", "graph closed", ""}},
		{"by switch, another's end", newTrial(nccl.Graph, nvls, "1", nvlsBad), got{"graph, NVLS", "NOT RELEASED", "the library has not given the registration back"},
			got{"graph, NVLS", "NOT RELEASED", "the library has not given the registration back"}},
		{"an end that failed", newTrial(nccl.Graph, reg, "1", kept), got{"none", "", ""}, got{"graph, IPC", "NOT RELEASED", "the library has not given the registration back"}},
		{"by network", newTrial(nccl.Graph, net, "1", netEnd), got{"graph, network", "graph closed", ""}, got{"none", "", ""}},
		{"refused", newTrial(nccl.Graph, refusal), got{"none", "", "expected graph, and the log shows no registration"}, got{"refused", "", "expected graph, and the log shows no registration"}},
		{"nothing", newTrial(nccl.Local), got{"none", "", "expected local, and the log shows no registration"}, got{"none", "", "expected local, and the log shows no registration"}},
		{"list only", newTrial(nccl.Local, list), got{"noted", "", "expected local, and the log shows no registration"}, got{"noted", "", "expected local, and the log shows no registration"}},
		{"plain", newTrial(nccl.Plain, refusal), got{"none", "", ""}, got{"refused", "", ""}},
		{"plain, and registered", newTrial(nccl.Plain, reg, "1", dereg), got{"none", "", ""}, got{"plain, IPC", "graph closed", "the library registered memory that was not to be registered"}},
		{"unknown form", newTrial(nccl.Graph, odd), got{"unknown", "", "the line is not known for NCCL 2.28.3"}, got{"unknown", "", "the line is not known for NCCL 2.28.3"}},
		{"unknown form beside a known one", newTrial(nccl.Graph, reg, odd, "1", dereg), got{"unknown", "", "the line is not known for NCCL 2.28.3"}, got{"graph, IPC", "graph closed", ""}},
		{"window", func() *trial { t := newTrial(nccl.Window); t.windows = true; return t }(), got{"window", "Window.Close", ""}, got{"window", "Window.Close", ""}},
		{"window not used", newTrial(nccl.Window, list), got{"noted", "", "expected window, and the log shows no registration"}, got{"noted", "", "expected window, and the log shows no registration"}},
		{"small", func() *trial { t := newTrial(nccl.Graph); t.small = true; return t }(), got{"none", "", ""}, got{"none", "", ""}},
		{"small, window not used", func() *trial { t := newTrial(nccl.Window); t.small = true; return t }(), got{"none", "", "expected window, and the log shows no registration"}, got{"none", "", "expected window, and the log shows no registration"}},
		{"not taken", &trial{err: errors.New("private memory")}, got{"refused", "", ""}, got{"refused", "", ""}},

		{"host", &trial{host: true, mode: nccl.Graph, after: counters{direct: 8}, released: atGraphClose}, got{"graph, shared memory", "graph closed", ""}, got{"graph, shared memory", "graph closed", ""}},
		{"host, staged", &trial{host: true, mode: nccl.Local, after: counters{direct: 4, staged: 4}, released: atClose, closing: "x"},
			got{"none", "x", "expected local: of 8 bytes 4 went through staging copies"}, got{"none", "x", "expected local: of 8 bytes 4 went through staging copies"}},
		{"host, plain", &trial{host: true, mode: nccl.Plain, after: counters{staged: 8}}, got{"none", "", ""}, got{"none", "", ""}},
		{"host, plain and straight", &trial{host: true, mode: nccl.Plain, after: counters{direct: 8}},
			got{"plain", "", "data went straight between buffers that were not to be registered"}, got{"plain", "", "data went straight between buffers that were not to be registered"}},
		{"host, kept", &trial{host: true, mode: nccl.Window, after: counters{direct: 8}, released: notReleased},
			got{"window", "NOT RELEASED", "the registration was not given back"}, got{"window", "NOT RELEASED", "the registration was not given back"}},
	} {
		rows := tt.trial.judge(0)
		for i, want := range []got{tt.send, tt.recv} {
			r := rows[i]
			if d := cmp.Diff(got{r.Registered, r.Released, r.Problem}, want); d != "" {
				t.Errorf("%s, %s: got - want +:\n%s", tt.name, r.Buffer, d)
			}
		}
	}
}

func TestRegistrationReport(t *testing.T) {
	r := &registrationReport{Ranks: 3, Device: "CUDA device 0 (NVIDIA H200)", Library: "NCCL", Version: "2.28.3", Path: "/lib/libnccl.so.2", Known: true}
	for rank := range 3 {
		r.Rows = append(r.Rows,
			row{Memory: "private", Call: "all-gather, captured", Buffer: "send", Rank: rank, Mode: "plain", Registered: regRefused, Reason: "private memory", Line: fmt.Sprintf("rank %d failed to IPC register", rank)},
			row{Memory: "nccl.Alloc", Call: "all-gather, captured", Buffer: "recv", Rank: rank, Mode: "graph", Registered: "graph, IPC", Released: "graph closed", Line: "x"})
	}
	r.Rows[5].Released, r.Rows[5].Problem = "NOT RELEASED", "the library has not given the registration back"
	r.tellProblems()
	var b bytes.Buffer
	if err := r.write(&b, false); err != nil {
		t.Fatal(err)
	}
	want := `Registration on 3 ranks, rank 0 on CUDA device 0 (NVIDIA H200); by the log of NCCL 2.28.3 (/lib/libnccl.so.2)

memory      call                  buffer  ranks  mode   registered  released
private     all-gather, captured  send    all    plain  refused     -
nccl.Alloc  all-gather, captured  recv    0,1    graph  graph, IPC  graph closed
nccl.Alloc  all-gather, captured  recv    2      graph  graph, IPC  NOT RELEASED

private, all-gather, captured: refused: private memory; NCCL: rank 0 failed to IPC register

fault: rank 2: nccl.Alloc, all-gather, captured: the library has not given the registration back
       Comm.Drain, or a new communicator, gives it back; if it is not among the known faults (nccl.Explain), report it
`
	if d := cmp.Diff(b.String(), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}

	r.Known = false
	r.tellProblems()
	if got := r.Problems[0].What; got != "the log of NCCL 2.28.3 is not known to this gorun; what it shows is not proven" {
		t.Errorf("got %q", got)
	}
}

func TestCheckCommandLines(t *testing.T) {
	for _, tt := range []struct {
		args string
		code int
		out  string
		err  string
	}{
		{"registration -h", 0, registrationHelp, ""},
		{"probe --help", 0, probeHelp, ""},
		{"registration -frob", 2, "", "gorun-bench registration: flag provided but not defined: -frob; -h shows the flags\n"},
		{"registration x", 2, "", "gorun-bench registration: unexpected argument \"x\"; -h shows the flags\n"},
		{"probe x", 2, "", "gorun-bench probe: unexpected argument \"x\"; -h shows the flags\n"},
		{"registration", 1, "", "gorun-bench: one rank registers nothing: the check needs two (-np 2, with a GPU for each; GORUN_DEVICE=host checks the host platform)\n"},
	} {
		var out, errs bytes.Buffer
		code := realMain(t.Context(), strings.Fields(tt.args), &out, &errs)
		if code != tt.code || out.String() != tt.out || errs.String() != tt.err {
			t.Errorf("%s: code %d, want %d; stdout %q, stderr %q", tt.args, code, tt.code, out.String(), errs.String())
		}
	}
}

// checkOnRanks runs the check on two ranks; the report of rank 0 is its last line of output.
func checkOnRanks(t *testing.T, token func(*bootstrap.Job) string, env ...string) *registrationReport {
	t.Helper()
	dir := t.TempDir()
	results := ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dir := filepath.Join(dir, "100%", strconv.Itoa(job.Rank()))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		log, err := newLibraryLog(dir)
		if err != nil {
			return err
		}
		dev, err := cuda.Open(token(job))
		if err != nil {
			return err
		}
		rep, err := checkRegistration(ctx, job, dev, log)
		if err = errors.Join(err, dev.Close()); err != nil {
			return err
		}
		b, err := json.Marshal(rep)
		if job.Rank() == 0 {
			fmt.Printf("\nreport %s\n", b)
		}
		return err
	}, env...)
	for _, r := range results {
		if r.Code != 0 {
			t.Errorf("%v\n%s", r, r.Err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	_, text, ok := strings.Cut(results[0].Output, "\nreport ")
	text, _, _ = strings.Cut(text, "\n")
	rep := &registrationReport{}
	if err := json.Unmarshal([]byte(text), rep); !ok || err != nil {
		t.Fatalf("no report (%v) in:\n%s", err, results[0].Output)
	}
	return rep
}

// summary is one line a buffer that has a registration, and one for a problem.
func summary(rep *registrationReport) []string {
	var lines []string
	for _, g := range rep.table() {
		if w := g[0]; w.really() || len(g) < rep.Ranks {
			lines = append(lines, fmt.Sprintf("%s, %s, %s: %s, %s", w.Memory, w.Call, w.Buffer, w.Registered, w.Released))
		}
	}
	for _, p := range rep.Problems {
		lines = append(lines, fmt.Sprintf("%v %s", p.Ranks, p.What))
	}
	return lines
}

func TestRegistrationHost(t *testing.T) {
	rep := checkOnRanks(t, func(*bootstrap.Job) string { return "host" })
	want := []string{}
	for _, row := range []string{
		"nccl.Alloc, all-gather, captured, %s: graph, shared memory, graph closed",
		"nccl.Alloc, all-gather, registered, %s: local, shared memory, Registration.Close",
		"arena, all-gather, captured, %s: local, shared memory, Arena.Close",
		"window, all-gather, captured, %s: window, Window.Close",
		"small nccl.Alloc, all-gather, captured, %s: window, graph closed",
		"nccl.Alloc, send and recv, captured, %s: graph, shared memory, graph closed",
	} {
		want = append(want, fmt.Sprintf(row, "send"), fmt.Sprintf(row, "recv"))
	}
	if d := cmp.Diff(summary(rep), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

func localRank(job *bootstrap.Job) string { return dltest.DeviceOf(job.LocalRank()) }

// inLibrary are the rows of a library that registers the receive buffers of collectives and both of messages, as NCCL does within a host.
func inLibrary(released string) []string {
	return []string{
		"nccl.Alloc, all-gather, captured, recv: graph, IPC, " + released,
		"nccl.Alloc, all-gather, registered, recv: local, IPC, " + "Registration.Close",
		"arena, all-gather, captured, recv: graph, IPC, " + released,
		"window, all-gather, captured, send: window, Window.Close",
		"window, all-gather, captured, recv: window, Window.Close",
		"small nccl.Alloc, all-gather, captured, send: window, at a later capture",
		"small nccl.Alloc, all-gather, captured, recv: window, at a later capture",
		"nccl.Alloc, send and recv, captured, send: graph, IPC, " + released,
		"nccl.Alloc, send and recv, captured, recv: graph, IPC, " + released,
	}
}

func TestRegistrationLibrary(t *testing.T) {
	none := []string{}
	for _, what := range []string{"nccl.Alloc, all-gather, captured: expected graph", "nccl.Alloc, all-gather, registered: expected local",
		"arena, all-gather, captured: expected graph", "window, all-gather, captured: expected window", "small nccl.Alloc, all-gather, captured: expected window", "nccl.Alloc, send and recv, captured: expected graph"} {
		none = append(none, "[0 1] "+what+", and the log shows no registration")
	}
	for _, tt := range []struct {
		name, words string
		build       []string
		want        []string
	}{
		{name: "well", want: inLibrary("graph closed")},
		{name: "registers nothing", words: "reg-none", want: none},
		{name: "gives nothing back", words: "reg-leak", want: []string{
			"nccl.Alloc, all-gather, captured, recv: graph, IPC, NOT RELEASED",
			"nccl.Alloc, all-gather, registered, recv: local, IPC, NOT RELEASED",
			"arena, all-gather, captured, recv: graph, IPC, NOT RELEASED",
			"window, all-gather, captured, send: window, Window.Close",
			"window, all-gather, captured, recv: window, Window.Close",
			"small nccl.Alloc, all-gather, captured, send: window, at a later capture",
			"small nccl.Alloc, all-gather, captured, recv: window, at a later capture",
			"nccl.Alloc, send and recv, captured, send: graph, IPC, NOT RELEASED",
			"nccl.Alloc, send and recv, captured, recv: graph, IPC, NOT RELEASED",
			"[0 1] nccl.Alloc, all-gather, captured: the library has not given the registration back",
			"[0 1] nccl.Alloc, all-gather, registered: the library has not given the registration back",
			"[0 1] arena, all-gather, captured: the library has not given the registration back",
			"[0 1] nccl.Alloc, send and recv, captured: the library has not given the registration back",
		}},
		{name: "a version not known", build: []string{"-DVERSION=23206"}, want: slices.Concat(inLibrary("graph closed"),
			[]string{"[] the log of NCCL 2.32.6 is not known to this gorun; what it shows is not proven"})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var env []string
			if os.Getenv("GORUN_TEST_FAKE") == "" {
				driver := dltest.Build(t, "../../cuda/testdata/driver.c", "libcuda.so.1", "-lpthread")
				library := dltest.Build(t, "../../nccl/testdata/nccl.c", "libnccl.so.2", append([]string{"-lpthread", "-ldl"}, tt.build...)...)
				env = []string{"GORUN_TEST_FAKE=1", "GORUN_CUDA_LIB=" + driver, "GORUN_NCCL_LIB=" + library, "FAKE_DEVICES=2", "FAKE_NCCL=" + tt.words}
			}
			rep := checkOnRanks(t, localRank, env...)
			if d := cmp.Diff(summary(rep), tt.want); d != "" {
				t.Errorf("got - want +:\n%s", d)
			}
			if want := tt.build == nil; rep.Known != want || rep.Library != "NCCL" {
				t.Errorf("%s %s: its log is known: %v, want %v", rep.Library, rep.Version, rep.Known, want)
			}
		})
	}
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedOwnGPUs(t, 2)
		rep := checkOnRanks(t, localRank, dltest.GPUEnv()...)
		if len(rep.Problems) > 0 {
			t.Errorf("%+v", rep)
		}
	})
}
