package graphs

import (
	"errors"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
)

// A failure breaks a graph on a goroutine of its own. One that is closed while it is being released keeps nobody from freeing the memory.
func TestCloseDuringRelease(t *testing.T) {
	dev, err := cuda.Open("host")
	if err != nil {
		t.Fatal(err)
	}
	st := newState(dev, "", "here")
	var mem [2]*cuda.Memory
	for i := range mem {
		if mem[i], err = dev.Alloc(64, cuda.Private); err != nil {
			t.Fatal(err)
		}
		if err := st.hold(mem[i]); err != nil {
			t.Fatal(err)
		}
	}
	// The first memory is given back in the middle of the release: a hold that only defers.
	st.holds[0].hold.SetLive(false)
	var inside error
	mem[0].OnFree(func() { inside = errors.Join(st.close(), mem[1].Free()) })
	if err := mem[0].Free(); err != nil {
		t.Fatal(err)
	}
	st.release()
	if err := errors.Join(inside, dev.Close()); err != nil {
		t.Error(err)
	}
}

// A communicator may fail on another goroutine while a capture that has its graph already is given up.
func TestAbandonBroken(t *testing.T) {
	dev, err := cuda.Open("host")
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		st := newState(dev, "", "here")
		mem, err := dev.Alloc(64, cuda.Private)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(st.hold(mem), s.BeginCapture(cuda.CaptureThreadLocal)); err != nil {
			t.Fatal(err)
		}
		tmpl, err := s.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		if err := st.seal(tmpl); err != nil {
			t.Fatal(err)
		}
		broken := make(chan struct{})
		go func() {
			defer close(broken)
			st.Break(errors.New("the communicator failed"))
		}()
		st.abandon(tmpl)
		<-broken
		if err := tmpl.Destroy(); !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("the template is still there: %v", err)
		}
		if err := mem.Free(); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
