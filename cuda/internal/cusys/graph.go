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
	out := cells.Get().(*[8]uint64)
	defer cells.Put(out)
	out[0] = 0
	rc := d.f.StreamIsCapturing.Result3(uintptr(s), uintptr(unsafe.Pointer(&out[0])), 0)
	return CaptureStatus(out[0]), d.check(&d.f.StreamIsCapturing, rc)
}

// CaptureInfo is a capture in progress.
type CaptureInfo struct {
	Status CaptureStatus
	ID     uint64      // unique in the process
	Graph  Graph       // being built; do not destroy
	Deps   []GraphNode // what the stream's next node will depend on
}

// StreamCaptureInfo tells about the stream's capture.
func (d *Driver) StreamCaptureInfo(s Stream) (CaptureInfo, error) {
	var status CaptureStatus
	var id uint64
	var g Graph
	var deps unsafe.Pointer // the driver's array, valid until the next call on the stream
	var n uintptr
	var rc int32
	e := &d.f.StreamGetCaptureInfo
	if d.vendor.id == cudaID && e.Shape == 1 { // the form with edge data
		var edges uintptr
		rc = e.Result9(uintptr(s), uintptr(unsafe.Pointer(&status)), uintptr(unsafe.Pointer(&id)), uintptr(unsafe.Pointer(&g)),
			uintptr(unsafe.Pointer(&deps)), uintptr(unsafe.Pointer(&edges)), uintptr(unsafe.Pointer(&n)), 0, 0)
	} else {
		rc = e.Result6(uintptr(s), uintptr(unsafe.Pointer(&status)), uintptr(unsafe.Pointer(&id)), uintptr(unsafe.Pointer(&g)),
			uintptr(unsafe.Pointer(&deps)), uintptr(unsafe.Pointer(&n)))
	}
	if err := d.check(e, rc); err != nil {
		return CaptureInfo{}, err
	}
	info := CaptureInfo{Status: status, ID: id, Graph: g}
	if status == CaptureActive && n > 0 {
		info.Deps = append(info.Deps, unsafe.Slice((*GraphNode)(deps), n)...)
	}
	return info, nil
}

// StreamSetCaptureDependencies makes the stream's next node depend on nodes alone.
func (d *Driver) StreamSetCaptureDependencies(s Stream, nodes []GraphNode) error {
	return d.dependencies(s, nodes, 1)
}

// StreamAddCaptureDependencies makes it depend on nodes too.
func (d *Driver) StreamAddCaptureDependencies(s Stream, nodes []GraphNode) error {
	return d.dependencies(s, nodes, 0)
}

func (d *Driver) dependencies(s Stream, nodes []GraphNode, flags uint32) error {
	e := &d.f.StreamUpdateCaptureDependencies
	if d.vendor.id == cudaID && e.Shape == 1 { // with edge data, which may be nil
		rc := e.Result6(uintptr(s), uintptr(unsafe.Pointer(unsafe.SliceData(nodes))), 0, uintptr(len(nodes)), uintptr(flags), 0)
		return d.check(e, rc)
	}
	rc := e.Result6(uintptr(s), uintptr(unsafe.Pointer(unsafe.SliceData(nodes))), uintptr(len(nodes)), uintptr(flags), 0, 0)
	return d.check(e, rc)
}

// ExchangeCaptureMode sets the calling thread's mode and returns the old one. A thread in CaptureRelaxed may make
// unsafe calls while others capture.
func (d *Driver) ExchangeCaptureMode(m CaptureMode) (CaptureMode, error) {
	rc := d.f.ThreadExchangeStreamCaptureMode.Result3(uintptr(unsafe.Pointer(&m)), 0, 0)
	return m, d.check(&d.f.ThreadExchangeStreamCaptureMode, rc)
}

