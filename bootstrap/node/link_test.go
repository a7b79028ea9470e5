package node

import (
	"encoding/binary"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// lateLink is a link from host 1, with host 0's store, of which nothing is sent.
func lateLink(t *testing.T) (*link, *store.Store) {
	t.Helper()
	n := &Node{cfg: Config{Job: "job", NodeOf: []int{0, 1}, Logf: t.Logf}, nodes: 2, store: store.New([]int{0, 1}), waiting: map[call]func(store.Reply){}}
	t.Cleanup(n.store.Close)
	n.mesh = &mesh{node: n, links: make([]*link, 2)}
	n.mesh.links[1] = newLink(n.mesh, 1)
	return n.mesh.links[1], n.store
}

// putMessage is the put of a key by rank 1.
func putMessage(key uint64) []byte {
	return encode(opStart, func(e *wire.Encoder) {
		e.Int(1)
		e.Uint(key)
		e.Request(&store.Request{Kind: store.Put, Name: string(binary.LittleEndian.AppendUint64(nil, key))})
	})
}

// More messages have come before their turn than are kept, because the first was lost: sent again, it is carried out, and the rest after it.
func TestFirstOfManyIsLate(t *testing.T) {
	l, s := lateLink(t)
	const messages = maxAhead + 100
	var batch [][]byte
	for i := range messages {
		batch = append(batch, putMessage(uint64(i+1)))
	}
	l.receive(2, batch[1:])
	for l.expected <= messages {
		before := l.expected
		l.receive(before, batch[before-1:]) // again, from the first that is missing
		if l.expected == before {
			t.Fatalf("message %d of %d is not taken: %d are kept that came before their turn", before, messages, len(l.ahead))
		}
	}
	for _, key := range []uint64{1, 2, maxAhead, messages} {
		got := make(chan store.Reply, 1)
		s.Start(0, key, &store.Request{Kind: store.Get, Name: string(binary.LittleEndian.AppendUint64(nil, key))}, func(r store.Reply) { got <- r })
		select {
		case r := <-got:
			if r.Err != nil {
				t.Errorf("key %d: %v", key, r.Err)
			}
		default:
			t.Errorf("key %d was not put", key)
		}
	}
}
