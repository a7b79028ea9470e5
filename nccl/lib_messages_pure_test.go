package nccl

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
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
		{OpSend, 0, 1, envelope{0, 0, cuda.Int8DType, true}},
		{OpRecv, 1<<24 - 1, 1<<24 - 1, envelope{1<<40 - 1, sumMask, cuda.F8E5M2DType, true}},
		{OpSend, 70000, 1 << 20, envelope{1 << 33, 0x123456, cuda.Float32DType, true}},
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
		e.put(n, envelope{n, 0, cuda.Int32DType, true})
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
	e.put(4*keptMessages, envelope{4 * keptMessages, 0, cuda.Int32DType, true}) // a full turn was lost
	known(4*keptMessages, 4*keptMessages)
	e.put(4*keptMessages+1, envelope{4*keptMessages + 1, 0, cuda.Int32DType, true})
	known(4*keptMessages, 4*keptMessages+1)
	e.put(100*keptMessages, envelope{100 * keptMessages, 0, cuda.Int32DType, true})
	known(100*keptMessages, 100*keptMessages)
}

// gone is a backend whose members have all closed.
type gone struct{ backend }

func (gone) peerClosed(int) (uint64, bool) { return 0, true }

// A peer that has closed does not meet what it has not noted; of one whose records this rank has lost that is not known, and nothing is said.
func TestMessagesOfClosedPeer(t *testing.T) {
	for _, other := range []int{0, 300} { // messages of the peer with a third rank, before this one looks: its ledger keeps 256 records
		t.Run(fmt.Sprint(other), func(t *testing.T) {
			jobs := bootstrap.InProcess(3)
			defer func() {
				for _, j := range jobs {
					j.Close()
				}
			}()
			sides := make([]messages, 2)
			for r := range sides {
				l, err := jobs[r].Ledger(r)
				if err != nil {
					t.Fatal(err)
				}
				c := &Comm{job: jobs[r], name: "world", rank: r, ranks: []int{0, 1, 2}, id: 77, be: gone{}, peers: make([]peer, 3)}
				if err := sides[r].open(c, l); err != nil {
					t.Fatal(err)
				}
			}
			for r := range sides {
				l, err := jobs[r].Ledger(1 - r)
				if err != nil {
					t.Fatal(err)
				}
				sides[r].c.peers[1-r].acct = l.FindAccount(messagesID(77))
			}
			message := func(op Op, peer int32) []Call {
				return []Call{{Op: op, Type: cuda.Float32DType, Count: 8, Root: peer}}
			}
			sides[0].note(message(OpSend, 1))
			sides[1].note(message(OpRecv, 0))
			for range other {
				sides[1].note(message(OpRecv, 2))
			}
			if err := sides[0].look(); err != nil {
				t.Errorf("%v, though the peer has received", err)
			}
			// One more, which the peer does not receive.
			sides[0].note(message(OpSend, 1))
			if err := sides[0].look(); other == 0 && !errors.Is(err, ErrClosed) || other > 0 && err != nil {
				t.Errorf("%v", err)
			}
		})
	}
}
