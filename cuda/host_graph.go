package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
)

// hostGraph is a template: tasks and who comes after whom. Its executables share the tasks, so one launch of any of them runs at a time,
// in the order of the Launch calls.
type hostGraph struct {
	h     *hostDevice
	nodes []graphNode
	roots []int32

	mu        sync.Mutex // guards what follows; nothing is called under it
	destroyed bool
	users     []*userObject
	queue     []*hostStream // launches in flight, in order

	// The driver's: the run under way.
	runner  *hostStream // nil between runs
	missing []int32     // for each node, how many it still waits for
	active  []int32     // nodes that were started and are not done
	todo    int
}

type graphNode struct {
	task Task
	deps int32
	next []int32
}

// userObject is a release callback; its references are the template and the executables that were made since it was attached.
type userObject struct {
	fn   func()
	refs int
}

func newHostGraph(h *hostDevice, captured []capturedNode) *hostGraph {
	g := &hostGraph{h: h, nodes: make([]graphNode, len(captured)),
		missing: make([]int32, len(captured)), active: make([]int32, 0, len(captured))}
	for i, n := range captured {
		g.nodes[i].task = n.task
		g.nodes[i].deps = int32(len(n.deps))
		if len(n.deps) == 0 {
			g.roots = append(g.roots, int32(i))
		}
		for _, d := range n.deps {
			g.nodes[d].next = append(g.nodes[d].next, int32(i))
		}
	}
	return g
}

func (g *hostGraph) numNodes() int { return len(g.nodes) }

func (g *hostGraph) closedError(op string) error {
	return &Error{Op: op, Detail: fmt.Sprintf("graph of %d nodes", len(g.nodes)), Err: ErrClosed}
}

func (g *hostGraph) onRelease(fn func()) error {
	if fn == nil {
		return &Error{Op: "attach release callback", Err: errors.New("nil")}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.destroyed {
		return g.closedError("attach release callback")
	}
	g.users = append(g.users, &userObject{fn: fn, refs: 1})
	return nil
}

func (g *hostGraph) instantiate() (platformExec, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.destroyed {
		return nil, g.closedError("instantiate")
	}
	x := &hostExec{g: g, refs: 1, users: slices.Clone(g.users)}
	for _, u := range x.users {
		u.refs++
	}
	return x, nil
}

func (g *hostGraph) destroy() error {
	g.mu.Lock()
	if g.destroyed {
		g.mu.Unlock()
		return g.closedError("destroy graph")
	}
	g.destroyed = true
	due := unref(g.users)
	g.users = nil
	g.mu.Unlock()
	callAll(due)
	return nil
}

// unref takes one reference of each and returns those that have none left, in order.
func unref(users []*userObject) (due []func()) {
	for _, u := range users {
		if u.refs--; u.refs == 0 {
			due = append(due, u.fn)
		}
	}
	return due
}

func callAll(fns []func()) {
	for _, fn := range fns {
		fn()
	}
}

// hostExec is an executable. Its references are its owner and its launches in flight; guarded by g.mu.
type hostExec struct {
	g         *hostGraph
	refs      int
	destroyed bool
	users     []*userObject
}

func (x *hostExec) launch(p platformStream) error {
	const op = "launch graph"
	s, g := p.(*hostStream), x.g
	s.mu.Lock()
	err := s.usable(op)
	if err == nil && s.rec != nil {
		err = s.recordNode(op, entry{exec: x})
	}
	if err == nil {
		g.mu.Lock()
		if x.destroyed {
			err = g.closedError(op)
		} else {
			x.refs++
			g.queue = append(g.queue, s)
			s.push(entry{exec: x})
		}
		g.mu.Unlock()
	}
	s.mu.Unlock()
	if err == nil {
		s.notify()
	}
	return err
}

func (x *hostExec) destroy() error {
	g := x.g
	g.mu.Lock()
	if x.destroyed {
		g.mu.Unlock()
		return g.closedError("destroy executable graph")
	}
	x.destroyed = true
	due := x.unref()
	g.mu.Unlock()
	callAll(due)
	return nil
}

// unref gives one reference up. g.mu is held.
func (x *hostExec) unref() []func() {
	if x.refs--; x.refs > 0 {
		return nil
	}
	users := x.users
	x.users = nil
	return unref(users)
}

// left is called once for each launch when it has left its stream, done or not. The driver's.
func (x *hostExec) left(s *hostStream) {
	g := x.g
	if g.runner == s {
		g.runner = nil
	}
	g.mu.Lock()
	i := slices.Index(g.queue, s)
	g.queue = slices.Delete(g.queue, i, i+1)
	due := x.unref()
	g.mu.Unlock()
	if len(due) > 0 {
		// Not on the driver: a callback may take its time and may use the device.
		g.h.helpers.Go(func() { callAll(due) })
	}
}

// String says where the run is.
func (x *hostExec) String() string {
	g := x.g
	text := fmt.Sprintf("a graph of %d nodes", len(g.nodes))
	switch {
	case g.runner == nil:
		return text + ", waiting for its previous launch"
	case len(g.active) > 0:
		n := g.active[0]
		return fmt.Sprintf("%s, node %d: %s", text, n, describe(g.nodes[n].task))
	}
	return text
}

// nodesAtOnce bounds what a graph does before other streams have their turn.
const nodesAtOnce = 64

// step runs the graph's nodes as far as that goes, for a launch on s. The driver's.
func (x *hostExec) step(s *hostStream) (progress, done bool, err error) {
	g := x.g
	if g.runner != s {
		if !g.turn(s) {
			return false, false, nil
		}
		g.begin(s)
		progress = true
	}
	finished := 0
	for i := 0; i < len(g.active); {
		n := g.active[i]
		done, err := g.nodes[n].task.Step()
		if err != nil {
			g.active = slices.Delete(g.active, i, i+1) // it knows
			g.cancel(err)
			return true, false, err
		}
		if !done {
			i++
			continue
		}
		g.active = slices.Delete(g.active, i, i+1)
		g.todo--
		finished++
		for _, next := range g.nodes[n].next {
			if g.missing[next]--; g.missing[next] == 0 {
				g.start(next)
			}
		}
		if finished == nodesAtOnce {
			break
		}
	}
	return progress || finished > 0, g.todo == 0, nil
}

// turn reports whether the launch on s is the first of those in flight; one that runs stays the first until it has left.
func (g *hostGraph) turn(s *hostStream) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.queue[0] == s
}

func (g *hostGraph) begin(s *hostStream) {
	g.runner, g.todo, g.active = s, len(g.nodes), g.active[:0]
	for i := range g.nodes {
		g.missing[i] = g.nodes[i].deps
	}
	for _, n := range g.roots {
		g.start(n)
	}
}

func (g *hostGraph) start(n int32) {
	g.active = append(g.active, n)
	g.nodes[n].task.Start()
}

// cancel tells the tasks that were under way, if the launch on s is.
func (x *hostExec) cancel(s *hostStream, cause error) {
	if x.g.runner == s {
		x.g.cancel(cause)
	}
}

func (g *hostGraph) cancel(cause error) {
	for len(g.active) > 0 {
		n := g.active[len(g.active)-1]
		g.active = g.active[:len(g.active)-1]
		if c, ok := g.nodes[n].task.(Canceler); ok {
			c.Cancel(cause)
		}
	}
}
