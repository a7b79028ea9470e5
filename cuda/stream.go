package cuda

import (
	"context"
	"errors"
	"fmt"
	"math"
	"unsafe"
)

// Stream is an ordered queue of work. Enqueueing never waits for a peer. A stream's first failure is sticky on that stream:
// what was enqueued behind it is not carried out, and Synchronize returns it.
type Stream struct {
	dev *Device
	id  uint64
	raw platformStream
}

// NewStream makes a stream.
func (d *Device) NewStream() (*Stream, error) {
	const op = "new stream"
	s := &Stream{dev: d, id: lastID.Add(1)}
	if err := d.remember(op, s); err != nil {
		return nil, err
	}
	raw, err := d.plat.newStream(s.id)
	if err != nil {
		d.forget(s)
		return nil, &Error{Op: op, Err: err}
	}
	s.raw = raw
	return s, nil
}

// Device is the stream's.
func (s *Stream) Device() *Device { return s.dev }

// Handle is the driver's stream on a GPU; on the host platform a number that names the stream.
func (s *Stream) Handle() uintptr {
	if d, is := s.raw.(*driverStream); is { // each call of a communication library asks
		return d.handle()
	}
	return s.raw.handle()
}

// String is "stream 3".
func (s *Stream) String() string { return fmt.Sprintf("stream %d", s.id) }

// Synchronize waits until all work that was enqueued before is done, driving all streams of the device meanwhile. A ctx that ends gives an error that names what
// the stream was in (Waiter) and unwraps to the ctx's cause; the work stays enqueued. On a capturing stream it is ErrCaptureUnsafe and invalidates the capture.
func (s *Stream) Synchronize(ctx context.Context) error { return s.raw.synchronize(ctx) }

// Query reports without waiting whether all is done. On a capturing stream it is what Synchronize is.
func (s *Stream) Query() (done bool, err error) { return s.raw.query() }

// Close ends the stream; work that does not end in a moment is an error (Synchronize first), which names it; a failed stream closes. A second Close is
// ErrClosed.
func (s *Stream) Close() error {
	if err := s.raw.close(); err != nil {
		return err
	}
	s.dev.forget(s)
	return nil
}

// Submit enqueues a task, or records it as a node while the stream captures. Host platform; for libraries. When it returns
// an error it has not taken the task: nothing of it will be called.
func (s *Stream) Submit(t Task) error { return s.raw.submit(t) }

// Task is resumable work of a host stream. The driver calls Start once for each run (a captured task is run at each
// replay), then Step until done or an error. Step never waits: it does what can be done now and returns. Both are called with no lock of the user
// held, from one goroutine at a time, which need not be the same one.
//
// Who makes it possible for a waiting Step to go on rings the device (Device.Ring, or its Bell from another process) afterwards.
// A long Step divides its work, 50 µs or so at a time, so that other streams go on between; when it returns with more to do at once,
// it calls Device.Ring itself, so that the driver comes back without a pause. Neither may wait for a stream.
type Task interface {
	Start()
	Step() (done bool, err error)
}

// Waiter is a Task that can say what it waits for ("all-reduce #7 on comm world: rank 2 has not come"). It is called by who could call Step.
type Waiter interface{ Waiting() string }

// Canceler is a Task that is told when it will not be run (any more): its stream or device failed before or while it ran, or a graph that it is
// part of failed in another node that ran beside it. Not told are the task whose own Step returned the error, and those of a graph
// that had not been started in the launch.
type Canceler interface{ Cancel(cause error) }

// HostFunc enqueues fn (cuLaunchHostFunc). It runs on a goroutine of the device and must not call package cuda. On the host platform a slow one
// stops only its own stream, on a GPU the host functions of all streams.
// A panic in it is the device's sticky error.
func (s *Stream) HostFunc(fn func()) error {
	if fn == nil {
		return &Error{Op: "host function", Err: errors.New("nil")}
	}
	return s.raw.hostFunc(fn)
}

