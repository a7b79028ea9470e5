package launcher

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

func TestTracers(t *testing.T) {
	python := func(abrt, term bool) stacks.Process {
		return stacks.Process{Command: "python3.12", CatchesABRT: abrt, CatchesTERM: term}
	}
	shell, trap := stacks.Process{Command: "bash"}, stacks.Process{Command: "bash", CatchesTERM: true}
	rank := func(n int, p ...stacks.Process) RankStacks { return RankStacks{Rank: n, Processes: p} }
	for _, c := range []struct {
		name  string
		ranks []RankStacks
		want  map[int]bool
		hint  bool
	}{
		{"no Python", []RankStacks{rank(0, shell)}, map[int]bool{}, false},
		{"off", []RankStacks{rank(0, python(false, false)), rank(1, shell, python(false, true))}, map[int]bool{}, true},
		{"on", []RankStacks{rank(0, python(true, false)), rank(1, shell, python(true, false)), rank(2, shell)}, map[int]bool{0: true, 1: true}, false},
		{"on for one", []RankStacks{rank(0, python(false, false)), rank(1, python(true, false))}, map[int]bool{1: true}, false},
		{"to save something", []RankStacks{rank(0, python(true, true)), rank(1, trap, python(true, false))}, map[int]bool{}, false},
		{"another that catches SIGABRT", []RankStacks{rank(0, stacks.Process{Command: "prog", CatchesABRT: true})}, map[int]bool{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if d := cmp.Diff(tracers(c.ranks), c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			if hint := tracebackHint(c.ranks) != nil; hint != c.hint {
				t.Errorf("a hint: got %t, want %t", hint, c.hint)
			}
		})
	}
}
