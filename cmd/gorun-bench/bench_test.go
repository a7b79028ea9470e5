package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

var update = flag.Bool("update", false, "write golden files")

func TestMain(m *testing.M) {
	if os.Getenv(asMain) != "" {
		os.Exit(realMain(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	callersDevice = os.Getenv("GORUN_DEVICE")
	if os.Getenv(onLibrary) == "" {
		os.Setenv("GORUN_DEVICE", "host") // several ranks of these tests are in one process
	}
	goleak.VerifyTestMain(ranktest.Patient{M: m})
}

// onLibrary marks the ranks of a test, processes, that use a GPU or what stands for it.
const onLibrary = "GORUN_BENCH_TEST_LIBRARY"

// callersDevice is GORUN_DEVICE before TestMain set it.
var callersDevice string

// needGPUs skips a test where there are fewer.
func needGPUs(t *testing.T, n int) {
	t.Setenv("GORUN_DEVICE", callersDevice)
	dltest.NeedGPUs(t, n)
}

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name string
		args string
		want func(*config)
		err  string
	}{
		{name: "defaults", want: func(*config) {}},
		{name: "sizes", args: "-b 1K -e 2G -f 4", want: func(c *config) { c.min, c.max, c.factor = 1<<10, 2<<30, 4 }},
		{name: "step", args: "-b 8 -e 64 -i 8", want: func(c *config) { c.max, c.step = 64, 8 }},
		{name: "lists", args: "-op broadcast,all-reduce,broadcast -mode graph,plain -calls captured -place in,out", want: func(c *config) {
			c.ops, c.modes = []string{"broadcast", "all-reduce"}, []string{"graph", "plain"}
			c.calls, c.places = []string{"captured"}, []string{"in", "out"}
		}},
		{name: "all", args: "-op all -place all", want: func(c *config) { c.places = []string{"out", "in"} }},
		{name: "the rest", args: "-t int8 -red max -root 1 -n 3 -g 4 -G 6 -buffers 7 -w 0 -r 1 -limit 1s -c --json", want: func(c *config) {
			c.dtype, c.red, c.root, c.n, c.perGraph, c.launches, c.buffers, c.warmUp, c.rounds = "int8", "max", 1, 3, 4, 6, 7, 0, 1
			c.limit, c.check, c.json = time.Second, true, true
		}},
		{name: "help", args: "-h", err: "flag: help requested"},
		{name: "operation", args: "-op alltoall", err: `invalid value "alltoall" for flag -op: no operation "alltoall"; there are all-reduce, all-gather, reduce-scatter, broadcast, reduce, gather, scatter, all-to-all, sendrecv; -h shows the flags`},
		{name: "flag", args: "-frob", err: "flag provided but not defined: -frob; -h shows the flags"},
		{name: "argument", args: "8", err: `unexpected argument "8"; -h shows the flags`},
		{name: "type", args: "-t complex64", err: "-t complex64: there are int8, uint8, int32, uint32, int64, uint64, float16, bfloat16, float32, float64"},
		{name: "reduction", args: "-red prod", err: "-red prod: there are sum, min, max"},
		{name: "root", args: "-root -1", err: "-root -1: want a rank"},
		{name: "order", args: "-b 8 -e 4", err: "-b 8 -e 4: want 1 <= b <= e"},
		{name: "nothing", args: "-b 0", err: "-b 0 -e 67108864: want 1 <= b <= e"},
		{name: "factor", args: "-f 1", err: "-f 1: want more than 1"},
		{name: "factor that is no number", args: "-f NaN", err: "-f NaN: want more than 1"},
		{name: "rounds", args: "-r 0", err: "-n, -g, -G, -buffers and -r are at least 1, -w at least 0"},
		{name: "limit", args: "-limit 0s", err: "-limit 0s: want more than 0"},
		{name: "too large", args: "-e 99999G", err: `invalid value "99999G" for flag -e: want a size such as 8, 64K, 1M or 1G, up to 16384G; -h shows the flags`},
		{name: "unit", args: "-e 5MG", err: `invalid value "5MG" for flag -e: want a size such as 8, 64K, 1M or 1G; -h shows the flags`},
		{name: "no series", args: "-mode graph -calls eager", err: "nothing to measure: graph is a mode of captured calls, sends and receives have no windows, and sendrecv and all-to-all no place in"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parse(strings.Fields(tt.args))
			if tt.err != "" {
				if err == nil || err.Error() != tt.err {
					t.Fatalf("got error %v, want %s", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := &config{ops: opNames, modes: modeNames, calls: callsNames, places: []string{"out"}, dtype: "float32", red: "sum",
				min: 8, max: 64 << 20, factor: 8, n: 20, perGraph: 20, launches: 20, buffers: 1, warmUp: 5, rounds: 5, limit: 30 * time.Millisecond}
			tt.want(want)
			if d := cmp.Diff(got, want, cmp.AllowUnexported(config{})); d != "" {
				t.Errorf("got - want +:\n%s", d)
			}
		})
	}
}

func FuzzParseBytes(f *testing.F) {
	for _, s := range []string{"8", "64K", "1GiB", "", "KK", "99999999999999999999", "16384G"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseBytes(s); err == nil && n > maxBytes {
			t.Errorf("%q is %d", s, n)
		}
	})
}

func TestSizes(t *testing.T) {
	for _, tt := range []struct {
		c    config
		want []uint64
	}{
		{config{min: 8, max: 64, factor: 2}, []uint64{8, 16, 32, 64}},
		{config{min: 8, max: 100, factor: 4}, []uint64{8, 32}},
		{config{min: 1, max: 4, factor: 1.01}, []uint64{1, 2, 3, 4}}, // it gets on
		{config{min: 5, max: 5, factor: 2}, []uint64{5}},
		{config{min: 8, max: 40, factor: 2, step: 16}, []uint64{8, 24, 40}},
	} {
		if got := tt.c.sizes(); !slices.Equal(got, tt.want) {
			t.Errorf("-b %d -e %d -f %v -i %d: got %v, want %v", tt.c.min, tt.c.max, tt.c.factor, tt.c.step, got, tt.want)
		}
	}
}

// TestDefinitions checks sizes and bandwidths against nccl-tests' definitions (its doc/PERFORMANCE.md).
func TestDefinitions(t *testing.T) {
	const us = 10
	for _, tt := range []struct {
		op         string
		ranks      int
		bytes      uint64
		send, recv int
		size       uint64
		alg, bus   float64
	}{
		{"all-reduce", 4, 4e6, 1e6, 1e6, 4e6, 400, 600},
		{"all-reduce", 2, 4e6, 1e6, 1e6, 4e6, 400, 400},
		{"all-reduce", 1, 4e6, 1e6, 1e6, 4e6, 400, 0},
		{"all-gather", 4, 4e6, 250e3, 1e6, 4e6, 400, 300},
		{"all-gather", 4, 8, 1, 4, 16, 0.0016, 0.0012}, // at least an element of each
		{"reduce-scatter", 4, 4e6, 1e6, 250e3, 4e6, 400, 300},
		{"broadcast", 4, 4e6, 1e6, 1e6, 4e6, 400, 400},
		{"sendrecv", 4, 4e6, 1e6, 1e6, 4e6, 400, 400},
		{"reduce", 4, 4e6, 1e6, 1e6, 4e6, 400, 400},
		{"gather", 4, 4e6, 250e3, 1e6, 4e6, 400, 300},
		{"scatter", 4, 4e6, 1e6, 250e3, 4e6, 400, 300},
		{"all-to-all", 4, 4e6, 1e6, 1e6, 4e6, 400, 300},
		{"all-to-all", 3, 4e6, 999999, 999999, 3999996, 399.9996, 399.9996 * 2 / 3}, // as many of each
		{"all-to-all", 4, 8, 4, 4, 16, 0.0016, 0.0012},
		{"all-reduce", 2, 7, 1, 1, 4, 0.0004, 0.0004},
	} {
		send, recv, size := shape(tt.op, tt.bytes, 4, tt.ranks)
		alg, bus := bandwidth(tt.op, size, us, tt.ranks)
		if send != tt.send || recv != tt.recv || size != tt.size || math.Abs(alg-tt.alg) > 1e-9 || math.Abs(bus-tt.bus) > 1e-9 {
			t.Errorf("%s of %d bytes, %d ranks: got %d, %d elements, %d bytes, %v, %v GB/s, want %d, %d, %d, %v, %v",
				tt.op, tt.bytes, tt.ranks, send, recv, size, alg, bus, tt.send, tt.recv, tt.size, tt.alg, tt.bus)
		}
	}
}

func TestStatistics(t *testing.T) {
	for _, tt := range []struct {
		v    []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 9, 2}, 3}} {
		if got := median(tt.v); got != tt.want {
			t.Errorf("median of %v is %v, want %v", tt.v, got, tt.want)
		}
	}
	if got := mean([]float64{1, 2, 6}); got != 3 {
		t.Errorf("mean is %v, want 3", got)
	}
	for _, tt := range []struct {
		us   float64
		want int
	}{{0, 20}, {1, 20}, {9999, 20}, {20000, 10}, {1e9, 1}} {
		if got := roundLength(20, 200*time.Millisecond, tt.us); got != tt.want {
			t.Errorf("round of calls of %v us: %d, want %d", tt.us, got, tt.want)
		}
	}
}

