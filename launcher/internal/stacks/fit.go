package stacks

import (
	"encoding/json"
	"slices"
	"strings"
)

// Fit leaves of a rank what is about size bytes as JSON: its main goroutine first, then those in which the program has a hand, of equal ones
// one, then the others; of its processes the first.
func (r *Rank) Fit(size int) {
	var all []Goroutine
	seen := map[string]bool{}
	for _, g := range r.Go {
		key := g.key()
		if g.ID == 1 || !seen[key] {
			all = append(all, g)
		}
		seen[key] = true
	}
	slices.SortStableFunc(all, func(a, b Goroutine) int { return a.weight() - b.weight() })
	r.Go = fit(all, &size, func(g Goroutine) (Goroutine, bool) {
		g.Frames = g.Frames[:len(g.Frames)/2]
		return g, len(g.Frames) > 0
	})
	r.Processes = fit(r.Processes, &size, func(p Process) (Process, bool) {
		p.Threads = p.Threads[:(len(p.Threads)+1)/2]
		return p, len(p.Threads) > 1
	})
}

// fit is as much of a list as has room. The first has it in any case, cut as often as needed: cut makes it shorter, and says whether that can be done again.
func fit[T any](list []T, size *int, cut func(T) (T, bool)) []T {
	for i := range list {
		for more := true; ; {
			text, _ := json.Marshal(list[i])
			if len(text) <= *size || i == 0 && !more {
				*size -= len(text)
				break
			}
			if i > 0 {
				return list[:i]
			}
			list[i], more = cut(list[i])
		}
	}
	return list
}

// key is the same for goroutines that do the same.
func (g *Goroutine) key() string {
	var b strings.Builder
	b.WriteString(g.State)
	for _, f := range g.Frames {
		b.WriteString("\n" + f.Func + "\n" + f.Line)
	}
	b.WriteString("\nby " + g.By)
	return b.String()
}

func (g *Goroutine) weight() int {
	switch {
	case g.ID == 1:
		return 0
	case !g.machinery():
		return 1
	}
	return 2
}
