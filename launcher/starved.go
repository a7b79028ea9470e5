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
// would have said is lost. So lastWords are repeated as long as ranks of this host wait for a CPU. Ranks that sleep or hang don't.

// mostWords bounds lastWords and their repetitions.
const mostWords = time.Second

// starved reports whether lastWords are to be repeated.
func (r *runner) starved() bool {
	return r.starving != nil && time.Since(r.endAt) < mostWords && r.starving()
}

// starving gives a function that tells whether some of the host's ranks that run have waited for a CPU for a third of lastWords or more since the
// last call; nil where the machine has CPUs for all.
func (h *localHost) starving() func() bool {
	if !crowded() {
		return nil
	}
	waits := func() map[int]time.Duration {
		all := map[int]time.Duration{}
		for i, r := range h.agent.cfg.ranks {
			// One that has ended and is not reaped yet has no threads.
			if pid := h.agent.pidOf(r.rank); pid != 0 {
				all[i] = waitedForCPU(pid)
			}
		}
		return all
	}
	last := waits()
	return func() bool {
		before, some := last, false
		last = waits()
		for i, waited := range last {
			some = some || waited-before[i] >= lastWords/3
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

// waitedForCPU is how long the threads that a process has now have waited for a CPU since they began, all together; 0 where the kernel does not tell.
func waitedForCPU(pid int) (sum time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file)
		if f := strings.Fields(string(text)); len(f) > 1 { // nanoseconds that it ran, that it waited, how often
			waited, _ := strconv.ParseInt(f[1], 10, 64)
			sum += time.Duration(waited)
		}
	}
	return sum
}
