package nccl

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda"
)

// A capture that has made windows while the communicator was closed leaves nobody who ends them: their memory goes at once.
func TestWindowsAfterTheEnd(t *testing.T) {
	dev, err := cuda.Open("host")
	if err != nil {
		t.Fatal(err)
	}
	for _, closed := range []bool{false, true} {
		m, err := dev.Alloc(4096, cuda.Shareable)
		if err != nil {
			t.Fatal(err)
		}
		hold, err := m.Hold("window", false)
		if err != nil {
			t.Fatal(err)
		}
		l := &library{c: &Comm{closing: closed, closed: closed}, ended: closed}
		l.c.be = l
		l.keepPanes(&l.strays, []*pane{{mem: m, hold: hold}})
		want := []string{"window"}
		if closed {
			want = nil
		}
		if d := cmp.Diff(m.Holders(), want); d != "" {
			t.Errorf("closed %t: the memory's holders (-got +want):\n%s", closed, d)
		}
		hold.Release()
		if err := m.Free(); err != nil {
			t.Error(err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}