// TestPattern wants data that shows an element that came from another place or rank.
func TestPattern(t *testing.T) {
	for _, m := range []int{2, 6} {
		for shift := 1; shift < 2000; shift++ {
			same := 0
			for i := range 64 {
				if pattern(0, i, m) == pattern(0, i+shift, m) {
					same++
				}
			}
			if same == 64 {
				t.Errorf("modulus %d: elements 0 to 63 are those from %d on", m, shift)
			}
		}
		for r := 1; r < 64; r++ {
			same := 0
			for i := range 64 {
				if pattern(0, i, m) == pattern(r, i, m) {
					same++
				}
			}
			if same == 64 {
				t.Errorf("modulus %d: ranks 0 and %d have the same data", m, r)
			}
		}
	}
	for ranks := 1; ranks <= 127; ranks++ {
		if most := (modulus(ranks) - 1) * ranks; most > 127 {
			t.Errorf("%d ranks: sums to %d, beyond int8", ranks, most)
		}
	}
}

func TestCountWrong(t *testing.T) {
	got := []float32{0, 1, 7, 3, float32(math.NaN())}
	if n := countWrong(got, func(i int) float32 { return float32(i) }); n != 2 {
		t.Errorf("%d wrong elements in %v, want 2", n, got)
	}
}

// lines runs a job in this process and returns rank 0's output, taken apart.
func lines(t *testing.T, ranks int, args string) []line {
	t.Helper()
	var out bytes.Buffer
	ranktest.Run(t, ranks, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse(strings.Fields(args))
		if err != nil {
			return err
		}
		w, progress := io.Writer(&out), io.Discard
		if job.Rank() != 0 {
			w, progress = failWriter{}, failWriter{}
		}
		return runJob(ctx, job, c, w, progress)
	})
	return decode(t, out.String())
}

