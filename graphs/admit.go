package graphs

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// Admit decides about one call of fn, or one Group: the members compare it, choose its mode and register its buffers. The library records it
// only if that went well on all.
func (cp *capture) Admit(c *nccl.Comm, group []nccl.Call) (nccl.Mode, error) {
	cp.mu.Lock()
	defer cp.mu.Unlock()
	m := cp.membership(c)
	switch {
	case m == nil || cp.over:
		return 0, fmt.Errorf("%v is over: its communicators must not be used by what its function left behind", cp)
	case cp.err != nil:
		return 0, cp.err
	case cp.ctx.Err() != nil:
		cp.cancelled()
		return 0, cp.err
	}
	m.calls++
	a := &admission{cp: cp, m: m, place: callerPlace(), fresh: map[*cuda.Memory]bool{}}
	mode, err := a.admit(group)
	if err != nil {
		// What the call has registered goes with the rest when the capture is given up.
		cp.fail(fateFailed, err)
		return 0, cp.err
	}
	return mode, nil
}

func (cp *capture) membership(c *nccl.Comm) *membership {
	for _, m := range cp.members {
		if m.c == c {
			return m
		}
	}
	return nil
}

// meetFailed notes a meeting that did not take place, which is so for all its members: they waited in a circle, or one of them gave
// up, did something else, or ended. what is how this rank's wait was called.
func (cp *capture) meetFailed(m *membership, err error, what string) error {
	m.settled = true
	where := cp.where(m)
	if cycle, ok := errors.AsType[*bootstrap.CycleError](err); ok {
		var b strings.Builder
		b.WriteString("the ranks wait for each other")
		for _, w := range cycle.Waits {
			fmt.Fprintf(&b, "; rank %d is in %s", w.Rank, w.What)
			if cp.err == nil && endedBadly(w.What, m.c.Name()) {
				m.c.Job().Suspect(w.Rank)
			}
		}
		cp.fail(fateFailed, &MismatchError{Where: where, Text: b.String(), Err: nccl.ErrMismatch})
		return cp.err
	}
	if wait, ok := errors.AsType[*bootstrap.WaitError](err); ok && cp.ctx.Err() != nil {
		cp.fail(fateCancelled, &meetError{where, &bootstrap.WaitError{Op: "meet the others", Missing: wait.Missing, Hosts: wait.Hosts, Seen: wait.Seen, Err: context.Cause(cp.ctx)}, what})
		return cp.err
	}
	if gone, ok := errors.AsType[*bootstrap.GaveUpError](err); ok {
		cp.fail(fateFailed, &MismatchError{Where: where, Text: gone.Text, Err: ErrPeer})
		return cp.err
	}
	cp.fail(fateFailed, &meetError{where, err, what})
	return cp.err
}

// meetError is a meeting that did not take place, without the repetitions of the layers below.
type meetError struct {
	where string
	err   error
	what  string
}

func (e *meetError) Error() string {
	text := e.err
	if ne, ok := errors.AsType[*nccl.Error](e.err); ok {
		text = ne.Err
	}
	return e.where + ": " + strings.ReplaceAll(text.Error(), e.what+": ", "")
}

func (e *meetError) Unwrap() error { return e.err }

// admission is one call on its way through the gate.
type admission struct {
	cp    *capture
	m     *membership
	place string
	fresh map[*cuda.Memory]bool // registered by this call, until its mode is known to need it
}

func (a *admission) admit(group []nccl.Call) (nccl.Mode, error) {
	var collectives, transfers []nccl.Call
	for _, call := range group {
		if call.Stream != nil && call.Stream.Capture() != a.cp.cap {
			return 0, a.error(fmt.Errorf("%v is on a stream that is not part of this capture", call))
		}
		if call.Op == nccl.OpSend || call.Op == nccl.OpRecv {
			transfers = append(transfers, call)
		} else {
			collectives = append(collectives, call)
		}
	}
	// While the graph lives its memory must not be freed.
	for _, call := range group {
		for _, r := range [2]cuda.Range{call.Send, call.Recv} {
			if err := a.cp.st.hold(r.Mem); err != nil {
				return 0, a.error(err)
			}
		}
	}
	mode := nccl.Mode(0)
	if len(collectives) > 0 {
		w, err := a.collectives(collectives)
		if err != nil {
			return 0, err
		}
		mode = w.mode
	}
	if len(transfers) > 0 {
		w, err := a.transfers(transfers)
		if err != nil {
			return 0, err
		}
		if mode == 0 {
			mode = w.mode
		}
	}
	return mode, nil
}

// error tells where an error of this rank alone happened.
func (a *admission) error(err error) error {
	return fmt.Errorf("%s (%s): %w", a.cp.where(a.m), a.place, err)
}

