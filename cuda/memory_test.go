package cuda

import (
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestAlloc(t *testing.T) {
	d := newDevice(t)
	seen := map[uint64]bool{}
	for _, kind := range []AllocKind{Private, Shareable} {
		for _, size := range []uint64{0, 1, 4095, 4096, 4097, 3 << 20} {
			m, err := d.Alloc(size, kind)
			check(t, err)
			if m.Size() != size || m.Kind() != kind || m.Device() != d || m.Pointer()%uintptr(pageSize) != 0 || m.Pointer() == 0 {
				t.Errorf("%s memory of %d bytes: size %d, kind %s, address %#x", kind, size, m.Size(), m.Kind(), m.Pointer())
			}
			if seen[m.ID()] {
				t.Errorf("id %d twice", m.ID())
			}
			seen[m.ID()] = true
			b := Range{Mem: m, Len: size}.Bytes()
			for i, v := range b {
				if v != 0 {
					t.Fatalf("byte %d is %d", i, v)
				}
				b[i] = 1
			}
			check(t, m.Free())
			wantError(t, m.Free(), ErrClosed, m.String())
		}
	}
}

func TestAllocErrors(t *testing.T) {
	d := openTest(t)
	for _, size := range []uint64{1 << 46, math.MaxUint64, 1 << 63} {
		for _, kind := range []AllocKind{Private, Shareable} {
			_, err := d.Alloc(size, kind)
			wantError(t, err, ErrOutOfMemory, "allocate")
		}
	}
	_, err := d.Alloc(1, 0)
	wantText(t, err, "kind(0)")
	_, err = Malloc[float64](d, -1)
	wantText(t, err, "-1 elements of float64")
	_, err = Malloc[float64](d, math.MaxInt)
	wantText(t, err, "elements of float64")
}

// TestHolds walks through all short sequences of a holder coming, going, changing its mind, and the owner freeing, beside a model.
func TestHolds(t *testing.T) {
	d := openTest(t)
	type model struct {
		held, live, freed bool
	}
	ops := []string{"hold", "hold live", "release", "set live", "set dead", "free"}
	var walk func(prefix []string)
	run := func(seq []string) {
		m := must(d.Alloc(16, Private))
		given := 0
		m.OnFree(func() { given++ })
		var h *Hold
		var w model
		for i, op := range seq {
			fail := func(format string, args ...any) {
				t.Helper()
				t.Fatalf("after %q, %s: "+format, append([]any{seq[:i], op}, args...)...)
			}
			switch op {
			case "hold", "hold live":
				if w.held {
					continue
				}
				var err error
				h, err = m.Hold("graph at train.go:41", op == "hold live")
				if w.freed {
					wantError(t, err, ErrClosed, "graph at train.go:41")
				} else {
					check(t, err)
					w.held, w.live = true, op == "hold live"
				}
			case "release":
				if h != nil {
					h.Release()
					w.held = false
				}
			case "set live", "set dead":
				if h != nil {
					h.SetLive(op == "set live")
					w.live = op == "set live"
				}
			case "free":
				err := m.Free()
				switch {
				case w.freed:
					wantError(t, err, ErrClosed)
				case w.held && w.live:
					held, ok := err.(*HeldError)
					if !ok {
						fail("got %v", err)
					}
					if diff := cmp.Diff(held.Holders, []string{"graph at train.go:41"}); diff != "" || held.Memory != m {
						fail("holders: got - want +\n%s", diff)
					}
					wantText(t, err, m.String(), "graph at train.go:41")
				default:
					if err != nil {
						fail("%v", err)
					}
					w.freed = true
				}
			}
			if want := w.freed && !w.held; (given == 1) != want || given > 1 || m.Freed() != w.freed {
				fail("given back %d times, want %v; freed %v, want %v", given, want, m.Freed(), w.freed)
			}
		}
		if h != nil {
			h.Release()
			h.Release()
		}
		if !w.freed {
			check(t, m.Free())
		}
		if given != 1 {
			t.Fatalf("after %q: given back %d times", seq, given)
		}
		late := false
		m.OnFree(func() { late = true })
		if !late {
			t.Fatal("OnFree after the end was not called")
		}
	}
	walk = func(prefix []string) {
		run(prefix)
		if len(prefix) == 4 {
			return
		}
		for _, op := range ops {
			walk(append(slices.Clone(prefix), op))
		}
	}
	walk(nil)
}

func TestHoldsSeveral(t *testing.T) {
	d := newDevice(t)
	m := must(d.Alloc(8, Private))
	var order []int
	for i := range 3 {
		m.OnFree(func() { order = append(order, i) })
	}
	a, b, c := must(m.Hold("a", true)), must(m.Hold("b", false)), must(m.Hold("c", true))
	if diff := cmp.Diff(m.Holders(), []string{"a", "b", "c"}); diff != "" {
		t.Error(diff)
	}
	err := m.Free()
	wantText(t, err, "in use by a, c")
	a.Release()
	c.SetLive(false)
	check(t, m.Free())
	b.Release()
	if order != nil {
		t.Fatal("given back under a hold")
	}
	m.Pointer() // the owner is done, the memory is there
	Range{Mem: m, Len: 8}.Bytes()[0] = 1
	c.Release()
	if diff := cmp.Diff(order, []int{0, 1, 2}); diff != "" {
		t.Error(diff)
	}
}

func TestShare(t *testing.T) {
	d, peer := newDevice(t), newDevice(t)
	m := must(d.Alloc(10000, Shareable))
	shared := must(m.Share())
	p := must(peer.MapShared(shared))
	if len(p.Bytes()) != 10000 {
		t.Fatalf("got %d bytes", len(p.Bytes()))
	}
	p.Bytes()[9999] = 42
	if got := (Range{Mem: m, Off: 9999, Len: 1}).Bytes()[0]; got != 42 {
		t.Errorf("got %d", got)
	}
	wantText(t, peer.Close(), "10000-byte mapping")
	// The mapping outlives the owner's memory.
	check(t, m.Free())
	if !raceEnabled && p.Bytes()[9999] != 42 {
		t.Error("the peer's memory is lost")
	}
	_, err := m.Share()
	wantError(t, err, ErrClosed)
	check(t, p.Close())
	check(t, p.Close())
	if p.Bytes() != nil {
		t.Error("memory after Close")
	}

	private := must(d.Alloc(1, Private))
	_, err = private.Share()
	wantText(t, err, "private")
	check(t, private.Free())
}

func TestShareDescriptor(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector shared memory is on the heap")
	}
	d := newDevice(t)
	m := must(d.Alloc(5000, Shareable))
	defer m.Free()
	s := must(m.Share())
	if err := unix.Ftruncate(s.FD, 4096); err == nil {
		t.Error("the memory can be cut short")
	}
	if err := unix.Ftruncate(s.FD, 1<<20); err == nil {
		t.Error("the memory can grow")
	}
	flags, err := unix.FcntlInt(uintptr(s.FD), unix.F_GETFD, 0)
	check(t, err)
	if flags&unix.FD_CLOEXEC == 0 {
		t.Error("the descriptor would be inherited")
	}
	_, err = d.MapShared(SharedMemory{FD: s.FD, Size: 1 << 20})
	wantText(t, err, "has 8192 bytes")

	plain, err := unix.MemfdCreate("gorun test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	check(t, err)
	defer unix.Close(plain)
	check(t, unix.Ftruncate(plain, 8192))
	_, err = d.MapShared(SharedMemory{FD: plain, Size: 8192})
	wantText(t, err, "can shrink")
	var pipe [2]int
	check(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	_, err = d.MapShared(SharedMemory{FD: pipe[0], Size: 1})
	wantText(t, err, "is no memfd")
	_, err = d.MapShared(SharedMemory{FD: -1, Heap: make([]byte, 3), Size: 4})
	wantText(t, err, "the slice has 3 bytes")
}

func TestMemoryLeavesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector memory is on the heap")
	}
	fds, maps := countFDs(t), countLines(t, "/proc/self/maps", "")
	d := must(Open("host"))
	for range 50 {
		for _, kind := range []AllocKind{Private, Shareable} {
			m := must(d.Alloc(1<<20, kind))
			if kind == Shareable {
				p := must(d.MapShared(must(m.Share())))
				p.Bytes()[0] = 1
				check(t, p.Close())
			}
			Range{Mem: m, Len: 1}.Bytes()[0] = 1
			check(t, m.Free())
		}
	}
	if n := countMemfds(t); n != 0 {
		t.Errorf("%d mappings of shared memory are left", n)
	}
	if n := countFDs(t); n != fds {
		t.Errorf("%d descriptors, before %d", n, fds)
	}
	check(t, d.Close())
	// The runtime may have mapped some memory of its own meanwhile.
	if n := countLines(t, "/proc/self/maps", ""); n > maps+10 {
		t.Errorf("%d mappings, before %d", n, maps)
	}
}

