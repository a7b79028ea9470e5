package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
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
	plat   platform
	sticky atomic.Pointer[Error]

	closing sync.Mutex // one Close at a time; taken before mu

	mu     sync.Mutex // guards what follows
	closed bool
	open   map[opened]struct{}
}

// opened is something that must be closed before the device; String names it for people.
type opened interface{ String() string }

// lastID numbers streams, memory, captures and graphs of the process.
var lastID atomic.Uint64

// Open opens a device by token (bootstrap.Job.Device): "" chooses the machine's GPU, or the host platform where
// there is no GPU hardware; "host" demands the host platform; GORUN_DEVICE overrides "". GPU hardware that
// cannot be used is an error, never a silent fall back.
func Open(token string) (*Device, error) {
	return open(token, os.Getenv("GORUN_DEVICE"), "/")
}

// open has the environment and the root of /dev and /proc as arguments, for tests.
func open(token, env, root string) (*Device, error) {
	subject := fmt.Sprintf("device %q", token)
	if token == "" && env != "" {
		token, subject = env, fmt.Sprintf("GORUN_DEVICE=%q", env)
	}
	switch token {
	case "host":
	case "":
		if hw := findHardware(root); hw != nil {
			return nil, &Error{Op: "open device", Detail: hw.what + " found (" + hw.where + ")",
				Err: fmt.Errorf("gorun's %s platform is not part of this version; set GORUN_DEVICE=host to use the host platform", hw.platform)}
		}
	default:
		return nil, &Error{Op: "open device", Detail: subject,
			Err: errors.New(`unknown; this version has "host", and "" for what the machine has`)}
	}
	d := &Device{open: make(map[opened]struct{})}
	d.plat = newHostDevice(d)
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

// Close releases the device. While streams, events, memory or graphs of it are open it is an error that names them, and the
// device stays open; after success it may be called again and does nothing. It waits for host functions that are still running
// (their stream has failed) and for release callbacks.
func (d *Device) Close() error {
	const op = "close device"
	d.closing.Lock()
	defer d.closing.Unlock()
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
	sort.Strings(names)
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
// stay mapped until the device is closed, or has been given its own bell back with nil while nothing is enqueued.
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

// Err is the sticky error.
func (d *Device) Err() error {
	if e := d.sticky.Load(); e != nil {
		return e
	}
	return nil
}
