package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Platform is the kind of device.
type Platform uint8

const (
	Host Platform = iota + 1 // no GPU: memory and cores of the machine
	CUDA
	MUSA
	HIP
)

// String is "host", "CUDA", "MUSA" or "HIP".
func (p Platform) String() string {
	switch p {
	case Host:
		return "host"
	case CUDA:
		return "CUDA"
	case MUSA:
		return "MUSA"
	case HIP:
		return "HIP"
	}
	return fmt.Sprintf("platform(%d)", uint8(p))
}

// Device is the one device of a rank. It owns streams, events, memory and graphs; close those first.
// Its methods may be called from any goroutine.
type Device struct {
	plat      platform
	sticky    atomic.Pointer[Error]
	abandoned atomic.Bool // by Abandon

	closing sync.Mutex // one Close at a time; taken before mu

	mu     sync.Mutex // guards what follows
	closed bool
	open   map[opened]struct{}
}

// opened is something that must be closed before the device; String names it for people.
type opened interface{ String() string }

// lastID numbers streams, memory, captures and graphs of the process.
var lastID atomic.Uint64

// Open opens a device by token (bootstrap.Job.Device):
//
//	""          the machine's GPU, chosen by the rank's place on its host (GORUN_LOCAL_RANK, LOCAL_RANK) among those that
//	            the driver shows (CUDA_VISIBLE_DEVICES); the host platform where there is no GPU hardware
//	"host"      the host platform
//	"1"         the GPU with this number among those that the driver shows
//	"GPU-8a5e"  the GPU with this UUID, or the only one whose UUID begins so
//	"MIG-…"     an instance of a partitioned GPU. Where the driver does not show it, CUDA_VISIBLE_DEVICES is set if the process has not set it
//
// GORUN_DEVICE overrides "". GPU hardware that cannot be used is an error that lists the libraries tried, never a silent fall back.
func Open(token string) (*Device, error) {
	return open(token, os.Getenv("GORUN_DEVICE"), "/")
}

// open has the environment and the root of /dev and /proc as arguments, for tests.
func open(token, env, root string) (*Device, error) {
	const op = "open device"
	subject := fmt.Sprintf("device %q", token)
	if token == "" && env != "" {
		token, subject = env, fmt.Sprintf("GORUN_DEVICE=%q", env)
	}
	d := &Device{open: make(map[opened]struct{})}
	if token == "host" {
		d.plat = newHostDevice(d)
		return d, nil
	}
	if token != "" && !isDeviceToken(token) {
		return nil, &Error{Op: op, Detail: subject, Err: errors.New(`unknown: use "host", a GPU's number or its UUID`)}
	}
	hw := findHardware(root)
	if named := namedDriver(hw); named != nil && (hw != nil || token != "") {
		hw = named
	}
	if hw == nil && token != "" {
		return nil, &Error{Op: op, Detail: subject, Err: errors.New("no GPU hardware found on this machine")}
	}
	if hw == nil {
		d.plat = newHostDevice(d)
		return d, nil
	}
	plat, err := newDriverDevice(d, hw.platform, token)
	if err != nil {
		if token == "" {
			subject, err = hw.what+" found ("+hw.where+")", fmt.Errorf("%w\n\tGORUN_DEVICE=host uses the host platform instead", err)
		}
		return nil, &Error{Op: op, Detail: subject, Err: err}
	}
	d.plat = plat
	return d, nil
}

type hardware struct {
	platform    Platform
	what, where string
}

// findHardware looks for the kernel's traces of a GPU; whether a library can use it is another question.
func findHardware(root string) *hardware {
	for _, h := range []hardware{
		{CUDA, "an NVIDIA GPU", "proc/driver/nvidia/version"},
		{CUDA, "an NVIDIA GPU", "dev/nvidiactl"},
		{HIP, "an AMD GPU", "dev/kfd"},
		{MUSA, "a Moore Threads GPU", "dev/mtgpu*"},
	} {
		if found, _ := filepath.Glob(filepath.Join(root, h.where)); len(found) > 0 {
			h.where = found[0]
			return &h
		}
	}
	return nil
}

