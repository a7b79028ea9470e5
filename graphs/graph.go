package graphs

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// Graph is an executable graph with the registrations of its buffers. Its methods may be called from several goroutines.
type Graph struct {
	st      *state
	cleanup runtime.Cleanup
}

// CallInfo is one captured call.
type CallInfo struct {
	Call   string // "all-reduce of 1024 float32, sum"
	Comm   string // name of the communicator
	Place  string // of the call in the program: "train.go:43"
	Mode   nccl.Mode
	Reason string // why this mode
}

// String is "all-reduce of 1024 float32, sum on world at train.go:43: mode graph: registered by the capture".
func (c CallInfo) String() string {
	return fmt.Sprintf("%s on %s at %s: mode %v: %s", c.Call, c.Comm, c.Place, c.Mode, c.Reason)
}

// Launch enqueues a replay. Collective: all members replay the same graphs of a communicator in the same order; where a member is known to do
// something else it is an error at once. Launches of this rank's graphs do not overtake each other. It does not wait.
func (g *Graph) Launch(s *cuda.Stream) error {
	err := g.st.launch(s)
	runtime.KeepAlive(g)
	return err
}

// Close destroys the graph. Its registrations, and the memory that was freed meanwhile, go with it when the last replay in flight has
// ended: at once if there is none (on a GPU a moment later: Comm.Drain waits for it), else when the stream comes there. Comm.Stats counts them as
// pending until then. Local. Twice is fine.
func (g *Graph) Close() error {
	g.cleanup.Stop()
	err := g.st.close()
	runtime.KeepAlive(g)
	return err
}

// Calls tells how each captured call runs and why.
func (g *Graph) Calls() []CallInfo { return slices.Clone(g.st.calls) }

// String is "graph captured at train.go:41", with the name if it has one.
func (g *Graph) String() string { return g.st.String() }

// state is the graph itself. It does not point to its Graph, so that one which the program has lost can be told.
type state struct {
	name, place string
	title       string // "graph captured at train.go:41"
	launches    *launchOrder

	// Of the capture, unchanged after it.
	calls []CallInfo
	uses  []use

	mu      sync.Mutex // guards what follows; never held over a call that may come back (destroy, detach)
	tmpl    *cuda.Graph
	exec    *cuda.GraphExec
	busy    int // launches in progress that may use exec
	closed  bool
	lost    bool
	broken  error
	regs    []registration
	windows []func() // lets go of the library's
	holds   []held
	detach  []func()

	released sync.Once
}

// use is a communicator of a graph.
type use struct {
	c   *nccl.Comm
	key uint64 // equal on all members
}

type registration struct {
	c   *nccl.Comm
	mem *cuda.Memory
	reg *nccl.Registration
}

type held struct {
	mem  *cuda.Memory
	hold *cuda.Hold
}

func newState(d *cuda.Device, name, place string) *state {
	st := &state{name: name, place: place, launches: orderOf(d)}
	st.title = "graph" + st.label() + " captured at " + place
	return st
}

func (st *state) label() string {
	if st.name == "" {
		return ""
	}
	return fmt.Sprintf(" %q", st.name)
}

func (st *state) String() string { return st.title }

// hold keeps memory for as long as the graph is there; freeing it meanwhile is an error while the graph lives.
func (st *state) hold(m *cuda.Memory) error {
	if m == nil || slices.ContainsFunc(st.holds, func(h held) bool { return h.mem == m }) {
		return nil
	}
	h, err := m.Hold(st.String(), true)
	if err != nil {
		return err
	}
	st.holds = append(st.holds, held{m, h})
	return nil
}

// register registers memory with a communicator once; fresh where it was not yet.
func (st *state) register(c *nccl.Comm, m *cuda.Memory) (fresh bool, err error) {
	if st.registered(c, m) >= 0 {
		return false, nil
	}
	r, err := c.RegisterGraph(m)
	if err != nil {
		return false, err
	}
	st.regs = append(st.regs, registration{c, m, r})
	return true, nil
}

func (st *state) registered(c *nccl.Comm, m *cuda.Memory) int {
	return slices.IndexFunc(st.regs, func(r registration) bool { return r.c == c && r.mem == m })
}

func (st *state) unregister(c *nccl.Comm, m *cuda.Memory) {
	if i := st.registered(c, m); i >= 0 {
		st.regs[i].reg.Close()
		st.regs = slices.Delete(st.regs, i, i+1)
	}
}

func (st *state) addCall(c *nccl.Comm, call nccl.Call, place string, ch choice) {
	st.calls = append(st.calls, CallInfo{Call: call.String(), Comm: c.Name(), Place: place, Mode: ch.mode, Reason: ch.reason})
}

// seal makes the template executable. The release is attached first: it must come after the last replay of every executable.
func (st *state) seal(tmpl *cuda.Graph) error {
	if err := tmpl.OnRelease(st.release); err != nil {
		return err // its end will not release: abandon does
	}
	x, err := tmpl.Instantiate()
	st.mu.Lock()
	defer st.mu.Unlock()
	st.tmpl = tmpl
	if err != nil {
		return err
	}
	st.exec = x
	return st.broken // a communicator may have been aborted since it was attached
}

// open hands the state to the program.
func (st *state) open() *Graph {
	live.add(st)
	g := &Graph{st: st}
	g.cleanup = runtime.AddCleanup(g, lose, st)
	return g
}

