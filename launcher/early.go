package launcher

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// Between its fork and its watch a rank can end without anybody being told, and on a busy machine that takes a while: the fork gives its number only
// when its thread runs again. The time of such an end is when anybody here first saw it: the watcher whenever another rank has failed, and every
// earlyLook; the forking thread; who hears of a signal or the timeout. So a rank that ended before another one, of which we knew already, is
// never taken for the later one; the other way round that needs the watcher to be as late as the time between the two ends.

// earlyLook is how often the watcher looks whether the rank that is being started has ended: seldom, as that is time of a CPU which forks. Only on a
// machine so busy that a start takes longer do ends on several hosts hang on it.
const earlyLook = 25 * time.Millisecond

// lookEarly looks whether the rank that is being started has ended.
func (a *agent) lookEarly() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.startingLives()
}

// startingLives reports whether a rank is being started that has not ended yet, as far as can be known, and notes when it was first seen to have.
// The caller holds mu.
func (a *agent) startingLives() bool {
	i := a.starting
	if i < 0 || !a.gone[i].IsZero() {
		return false
	}
	ended := false
	if pid := a.pids[i]; pid != 0 {
		ended = isZombie(pid)
	} else { // the fork has not told its number yet
		ended = slices.ContainsFunc(a.children(), func(pid int) bool {
			return !slices.Contains(a.pids, pid) && !a.cfg.spare[pid] && isZombie(pid)
		})
	}
	if ended {
		a.gone[i] = time.Now()
	}
	return !ended
}

// known takes note that the number of the rank that is being started is known: if it lives, it was another child that was seen to have ended,
// one that was adopted. The caller holds mu.
func (a *agent) known(i int) {
	if !isZombie(a.pids[i]) {
		a.gone[i] = time.Time{}
	} else if a.gone[i].IsZero() {
		a.gone[i] = time.Now()
	}
}

// children are the processes that the forking thread has started, and perhaps others of this process.
func (a *agent) children() (pids []int) {
	if text, err := os.ReadFile("/proc/self/task/" + strconv.Itoa(a.forker) + "/children"); err == nil {
		for _, one := range strings.Fields(string(text)) {
			if pid, err := strconv.Atoi(one); err == nil {
				pids = append(pids, pid)
			}
		}
		return pids
	}
	// A kernel without that file.
	self := syscall.Getpid()
	for _, p := range keeper.Processes() {
		if p.Parent == self {
			pids = append(pids, p.PID)
		}
	}
	return pids
}