// Watch has check asked by whoever waits for the stream, for an event of it, or for a stream that waits for one: with done false before the driver is asked, and
// again and again while the wait goes on; with done true when the driver then says that all is done. seen is then what this wait's last question before that
// one to the driver got as now: so who counts what is enqueued knows how much of it was done, also where more is enqueued, or another waits, meanwhile. seen is 0
// where done is false, and where check was not asked before. An error that it returns ends the wait and sticks
// to the stream, also if the driver reports success, as it does for a collective that was aborted. doing (nil: nothing) is asked when ctx ends a wait, and says for
// its error what the stream is in ("" for nothing). Neither may wait, nor call package cuda. For libraries on a GPU; a host task fails and tells by itself,
// and the host platform asks nothing.
func (s *Stream) Watch(check func(seen uint64, done bool) (now uint64, err error), doing func() string) (remove func()) {
	d, is := s.raw.(*driverStream)
	if !is {
		return func() {}
	}
	return d.watch(check, doing)
}

// BeforeLeaving has f called before the stream is closed, or becomes part of a capture, by who does that, when the stream can still be waited for (Behind). It may be
// called more than once. f may call package cuda for other streams. For libraries on a GPU; the host platform never calls it.
func (s *Stream) BeforeLeaving(f func()) (remove func()) {
	d, is := s.raw.(*driverStream)
	if !is {
		return func() {}
	}
	return d.beforeLeaving(f)
}

// Record and Wait order streams by an event. During a capture a Wait on an event recorded in the capture makes the stream join it.
// Waiting on an event that was never recorded does nothing.
func (s *Stream) Record(e *Event) error {
	if err := s.sameDevice("record", e.dev); err != nil {
		return err
	}
	return s.raw.record(e.raw)
}

// Wait: see Record. If the stream that the event was recorded on failed before the event, this stream fails, too.
func (s *Stream) Wait(e *Event) error {
	if err := s.sameDevice("wait for event", e.dev); err != nil {
		return err
	}
	return s.raw.wait(e.raw)
}

// Behind has what is enqueued on the stream from now on come after all that is on another, by an event that is used for nothing else. Unlike with a Wait no failure is carried
// over, and a stream that has failed is waited for, too; one that is closed has nothing left. ErrCaptureUnsafe where one of the two captures. For libraries on a GPU.
func (s *Stream) Behind(other *Stream, e *Event) error {
	if err := errors.Join(s.sameDevice("order streams", other.dev), s.sameDevice("order streams", e.dev)); err != nil {
		return err
	}
	return s.raw.behind(other.raw, e.raw)
}

func (s *Stream) sameDevice(op string, d *Device) error {
	if d != s.dev {
		return &Error{Op: op, Detail: s.String(), Err: errors.New("the argument belongs to another device")}
	}
	return nil
}

// Event marks a point in a stream.
type Event struct {
	dev *Device
	id  uint64
	raw platformEvent
}

// NewEvent makes an event that is not recorded yet.
func (d *Device) NewEvent() (*Event, error) {
	const op = "new event"
	e := &Event{dev: d, id: lastID.Add(1)}
	if err := d.remember(op, e); err != nil {
		return nil, err
	}
	raw, err := d.plat.newEvent(e.id)
	if err != nil {
		d.forget(e)
		return nil, &Error{Op: op, Err: err}
	}
	e.raw = raw
	return e, nil
}

// String is "event 4".
func (e *Event) String() string { return fmt.Sprintf("event %d", e.id) }

// Query reports without waiting whether the work before the last Record is done; true where there was none. On an event
// recorded in a capture it is ErrCaptureUnsafe and invalidates the capture.
func (e *Event) Query() (done bool, err error) { return e.raw.query() }

// Synchronize waits for it, as Stream.Synchronize does.
func (e *Event) Synchronize(ctx context.Context) error { return e.raw.synchronize(ctx) }

