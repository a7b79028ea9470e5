package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

func TestOpen(t *testing.T) {
	for _, c := range []struct {
		name, token, env string
		files            []string
		errText          []string
	}{
		{name: "no hardware"},
		{name: "host", token: "host"},
		{name: "host by environment", env: "host"},
		{name: "host on a GPU machine", token: "host", files: []string{"dev/nvidiactl"}},
		{name: "host by environment on a GPU machine", env: "host", files: []string{"dev/nvidiactl"}},
		{name: "nvidia driver", files: []string{"proc/driver/nvidia/version"},
			errText: []string{"an NVIDIA GPU found", "proc/driver/nvidia/version", "load the CUDA driver: no usable library", "/nowhere/libcuda.so.1 (GORUN_CUDA_LIB)", "GORUN_DEVICE=host"}},
		{name: "nvidia device", files: []string{"dev/nvidiactl"}, errText: []string{"nvidiactl", "the CUDA driver", "GORUN_DEVICE=host"}},
		{name: "amd", files: []string{"dev/kfd"}, errText: []string{"an AMD GPU", "the HIP runtime", "GORUN_DEVICE=host"}},
		{name: "moore threads", files: []string{"dev/mtgpu.0"}, errText: []string{"a Moore Threads GPU", "mtgpu.0", "the MUSA driver"}},
		{name: "number", token: "3", files: []string{"dev/nvidiactl"}, errText: []string{`open device: device "3": load the CUDA driver`}},
		{name: "UUID", token: "GPU-12ab", files: []string{"dev/nvidiactl"}, errText: []string{`device "GPU-12ab": load the CUDA driver`}},
		{name: "unknown token", token: "-1", errText: []string{`device "-1"`, "unknown"}},
		{name: "unknown environment", env: "tpu", errText: []string{`GORUN_DEVICE="tpu"`, "unknown"}},
		{name: "the token is stronger", token: "host", env: "tpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if drivers.open != nil {
				t.Skip("this process has a driver open already")
			}
			for _, v := range cusys.Vendors { // no library, whatever the machine has
				t.Setenv(v.Driver.Env, "/nowhere/"+v.Driver.Sonames[0])
			}
			root := t.TempDir()
			for _, f := range c.files {
				f = filepath.Join(root, f)
				check(t, os.MkdirAll(filepath.Dir(f), 0o755))
				check(t, os.WriteFile(f, nil, 0o644))
			}
			d, err := open(c.token, c.env, root)
			if c.errText != nil {
				wantText(t, err, c.errText...)
				return
			}
			check(t, err)
			if d.Platform() != Host || !strings.HasPrefix(d.String(), "host (") {
				t.Errorf("got %s, a %s device", d, d.Platform())
			}
			check(t, d.Close())
			check(t, d.Close())
		})
	}
}

func TestOpenReadsEnvironment(t *testing.T) {
	t.Setenv("GORUN_DEVICE", "tpu")
	_, err := Open("")
	wantText(t, err, "tpu")
}

// TestOpenWithoutHardware wants a GPU by name where there is none.
func TestOpenWithoutHardware(t *testing.T) {
	for _, v := range cusys.Vendors {
		t.Setenv(v.Driver.Env, "")
	}
	_, err := open("3", "", t.TempDir())
	wantText(t, err, `device "3"`, "no GPU hardware found")
}

// TestOpenNamedLibrary names the library of one vendor on a machine with the hardware of another.
func TestOpenNamedLibrary(t *testing.T) {
	for _, v := range cusys.Vendors {
		t.Setenv(v.Driver.Env, "")
	}
	t.Setenv(cusys.HIP.Driver.Env, "/nowhere/libamdhip64.so")
	root := t.TempDir()
	check(t, os.Mkdir(filepath.Join(root, "dev"), 0o755))
	check(t, os.WriteFile(filepath.Join(root, "dev/nvidiactl"), nil, 0o644))
	for _, token := range []string{"", "0"} {
		_, err := open(token, "", root)
		wantText(t, err, "load the HIP runtime", "/nowhere/libamdhip64.so")
	}
	_, err := open("0", "", t.TempDir())
	wantText(t, err, "load the HIP runtime")
	d, err := open("", "", t.TempDir()) // no hardware: the host
	check(t, err)
	check(t, d.Close())
}

