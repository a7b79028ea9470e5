package nccl

import (
	"fmt"
	"sync"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// messages compares the eager Sends and Recvs of a library's communicator between their two ends: the library loses data or waits for ever where they differ, and
// says nothing. Each rank writes its messages to an account of its own in its ledger, in their order, and reads those of the others at every look. The
// nth send from one rank to another meets the nth recv there, so both ends are compared when both are known, whoever comes last.
//
// A message that has no other end is certain when the peer has closed the communicator; before, it may only be late.
type messages struct {
	c    *Comm
	acct *bootstrap.Account

	mu   sync.Mutex     // guards what follows; innermost
	with []*traffic     // by peer, nil without a message
	far  *bootstrap.Far // from the first message with another host on
}

// traffic are the messages of this rank with a peer, those to it and those from it.
type traffic struct {
	acct  *bootstrap.Account // the peer's
	far   bool               // on another host
	fetch uint64             // its records up to this one have been asked for; 0: none
	read  uint64             // how many of its records have been read
	lost  bool               // some of them could not be: what it has not met is not known
	out   direction
	in    direction
}

// direction are the messages of a pair that go one way.
type direction struct {
	mine, theirs end
	compared     uint64
}

// end is one rank's end of them.
type end struct {
	n    uint64 // messages
	sum  uint32 // over all of them
	kept [keptMessages]envelope
}

// keptMessages is how many of a pair's messages are there to be compared one by one. What one end is ahead by more shows in the sum of a later message.
const keptMessages = 64

// envelope is what must be equal at both ends.
type envelope struct {
	count uint64
	sum   uint32 // over this message and all before it
	typ   cuda.DType
	known bool // false of a record that was lost
}

func (e *end) add(typ cuda.DType, count uint64) envelope {
	h := (uint64(e.sum)<<32 ^ uint64(typ)<<56 ^ count) * 0x9e3779b97f4a7c15
	h = (h ^ h>>32) * 0xd6e8feb86659fd93
	e.sum = uint32(h >> 40) // as many bits as sumMask has
	v := envelope{count, e.sum, typ, true}
	e.n++
	e.kept[e.n%keptMessages] = v
	return v
}

// put enters the nth message. Those that were passed over are not known.
func (e *end) put(n uint64, v envelope) {
	for k := max(e.n+1, n-min(n, keptMessages)); k < n; k++ {
		e.kept[k%keptMessages] = envelope{}
	}
	e.n = n
	e.kept[n%keptMessages] = v
}

// at is the nth message, false where it has not come or is no longer kept.
func (e *end) at(n uint64) (envelope, bool) {
	if n == 0 || n > e.n || e.n-n >= keptMessages {
		return envelope{}, false
	}
	v := e.kept[n%keptMessages]
	return v, v.known
}

// A record of a message: the first word has op, type, peer and the message's number among those of the pair and direction; the second count and sum.
const (
	messagePeerShift   = 16
	messageNumberShift = 40
	messageNumberMask  = 1<<24 - 1
	messageCountMask   = 1<<40 - 1
	sumMask            = 1<<24 - 1
)

func packMessage(op Op, peer int, n uint64, v envelope) [2]uint64 {
	return [2]uint64{
		uint64(op) | uint64(v.typ)<<8 | uint64(peer)&messageNumberMask<<messagePeerShift | n&messageNumberMask<<messageNumberShift,
		v.count&messageCountMask | uint64(v.sum)<<messageNumberShift,
	}
}

// unpackMessage gives the number's low bits only.
func unpackMessage(w [2]uint64) (op Op, peer int, n uint64, v envelope) {
	return Op(w[0]), int(w[0] >> messagePeerShift & messageNumberMask), w[0] >> messageNumberShift,
		envelope{w[1] & messageCountMask, uint32(w[1] >> messageNumberShift), cuda.DType(w[0] >> 8), true}
}

// messagesID is the account's name, next to the communicator's own.
func messagesID(id uint64) uint64 { return id ^ 0x6d65737361676573 }

// open takes the account; the others find it when all have opened theirs.
func (m *messages) open(c *Comm, own *bootstrap.Ledger) (err error) {
	m.c, m.with = c, make([]*traffic, len(c.ranks))
	m.acct, err = own.OpenAccount(messagesID(c.id))
	return err
}

func (m *messages) release() {
	if m.acct != nil {
		m.acct.Release()
	}
}

// note writes messages down, before they are enqueued.
func (m *messages) note(calls []Call) {
	m.mu.Lock()
	for i := range calls {
		call := &calls[i]
		if int(call.Root) == m.c.rank {
			continue
		}
		t := m.with[call.Root]
		if t == nil {
			t = m.trafficWith(int(call.Root))
		}
		e := &t.in.mine
		if call.Op == OpSend {
			e = &t.out.mine
		}
		v := e.add(call.Type, call.Count)
		m.acct.Append(bootstrap.Enqueued, packMessage(call.Op, int(call.Root), e.n, v))
	}
	m.mu.Unlock()
}

// trafficWith is for the first message with a peer.
func (m *messages) trafficWith(peer int) *traffic {
	t := &traffic{}
	if m.c.peers[peer].far {
		if m.far == nil {
			m.far = m.c.job.Far(messagesID(m.c.id), m.c.ranks, m.c.dev.Ring)
		}
		t.far, t.acct = true, m.far.Account(m.c.ranks[peer])
	} else {
		// It has opened its account before it came to the meeting that ended Init.
		if l, err := m.c.job.Ledger(m.c.ranks[peer]); err == nil {
			t.acct = l.FindAccount(messagesID(m.c.id))
		}
	}
	m.with[peer] = t
	return t
}

// look compares what is new. It returns the first contradiction, and fails nothing.
func (m *messages) look() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for r, t := range m.with {
		if t == nil || t.acct == nil {
			continue
		}
		n, closed := m.c.be.peerClosed(r) // before its last records are read
		if t.far {
			n, closed = t.acct.Closed() // of the account that is read
		}
		if err := m.read(r, t); err != nil {
			return err
		}
		closed = closed && (!t.far || t.read == t.acct.Last())
		if !closed || t.lost {
			continue
		}
		for _, d := range []*direction{&t.out, &t.in} {
			if d.mine.n > d.theirs.n {
				return &cause{kind: ErrClosed, by: m.c.ranks[r] + 1, text: m.c.closedUnmet(r, n, m.text(r, t, d, d.theirs.n+1))}
			}
		}
	}
	return nil
}

