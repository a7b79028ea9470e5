package stacks

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Rank is what one does: its goroutines where it could be asked, else its processes.
type Rank struct {
	Rank      int         `json:"rank"`
	Go        []Goroutine `json:"goroutines,omitempty"`
	Processes []Process   `json:"processes,omitempty"` // the rank's own first
	Err       string      `json:"error,omitempty"`     // why there is nothing
}

const (
	maxStacks = 24 // that Tell shows
	maxShown  = 12 // frames of a stack
	maxKinds  = 8  // threads of different kinds of a process
)

// stack is what ranks do alike.
type stack struct {
	title  string
	frames []string
	ranks  []int // each once
	main   bool
}

// Tell says it in lines for a person, each without a newline: what is done alike once, with the ranks, what few do before what many do. name says who
// ranks are: "ranks 0-2,4", "rank 3 (host b)". With verbose, goroutines of the Go runtime and of gorun are shown, and whole stacks.
func Tell(all []Rank, name func(ranks []int) string, verbose bool) []string {
	found := map[string]*stack{}
	add := func(rank int, main bool, title string, frames []string) {
		key := fmt.Sprint(main, title, "\n", strings.Join(frames, "\n"))
		s := found[key]
		if s == nil {
			s = &stack{title: title, frames: frames, main: main}
			found[key] = s
		}
		if n := len(s.ranks); n == 0 || s.ranks[n-1] != rank {
			s.ranks = append(s.ranks, rank)
		}
	}
	all = slices.Clone(all)
	slices.SortFunc(all, func(a, b Rank) int { return a.Rank - b.Rank })
	for _, r := range all {
		for i := range r.Go {
			g := &r.Go[i]
			if verbose || !g.machinery() {
				add(r.Rank, g.ID == 1, g.title(), g.shown(verbose))
			}
		}
		for i, p := range r.Processes {
			title, threads := p.shown()
			add(r.Rank, i == 0, title, threads)
		}
		if r.Err != "" {
			add(r.Rank, true, r.Err, nil)
		}
	}
	order := make([]*stack, 0, len(found))
	for _, s := range found {
		order = append(order, s)
	}
	slices.SortFunc(order, func(a, b *stack) int {
		if a.main != b.main {
			if a.main {
				return -1
			}
			return 1
		}
		return cmp.Or(len(a.ranks)-len(b.ranks), a.ranks[0]-b.ranks[0], strings.Compare(a.title, b.title), slices.Compare(a.frames, b.frames))
	})
	var lines []string
	for i, s := range order {
		if i == maxStacks && !verbose {
			lines = append(lines, fmt.Sprintf("and %d more", len(order)-i))
			break
		}
		lines = append(lines, name(s.ranks)+": "+s.title)
		for _, f := range s.frames {
			lines = append(lines, "  "+f)
		}
	}
	return lines
}

func (g *Goroutine) title() string {
	kind := "goroutine"
	if g.ID == 1 {
		kind = "main goroutine"
	}
	return fmt.Sprintf("%s, %s", kind, g.State)
}

// shown are the frames, without those below what the program called: of gorun, and of the Go runtime.
func (g *Goroutine) shown(verbose bool) []string {
	frames := g.Frames
	if !verbose {
		called := 0
		for i, f := range frames {
			if !own(f.Func) {
				break
			}
			if strings.HasPrefix(f.Func, module) {
				called = i
			}
		}
		frames = frames[called:]
		for len(frames) > 1 && innards(frames[0].Func) {
			frames = frames[1:]
		}
	}
	var out []string
	for i, f := range frames {
		if i == maxShown && !verbose {
			out = append(out, fmt.Sprintf("and %d more", len(frames)-i))
			break
		}
		out = append(out, fmt.Sprintf("%s (%s)", f.Func, f.Line))
	}
	if g.By != "" {
		out = append(out, "started by "+g.By)
	}
	return out
}

// shown is the state of the first thread, and a line for each kind of the others. The process's number would keep equal ones apart.
func (p Process) shown() (title string, others []string) {
	title = p.Command + ", " + p.Threads[0].doing()
	counts := map[string]int{}
	for _, t := range p.Threads[1:] {
		counts[t.doing()]++
	}
	for doing, n := range counts {
		threads := "threads"
		if n == 1 {
			threads = "thread"
		}
		others = append(others, fmt.Sprintf("%d other %s %s", n, threads, doing))
	}
	slices.Sort(others)
	if len(others) > maxKinds {
		others = append(others[:maxKinds], fmt.Sprintf("and %d other kinds of threads", len(others)-maxKinds))
	}
	return title, others
}

func (t Thread) doing() string {
	switch {
	case t.State == "running":
		return "running"
	case t.Syscall != "":
		return t.State + " in " + t.Syscall
	case t.Where != "":
		return t.State + " in the kernel's " + t.Where
	}
	return t.State
}
