package graphs

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
	"github.com/gorun-dev/gorun/rankenv"
)

// What follows are functions from the members' messages, in rank order, to a decision. Every member evaluates them on the same messages,
// so all decide alike without another exchange.

// difference is a disagreement: a MismatchError that does not know its place yet.
type difference struct {
	text string
	err  error
}

// compareCalls looks at what the members brought to one meeting, where the caller brought a call or the end of its function. nil: they agree.
func compareCalls(msgs []*message) *difference {
	if d := compareEnds(msgs); d != nil {
		return d
	}
	// All are of the same kind now. Of ends only the fate matters, which has been looked at.
	if msgs[0].kind != kindCall {
		return nil
	}
	for r, m := range msgs {
		if m.require != msgs[0].require {
			return &difference{fmt.Sprintf("rank %d requires mode %s, rank 0 %s", r, modeName(m.require), modeName(msgs[0].require)), nccl.ErrMismatch}
		}
	}
	for r, m := range msgs {
		if bytes.Equal(m.desc, msgs[0].desc) {
			continue
		}
		text := nccl.ExplainDifference(0, msgs[0].desc, r, m.desc)
		if text == "" {
			text = fmt.Sprintf("rank %d: %s; rank 0: %s", r, m.text, msgs[0].text)
		}
		return &difference{text + places(msgs, 0, r) + companions(msgs, r), nccl.ErrMismatch}
	}
	return nil
}

// compareEnds finds a member whose capture failed, or that is at its end where others are in a call.
func compareEnds(msgs []*message) *difference {
	for r, m := range msgs {
		if m.kind >= kindEnd && m.fate != fateOK {
			return &difference{ended(r, m), ErrPeer}
		}
	}
	for r, m := range msgs {
		if m.kind == msgs[0].kind {
			continue
		}
		end, call := r, 0
		if m.kind == kindCall {
			end, call = 0, r
		}
		return &difference{fmt.Sprintf("%s; rank %d (%s): %s", ended(end, msgs[end]), call, msgs[call].place, msgs[call].text), nccl.ErrMismatch}
	}
	return nil
}

// ended tells how a member's function ended.
func ended(r int, m *message) string {
	calls := after(m.calls)
	switch m.fate {
	case fateFailed:
		return fmt.Sprintf("rank %d ended its capture at %s %s: %s", r, m.place, calls, m.text)
	case fatePanicked:
		return fmt.Sprintf("rank %d panicked in its capture at %s %s: %s", r, m.place, calls, m.text)
	case fateCancelled:
		return fmt.Sprintf("rank %d gave up its capture at %s %s: %s", r, m.place, calls, m.text)
	}
	return fmt.Sprintf("rank %d ended its capture at %s %s", r, m.place, calls)
}

func after(calls uint64) string {
	switch calls {
	case 0:
		return "without a call"
	case 1:
		return "after 1 call"
	}
	return fmt.Sprintf("after %d calls", calls)
}

// places says where in the program two members' calls stand.
func places(msgs []*message, a, b int) string {
	if msgs[a].place == msgs[b].place {
		return fmt.Sprintf(" (both at %s)", msgs[a].place)
	}
	return fmt.Sprintf(" (rank %d at %s, rank %d at %s)", b, msgs[b].place, a, msgs[a].place)
}

// companions says which further ranks side with which of the two that were named.
func companions(msgs []*message, r int) string {
	var like0, likeR, other []int
	for i, m := range msgs {
		switch {
		case i == 0 || i == r:
		case bytes.Equal(m.desc, msgs[0].desc):
			like0 = append(like0, i)
		case bytes.Equal(m.desc, msgs[r].desc):
			likeR = append(likeR, i)
		default:
			other = append(other, i)
		}
	}
	var b strings.Builder
	if len(likeR) > 0 {
		fmt.Fprintf(&b, "; %s as rank %d", ranks(likeR), r)
	}
	if len(like0) > 0 {
		fmt.Fprintf(&b, "; %s as rank 0", ranks(like0))
	}
	if len(other) > 0 {
		fmt.Fprintf(&b, "; %s otherwise", ranks(other))
	}
	return b.String()
}

func ranks(list []int) string {
	if len(list) > 8 {
		return rankenv.RankText(list[:8]) + ",..."
	}
	return rankenv.RankText(list)
}

func modeName(m nccl.Mode) string {
	if m == 0 {
		return "none"
	}
	return m.String()
}

// choice is how one call runs and why.
type choice struct {
	mode   nccl.Mode
	reason string
}

