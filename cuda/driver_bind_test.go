package cuda

import (
	"runtime"
	"testing"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// BindCall makes the device current on each thread, and asks the driver again only where the thread may have another one by now.
func TestGPUBindCall(t *testing.T) {
	d := openGPU(t)
	g := d.plat.(*driverDevice)
	if d.Platform() == HIP {
		t.Skip("a thread always has a device: it cannot be taken away")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if dl.MarkThread() == 0 {
		t.Fatal("this C library tells no thread from another")
	}
	check(t, g.drv.CtxSetCurrent(0))
	call := func(what string, want cusys.Context) {
		t.Helper()
		b, bindErr := d.BindCall()
		defer b.Release()
		if c, err := g.drv.CtxCurrent(); bindErr != nil || err != nil || c != want {
			t.Errorf("%s: %v; current context %#x, %v, want %#x", what, bindErr, c, err, want)
		}
	}
	call("first", g.ctx)
	check(t, g.drv.CtxSetCurrent(0))
	call("where nobody said that it was changed", 0) // so the driver was not asked
	b := d.Bind()
	check(t, b.Err())
	check(t, g.drv.CtxSetCurrent(0))
	b.Release()
	call("after Bind", g.ctx)

	done := make(chan bool)
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := g.drv.CtxSetCurrent(0); err != nil {
			t.Error(err)
		}
		call("another thread", g.ctx)
	}()
	<-done
	call("after another thread", g.ctx)

	if n, err := g.drv.DeviceCount(); err == nil && n > 1 {
		other, err := Open("1")
		check(t, err)
		call("after another device was opened", g.ctx)
		s, err := other.NewStream()
		check(t, err)
		check(t, s.Close())
		call("after another device", g.ctx)
		check(t, other.Close())
	}
}

func BenchmarkBindCall(b *testing.B) {
	d := openGPU(b)
	for _, c := range []struct {
		name string
		bind func()
	}{{"Bind", func() { d.Bind().Release() }}, {"BindCall", func() {
		b, _ := d.BindCall()
		b.Release()
	}}} {
		b.Run(c.name, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for b.Loop() {
				c.bind()
			}
		})
	}
}
