package nccl

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// Op is a kind of call; bootstrap.OpNames has the names.
type Op uint8

const (
	OpAllReduce Op = iota + 1
	OpReduce
	OpBroadcast
	OpAllGather
	OpReduceScatter
	OpSend
	OpRecv
)

// String is the name: "all-reduce", "send".
func (o Op) String() string {
	if int(o) < len(bootstrap.OpNames) && o != 0 {
		return bootstrap.OpNames[o]
	}
	return fmt.Sprintf("operation %d", uint8(o))
}

func (o Op) reduces() bool  { return o == OpAllReduce || o == OpReduce || o == OpReduceScatter }
func (o Op) rooted() bool   { return o == OpReduce || o == OpBroadcast }
func (o Op) p2p() bool      { return o == OpSend || o == OpRecv }
func (o Op) valid() bool    { return o >= OpAllReduce && o <= OpRecv }
func (c *Call) place() bool { return c.Op.rooted() || c.Op.p2p() } // Root means something

var redNames = [...]string{"sum", "prod", "min", "max", "avg"}

func (o RedOp) String() string {
	if int(o) < len(redNames) {
		return redNames[o]
	}
	return fmt.Sprintf("pre-multiplied sum %d", uint8(o)-uint8(Avg))
}

// Call is one operation as a rank asks for it.
type Call struct {
	Op     Op
	Type   cuda.DType
	Red    RedOp
	Root   int32  // root, or the peer of Send and Recv
	Count  uint64 // elements, as NCCL counts them for the op: of one rank's part for all-gather (sent) and reduce-scatter (received)
	Seq    uint64 // of an eager call: its place on the communicator
	Send   cuda.Range
	Recv   cuda.Range
	Stream *cuda.Stream
}

// String is "all-reduce of 1024 float32, sum".
func (c Call) String() string {
	s := fmt.Sprintf("%v of %d %v", c.Op, c.Count, c.Type)
	if c.Op.reduces() {
		s += ", " + c.Red.String()
	}
	switch c.Op {
	case OpReduce:
		s += fmt.Sprintf(", to rank %d", c.Root)
	case OpBroadcast:
		s += fmt.Sprintf(", from rank %d", c.Root)
	case OpSend:
		s += fmt.Sprintf(", to rank %d", c.Root)
	case OpRecv:
		s += fmt.Sprintf(", from rank %d", c.Root)
	}
	return s
}

// A description is what must agree between members, 16 bytes a call: op, type, reduction, 0, root, count.
const (
	descVersion = 1
	descCall    = 16
)

func appendDesc(b []byte, c Call) []byte {
	if !c.place() {
		c.Root = 0
	}
	if !c.Op.reduces() {
		c.Red = 0
	}
	b = append(b, byte(c.Op), byte(c.Type), byte(c.Red), 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(c.Root))
	return binary.LittleEndian.AppendUint64(b, c.Count)
}

func decodeDesc(b []byte) ([]Call, error) {
	if len(b) == 0 || b[0] != descVersion {
		return nil, fmt.Errorf("description of %d bytes: unknown version", len(b))
	}
	b = b[1:]
	if len(b)%descCall != 0 {
		return nil, fmt.Errorf("description: %d bytes are no whole number of calls", len(b))
	}
	calls := make([]Call, 0, len(b)/descCall)
	for ; len(b) > 0; b = b[descCall:] {
		c := Call{Op: Op(b[0]), Type: cuda.DType(b[1]), Red: RedOp(b[2]),
			Root: int32(binary.LittleEndian.Uint32(b[4:])), Count: binary.LittleEndian.Uint64(b[8:])}
		if !c.Op.valid() {
			return nil, fmt.Errorf("description: unknown operation %d", b[0])
		}
		calls = append(calls, c)
	}
	return calls, nil
}

// Describe says what must agree among all members about the calls of a group, in a form that can be compared and, by
// ExplainDifference, be told as a difference. Sends and Recvs are left out: they concern pairs (DescribePair). For libraries.
func Describe(group []Call) []byte {
	b := make([]byte, 1, 1+descCall*len(group))
	b[0] = descVersion
	for _, c := range group {
		if !c.Op.p2p() {
			b = appendDesc(b, c)
		}
	}
	return b
}

// DescribePair says what must agree between this rank and a peer about the Sends and Recvs of a group between them:
// both ends give the same description if the messages meet.
func (c *Comm) DescribePair(group []Call, peer int) []byte {
	lo, hi := min(c.rank, peer), max(c.rank, peer)
	b := []byte{descVersion}
	// Every message is told as its Send, first those from the lower rank.
	for _, from := range []int{lo, hi} {
		for _, call := range group {
			if !call.Op.p2p() || int(call.Root) != peer {
				continue
			}
			sender := c.rank
			if call.Op == OpRecv {
				sender = peer
			}
			if sender != from {
				continue
			}
			call.Op, call.Root = OpSend, int32(lo+hi-from)
			b = appendDesc(b, call)
		}
		if lo == hi {
			break
		}
	}
	return b
}

