package launcher

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// On a machine with more to do than it has CPUs, ranks that fail by the same cause as the first one may not get to run within lastWords, and what they
// would have said is lost. So lastWords are repeated as long as ranks of this host wait for a CPU. Ranks that sleep, hang or spin don't.

// mostWords bounds lastWords and their repetitions.
const mostWords = time.Second

// starved reports whether lastWords are to be repeated.
func (r *runner) starved() bool {
	return r.starving != nil && time.Since(r.endAt) < mostWords && r.starving()
}

// starving gives a function that tells whether some of the host's ranks have waited for a CPU for a third of lastWords or more since the last call;
// nil where the machine has CPUs for all. A thread that has run for lastWords since starving was called has had what it gets on any machine, and
// spins: it doesn't count any more.
func (h *localHost) starving() func() bool {
	if !crowded() {
		return nil
	}
	return hungry(func() (pids []int) {
		for _, r := range h.agent.cfg.ranks {
			// One that has ended and is not reaped yet has no threads.
			if pid := h.agent.pidOf(r.rank); pid != 0 {
				pids = append(pids, pid)
			}
		}
		return pids
	})
}

// hungry is starving for processes.
func hungry(pids func() []int) func() bool {
	look := func() map[int]map[string]cpuTime {
		all := map[int]map[string]cpuTime{}
		for _, pid := range pids() {
			all[pid] = cpuTimes(pid)
		}
		return all
	}
	first := look()
	last := first
	return func() bool {
		before, some := last, false
		last = look()
		for pid, threads := range last {
			var waited time.Duration
			for id, t := range threads {
				if t.ran-first[pid][id].ran < lastWords {
					waited += t.waited - before[pid][id].waited
				}
			}
			some = some || waited >= lastWords/3
		}
		return some
	}
}

// starving is nothing for a host elsewhere: there the ranks are alone more often, and a signal is longer on its way.
func (h *remoteHost) starving() func() bool { return nil }

// crowded reports whether threads wait for a CPU on this machine.
func crowded() bool {
	text, err := os.ReadFile("/proc/loadavg")
	return err == nil && runnable(string(text)) > runtime.NumCPU()+1 // this thread runs, too
}

// runnable is how many threads run or could run, by /proc/loadavg; 0 if it does not say so.
func runnable(loadavg string) int {
	n := 0
	fmt.Sscanf(loadavg, "%f %f %f %d/", new(float64), new(float64), new(float64), &n)
	return n
}

// cpuTime is for how long a thread has run, and has waited for a CPU.
type cpuTime struct{ ran, waited time.Duration }

// cpuTimes are those of the threads that a process has now; none where the kernel does not tell.
func cpuTimes(pid int) map[string]cpuTime {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	all := map[string]cpuTime{}
	for _, file := range files {
		text, _ := os.ReadFile(file)
		if f := strings.Fields(string(text)); len(f) > 1 { // both in nanoseconds, and how often it ran
			ran, _ := strconv.ParseInt(f[0], 10, 64)
			waited, _ := strconv.ParseInt(f[1], 10, 64)
			all[file] = cpuTime{time.Duration(ran), time.Duration(waited)}
		}
	}
	return all
}
