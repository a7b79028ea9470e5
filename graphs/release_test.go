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