type failWriter struct{}

func (failWriter) Write([]byte) (int, error) { return 0, errors.New("only rank 0 writes") }

func decode(t *testing.T, out string) []line {
	t.Helper()
	var all []line
	for text := range strings.Lines(out) {
		d := json.NewDecoder(strings.NewReader(text))
		d.DisallowUnknownFields()
		var l line
		if err := d.Decode(&l); err != nil {
			t.Fatalf("line %q: %v", text, err)
		}
		all = append(all, l)
	}
	return all
}

// TestSeries measures everything small and wants each series once a size, right results, and figures that agree with each other.
// For one rank alone, memory that can be registered is always a window.
func TestSeries(t *testing.T) {
	for _, ranks := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			if testing.Short() && ranks != 2 {
				t.Skip("-short: the same with two ranks")
			}
			const args = "-b 64 -e 400000 -f 1500 -n 2 -g 3 -G 2 -buffers 5 -w 1 -r 3 -c -place all -json"
			c, err := parse(strings.Fields(args))
			if err != nil {
				t.Fatal(err)
			}
			got := map[series]int{}
			for _, l := range lines(t, ranks, args) {
				got[series{l.Op, l.Mode, l.Calls == "captured", l.Place == "in"}]++
				alg, bus := bandwidth(l.Op, l.Bytes, l.Us, ranks)
				if l.Ranks != ranks || l.Type != "float32" || (l.Red == "sum") != reduces(l.Op) || l.Rounds != 3 || l.N < 1 || l.N > 2 ||
					l.Wrong == nil || *l.Wrong != 0 || l.Us <= 0 || l.MinUs > l.Us || l.MaxUs < l.Us || l.AlgBW != alg || l.BusBW != bus ||
					(l.InGraph == 3) != (l.Calls == "captured") || l.Used != "" && ranks > 1 && l.Mode != "auto" ||
					l.Device != "host" || l.Buffers != map[bool]int{true: 1, false: 4}[l.Bytes < 1000] || l.Path != "" || l.Driver != "" || l.Library != "host platform" ||
					(l.Mode == "auto" && l.Calls == "captured") != (l.Used != "") && ranks > 1 || (l.Mode == "auto" && l.Calls == "captured" && !(ranks == 1 && l.Place == "in" && ofMessages(l.Op))) != (l.Reason != "") || l.Bytes == 0 || l.Count == 0 {
					t.Errorf("%+v", l)
				}
			}
			want := map[series]int{}
			for _, s := range c.series() {
				want[s] = 2
			}
			if d := cmp.Diff(got, want); d != "" {
				t.Errorf("got - want +:\n%s", d)
			}
		})
	}
}

