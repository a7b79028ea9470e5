package nccl

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda"
)

func TestPackMessage(t *testing.T) {
	type message struct {
		Op   Op
		Peer int
		N    uint64
		V    envelope
	}
	for _, want := range []message{
		{OpSend, 0, 1, envelope{true, cuda.Int8DType, 0, 0}},
		{OpRecv, 1<<24 - 1, 1<<24 - 1, envelope{true, cuda.F8E5M2DType, 1<<40 - 1, sumMask}},
		{OpSend, 70000, 1 << 20, envelope{true, cuda.Float32DType, 1 << 33, 0x123456}},
	} {
		var got message
		got.Op, got.Peer, got.N, got.V = unpackMessage(packMessage(want.Op, want.Peer, want.N, want.V))
		if d := cmp.Diff(got, want, cmp.AllowUnexported(envelope{})); d != "" {
			t.Errorf("got - want +:\n%s", d)
		}
	}
}

// What one end is ahead by more than is kept is not known, and never taken for another message.
func TestMessageEnd(t *testing.T) {
	var e end
	for n := uint64(1); n <= 3*keptMessages; n++ {
		e.put(n, envelope{true, cuda.Int32DType, n, 0})
	}
	known := func(from, to uint64) {
		t.Helper()
		for n := uint64(0); n <= e.n+1; n++ {
			v, ok := e.at(n)
			if want := n >= from && n <= to; ok != want || ok && v.count != n {
				t.Errorf("message %d of %d: %+v, %t, want %t", n, e.n, v, ok, want)
			}
		}
	}
	known(2*keptMessages+1, 3*keptMessages)
	e.put(4*keptMessages, envelope{true, cuda.Int32DType, 4 * keptMessages, 0}) // a full turn was lost
	known(4*keptMessages, 4*keptMessages)
	e.put(4*keptMessages+1, envelope{true, cuda.Int32DType, 4*keptMessages + 1, 0})
	known(4*keptMessages, 4*keptMessages+1)
	e.put(100*keptMessages, envelope{true, cuda.Int32DType, 100 * keptMessages, 0})
	known(100*keptMessages, 100*keptMessages)
}