// What was freed keeps its addresses, within limits.
func TestPoisonIsBounded(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector memory is on the heap")
	}
	d := newDevice(t)
	space := &d.plat.(*hostDevice).space
	addresses := map[uintptr]bool{}
	for range 100 {
		m := must(d.Alloc(4096, Private))
		if addresses[m.Pointer()] {
			t.Fatal("an address was used again")
		}
		addresses[m.Pointer()] = true
		check(t, m.Free())
	}
	if len(space.freed) != 100 || space.bytes != 100*4096 {
		t.Errorf("%d ranges of %d bytes are kept", len(space.freed), space.bytes)
	}
	for range poisonRanges {
		check(t, must(d.Alloc(1, Private)).Free())
	}
	if len(space.freed) > poisonRanges {
		t.Errorf("%d ranges are kept", len(space.freed))
	}
	var info unix.Sysinfo_t
	check(t, unix.Sysinfo(&info))
	// Only addresses are used, but the kernel refuses more than the machine has memory.
	big := min(uint64(info.Totalram)*uint64(info.Unit)/2, poisonBytes/4)
	for range 2 * poisonBytes / big {
		check(t, must(d.Alloc(big, Private)).Free())
	}
	if space.bytes > poisonBytes {
		t.Errorf("%d bytes are kept", space.bytes)
	}
}