// differ is the error of all members about this call.
func (a *admission) differ(d *difference) error {
	return &MismatchError{Where: a.cp.where(a.m), Text: d.text, Err: d.err}
}

func (a *admission) what(calls []nccl.Call) string {
	return fmt.Sprintf("%s: %s (%s)", a.cp.where(a.m), callsText(calls), a.place)
}

// collectives meets all members about the collectives of a call.
func (a *admission) collectives(calls []nccl.Call) (choice, error) {
	cp, m := a.cp, a.m
	layout, err := m.c.Layout(calls)
	if err != nil {
		return choice{}, a.error(err)
	}
	mine, err := nccl.DecodeLayout(layout)
	if err != nil {
		return choice{}, a.error(err)
	}
	// Registered before the others are met: who has met can rely on everyone's memory being there to be mapped.
	peer := cp.opts.require == 0 && m.c.ByPeer(calls)
	for i, call := range calls {
		if m.c.Staged() != "" || peer {
			break
		}
		if err := a.register(call, mine[i]); err != nil {
			return choice{}, a.error(err)
		}
	}
	msg := &message{kind: kindCall, calls: m.calls, require: cp.opts.require, place: a.place, text: callsText(calls), desc: nccl.Describe(calls), layout: layout,
		never: cp.opts.never, idle: m.c.IdleWindows(cp.opts.require == nccl.Window)}
	what := a.what(calls)
	msgs, err := cp.meet(cp.ctx, m, msg, what)
	if errors.Is(err, errTooLarge) {
		return choice{}, a.error(err)
	}
	if err != nil {
		return choice{}, cp.meetFailed(m, err, what)
	}
	choices, d, err := agree(msgs, calls, m.c.Staged())
	if err != nil {
		return choice{}, cp.meetFailed(m, err, what)
	}
	if d != nil {
		m.settled = true
		return choice{}, a.differ(d)
	}
	m.hash = addHash(m.hash, msg.desc)
	layouts, idle := make([][]byte, len(msgs)), make([][]byte, len(msgs))
	for r, other := range msgs {
		layouts[r], idle[r] = other.layout, other.idle
	}
	if err := m.c.DropWindows(idle); err != nil {
		return choice{}, a.error(err)
	}
	if peer { // on all members: they have the same calls, and demand the same
		by := choice{nccl.Peer, "small: through memory that the ranks share"}
		for _, call := range calls {
			cp.st.addCall(m.c, call, a.place, by)
		}
		return by, nil
	}

	w := weakest(choices)
	if w.mode == nccl.Window {
		if err := a.windows(calls, layouts, choices, neverOf(msgs)); err != nil {
			return choice{}, err
		}
		w = weakest(choices)
	}
	if w.mode == nccl.Plain {
		a.unregister()
	} else {
		m.mapping = append(m.mapping, mapping{a.place, calls, layouts})
	}
	clear(a.fresh)
	for i, call := range calls {
		if c := choices[i]; c.mode != w.mode {
			choices[i] = choice{w.mode, c.reason + "; but one call with others: " + w.reason}
		}
		cp.st.addCall(m.c, call, a.place, choices[i])
	}
	return w, nil
}

// windows finds, or makes with all members, the windows of a call. Where there are none it is registered only, on all members alike. never says why none are made unasked,
// "" where they are.
func (a *admission) windows(calls []nccl.Call, layouts [][]byte, choices []choice, never string) error {
	cp, m := a.cp, a.m
	wish := nccl.WindowAuto
	switch {
	case cp.opts.require == nccl.Window:
		wish = nccl.WindowDemanded
	case never != "":
		wish = nccl.WindowNever
	}
	mode, why, release, err := m.c.PrepareWindow(cp.ctx, calls, layouts, wish)
	cp.st.windows = append(cp.st.windows, release)
	if err != nil {
		return a.error(err)
	}
	if !reaches(mode, cp.opts.require) {
		m.settled = true
		return a.differ(&difference{fmt.Sprintf("mode %s is required, but there is no window: %s", cp.opts.require, why), ErrMode})
	}
	switch {
	case mode != nccl.Window:
		why = "no window: " + why
		if wish == nccl.WindowNever {
			why += "; and makes none: " + never
		}
	case why != "":
		why = "window: " + why
	}
	for i, c := range choices {
		choices[i].mode = mode
		if why != "" {
			choices[i].reason = c.reason + "; " + why
		}
	}
	return nil
}

// neverOf says which member makes no windows unasked, and why; "" where all do.
func neverOf(msgs []*message) string {
	for r, m := range msgs {
		if m.never != "" {
			return fmt.Sprintf("%s on rank %d", m.never, r)
		}
	}
	return ""
}

