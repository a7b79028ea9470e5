package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/gorun-dev/gorun/rankenv"
)

// registrationReport is what the check has found, the same on all ranks.
type registrationReport struct {
	Ranks    int       `json:"ranks"`
	Device   string    `json:"device"`            // rank 0's
	Library  string    `json:"library,omitempty"` // NCCL; "" on the host platform
	Version  string    `json:"version,omitempty"`
	Path     string    `json:"path,omitempty"`
	Known    bool      `json:"log_known"` // whether the log of this version is known
	Rows     []row     `json:"buffers"`
	Problems []problem `json:"problems"`
}

// problem is a fault with a line of advice.
type problem struct {
	Ranks  []int  `json:"ranks"`
	What   string `json:"what"`
	Advice string `json:"advice"`
}

// tellProblems makes problems of the rows that have one, those of several ranks together.
func (r *registrationReport) tellProblems() {
	r.Problems = []problem{}
	if !r.Known {
		r.Problems = append(r.Problems, problem{[]int{}, fmt.Sprintf("the log of %s %s is not known to this gorun; what it shows is not proven", r.Library, r.Version),
			fmt.Sprintf("the logs of NCCL %v to %v are known; use one of these (GORUN_NCCL_LIB=FILE), or a newer gorun", oldestForm, newestForm)})
	}
	for _, w := range r.Rows {
		if w.Problem == "" {
			continue
		}
		what := fmt.Sprintf("%s, %s: %s", w.Memory, w.Call, w.Problem)
		i := slices.IndexFunc(r.Problems, func(p problem) bool { return p.What == what })
		if i < 0 {
			i = len(r.Problems)
			r.Problems = append(r.Problems, problem{What: what, Advice: advice(r, w)})
		}
		if p := &r.Problems[i]; !slices.Contains(p.Ranks, w.Rank) {
			p.Ranks = append(p.Ranks, w.Rank)
		}
	}
}

// advice is one line on what to look at.
func advice(r *registrationReport, w row) string {
	switch {
	case w.Registered == regUnknown:
		return "report the line: " + w.Line
	case r.Library == "":
		return "this is a defect of gorun's host platform; report it with the output of --json"
	case strings.HasPrefix(w.Problem, "the library has not") && strings.Contains(w.Line, "failed"):
		return "the library says: " + w.Line
	case strings.HasPrefix(w.Problem, "the library has not"):
		return "Comm.Drain, or a new communicator, gives it back; if it is not among the known faults (nccl.Explain), report it"
	case w.Mode == "plain":
		return "unset " + r.Library + "_LEGACY_CUDA_REGISTER; else report it"
	case w.Registered == regRefused:
		return "the library's reason: " + w.Line
	case w.Mode == "window":
		return "do the GPUs reach each other directly (nvidia-smi topo -p2p r)? is NCCL_WIN_ENABLE=0 or NCCL_CUMEM_ENABLE=0 set?"
	default:
		return "do the GPUs reach each other directly (nvidia-smi topo -p2p r)? is NCCL_GRAPH_REGISTER, NCCL_LOCAL_REGISTER or NCCL_CUMEM_ENABLE 0, or NCCL_ALGO or NCCL_PROTO set?"
	}
}

// same reports whether two ranks' rows tell the same.
func (w row) same(o row) bool {
	w.Rank, w.Line, w.Reason = o.Rank, o.Line, o.Reason
	return w == o
}

// table are the rows for people: ranks that agree are one line.
func (r *registrationReport) table() [][]row {
	var groups [][]row
	for _, w := range r.Rows {
		i := slices.IndexFunc(groups, func(g []row) bool { return g[0].same(w) })
		if i < 0 {
			i = len(groups)
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], w)
	}
	// In the order of the cases, which all ranks have gone through alike.
	first := func(g []row) int {
		return slices.IndexFunc(r.Rows, func(w row) bool {
			return w.Memory == g[0].Memory && w.Call == g[0].Call && w.Buffer == g[0].Buffer
		})
	}
	slices.SortStableFunc(groups, func(a, b []row) int { return cmp.Compare(first(a), first(b)) })
	return groups
}

func (r *registrationReport) write(w io.Writer, asJSON bool) error {
	if asJSON {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Registration on %s, rank 0 on %s", numRanks(r.Ranks), r.Device)
	if r.Library == "" {
		b.WriteString("; by the communicators' counters\n\n")
	} else {
		fmt.Fprintf(&b, "; by the log of %s %s (%s)\n\n", r.Library, r.Version, r.Path)
	}
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "memory\tcall\tbuffer\tranks\tmode\tregistered\treleased")
	for _, g := range r.table() {
		ranks := "all"
		if len(g) < r.Ranks {
			ranks = rankList(g)
		}
		w := g[0]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", w.Memory, w.Call, w.Buffer, ranks, cmp.Or(w.Mode, "-"), w.Registered, cmp.Or(w.Released, "-"))
	}
	t.Flush()
	notes := r.notes()
	if len(notes) > 0 {
		b.WriteString("\n" + strings.Join(notes, "\n") + "\n")
	}
	b.WriteString("\n")
	for _, p := range r.Problems {
		who := ""
		if len(p.Ranks) > 0 && len(p.Ranks) < r.Ranks {
			who = fmt.Sprintf("%s: ", rankenv.RankText(slices.Sorted(slices.Values(p.Ranks))))
		}
		fmt.Fprintf(&b, "fault: %s%s\n       %s\n", who, p.What, p.Advice)
	}
	if len(r.Problems) == 0 {
		b.WriteString("All as expected.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// notes are the reasons why buffers are not registered, each once.
func (r *registrationReport) notes() []string {
	var notes []string
	for _, w := range r.Rows {
		why := w.Reason
		if w.Line != "" {
			why = strings.TrimPrefix(why+"; "+r.Library+": "+w.Line, "; ")
		}
		if w.really() || w.Rank != 0 || why == "" || w.Problem != "" {
			continue
		}
		note := fmt.Sprintf("%s, %s: %s: %s", w.Memory, w.Call, w.Registered, why)
		if !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	return notes
}

func rankList(g []row) string {
	var ranks []int
	for _, w := range g {
		ranks = append(ranks, w.Rank)
	}
	slices.Sort(ranks)
	return rankenv.RankList(ranks)
}
