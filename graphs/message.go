package graphs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// messageVersion is the first byte of a message: ranks of one job may run different builds.
const messageVersion = 2

// maxText bounds what a message carries for people (a panic's text can be of any length).
const maxText = 2 << 10

type kind uint8

const (
	kindCall    kind = iota + 1 // collectives of one call or Group, to all members
	kindPair                    // transfers between two members
	kindEnd                     // the function and the capture ended
	kindConfirm                 // the result after all communicators voted
)

// message is what a member tells at a meeting.
type message struct {
	kind    kind
	calls   uint64 // calls of this capture on this communicator so far, with the present one
	require nccl.Mode
	place   string // of the call, or of the Capture

	text   string // of a call: the call; of an end: why it failed, "" for success
	desc   []byte // kindCall: what must agree
	layout []byte // kindCall: where the buffers lie
	never  string // kindCall: why this rank makes no windows unasked, "" if it may
	idle   []byte // kindCall: which windows this rank does without (nccl.Comm.IdleWindows)

	sends, recvs []transfer // kindPair: what is open between the two

	fate    fate   // kindEnd, kindConfirm
	ordinal uint64 // kindEnd: captures of this process so far
	hash    uint64 // kindEnd: of all descriptions on this communicator
}

// fate is how a member's capture ended.
type fate uint8

const (
	fateOK fate = iota
	fateFailed
	fatePanicked
	fateCancelled
)

// transfer is one Send or Recv as its peer sees it.
type transfer struct {
	typ    cuda.DType
	count  uint64
	place  string
	layout []byte
}

func (t transfer) String() string { return fmt.Sprintf("%d %s (%s)", t.count, t.typ, t.place) }

func (m *message) encode() []byte {
	b := []byte{messageVersion, byte(m.kind), byte(m.require), byte(m.fate)}
	b = binary.AppendUvarint(b, m.calls)
	b = binary.AppendUvarint(b, m.ordinal)
	b = binary.LittleEndian.AppendUint64(b, m.hash)
	b = appendBytes(b, cut(m.place))
	b = appendBytes(b, cut(m.text))
	b = appendBytes(b, m.desc)
	b = appendBytes(b, m.layout)
	b = appendBytes(b, cut(m.never))
	b = appendBytes(b, m.idle)
	for _, list := range [2][]transfer{m.sends, m.recvs} {
		b = binary.AppendUvarint(b, uint64(len(list)))
		for _, t := range list {
			b = append(b, byte(t.typ))
			b = binary.AppendUvarint(b, t.count)
			b = appendBytes(b, cut(t.place))
			b = appendBytes(b, t.layout)
		}
	}
	return b
}

func appendBytes[B []byte | string](b []byte, v B) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	return append(b, v...)
}

// cut shortens a text to maxText bytes, between runes.
func cut(s string) string {
	if len(s) <= maxText {
		return s
	}
	n := maxText - len("…")
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

var errMessage = errors.New("message of a capture is damaged or from another version")

// reader takes a message apart; after the first fault every result is zero and bad is set.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) byte() byte {
	if v := r.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if r.bad || n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) uint64() uint64 {
	if v := r.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (r *reader) bytes() []byte  { return r.take(r.uvarint()) }
func (r *reader) string() string { return string(r.bytes()) }

func decodeMessage(b []byte) (*message, error) {
	r := reader{b: b}
	if r.byte() != messageVersion {
		return nil, errMessage
	}
	m := &message{kind: kind(r.byte()), require: nccl.Mode(r.byte()), fate: fate(r.byte())}
	m.calls = r.uvarint()
	m.ordinal = r.uvarint()
	m.hash = r.uint64()
	m.place = r.string()
	m.text = r.string()
	m.desc = r.bytes()
	m.layout = r.bytes()
	m.never = r.string()
	m.idle = r.bytes()
	for _, list := range [2]*[]transfer{&m.sends, &m.recvs} {
		// A transfer takes at least four bytes, so a damaged count cannot make this loop long.
		for range r.uvarint() {
			*list = append(*list, transfer{typ: cuda.DType(r.byte()), count: r.uvarint(), place: r.string(), layout: r.bytes()})
			if r.bad {
				return nil, errMessage
			}
		}
	}
	if r.bad || len(r.b) != 0 || m.kind < kindCall || m.kind > kindConfirm {
		return nil, errMessage
	}
	return m, nil
}

// chunkSize is what one meeting carries of a message; the control plane's bound is 64 KiB a value.
const chunkSize = 60 << 10

// maxMessage bounds a message as a whole: a Group of some 100,000 calls.
const maxMessage = 32 << 20

var errTooLarge = fmt.Errorf("describing the call takes more than %d MiB: make its Group smaller", maxMessage>>20)

// gather exchanges values of up to maxMessage bytes by meetings of bounded size. All take part in as many meetings as the longest value needs.
func gather(v []byte, meet func([]byte) ([][]byte, error)) ([][]byte, error) {
	var all [][]byte
	var totals []int
	// A meeting of two gives back the other's value only, so the own one counts here.
	for round, rounds := 0, max(1, (len(v)+chunkSize-1)/chunkSize); round < rounds; round++ {
		part := v[min(round*chunkSize, len(v)):min((round+1)*chunkSize, len(v))]
		if round == 0 {
			part = append(binary.LittleEndian.AppendUint32(make([]byte, 0, 4+len(part)), uint32(len(v))), part...)
		}
		got, err := meet(part)
		if err != nil {
			return nil, err
		}
		if round == 0 {
			all, totals = make([][]byte, len(got)), make([]int, len(got))
		}
		for i, g := range got {
			if round == 0 {
				if len(g) < 4 {
					return nil, errMessage
				}
				totals[i] = int(binary.LittleEndian.Uint32(g))
				if totals[i] > maxMessage {
					return nil, errMessage
				}
				g = g[4:]
				rounds = max(rounds, (totals[i]+chunkSize-1)/chunkSize)
			}
			all[i] = append(all[i], g...)
		}
	}
	for i := range all {
		if len(all[i]) != totals[i] {
			return nil, errMessage
		}
	}
	return all, nil
}