// agree compares what all members brought and chooses the mode of each call. All members come to the same.
func agree(msgs []*message, calls []nccl.Call, staged string) ([]choice, *difference, error) {
	n := len(calls)
	if d := compareCalls(msgs); d != nil {
		return nil, d, nil
	}
	layouts := make([][][]nccl.LayoutInfo, len(msgs))
	for r, m := range msgs {
		l, err := nccl.DecodeLayout(m.layout)
		if err == nil && len(l) != n {
			err = fmt.Errorf("layout of %d calls, want %d", len(l), n)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("rank %d: %w", r, err)
		}
		layouts[r] = l
	}
	choices := make([]choice, n)
	bufs := make([][]nccl.LayoutInfo, len(msgs))
	for i := range choices {
		for r := range layouts {
			bufs[r] = layouts[r][i]
		}
		c, d := chooseMode(calls[i], bufs, msgs[0].require, staged)
		if d != nil {
			if n > 1 {
				d.text = fmt.Sprintf("collective %d of the group: %s", i+1, d.text)
			}
			return nil, d, nil
		}
		choices[i] = c
	}
	return choices, nil, nil
}

// register makes the graph's registrations of a call's buffers, if all of them can have one.
func (a *admission) register(call nccl.Call, bufs []nccl.LayoutInfo) error {
	for _, l := range bufs {
		if l.Kind != cuda.Shareable {
			return nil
		}
	}
	for _, r := range [2]cuda.Range{call.Send, call.Recv} {
		if r.Mem == nil || r.Len == 0 {
			continue
		}
		fresh, err := a.cp.st.register(a.m.c, r.Mem)
		if err != nil {
			return err
		}
		if fresh {
			a.fresh[r.Mem] = true
		}
	}
	return nil
}

// unregister takes back what this call alone registered.
func (a *admission) unregister() {
	for mem := range a.fresh {
		a.cp.st.unregister(a.m.c, mem)
	}
}

// open is a transfer that has not met its other end yet.
type open struct {
	call nccl.Call
	info nccl.LayoutInfo // the buffer; zero without data
	t    transfer
}

// transfers meets, for the Sends and Recvs of a call, each peer that they name, the pairs in one order on all ranks. Two members meet as often as
// it takes until all transfers of this call have met their other end: the peer may do in two calls what is one Group here.
func (a *admission) transfers(calls []nccl.Call) (choice, error) {
	cp, m := a.cp, a.m
	me := m.c.Rank()
	sends, recvs := map[int][]open{}, map[int][]open{}
	for _, call := range calls {
		layout, err := m.c.Layout([]nccl.Call{call})
		if err != nil {
			return choice{}, a.error(err)
		}
		bufs, err := nccl.DecodeLayout(layout)
		if err != nil {
			return choice{}, a.error(err)
		}
		if a.staged(int(call.Root)) == "" {
			if err := a.register(call, bufs[0]); err != nil {
				return choice{}, a.error(err)
			}
		}
		o := open{call: call, t: transfer{typ: call.Type, count: call.Count, place: a.place, layout: layout}}
		if len(bufs[0]) > 0 {
			o.info = bufs[0][0]
		}
		list := sends
		if call.Op == nccl.OpRecv {
			list = recvs
		}
		list[int(call.Root)] = append(list[int(call.Root)], o)
	}
	var choices []choice
	keep := map[*cuda.Memory]bool{}
	// Lower pairs first: (0,1) before (0,2) before (1,2), seen from any rank. A rank meets itself without a message.
	for _, peer := range pairOrder(me, m.c.Size()) {
		s, r := sends[peer], recvs[peer]
		for len(s)+len(r) > 0 {
			mine := &message{kind: kindPair, calls: m.calls, require: cp.opts.require, place: a.place, sends: transfersOf(s), recvs: transfersOf(r)}
			theirs := mine
			if peer != me {
				var err error
				if theirs, err = a.meetPair(peer, mine, calls); err != nil {
					return choice{}, err
				}
			}
			sent, received, d := comparePair(me, mine, peer, theirs)
			if d != nil {
				return choice{}, a.differ(d)
			}
			for i, o := range s[:sent] {
				c, err := a.transfer(o, me, peer, theirs.recvs[i], keep)
				if err != nil {
					return choice{}, err
				}
				choices = append(choices, c)
			}
			for i, o := range r[:received] {
				c, err := a.transfer(o, me, peer, theirs.sends[i], keep)
				if err != nil {
					return choice{}, err
				}
				choices = append(choices, c)
			}
			s, r = s[sent:], r[received:]
		}
	}
	for mem := range a.fresh {
		if !keep[mem] {
			cp.st.unregister(m.c, mem)
		}
	}
	return weakest(choices), nil
}

