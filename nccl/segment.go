package nccl

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// segment is the memory that the members of a host communicator share to find each other's calls. The first member makes
// it; every word has one writer, except the failure, whose writer is chosen by compare-and-swap.
//
//	header    magic, number of ranks; the failure
//	ranks     for each rank: phase; closed; two call slots; live registrations
//	pairs     for each ordered pair of ranks: the sender's and the receiver's lines
//	staging   for each rank: two halves
//	messages  for each ordered pair: two chunks
//
// It is sparse: what is never touched costs no memory.
type segment struct {
	b        []byte
	n        int
	pairs    int // offsets
	staging  int
	messages int
	chunk    int // bytes of a message chunk
}

const (
	segMagic   = 0x3167_6573_6c63_636e // "ncclseg1"
	headerSize = 4096
	rankSize   = 16384
	pairSize   = 512

	// In the header.
	atMagic  = 0
	atRanks  = 8
	atAbort  = 64 // state and length, then code and rank, then the text
	atText   = 80
	textSize = 1024

	// In a rank's part; each on its own cache lines, neighbours apart for the adjacent-line prefetcher.
	atPhase    = 0
	atClosed   = 128 // n+1 once the rank has closed after record n
	atSlots    = 256 // two
	slotSize   = 128
	atUnlisted = 512 // how many registrations are live beside those in the table
	atTable    = 1024
	tableLen   = 1024

	// In a pair's part: words of the sender, and from receiver on those of the receiver.
	atReceiver = 256

	// stagingHalf is the most that a staged collective moves between two barriers: it fits the second-level cache.
	stagingHalf = 256 << 10

	// The chunks of messages are as large as a quarter of the half, and smaller where there are many pairs: the address space.
	maxChunk      = 64 << 10
	minChunk      = 4 << 10
	messagesTotal = 32 << 20
)

// Words of a call slot.
const (
	slotCall  = iota // op, type, red, flags, root as in the ledger; flags in bits 24-31
	slotCount        // elements
	slotSeq          // ledger record
	slotSub          // which call of the group or graph
	slotKey          // the graph's, 0 for eager calls
	slotGroup        // hash of the group's calls, 0 for a single call
	slotSendMem
	slotSendOff
	slotRecvMem
	slotRecvOff
	slotScalar // of the rank, where the reduction is a pre-multiplied sum
	slotWords
)

// Flags in slotCall, and in a message's word of that kind.
const (
	sendUsed = 1 << iota
	sendReg
	recvUsed
	recvReg
	capturedCall
)

func chunkSize(n int) int {
	return max(minChunk, min(maxChunk, messagesTotal/(2*n*n)&^(minChunk-1)))
}

func newSegment(n int) segment {
	s := segment{n: n, pairs: headerSize + n*rankSize, chunk: chunkSize(n)}
	s.staging = (s.pairs + n*n*pairSize + 4095) &^ 4095
	s.messages = s.staging + n*2*stagingHalf
	return s
}

func (s *segment) size() int { return s.messages + s.n*s.n*2*s.chunk }

// adopt takes the memory; the maker writes the header, the others check it.
func (s *segment) adopt(b []byte, make bool) error {
	if len(b) != s.size() {
		return fmt.Errorf("control segment of %d bytes, want %d", len(b), s.size())
	}
	s.b = b
	if make {
		binary.LittleEndian.PutUint64(b[atRanks:], uint64(s.n))
		s.word(atMagic).Store(segMagic)
		return nil
	}
	if m := s.word(atMagic).Load(); m != segMagic {
		return fmt.Errorf("control segment with magic %x: another version of this package?", m)
	}
	if n := binary.LittleEndian.Uint64(b[atRanks:]); n != uint64(s.n) {
		return fmt.Errorf("control segment for %d ranks, want %d", n, s.n)
	}
	return nil
}

func (s *segment) word(off int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&s.b[off])) }

// offset is the place of an address in the segment.
func (s *segment) offset(p unsafe.Pointer) int {
	return int(uintptr(p) - uintptr(unsafe.Pointer(&s.b[0])))
}

