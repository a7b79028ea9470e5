package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// TestPerfRecorded reads what nccl-tests 2.19.6 printed on two H200.
func TestPerfRecorded(t *testing.T) {
	for name, want := range map[string]map[uint64][]float64{
		"all_reduce_eager.txt":    {8: {7.29}, 64: {8.75}, 512: {7.95}, 4096: {8.26}, 32768: {9.05}, 262144: {8.83}, 2097152: {28.33}, 16777216: {80.70}},
		"all_reduce_captured.txt": {8: {5.81}, 64: {5.96}, 512: {6.06}, 4096: {6.32}, 32768: {7.08}, 262144: {8.46}, 2097152: {28.84}, 16777216: {71.55}},
	} {
		f, err := os.Open(filepath.Join("testdata", "peers", name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		got, err := parsePerf(f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d := cmp.Diff(got.us, want); d != "" || got.tests != "2.19.6" || got.library != "2.28.3" {
			t.Errorf("%s: nccl-tests %s, NCCL %s; times got - want +:\n%s", name, got.tests, got.library, d)
		}
	}
}

func TestPerf(t *testing.T) {
	const head = "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong\n"
	for _, tt := range []struct {
		name, text string
		want       map[uint64][]float64
		err        string
	}{
		{name: "without a check, in cycles", text: head + "  64  8  float  none  -1  5.50  0 0 N/A  6 0 0 N/A\n 512 64 float none -1 6 0 0 N/A 1 0 0 N/A\n 64 8 float none -1 6.50 0 0 N/A 6 0 0 N/A\n",
			want: map[uint64][]float64{64: {5.5, 6.5}, 512: {6}}},
		{name: "calls on nothing", text: head + " 0 0 float sum -1 3.1 0 0 0 3 0 0 0\n 64 8 float sum -1 1e+06 0 0 0 3 0 0 0\n", want: map[uint64][]float64{64: {1e6}}},
		{name: "columns of an old version", text: "#  size count type time algbw busbw error\n 64 16 float 7.5 0 0 0\n", want: map[uint64][]float64{64: {7.5}}},
		{name: "without a head", text: "64 16 float sum -1 7.5 0 0 0\n", want: map[uint64][]float64{64: {7.5}}},
		{name: "tagged by mpirun", text: "[1,0]<stdout>:" + head + "[1,0]<stdout>:  64  16 float sum -1 7.5 0 0 0\n", want: map[uint64][]float64{64: {7.5}}},
		{name: "amid other output", text: "node-a:12:12 [0] NCCL INFO hello\n12 monkeys\n" + head + "64 16 float sum -1 7.5 0 0 0\n", want: map[uint64][]float64{64: {7.5}}},
		{name: "cut by other output", text: head + "64 16 float sum -1 node-a:12:12 [0] NCCL INFO hello\n", err: `line 2: time "node-a:12:12" is none, in microseconds (other output in the row?)`},
		{name: "a row without an end", text: head + "64 16 float sum\n", err: `line 2: a row of 4 columns, the time is column 6: "64 16 float sum"`},
		{name: "not a number", text: head + "64 16 float sum -1 nan 0 0 0\n", err: `line 2: time "nan" is none, in microseconds (other output in the row?)`},
		{name: "no time", text: head + "64 16 float sum -1 0.00 0 0 0\n", err: `line 2: time "0.00" is none, in microseconds (other output in the row?)`},
		{name: "no column", text: "# size count\n", err: "line 1: the table has no column time"},
		{name: "wrong results", text: head + "64 16 float sum -1 7.5 0 0 3\n# Out of bounds values : 3 FAILED\n", err: "line 3: wrong results: # Out of bounds values : 3 FAILED"},
		{name: "nothing", text: "usage\n", err: "no row of nccl-tests"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parsePerf(strings.NewReader(tt.text))
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Fatalf("got error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got.us, tt.want); d != "" {
				t.Errorf("got - want +:\n%s", d)
			}
		})
	}
}

func FuzzPerf(f *testing.F) {
	for _, name := range []string{"all_reduce_eager.txt", "all_reduce_captured.txt"} {
		text, err := os.ReadFile(filepath.Join("testdata", "peers", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add("# size time\n8 2\n")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parsePerf(strings.NewReader(text))
		if err != nil {
			return
		}
		for size, us := range got.us {
			if size == 0 || len(us) == 0 {
				t.Errorf("%d bytes: %v", size, us)
			}
			for _, v := range us {
				if !(v > 0) || math.IsInf(v, 0) {
					t.Errorf("%d bytes: %v us", size, v)
				}
			}
		}
	})
}

func TestNCCLVersion(t *testing.T) {
	for code, want := range map[string]string{"22803": "2.28.3", "23000": "2.30.0", "2708": "2.7.8", "x": "x"} {
		if got := ncclVersion(code); got != want {
			t.Errorf("%s is %s, want %s", code, got, want)
		}
	}
}

// rawDir is a directory of raw results.
type rawDir struct {
	t   *testing.T
	dir string
}

func newRaw(t *testing.T) *rawDir { return &rawDir{t, t.TempDir()} }

func (r *rawDir) write(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
}

// gorun writes a round of ours, of which all times are in mode auto.
func (r *rawDir) gorun(round int, op, calls string, us map[uint64]float64) {
	r.t.Helper()
	var text strings.Builder
	for bytes, v := range us {
		l := line{Op: op, Mode: "auto", Calls: calls, Ranks: 2, Bytes: bytes, Us: v, Device: "GPU", Driver: "13.0", Library: "NCCL 2.28.3", Path: "/lib/libnccl.so.2"}
		if calls == "captured" {
			l.Used = "window"
		}
		if err := json.NewEncoder(&text).Encode(l); err != nil {
			r.t.Fatal(err)
		}
	}
	r.write(fmt.Sprintf("%02d.gorun.%s-%s.txt", round, op, calls), text.String())
}

func (r *rawDir) nccl(round int, op, calls string, us map[uint64]float64) {
	text := "# nccl-tests version 2.19.6 nccl-headers=22803 nccl-library=22803\n"
	for bytes, v := range us {
		text += fmt.Sprintf("%d 1 float sum -1 %v 0 0 0 99 0 0 0\n", bytes, v)
	}
	r.write(fmt.Sprintf("%02d.nccl-tests.%s.%s.txt", round, op, calls), text)
}

func (r *rawDir) torch(round int, calls string, us map[uint64]float64) {
	text := "a line of torch\n"
	for bytes, v := range us {
		text += fmt.Sprintf(`{"op": "all-reduce", "calls": "%s", "bytes": %d, "us": %v, "torch": "2.11", "nccl": "2.28.9"}`+"\n", calls, bytes, v)
	}
	r.write(fmt.Sprintf("%02d.pytorch.%s.txt", round, calls), text)
}

// compare runs the command, and reads its JSON.
func (r *rawDir) compare() (c comparison, text string, code int) {
	r.t.Helper()
	var out, errOut strings.Builder
	file := filepath.Join(r.t.TempDir(), "peers.json")
	code = realMain(r.t.Context(), []string{"compare", "-json", file, r.dir}, &out, &errOut)
	if code == 2 {
		return c, errOut.String(), code
	}
	readJSON(r.t, file, &c)
	return c, out.String(), code
}

func near(want float64) func(float64) bool {
	return func(got float64) bool { return math.Abs(got-want) <= 1e-9*want }
}

// TestCompare computes medians, ratios, means and bars from known times.
func TestCompare(t *testing.T) {
	r := newRaw(t)
	for i, f := range []float64{1, 1.2, 0.9, 1.1, 3} { // median 1.1
		round := i + 1
		r.gorun(round, "all-reduce", "eager", map[uint64]float64{8: 10 * f, 1 << 30: 3000 * f})
		r.gorun(round, "broadcast", "eager", map[uint64]float64{8: 10})
		r.gorun(round, "all-reduce", "captured", map[uint64]float64{8: 3, 32768: 8, 1 << 20: 10})
		r.nccl(round, "all-reduce", "eager", map[uint64]float64{8: 10, 1 << 30: 3300})
		r.nccl(round, "broadcast", "eager", map[uint64]float64{8: 10})
		r.nccl(round, "all-reduce", "captured", map[uint64]float64{8: 6, 32768: 10, 1 << 20: 10, 7: 1})
		r.torch(round, "eager", map[uint64]float64{8: 44})
		r.torch(round, "captured", map[uint64]float64{8: 10, 1 << 16: 1})
	}
	c, text, code := r.compare()
	if code != 1 {
		t.Errorf("exit code %d, want 1: bars are missed", code)
	}
	p := c.Points[0]
	if p.Op != "all-reduce" || p.Calls != "eager" || p.Bytes != 8 {
		t.Fatalf("first point %+v", p)
	}
	want := times{11, 9, 30, []float64{10, 12, 9, 11, 30}, []int{1, 2, 3, 4, 5}}
	if d := cmp.Diff(p.Gorun, want, cmpopts.EquateApprox(1e-9, 0)); d != "" {
		t.Errorf("gorun's times, got - want +:\n%s", d)
	}
	if p.Peers.NCCLTests == nil || !near(1.1)(p.Peers.NCCLTests.Ratio) || p.Peers.PyTorch == nil || !near(0.25)(p.Peers.PyTorch.Ratio) {
		t.Errorf("peers %+v, %+v, want ratios 1.1 and 0.25", p.Peers.NCCLTests, p.Peers.PyTorch)
	}
	// Eager: 1.1, 1.0 (3300/3300) and 1.0; captured: 0.5, 0.8 and 1.
	mean := math.Cbrt(1.1)
	wantRatios := []ratios{
		{"nccl-tests", "eager", "auto", "all-reduce", 2, math.Sqrt(1.1), 1, 1.1},
		{"nccl-tests", "eager", "auto", "broadcast", 1, 1, 1, 1},
		{"nccl-tests", "eager", "auto", "", 3, mean, 1, 1.1},
		{"nccl-tests", "captured", "auto", "all-reduce", 3, math.Cbrt(0.4), 0.5, 1},
		{"nccl-tests", "captured", "auto", "", 3, math.Cbrt(0.4), 0.5, 1},
		{"pytorch", "eager", "auto", "all-reduce", 1, 0.25, 0.25, 0.25},
		{"pytorch", "eager", "auto", "", 1, 0.25, 0.25, 0.25},
		{"pytorch", "captured", "auto", "all-reduce", 1, 0.3, 0.3, 0.3},
		{"pytorch", "captured", "auto", "", 1, 0.3, 0.3, 0.3},
	}
	if d := cmp.Diff(c.Ratios, wantRatios, cmpopts.EquateApprox(1e-9, 0)); d != "" {
		t.Errorf("ratios, got - want +:\n%s", d)
	}
	states := map[string]string{}
	for _, b := range c.Bars {
		states[b.Name] = fmt.Sprint(b.State, " ", b.Points, " ", b.Missing)
	}
	if d := cmp.Diff(states, map[string]string{
		"time to nccl-tests', eager, geometric mean":                  "failed 3 []",
		"time to nccl-tests', eager, each":                            "failed 3 [all-reduce 8 1.100]",
		"time to nccl-tests', captured, geometric mean":               "met 3 []",
		"time to nccl-tests', captured, each":                         "met 3 []",
		"time to nccl-tests', captured all-reduce up to 64 KiB, each": "failed 2 [all-reduce 32K 0.800]",
		"time to PyTorch's, eager all-reduce below 64 KiB, each":      "met 1 []",
		"time to PyTorch's, captured all-reduce below 64 KiB, each":   "met 1 []",
	}); d != "" {
		t.Errorf("bars, got - want +:\n%s", d)
	}
	if d := cmp.Diff(c.Tools, map[string]string{"gorun": "NCCL 2.28.3 (/lib/libnccl.so.2)", "nccl-tests": "2.19.6, NCCL 2.28.3", "pytorch": "2.11, NCCL 2.28.9"}); d != "" {
		t.Errorf("tools, got - want +:\n%s", d)
	}
	if c.Ranks != 2 || c.Rounds != 5 || c.Device != "GPU" || len(c.Notes)+len(c.Failed)+len(c.LeftOut) > 0 {
		t.Errorf("%+v", c)
	}
	_, table, _ := strings.Cut(text, ": ") // behind the date
	golden(t, filepath.Join("peers", "table.txt"), table)
}

// TestCompareMet: no bar is missed.
func TestCompareMet(t *testing.T) {
	r := newRaw(t)
	for round := range 5 {
		r.gorun(round+1, "all-reduce", "captured", map[uint64]float64{8: 3})
		r.nccl(round+1, "all-reduce", "captured", map[uint64]float64{8: 4})
	}
	c, text, code := r.compare()
	if code != 0 || strings.Contains(text, "failed") || c.Points[0].Used != "window" {
		t.Errorf("exit code %d\n%s", code, text)
	}
}

// TestCompareGaps: what was not run, what failed, other libraries and few rounds are told.
func TestCompareGaps(t *testing.T) {
	r := newRaw(t)
	r.gorun(1, "all-reduce", "eager", map[uint64]float64{8: 3})
	r.gorun(2, "all-reduce", "eager", map[uint64]float64{8: 5})
	r.nccl(1, "all-reduce", "eager", map[uint64]float64{8: 4})
	r.write("01.nccl-tests.broadcast.eager.txt", "# nccl-tests version 2.20 nccl-headers=22803 nccl-library=22809\n8 2 float sum 0 5 0 0 0\n")
	r.write("01.gorun.broadcast.txt", `{"op":"broadcast","mode":"window","calls":"eager","place":"out","skipped":"no windows"}`+"\n")
	r.write("02.nccl-tests.all-reduce.eager.failed", "first\n"+strings.Repeat("line\n", 20)+"exit code 3\n")
	r.write("left-out", "round 3: no time\n")
	r.write("01.gorun.sendrecv.err", "not read")
	c, text, code := r.compare()
	if code != 1 || len(c.Failed) != 1 || c.Failed[0].Run != "02.nccl-tests.all-reduce.eager" || strings.Contains(c.Failed[0].Last, "first") || !strings.HasSuffix(c.Failed[0].Last, "line\nexit code 3") {
		t.Errorf("exit code %d, failed %+v", code, c.Failed)
	}
	if d := cmp.Diff(c.LeftOut, []string{"round 3: no time"}); d != "" {
		t.Errorf("left out, got - want +:\n%s", d)
	}
	if d := cmp.Diff(c.Notes, []string{"gorun: broadcast, window, eager: no windows", "gorun runs on NCCL 2.28.3, nccl-tests on NCCL 2.28.9", "2 rounds; the bars are meant for 5 or more"}); d != "" {
		t.Errorf("notes, got - want +:\n%s", d)
	}
	if v := c.Points[0].Peers.NCCLTests; v == nil || v.Ratio != 1 { // medians 4 and 4
		t.Errorf("%+v", c.Points[0])
	}
	for _, want := range []string{"left out: round 3: no time\n", "failed: 02.nccl-tests.all-reduce.eager:\n", "    exit code 3\n", "not measured      -, want <= 0.75"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestCompareErrors(t *testing.T) {
	for _, tt := range []struct {
		name, file, text, want string
	}{
		{"empty", "", "", ": no result of gorun-bench\n"},
		{"no round", "x.gorun.all-reduce.txt", "", "x.gorun.all-reduce.txt: want ROUND.TOOL and more\n"},
		{"no tool", "01.other.txt", "", "01.other.txt: want ROUND.gorun.OP, ROUND.nccl-tests.OP.CALLS or ROUND.pytorch\n"},
		{"no calls", "01.nccl-tests.all-reduce.txt", "", "want ROUND.gorun.OP, ROUND.nccl-tests.OP.CALLS or ROUND.pytorch\n"},
		{"no table", "01.nccl-tests.all-reduce.eager.txt", "x\n", "eager.txt: no row of nccl-tests\n"},
		{"no JSON", "01.gorun.all-reduce.txt", "# text\n{x\n", "all-reduce.txt: line 2: invalid character"},
		{"no time", "01.gorun.all-reduce.txt", `{"op":"all-reduce","us":0}` + "\n", "all-reduce.txt: line 1: no time\n"},
		{"no time of torch", "01.pytorch.txt", `{"op":"all-reduce","us":-1}` + "\n", "01.pytorch.txt: line 1: no time\n"},
		{"wrong results", "01.gorun.all-reduce.txt", `{"us":1,"wrong":3}` + "\n", "wrong results: 3 elements\n"},
		{"other ranks", "01.gorun.all-reduce.txt", `{"us":1,"ranks":2}` + "\n" + `{"us":1,"ranks":4}` + "\n", "line 2: 4 ranks, 2 before\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRaw(t)
			if tt.file != "" {
				r.write(tt.file, tt.text)
			}
			if _, text, code := r.compare(); code != 2 || !strings.HasPrefix(text, "gorun-bench compare: ") || !strings.Contains(text, tt.want) {
				t.Errorf("exit code %d, %q, want 2, %q", code, text, tt.want)
			}
		})
	}
	for _, args := range [][]string{{"compare"}, {"compare", "a", "b"}, {"compare", "-x", "a"}, {"compare", "/nonexistent"}} {
		var out, errOut strings.Builder
		if code := realMain(t.Context(), args, &out, &errOut); code != 2 || out.Len() > 0 || errOut.Len() == 0 {
			t.Errorf("%v: exit code %d, stdout %q, stderr %q", args, code, out.String(), errOut.String())
		}
	}
	var out, errOut strings.Builder
	if code := realMain(t.Context(), []string{"compare", "-h"}, &out, &errOut); code != 0 || out.String() != compareHelp {
		t.Errorf("-h: exit code %d, stdout %q", code, out.String())
	}
	if _, err := readRuns(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got error %v", err)
	}
}

func TestShortBytes(t *testing.T) {
	for n, want := range map[uint64]string{8: "8", 32768: "32K", 1500: "1500", 2 << 20: "2M", 1 << 30: "1G", 3 << 29: "1536M"} {
		if got := shortBytes(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
}