// TestRoots checks the results of the operations that have a root, from and to each.
func TestRoots(t *testing.T) {
	for root := range 3 {
		got := lines(t, 3, fmt.Sprint("-op broadcast,reduce,gather,scatter -mode auto,local -place all -b 1000 -e 1000 -n 1 -g 2 -w 0 -r 1 -c -json -root ", root))
		if len(got) != 32 {
			t.Errorf("root %d: %d lines, want 32", root, len(got))
		}
		for _, l := range got {
			want, count := uint64(1000), 250
			if l.Op == "gather" || l.Op == "scatter" {
				want, count = 996, 83
			}
			if *l.Wrong != 0 || l.Bytes != want || l.Count != count {
				t.Errorf("root %d: %+v", root, l)
			}
		}
	}
}

// TestTypes checks the results of each type and reduction, in place and not.
func TestTypes(t *testing.T) {
	for _, dtype := range typeNames {
		for _, red := range redNames {
			t.Run(dtype+" "+red, func(t *testing.T) {
				got := lines(t, 2, "-op all-reduce,reduce-scatter -mode local -place all -b 1000 -e 1000 -n 1 -g 2 -w 0 -r 1 -c -json -t "+dtype+" -red "+red)
				if len(got) != 8 {
					t.Errorf("%d lines, want 8", len(got))
				}
				for _, l := range got {
					if l.Type != dtype || l.Red != red || *l.Wrong != 0 {
						t.Errorf("%+v", l)
					}
				}
			})
		}
	}
}

