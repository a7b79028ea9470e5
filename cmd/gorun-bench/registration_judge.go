package main

import (
	"fmt"
	"slices"

	"github.com/gorun-dev/gorun/nccl"
)

// stage is when something was seen, in order.
type stage uint8

const (
	atCall stage = iota
	atGraphClose
	atClose // of what the program had registered or had as a window
	atOperations
	atDrain
	atFinalize
	notReleased
)

// span is a buffer, and the allocation that it lies in.
type span struct{ addr, size, base, baseSize uint64 }

func (s span) holds(addr uint64) bool { return addr >= s.addr && addr-s.addr < s.size }

func (s span) inAllocation(addr uint64) bool { return addr >= s.base && addr-s.base < s.baseSize }

// seen is an event of the log with its stage.
type seen struct {
	logEvent
	at stage
}

// counters are the communicator's, at one time.
type counters struct {
	direct, staged uint64
	held           int // registrations and mappings of peers' memory
}

// trial is one case of the check on one rank: what was asked for, and what was seen.
type trial struct {
	memory string // "nccl.Alloc"
	call   string // "all-gather, captured"
	mode   nccl.Mode
	reason string // why this mode, or why not another
	sends  span
	recvs  span

	// On a library, by its log.
	version version
	events  []seen
	windows bool // rank 0's log tells a call in windows
	small   bool // so small a call that the library registers nothing for it: only windows are

	// On the host platform, by the communicator's counters.
	host          bool
	before, after counters // the calls
	released      stage

	closing    string // how the program gives the registration back: "Registration.Close"
	operations int    // until the registrations were gone
	err        error  // gorun refused the registration
}

// row is what the check tells about one buffer on one rank.
type row struct {
	Memory     string `json:"memory"` // private, nccl.Alloc, arena, window
	Call       string `json:"call"`   // "all-gather, captured"
	Buffer     string `json:"buffer"` // send, recv
	Rank       int    `json:"rank"`
	Mode       string `json:"mode"`       // that the runtime has chosen: plain, local, graph, window; "" without a call
	Registered string `json:"registered"` // "graph IPC", "local IPC", "window", "noted", "none", "refused", "unknown"
	Released   string `json:"released,omitempty"`
	Reason     string `json:"reason,omitempty"`
	Line       string `json:"line,omitempty"` // the library's own
	Problem    string `json:"problem,omitempty"`
}

// The values of row.Registered besides "graph IPC" and the like.
const (
	regNone    = "none"
	regNoted   = "noted" // in the library's list, and not used by this call
	regRefused = "refused"
	regWindow  = "window"
	regUnknown = "unknown"
)

// judge makes the rows of a trial.
func (t *trial) judge(rank int) []row {
	rows := []row{{Buffer: "send"}, {Buffer: "recv"}}
	for i := range rows {
		r := &rows[i]
		r.Memory, r.Call, r.Rank, r.Reason = t.memory, t.call, rank, t.reason
		if t.mode != 0 {
			r.Mode = t.mode.String()
		}
		switch {
		case t.err != nil:
			r.Registered, r.Reason = regRefused, t.err.Error()
		case t.host:
			t.judgeHost(r)
		default:
			t.judgeLibrary(r, []span{t.sends, t.recvs}[i])
		}
	}
	if t.err == nil && !t.host {
		t.expect(rows)
	}
	return rows
}

// judgeHost goes by what was moved: straight between the ranks' buffers, or through staging copies.
func (t *trial) judgeHost(r *row) {
	direct, staged := t.after.direct-t.before.direct, t.after.staged-t.before.staged
	straight := direct > 0 && staged == 0
	switch {
	case t.mode == nccl.Plain && straight:
		r.Registered = t.mode.String()
		r.Problem = "data went straight between buffers that were not to be registered"
		return
	case t.mode == nccl.Plain:
		r.Registered = regNone
		return
	case !straight:
		r.Registered = regNone
		r.Problem = fmt.Sprintf("expected %v: of %d bytes %d went through staging copies", t.mode, direct+staged, staged)
	case t.mode == nccl.Window:
		r.Registered = regWindow
	default:
		r.Registered = t.mode.String() + ", shared memory"
	}
	r.Released = t.stageText(t.released)
	if t.released == notReleased && r.Problem == "" {
		r.Problem = "the registration was not given back"
	}
}

