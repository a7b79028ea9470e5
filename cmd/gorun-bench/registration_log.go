package main

import (
	"fmt"
	"strconv"
	"strings"
)

// NCCL tells in its log which buffers it has registered, and how. The texts are no interface: they are known by version, and a version
// without them here is told, not guessed.

// version is NCCL's, as it counts: major*10000 + minor*100 + patch.
type version int

func parseVersion(s string) (version, error) {
	var v version
	for i, part := range strings.SplitN(s, ".", 3) {
		n, err := strconv.Atoi(part)
		if err != nil || n < 0 || n > 99 || i > 2 {
			return 0, fmt.Errorf("version %q: want MAJOR.MINOR.PATCH", s)
		}
		v = v*100 + version(n)
	}
	if strings.Count(s, ".") != 2 {
		return 0, fmt.Errorf("version %q: want MAJOR.MINOR.PATCH", s)
	}
	return v, nil
}

func (v version) String() string { return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100) }

// What the forms below were compared with: the sources of these releases, and all between.
const (
	oldestForm version = 21901
	newestForm version = 23007
)

// known reports whether the version's texts are in the table.
func (v version) known() bool { return oldestForm <= v && v <= newestForm }

// eventKind is what a line of the log tells.
type eventKind uint8

const (
	noted        eventKind = iota + 1 // a range was entered in the communicator's list; nothing is shared yet
	registered                        // really: peers, switches or the network card have it
	reused                            // a registration that was there serves a call
	refused                           // tried, and not possible
	deregistered                      // given back
	notGivenBack                      // tried to give it back, and failed
	inWindow                          // a call runs in windows; only rank 0's log tells it
	unknownForm                       // about registration, in a form that the table does not have
)

// The ways in which peers reach a registered buffer.
const (
	wayIPC   = "IPC"  // from other processes of the host, over NVLink or PCIe
	wayNVLS  = "NVLS" // through the switches' multicast
	wayNet   = "network"
	waySHARP = "SHARP"
)

// logEvent is a line of the log about registration.
type logEvent struct {
	Kind   eventKind
	Way    string
	Rank   int       // in the communicator; -1 where the line does not tell it
	Peer   int       // -1: none is told
	Addr   [2]uint64 // buffers, 0: none. Of deregistered the head of the allocation, or of its multicast address
	MC     [2]uint64 // their multicast addresses, with NVLS
	Size   uint64    // bytes, of noted
	Handle uint64    // of network and SHARP registrations
	Text   string    // what NCCL says, without host, process and device
}

// form is a text of some versions. In braces is what is read: rank, peer, size (decimal); buf, buf2, mc, mc2, handle
// (addresses); x is skipped.
// What follows the text is not looked at.
type form struct {
	from, before version
	kind         eventKind
	way          string
	text         string
}

const never version = 1 << 30

