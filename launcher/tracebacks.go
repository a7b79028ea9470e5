package launcher

import (
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

// Python says where it is only to those whom it has told how: PYTHONFAULTHANDLER=1 has it catch SIGABRT, write where each of its threads is to stderr, and
// die of the signal. Ranks that do so get SIGABRT instead of SIGTERM when the job's time is over; those that catch SIGTERM, too, get it before SIGKILL: they may want
// to save what they have, but JAX catches SIGTERM in every program, and does not end by it.

func isPython(p stacks.Process) bool { return strings.HasPrefix(p.Command, "python") }

// tracers are the ranks of which a process is such a Python: those that get SIGABRT at once, and those that get it later.
func tracers(ranks []RankStacks) (atOnce, later map[int]bool) {
	atOnce, later = map[int]bool{}, map[int]bool{}
	for _, r := range ranks {
		switch {
		case !slices.ContainsFunc(r.Processes, func(p stacks.Process) bool { return isPython(p) && p.CatchesABRT }):
		case slices.ContainsFunc(r.Processes, func(p stacks.Process) bool { return p.CatchesTERM }):
			later[r.Rank] = true
		default:
			atOnce[r.Rank] = true
		}
	}
	return atOnce, later
}

// tracebackTime is what a rank has to write its traceback between SIGABRT and SIGKILL.
const tracebackTime = 500 * time.Millisecond

// tracebackHint is a line for a person whose Python ranks do not write where they are; nil where some would, or there are none.
func tracebackHint(ranks []RankStacks) []string {
	var hint []string
	for _, r := range ranks {
		for _, p := range r.Processes {
			switch {
			case !isPython(p):
			case p.CatchesABRT:
				return nil
			default:
				hint = []string{"with -x PYTHONFAULTHANDLER=1 Python's ranks write their tracebacks at --timeout"}
			}
		}
	}
	return hint
}

// askToEnd sends SIGTERM, and SIGABRT to those who then write where they are.
func (r *runner) askToEnd(pick func(rank int) bool) {
	if len(r.traces) == 0 {
		r.toRanks(syscall.SIGTERM, pick)
		return
	}
	r.toRanks(syscall.SIGTERM, func(rank int) bool { return !r.traces[rank] && (pick == nil || pick(rank)) })
	r.toRanks(syscall.SIGABRT, func(rank int) bool { return r.traces[rank] && (pick == nil || pick(rank)) })
}

// abort sends SIGABRT to those processes of each session that catch it, to all of its process group if none does, and continues them; processes is the process
// table. A script that has started Python ends when that has ended: at its own end gorun would kill what has not yet written where it is.
func abort(sessions []int, processes []keeper.Process) {
	found := map[int]bool{}
	for _, session := range sessions {
		found[session] = false
	}
	for _, p := range processes {
		if _, is := found[p.Session]; is && stacks.CatchesABRT(p.PID) {
			syscall.Kill(p.PID, syscall.SIGABRT)
			found[p.Session] = true
		}
	}
	for session, some := range found {
		if !some {
			syscall.Kill(-session, syscall.SIGABRT)
		}
		syscall.Kill(-session, syscall.SIGCONT)
	}
}
