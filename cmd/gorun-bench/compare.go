package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// compareHelp is for who changes peers.sh; gorun-bench -h does not tell of compare.
const compareHelp = `gorun-bench compare [-json FILE] DIR

Compares what peers.sh has measured. DIR holds, of round N:

  N.gorun.OP.txt              what gorun-bench -json printed
  N.nccl-tests.OP.CALLS.txt   what a program of nccl-tests printed; CALLS is eager or captured
  N.pytorch.txt               what peers_torch.py printed
  N.TOOL....failed            the same of a run that failed, and its stderr
  left-out                    what was not run, one a line

Exit code 0: no bar is missed; 1: one is, or a run failed; 2: wrong command line or files.
`

// compareMain prints a comparison as a table and writes it as JSON.
func compareMain(args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("gorun-bench compare", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	file := fs.String("json", "", "")
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		io.WriteString(stdout, compareHelp)
		return 0
	case err == nil && fs.NArg() != 1:
		err = fmt.Errorf("want one directory, not %d; -h shows how", fs.NArg())
	}
	var c *comparison
	if err == nil {
		c, err = readRuns(fs.Arg(0))
	}
	if err != nil {
		fmt.Fprintf(stderr, "gorun-bench compare: %v\n", err)
		return 2
	}
	c.Date = time.Now().UTC().Format(time.RFC3339)
	c.write(stdout)
	if *file != "" {
		text, err := json.MarshalIndent(c, "", " ")
		if err == nil {
			err = os.WriteFile(*file, append(text, '\n'), 0o666)
		}
		if err != nil {
			fmt.Fprintf(stderr, "gorun-bench compare: %v\n", err)
			return 2
		}
	}
	if len(c.Failed) > 0 || slices.ContainsFunc(c.Bars, func(b bar) bool { return b.State == barFailed }) {
		return 1
	}
	return 0
}

// comparison is gorun beside its peers.
type comparison struct {
	Date    string            `json:"date"`
	Ranks   int               `json:"ranks"`
	Device  string            `json:"device"`
	Driver  string            `json:"driver,omitempty"`
	Tools   map[string]string `json:"tools"`  // name to version, with that of the library
	Rounds  int               `json:"rounds"` // that anything was measured in
	Points  []*beside         `json:"points"`
	Ratios  []ratios          `json:"ratios"`
	Bars    []bar             `json:"bars"`
	Failed  []failedRun       `json:"failed_runs,omitempty"`
	LeftOut []string          `json:"left_out,omitempty"`
	Notes   []string          `json:"notes,omitempty"`
}

// beside is an operation of one size, by gorun and by its peers. Times are microseconds a call.
type beside struct {
	Op    string `json:"op"`
	Calls string `json:"calls"`
	Mode  string `json:"mode"`           // gorun's
	Used  string `json:"used,omitempty"` // modes that captured calls had, where they are others
	Bytes uint64 `json:"bytes"`
	Gorun times  `json:"gorun"`
	Peers peers  `json:"peers"`
}

type peers struct {
	NCCLTests *versus `json:"nccl-tests,omitempty"`
	PyTorch   *versus `json:"pytorch,omitempty"`
}

// versus is a peer's times, and gorun's median over the peer's.
type versus struct {
	times
	Ratio float64 `json:"ratio"`
}

// times are those of the rounds in their order.
type times struct {
	Median float64   `json:"median"`
	Min    float64   `json:"min"`
	Max    float64   `json:"max"`
	Us     []float64 `json:"us"`
	Rounds []int     `json:"rounds"`
}

func (t *times) finish() {
	t.Median, t.Min, t.Max = median(t.Us), slices.Min(t.Us), slices.Max(t.Us)
}

func (t *times) add(round int, us float64) {
	t.Us, t.Rounds = append(t.Us, us), append(t.Rounds, round)
}

