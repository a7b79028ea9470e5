package nccl

import (
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// p2pTask are the Sends and Recvs of one group: they go on together. Each message is described by both ends in the pair's lines and compared
// by both before it moves: straight from the sender's buffer where both ends are registered, else in chunks. Messages of one pair and
// direction keep their order.
type p2pTask struct {
	h      *host
	ticket uint64 // 0: captured
	ops    []message
	heads  []int32 // of this run: the first message that is not done, of each peer and direction
	begun  bool
	mapped bool
	over   bool
	wait   waiting
	told   time.Duration // how long the wait was when the ledger was told of it
}

type message struct {
	call   Call
	flags  uint64      // sendReg on either end, capturedCall
	reg    *registered // eager
	n      uint64      // its number among those of the pair and direction
	after  int32       // which of ops comes after it there, -1 for none
	state  messageState
	pos    int // bytes moved
	direct bool
}

type messageState uint8

const (
	messageTurn   messageState = iota // waits for the earlier messages of the pair
	messagePosted                     // waits for the other end
	messageMoves
	messageEnds // waits until the other end has finished with it
	messageDone
)

func (h *host) newP2P(calls []Call, mode Mode) *p2pTask {
	var t *p2pTask
	if mode == 0 {
		t = h.p2ps.get()
	} else { // it stays with its graph
		t = new(p2pTask)
	}
	*t = p2pTask{h: h, ops: t.ops[:0], heads: t.heads[:0]}
	if mode == 0 {
		t.ticket = h.ticket()
		h.pending.Add(1)
	}
	for i := range calls {
		m := message{call: calls[i]}
		mem := m.mem()
		if mode != 0 {
			m.flags |= capturedCall
			if h.c.isRegistered(mem) && h.c.near(int(m.call.Root)) {
				m.flags |= sendReg
			}
		} else if m.reg = h.c.userRegistered(mem); m.reg != nil {
			m.reg.enter(m.call.Op, 0)
			if h.c.near(int(m.call.Root)) {
				m.flags |= sendReg
			}
		}
		t.ops = append(t.ops, m)
	}
	return t
}

func (m *message) mem() cuda.Range {
	if m.call.Op == OpSend {
		return m.call.Send
	}
	return m.call.Recv
}

// Start begins a run.
func (t *p2pTask) Start() {
	t.begun = false
	t.wait.reset()
	for i := range t.ops {
		m := &t.ops[i]
		m.state, m.pos, m.direct = messageTurn, 0, false
	}
}

// Step goes on with every message as far as the peers allow.
func (t *p2pTask) Step() (done bool, err error) {
	h := t.h
	h.mu.Lock()
	returned := false
	defer func() {
		if !returned {
			h.c.fail(causef(ErrAborted, "rank %d faulted in %s", h.rank, t.name()), true, false)
		}
		h.mu.Unlock()
	}()
	broken := h.broken()
	if broken == nil || t.begun && !h.gone {
		if done, err = t.step(); err != nil {
			err = h.c.fail(err, true, false)
		}
	}
	if !done && err == nil {
		err = broken // what the peers had done before it is no less done
	}
	if err != nil {
		err = h.c.errorf(t.name(), err)
		t.finish(false)
		done = true
	}
	returned = true
	return done, err
}

func (t *p2pTask) name() string {
	if len(t.ops) == 1 {
		return fmt.Sprintf("%v with rank %d", t.ops[0].call.Op, t.ops[0].call.Root)
	}
	return fmt.Sprintf("group of %d sends and receives", len(t.ops))
}

func (t *p2pTask) step() (bool, error) {
	h := t.h
	if !t.begun {
		if t.ticket != 0 && h.turn != t.ticket {
			return false, nil
		}
		t.begun = true
		for i := range t.ops {
			m := &t.ops[i]
			switch {
			case int(m.call.Root) == h.rank:
			case m.call.Op == OpSend:
				h.sent[m.call.Root]++
				m.n = h.sent[m.call.Root]
			default:
				h.received[m.call.Root]++
				m.n = h.received[m.call.Root]
			}
		}
		t.self()
		t.line()
		h.peers.enter()
		t.mapped = true
	}
	moved := false
	for i := 0; i < len(t.heads); {
		m := &t.ops[t.heads[i]]
		for m.state != messageDone {
			on, err := t.advance(m)
			if err != nil {
				return false, err
			}
			moved = moved || on
			if !on {
				break
			}
			if m.state == messageMoves {
				break // one piece a step
			}
		}
		switch {
		case m.state != messageDone:
			i++
		case m.after >= 0:
			t.heads[i] = m.after
		default:
			t.heads = slices.Delete(t.heads, i, i+1)
		}
	}
	if len(t.heads) > 0 {
		if moved {
			t.untell()
			t.wait.reset()
			h.c.dev.Ring()
			return false, nil
		}
		return false, t.late()
	}
	for i := range t.ops {
		r := t.ops[i].mem()
		h.c.calls.Add(1)
		if t.ops[i].direct {
			h.c.direct.Add(r.Len)
		} else {
			h.c.staged.Add(r.Len)
		}
	}
	if t.ticket != 0 {
		h.turn++
	}
	t.finish(true)
	h.c.dev.Ring()
	return true, nil
}

// self does the messages of this rank to itself: the nth send meets the nth recv. They were checked when they were enqueued.
func (t *p2pTask) self() {
	h := t.h
	j := 0
	for i := range t.ops {
		m := &t.ops[i]
		if int(m.call.Root) != h.rank || m.call.Op != OpSend {
			continue
		}
		for ; int(t.ops[j].call.Root) != h.rank || t.ops[j].call.Op != OpRecv; j++ {
		}
		to := &t.ops[j]
		j++
		if m.call.Send.Mem != nil {
			copy(to.call.Recv.Bytes(), m.call.Send.Bytes())
		}
		m.state, to.state = messageDone, messageDone
		m.direct, to.direct = true, true // one copy between the user's buffers
	}
}

// line puts the messages of each peer and direction into a line: only the first can go on, and a group may have very many.
func (t *p2pTask) line() {
	h := t.h
	t.heads = t.heads[:0]
	place := func(m *message) *int32 { return &h.tails[2*int(m.call.Root)+int(m.call.Op-OpSend)] }
	for i := range t.ops {
		m := &t.ops[i]
		if int(m.call.Root) == h.rank {
			continue
		}
		m.after = -1
		tail := place(m)
		if *tail >= 0 {
			t.ops[*tail].after = int32(i)
		} else {
			t.heads = append(t.heads, int32(i))
		}
		*tail = int32(i)
	}
	for i := range t.ops {
		*place(&t.ops[i]) = -1
	}
}

// advance does the next thing for a message; false where it must wait.
func (t *p2pTask) advance(m *message) (bool, error) {
	h := t.h
	p := int(m.call.Root)
	send := m.call.Op == OpSend
	from, to := p, h.rank
	if send {
		from, to = h.rank, p
	}
	sl, rl := h.seg.line(from, to, false), h.seg.line(from, to, true)
	mine, theirs := rl, sl
	if send {
		mine, theirs = sl, rl
	}
	switch m.state {
	case messageTurn:
		if send && h.given[p]+1 != m.n || !send && h.taken[p]+1 != m.n {
			return false, nil
		}
		mem := m.mem()
		w := mine.words
		w[0], w[1], w[2], w[3] = uint64(m.call.Type)|m.flags<<8, m.call.Count, 0, mem.Off
		if mem.Mem != nil {
			w[2] = mem.Mem.ID()
		}
		h.signal(p, mine.posted, m.n, unsafe.Slice((*byte)(unsafe.Pointer(w)), 8*len(w)))
		m.state = messagePosted

	case messagePosted:
		if theirs.posted.Load() < m.n {
			return false, nil
		}
		if err := t.agree(m, from, sl.words, to, rl.words); err != nil {
			return false, err
		}
		if send {
			h.signal(p, sl.agreed, m.n)
		}
		m.state = messageMoves
		if send && m.direct || m.call.Count == 0 {
			m.state = messageEnds
		}

	case messageMoves:
		on, err := t.move(m, from, to, sl, rl)
		if err != nil || !on {
			return false, err
		}
		if m.pos == int(m.mem().Len) {
			m.state = messageEnds
		}

	case messageEnds:
		if send {
			if rl.done.Load() < m.n {
				return false, nil
			}
			h.given[p] = m.n
		} else {
			// The sender reads this end's description until it has agreed.
			if sl.agreed.Load() < m.n {
				return false, nil
			}
			h.signal(p, rl.done, m.n)
			h.taken[p] = m.n
		}
		m.state = messageDone
	}
	return true, nil
}

// agree compares the two descriptions of a message.
func (t *p2pTask) agree(m *message, from int, s *[4]uint64, to int, r *[4]uint64) error {
	if byte(s[0]) != byte(r[0]) || s[1] != r[1] {
		sc := Call{Op: OpSend, Type: cuda.DType(byte(s[0])), Count: s[1], Root: int32(to)}
		rc := Call{Op: OpRecv, Type: cuda.DType(byte(r[0])), Count: r[1], Root: int32(from)}
		return causef(ErrMismatch, "message #%d: rank %d: %v; rank %d: %v", m.n, from, sc, to, rc)
	}
	sf, rf := s[0]>>8, r[0]>>8
	m.direct = sf&rf&sendReg != 0
	// A capture has decided for both ends; otherwise a mix is an error.
	if (sf^rf)&sendReg != 0 && (sf|rf)&capturedCall == 0 && m.call.Count > 0 {
		return causef(ErrMixed, "message #%d of %d %v: rank %d: %s; rank %d: %s", m.n, m.call.Count, m.call.Type,
			from, bufferText("send", true, sf&sendReg != 0, s[2], s[3]), to, bufferText("recv", true, rf&sendReg != 0, r[2], r[3]))
	}
	return nil
}

// move does one piece of a message; false where it must wait.
func (t *p2pTask) move(m *message, from, to int, sl, rl line) (bool, error) {
	h := t.h
	size := int(m.mem().Len)
	switch {
	case m.call.Op == OpSend:
		n := sl.moved.Load()
		if n-rl.moved.Load() >= 2 {
			return false, nil
		}
		chunk := h.seg.message(from, to, n)
		k := copy(chunk, m.call.Send.Bytes()[m.pos:])
		m.pos += k
		h.signal(to, sl.moved, n+1, chunk[:k])
	case m.direct:
		b, err := h.find(from, sl.words[2], m.call.Recv.Mem.ID())
		if err != nil || b == nil {
			return false, err
		}
		off := sl.words[3]
		if off > uint64(len(b)) || uint64(size) > uint64(len(b))-off {
			return false, fmt.Errorf("rank %d: %d bytes at %d of allocation %d, which has %d", from, size, off, sl.words[2], len(b))
		}
		end := min(size, m.pos+stepBytes)
		copy(m.call.Recv.Bytes()[m.pos:end], b[int(off)+m.pos:])
		m.pos = end
	default:
		n := rl.moved.Load()
		if sl.moved.Load() == n {
			return false, nil
		}
		m.pos += copy(m.call.Recv.Bytes()[m.pos:], h.seg.message(from, to, n))
		h.signal(from, rl.moved, n+1)
	}
	return true, nil
}

// late is called while peers are missing.
func (t *p2pTask) late() error {
	h := t.h
	if !t.wait.look() {
		return nil
	}
	long := t.wait.long()
	h.c.askFar(h.c.acct.Last(), long)
	t.tell(long)
	for i := range t.ops {
		m := &t.ops[i]
		p := int(m.call.Root)
		if m.state == messageDone || p == h.rank {
			continue
		}
		if err := h.absent(p, bootstrap.Record{}); err != nil {
			return err
		}
		n, closed := h.peerClosed(p)
		if !closed {
			continue
		}
		// It has posted all that it ever will.
		line := h.seg.line(p, h.rank, false)
		if m.call.Op == OpSend {
			line = h.seg.line(h.rank, p, true)
		}
		if line.posted.Load() < m.n {
			return &cause{kind: ErrClosed, by: h.c.ranks[p] + 1, text: h.c.closedUnmet(p, n, m.call.String())}
		}
	}
	return nil
}

// tell writes to the ledger which message has been waited for, for so long; where several are, the first.
func (t *p2pTask) tell(long time.Duration) {
	if long < t.told+longWait {
		return
	}
	t.told = long
	for i := range t.ops {
		if m := &t.ops[i]; m.state != messageDone {
			t.h.c.acct.SetMessage(m.call.String(), t.h.c.ranks[m.call.Root], m.call.Op == OpRecv, long)
			return
		}
	}
}

func (t *p2pTask) untell() {
	if t.told > 0 {
		t.told = 0
		t.h.c.acct.ClearMessage()
	}
}

// finish lets go of everything, however the run ended.
func (t *p2pTask) finish(reuse bool) {
	h := t.h
	t.untell()
	if t.mapped {
		t.mapped = false
		h.leaveMappings()
	}
	if t.ticket == 0 || t.over {
		return
	}
	t.over = true
	for i := range t.ops {
		if r := t.ops[i].reg; r != nil {
			r.leave()
		}
	}
	h.pending.Add(-1)
	if reuse {
		h.p2ps.put(t)
	}
}

// Cancel comes where the stream failed before.
func (t *p2pTask) Cancel(cause error) {
	if t.ticket != 0 {
		t.h.canceled(t.name(), cause)
	}
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	t.finish(false)
}

// Waiting says what the messages wait for.
func (t *p2pTask) Waiting() string {
	h := t.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		return t.name() + ": the communicator is closed"
	}
	if !t.begun {
		return fmt.Sprintf("%s on communicator %s: waits for the calls before it", t.name(), h.c.name)
	}
	for i := range t.ops {
		if m := &t.ops[i]; m.state != messageDone {
			return fmt.Sprintf("%v on communicator %s: waits for rank %d (%s)", m.call, h.c.name, m.call.Root, h.c.whereaboutsOf(m.call.Op, int(m.call.Root)))
		}
	}
	return t.name()
}

var (
	_ cuda.Task     = (*p2pTask)(nil)
	_ cuda.Waiter   = (*p2pTask)(nil)
	_ cuda.Canceler = (*p2pTask)(nil)
	_ cuda.Canceler = (*markTask)(nil)
)
