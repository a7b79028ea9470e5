package cusys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// StreamCreate makes a stream of the current context, StreamNonBlocking or 0.
func (d *Driver) StreamCreate(flags uint32) (Stream, error) {
	var s Stream
	rc := d.f.StreamCreate.Result3(uintptr(unsafe.Pointer(&s)), uintptr(flags), 0)
	return s, d.check(&d.f.StreamCreate, rc)
}

// StreamDestroy lets the stream's work end and its handle go.
func (d *Driver) StreamDestroy(s Stream) error {
	return d.check(&d.f.StreamDestroy, d.f.StreamDestroy.Result3(uintptr(s), 0, 0))
}

// StreamQuery reports whether the stream's work is done.
func (d *Driver) StreamQuery(s Stream) (bool, error) {
	return d.ready(&d.f.StreamQuery, d.f.StreamQuery.Result3(uintptr(s), 0, 0))
}

func (d *Driver) ready(e *dl.Entry, rc int32) (bool, error) {
	if Result(rc) == ErrNotReady {
		return false, nil
	}
	err := d.check(e, rc)
	return err == nil, err
}

// StreamWaitEvent makes later work of the stream wait for the event.
func (d *Driver) StreamWaitEvent(s Stream, e Event) error {
	return d.check(&d.f.StreamWaitEvent, d.f.StreamWaitEvent.Result3(uintptr(s), uintptr(e), 0))
}

// EventCreate makes an event. Without EventDisableTiming recording it costs more.
func (d *Driver) EventCreate(flags uint32) (Event, error) {
	var e Event
	rc := d.f.EventCreate.Result3(uintptr(unsafe.Pointer(&e)), uintptr(flags), 0)
	return e, d.check(&d.f.EventCreate, rc)
}

func (d *Driver) EventDestroy(e Event) error {
	return d.check(&d.f.EventDestroy, d.f.EventDestroy.Result3(uintptr(e), 0, 0))
}

// EventRecord marks the stream's work so far.
func (d *Driver) EventRecord(e Event, s Stream) error {
	return d.check(&d.f.EventRecord, d.f.EventRecord.Result3(uintptr(e), uintptr(s), 0))
}

// EventQuery reports whether the marked work is done. Forbidden on an event last recorded in a capture.
func (d *Driver) EventQuery(e Event) (bool, error) {
	return d.ready(&d.f.EventQuery, d.f.EventQuery.Result3(uintptr(e), 0, 0))
}

// LaunchHostFunc enqueues a call of fn(arg); in a capture it is a node that calls it at every launch.
func (d *Driver) LaunchHostFunc(s Stream, fn HostFn, arg uint64) error {
	return d.check(&d.f.LaunchHostFunc, d.f.LaunchHostFunc.Result3(uintptr(s), uintptr(fn), uintptr(arg)))
}
