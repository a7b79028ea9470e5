package cuda

import (
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// The driver calls back into Go by two functions, one for host functions and one for the end of user objects. What it keeps is a number, which
// the tables below give a meaning. All callbacks of a context come on one thread of the driver, or, the end of a user object, on a thread that
// is inside a destroy call; so no lock of this package is held over such a call.
var (
	hostCallback    = sync.OnceValue(func() cusys.HostFn { return cusys.Callback(runHostCall) })
	releaseCallback = sync.OnceValue(func() cusys.HostFn { return cusys.Callback(released) })

	hostCalls table[hostCall]
	releases  table[release]
)

// table gives things numbers, which are never used again.
type table[T any] struct {
	mu   sync.Mutex // guards what follows
	last uint64
	m    map[uint64]*T
}

func (t *table[T]) add(v *T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.m == nil {
		t.m = make(map[uint64]*T)
	}
	t.last++
	t.m[t.last] = v
	return t.last
}

func (t *table[T]) get(n uint64) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[n]
}

// take gives it once.
func (t *table[T]) take(n uint64) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.m[n]
	delete(t.m, n)
	return v
}

// forget drops those that which picks.
func (t *table[T]) forget(which func(*T) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.m, func(_ uint64, v *T) bool { return which(v) })
}

// hostCall is a host function that was enqueued, or captured.
type hostCall struct {
	g        *driverDevice
	fn       func()
	s        *driverStream // outside a capture: its copies before position are done when the function runs
	position uint64
}

func runHostCall(n uint64) {
	c := hostCalls.get(n)
	if c == nil {
		return
	}
	if c.s != nil {
		hostCalls.take(n)
	}
	c.g.helpers.Add(1)
	defer c.g.helpers.Done()
	// A goroutine of its own, so that runtime.Goexit in it ends it and nothing else.
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.run()
	}()
	<-done
}

func (c *hostCall) run() {
	defer func() {
		if r := recover(); r != nil {
			c.g.dev.Fail(&Error{Op: "host function", Detail: "panic" + atPlace(), Err: fmt.Errorf("%v", r), Stack: string(debug.Stack())})
		}
	}()
	if c.s != nil {
		c.s.land(c.position)
	}
	if c.fn != nil {
		c.fn()
	}
}

func (s *driverStream) hostFunc(fn func()) error {
	return s.enqueueNode("host function", func() error { return s.callHost(fn) })
}

// callHost enqueues a host function. mu is held and the device bound.
func (s *driverStream) callHost(fn func()) error {
	h := &hostCall{g: s.g, fn: fn}
	c := s.cap.Load()
	if c == nil {
		h.s, h.position = s, s.position.Add(1)
	}
	n := hostCalls.add(h)
	if err := s.g.drv.LaunchHostFunc(s.h, hostCallback(), n); err != nil {
		hostCalls.take(n)
		return err
	}
	if c != nil {
		c.mu.Lock()
		c.calls = append(c.calls, n)
		c.mu.Unlock()
	}
	return nil
}

// release is a release callback that was attached to a graph.
type release struct {
	of *driverGraph
	fn func()
}

// released is called by the driver when a user object ends. It only hands over.
func released(n uint64) {
	if r := releases.take(n); r != nil {
		r.of.g.releases.push(r.of.g, r)
	}
}

// releaseQueue runs release callbacks in order on a goroutine that lives while there are some.
type releaseQueue struct {
	mu      sync.Mutex // guards what follows
	queue   []*release
	running bool
	waiting int // attached, not run
	graphs  int // templates and executables that are not destroyed
}

func (q *releaseQueue) push(g *driverDevice, r *release) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.queue = append(q.queue, r)
	if !q.running {
		q.running = true
		g.helpers.Go(q.run)
	}
}

func (q *releaseQueue) run() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.queue) > 0 {
		r := q.queue[0]
		q.queue = q.queue[1:]
		q.mu.Unlock()
		r.fn()
		q.mu.Lock()
		q.waiting--
	}
	q.running = false
}

func (q *releaseQueue) count(waiting, graphs int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.waiting += waiting
	q.graphs += graphs
}

// due reports whether callbacks are still to come although every graph was destroyed.
func (q *releaseQueue) due() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting > 0 && q.graphs == 0
}

// driverGraph is a template of the driver.
type driverGraph struct {
	g      *driverDevice
	h      cusys.Graph
	nodes  int
	calls  []uint64 // captured host functions
	pieces []pinnedPiece

	use       sync.RWMutex // the handle is in use; taken in between by who destroys it, never over the destruction
	destroyed atomic.Bool

	mu      sync.Mutex // guards what follows; no driver call is made under it
	owners  int        // the template and its executables
	release []uint64   // attached
}

// complete makes a captured graph ready for use. What it owns goes with its first user object.
func (gr *driverGraph) complete() error {
	nodes, err := gr.g.drv.GraphNodes(gr.h)
	if err != nil {
		return gr.g.cause(err)
	}
	gr.nodes, gr.owners = nodes, 1
	gr.g.releases.count(0, 1)
	if len(gr.calls) == 0 && len(gr.pieces) == 0 {
		return nil
	}
	if err := gr.onRelease(gr.disown); err != nil {
		gr.g.releases.count(0, -1)
		return err
	}
	return nil
}

// disown gives up what the graph owns.
func (gr *driverGraph) disown() {
	for _, n := range gr.calls {
		hostCalls.take(n)
	}
	for _, p := range gr.pieces {
		gr.g.pinned.put(p, 0)
	}
}