// meetPair exchanges what two members have open between them.
func (a *admission) meetPair(peer int, mine *message, calls []nccl.Call) (*message, error) {
	b := mine.encode()
	if len(b) > maxMessage {
		return nil, a.error(errTooLarge)
	}
	what := a.what(calls)
	all, err := gather(b, func(b []byte) ([][]byte, error) {
		theirs, err := a.m.c.MeetPair(a.cp.ctx, peer, b, what)
		return [][]byte{theirs}, err
	})
	var theirs *message
	if err == nil {
		if theirs, err = decodeMessage(all[0]); err != nil {
			err = fmt.Errorf("rank %d: %w", peer, err)
		}
	}
	if err != nil {
		// Only the two know: the others learn it at the end.
		settled := a.m.settled
		err = a.cp.meetFailed(a.m, err, what)
		a.m.settled = settled
		return nil, err
	}
	return theirs, nil
}

// transfer takes one transfer that has met its other end.
func (a *admission) transfer(o open, me, peer int, other transfer, keep map[*cuda.Memory]bool) (choice, error) {
	c := choice{nccl.Plain, "no data"}
	if o.t.count > 0 {
		bufs, err := nccl.DecodeLayout(other.layout)
		if err == nil && (len(bufs) != 1 || len(bufs[0]) != 1) {
			err = errMessage
		}
		if err != nil {
			return choice{}, a.error(fmt.Errorf("rank %d: %w", peer, err))
		}
		var d *difference
		if o.call.Op == nccl.OpSend {
			c, d = choosePair(me, o.info, peer, bufs[0][0], a.cp.opts.require, a.staged(peer))
		} else {
			c, d = choosePair(peer, bufs[0][0], me, o.info, a.cp.opts.require, a.staged(peer))
		}
		if d == nil && peer != me && o.info.Kind != bufs[0][0].Kind && a.m.c.RegistersByKind() {
			d = loneKind(o, me, peer)
		}
		if d != nil {
			return choice{}, a.differ(d)
		}
	}
	if c.mode != nccl.Plain {
		keep[mem(o.call)] = true
		layouts := make([][]byte, a.m.c.Size())
		layouts[me], layouts[peer] = o.t.layout, other.layout
		a.m.mapping = append(a.m.mapping, mapping{a.place, []nccl.Call{o.call}, layouts})
	}
	a.cp.st.addCall(a.m.c, o.call, a.place, c)
	return c, nil
}

// staged is why a message from or to a peer cannot reach memory directly, "" where it can.
func (a *admission) staged(peer int) string {
	c := a.m.c
	if why := c.Staged(); why != "" && c.Job().NodeOf(c.JobRank(peer)) != c.Job().Node() {
		return why
	}
	return ""
}

// loneKind is the error of both ends of a message of which only one is in memory that can be registered. The text is the same on both.
func loneKind(o open, me, peer int) *difference {
	from, to := me, peer
	if o.call.Op == nccl.OpRecv {
		from, to = peer, me
	}
	private, shareable := "the send", "the recv"
	if (o.info.Kind == cuda.Shareable) == (o.call.Op == nccl.OpSend) {
		private, shareable = shareable, private
	}
	return &difference{fmt.Sprintf("message from rank %d to rank %d: %s buffer is private memory, %s buffer can be registered: the library would register one end only and lose the message; use nccl.Alloc for both or for neither",
		from, to, private, shareable), nccl.ErrMixed}
}

func mem(c nccl.Call) *cuda.Memory {
	if c.Op == nccl.OpSend {
		return c.Send.Mem
	}
	return c.Recv.Mem
}

// pairOrder lists the ranks of a communicator in the order in which rank me meets them, itself first.
func pairOrder(me, size int) []int {
	peers := make([]int, 1, size)
	peers[0] = me
	for r := range size {
		if r != me {
			peers = append(peers, r)
		}
	}
	return peers
}

func transfersOf(list []open) []transfer {
	ts := make([]transfer, len(list))
	for i, o := range list {
		ts[i] = o.t
	}
	return ts
}

// callsText is "all-reduce of 8 float32, sum, then 2 more".
func callsText(calls []nccl.Call) string {
	switch len(calls) {
	case 0:
		return "nothing"
	case 1:
		return calls[0].String()
	}
	return fmt.Sprintf("group of %d calls, the first %v", len(calls), calls[0])
}

// addHash mixes a description into a hash (FNV-1a).
func addHash(h uint64, b []byte) uint64 {
	if h == 0 {
		h = 14695981039346656037
	}
	for _, x := range b {
		h = (h ^ uint64(x)) * 1099511628211
	}
	return h
}

// graphKey is the same number on all members for the same graph on a communicator, and another one for each graph.
func graphKey(hash, ordinal uint64) uint64 {
	for range 8 {
		hash = addHash(hash, []byte{byte(ordinal)})
		ordinal >>= 8
	}
	return hash
}
