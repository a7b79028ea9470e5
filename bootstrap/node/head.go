package node

import (
	"fmt"
	"slices"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// What a link carries between host 0 and another.
const (
	opStart   = iota + 1 // to host 0: a request of a rank
	opCancel             // to host 0
	opJoined             // to host 0: of ranks
	opLeft               // to host 0
	opDied               // to host 0
	opGone               // to host 0
	opSuspect            // to host 0
	opFar                // to host 0: a rank's question about ledgers
	opDigest             // to host 0: what the ledgers of a host say
	opGive               // to host 0: a piece of an exchange
	opReply              // from host 0: the answer to a request
	opEvents             // from host 0
	opCollect            // from host 0: asks for a digest
	opFarTold            // from host 0: the answer to a question about ledgers
	opGiven              // from host 0: a piece of what all hosts have given
)

const (
	// eventPause, and some more for each host, up to eventPauseMost, collects joins and goodbyes, which many hosts report at once: each time
	// all of them are told.
	eventPause     = 10 * time.Millisecond
	eventPauseHost = 2 * time.Millisecond
	eventPauseMost = 250 * time.Millisecond
	// confirmPause is how often the launcher is asked about a host that gossip holds for dead.
	confirmPause = 250 * time.Millisecond
)

func encode(op byte, f func(*wire.Encoder)) []byte {
	e := wire.Encoder{B: []byte{op}}
	f(&e)
	return e.B
}

func (n *Node) tellHead(op byte, f func(*wire.Encoder)) { n.mesh.links[0].send(encode(op, f)) }

// forward sends a request to host 0. A rank of a host that is lost meanwhile has no use for the answer.
func (n *Node) forward(rank int, id uint64, q *store.Request, done func(store.Reply)) {
	n.mu.Lock()
	if n.lost != nil {
		err := n.lost
		n.mu.Unlock()
		done(store.Reply{Err: err})
		return
	}
	if q.Kind != store.CloseGroup {
		n.waiting[call{rank, id}] = done
	}
	n.mu.Unlock()
	n.tellHead(opStart, func(e *wire.Encoder) { e.Int(rank); e.Uint(id); e.Request(q) })
}

// carryOut does what a message of another host says. Messages of a host come one at a time, in order.
func (n *Node) carryOut(from int, b []byte) error {
	if len(b) == 0 {
		return fmt.Errorf("empty message")
	}
	op := b[0]
	d := wire.Decoder{B: b[1:]}
	if (n.cfg.Node == 0) != (op < opReply) || n.cfg.Node != 0 && from != 0 {
		return fmt.Errorf("message of kind %d from %s to %s", op, n.named(from), n.named(n.cfg.Node))
	}
	if op == opEvents {
		events := d.Events()
		if err := d.End(); err != nil {
			return err
		}
		for _, e := range events {
			if err := n.store.Apply(e); err != nil {
				return err
			}
		}
		return nil
	}

	switch op {
	case opFar, opDigest, opCollect, opFarTold:
		return n.farMessage(from, op, &d)
	case opGive, opGiven:
		return n.exchangeMessage(from, op, &d)
	}
	rank := d.Int()
	if d.Err == nil && (rank < 0 || rank >= len(n.cfg.NodeOf) || n.cfg.Node == 0 && n.cfg.NodeOf[rank] != from) {
		return fmt.Errorf("%s speaks for rank %d", n.named(from), rank)
	}
	switch op {
	case opStart:
		id, q := d.Uint(), d.Request()
		if err := d.End(); err != nil {
			return err
		}
		reply := n.mesh.links[from]
		n.store.Start(rank, id, q, func(r store.Reply) {
			if q.Kind != store.CloseGroup {
				reply.send(encode(opReply, func(e *wire.Encoder) { e.Int(rank); e.Uint(id); e.Reply(r) }))
			}
		})
	case opCancel:
		id := d.Uint()
		if err := d.End(); err != nil {
			return err
		}
		n.store.Cancel(rank, id)
	case opReply:
		id, r := d.Uint(), d.Reply()
		if err := d.End(); err != nil {
			return err
		}
		n.mu.Lock()
		done := n.waiting[call{rank, id}]
		delete(n.waiting, call{rank, id})
		n.mu.Unlock()
		if done != nil {
			done(r)
		}
	case opJoined, opLeft, opGone:
		host := d.String()
		if err := d.End(); err != nil {
			return err
		}
		switch op {
		case opJoined:
			if err := n.store.Join(rank, host); err != nil {
				return err
			}
		case opLeft:
			n.store.Leave(rank, host)
		case opGone:
			n.store.Gone(rank, host)
		}
	case opSuspect:
		suspect := d.Int()
		if err := d.End(); err != nil {
			return err
		}
		if suspect < 0 || suspect >= len(n.cfg.NodeOf) {
			return fmt.Errorf("rank %d suspects rank %d of %d", rank, suspect, len(n.cfg.NodeOf))
		}
		n.suspect(rank, suspect)
	case opDied:
		host, cause := d.String(), d.String()
		if err := d.End(); err != nil {
			return err
		}
		n.store.Die(rank, host, cause)
	default:
		return fmt.Errorf("message of unknown kind %d", op)
	}
	return nil
}

// shipEvents tells the other hosts what has happened: deaths at once, the rest collected for a moment.
func (n *Node) shipEvents() {
	for from := 0; ; {
		events, more := n.store.Events(from)
		if len(events) == 0 {
			select {
			case <-more:
			case <-n.quit:
				return
			}
			continue
		}
		if !slices.ContainsFunc(events, func(e store.Event) bool { return e.Kind == store.Died || e.Kind == store.HostLost }) {
			pause := time.NewTimer(min(eventPause+time.Duration(n.nodes)*eventPauseHost, eventPauseMost))
			for urgent, known := false, len(events); !urgent; {
				select {
				case <-more:
					var all []store.Event
					all, more = n.store.Events(from)
					for _, e := range all[known:] {
						urgent = urgent || e.Kind == store.Died || e.Kind == store.HostLost
					}
					events, known = all, len(all)
				case <-pause.C:
					urgent = true
				case <-n.quit:
					pause.Stop()
					return
				}
			}
			pause.Stop()
		}
		from += len(events)
		msg := encode(opEvents, func(e *wire.Encoder) { e.Events(events) })
		for _, l := range n.mesh.links {
			if l != nil {
				l.send(msg)
			}
		}
	}
}

// memberBack is called when a host is a member (again).
func (n *Node) memberBack(host int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.doubted, host)
}