// TestWrong has rank 1 send five other elements than the check knows of: every rank hears how many of all results are wrong.
func TestWrong(t *testing.T) {
	for _, tt := range []struct {
		op, place string
		want      int
	}{
		{"all-reduce", "out", 10}, {"all-reduce", "in", 10}, {"reduce", "out", 5}, {"gather", "out", 5}, {"gather", "in", 5}, {"scatter", "out", 5},
		{"all-to-all", "out", 5}, {"broadcast", "out", 10}, {"sendrecv", "out", 5},
	} {
		t.Run(tt.op+" "+tt.place, func(t *testing.T) {
			var mu sync.Mutex
			wrong := map[int]int{}
			ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
				c, err := parse(strings.Fields("-mode plain -calls eager -b 4000 -e 4000 -r 1 -c -root 1 -op " + tt.op + " -place " + tt.place))
				if err != nil {
					return err
				}
				b, done, err := newBencher(ctx, job, c, io.Discard, io.Discard)
				if err != nil {
					return err
				}
				defer done()
				s := c.series()[0]
				m, err := newMemory[float32](ctx, b, s, 4000)
				if err != nil {
					return err
				}
				defer m.close()
				op := &call[float32]{b, s, m}
				n, err := checkCall(ctx, op, func() error {
					if job.Rank() == 1 {
						if err := cuda.Fill(m.send[0].Slice(10, 15), 100, b.stream); err != nil {
							return err
						}
					}
					return op.issue(0, b.stream)
				})
				mu.Lock()
				defer mu.Unlock()
				wrong[job.Rank()] = n
				return err
			})
			if d := cmp.Diff(wrong, map[int]int{0: tt.want, 1: tt.want}); d != "" {
				t.Errorf("wrong elements by rank, got - want +:\n%s", d)
			}
		})
	}
	e := &wrongError{1, 12}
	if got, want := e.Error(), "wrong results in 1 of 12 measurements"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestSkipped wants a mode that a machine does not have to be told, and the rest to be measured.
func TestSkipped(t *testing.T) {
	c := &config{json: true}
	var out strings.Builder
	r := &report{w: &out, c: c}
	r.skipped(series{op: "broadcast", mode: "window", captured: true}, errors.New("no such mode"))
	want := `{"op":"broadcast","mode":"window","calls":"captured","place":"out","skipped":"no such mode"}` + "\n"
	if out.String() != want {
		t.Errorf("got %s, want %s", out.String(), want)
	}
}

// TestTable looks at the table for people, but for its times.
func TestTable(t *testing.T) {
	var out strings.Builder
	c := &config{dtype: "float32", red: "max", perGraph: 20}
	r := &report{w: &out, c: c, ranks: 2, device: "host (1 core)"}
	r.info.Platform = cuda.Host
	for _, p := range []struct {
		s series
		p point
	}{
		{series{"all-reduce", "plain", false, false}, point{size: 8, count: 2, us: []float64{1, 3, 2}, checked: true}},
		{series{"all-reduce", "window", true, true}, point{size: 1 << 20, count: 1 << 18, mode: "graph", us: []float64{20}, checked: true, wrong: 7}},
		{series{"sendrecv", "plain", false, false}, point{size: 1 << 30, count: 1 << 28, us: []float64{12345.678}}},
	} {
		if err := r.point(p.s, p.p); err != nil {
			t.Fatal(err)
		}
	}
	r.skipped(series{op: "sendrecv", mode: "graph", captured: true}, errors.New("no such mode"))
	golden(t, "table.txt", out.String())
	out.Reset()
	alone := &report{w: &out, c: c, ranks: 1, device: "host (2 cores)"}
	if err := alone.point(series{"sendrecv", "plain", false, false}, point{size: 8, count: 2, us: []float64{1}}); err != nil {
		t.Fatal(err)
	}
	if want := "# sendrecv of float32; 1 rank, rank 0 on host (2 cores); "; !strings.Contains(out.String(), want) {
		t.Errorf("got %s, want %q in it", out.String(), want)
	}
}

