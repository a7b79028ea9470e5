package launcher

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

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
		later map[int]bool
		hint  bool
	}{
		{"no Python", []RankStacks{rank(0, shell)}, nil, nil, false},
		{"off", []RankStacks{rank(0, python(false, false)), rank(1, shell, python(false, true))}, nil, nil, true},
		{"on", []RankStacks{rank(0, python(true, false)), rank(1, shell, python(true, false)), rank(2, shell)}, map[int]bool{0: true, 1: true}, nil, false},
		{"on for one", []RankStacks{rank(0, python(false, false)), rank(1, python(true, false))}, map[int]bool{1: true}, nil, false},
		{"to save something", []RankStacks{rank(0, python(true, true)), rank(1, trap, python(true, false))}, nil, map[int]bool{0: true, 1: true}, false},
		{"another that catches SIGABRT", []RankStacks{rank(0, stacks.Process{Command: "prog", CatchesABRT: true})}, nil, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			atOnce, later := tracers(c.ranks)
			if d := cmp.Diff(atOnce, c.want, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			if d := cmp.Diff(later, c.later, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("later: -got +want:\n%s", d)
			}
			if hint := tracebackHint(c.ranks) != nil; hint != c.hint {
				t.Errorf("a hint: got %t, want %t", hint, c.hint)
			}
		})
	}
}