// read takes in what a peer has written, and compares.
func (m *messages) read(r int, t *traffic) error {
	last := t.acct.Last()
	if t.far {
		if last = m.fetched(r, t, last); last == t.read {
			return nil
		}
	}
	// Records are lost where the peer is ahead by more than its ledger keeps, or has given up its account, so that another one has the place.
	if last > 0 {
		_, ok := t.acct.At(last)
		t.lost = t.lost || !ok
	}
	for seq := t.read + 1; seq <= last; seq++ {
		rec, ok := t.acct.At(seq)
		if !ok {
			t.lost = true
			continue
		}
		op, peer, low, v := unpackMessage(rec.Desc)
		if peer != m.c.rank || !op.p2p() {
			continue
		}
		d := &t.out
		if op == OpSend {
			d = &t.in
		}
		d.theirs.put(d.theirs.n+(low-d.theirs.n)&messageNumberMask, v)
	}
	t.read = last
	if m.c.check == Trust {
		return nil
	}
	if err := m.compare(r, t, &t.out); err != nil {
		return err
	}
	return m.compare(r, t, &t.in)
}

func (m *messages) compare(r int, t *traffic, d *direction) error {
	to := min(d.mine.n, d.theirs.n)
	for n := max(d.compared+1, to-min(to, keptMessages-1)); n <= to; n++ {
		a, mine := d.mine.at(n)
		b, theirs := d.theirs.at(n)
		switch {
		case !mine || !theirs:
			continue
		case a == b:
			d.compared = n
			continue
		}
		from, to, send, recv := m.c.rank, r, a, b
		if d == &t.in {
			from, to, send, recv = r, m.c.rank, b, a
		}
		if send.typ == recv.typ && send.count == recv.count {
			return causef(ErrMismatch, "the messages from rank %d to rank %d differ in count or type somewhere before message #%d, longer ago than the ledgers go back", from, to, n)
		}
		return causef(ErrMismatch, "message #%d: rank %d: %v; rank %d: %v", n, from, Call{Op: OpSend, Type: send.typ, Count: send.count, Root: int32(to)},
			to, Call{Op: OpRecv, Type: recv.typ, Count: recv.count, Root: int32(from)})
	}
	return nil
}