// TestTableHead: what carries the calls out is said once, above all tables.
func TestTableHead(t *testing.T) {
	var out strings.Builder
	r := &report{w: &out, c: &config{dtype: "int8"}, ranks: 2, device: "CUDA device 0", library: nccl.LibraryInfo{Name: "NCCL", Version: "2.28.3", Path: "/lib/libnccl.so.2"}}
	r.info = cuda.Info{Platform: cuda.CUDA, Driver: "13.0", Name: "GPU"}
	r.head(series{op: "broadcast"})
	r.head(series{op: "sendrecv"})
	text := out.String()
	if want := "# NCCL 2.28.3 (/lib/libnccl.so.2), driver 13.0\n# broadcast of int8; 2 ranks"; !strings.HasPrefix(text, want) || strings.Count(text, "NCCL") != 1 {
		t.Errorf("got\n%s", text)
	}
	l := r.line(series{op: "broadcast"}, point{size: 8, us: []float64{1}})
	if l.Library != "NCCL 2.28.3" || l.Path != "/lib/libnccl.so.2" || l.Driver != "13.0" || l.Device != "GPU" {
		t.Errorf("%+v", l)
	}
}

// TestTurns wants calls on several buffers in turn, each with its own data, as far as they are not larger than the largest size.
func TestTurns(t *testing.T) {
	c := &config{max: 400e3, buffers: 4}
	for size, want := range map[uint64]int{1: 1, 64 << 10: 1, 100e3: 4, 101e3: 3, 200e3: 2, 201e3: 1, 400e3: 1, 500e3: 1} {
		if got := c.turns(size); got != want {
			t.Errorf("%d buffers of %d bytes, want %d", got, size, want)
		}
	}
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse(strings.Fields("-op all-reduce -mode auto -e 2M -buffers 3"))
		if err != nil {
			return err
		}
		b, done, err := newBencher(ctx, job, c, io.Discard, io.Discard)
		if err != nil {
			return err
		}
		defer done()
		m, err := newMemory[float32](ctx, b, series{op: "all-reduce", mode: "auto"}, 400e3)
		if err != nil {
			return err
		}
		defer m.close()
		op := &call[float32]{b, series{op: "all-reduce", mode: "auto"}, m}
		for i := range 3 {
			if err := cuda.Fill(m.send[i], float32(i+1), b.stream); err != nil {
				return err
			}
		}
		for i := range 5 { // beyond the last, the first again
			if err := op.issue(i, b.stream); err != nil {
				return err
			}
		}
		for i := range 3 {
			got := make([]float32, 100e3)
			if err := errors.Join(cuda.CopyToHost(got, m.recv[i], b.stream), b.stream.Synchronize(ctx)); err != nil {
				return err
			}
			if got[0] != float32(2*(i+1)) || got[len(got)-1] != got[0] {
				return fmt.Errorf("buffer %d has %v and %v, want %d", i, got[0], got[len(got)-1], 2*(i+1))
			}
		}
		return nil
	})
}

func TestProgress(t *testing.T) {
	var out strings.Builder
	now := time.Unix(100, 0)
	p := newProgress(&out, func() time.Time { return now })
	p.total = 50
	for range 40 { // half a second each
		p.at(series{op: "broadcast", mode: "auto", captured: true}, 4096)
		now = now.Add(500 * time.Millisecond)
		p.done++
	}
	want := "gorun-bench: 4 of 50 lines in 2 s, now broadcast, auto, captured, 4096 bytes (-op, -mode and -e make it shorter)\n" +
		"gorun-bench: 24 of 50 lines in 12 s, now broadcast, auto, captured, 4096 bytes\n"
	if d := cmp.Diff(out.String(), want); d != "" {
		t.Errorf("got - want +:\n%s", d)
	}
}

// A device that cannot be opened is an error, not a panic.
func TestNoDevice(t *testing.T) {
	t.Setenv("GORUN_DEVICE", "tpu")
	var out, errOut strings.Builder
	if code := realMain(t.Context(), []string{"-op", "broadcast"}, &out, &errOut); code != 1 || out.Len() > 0 || !strings.Contains(errOut.String(), `"tpu": unknown`) {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out.String(), errOut.String())
	}
}

