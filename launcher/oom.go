package launcher

import "github.com/gorun-dev/gorun/launcher/internal/hostfacts"

// oomWatch tells whether the kernel has killed processes for lack of memory, by its own count for our control group, where ranks are, too.
type oomWatch struct {
	count func() (int, bool)
	seen  int
}

func newOOMWatch() *oomWatch {
	w := &oomWatch{count: hostfacts.OOMKills}
	w.seen, _ = w.count()
	return w
}

// killed reports whether the kernel has killed one more process than it was asked about. The count is raised before the signal is sent: who
// sees the process's end sees it.
func (w *oomWatch) killed() bool {
	n, ok := w.count()
	if !ok || n <= w.seen {
		return false
	}
	w.seen++
	return true
}