var forms = []form{
	{22300, never, noted, "", "register comm {x} buffer {buf} size {size}"},

	{22300, 22400, registered, wayIPC, "rank {rank} - IPC local register buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22300, 22400, registered, wayIPC, "rank {rank} - IPC graph register buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22300, 22400, reused, wayIPC, "rank {rank} - IPC local reuse buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22400, 22500, registered, wayIPC, "rank {rank} - IPC register buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22500, 22700, registered, wayIPC, "rank {rank} - IPC registered buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22700, 22900, registered, wayIPC, "rank {rank} - IPC register buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22900, never, registered, wayIPC, "rank {rank} - IPC register buffer {buf} size {size} (baseAddr {x} totalSize {x} numSegments {x}) to peer {peer}"},
	{22400, 22900, reused, wayIPC, "rank {rank} - IPC reuse buffer {buf} size {size} (baseAddr {x} size {x}) to peer {peer}"},
	{22900, never, reused, wayIPC, "rank {rank} - IPC reuse buffer {buf} size {size} (baseAddr {x} size {x} numSegments {x}) to peer {peer}"},
	{22400, never, refused, wayIPC, "rank {rank} failed to IPC register userbuff {buf} buffSize {size}"},
	{22300, never, deregistered, wayIPC, "rank {rank} - IPC deregistered buffer {buf} peer {peer}"},

	{21900, 22100, registered, wayNVLS, "rank {rank} successfully local-registered sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{22000, 22400, registered, wayNVLS, "rank {rank} successfully local-registered NVLS sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{21900, 22400, registered, wayNVLS, "rank {rank} successfully graph-registered sendbuff {buf}, recvbuff {buf2}, sendbuff size {x} (register size {x}, sendGran {x}), recvbuff size {x} (register size {x}, recvGran {x}), reg sendbuff {mc}, reg recvbuff {mc2}"},
	{21900, 22100, reused, wayNVLS, "rank {rank} reuse local-registered sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{22000, 22400, reused, wayNVLS, "rank {rank} reuse local-registered NVLS sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{21900, 22400, deregistered, wayNVLS, "rank {rank} - deregistered buffer {buf} on device"},
	{22400, never, registered, wayNVLS, "rank {rank} successfully registered NVLS sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{22400, never, reused, wayNVLS, "rank {rank} reuse registered NVLS sendbuff {buf}, recvbuff {buf2}, sendbuff size {x}, recvbuff size {x}, reg sendbuff {mc}, reg recvbuff {mc2}"},
	{22400, never, refused, wayNVLS, "rank {rank} failed to NVLS register sendbuff {buf} sendbuffSize {size} recvbuff {buf2}"},
	{22400, never, deregistered, wayNVLS, "rank {rank} - NVLS deregistered buffer {buf} on device"},

	{22400, never, registered, wayNet, "rank {rank} - NET register userbuff {buf} (handle {handle})"},
	{22400, never, reused, wayNet, "rank {rank} - NET reuse buffer {buf} size {size}"},
	{22400, never, refused, wayNet, "rank {rank} failed to NET register userbuff {buf} buffSize {size}"},
	{22400, never, deregistered, wayNet, "rank {rank} - deregistered net buffer handle {handle}"},

	{22100, 22400, registered, waySHARP, "rank {rank} successfully registered collNet sendbuff {buf} (handle {handle}), sendbuff size {size}, recvbuff {buf2}"},
	{22100, 22400, deregistered, waySHARP, "rank {rank} - deregistered collnet buffer handle {handle}"},
	{22400, never, registered, waySHARP, "rank {rank} - COLLNET register userbuff {buf} (handle {handle})"},
	{22400, never, reused, waySHARP, "rank {rank} - COLLNET reuse register userbuff {buf} (handle {handle})"},
	{22400, never, refused, waySHARP, "rank {rank} - COLLNET failed to register userbuff {buf}"},
	{22400, never, deregistered, waySHARP, "rank {rank} - COLLNET deregistered buffer handle {handle}"},

	{22807, never, refused, "", "Skipping registration for buffer {buf} size {size}"},
	{22807, never, refused, "", "Skipping graph registration for buffer {buf} size {size}"},
	{22807, never, refused, wayNVLS, "Failed to multicast-bind user buffer"},

	{21900, 22300, refused, wayNVLS, "register fails, buffer {buf}"},
	{22703, 22800, refused, "", "buffer {buf} (baseAddr {x} align {x}) size {size}"},
	{22902, never, refused, wayNet, "Buffer {buf} (size {size}, numSegments {x}) not registered"},
	{22400, never, notGivenBack, wayIPC, "rank {rank} deregister IPC buffer {buf} peerRank {peer} failed"},
	{22400, never, notGivenBack, wayNVLS, "rank {rank} deregister NVLS buffer {buf} dev"},
	{22400, never, notGivenBack, wayNet, "rank {rank} deregister NET buffer handle {handle} proxy"},
	{22400, never, notGivenBack, waySHARP, "rank {rank} deregister COLLNET buffer handle {handle} proxy"},

	// Steps of an IPC registration: what comes of them is told by the lines above.
	{22500, never, 0, "", "rank {rank} - IPC registering buffer {buf}"},
	{22300, never, 0, "", "Proxy rank {rank} register"},
	{22902, never, 0, "", "Number of segments exceeded maximum number of supported physical segments"},
	{23003, never, 0, "", "[{rank}] Segment "},
}

// windowMarks are in the line that tells how a call runs: "AllGather [Symmetric]: 16777216 Bytes -> Kernel ...".
var windowMarks = []string{" [Symmetric]: ", " [Copy Engine]: ", " [Hierarchical CE]: "}

// logText is what NCCL says in a line of its log: host, process and device go before it. ok is false for other lines.
func logText(line string) (text string, ok bool) {
	for _, mark := range []string{" NCCL INFO ", " NCCL WARN "} {
		if _, text, ok = strings.Cut(line, mark); ok {
			return strings.TrimRight(text, "\r\n"), true
		}
	}
	return "", false
}

// parseLine reads a line of the log of a version. ok is false where it does not concern registration. Lines of a version that is not known are
// read by the forms of the nearest one.
func parseLine(v version, line string) (e logEvent, ok bool) {
	v = min(max(v, oldestForm), newestForm)
	text, ok := logText(line)
	if !ok {
		return e, false
	}
	for _, f := range forms {
		if v < f.from || v >= f.before {
			continue
		}
		if e, ok := f.match(text); ok {
			return e, e.Kind != 0
		}
	}
	e = logEvent{Rank: -1, Peer: -1, Text: text}
	for _, mark := range windowMarks {
		if strings.Contains(text, mark) {
			e.Kind = inWindow
			return e, true
		}
	}
	if aboutRegistration(text) {
		e.Kind = unknownForm
		return e, true
	}
	return e, false
}

// aboutRegistration finds lines that should have had a form.
func aboutRegistration(text string) bool {
	low := strings.ToLower(text)
	if !strings.Contains(low, "regist") {
		return false
	}
	for _, w := range []string{"buffer", "userbuff", "sendbuff", "recvbuff"} {
		if strings.Contains(low, w) {
			return true
		}
	}
	return false
}

// match reads text as the form; ok is false where it has another.
func (f *form) match(text string) (e logEvent, ok bool) {
	e = logEvent{Kind: f.kind, Way: f.way, Rank: -1, Peer: -1, Text: text}
	pattern, left := f.text, text
	for {
		literal, rest, more := strings.Cut(pattern, "{")
		if left, ok = strings.CutPrefix(left, literal); !ok || !more {
			return e, ok
		}
		var name string
		name, pattern, _ = strings.Cut(rest, "}")
		word := left
		if strings.HasPrefix(left, nilAddress) {
			word = nilAddress
		} else if n := strings.IndexAny(left, " ,)]"); n >= 0 {
			word = left[:n]
		}
		if !e.set(name, word) {
			return e, false
		}
		left = left[len(word):]
	}
}

const nilAddress = "(nil)" // as C prints it

// set takes what a form's brace has read.
func (e *logEvent) set(name, word string) bool {
	switch name {
	case "x":
		return word != ""
	case "rank", "peer":
		n, err := strconv.Atoi(word)
		if err != nil || n < 0 {
			return false
		}
		if name == "rank" {
			e.Rank = n
		} else {
			e.Peer = n
		}
		return true
	case "size":
		n, err := strconv.ParseUint(word, 10, 64)
		e.Size = n
		return err == nil
	}
	var n uint64
	if word != nilAddress {
		hex, isHex := strings.CutPrefix(word, "0x")
		var err error
		if n, err = strconv.ParseUint(hex, 16, 64); err != nil || !isHex {
			return false
		}
	}
	switch name {
	case "buf":
		e.Addr[0] = n
	case "buf2":
		e.Addr[1] = n
	case "mc":
		e.MC[0] = n
	case "mc2":
		e.MC[1] = n
	case "handle":
		e.Handle = n
	}
	return true
}