func TestHelp(t *testing.T) {
	var out, errOut strings.Builder
	if code := realMain(t.Context(), []string{"-h"}, &out, &errOut); code != 0 || errOut.Len() > 0 {
		t.Errorf("exit code %d, stderr %q, want 0 and nothing", code, errOut.String())
	}
	golden(t, "help.txt", out.String())
	fs := map[string]bool{}
	for text := range strings.Lines(out.String()) {
		if name, ok := strings.CutPrefix(text, "  -"); ok {
			fs[strings.Fields(name)[0]] = true
		}
	}
	for _, name := range []string{"op", "mode", "calls", "place", "t", "red", "root", "b", "e", "f", "i", "n", "g", "G", "w", "r", "limit", "buffers", "compare", "c", "json", "h"} {
		if !fs[name] {
			t.Errorf("the help lacks -%s", name)
		}
		delete(fs, name)
	}
	if len(fs) > 0 {
		t.Errorf("the help has flags that there are not: %v", fs)
	}
}

func TestUsageError(t *testing.T) {
	var out, errOut strings.Builder
	if code := realMain(t.Context(), []string{"-op", "x"}, &out, &errOut); code != 2 || out.Len() > 0 || !strings.HasPrefix(errOut.String(), "gorun-bench: invalid value") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, out.String(), errOut.String())
	}
}

// TestFlagsAsked: gorun bench hears what the ranks would refuse.
func TestFlagsAsked(t *testing.T) {
	for _, c := range []struct {
		args, want string
		code       int
	}{
		{"2 -op broadcast -root 1", "", 0},
		{"2 -root 2", "-root 2: there are 2 ranks\n", exitRefused},
		{"2 -op x", "invalid value \"x\" for flag -op: no operation \"x\"; there are all-reduce, all-gather, reduce-scatter, broadcast, reduce, gather, scatter, all-to-all, sendrecv; -h shows the flags\n", exitRefused},
		{"2 -b 8 word", "unexpected argument \"word\"; -h shows the flags\n", exitRefused},
		{"2 compare dir", "compare needs no ranks: gorun-bench compare\n", exitRefused},
		{"2 registration -op x", "", 0},
		{"2 -h", "", 0},
		{"two", "", 2},
		{"", "", 2},
	} {
		var out, errOut strings.Builder
		code := realMain(t.Context(), append([]string{"flags"}, strings.Fields(c.args)...), &out, &errOut)
		if code != c.code || out.String() != c.want || errOut.Len() > 0 {
			t.Errorf("flags %s: exit code %d, stdout %q, stderr %q, want %d, %q", c.args, code, out.String(), errOut.String(), c.code, c.want)
		}
	}
}

// TestRootOutside is an error that does not depend on the rank.
func TestRootOutside(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse([]string{"-root", "2"})
		if err != nil {
			return err
		}
		if err := runJob(ctx, job, c, io.Discard, io.Discard); err == nil || err.Error() != "-root 2: there are 2 ranks" {
			return fmt.Errorf("got error %v", err)
		}
		return nil
	})
}

// TestFlagsDiffer: ranks that were given different rounds say so and do not hang.
func TestFlagsDiffer(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse(nil)
		if err != nil {
			return err
		}
		b, done, err := newBencher(ctx, job, c, io.Discard, io.Discard)
		if err != nil {
			return err
		}
		defer done()
		_, err = b.gather(ctx, make([]float64, 1+job.Rank()))
		if err == nil || !strings.Contains(err.Error(), "the ranks' flags differ") {
			return fmt.Errorf("got error %v", err)
		}
		return nil
	})
}

// TestProcesses runs the program as ranks that are processes.
func TestProcesses(t *testing.T) {
	for _, r := range ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		c, err := parse(strings.Fields("-b 8 -e 4K -f 16 -n 2 -g 2 -w 1 -r 2 -c -json"))
		if err != nil {
			return err
		}
		return runJob(ctx, job, c, os.Stdout, io.Discard) // progress of a slow machine is no line
	}) {
		if r.Code != 0 || r.Signal != "" {
			t.Fatalf("%v", r)
		}
		got := decode(t, r.Output)
		if r.Rank != 0 {
			if len(got) > 0 {
				t.Errorf("rank %d printed %d lines", r.Rank, len(got))
			}
			continue
		}
		c, err := parse(nil)
		if err != nil {
			t.Fatal(err)
		}
		if want := 3 * len(c.series()); len(got) != want {
			t.Errorf("%d lines, want %d", len(got), want)
		}
		for _, l := range got {
			if l.Ranks != 2 || *l.Wrong != 0 {
				t.Errorf("%+v", l)
			}
		}
	}
}