// ratios are those of a group of points.
type ratios struct {
	Peer    string  `json:"peer"`
	Calls   string  `json:"calls"`
	Mode    string  `json:"mode"`
	Op      string  `json:"op,omitempty"` // "": all
	Points  int     `json:"points"`
	GeoMean float64 `json:"geomean"`
	Least   float64 `json:"least"`
	Most    float64 `json:"most"`
}

type failedRun struct {
	Run  string `json:"run"`
	Last string `json:"last"` // of its output
}

// runKey names what a time is of.
type runKey struct {
	op, calls, mode string
	bytes           uint64
}

// readRuns reads a directory of raw results.
func readRuns(dir string) (*comparison, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	c := &comparison{Tools: map[string]string{}, Points: []*beside{}, Ratios: []ratios{}}
	runs := &rawRuns{c: c, gorun: map[runKey]*beside{}, nccl: map[runKey]*times{}, torch: map[runKey]*times{}, rounds: map[int]bool{}}
	for _, e := range entries { // by name, hence by round
		name := e.Name()
		path := filepath.Join(dir, name)
		if name == "left-out" {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			for l := range strings.Lines(string(text)) {
				c.LeftOut = append(c.LeftOut, strings.TrimSpace(l))
			}
			continue
		}
		run, ok := strings.CutSuffix(name, ".failed")
		if ok {
			text, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			c.Failed = append(c.Failed, failedRun{run, lastLines(string(text), 10)})
			continue
		}
		if run, ok = strings.CutSuffix(name, ".txt"); !ok {
			continue
		}
		if err := runs.read(path, run); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	}
	if len(runs.gorun) == 0 && len(c.Failed) == 0 {
		return nil, fmt.Errorf("%s: no result of gorun-bench", dir)
	}
	c.Rounds = len(runs.rounds)
	runs.finish()
	return c, nil
}

// lastLines are at most the last n lines.
func lastLines(text string, n int) string {
	l := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(l[max(0, len(l)-n):], "\n")
}

type rawRuns struct {
	c           *comparison
	gorun       map[runKey]*beside
	nccl, torch map[runKey]*times // mode is ""
	rounds      map[int]bool
}

// read takes in a file; run is its name without the ending.
func (r *rawRuns) read(path, run string) error {
	part := strings.Split(run, ".")
	round, err := strconv.Atoi(part[0])
	if err != nil || len(part) < 2 {
		return errors.New("want ROUND.TOOL and more")
	}
	r.rounds[round] = true
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	switch {
	case part[1] == "gorun":
		return r.readGorun(f, round)
	case part[1] == "pytorch":
		return r.readTorch(f, round)
	case part[1] == "nccl-tests" && len(part) == 4:
		t, err := parsePerf(f)
		if err != nil {
			return err
		}
		r.c.Tools["nccl-tests"] = joinSpace(t.tests, withName("NCCL", t.library))
		for bytes, us := range t.us {
			add(r.nccl, runKey{op: part[2], calls: part[3], bytes: bytes}, round, median(us))
		}
		return nil
	}
	return errors.New("want ROUND.gorun.OP, ROUND.nccl-tests.OP.CALLS or ROUND.pytorch")
}

func add(to map[runKey]*times, k runKey, round int, us float64) {
	if to[k] == nil {
		to[k] = &times{}
	}
	to[k].add(round, us)
}

func withName(name, version string) string {
	if version == "" {
		return ""
	}
	return name + " " + version
}

func joinSpace(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), ", ")
}