// chooseMode decides how one collective, of which all ranks have the same but for its buffers, reaches them: bufs[rank]; a rank may have none, as a
// receiver of a broadcast has nothing to send. staged is why no memory can be reached directly, "" if it can.
func chooseMode(call nccl.Call, bufs [][]nccl.LayoutInfo, require nccl.Mode, staged string) (choice, *difference) {
	if call.Count == 0 {
		return choice{nccl.Plain, "no data"}, nil // nothing to demand a mode for
	}
	user, private := true, staged
	if private == "" && call.Red.PreMultiplied() {
		private = "libraries do not use registered buffers in a pre-multiplied sum"
	}
	offsets := ""
	for _, send := range [2]bool{true, false} {
		first := -1
		var ref nccl.LayoutInfo
		for r := range bufs {
			i := slices.IndexFunc(bufs[r], func(l nccl.LayoutInfo) bool { return l.Send == send })
			if i < 0 {
				continue
			}
			l := bufs[r][i]
			l.Offset = head(call, r, bufs[r], i)
			user = user && l.Registered
			if private == "" && l.Kind != cuda.Shareable {
				private = fmt.Sprintf("the %s buffer is private memory (nccl.Alloc makes memory that can be registered)", side(l))
			}
			if first < 0 {
				first, ref = r, l
				continue
			}
			if d := mixed(first, ref, r, l); d != nil {
				return choice{}, d
			}
			if offsets == "" && l.Offset != ref.Offset {
				offsets = fmt.Sprintf("the %s buffer is at offset %d on rank %d, %d on rank %d", side(l), l.Offset, r, ref.Offset, first)
			}
		}
	}
	var c choice
	switch {
	case private != "":
		c = choice{nccl.Plain, private}
	case offsets != "":
		c = choice{registered(user), by(user) + "; no window: " + offsets}
	default:
		c = choice{nccl.Window, by(user) + ", at the same offsets on all ranks"}
	}
	if !reaches(c.mode, require) {
		why := private
		if why == "" {
			why = offsets
		}
		return choice{}, &difference{fmt.Sprintf("mode %s is required, but %s", require, why), ErrMode}
	}
	if d := panes(call, bufs, offsets); d != nil {
		return choice{}, d
	}
	return c, nil
}

// panes refuses what the library would carry out wrongly: it uses windows, where there are some, whatever the mode, and takes the members' addresses
// from its own. offsets says where those differ, "" if they do not.
func panes(call nccl.Call, bufs [][]nccl.LayoutInfo, offsets string) *difference {
	if call.Op != nccl.OpAllReduce && call.Op != nccl.OpAllGather && call.Op != nccl.OpReduceScatter {
		return nil
	}
	all := make([][2]uint64, len(bufs))
	for r := range bufs {
		if len(bufs[r]) == 2 && bufs[r][0].Window != 0 && bufs[r][1].Window != 0 {
			all[r] = [2]uint64{bufs[r][0].Window, bufs[r][1].Window}
		}
	}
	for r := range all {
		if out := [2]uint64{}; all[r] != all[0] && (all[r] == out || all[0] == out) {
			in := 0
			if all[0] == out {
				in, r = r, 0
			}
			return &difference{fmt.Sprintf("rank %d passes buffers in windows, rank %d does not", in, r), nccl.ErrMixed}
		}
		if all[r] != all[0] {
			return &difference{fmt.Sprintf("ranks 0 and %d pass buffers in different windows", r), nccl.ErrMixed}
		}
	}
	if offsets != "" && all[0] != ([2]uint64{}) {
		return &difference{offsets + ": the buffers are in windows, which the library uses at equal offsets only; take other memory for this call", nccl.ErrMixed}
	}
	return nil
}

// head is the offset that must be equal on all ranks. The small buffer of an all-gather or reduce-scatter that is in place is a
// part of the large one: that one's offset counts.
func head(call nccl.Call, r int, bufs []nccl.LayoutInfo, i int) uint64 {
	if len(bufs) == 2 && (call.Op == nccl.OpAllGather && bufs[i].Send || call.Op == nccl.OpReduceScatter && !bufs[i].Send) {
		part := uint64(r) * call.Count * uint64(call.Type.Size())
		if large := bufs[1-i]; large.ID == bufs[i].ID && large.Offset+part == bufs[i].Offset {
			return large.Offset
		}
	}
	return bufs[i].Offset
}

func registered(user bool) nccl.Mode {
	if user {
		return nccl.Local
	}
	return nccl.Graph
}

func by(user bool) string {
	if user {
		return "registered by the program"
	}
	return "registered by the capture"
}

func side(l nccl.LayoutInfo) string {
	if l.Send {
		return "send"
	}
	return "recv"
}

// level orders the modes: Graph and Local are equally good.
func level(m nccl.Mode) int {
	switch m {
	case nccl.Window:
		return 2
	case nccl.Graph, nccl.Local:
		return 1
	}
	return 0
}

func reaches(m, require nccl.Mode) bool { return level(m) >= level(require) }

// weakest is the choice for several collectives that are one call: the library takes one mode for them.
func weakest(choices []choice) choice {
	w := choices[0]
	for _, c := range choices[1:] {
		// Between equals Graph: it holds for buffers that the program registered, too.
		if level(c.mode) < level(w.mode) || level(c.mode) == level(w.mode) && c.mode == nccl.Graph {
			w = c
		}
	}
	return w
}