// memberGone is called when gossip holds a host for dead, or it has left the members in good order.
func (n *Node) memberGone(host int, name string, left bool) {
	n.mu.Lock()
	known := n.doubted[host]
	n.doubted[host] = true
	n.mu.Unlock()
	if known {
		return
	}
	n.spawn(func() {
		<-n.meshed
		for !left && n.cfg.Confirm != nil && !n.cfg.Confirm(host) {
			timer := time.NewTimer(confirmPause)
			select {
			case <-timer.C:
			case <-n.quit:
				timer.Stop()
				return
			}
			n.mu.Lock()
			still := n.doubted[host]
			n.mu.Unlock()
			if !still {
				return // it is back
			}
		}
		detail := ""
		if left {
			detail = "its node has ended"
		}
		n.hostLost(host, name, detail, left && n.allEnded(host))
	})
}

func (n *Node) allEnded(host int) bool {
	for rank, h := range n.cfg.NodeOf {
		if h == host {
			if _, end := n.store.Status(rank); end == nil {
				return false
			}
		}
	}
	return true
}

// hostLost gives a host up. Host 0 tells all; the others act when it is host 0 itself. If the job is over there
// nobody need be told.
func (n *Node) hostLost(host int, name, detail string, over bool) {
	if n.cfg.Node == 0 {
		if !over {
			n.store.LoseHost(host, name, detail)
		}
		n.mesh.links[host].close()
		n.loseExchanges(host, fmt.Errorf("host %s is lost", name))
		return
	}
	if host != 0 {
		return // host 0 will say so
	}
	if !over {
		n.store.LoseHost(0, name, detail)
	}
	n.mesh.links[0].close()
	n.mu.Lock()
	n.lost = &store.Error{Kind: store.Lost, Text: fmt.Sprintf("host %s, which holds the job's state, is lost", name)}
	waiting := n.waiting
	n.waiting = map[call]func(store.Reply){}
	lost := n.lost
	n.mu.Unlock()
	for _, done := range waiting {
		done(store.Reply{Err: lost})
	}
	n.endFar()
	n.loseExchanges(0, lost)
}

// Unreached lists the hosts to which messages have been on the way for at least d, without any acknowledgement: the network between
// them and this one may be cut, though others reach both and gossip, by way of them, holds them for alive.
func (n *Node) Unreached(d time.Duration) []int {
	if n.nodes == 1 {
		return nil
	}
	var hosts []int
	for i, l := range n.mesh.links {
		if l != nil && l.waiting() >= d {
			hosts = append(hosts, i)
		}
	}
	return hosts
}

// LoseHost gives a host up on the word of the launcher, whatever gossip says ("the agent ended", "no answer for 10s").
func (n *Node) LoseHost(host int, name, cause string) {
	if n.nodes == 1 || host < 0 || host >= n.nodes || host == n.cfg.Node {
		return
	}
	n.hostLost(host, name, cause, false)
}
