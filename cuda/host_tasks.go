package cuda

import (
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"unsafe"
)

// pooledTask is a task that goes back to its pool after an eager run. One that a capture recorded does not.
type pooledTask interface{ setPooled() }

// taskPool keeps tasks of one type for reuse, so that enqueueing allocates nothing once it is warm.
type taskPool[T any] struct {
	mu   sync.Mutex
	free []*T
}

const poolLimit = 256

func (p *taskPool[T]) get() *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		t := p.free[n-1]
		p.free = p.free[:n-1]
		return t
	}
	return new(T)
}

func (p *taskPool[T]) put(t *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < poolLimit {
		p.free = append(p.free, t)
	}
}

// piece is how many bytes a copy or fill does in one Step: some ten microseconds.
const piece = 256 << 10

// copyTask copies memory, piece by piece.
type copyTask struct {
	h        *hostDevice
	dst, src unsafe.Pointer
	n, done  uintptr
	pooled   bool
}

func (t *copyTask) setPooled() { t.pooled = true }

func (t *copyTask) Start() { t.done = 0 }

func (t *copyTask) Step() (bool, error) {
	k := min(t.n-t.done, piece)
	off := t.done
	if uintptr(t.dst)-uintptr(t.src) < t.n {
		off = t.n - t.done - k // dst begins inside src: from the end, so that nothing is overwritten before it is read
	}
	if k > 0 {
		copy(unsafe.Slice((*byte)(unsafe.Add(t.dst, off)), k), unsafe.Slice((*byte)(unsafe.Add(t.src, off)), k))
		t.done += k
	}
	if t.done < t.n {
		t.h.driver.rung.Store(true)
		return false, nil
	}
	t.release()
	return true, nil
}

func (t *copyTask) Cancel(error) { t.release() }

func (t *copyTask) release() {
	if h := t.h; t.pooled {
		*t = copyTask{}
		h.copies.put(t)
	}
}

func (t *copyTask) String() string { return fmt.Sprintf("copy of %d bytes", t.n) }

// fillTask repeats a pattern of 1, 2, 4 or 8 bytes.
type fillTask struct {
	h       *hostDevice
	dst     unsafe.Pointer
	n, done uintptr
	pattern uint64
	width   uintptr
	pooled  bool
}

func (t *fillTask) setPooled() { t.pooled = true }

func (t *fillTask) Start() { t.done = 0 }

func (t *fillTask) Step() (bool, error) {
	if k := min(t.n-t.done, piece); k > 0 { // a multiple of width: piece and n are
		t.fill(unsafe.Slice((*byte)(unsafe.Add(t.dst, t.done)), k))
		t.done += k
	}
	if t.done < t.n {
		t.h.driver.rung.Store(true)
		return false, nil
	}
	t.release()
	return true, nil
}

func (t *fillTask) fill(b []byte) {
	p := t.pattern
	for i := range t.width {
		b[i] = byte(p >> (8 * i)) // the machines that Go runs on here are little-endian
	}
	for n := int(t.width); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

func (t *fillTask) Cancel(error) { t.release() }

func (t *fillTask) release() {
	if h := t.h; t.pooled {
		*t = fillTask{}
		h.fills.put(t)
	}
}

func (t *fillTask) String() string { return fmt.Sprintf("fill of %d bytes", t.n) }

// hostFunc runs a function on a goroutine of its own, so that it may take its time.
type hostFunc struct {
	h     *hostDevice
	fn    func()
	begun bool        // this run; the driver's
	busy  atomic.Bool // fn is running, perhaps still for a run that was cancelled
}

func (t *hostFunc) Start() { t.begun = false }

func (t *hostFunc) Step() (bool, error) {
	if t.begun || t.busy.Load() {
		return t.begun && !t.busy.Load(), nil
	}
	t.begun = true
	t.busy.Store(true)
	t.h.helpers.Add(1)
	go t.run()
	return false, nil
}

func (t *hostFunc) run() {
	defer t.h.helpers.Done()
	debug.SetPanicOnFault(true)
	defer func() {
		if r := recover(); r != nil {
			t.h.dev.Fail(t.h.panicked("host function", r)) // before the stream goes on
		}
		t.busy.Store(false)
		t.h.ring()
	}()
	t.fn()
}

func (t *hostFunc) String() string { return "host function" }