// TestLibrary runs the program on a collective library: each series is measured, with right results, and the output names the library.
func TestLibrary(t *testing.T) {
	const args = "-b 4K -e 1M -f 16 -n 3 -g 2 -G 2 -w 1 -r 2 -buffers 2 -c -json"
	run := func(t *testing.T, most int, env ...string) []line {
		results := ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			c, err := parse(strings.Fields(args))
			if err != nil {
				return err
			}
			c.max = min(c.max, uint64(most))
			os.Setenv("GORUN_DEVICE", dltest.DeviceOf(job.LocalRank()))
			return runJob(ctx, job, c, os.Stdout, os.Stderr)
		}, append(env, onLibrary+"=1", "GORUN_DEVICE=")...)
		for _, r := range results {
			if r.Code != 0 {
				t.Fatal(r)
			}
		}
		var all []line
		for text := range strings.Lines(results[0].Output) {
			var l struct {
				line
				Skipped string
			}
			if !strings.HasPrefix(text, "{") {
				continue
			}
			if err := json.Unmarshal([]byte(text), &l); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			switch {
			case l.Skipped == "":
				all = append(all, l.line)
			case l.Op != "broadcast" && l.Op != "reduce" || l.Mode != "window":
				t.Errorf("not measured: %s", text)
			}
		}
		return all
	}
	// used are the modes of captured calls of mode auto: of collectives, and of messages.
	check := func(t *testing.T, got []line, sizes int, used ...string) {
		c, err := parse(nil)
		if err != nil {
			t.Fatal(err)
		}
		if want := sizes * (len(c.series()) - 4); len(got) < want { // two of broadcast and of reduce in windows
			t.Errorf("%d lines, want at least %d", len(got), want)
		}
		for _, l := range got {
			if l.Wrong == nil || *l.Wrong != 0 || !strings.HasPrefix(l.Library, "NCCL 2.") || l.Path == "" || l.Driver == "" || l.Device == "host" ||
				(l.Mode == "auto" && l.Calls == "captured") != (l.Reason != "" && (slices.Contains(used, l.Used) || ofMessages(l.Op) && l.Used == "graph")) {
				t.Errorf("%+v", l)
			}
		}
	}
	const size = 4096 // what stands for the library does nothing else for large buffers
	fake := func(t *testing.T, env ...string) []string {
		if os.Getenv(onLibrary) != "" {
			return nil // a rank: it has the paths
		}
		driver := dltest.Build(t, "../../cuda/testdata/driver.c", "libcuda.so.1", "-lpthread")
		library := dltest.Build(t, "../../nccl/testdata/nccl.c", "libnccl.so.2", "-lpthread", "-ldl")
		return append(env, "GORUN_TEST_FAKE=1", "GORUN_CUDA_LIB="+driver, "GORUN_NCCL_LIB="+library, "FAKE_DEVICES=2")
	}
	t.Run("fake", func(t *testing.T) { check(t, run(t, size, fake(t, "GORUN_PEER=off")...), 1, "graph", "window") })
	t.Run("peer memory", func(t *testing.T) { check(t, run(t, size, fake(t, "GORUN_PEER=auto")...), 1, "peer") })
	t.Run("GPU", func(t *testing.T) {
		needGPUs(t, 2)
		check(t, run(t, 1<<20, dltest.GPUEnv()...), 3, "graph", "window")
	})
}

// golden compares with a file of testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, string(want)); d != "" {
		t.Errorf("%s, got - want +:\n%s", file, d)
	}
}
