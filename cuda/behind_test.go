package cuda

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

// Behind orders two streams whatever has become of the other one.
func TestGPUBehind(t *testing.T) {
	d := openGPU(t)
	var streams []*Stream
	for range 2 {
		s, err := d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	a, b := streams[0], streams[1]
	e, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	must := func(errs ...error) {
		t.Helper()
		if err := errors.Join(errs...); err != nil {
			t.Fatal(err)
		}
	}
	wait := func(s *Stream) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		must(s.Synchronize(ctx))
	}
	let := block(t, a)
	done := make(chan struct{})
	must(b.Behind(a, e), b.HostFunc(func() { close(done) }))
	if ready, err := b.Query(); ready || err != nil {
		t.Errorf("b is ready (%t, %v) while a is blocked", ready, err)
	}
	select {
	case <-done:
		t.Error("b went on while a is blocked")
	default:
	}
	let()
	wait(b)

	// A failure of a stays there, and does not keep b from waiting.
	let = block(t, a)
	broken := errors.New("broken")
	remove := a.Watch(func(uint64, bool) (uint64, error) { return 0, broken }, nil)
	if _, err := a.Query(); !errors.Is(err, broken) {
		t.Errorf("query of a: %v, want %v", err, broken)
	}
	must(b.Behind(a, e))
	if ready, err := b.Query(); ready || err != nil {
		t.Errorf("b is ready (%t, %v) while a, which has failed, is blocked", ready, err)
	}
	let()
	wait(b)
	remove()

	// One that captures is refused, and its capture stays well.
	c, err := d.NewStream()
	must(err)
	var captured error
	onOtherThread(func() {
		captured = c.BeginCapture(CaptureThreadLocal)
		if err := b.Behind(c, e); !errors.Is(err, ErrCaptureUnsafe) {
			t.Errorf("behind a capturing stream: %v, want %v", err, ErrCaptureUnsafe)
		}
		if err := c.Behind(b, e); !errors.Is(err, ErrCaptureUnsafe) {
			t.Errorf("a capturing stream behind another: %v, want %v", err, ErrCaptureUnsafe)
		}
		g, err := c.EndCapture()
		if captured = errors.Join(captured, err); err == nil {
			captured = errors.Join(captured, g.Destroy())
		}
	})
	must(captured)

	// One that is closed has nothing left.
	must(c.Close(), b.Behind(c, e))
	wait(b)
	must(e.Close(), a.Close(), b.Close(), d.Close())
}

func TestGPULinked(t *testing.T) {
	d := openGPU(t)
	defer d.Close()
	n, linked := d.Linked()
	t.Logf("%d devices, linked: %t", n, linked)
	if n < 1 || n == 1 && linked || onFake() && n > 1 && linked != (d.Platform() != HIP) {
		t.Errorf("%d devices, linked: %t", n, linked)
	}
	if ok, err := d.LinkedTo(d.Info().UUID); !ok || err != nil {
		t.Errorf("linked to itself: %t, %v", ok, err)
	}
	if linked {
		other, err := Open(otherDevice(d))
		check(t, err)
		ok, err := d.LinkedTo(other.Info().UUID)
		if !ok || err != nil {
			t.Errorf("%s is linked to %s: %t, %v", d.Info().UUID, other.Info().UUID, ok, err)
		}
		check(t, other.Close())
	}
	ok, err := d.LinkedTo("GPU-none")
	if wantText(t, err, "look for a link", "GPU-none"); ok {
		t.Error("linked to a GPU that is none")
	}
}

// Who uses a stream is told when it can still be waited for: before it begins a capture, joins one, or is closed, failed or not.
func TestGPUBeforeLeaving(t *testing.T) {
	d := openGPU(t)
	var streams [2]*Stream
	var told [2]int
	var events [2]*Event
	for i := range streams {
		s, err := d.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		streams[i] = s
		if events[i], err = d.NewEvent(); err != nil {
			t.Fatal(err)
		}
		remove := s.BeforeLeaving(func() {
			told[i]++
			if _, err := s.Query(); err != nil && told[i] < 3 {
				t.Errorf("stream %d is told too late: %v", i, err)
			}
		})
		defer remove()
		s.BeforeLeaving(func() { t.Errorf("stream %d: told after remove", i) })()
	}
	a, b := streams[0], streams[1]
	want := func(when string, x, y int) {
		t.Helper()
		if told != [2]int{x, y} {
			t.Errorf("%s: told %v times, want %d and %d", when, told, x, y)
		}
	}
	onOtherThread(func() {
		err := a.BeginCapture(CaptureThreadLocal)
		want("begin of a capture", 1, 0)
		err = errors.Join(err, a.Record(events[0]), b.Wait(events[0]))
		want("join", 1, 1)
		err = errors.Join(err, b.Record(events[1]), a.Wait(events[1]), b.Wait(events[0]))
		g, endErr := a.EndCapture()
		if err = errors.Join(err, endErr); err != nil {
			t.Error(err)
			return
		}
		check(t, g.Destroy())
	})
	check(t, errors.Join(a.Record(events[0]), b.Wait(events[0])))
	want("in the capture and behind it", 1, 1)
	check(t, b.Close())
	want("close", 1, 2)
	broken := errors.New("broken")
	a.Watch(func(uint64, bool) (uint64, error) { return 0, broken }, nil)
	if _, err := a.Query(); !errors.Is(err, broken) {
		t.Errorf("query: %v, want %v", err, broken)
	}
	told[0] = 2 // it is asked no more
	check(t, errors.Join(a.Close(), events[0].Close(), events[1].Close()))
	want("close of one that has failed", 3, 2)
}

// The close of a stream that has failed waits for what ends in a moment: the program frees the memory that it used.
func TestGPUCloseFailedStream(t *testing.T) {
	d := openGPU(t)
	for range 10 { // one of them in time
		s, err := d.NewStream()
		check(t, err)
		ch := make(chan struct{})
		var done atomic.Bool
		check(t, s.HostFunc(func() {
			<-ch
			time.Sleep(2 * time.Millisecond)
			done.Store(true)
		}))
		broken := errors.New("broken")
		s.Watch(func(uint64, bool) (uint64, error) { return 0, broken }, nil)
		if _, err := s.Query(); !errors.Is(err, broken) {
			t.Errorf("query: %v, want %v", err, broken)
		}
		close(ch)
		check(t, s.Close())
		if done.Load() {
			return
		}
	}
	t.Error("close did not wait once")
}
