package cuda

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(runRole(role))
	}
	goleak.VerifyTestMain(m)
}

// hang is how long anything may take that must not hang.
const hang = 30 * time.Second

func testContext(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), hang)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t testing.TB, err, target error, text ...string) {
	t.Helper()
	if !errors.Is(err, target) {
		t.Errorf("got error %v, want %v", err, target)
		return
	}
	wantText(t, err, text...)
}

func wantText(t testing.TB, err error, text ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("got no error, want %q", text)
		return
	}
	for _, s := range text {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("got error %q, want %q in it", err, s)
		}
	}
}

// newDevice opens the host platform; closing it at the end of the test must work.
func newDevice(t testing.TB) *Device {
	t.Helper()
	d, err := Open("host")
	check(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// openTest opens the GPU where there is one, and the host platform elsewhere: for tests of what is the same on both.
func openTest(t testing.TB) *Device {
	t.Helper()
	if onFake() || findHardware("/") != nil && os.Getenv("GORUN_DEVICE") != "host" {
		return openGPU(t)
	}
	return newDevice(t)
}

func newStream(t testing.TB, d *Device) *Stream {
	t.Helper()
	s, err := d.NewStream()
	check(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func newEvent(t testing.TB, d *Device) *Event {
	t.Helper()
	e, err := d.NewEvent()
	check(t, err)
	t.Cleanup(func() { check(t, e.Close()) })
	return e
}

func malloc[T Element](t testing.TB, d *Device, n int) *Buffer[T] {
	t.Helper()
	b, err := Malloc[T](d, n)
	check(t, err)
	t.Cleanup(func() {
		if !b.Memory().Freed() {
			check(t, b.Free())
		}
	})
	return b
}

// lockThread is for tests that capture.
func lockThread(t testing.TB) {
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
}

// eventually waits for a condition that nothing announces.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(hang); !cond(); {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, hang)
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// gate is a task that waits until it is opened.
type gate struct {
	d        *Device
	name     string
	fail     error
	open     atomic.Bool
	started  atomic.Int32
	ended    atomic.Int32
	canceled atomic.Pointer[error]
}

func newGate(d *Device, name string) *gate { return &gate{d: d, name: name} }

func (g *gate) Start() { g.started.Add(1) }

func (g *gate) Step() (bool, error) {
	if !g.open.Load() {
		return false, nil
	}
	if g.fail != nil {
		return false, g.fail
	}
	g.ended.Add(1)
	return true, nil
}

func (g *gate) Waiting() string { return "gate " + g.name }

func (g *gate) Cancel(cause error) { g.canceled.Store(&cause) }

func (g *gate) let() {
	g.open.Store(true)
	g.d.Ring()
}

func (g *gate) cancelCause() error {
	if p := g.canceled.Load(); p != nil {
		return *p
	}
	return nil
}

// do is a task that runs a function once, at once.
type do func() error

func (f do) Start() {}
func (f do) Step() (bool, error) {
	err := f()
	return err == nil, err
}

// countLines counts the lines of a file of /proc that contain a text.
func countLines(t testing.TB, file, text string) int {
	t.Helper()
	data, err := os.ReadFile(file)
	check(t, err)
	n := 0
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func countMemfds(t testing.TB) int { return countLines(t, "/proc/self/maps", "/memfd:gorun") }

func countFDs(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(list)
}