// judgeLibrary goes by what the library's log says about the buffer.
func (t *trial) judgeLibrary(r *row, s span) {
	r.Registered = regNone
	unknown, kept := "", ""
	for _, e := range t.events {
		about := s.holds(e.Addr[0]) || s.holds(e.Addr[1])
		switch {
		case (e.Kind == registered || e.Kind == reused) && about:
			r.Registered, r.Line = t.mode.String()+", "+e.Way, e.Text
			r.Released = t.stageText(t.releasedAt(s))
		case e.Kind == refused && about && !r.really():
			r.Registered, r.Line = regRefused, e.Text
		case e.Kind == noted && r.Registered == regNone && e.Addr[0] <= s.addr && s.addr-e.Addr[0] < e.Size:
			r.Registered = regNoted
		case e.Kind == unknownForm:
			unknown = e.Text
		case e.Kind == notGivenBack:
			kept = e.Text
		}
	}
	switch {
	case r.Released == t.stageText(notReleased) && kept != "":
		r.Line = kept
	case t.mode == nccl.Window && t.windows:
		r.Registered = regWindow
		r.Released = t.closing // the log tells nothing of it; the window's Close did not fail
	case unknown != "" && !r.really():
		r.Registered, r.Line = regUnknown, unknown
	}
}

// really reports whether the buffer is registered, and not just in a list.
func (r *row) really() bool {
	return !slices.Contains([]string{regNone, regNoted, regRefused, regUnknown}, r.Registered)
}

// expect compares what the runtime expected of the call with what the log shows.
func (t *trial) expect(rows []row) {
	some := rows[0].really() || rows[1].really()
	for i := range rows {
		r := &rows[i]
		switch {
		case r.Released == t.stageText(notReleased):
			r.Problem = "the library has not given the registration back"
		case r.Registered == regUnknown:
			r.Problem = fmt.Sprintf("the line is not known for NCCL %v", t.version)
		case t.mode == nccl.Plain && r.really():
			r.Problem = "the library registered memory that was not to be registered"
		case t.small && t.mode != nccl.Window:
			r.Reason += "; the library registers nothing for a call so small"
		case t.mode != nccl.Plain && !some:
			r.Problem = fmt.Sprintf("expected %v, and the log shows no registration", t.mode)
		case t.mode != nccl.Plain && !r.really():
			// The algorithms write to the peer's memory, or read from it: one end is enough.
			r.Reason = "the call needs one end only"
		}
	}
}

// releasedAt is when the last registration of a buffer was given back.
func (t *trial) releasedAt(s span) stage {
	type key struct {
		way    string
		peer   int
		handle uint64
	}
	open := map[key]int{}
	var multicast []uint64
	// The end of a multicast registration is told by the address that it had, of which the buffer's is a part.
	ends := func(e seen) bool {
		if e.Way != wayNVLS {
			return e.Handle != 0 || s.inAllocation(e.Addr[0])
		}
		return slices.ContainsFunc(multicast, func(mc uint64) bool { return e.Addr[0] <= mc && mc-e.Addr[0] < s.baseSize })
	}
	at := notReleased
	for _, e := range t.events {
		k := key{e.Way, e.Peer, e.Handle}
		switch {
		case e.Kind == registered && (s.holds(e.Addr[0]) || s.holds(e.Addr[1])):
			open[k]++
			for i, addr := range e.Addr {
				if s.holds(addr) {
					multicast = append(multicast, e.MC[i])
				}
			}
		case e.Kind == deregistered && open[k] > 0 && ends(e):
			if open[k]--; open[k] == 0 {
				delete(open, k)
			}
			at = e.at
		}
	}
	if len(open) > 0 {
		return notReleased
	}
	return at
}

// tellsWindow reports whether this rank's log tells a call in windows.
func (t *trial) tellsWindow() bool {
	return slices.ContainsFunc(t.events, func(e seen) bool { return e.Kind == inWindow })
}

// pending reports whether a buffer has a registration that was not given back.
func (t *trial) pending() bool {
	if t.host {
		return t.released == notReleased
	}
	for _, s := range []span{t.sends, t.recvs} {
		had := slices.ContainsFunc(t.events, func(e seen) bool {
			return e.Kind == registered && (s.holds(e.Addr[0]) || s.holds(e.Addr[1]))
		})
		if had && t.releasedAt(s) == notReleased {
			return true
		}
	}
	return false
}

func (t *trial) stageText(s stage) string {
	switch s {
	case atGraphClose:
		return "graph closed"
	case atClose:
		return t.closing
	case atOperations:
		if t.operations == 1 {
			return "after 1 operation"
		}
		return fmt.Sprintf("after %d operations", t.operations)
	case atDrain:
		return "Comm.Drain"
	case atFinalize:
		return "at finalize"
	case notReleased:
		return "NOT RELEASED"
	}
	return ""
}