// abandon undoes a capture that did not become a graph.
func (st *state) abandon(tmpl *cuda.Graph) {
	st.close()
	if tmpl != nil {
		tmpl.Destroy() // ErrClosed where close has done it, or a communicator that failed
	}
	st.release()
}

// acquire keeps exec for a launch.
func (st *state) acquire() (*cuda.GraphExec, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.broken != nil:
		return nil, fmt.Errorf("launch %v: %w", st, st.broken)
	case st.closed:
		return nil, fmt.Errorf("launch %v: %w", st, ErrClosed)
	}
	st.busy++
	return st.exec, nil
}

// leave ends a launch; who comes last after the end of the graph destroys what the launch still used.
func (st *state) leave() error {
	st.mu.Lock()
	st.busy--
	st.mu.Unlock()
	return st.destroy()
}

// destroy gives up the executable and the template as soon as no launch is in progress. Also where a communicator has failed: NCCL's abort waits
// for whatever has its registrations, and the template has them too.
func (st *state) destroy() error {
	st.mu.Lock()
	var x *cuda.GraphExec
	var t *cuda.Graph
	if st.busy == 0 && (st.closed || st.broken != nil) {
		x, st.exec = st.exec, nil
		t, st.tmpl = st.tmpl, nil
	}
	st.mu.Unlock()
	// With no lock: the release may run in here.
	var errs []error
	if x != nil {
		errs = append(errs, x.Destroy())
	}
	if t != nil {
		errs = append(errs, t.Destroy())
	}
	return errors.Join(errs...)
}

func (st *state) launch(s *cuda.Stream) error {
	x, err := st.acquire()
	if err != nil {
		return err
	}
	begun, err := st.replay(s, x)
	left := st.leave() // first: an abort waits until the graph is gone
	if err != nil {
		err = fmt.Errorf("launch %v: %w", st, err)
		// The others were told of a replay that does not come. Abort breaks this graph, too: not under the lock of launches.
		for _, u := range st.uses[:begun] {
			u.c.Abort(err)
		}
	}
	return errors.Join(err, left)
}

// replay enqueues the launch between its marks on each communicator. After an error the first begun communicators may have the mark of a
// replay that was not enqueued.
func (st *state) replay(s *cuda.Stream, x *cuda.GraphExec) (begun int, err error) {
	if s.Device() != st.launches.device {
		return 0, errors.New("the stream is of another device")
	}
	if s.Capture() != nil {
		return 0, cuda.ErrCaptureUnsafe
	}
	for _, u := range st.uses {
		if err := u.c.Err(); err != nil {
			return 0, err
		}
	}
	// Two graphs that share two communicators must come in one order on both.
	st.launches.Lock()
	defer st.launches.Unlock()
	var few [4]nccl.Replay
	replays := few[:0]
	for _, u := range st.uses {
		r, err := u.c.BeginReplay(u.key, st.title)
		if err != nil {
			return len(replays), err
		}
		replays = append(replays, r)
	}
	for _, r := range replays {
		if err := r.Before(s); err != nil {
			return len(replays), err
		}
	}
	if err := x.Launch(s); err != nil {
		return len(replays), err
	}
	for _, r := range replays {
		if err := r.After(s); err != nil {
			return len(replays), err
		}
	}
	return len(replays), nil
}

// close ends the graph's life: memory may be freed, communicators closed. What replays in flight still use goes when they have ended.
func (st *state) close() error {
	st.mu.Lock()
	if st.closed {
		st.mu.Unlock()
		return nil
	}
	st.closed = true
	detach := st.detach
	st.detach = nil
	st.goes()
	st.mu.Unlock()
	live.remove(st)
	err := st.destroy()
	for _, d := range detach {
		d()
	}
	if err != nil {
		return fmt.Errorf("close %v: %w", st, err)
	}
	return nil
}

// goes has what the graph holds wait for its release only: memory may be freed. mu is held.
func (st *state) goes() {
	for _, r := range st.regs {
		r.reg.SetPending()
	}
	for _, h := range st.holds {
		h.hold.SetLive(false)
	}
}

// release lets go of memory, then of the registrations, which keep theirs: who has seen those go (Comm.Drain) finds the memory gone. It runs when template, executable and replays are gone, on whichever goroutine saw the last go.
func (st *state) release() {
	st.released.Do(func() {
		st.mu.Lock()
		st.goes() // who closes it meanwhile does not find them here any more
		regs, holds, windows := st.regs, st.holds, st.windows
		st.regs, st.holds, st.windows = nil, nil, nil
		st.mu.Unlock()
		for _, end := range windows {
			end()
		}
		for _, h := range holds {
			h.hold.Release()
		}
		for _, r := range regs {
			r.reg.Close()
		}
		st.launches.done()
	})
}

// Break is called by a communicator that fails: the graph goes, later launches return the cause.
func (st *state) Break(cause error) {
	st.mu.Lock()
	if st.broken == nil {
		st.broken = cause
	}
	st.mu.Unlock()
	st.destroy()
}

// Drain releases the graph if the program has lost it. Communicators call it from their Drain and Close.
func (st *state) Drain() {
	st.mu.Lock()
	lost := st.lost
	st.mu.Unlock()
	if lost {
		st.close()
	}
}
