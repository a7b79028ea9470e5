package node

import (
	"testing"

	"github.com/hashicorp/memberlist"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// Whatever another member sends, the node lives on.
func FuzzMemberMessages(f *testing.F) {
	f.Add(false, linkMessage(msgData, 1, 1, 1, [][]byte{encode(opJoined, func(e *wire.Encoder) { e.Int(1); e.String("h") })}))
	f.Add(false, linkMessage(msgData, 1, 1, 1, [][]byte{encode(opSuspect, func(e *wire.Encoder) { e.Int(1); e.Int(0) })}))
	f.Add(false, linkMessage(msgData, 1, 1, 1, [][]byte{encode(opStart, func(e *wire.Encoder) {
		e.Int(1)
		e.Uint(7)
		e.Request(&store.Request{Kind: store.Gather, Name: "world", Gen: 1})
	})}))
	f.Add(true, linkMessage(msgData, 0, 1, 1, [][]byte{encode(opEvents, func(e *wire.Encoder) {
		e.Events([]store.Event{{Kind: store.Died, End: store.End{Rank: 0, Cause: "x"}}})
	})}))
	f.Add(false, linkMessage(msgData, 1, 1, 1, [][]byte{encode(opGive, func(e *wire.Encoder) {
		e.String("x")
		e.Ints([]int{0, 1})
		e.Bool(true)
		e.Bytes([]byte("data"))
	})}))
	f.Add(true, linkMessage(msgData, 0, 1, 1, [][]byte{encode(opGiven, func(e *wire.Encoder) {
		e.String("x")
		e.String("")
		e.Int(0)
		e.Bool(true)
		e.Bytes([]byte("data"))
	})}))
	f.Add(true, linkMessage(msgAck, 0, 1, 0, nil))
	f.Add(false, idMessage(msgPush, 0, "id", make([]byte, 128)))
	f.Add(true, idMessage(msgID, 0, "id", make([]byte, 128)))
	f.Fuzz(func(t *testing.T, second bool, b []byte) {
		n := &Node{
			cfg: Config{Job: "job", NodeOf: []int{0, 1}, Logf: func(string, ...any) {}}, nodes: 2,
			meshed: make(chan struct{}), store: store.New([]int{0, 1}), waiting: map[call]func(store.Reply){},
		}
		n.exchanges.init()
		n.exchanges.own["x"] = &exchange{hosts: []int{0, 1}, done: func([][]byte, error) {}}
		defer n.store.Close()
		if second {
			n.cfg.Node = 1
		}
		// Nothing is sent: passing on and sending need a membership.
		n.mesh = &mesh{node: n, links: make([]*link, 2), pushed: map[string]bool{}, closed: true, quit: make(chan struct{})}
		n.mesh.queue = &memberlist.TransmitLimitedQueue{RetransmitMult: 1, NumNodes: func() int { return 2 }}
		n.mesh.links[1-n.cfg.Node] = newLink(n.mesh, 1-n.cfg.Node)
		close(n.meshed)
		d := delegate{n.mesh}
		d.NotifyMsg(b)
		d.MergeRemoteState(b, true)
	})
}
