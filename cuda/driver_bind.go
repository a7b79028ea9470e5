package cuda

import (
	"runtime"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// Making the context current costs 0.2 µs, a fiftieth of a small collective's call. So driverDevice.thread remembers on which thread it is: BindCall, which is for
// calls one after the other on one thread, asks the driver only where it is on another. What a thread remembers only that thread writes, so it
// is true as long as nobody else changes the thread's context: another device of this package takes its own threads away from the others, and a caller of
// Bind, who may call what he likes, gives the thread back unknown. That a thread has ended, and a new one has its number, package dl notices.

// bind makes the calling thread the goroutine's, and the device current on it; unbind lets it go.
func (g *driverDevice) bind() error {
	switch {
	case g.closed.Load():
		return ErrClosed
	case g.hung.Load():
		return g.dev.Err()
	}
	runtime.LockOSThread()
	if err := g.drv.CtxSetCurrent(g.ctx); err != nil {
		runtime.UnlockOSThread()
		return g.cause(err)
	}
	// This device itself is not among them yet when it is being opened.
	t := dl.ThisThread()
	for _, other := range openDevices.all() {
		if other != g {
			other.thread.CompareAndSwap(t, 0)
		}
	}
	return nil
}

func (g *driverDevice) unbind() { runtime.UnlockOSThread() }

// here reports whether the calling thread is known to have the device.
func (g *driverDevice) here() bool {
	t := dl.ThisThread()
	return t != 0 && g.thread.Load() == t && !g.closed.Load() && !g.hung.Load()
}

// bindCall is the rest of BindCall, on a locked thread: it trusts that a thread which it has bound before still has the device, unless unknow was called there since,
// and relaxes it.
func (g *driverDevice) bindCall() (b BoundCall, err error) {
	if !g.here() {
		err = g.bindThread()
		runtime.UnlockOSThread() // bind's is left
	}
	if err != nil {
		return b, g.dev.bindError(err)
	}
	b.g = g
	b.mode, b.relaxed = g.relax()
	return b, nil
}

// bindThread is bind on a thread that has not had the device at the last call.
func (g *driverDevice) bindThread() error {
	if err := g.bind(); err != nil {
		return err
	}
	g.thread.Store(dl.MarkThread())
	return nil
}

// unknow says that the calling thread may have another device by now.
func (g *driverDevice) unknow() { g.thread.CompareAndSwap(dl.ThisThread(), 0) }

// relax relaxes the bound thread's capture mode, where anything captures; restore brings back what it was.
func (g *driverDevice) relax() (mode int32, ok bool) {
	if !g.captures.any() {
		return 0, false
	}
	old, err := g.drv.ExchangeCaptureMode(cusys.CaptureRelaxed)
	return int32(old), err == nil
}

func (g *driverDevice) restore(mode int32) { g.drv.ExchangeCaptureMode(cusys.CaptureMode(mode)) }

// openDevices are those of the process, mostly one.
var openDevices sharedList[*driverDevice]
