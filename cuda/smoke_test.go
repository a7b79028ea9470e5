package cuda

import (
	"runtime"
	"testing"
)

func TestSmoke(t *testing.T) {
	d, err := open("host", "", "/")
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Malloc[float32](d, 100000)
	if err != nil {
		t.Fatal(err)
	}
	if err := Fill(b.All(), 2.5, s); err != nil {
		t.Fatal(err)
	}
	type args struct{ x Slice[float32] }
	k, err := NewKernel(d, KernelSpec[args]{Name: "double", Host: func(g Grid, lo, hi int, a args) {
		x := a.x.Host()
		for i := lo; i < hi; i++ {
			x[i] *= 2
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		if err := k.Launch(s, Grid{N: b.Len()}, args{b.All()}); err != nil {
			t.Fatal(err)
		}
	}
	out := make([]float32, b.Len())
	if err := CopyToHost(out, b.All(), s); err != nil {
		t.Fatal(err)
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, v := range out {
		if v != 2560 {
			t.Fatalf("%d: %v", i, v)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := s.BeginCapture(CaptureThreadLocal); err != nil {
		t.Fatal(err)
	}
	if err := k.Launch(s, Grid{N: b.Len()}, args{b.All()}); err != nil {
		t.Fatal(err)
	}
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	x, err := g.Instantiate()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := x.Launch(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Synchronize(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := b.All().Host()[7]; got != 10240 {
		t.Fatal(got)
	}
	if err := x.Destroy(); err != nil {
		t.Fatal(err)
	}
	if err := g.Destroy(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err == nil {
		t.Fatal("close with open things")
	} else {
		t.Log(err)
	}
	// Use after free.
	if err := b.Free(); err != nil {
		t.Fatal(err)
	}
	if err := Fill(b.All(), 2.5, s); err != nil {
		t.Fatal(err)
	}
	t.Logf("%v", s.Synchronize(t.Context()))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkSubmitSynchronize(b *testing.B) {
	d, _ := open("host", "", "/")
	s, _ := d.NewStream()
	buf, _ := Malloc[byte](d, 8)
	b.ReportAllocs()
	for b.Loop() {
		s.Memset(buf.All().Range(), 1)
		s.Synchronize(b.Context())
	}
	buf.Free()
	s.Close()
	d.Close()
}
