package cusys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// StreamBeginCapture starts a capture. But for CaptureRelaxed the same thread must end it.
func (d *Driver) StreamBeginCapture(s Stream, m CaptureMode) error {
	return d.check(&d.f.StreamBeginCapture, d.f.StreamBeginCapture.Result3(uintptr(s), u32(m), 0))
}

// StreamEndCapture ends it, with a graph or, if the capture was invalidated, with an error and none.
func (d *Driver) StreamEndCapture(s Stream) (Graph, error) {
	var g Graph
	rc := d.f.StreamEndCapture.Result3(uintptr(s), uintptr(unsafe.Pointer(&g)), 0)
	return g, d.check(&d.f.StreamEndCapture, rc)
}

// StreamCaptureStatus tells whether the stream captures. It is allowed in every state.
func (d *Driver) StreamCaptureStatus(s Stream) (CaptureStatus, error) {
	out := cells.Get().(*uint64)
	defer cells.Put(out)
	*out = 0
	rc := d.f.StreamIsCapturing.Result3(uintptr(s), uintptr(unsafe.Pointer(out)), 0)
	return CaptureStatus(*out), d.check(&d.f.StreamIsCapturing, rc)
}

// ExchangeCaptureMode sets the calling thread's mode and returns the old one. A thread in CaptureRelaxed may make
// unsafe calls while others capture.
func (d *Driver) ExchangeCaptureMode(m CaptureMode) (CaptureMode, error) {
	rc := d.f.ThreadExchangeStreamCaptureMode.Result3(uintptr(unsafe.Pointer(&m)), 0, 0)
	return m, d.check(&d.f.ThreadExchangeStreamCaptureMode, rc)
}

// GraphInstantiate makes an executable graph.
func (d *Driver) GraphInstantiate(g Graph) (GraphExec, error) {
	var x GraphExec
	e := &d.f.GraphInstantiate
	if e.Shape > 0 { // (exec, graph, error node, log, log size)
		var node uintptr
		var log [1024]byte
		rc := e.Result6(uintptr(unsafe.Pointer(&x)), uintptr(g), uintptr(unsafe.Pointer(&node)), uintptr(unsafe.Pointer(&log)), uintptr(len(log)), 0)
		err := d.check(e, rc)
		if de, ok := err.(*Error); ok && log[0] != 0 {
			log[len(log)-1] = 0
			de.Text += ": " + dl.Text(log[:])
		}
		return x, err
	}
	rc := e.Result3(uintptr(unsafe.Pointer(&x)), uintptr(g), 0)
	return x, d.check(e, rc)
}

// GraphLaunch enqueues a run of the graph.
func (d *Driver) GraphLaunch(x GraphExec, s Stream) error {
	return d.check(&d.f.GraphLaunch, d.f.GraphLaunch.Result3(uintptr(x), uintptr(s), 0))
}

// GraphExecDestroy returns at once, also with a launch in flight. User objects may be destroyed inside the call, on the
// calling thread: hold no lock that their callback takes.
func (d *Driver) GraphExecDestroy(x GraphExec) error {
	return d.check(&d.f.GraphExecDestroy, d.f.GraphExecDestroy.Result3(uintptr(x), 0, 0))
}

// GraphDestroy is GraphExecDestroy for the template.
func (d *Driver) GraphDestroy(g Graph) error {
	return d.check(&d.f.GraphDestroy, d.f.GraphDestroy.Result3(uintptr(g), 0, 0))
}

// GraphNodes is how many nodes the graph has.
func (d *Driver) GraphNodes(g Graph) (int, error) {
	var n uintptr
	rc := d.f.GraphGetNodes.Result3(uintptr(g), 0, uintptr(unsafe.Pointer(&n)))
	return int(n), d.check(&d.f.GraphGetNodes, rc)
}

// UserObjectCreate makes an object with one reference whose end calls destroy(arg): on a thread of the driver, or
// inside the call that drops the last reference.
func (d *Driver) UserObjectCreate(destroy HostFn, arg uint64) (UserObject, error) {
	const noDestructorSync = 1 // the only legal flag: no call waits for the destructor
	var o UserObject
	rc := d.f.UserObjectCreate.Result6(uintptr(unsafe.Pointer(&o)), uintptr(arg), uintptr(destroy), 1, noDestructorSync, 0)
	return o, d.check(&d.f.UserObjectCreate, rc)
}

func (d *Driver) UserObjectRelease(o UserObject, count uint32) error {
	return d.check(&d.f.UserObjectRelease, d.f.UserObjectRelease.Result3(uintptr(o), uintptr(count), 0))
}

// GraphGiveUserObject moves one reference to the graph, which shares it with every exec instantiated later, every
// clone and every launch in flight. Objects of one graph end in the order in which they were given.
func (d *Driver) GraphGiveUserObject(g Graph, o UserObject) error {
	const move = 1
	return d.check(&d.f.GraphRetainUserObject, d.f.GraphRetainUserObject.Result6(uintptr(g), uintptr(o), 1, move, 0, 0))
}