// Close gives the event up. Work that was told to wait for it still waits. A second Close is ErrClosed.
func (e *Event) Close() error {
	if err := e.raw.close(); err != nil {
		return err
	}
	e.dev.forget(e)
	return nil
}

// Copy, CopyToDevice and CopyToHost enqueue copies of equal length. The Go slices belong to the stream until it
// has done the copy. Fill sets each element. None of them waits, and enqueueing no elements is enqueueing nothing that does anything. Copy between ranges that overlap works on
// the host platform only; on a GPU it is an error.
func Copy[T Element](dst, src Slice[T], s *Stream) error {
	const op = "copy"
	if err := errors.Join(checkRange(op, dst.Range(), s), checkRange(op, src.Range(), s), sameLength(op, dst.n, src.n)); err != nil {
		return err
	}
	return s.raw.copy(dst.Range().address(), src.Range().address(), dst.Range().Len)
}

// CopyToDevice: see Copy.
func CopyToDevice[T Element](dst Slice[T], src []T, s *Stream) error {
	const op = "copy to device"
	if err := errors.Join(checkRange(op, dst.Range(), s), sameLength(op, dst.n, len(src))); err != nil {
		return err
	}
	return s.raw.copyIn(dst.Range().address(), unsafe.Pointer(unsafe.SliceData(src)), dst.Range().Len)
}

// CopyToHost: see Copy.
func CopyToHost[T Element](dst []T, src Slice[T], s *Stream) error {
	const op = "copy to host"
	if err := errors.Join(checkRange(op, src.Range(), s), sameLength(op, len(dst), src.n)); err != nil {
		return err
	}
	return s.raw.copyOut(unsafe.Pointer(unsafe.SliceData(dst)), src.Range().address(), src.Range().Len)
}

// Fill: see Copy.
func Fill[T Element](dst Slice[T], v T, s *Stream) error {
	r := dst.Range()
	if err := checkRange("fill", r, s); err != nil {
		return err
	}
	return s.raw.fill(r.address(), r.Len, patternOf(v), int(sizeOf[T]()))
}

// Memset enqueues setting every byte of the range.
func (s *Stream) Memset(dst Range, v byte) error {
	if err := checkRange("memset", dst, s); err != nil {
		return err
	}
	return s.raw.fill(dst.address(), dst.Len, uint64(v), 1)
}

func checkRange(op string, r Range, s *Stream) error {
	if err := r.check(); err != nil {
		return &Error{Op: op, Err: err}
	}
	if r.Mem == nil {
		return nil
	}
	if r.Mem.gone.Load() && s.dev.plat.kind() != Host {
		// There the stream would lose the context. On the host the fault is the device's own sticky error.
		return &Error{Op: op, Detail: r.Mem.String() + " was freed", Err: ErrIllegalAddress}
	}
	return s.sameDevice(op, r.Mem.dev)
}

func sameLength(op string, dst, src int) error {
	if dst != src {
		return &Error{Op: op, Err: fmt.Errorf("%d elements into %d", src, dst)}
	}
	return nil
}

// patternOf is the value's bytes in the low bytes of a word.
func patternOf[T Element](v T) uint64 {
	switch v := any(&v).(type) {
	case *int8:
		return uint64(uint8(*v))
	case *uint8:
		return uint64(*v)
	case *int32:
		return uint64(uint32(*v))
	case *uint32:
		return uint64(*v)
	case *int64:
		return uint64(*v)
	case *uint64:
		return *v
	case *float32:
		return uint64(math.Float32bits(*v))
	case *float64:
		return math.Float64bits(*v)
	case *Float16:
		return uint64(v.bits)
	case *BFloat16:
		return uint64(v.bits)
	case *F8E4M3:
		return uint64(v.bits)
	case *F8E5M2:
		return uint64(v.bits)
	}
	panic("cuda: no such element type")
}