func TestUseAfterFree(t *testing.T) {
	type args struct{ x Slice[int32] }
	add := KernelSpec[args]{Name: "increment", Host: func(g Grid, lo, hi int, a args) {
		x := a.x.Host()
		for i := lo; i < hi; i++ {
			x[i]++
		}
	}}
	for _, c := range []struct {
		name     string
		enqueue  func(s *Stream, b Slice[int32]) error
		heap     bool // works on the heap of the race detector, too
		mentions string
	}{
		{name: "fill", enqueue: func(s *Stream, b Slice[int32]) error { return Fill(b, 1, s) }, mentions: "fill of 4000 bytes"},
		{name: "memset", enqueue: func(s *Stream, b Slice[int32]) error { return s.Memset(b.Range(), 1) }, mentions: "fill of 4000 bytes"},
		{name: "copy from", enqueue: func(s *Stream, b Slice[int32]) error { return CopyToHost(make([]int32, b.Len()), b, s) }, mentions: "copy of 4000 bytes"},
		{name: "copy to", enqueue: func(s *Stream, b Slice[int32]) error { return CopyToDevice(b, make([]int32, b.Len()), s) }, mentions: "copy of 4000 bytes"},
		{name: "kernel", heap: true, mentions: "kernel increment", enqueue: func(s *Stream, b Slice[int32]) error {
			return must(NewKernel(s.Device(), add)).Launch(s, Grid{N: b.Len()}, args{b})
		}},
		{name: "host function", mentions: "host function", enqueue: func(s *Stream, b Slice[int32]) error {
			p := (*int32)(b.Range().address())
			return s.HostFunc(func() { *p = 1 })
		}},
		{name: "task", mentions: "cuda.do", enqueue: func(s *Stream, b Slice[int32]) error {
			p := (*int32)(b.Range().address())
			return s.Submit(do(func() error { *p = 1; return nil }))
		}},
	} {
		for _, kind := range []AllocKind{Private, Shareable} {
			t.Run(c.name+"/"+kind.String(), func(t *testing.T) {
				if raceEnabled && !c.heap {
					t.Skip("under the race detector memory is on the heap, and stays")
				}
				d := newDevice(t)
				s := newStream(t, d)
				b := must(AllocBuffer[int32](d, 1000, kind))
				// The stream is held up, so that the memory goes while the work is enqueued.
				g := newGate(d, "hold up")
				check(t, s.Submit(g))
				check(t, c.enqueue(s, b.All()))
				behind := newGate(d, "behind")
				check(t, s.Submit(behind))
				check(t, b.Free())
				g.let()
				err := s.Synchronize(testContext(t))
				wantError(t, err, ErrIllegalAddress, c.mentions, b.Memory().String(), "freed")
				wantError(t, d.Err(), ErrIllegalAddress)
				wantError(t, behind.cancelCause(), ErrIllegalAddress)
				other, err := d.NewStream()
				if err == nil {
					other.Close()
				}
				wantError(t, err, ErrIllegalAddress)
			})
		}
	}
}