// Platform is the kind of the device.
func (d *Device) Platform() Platform { return d.plat.kind() }

// String names the device for people: "host (2 cores)".
func (d *Device) String() string { return d.plat.String() }

// Info describes a device.
type Info struct {
	Platform        Platform
	Name            string // the model: "NVIDIA H200"; "host"
	Index           int    // number among the devices that the driver shows; -1 on the host platform
	UUID            string // "GPU-8a5e…" or "MIG-…"; "" on the host platform
	PCIBusID        string // "0000:1b:00.0"; "" on the host platform
	Major, Minor    int    // compute capability: 9.0
	Memory          uint64 // bytes
	Multiprocessors int    // cores that a rank computes on, on the host platform
	Driver          string // version of the driver's interface: "13.0"; "" on the host platform
	Library         string // the file of the driver library; "" on the host platform
}

// Info describes the device.
func (d *Device) Info() Info { return d.plat.info() }

// MemoryInfo is the free and the whole memory of the device in bytes, whoever uses it.
func (d *Device) MemoryInfo() (free, total uint64, err error) {
	const op = "memory info"
	d.mu.Lock()
	closed := d.closed
	d.mu.Unlock()
	if closed {
		return 0, 0, &Error{Op: op, Err: ErrClosed}
	}
	if free, total, err = d.plat.memoryInfo(); err != nil {
		return 0, 0, &Error{Op: op, Err: err}
	}
	return free, total, nil
}

// Bind locks the goroutine to its thread and makes the device current on it, for a library that calls the GPU's libraries itself.
// Bound.Release undoes the lock. Calls of this package need no Bind, and may be made while bound. On the host platform it does nothing.
func (d *Device) Bind() Bound {
	g, is := d.plat.(*driverDevice)
	if !is {
		return Bound{} // any thread may do anything on the host platform
	}
	if err := g.bind(); err != nil {
		return Bound{err: d.bindError(err)}
	}
	return Bound{g: g}
}

func (d *Device) bindError(err error) error { return &Error{Op: "bind", Detail: d.String(), Err: err} }

// BindCall is BindRelaxed for a single call of a communication library, which uses the devices of its communicators and brings back what the thread had: where the
// thread has had the device at the last such call, the driver is not asked again.
func (d *Device) BindCall() (BoundCall, error) {
	g, is := d.plat.(*driverDevice)
	if !is {
		return BoundCall{}, nil
	}
	runtime.LockOSThread()
	if !g.here() || g.captures.any() {
		return g.bindCall()
	}
	return BoundCall{g: g}, nil
}

// BoundCall is a thread with the device current on it for a call.
type BoundCall struct {
	g       *driverDevice // nil: there is nothing to release
	relaxed bool
	mode    int32 // the thread's, while relaxed
}

// Release ends it, on the same goroutine.
func (b BoundCall) Release() {
	if b.relaxed {
		b.g.restore(b.mode)
	}
	if b.g != nil {
		b.g.unbind()
	}
}

// BindRelaxed is Bind for a thread that may be capturing: until the Release the driver lets it make calls that are forbidden to such a thread, as those with which
// a communication library connects its ranks. What it enqueues in the capturing stream is captured as ever.
func (d *Device) BindRelaxed() Bound {
	b := d.Bind()
	if b.g != nil {
		b.mode, b.relaxed = b.g.relax()
	}
	return b
}

// Bound is a thread with the device current on it.
type Bound struct {
	g       *driverDevice // nil: there is nothing to release
	err     error
	relaxed bool
	mode    int32 // the thread's, while relaxed
}

// Err is why the device is not current: it is closed, or lost.
func (b Bound) Err() error { return b.err }

