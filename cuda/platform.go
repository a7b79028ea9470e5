package cuda

import (
	"context"
	"reflect"
	"unsafe"
)

// platform is what a kind of device does. The exported types check arguments, keep count of what is open and
// own the rules that are the same everywhere; below this seam are the host (host*.go) and the driver libraries of
// GPUs (driver*.go), for which most methods are one or two calls.
type platform interface {
	kind() Platform
	String() string
	// quiesce waits for host functions and release callbacks under way; no stream is open.
	quiesce()
	close() error

	setBell(b *Bell) error
	ring()
	failed() // the device has got its sticky error

	info() Info
	memoryInfo() (free, total uint64, err error)
	// qualifies explains why n bytes at an address cannot be registered; nil where they can.
	qualifies(addr uintptr, n uint64) error

	// unsafeCall is asked before calls that a capture forbids to this thread. It invalidates the captures that forbid it.
	unsafeCall(op string) error

	alloc(bytes uint64, kind AllocKind, name string) (platformMemory, error)
	mapShared(s SharedMemory) (platformPeer, error)
	newStream(id uint64) (platformStream, error)
	newEvent(id uint64) (platformEvent, error)
	// loadKernel compiles or finds a kernel whose arguments are of the Go type args; nil: the platform runs the Host function.
	loadKernel(name string, source kernelSource, args reflect.Type) (platformKernel, error)
}

// kernelSource is a kernel for GPUs.
type kernelSource struct{ cuda, ptx string }

type platformMemory interface {
	pointer() unsafe.Pointer
	share() (SharedMemory, error)
	free() error
}

type platformPeer interface {
	bytes() []byte
	close() error
}

type platformStream interface {
	handle() uintptr
	synchronize(ctx context.Context) error
	query() (bool, error)
	close() error
	submit(t Task) error
	hostFunc(fn func()) error
	record(e platformEvent) error
	wait(e platformEvent) error
	behind(other platformStream, e platformEvent) error
	copy(dst, src unsafe.Pointer, n uint64) error    // within the device's memory
	copyIn(dst, src unsafe.Pointer, n uint64) error  // from Go memory
	copyOut(dst, src unsafe.Pointer, n uint64) error // to Go memory
	fill(dst unsafe.Pointer, n uint64, pattern uint64, width int) error
	beginCapture(mode CaptureMode) error
	endCapture() (platformGraph, error)
	capture() *Capture
}

type platformEvent interface {
	query() (bool, error)
	synchronize(ctx context.Context) error
	close() error
}

type platformKernel interface {
	launch(s platformStream, g Grid, args unsafe.Pointer) error
}

type platformCapture interface {
	state() CaptureState
	invalidate(cause error)
	after(s platformStream, key any)
	mark(s platformStream, key any)
}

type platformGraph interface {
	numNodes() int
	onRelease(fn func()) error
	instantiate() (platformExec, error)
	destroy() error
}

type platformExec interface {
	launch(s platformStream) error
	destroy() error
}