func TestHostOfFreedMemory(t *testing.T) {
	d := newDevice(t)
	b := must(Malloc[int32](d, 4))
	check(t, b.Free())
	defer func() {
		err, _ := recover().(error)
		wantError(t, err, ErrIllegalAddress, b.Memory().String())
	}()
	b.All().Host()
	t.Error("no panic")
}

func TestSlices(t *testing.T) {
	d := newDevice(t)
	b := malloc[float64](t, d, 10)
	all := b.All()
	for i := range all.Host() {
		all.Host()[i] = float64(i)
	}
	s := b.Slice(2, 7).Slice(1, 4)
	if diff := cmp.Diff(s.Host(), []float64{3, 4, 5}); diff != "" {
		t.Error(diff)
	}
	r := s.Range()
	if r.Off != 24 || r.Len != 24 || r.Mem != b.Memory() || r.Pointer() != b.Memory().Pointer()+24 || len(r.Bytes()) != 24 {
		t.Errorf("got %s at %#x", r, r.Pointer())
	}
	if got := r.String(); !strings.HasPrefix(got, "range [24,48) of 80-byte allocation ") {
		t.Errorf("got %q", got)
	}
	if b.Len() != 10 || s.Len() != 3 || s.Memory() != b.Memory() {
		t.Errorf("lengths %d and %d", b.Len(), s.Len())
	}
	for _, bounds := range [][2]int{{-1, 2}, {3, 2}, {0, 11}, {11, 11}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Slice(%d,%d) of 10 elements does not panic", bounds[0], bounds[1])
				}
			}()
			b.Slice(bounds[0], bounds[1])
		}()
	}
	var none Slice[float64]
	if none.Len() != 0 || none.Host() != nil || none.Range() != (Range{}) || none.Range().Bytes() != nil || none.Range().String() != "empty range" {
		t.Error("the zero slice is not empty")
	}

	if got, err := SliceOf[float32](b.Memory(), 8, 18); err != nil || got.Len() != 18 || got.Range().Off != 8 {
		t.Errorf("got %v, %v", got, err)
	}
	for _, c := range []struct {
		mem  *Memory
		off  uint64
		n    int
		text string
	}{
		{nil, 0, 0, "no memory"},
		{b.Memory(), 2, 1, "no multiple"},
		{b.Memory(), 0, -1, "-1 elements"},
		{b.Memory(), 0, 21, "outside"},
		{b.Memory(), 84, 0, "outside"},
		{b.Memory(), math.MaxUint64 &^ 3, 2, "outside"},
		{b.Memory(), 0, math.MaxInt, "outside"},
	} {
		_, err := SliceOf[float32](c.mem, c.off, c.n)
		wantText(t, err, c.text)
	}
	for _, r := range []Range{{Mem: b.Memory(), Off: 81}, {Mem: b.Memory(), Off: 8, Len: math.MaxUint64 - 4}, {Len: 1}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%v: no panic", r)
				}
			}()
			r.Bytes()
		}()
	}
	if n := testing.AllocsPerRun(100, func() { sum(all.Host()) }); n != 0 {
		t.Errorf("Host allocates %v times", n)
	}
}

func sum(x []float64) (s float64) {
	for _, v := range x {
		s += v
	}
	return s
}

func TestStructElements(t *testing.T) {
	d := newDevice(t)
	b := malloc[BFloat16](t, d, 3)
	if unsafe.Sizeof(b.All().Host()[0]) != 2 || b.Memory().Size() != 6 {
		t.Errorf("3 elements take %d bytes", b.Memory().Size())
	}
}