// ExplainDifference says how rank b's description differs from rank a's ("rank 1: all-reduce of 2048 float32, sum; rank 0: all-reduce
// of 1024 float32, sum"), "" if it does not.
func ExplainDifference(a int, descA []byte, b int, descB []byte) string {
	if string(descA) == string(descB) {
		return ""
	}
	ca, errA := decodeDesc(descA)
	cb, errB := decodeDesc(descB)
	if errA != nil || errB != nil {
		return fmt.Sprintf("rank %d: %s; rank %d: %s", b, descText(cb, errB), a, descText(ca, errA))
	}
	at := ""
	for i := range max(len(ca), len(cb)) {
		if len(ca) > 1 || len(cb) > 1 {
			at = fmt.Sprintf("call %d of the group: ", i+1)
		}
		switch {
		case i >= len(ca):
			return fmt.Sprintf("%srank %d: %v; rank %d: no such call", at, b, cb[i], a)
		case i >= len(cb):
			return fmt.Sprintf("%srank %d: no such call; rank %d: %v", at, b, a, ca[i])
		case ca[i] != cb[i]:
			return fmt.Sprintf("%srank %d: %v; rank %d: %v", at, b, cb[i], a, ca[i])
		}
	}
	return fmt.Sprintf("rank %d and rank %d: descriptions differ in form", b, a)
}

func descText(calls []Call, err error) string {
	if err != nil {
		return err.Error()
	}
	return callsText(calls)
}

// callsText is "all-reduce of 3 float32, sum, then broadcast of ..."; long groups are cut.
func callsText(calls []Call) string {
	if len(calls) == 0 {
		return "no call"
	}
	var s []string
	for i, c := range calls {
		if i == 3 && len(calls) > 4 {
			s = append(s, fmt.Sprintf("%d more", len(calls)-i))
			break
		}
		s = append(s, c.String())
	}
	return strings.Join(s, ", then ")
}

// A ledger record's two words say the same of one call; a group of several calls is a count and a hash.
const (
	recGroup  = 0xff // in place of an op
	recReplay = 0xfe
)

func packRecord(calls []Call) [2]uint64 {
	n, first := 0, -1
	for i := range calls {
		if !calls[i].Op.p2p() {
			n++
			if first < 0 {
				first = i
			}
		}
	}
	if n == 1 {
		return packCall(&calls[first])
	}
	h := uint64(fnvOffset)
	for i := range calls {
		if !calls[i].Op.p2p() {
			w := packCall(&calls[i])
			h = fnv64(fnv64(h, w[0]), w[1])
		}
	}
	return [2]uint64{recGroup | uint64(n)<<32, h}
}

func packCall(c *Call) [2]uint64 {
	root, red := uint64(0), uint64(0)
	if c.place() {
		root = uint64(uint32(c.Root))
	}
	if c.Op.reduces() {
		red = uint64(uint8(c.Red))
	}
	return [2]uint64{uint64(c.Op) | uint64(c.Type)<<8 | red<<16 | root<<32, c.Count}
}

func unpackCall(w [2]uint64) Call {
	return Call{Op: Op(w[0]), Type: cuda.DType(w[0] >> 8), Red: RedOp(uint8(w[0] >> 16)), Root: int32(w[0] >> 32), Count: w[1]}
}

// recordText tells a ledger record: "all-reduce of 1024 float32, sum".
func recordText(r bootstrap.Record) string {
	switch r.Kind {
	case bootstrap.Capture:
		return "a capture"
	case bootstrap.Replay:
		return fmt.Sprintf("a replay of graph %x", r.Desc[1])
	}
	if byte(r.Desc[0]) == recGroup {
		return fmt.Sprintf("a group of %d calls (%x)", r.Desc[0]>>32, r.Desc[1])
	}
	call := r.Desc
	if call[0]&recWindow != 0 {
		call[1] &= 1<<recPlaceShift - 1
	}
	text := unpackCall(call).String()
	if r.Desc[0]&recRegistered != 0 {
		text += ", in registered buffers"
	}
	if r.Desc[0]&recWindow != 0 {
		text += fmt.Sprintf(", in windows (place %04x)", r.Desc[1]>>recPlaceShift)
	}
	return text
}

// countOf is the word with the count of a single call.
func countOf(r bootstrap.Record) uint64 {
	if r.Desc[0]&recWindow != 0 {
		return r.Desc[1] & (1<<recPlaceShift - 1)
	}
	return r.Desc[1]
}

// onlyRegistration reports whether two records are of the same call, in buffers of which one side's are registered and the other's are not.
func onlyRegistration(a, b bootstrap.Record) bool {
	return a.Kind == b.Kind && (a.Desc[0]^b.Desc[0])&^(recRegistered|recWindow) == 0 && countOf(a) == countOf(b) && byte(a.Desc[0]) != recReplay && byte(a.Desc[0]) != recGroup
}

func sameRecord(a, b bootstrap.Record) bool { return a.Kind == b.Kind && a.Desc == b.Desc }

// sameGroup reports whether both are groups of the same number of calls: what differs only the calls themselves can tell.
func sameGroup(a, b bootstrap.Record) bool {
	return a.Kind == bootstrap.Enqueued && b.Kind == bootstrap.Enqueued && a.Desc[0] == b.Desc[0] && byte(a.Desc[0]) == recGroup
}

const fnvOffset = 14695981039346656037

// fnv64 mixes a word into an FNV-1a hash, byte by byte.
func fnv64(h, w uint64) uint64 {
	for range 8 {
		h = (h ^ w&0xff) * 1099511628211
		w >>= 8
	}
	return h
}