func TestPlatformString(t *testing.T) {
	for p, want := range map[Platform]string{Host: "host", CUDA: "CUDA", MUSA: "MUSA", HIP: "HIP", 9: "platform(9)"} {
		if got := p.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestDeviceCores(t *testing.T) {
	t.Setenv("GORUN_LOCAL_SIZE", "1000")
	d := newDevice(t)
	if got := d.String(); got != "host (1 core)" {
		t.Errorf("1000 ranks on this machine: got %q", got)
	}
	// A rank that is bound to cores of its own shares them with none of the 1000.
	t.Setenv("GORUN_CPU_SHARE", "1")
	want := fmt.Sprintf("host (%d cores)", machineCores())
	if machineCores() == 1 {
		want = "host (1 core)"
	}
	if got := newDevice(t).String(); got != want {
		t.Errorf("bound: got %q, want %q", got, want)
	}
}

func TestDeviceCloseNamesWhatIsOpen(t *testing.T) {
	d := openTest(t)
	s := must(d.NewStream())
	e := must(d.NewEvent())
	m := must(d.Alloc(64, Private))
	lockThread(t)
	check(t, s.BeginCapture(CaptureRelaxed))
	g := must(s.EndCapture())
	x := must(g.Instantiate())
	wantText(t, d.Close(), s.String(), e.String(), m.String(), g.String(), x.String())

	h := must(m.Hold("a registration", false))
	check(t, m.Free())
	wantText(t, d.Close(), m.String()) // still there for its holder
	h.Release()
	check(t, x.Destroy())
	check(t, g.Destroy())
	check(t, e.Close())
	wantText(t, d.Close(), s.String())
	check(t, s.Close())
	check(t, d.Close())

	_, err := d.NewStream()
	wantError(t, err, ErrClosed)
	_, err = d.NewEvent()
	wantError(t, err, ErrClosed)
	_, err = d.Alloc(1, Private)
	wantError(t, err, ErrClosed)
}

func TestDeviceCloseListIsShort(t *testing.T) {
	d := openTest(t)
	var events []*Event
	for range 20 {
		events = append(events, must(d.NewEvent()))
	}
	wantText(t, d.Close(), "and 12 more")
	for _, e := range events {
		check(t, e.Close())
	}
	check(t, d.Close())
}

func TestDeviceFail(t *testing.T) {
	d := newDevice(t)
	s, other := newStream(t, d), newStream(t, d)
	stuck, behind := newGate(d, "stuck"), newGate(d, "behind")
	check(t, s.Submit(stuck))
	check(t, s.Submit(behind))
	e := newEvent(t, d)
	check(t, s.Record(e))

	bad := errors.New("the cable is out")
	waiting := make(chan error)
	go func() { waiting <- s.Synchronize(testContext(t)) }()
	eventually(t, "start", func() bool { return stuck.started.Load() == 1 })
	d.Fail(bad)
	d.Fail(errors.New("a consequence"))
	d.Fail(nil)
	wantError(t, <-waiting, bad)
	for _, g := range []*gate{stuck, behind} {
		wantError(t, g.cancelCause(), bad)
	}
	wantError(t, d.Err(), bad)
	wantError(t, other.Synchronize(testContext(t)), bad)
	wantError(t, other.Submit(newGate(d, "late")), bad)
	wantError(t, e.Synchronize(testContext(t)), bad)
	_, err := e.Query()
	wantError(t, err, bad)
	_, err = s.Query()
	wantError(t, err, bad)
	_, err = d.Alloc(1, Private)
	wantError(t, err, bad)
	_, err = d.NewStream()
	wantError(t, err, bad)
}

// A failure reaches what is enqueued though nobody waits.
func TestDeviceFailUnattended(t *testing.T) {
	d := newDevice(t)
	s := newStream(t, d)
	g := newGate(d, "alone")
	check(t, s.Submit(g))
	bad := errors.New("broken")
	d.Fail(bad)
	eventually(t, "cancel", func() bool { return g.cancelCause() != nil })
}

func TestErrorText(t *testing.T) {
	base := errors.New("base")
	inner := &Error{Op: "kernel k", Detail: "panic", Err: base, Stack: "goroutine 1"}
	outer := &Error{Op: "stream synchronize", Detail: "stream 2", Err: inner}
	if got, want := outer.Error(), "cuda: stream synchronize: stream 2: kernel k: panic: base"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := fmt.Sprintf("%v", outer), outer.Error(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := fmt.Sprintf("%+v", outer), outer.Error()+"\ngoroutine 1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, want := fmt.Sprintf("%q", &Error{Op: "free"}), `"cuda: free"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if !errors.Is(outer, base) {
		t.Error("the cause is lost")
	}
}

// What most of it is, memory, stands last; the rest in the order of the alphabet.
func TestDeviceCloseListOrder(t *testing.T) {
	d := openTest(t)
	m := must(d.Alloc(64, Private))
	s := must(d.NewStream())
	e := must(d.NewEvent())
	wantText(t, d.Close(), "still open: "+e.String()+", "+s.String()+", "+m.String())
	check(t, m.Free())
	check(t, e.Close())
	check(t, s.Close())
	check(t, d.Close())
}