// owns reports whether n bytes at off are all a rank's to write: within its own part, its side of a pair, its staging, or a message of its.
func (s *segment) owns(r int, off, n uint64) bool {
	if off > uint64(len(s.b)) || n > uint64(len(s.b))-off {
		return false
	}
	within := func(from, size int) bool { return int(off) >= from && int(off+n) <= from+size }
	if within(s.rankAt(r), rankSize) || within(s.staging+2*r*stagingHalf, 2*stagingHalf) || within(s.messages+2*r*s.n*s.chunk, 2*s.n*s.chunk) {
		return true
	}
	if int(off) < s.pairs || int(off+n) > s.pairs+s.n*s.n*pairSize {
		return false
	}
	pair, at := (int(off)-s.pairs)/pairSize, (int(off)-s.pairs)%pairSize
	if at < atReceiver {
		return pair/s.n == r && at+int(n) <= atReceiver
	}
	return pair%s.n == r && at+int(n) <= pairSize
}

func (s *segment) rankAt(r int) int { return headerSize + r*rankSize }

func (s *segment) phase(r int) *atomic.Uint64  { return s.word(s.rankAt(r) + atPhase) }
func (s *segment) closed(r int) *atomic.Uint64 { return s.word(s.rankAt(r) + atClosed) }

// slot is a rank's call slot of a parity; it belongs to the rank until it publishes its phase, then to the readers.
func (s *segment) slot(r int, op uint64) *[slotWords]uint64 {
	return (*[slotWords]uint64)(unsafe.Pointer(&s.b[s.rankAt(r)+atSlots+int(op&1)*slotSize]))
}

// half is a rank's staging half.
func (s *segment) half(r int, chunk uint64) []byte {
	off := s.staging + (2*r+int(chunk&1))*stagingHalf
	return s.b[off : off+stagingHalf : off+stagingHalf]
}

// list and unlist keep the table of a rank's live registrations; one goroutine at a time.
func (s *segment) list(r int, mem uint64) {
	for i := range tableLen {
		if w := s.word(s.rankAt(r) + atTable + 8*i); w.Load() == 0 {
			w.Store(mem)
			return
		}
	}
	s.word(s.rankAt(r) + atUnlisted).Add(1)
}

func (s *segment) unlist(r int, mem uint64) {
	for i := range tableLen {
		if w := s.word(s.rankAt(r) + atTable + 8*i); w.Load() == mem {
			w.Store(0)
			return
		}
	}
	s.word(s.rankAt(r) + atUnlisted).Add(^uint64(0))
}

// live reports whether a rank's memory is registered; true also where the table is full and does not know.
func (s *segment) live(r int, mem uint64) bool {
	if s.word(s.rankAt(r)+atUnlisted).Load() != 0 {
		return true
	}
	for i := range tableLen {
		if s.word(s.rankAt(r)+atTable+8*i).Load() == mem {
			return true
		}
	}
	return false
}

// line is one end's side of the messages of a pair.
type line struct {
	posted *atomic.Uint64 // number of the message that the words describe
	agreed *atomic.Uint64 // sender: number of the last message whose two descriptions it has compared
	moved  *atomic.Uint64 // chunks written (sender) or consumed (receiver), since the beginning
	done   *atomic.Uint64 // receiver: number of the last message received
	words  *[4]uint64     // type and flags, count, memory, offset
}

const lineWords = 64 // their offset

func (s *segment) line(from, to int, receiver bool) line {
	off := s.pairs + (from*s.n+to)*pairSize
	if receiver {
		off += atReceiver
	}
	return line{s.word(off), s.word(off + 8), s.word(off + 16), s.word(off + 24), (*[4]uint64)(unsafe.Pointer(&s.b[off+lineWords]))}
}

// message is a chunk of the messages between two ranks.
func (s *segment) message(from, to int, chunk uint64) []byte {
	off := s.messages + (2*(from*s.n+to)+int(chunk&1))*s.chunk
	return s.b[off : off+s.chunk : off+s.chunk]
}

// The failure: state (0 none, 1 being written, 2 there) in the low half of the word, length of the text above.
func (s *segment) tell(code uint32, jobRank int, text string) bool {
	w := s.word(atAbort)
	if !w.CompareAndSwap(0, 1) {
		return false
	}
	text = text[:min(len(text), textSize)]
	copy(s.b[atText:], text)
	s.word(atAbort + 8).Store(uint64(code) | uint64(uint32(jobRank))<<32)
	w.Store(2 | uint64(len(text))<<32)
	return true
}

func (s *segment) isTold() bool { return uint32(s.word(atAbort).Load()) == 2 }

func (s *segment) told() (code uint32, jobRank int, text string) {
	w := s.word(atAbort).Load()
	if uint32(w) != 2 {
		return 0, 0, ""
	}
	n := min(int(w>>32), textSize)
	d := s.word(atAbort + 8).Load()
	return uint32(d), int(int32(d >> 32)), string(s.b[atText : atText+n])
}