// Release ends it, on the same goroutine.
func (b Bound) Release() {
	if b.g == nil {
		return
	}
	if b.relaxed {
		b.g.restore(b.mode)
	}
	b.g.unknow() // the caller may have changed the thread's device
	b.g.unbind()
}

// Close releases the device. While streams, events, memory or graphs of it are open it is an error that names them, and the
// device stays open; after success it may be called again and does nothing. It waits for host functions that are still running
// (their stream has failed) and for release callbacks.
func (d *Device) Close() error {
	const op = "close device"
	d.closing.Lock()
	defer d.closing.Unlock()
	if d.abandoned.Load() {
		d.mu.Lock()
		clear(d.open) // what is left ends with the process
		d.mu.Unlock()
	}
	if !d.hasStreams() {
		d.plat.quiesce() // a release callback may be about to free the last memory
	}
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	if len(d.open) > 0 {
		defer d.mu.Unlock()
		return &Error{Op: op, Detail: d.String(), Err: fmt.Errorf("still open: %s", d.listOpen())}
	}
	d.closed = true
	d.mu.Unlock()
	if err := d.plat.close(); err != nil {
		return &Error{Op: op, Detail: d.String(), Err: err}
	}
	return nil
}

func (d *Device) hasStreams() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for o := range d.open {
		if _, ok := o.(*Stream); ok {
			return true
		}
	}
	return false
}

// listOpen names what is open, at most eight things. mu is held.
func (d *Device) listOpen() string {
	const limit = 8
	names := make([]string, 0, len(d.open))
	for o := range d.open {
		names = append(names, o.String())
	}
	// Memory, which begins with its size, last: there is most of it.
	memory := func(name string) int { return strings.Count("0123456789", name[:1]) }
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(memory(a), memory(b)), strings.Compare(a, b))
	})
	if n := len(names) - limit; n > 0 {
		names = append(names[:limit], fmt.Sprintf("and %d more", n))
	}
	return strings.Join(names, ", ")
}

// remember adds to what is open, unless the device is closed or failed.
func (d *Device) remember(op string, o opened) error {
	if err := d.Err(); err != nil {
		return &Error{Op: op, Err: err}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return &Error{Op: op, Detail: "device " + d.String(), Err: ErrClosed}
	}
	d.open[o] = struct{}{}
	return nil
}

func (d *Device) forget(o opened) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.open, o)
}

// SetBell makes the device sleep on b, which other processes can ring, instead of its own bell. For libraries
// (package nccl gives it the rank's ledger bell). Calling it again with the same bell does nothing. The memory of b must
// stay mapped until the device is closed, or has been given its own bell back with nil while nothing is enqueued. A closed device takes none ([ErrClosed]).
func (d *Device) SetBell(b *Bell) error { return d.plat.setBell(b) }

// Ring wakes the device's driver in this process, from any goroutine: a task may have become able to go on.
func (d *Device) Ring() { d.plat.ring() }

// Fail makes a sticky device error, as CUDA's error 700: what is enqueued is cancelled and every later operation
// of the device returns err; only closing and freeing go on to work. The first error stays.
func (d *Device) Fail(err error) {
	if err == nil {
		return
	}
	e, ok := err.(*Error)
	if !ok {
		e = &Error{Op: "device failed", Err: err}
	}
	if d.sticky.CompareAndSwap(nil, e) {
		d.plat.failed()
	}
}

// Abandon is Fail for a GPU on which something does not end, so that its driver may not come back from a call: it is not asked any more, and closing and freeing
// give nothing back, which the end of the process does. For libraries.
func (d *Device) Abandon(err error) {
	d.Fail(err)
	d.abandoned.Store(true)
	if g, ok := d.plat.(*driverDevice); ok {
		g.abandon()
	}
}

// Err is the sticky error.
func (d *Device) Err() error {
	if e := d.sticky.Load(); e != nil {
		return e
	}
	return nil
}