// GraphInstantiate makes an executable graph. flags are 0 where the driver only knows the older form.
func (d *Driver) GraphInstantiate(g Graph, flags uint64) (GraphExec, error) {
	var x GraphExec
	e := &d.f.GraphInstantiate
	if e.Shape > 0 { // (exec, graph, error node, log, log size)
		if flags != 0 {
			return 0, d.lacks("flags of "+e.Name, "CUDA 11.4")
		}
		var node GraphNode
		var log [1024]byte
		rc := e.Result6(uintptr(unsafe.Pointer(&x)), uintptr(g), uintptr(unsafe.Pointer(&node)), uintptr(unsafe.Pointer(&log)), uintptr(len(log)), 0)
		err := d.check(e, rc)
		if de, ok := err.(*Error); ok && log[0] != 0 {
			log[len(log)-1] = 0
			de.Text += ": " + dl.Text(log[:])
		}
		return x, err
	}
	rc := e.Result3(uintptr(unsafe.Pointer(&x)), uintptr(g), uintptr(flags))
	return x, d.check(e, rc)
}

// GraphUpload moves an executable graph to the device before its first launch.
func (d *Driver) GraphUpload(x GraphExec, s Stream) error {
	return d.check(&d.f.GraphUpload, d.f.GraphUpload.Result3(uintptr(x), uintptr(s), 0))
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

// GraphNodes are the graph's nodes.
func (d *Driver) GraphNodes(g Graph) ([]GraphNode, error) {
	e := &d.f.GraphGetNodes
	var n uintptr
	if err := d.check(e, e.Result3(uintptr(g), 0, uintptr(unsafe.Pointer(&n)))); err != nil || n == 0 {
		return nil, err
	}
	nodes := make([]GraphNode, n)
	if err := d.check(e, e.Result3(uintptr(g), uintptr(unsafe.Pointer(&nodes[0])), uintptr(unsafe.Pointer(&n)))); err != nil {
		return nil, err
	}
	return nodes[:min(int(n), len(nodes))], nil
}

// GraphNodeType is a node's kind.
func (d *Driver) GraphNodeType(n GraphNode) (NodeType, error) {
	var t NodeType
	rc := d.f.GraphNodeGetType.Result3(uintptr(n), uintptr(unsafe.Pointer(&t)), 0)
	return t, d.check(&d.f.GraphNodeGetType, rc)
}

// GraphClone copies a template; the copy holds its user objects too.
func (d *Driver) GraphClone(g Graph) (Graph, error) {
	var c Graph
	rc := d.f.GraphClone.Result3(uintptr(unsafe.Pointer(&c)), uintptr(g), 0)
	return c, d.check(&d.f.GraphClone, rc)
}

// GraphDot writes the graph to a file in DOT's language.
func (d *Driver) GraphDot(g Graph, path string) error {
	b := dl.CString(path)
	rc := d.f.GraphDebugDotPrint.Result3(uintptr(g), uintptr(unsafe.Pointer(&b[0])), 0)
	return d.check(&d.f.GraphDebugDotPrint, rc)
}

// UserObjectCreate makes an object with one reference whose end calls destroy(arg): on a thread of the driver, or
// inside the call that drops the last reference.
func (d *Driver) UserObjectCreate(destroy HostFn, arg uint64) (UserObject, error) {
	const noDestructorSync = 1 // the only legal flag: no call waits for the destructor
	var o UserObject
	rc := d.f.UserObjectCreate.Result6(uintptr(unsafe.Pointer(&o)), uintptr(arg), uintptr(destroy), 1, noDestructorSync, 0)
	return o, d.check(&d.f.UserObjectCreate, rc)
}

func (d *Driver) UserObjectRetain(o UserObject, count uint32) error {
	return d.check(&d.f.UserObjectRetain, d.f.UserObjectRetain.Result3(uintptr(o), uintptr(count), 0))
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

// GraphReleaseUserObject takes one reference from the graph.
func (d *Driver) GraphReleaseUserObject(g Graph, o UserObject) error {
	return d.check(&d.f.GraphReleaseUserObject, d.f.GraphReleaseUserObject.Result3(uintptr(g), uintptr(o), 1))
}
