package node

import (
	"fmt"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// state is the job's state as the ranks of this host see it: ids are on every host, all else is on host 0.
type state struct{ n *Node }

func (s state) Start(rank int, id uint64, q *store.Request, done func(store.Reply)) {
	n := s.n
	switch {
	case q.Kind == store.PublishID:
		n.publish(q, done)
	case q.Kind == store.WaitID || n.cfg.Node == 0:
		n.store.Start(rank, id, q, done)
	default:
		n.forward(rank, id, q, done)
	}
}

func (s state) Cancel(rank int, id uint64) {
	s.n.store.Cancel(rank, id)
	if s.n.cfg.Node != 0 {
		s.n.tellHead(opCancel, func(e *wire.Encoder) { e.Int(rank); e.Uint(id) })
	}
}

func (s state) Join(rank int, host string) *store.Error {
	if s.n.cfg.Node == 0 {
		return s.n.store.Join(rank, host)
	}
	s.n.tellHead(opJoined, func(e *wire.Encoder) { e.Int(rank); e.String(host) })
	return nil
}

func (s state) Leave(rank int, host string) {
	if s.n.cfg.Node == 0 {
		s.n.store.Leave(rank, host)
		return
	}
	s.n.tellHead(opLeft, func(e *wire.Encoder) { e.Int(rank); e.String(host) })
}

func (s state) Die(rank int, host, cause string) {
	if s.n.cfg.Node == 0 {
		s.n.store.Die(rank, host, cause)
		return
	}
	s.n.tellHead(opDied, func(e *wire.Encoder) { e.Int(rank); e.String(host); e.String(cause) })
}

func (s state) Gone(rank int, host string) {
	if s.n.cfg.Node == 0 {
		s.n.store.Gone(rank, host)
		return
	}
	s.n.tellHead(opGone, func(e *wire.Encoder) { e.Int(rank); e.String(host) })
}

func (s state) Events(from int) ([]store.Event, <-chan struct{}) { return s.n.store.Events(from) }

// publish gives an id to the members of all hosts, this one among them.
func (n *Node) publish(q *store.Request, done func(store.Reply)) {
	refuse := func(format string, args ...any) {
		done(store.Reply{Err: &store.Error{Kind: store.Refused, Text: fmt.Sprintf(format, args...)}})
	}
	if len(q.Value) > store.MaxValue || len(q.Name) > store.MaxName {
		refuse("id %q of %d bytes is too large", q.Name, len(q.Value))
		return
	}
	known := n.store.HasID(q.Name)
	n.mu.Lock()
	known = known || n.published[q.Name]
	n.published[q.Name] = true
	closed := n.closed
	n.mu.Unlock()
	switch {
	case known:
		refuse("id %q was already written", q.Name)
	case closed:
		refuse("the node is closing")
	default:
		n.spawn(func() {
			select {
			case <-n.meshed:
			case <-n.quit:
				return
			}
			if n.mesh != nil {
				n.mesh.publish(q.Name, q.Value)
			} else {
				n.store.LearnID(q.Name, q.Value)
			}
			done(store.Reply{})
		})
	}
}

// learn enters an id that came through memberlist. It reports whether it was new.
func (n *Node) learn(name string, id []byte) bool {
	fresh, ok := n.store.LearnID(name, id)
	if !ok {
		n.cfg.Logf("two ids were published as %q: the first that came here stays", name)
	}
	return fresh
}