// eachJSON calls f with each line that is a JSON object.
func eachJSON(file io.Reader, f func(text []byte) error) error {
	text, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	n := 0
	for l := range strings.Lines(string(text)) {
		n++
		if !strings.HasPrefix(l, "{") {
			continue
		}
		if err := f([]byte(l)); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	return nil
}

var errTime = errors.New("no time")

func (r *rawRuns) readGorun(file io.Reader, round int) error {
	return eachJSON(file, func(text []byte) error {
		var l struct {
			line
			Skipped string `json:"skipped"`
		}
		if err := json.Unmarshal(text, &l); err != nil {
			return err
		}
		if l.Skipped != "" {
			r.note("gorun: %s, %s, %s: %s", l.Op, l.Mode, l.Calls, l.Skipped)
			return nil
		}
		if !(l.Us > 0) {
			return errTime
		}
		if l.Wrong != nil && *l.Wrong > 0 {
			return fmt.Errorf("wrong results: %d elements", *l.Wrong)
		}
		if r.c.Ranks != 0 && r.c.Ranks != l.Ranks {
			return fmt.Errorf("%d ranks, %d before", l.Ranks, r.c.Ranks)
		}
		r.c.Ranks, r.c.Device, r.c.Driver = l.Ranks, l.Device, l.Driver
		r.c.Tools["gorun"] = l.Library
		if l.Path != "" {
			r.c.Tools["gorun"] += " (" + l.Path + ")"
		}
		k := runKey{l.Op, l.Calls, l.Mode, l.Bytes}
		b := r.gorun[k]
		if b == nil {
			b = &beside{Op: l.Op, Calls: l.Calls, Mode: l.Mode, Bytes: l.Bytes}
			r.gorun[k] = b
			r.c.Points = append(r.c.Points, b)
		}
		b.Gorun.add(round, l.Us)
		if l.Used != "" && !slices.Contains(strings.Split(b.Used, ","), l.Used) {
			b.Used = strings.Trim(b.Used+","+l.Used, ",")
		}
		return nil
	})
}

func (r *rawRuns) readTorch(file io.Reader, round int) error {
	return eachJSON(file, func(text []byte) error {
		var l struct {
			Op, Calls   string
			Bytes       uint64
			Us          float64
			Torch, NCCL string
		}
		if err := json.Unmarshal(text, &l); err != nil {
			return err
		}
		if !(l.Us > 0) {
			return errTime
		}
		r.c.Tools["pytorch"] = joinSpace(l.Torch, withName("NCCL", l.NCCL))
		add(r.torch, runKey{op: l.Op, calls: l.Calls, bytes: l.Bytes}, round, l.Us)
		return nil
	})
}

func (r *rawRuns) note(format string, args ...any) {
	if n := fmt.Sprintf(format, args...); !slices.Contains(r.c.Notes, n) {
		r.c.Notes = append(r.c.Notes, n)
	}
}

func (r *rawRuns) finish() {
	c := r.c
	slices.SortFunc(c.Points, func(a, b *beside) int {
		return cmp.Or(cmp.Compare(orderOf(a), orderOf(b)), cmp.Compare(a.Bytes, b.Bytes))
	})
	for _, b := range c.Points {
		b.Gorun.finish()
		k := runKey{op: b.Op, calls: b.Calls, bytes: b.Bytes}
		b.Peers.NCCLTests = b.versus(r.nccl[k])
		b.Peers.PyTorch = b.versus(r.torch[k])
	}
	for _, peer := range peerNames {
		for _, calls := range callsNames {
			for _, mode := range modeNames {
				for _, op := range append(slices.Clone(opNames), "") {
					if g := c.group(peer, calls, mode, op, math.MaxUint64); g.Points > 0 {
						c.Ratios = append(c.Ratios, g)
					}
				}
			}
		}
	}
	for _, b := range bars {
		c.Bars = append(c.Bars, b.judge(c))
	}
	if mine, theirs := libraryOf(c.Tools["gorun"]), libraryOf(c.Tools["nccl-tests"]); mine != theirs && theirs != "" {
		r.note("gorun runs on %s, nccl-tests on %s", mine, theirs)
	}
	if c.Rounds < 5 {
		r.note("%d rounds; the bars are meant for 5 or more", c.Rounds)
	}
}

// libraryOf takes "NCCL 2.28.3" out of a tool's text.
func libraryOf(tool string) string {
	i := strings.Index(tool, "NCCL ")
	if i < 0 {
		return tool
	}
	f := strings.Fields(tool[i:])
	return strings.Join(f[:min(2, len(f))], " ")
}

// orderOf is a point's place by operation, calls and mode.
func orderOf(b *beside) int {
	return (slices.Index(opNames, b.Op)*8+slices.Index(callsNames, b.Calls))*8 + slices.Index(modeNames, b.Mode)
}

func (b *beside) versus(t *times) *versus {
	if t == nil {
		return nil
	}
	t.finish()
	return &versus{*t, b.Gorun.Median / t.Median}
}

var peerNames = []string{"nccl-tests", "pytorch"}

func (b *beside) peer(name string) *versus {
	if name == "pytorch" {
		return b.Peers.PyTorch
	}
	return b.Peers.NCCLTests
}

// in lists the points of a group that the peer has measured, too; op "" is all.
func (c *comparison) in(peer, calls, mode, op string, upTo uint64) []*beside {
	var all []*beside
	for _, b := range c.Points {
		if b.Calls == calls && b.Mode == mode && (op == "" || b.Op == op) && b.Bytes <= upTo && b.peer(peer) != nil {
			all = append(all, b)
		}
	}
	return all
}

func (c *comparison) group(peer, calls, mode, op string, upTo uint64) ratios {
	g := ratios{Peer: peer, Calls: calls, Mode: mode, Op: op}
	logs := 0.0
	for _, b := range c.in(peer, calls, mode, op, upTo) {
		v := b.peer(peer).Ratio
		logs += math.Log(v)
		if g.Points == 0 {
			g.Least, g.Most = v, v
		}
		g.Points++
		g.Least, g.Most = min(g.Least, v), max(g.Most, v)
	}
	if g.Points > 0 {
		g.GeoMean = math.Exp(logs / float64(g.Points))
	}
	return g
}

// bar is a limit that ratios to a peer should keep.
type bar struct {
	Name    string   `json:"name"`
	Limit   float64  `json:"limit"`
	Value   float64  `json:"value"` // the geometric mean, or the greatest
	Points  int      `json:"points"`
	State   string   `json:"state"`
	Missing []string `json:"missing_it,omitempty"` // points above the limit
}

const (
	barMet         = "met"
	barFailed      = "failed"
	barNotMeasured = "not measured"
)

// barSpec is a bar before it is judged. All are of mode auto, what the runtime does by itself.
type barSpec struct {
	name            string
	limit           float64
	mean            bool // of the geometric mean; else of each point
	peer, calls, op string
	upTo            uint64 // bytes
}

var bars = []barSpec{
	{"time to nccl-tests', eager, geometric mean", 1.03, true, "nccl-tests", "eager", "", math.MaxUint64},
	{"time to nccl-tests', eager, each", 1.08, false, "nccl-tests", "eager", "", math.MaxUint64},
	{"time to nccl-tests', captured, geometric mean", 1.03, true, "nccl-tests", "captured", "", math.MaxUint64},
	{"time to nccl-tests', captured, each", 1.08, false, "nccl-tests", "captured", "", math.MaxUint64},
	{"time to nccl-tests', captured all-reduce up to 64 KiB, each", 0.75, false, "nccl-tests", "captured", "all-reduce", 64 << 10},
	{"time to PyTorch's, eager all-reduce below 64 KiB, each", 0.4, false, "pytorch", "eager", "all-reduce", 64<<10 - 1},
	{"time to PyTorch's, captured all-reduce below 64 KiB, each", 0.65, false, "pytorch", "captured", "all-reduce", 64<<10 - 1},
}

func (s barSpec) judge(c *comparison) bar {
	g := c.group(s.peer, s.calls, "auto", s.op, s.upTo)
	b := bar{Name: s.name, Limit: s.limit, Value: g.Most, Points: g.Points, State: barMet}
	if s.mean {
		b.Value = g.GeoMean
	}
	switch {
	case g.Points == 0:
		b.State = barNotMeasured
	case b.Value > s.limit:
		b.State = barFailed
	}
	if s.mean {
		return b
	}
	for _, p := range c.in(s.peer, s.calls, "auto", s.op, s.upTo) {
		if v := p.peer(s.peer).Ratio; v > s.limit {
			b.Missing = append(b.Missing, fmt.Sprintf("%s %s %.3f", p.Op, shortBytes(p.Bytes), v))
		}
	}
	return b
}

// shortBytes is 8, 32K, 2M, 1G.
func shortBytes(n uint64) string {
	for i, unit := range []string{"G", "M", "K"} {
		if shift := 30 - 10*i; n >= 1<<shift && n%(1<<shift) == 0 {
			return fmt.Sprint(n>>shift) + unit
		}
	}
	return fmt.Sprint(n)
}

// write prints the comparison for people.
func (c *comparison) write(w io.Writer) {
	fmt.Fprintf(w, "# %s: %s on %s", c.Date, numRanks(c.Ranks), c.Device)
	if c.Driver != "" {
		fmt.Fprintf(w, ", driver %s", c.Driver)
	}
	fmt.Fprintf(w, "; %d rounds\n", c.Rounds)
	for _, t := range slices.Sorted(maps.Keys(c.Tools)) {
		fmt.Fprintf(w, "# %s: %s\n", t, c.Tools[t])
	}
	fmt.Fprintf(w, "# microseconds a call, median (least-greatest) of the rounds; ratio: gorun's median by the peer's, below 1 gorun is faster\n")
	fmt.Fprintf(w, "%-15s %-9s %6s  %-13s %-30s %-30s %6s  %-30s %6s\n", "operation", "calls", "bytes", "mode", "gorun", "nccl-tests", "ratio", "PyTorch", "ratio")
	for _, b := range c.Points {
		mode := b.Mode
		if b.Used != "" {
			mode += "=" + b.Used
		}
		text, ratio := b.Peers.NCCLTests.cells()
		torch, torchRatio := b.Peers.PyTorch.cells()
		row := fmt.Sprintf("%-15s %-9s %6s  %-13s %-30s %-30s %6s  %-30s %6s", b.Op, b.Calls, shortBytes(b.Bytes), mode, b.Gorun.cell(), text, ratio, torch, torchRatio)
		fmt.Fprintln(w, strings.TrimRight(row, " "))
	}
	if len(c.Ratios) > 0 {
		fmt.Fprintf(w, "\n%-12s %-9s %-8s %-15s %7s %8s %7s %7s\n", "peer", "calls", "mode", "operation", "points", "geomean", "least", "most")
	}
	for _, g := range c.Ratios {
		op := g.Op
		if op == "" {
			op = "all"
		}
		fmt.Fprintf(w, "%-12s %-9s %-8s %-15s %7d %8.3f %7.3f %7.3f\n", g.Peer, g.Calls, g.Mode, op, g.Points, g.GeoMean, g.Least, g.Most)
	}
	fmt.Fprintln(w)
	for _, b := range c.Bars {
		value := "     -"
		if b.State != barNotMeasured {
			value = fmt.Sprintf("%6.3f", b.Value)
		}
		fmt.Fprintf(w, "%-12s %s, want <= %.2f  %s", b.State, value, b.Limit, b.Name)
		if len(b.Missing) > 0 {
			fmt.Fprintf(w, ": %s", strings.Join(b.Missing, ", "))
		}
		fmt.Fprintln(w)
	}
	for _, n := range c.Notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	for _, l := range c.LeftOut {
		fmt.Fprintf(w, "left out: %s\n", l)
	}
	for _, f := range c.Failed {
		fmt.Fprintf(w, "failed: %s:\n", f.Run)
		for l := range strings.Lines(f.Last) {
			fmt.Fprintf(w, "    %s\n", strings.TrimRight(l, "\n"))
		}
	}
}

func (t times) cell() string { return fmt.Sprintf("%.2f (%.2f-%.2f)", t.Median, t.Min, t.Max) }

func (v *versus) cells() (text, ratio string) {
	if v == nil {
		return "-", "-"
	}
	return v.cell(), fmt.Sprintf("%.3f", v.Ratio)
}
