package node

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// What the ledgers of other hosts' ranks say. A rank that waits asks its node, which asks host 0, which asks the hosts of the ranks that are meant, merges
// what they say, and answers. The same question of many is asked once: so a question costs some messages a host, each as large as there are
// different states, which are few where many wait for one.

const (
	// farWait is how long host 0 waits for the hosts: one that is dead or cut off leaves its ranks out of the answer.
	farWait = 400 * time.Millisecond
	// farFresh is how long an answer stays one for others that ask the same.
	farFresh = 40 * time.Millisecond
)

type far struct {
	server atomic.Pointer[server.Server]

	mu    sync.Mutex // guards the rest; no call is made under it
	token uint64

	asked map[digest.Query]*question // with host 0

	// On host 0.
	now  map[digest.Query]*collection
	by   map[uint64]*collection
	over bool
}

// question is one of this host's ranks that host 0 has not answered.
type question struct {
	token uint64
	done  []func([]digest.State)
}

// collection is a question that host 0 asks the hosts.
type collection struct {
	q      digest.Query
	token  uint64
	wants  map[int]bool // hosts that have not answered
	states []digest.State
	done   []func([]digest.State)
	ended  time.Time // zero: under way
	timer  *time.Timer
}

func (f *far) init() {
	f.asked, f.now, f.by = map[digest.Query]*question{}, map[digest.Query]*collection{}, map[uint64]*collection{}
}

// askFar is what the server does with a rank's question; nil in a job of one host.
func (n *Node) askFar() func(digest.Query, func([]digest.State)) {
	switch {
	case n.nodes == 1:
		return nil
	case n.cfg.Node == 0:
		return n.collect
	}
	return func(q digest.Query, done func([]digest.State)) {
		f := &n.far
		f.mu.Lock()
		if f.over {
			f.mu.Unlock()
			done(nil)
			return
		}
		if a := f.asked[q]; a != nil {
			a.done = append(a.done, done)
			f.mu.Unlock()
			return
		}
		f.token++
		token := f.token
		f.asked[q] = &question{token, []func([]digest.State){done}}
		f.mu.Unlock()
		n.tellHead(opFar, func(e *wire.Encoder) { e.Uint(token); q.Encode(e) })
	}
}

// farMessage carries out what another host says of it.
func (n *Node) farMessage(from int, op byte, d *wire.Decoder) error {
	f := &n.far
	token := d.Uint()
	switch op {
	case opFar:
		q := digest.DecodeQuery(d, len(n.cfg.NodeOf))
		if err := d.End(); err != nil {
			return err
		}
		n.collect(q, func(states []digest.State) {
			n.mesh.links[from].send(encode(opFarTold, func(e *wire.Encoder) {
				e.Uint(token)
				q.Encode(e)
				digest.EncodeStates(e, states)
			}))
		})
	case opCollect:
		q := digest.DecodeQuery(d, len(n.cfg.NodeOf))
		if err := d.End(); err != nil {
			return err
		}
		states := n.digest(q)
		n.tellHead(opDigest, func(e *wire.Encoder) { e.Uint(token); digest.EncodeStates(e, states) })
	case opDigest:
		states := digest.DecodeStates(d, len(n.cfg.NodeOf))
		if err := d.End(); err != nil {
			return err
		}
		for _, s := range states {
			for _, r := range s.Ranks {
				if n.cfg.NodeOf[r] != from {
					return fmt.Errorf("%s tells of the ledger of rank %d", n.named(from), r)
				}
			}
		}
		f.mu.Lock()
		c := f.by[token]
		last := false
		if c != nil && c.wants[from] {
			delete(c.wants, from)
			c.states = append(c.states, states...)
			last = len(c.wants) == 0
		}
		f.mu.Unlock()
		if last {
			n.collected(c)
		}
	case opFarTold:
		q := digest.DecodeQuery(d, len(n.cfg.NodeOf))
		states := digest.DecodeStates(d, len(n.cfg.NodeOf))
		if err := d.End(); err != nil {
			return err
		}
		f.mu.Lock()
		a := f.asked[q]
		if a != nil && a.token == token {
			delete(f.asked, q)
		} else {
			a = nil
		}
		f.mu.Unlock()
		if a != nil {
			for _, done := range a.done {
				done(states)
			}
		}
	}
	return nil
}

// collect asks the hosts of a question's ranks, on host 0.
func (n *Node) collect(q digest.Query, done func([]digest.State)) {
	f := &n.far
	ranks, err := q.Wants(len(n.cfg.NodeOf))
	if err != nil {
		done(nil)
		return
	}
	f.mu.Lock()
	if c := f.now[q]; c != nil && c.ended.IsZero() {
		c.done = append(c.done, done)
		f.mu.Unlock()
		return
	} else if c != nil && time.Since(c.ended) < farFresh {
		states := c.states
		f.mu.Unlock()
		done(states)
		return
	}
	if f.over {
		f.mu.Unlock()
		done(nil)
		return
	}
	for old, c := range f.now { // few: those of the last moment
		if !c.ended.IsZero() && time.Since(c.ended) >= farFresh {
			delete(f.now, old)
		}
	}
	f.token++
	c := &collection{q: q, token: f.token, wants: map[int]bool{}, done: []func([]digest.State){done}}
	for _, r := range ranks {
		if host := n.cfg.NodeOf[r]; host != 0 && !n.store.Lost(host) {
			c.wants[host] = true
		}
	}
	hosts := make([]int, 0, len(c.wants))
	for host := range c.wants {
		hosts = append(hosts, host)
	}
	f.now[q], f.by[c.token] = c, c
	c.timer = time.AfterFunc(farWait, func() { n.collected(c) })
	f.mu.Unlock()

	own := n.digest(q)
	f.mu.Lock()
	c.states = append(c.states, own...)
	last := len(c.wants) == 0
	f.mu.Unlock()
	msg := encode(opCollect, func(e *wire.Encoder) { e.Uint(c.token); q.Encode(e) })
	for _, host := range hosts {
		n.mesh.links[host].send(msg)
	}
	if last {
		n.collected(c)
	}
}

// digest is what the ledgers of this host say: nothing yet where the server has not been started.
func (n *Node) digest(q digest.Query) []digest.State {
	if s := n.far.server.Load(); s != nil {
		return s.Digest(q)
	}
	return nil
}

// collected answers with what has come, once.
func (n *Node) collected(c *collection) {
	f := &n.far
	f.mu.Lock()
	if !c.ended.IsZero() {
		f.mu.Unlock()
		return
	}
	c.ended = time.Now()
	c.timer.Stop()
	delete(f.by, c.token)
	c.states = digest.Merge(c.states)
	states, waiters := c.states, c.done
	c.done = nil
	f.mu.Unlock()
	for _, done := range waiters {
		done(states)
	}
}

// endFar ends what waits: the node ends, or host 0 is lost.
func (n *Node) endFar() {
	f := &n.far
	f.mu.Lock()
	f.over = true
	var open []*collection
	for _, c := range f.by {
		open = append(open, c)
	}
	asked := f.asked
	f.asked = map[digest.Query]*question{}
	f.mu.Unlock()
	for _, a := range asked {
		for _, done := range a.done {
			done(nil)
		}
	}
	for _, c := range open {
		n.collected(c)
	}
}