// mixed is a rule of registration: where one rank passes a registered buffer all do. Without it the ranks would use different
// algorithms, and wait for each other for ever.
func mixed(a int, la nccl.LayoutInfo, b int, lb nccl.LayoutInfo) *difference {
	if la.Registered == lb.Registered && la.Kind == lb.Kind {
		return nil
	}
	return &difference{fmt.Sprintf("rank %d passes %s, rank %d %s", a, buffer(la), b, buffer(lb)), nccl.ErrMixed}
}

func buffer(l nccl.LayoutInfo) string {
	what := "memory that can be registered but is not"
	switch {
	case l.Registered:
		what = "registered memory"
	case l.Kind != cuda.Shareable:
		what = "private memory"
	}
	return fmt.Sprintf("a %s buffer in %s (%s)", side(l), what, l.Memory)
}

// matchTransfers pairs what a sends to b with what b receives from a, in order, as far as both lists go. n pairs match.
func matchTransfers(a int, sends []transfer, b int, recvs []transfer) (n int, d *difference) {
	n = min(len(sends), len(recvs))
	for i := range n {
		if s, r := sends[i], recvs[i]; s.typ != r.typ || s.count != r.count {
			return i, &difference{fmt.Sprintf("rank %d sends %v to rank %d, which receives %v", a, s, b, r), nccl.ErrMismatch}
		}
	}
	return n, nil
}

// comparePair matches what two members have open between them: my sends with their recvs and the reverse. It returns how many of each
// are done. Where nothing matches, though both wait, they would wait for ever.
func comparePair(me int, mine *message, peer int, theirs *message) (sent, received int, d *difference) {
	if theirs.kind != kindPair {
		return 0, 0, &difference{ended(peer, theirs), nccl.ErrMismatch}
	}
	if mine.require != theirs.require {
		a, b := order(me, mine, peer, theirs)
		return 0, 0, &difference{fmt.Sprintf("rank %d requires mode %s, rank %d %s", b.rank, modeName(b.m.require), a.rank, modeName(a.m.require)), nccl.ErrMismatch}
	}
	// Both members look at the lower rank's sends first, so that they name the same difference.
	a, b := order(me, mine, peer, theirs)
	up, d := matchTransfers(a.rank, a.m.sends, b.rank, b.m.recvs)
	if d != nil {
		return 0, 0, d
	}
	down, d := matchTransfers(b.rank, b.m.sends, a.rank, a.m.recvs)
	if d != nil {
		return 0, 0, d
	}
	if up+down == 0 {
		return 0, 0, &difference{fmt.Sprintf("%s, %s: make them one Group", pending(a.rank, a.m, b.rank), pending(b.rank, b.m, a.rank)), nccl.ErrMismatch}
	}
	if me == a.rank {
		return up, down, nil
	}
	return down, up, nil
}

type member struct {
	rank int
	m    *message
}

func order(me int, mine *message, peer int, theirs *message) (a, b member) {
	a, b = member{me, mine}, member{peer, theirs}
	if a.rank > b.rank {
		a, b = b, a
	}
	return a, b
}

// pending tells what a member waits for another with.
func pending(r int, m *message, peer int) string {
	if len(m.sends) > 0 {
		return fmt.Sprintf("rank %d sends %v to rank %d", r, m.sends[0], peer)
	}
	return fmt.Sprintf("rank %d receives %v from rank %d", r, m.recvs[0], peer)
}

// choosePair is chooseMode for one transfer, between its two ends. There are no windows for them. That the ends are of different kinds is no mix,
// they are different buffers in any case, and neither is registered then.
func choosePair(from int, send nccl.LayoutInfo, to int, recv nccl.LayoutInfo, require nccl.Mode, staged string) (choice, *difference) {
	if send.Registered != recv.Registered {
		return choice{}, &difference{fmt.Sprintf("rank %d passes %s, rank %d %s", from, buffer(send), to, buffer(recv)), nccl.ErrMixed}
	}
	private := staged
	switch {
	case staged != "":
	case send.Kind != cuda.Shareable:
		private = fmt.Sprintf("the send buffer on rank %d is private memory (nccl.Alloc makes memory that can be registered)", from)
	case recv.Kind != cuda.Shareable:
		private = fmt.Sprintf("the recv buffer on rank %d is private memory (nccl.Alloc makes memory that can be registered)", to)
	case send.Registered:
		return choice{nccl.Local, by(true)}, nil
	default:
		return choice{nccl.Graph, by(false)}, nil
	}
	if require > nccl.Plain {
		return choice{}, &difference{fmt.Sprintf("mode %s is required, but %s", require, private), ErrMode}
	}
	return choice{nccl.Plain, private}, nil
}