// discard is for a capture that gives no graph.
func (gr *driverGraph) discard() error {
	gr.disown()
	if gr.h == 0 {
		return nil
	}
	in, err := gr.g.enter(true)
	if err != nil {
		return gr.g.lost(err)
	}
	defer in.leave()
	return gr.g.lost(gr.g.cause(gr.g.drv.GraphDestroy(gr.h)))
}

func (gr *driverGraph) numNodes() int { return gr.nodes }

func (gr *driverGraph) closedError(op string) error {
	return &Error{Op: op, Detail: fmt.Sprintf("graph of %d nodes", gr.nodes), Err: ErrClosed}
}

// onRelease attaches a user object of the driver. Those of a graph end in the order in which they were attached, NCCL's too.
func (gr *driverGraph) onRelease(fn func()) error {
	const op = "attach release callback"
	if fn == nil {
		return &Error{Op: op, Err: errors.New("nil")}
	}
	gr.use.RLock()
	defer gr.use.RUnlock()
	if gr.destroyed.Load() {
		return gr.closedError(op)
	}
	g := gr.g
	in, err := g.enter(true)
	if err != nil {
		return &Error{Op: op, Err: err}
	}
	defer in.leave()
	n := releases.add(&release{gr, fn})
	g.releases.count(1, 0)
	o, err := g.drv.UserObjectCreate(releaseCallback(), n)
	if err == nil {
		if err = g.drv.GraphGiveUserObject(gr.h, o); err != nil {
			releases.take(n) // then its end means nothing
			err = errors.Join(err, g.drv.UserObjectRelease(o, 1))
		}
	} else {
		releases.take(n)
	}
	if err != nil {
		g.releases.count(-1, 0)
		return &Error{Op: op, Err: g.cause(err)}
	}
	gr.mu.Lock()
	defer gr.mu.Unlock()
	gr.release = append(gr.release, n)
	return nil
}

func (gr *driverGraph) instantiate() (platformExec, error) {
	const op = "instantiate"
	gr.use.RLock()
	defer gr.use.RUnlock()
	if gr.destroyed.Load() {
		return nil, gr.closedError(op)
	}
	if err := gr.g.dev.Err(); err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	in, err := gr.g.enter(true)
	if err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	defer in.leave()
	h, err := gr.g.drv.GraphInstantiate(gr.h)
	if err != nil {
		return nil, &Error{Op: op, Detail: fmt.Sprintf("graph of %d nodes", gr.nodes), Err: gr.g.cause(err)}
	}
	gr.mu.Lock()
	gr.owners++
	gr.mu.Unlock()
	gr.g.releases.count(0, 1)
	return &driverExec{of: gr, h: h}, nil
}

func (gr *driverGraph) destroy() error {
	const op = "destroy graph"
	if !gr.destroyed.CompareAndSwap(false, true) {
		return gr.closedError(op)
	}
	unused(&gr.use)
	return gr.giveUp(op, func() error { return gr.g.drv.GraphDestroy(gr.h) })
}

// giveUp destroys the template or an executable. User objects may end inside the call, on this thread.
func (gr *driverGraph) giveUp(op string, destroy func() error) error {
	g := gr.g
	in, err := g.enter(true)
	if err == nil {
		err = g.cause(destroy())
		in.leave()
	}
	gr.mu.Lock()
	gr.owners--
	var orphans []uint64
	if gr.owners == 0 && g.gone.Load() {
		orphans = gr.release
	}
	gr.mu.Unlock()
	for _, n := range orphans {
		released(n) // the driver's user objects are lost with the context
	}
	g.releases.count(0, -1)
	if err = g.lost(err); err != nil {
		return &Error{Op: op, Detail: fmt.Sprintf("graph of %d nodes", gr.nodes), Err: err}
	}
	return nil
}

// driverExec is an executable graph. The driver runs its launches one after the other.
type driverExec struct {
	of        *driverGraph
	h         cusys.GraphExec
	use       sync.RWMutex // as driverGraph's
	destroyed atomic.Bool
}

func (x *driverExec) launch(p platformStream) error {
	const op = "launch graph"
	s := p.(*driverStream)
	s.mu.Lock()
	defer s.mu.Unlock()
	x.use.RLock()
	defer x.use.RUnlock()
	if x.destroyed.Load() {
		return x.of.closedError(op)
	}
	if err := s.recordable(op); err != nil {
		return err
	}
	if c := s.cap.Load(); c != nil {
		return c.forbid(op, "a launch cannot be captured")
	}
	return s.enqueueLocked(op, func() error {
		if len(x.of.calls) > 0 && s.hasTransfers() {
			// A host function of the graph may read what a copy before the launch brings.
			if err := s.callHost(nil); err != nil {
				return err
			}
		}
		return s.g.drv.GraphLaunch(x.h, s.h)
	})
}

func (s *driverStream) hasTransfers() bool {
	s.tmu.Lock()
	defer s.tmu.Unlock()
	return len(s.transfers) > 0
}

func (x *driverExec) destroy() error {
	const op = "destroy executable graph"
	if !x.destroyed.CompareAndSwap(false, true) {
		return x.of.closedError(op)
	}
	unused(&x.use)
	return x.of.giveUp(op, func() error { return x.of.g.drv.GraphExecDestroy(x.h) })
}

// unused waits until nobody uses a handle that was marked as destroyed before.
func unused(use *sync.RWMutex) {
	use.Lock()
	use.Unlock() //lint:ignore SA2001 the wait is all
}