// fetched is up to where a far peer's records are there to be read, of those up to last; what is not there is asked for.
func (m *messages) fetched(r int, t *traffic, last uint64) uint64 {
	if last <= t.read {
		return t.read
	}
	if t.fetch == 0 {
		t.fetch = last
	}
	if !m.far.Detail(m.c.ranks[r], t.read+1, t.fetch) {
		return t.read
	}
	last, t.fetch = t.fetch, 0
	return last
}

// ask asks for the messages of members on other hosts, for a wait or, seldom, without one. It reports whether there are messages whose other end there is not known.
func (m *messages) ask(waits bool) (open bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.far == nil {
		return false
	}
	for _, t := range m.with {
		if t == nil || !t.far {
			continue
		}
		for _, d := range [...]*direction{&t.out, &t.in} {
			open = open || d.mine.n > d.theirs.n && !t.lost
		}
	}
	switch {
	case waits:
		m.far.Ask(m.acct.Last())
	case open:
		m.far.Look(m.acct.Last())
	}
	return open
}

// close declares, for members on other hosts, that the communicator was closed after record n.
func (m *messages) close(n uint64) {
	if m.acct != nil {
		m.acct.SetClosed(n)
	}
}

// text tells a message of this rank: "message #3, send of 8 float32, to rank 1".
func (m *messages) text(r int, t *traffic, d *direction, n uint64) string {
	call := Call{Op: d.op(t), Root: int32(r)}
	v, ok := d.mine.at(n)
	if !ok {
		return fmt.Sprintf("message #%d, a %v with rank %d", n, call.Op, r)
	}
	call.Type, call.Count = v.typ, v.count
	return fmt.Sprintf("message #%d, %v", n, call)
}

// first is the first message that has no other end yet, and with whom it is; "" without one.
func (m *messages) first() (text string, op Op, peer int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for r, t := range m.with {
		if t == nil || t.lost {
			continue
		}
		for _, d := range []*direction{&t.out, &t.in} {
			if d.mine.n > d.theirs.n {
				return m.text(r, t, d, d.theirs.n+1), d.op(t), r
			}
		}
	}
	return "", 0, 0
}

// op is what this rank's messages of a direction are.
func (d *direction) op(t *traffic) Op {
	if d == &t.in {
		return OpRecv
	}
	return OpSend
}

// waiting names the first message of each pair that has no other end yet, "" without one.
func (m *messages) waiting() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	text := ""
	for r, t := range m.with {
		if t == nil || t.acct == nil {
			continue
		}
		m.read(r, t) // what it finds is told by the next look
		if t.lost || !t.acct.Known() {
			continue
		}
		for _, d := range []*direction{&t.out, &t.in} {
			if d.mine.n > d.theirs.n {
				text += fmt.Sprintf(", %s for %s (%s)", m.c.named(r), m.text(r, t, d, d.theirs.n+1), m.c.whereaboutsOf(d.op(t), r))
			}
		}
	}
	if text == "" {
		return ""
	}
	return "waits for " + text[len(", "):]
}
