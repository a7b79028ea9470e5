package graphs

import (
	"log/slog"
	"slices"
	"sync"

	"github.com/gorun-dev/gorun/cuda"
)

// Live names the graphs of this process that are not closed, in the order of their captures.
func Live() []string {
	live.Lock()
	defer live.Unlock()
	var names []string
	for _, st := range live.graphs {
		names = append(names, st.String())
	}
	return names
}

// live are the graphs that are not closed.
var live liveGraphs

type liveGraphs struct {
	sync.Mutex
	graphs []*state
}

func (l *liveGraphs) add(st *state) {
	l.Lock()
	defer l.Unlock()
	l.graphs = append(l.graphs, st)
}

func (l *liveGraphs) remove(st *state) {
	l.Lock()
	defer l.Unlock()
	if i := slices.Index(l.graphs, st); i >= 0 {
		l.graphs = slices.Delete(l.graphs, i, i+1)
	}
}

// lose runs when the collector has found a Graph that was not closed. It only notes it: what the graph holds is given back in an order
// and at a time that the program can know, by Drain or Close of its communicators, or before the next capture.
func lose(st *state) {
	st.mu.Lock()
	st.lost = true
	st.mu.Unlock()
	slog.Warn("graph was not closed and is no longer reachable; it will be released by Drain or Close of its communicators", "graph", st.String())
}

// releaseLost closes the lost graphs of a device: one without communicators has nothing else to do it.
func releaseLost(d *cuda.Device) {
	live.Lock()
	graphs := slices.Clone(live.graphs)
	live.Unlock()
	for _, st := range graphs {
		if st.launches.device == d {
			st.Drain()
		}
	}
}

// launchOrder makes the launches on one device atomic against each other.
type launchOrder struct {
	sync.Mutex
	device *cuda.Device
	users  int // captures and graphs; guarded by orders
}

var orders = struct {
	sync.Mutex
	of map[*cuda.Device]*launchOrder
}{of: map[*cuda.Device]*launchOrder{}}

func orderOf(d *cuda.Device) *launchOrder {
	orders.Lock()
	defer orders.Unlock()
	o := orders.of[d]
	if o == nil {
		o = &launchOrder{device: d}
		orders.of[d] = o
	}
	o.users++
	return o
}

// done gives up a use.
func (o *launchOrder) done() {
	orders.Lock()
	defer orders.Unlock()
	if o.users--; o.users == 0 {
		delete(orders.of, o.device)
	}
}
