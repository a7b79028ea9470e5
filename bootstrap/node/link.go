package node

import (
	"math/rand/v2"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

const (
	// resendFirst is how long a message waits for its acknowledgement before it is sent again; then
	// longer each time, up to resendMax.
	resendFirst = 200 * time.Millisecond
	resendMax   = 2 * time.Second
	// maxBatch bounds what is sent at once, in bytes; a single larger message goes alone.
	maxBatch = 1 << 20
	// maxAhead bounds what is kept of messages that came before their turn.
	maxAhead = 4096
)

// link carries messages to one other host in order, each once, however often memberlist's sends fail.
type link struct {
	mesh *mesh
	host int
	wake chan struct{}

	out      sync.Mutex // guards what is sent
	unacked  [][]byte   // messages first, first+1, ...
	first    uint64     // number of the first of unacked
	sent     uint64     // messages before this number were sent once
	since    time.Time  // when the first of unacked became the first
	ackDue   bool
	isClosed bool

	in       sync.Mutex // guards what is received; held while a message is carried out, which keeps the order
	expected uint64     // number of the next message
	ahead    map[uint64][]byte
	acked    uint64 // copy of expected under out
}

func newLink(m *mesh, host int) *link {
	return &link{mesh: m, host: host, wake: make(chan struct{}, 1), first: 1, sent: 1, expected: 1, acked: 1, ahead: map[uint64][]byte{}}
}

func (l *link) nudge() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// send queues a message. It keeps b.
func (l *link) send(b []byte) {
	l.out.Lock()
	if !l.isClosed {
		if len(l.unacked) == 0 {
			l.since = time.Now()
		}
		l.unacked = append(l.unacked, b)
	}
	l.out.Unlock()
	l.nudge()
}

// close drops what was not delivered, and all that comes.
func (l *link) close() {
	l.out.Lock()
	l.isClosed = true
	l.unacked = nil
	l.out.Unlock()
	l.nudge()
}

// waiting is for how long the host has acknowledged nothing of what it was sent; 0 if nothing waits.
func (l *link) waiting() time.Duration {
	l.out.Lock()
	defer l.out.Unlock()
	if len(l.unacked) == 0 {
		return 0
	}
	return time.Since(l.since)
}

// run sends, and sends again, until the mesh ends.
func (l *link) run() {
	timeout := resendFirst
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		resend := false
		select {
		case <-l.wake:
		case <-timer.C:
			resend = true
			timeout = min(2*timeout, resendMax)
		case <-l.mesh.quit:
			return
		}
		waiting := l.flush(resend)
		if !waiting {
			timeout = resendFirst
			timer.Stop()
		} else {
			timer.Reset(timeout + rand.N(timeout/4))
		}
	}
}

// flush sends what was not sent yet, or all that was not acknowledged; and an acknowledgement that is due.
// It reports whether anything waits for one.
func (l *link) flush(resend bool) (waiting bool) {
	to := l.mesh.member(l.host)
	l.out.Lock()
	if to == nil || l.isClosed {
		waiting = len(l.unacked) > 0
		l.out.Unlock()
		return waiting
	}
	for {
		from := l.sent
		if resend {
			from = l.first
			resend = false
		}
		from = max(from, l.first)
		batch := l.unacked[from-l.first:]
		size := 0
		for i, b := range batch {
			if size += len(b); size > maxBatch && i > 0 {
				batch = batch[:i]
				break
			}
		}
		acked, ackDue := l.acked, l.ackDue
		l.ackDue = false
		l.sent = max(l.sent, from+uint64(len(batch)))
		if len(batch) == 0 {
			waiting = len(l.unacked) > 0
			l.out.Unlock()
			if ackDue {
				// Lost, it is due again when the message comes again.
				l.mesh.list.SendBestEffort(to, linkMessage(msgAck, l.mesh.node.cfg.Node, acked, 0, nil))
			}
			return waiting
		}
		l.out.Unlock()
		if err := l.mesh.list.SendReliable(to, linkMessage(msgData, l.mesh.node.cfg.Node, acked, from, batch)); err != nil {
			l.mesh.node.cfg.Logf("send to %s: %v; again soon", l.mesh.node.named(l.host), err)
		}
		l.out.Lock()
		if l.isClosed {
			l.out.Unlock()
			return false
		}
	}
}

// linkMessage: who sends, what it has received before, and messages from a number on.
func linkMessage(kind byte, from int, acked, first uint64, batch [][]byte) []byte {
	e := wire.Encoder{B: []byte{kind}}
	e.Int(from)
	e.Uint(acked)
	if kind == msgData {
		e.Uint(first)
		e.Uint(uint64(len(batch)))
		for _, b := range batch {
			e.Bytes(b)
		}
	}
	return e.B
}

type linkData struct {
	from         int
	acked, first uint64
	batch        [][]byte
}

func parseLink(kind byte, b []byte) (linkData, error) {
	d := wire.Decoder{B: b}
	m := linkData{from: d.Int(), acked: d.Uint()}
	if kind == msgData {
		m.first = d.Uint()
		for range d.Count() {
			m.batch = append(m.batch, d.Bytes())
		}
	}
	return m, d.End()
}

func (m *mesh) receiveLink(kind byte, b []byte) {
	msg, err := parseLink(kind, b)
	if err != nil || msg.from < 0 || msg.from >= len(m.links) || m.links[msg.from] == nil {
		m.node.cfg.Logf("message of member %d: %v", msg.from, err)
		return
	}
	l := m.links[msg.from]
	l.acknowledge(msg.acked)
	if kind == msgData {
		l.receive(msg.first, msg.batch)
	}
}

// acknowledge drops the messages before a number.
func (l *link) acknowledge(acked uint64) {
	l.out.Lock()
	defer l.out.Unlock()
	if acked <= l.first || acked > l.first+uint64(len(l.unacked)) {
		return // old, or of messages that were never sent
	}
	l.unacked = l.unacked[acked-l.first:]
	l.first = acked
	l.since = time.Now()
	if len(l.unacked) == 0 {
		l.unacked = nil
		l.nudge() // stops the timer
	}
}

// receive carries messages out, in their order.
func (l *link) receive(first uint64, batch [][]byte) {
	l.in.Lock()
	defer l.in.Unlock()
	for i, b := range batch {
		if number := first + uint64(i); number == l.expected || number > l.expected && len(l.ahead) < maxAhead {
			l.ahead[number] = b
		}
	}
	for {
		b, ok := l.ahead[l.expected]
		if !ok {
			break
		}
		delete(l.ahead, l.expected)
		l.expected++
		if err := l.mesh.node.carryOut(l.host, b); err != nil {
			l.mesh.node.cfg.Logf("message of %s: %v", l.mesh.node.named(l.host), err)
		}
	}
	l.out.Lock()
	l.acked, l.ackDue = l.expected, true
	l.out.Unlock()
	l.nudge()
}
