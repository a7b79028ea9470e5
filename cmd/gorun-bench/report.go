package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// report writes measurements as a table for people, or as lines of JSON.
type report struct {
	w       io.Writer
	c       *config
	info    cuda.Info
	device  string
	library nccl.LibraryInfo
	ranks   int
	op      string // of the table
}

func newReport(w io.Writer, c *config, dev *cuda.Device, comm *nccl.Comm) *report {
	lib, _ := comm.Library()
	return &report{w: w, c: c, info: dev.Info(), device: dev.String(), library: lib, ranks: comm.Size()}
}

// carrier names what carries the calls out.
func (r *report) carrier() string {
	switch {
	case r.library.Name != "":
		return r.library.Name + " " + r.library.Version
	case r.info.Platform == cuda.Host:
		return "host platform"
	}
	return "none: one rank copies"
}

// line is a line of JSON.
type line struct {
	Op      string  `json:"op"`
	Mode    string  `json:"mode"`  // that was asked for
	Calls   string  `json:"calls"` // eager, captured
	Place   string  `json:"place"` // out, in
	Type    string  `json:"type"`
	Red     string  `json:"red,omitempty"`
	Ranks   int     `json:"ranks"`
	Bytes   uint64  `json:"bytes"`
	Count   int     `json:"count"`
	Us      float64 `json:"us"` // median of the rounds, a call
	MinUs   float64 `json:"min_us"`
	MaxUs   float64 `json:"max_us"`
	Enqueue float64 `json:"enqueue_us,omitempty"` // median of the rounds: of a call's time what passed until all calls were enqueued, on the slowest rank
	AlgBW   float64 `json:"algbw"`                // GB/s
	BusBW   float64 `json:"busbw"`
	Used    string  `json:"used_mode,omitempty"` // of captured calls, where it is another
	Reason  string  `json:"reason,omitempty"`    // of the mode, where the runtime has chosen it
	N       int     `json:"n"`                   // calls or launches in a round
	InGraph int     `json:"in_graph,omitempty"`  // calls in a graph
	Buffers int     `json:"buffers"`             // that the calls take in turn
	Rounds  int     `json:"rounds"`
	Wrong   *int    `json:"wrong,omitempty"` // elements; absent if not checked
	Device  string  `json:"device"`
	Driver  string  `json:"driver,omitempty"`
	Library string  `json:"library"` // "NCCL 2.28.3", "host platform"
	Path    string  `json:"library_path,omitempty"`
}

// reduces reports whether the operation has a reduction.
func reduces(op string) bool { return op == "all-reduce" || op == "reduce-scatter" || op == "reduce" }

func (r *report) line(s series, p point) line {
	us := median(p.us)
	alg, bus := bandwidth(s.op, p.size, us, r.ranks)
	l := line{Op: s.op, Mode: s.mode, Calls: s.calls(), Place: s.place(), Type: r.c.dtype, Ranks: r.ranks, Bytes: p.size, Count: p.count,
		Us: us, MinUs: slices.Min(p.us), MaxUs: slices.Max(p.us), AlgBW: alg, BusBW: bus, N: p.n, Rounds: len(p.us),
		Buffers: r.c.turns(p.size), Device: r.info.Name, Driver: r.info.Driver, Library: r.carrier(), Path: r.library.Path}
	if len(p.enqueue) > 0 {
		l.Enqueue = median(p.enqueue)
	}
	if reduces(s.op) {
		l.Red = r.c.red
	}
	if s.captured {
		l.InGraph = r.c.perGraph
		if p.mode != s.mode {
			l.Used = p.mode
		}
		if s.mode == "auto" {
			l.Reason = p.reason
		}
	}
	if p.checked {
		l.Wrong = &p.wrong
	}
	return l
}

func (r *report) point(s series, p point) error {
	l := r.line(s, p)
	if r.c.json {
		return json.NewEncoder(r.w).Encode(l)
	}
	r.head(s)
	wrong := "-"
	if l.Wrong != nil {
		wrong = fmt.Sprint(*l.Wrong)
	}
	mode := l.Mode
	if l.Used != "" {
		mode += "=" + l.Used
	}
	_, err := fmt.Fprintf(r.w, "%12d %12d  %-12s %-8s %-5s %10.2f %10.2f %10.2f %9.2f %9.2f %6s\n", l.Bytes, l.Count, mode, l.Calls, l.Place,
		l.Us, l.MinUs, l.MaxUs, l.AlgBW, l.BusBW, wrong)
	return err
}

// head begins a table where an operation begins.
func (r *report) head(s series) {
	if r.op == s.op {
		return
	}
	if r.op == "" {
		fmt.Fprintf(r.w, "# %s", r.carrier())
		if r.library.Path != "" {
			fmt.Fprintf(r.w, " (%s)", r.library.Path)
		}
		if r.info.Driver != "" {
			fmt.Fprintf(r.w, ", driver %s", r.info.Driver)
		}
		fmt.Fprintln(r.w)
	} else {
		fmt.Fprintln(r.w)
	}
	r.op = s.op
	what := r.c.dtype
	if reduces(s.op) {
		what += ", " + r.c.red
	}
	fmt.Fprintf(r.w, "# %s of %s; %s, rank 0 on %s; times in us, bandwidths in GB/s\n", s.op, what, numRanks(r.ranks), r.device)
	fmt.Fprintf(r.w, "%12s %12s  %-12s %-8s %-5s %10s %10s %10s %9s %9s %6s\n", "bytes", "elements", "mode", "calls", "place", "time", "min", "max", "algbw", "busbw", "wrong")
}

// skipped says that a series has no such mode here.
func (r *report) skipped(s series, why error) {
	if r.c.json {
		json.NewEncoder(r.w).Encode(struct {
			Op      string `json:"op"`
			Mode    string `json:"mode"`
			Calls   string `json:"calls"`
			Place   string `json:"place"`
			Skipped string `json:"skipped"`
		}{s.op, s.mode, s.calls(), s.place(), why.Error()})
		return
	}
	r.head(s)
	fmt.Fprintf(r.w, "# %s, %s: not measured: %v\n", s.mode, s.calls(), why)
}

func numRanks(n int) string {
	if n == 1 {
		return "1 rank"
	}
	return fmt.Sprintf("%d ranks", n)
}
