package ledgermem

import (
	"encoding/binary"
	"math/bits"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Entry is a copy of a Record.
type Entry struct {
	Seq  uint64
	Kind uint8
	Desc [2]uint64
	Sum  uint64
}

// Entry reads a record; false when it is not there yet, is being written, or is older than those that are kept.
func (s *Slot) Entry(seq uint64) (Entry, bool) {
	if seq == 0 {
		return Entry{}, false
	}
	r := &s.Record[(seq-1)%Records]
	stamp := r.Stamp.Load()
	e := Entry{Seq: seq, Kind: uint8(stamp), Desc: [2]uint64{r.Desc[0].Load(), r.Desc[1].Load()}, Sum: r.Sum.Load()}
	return e, stamp>>8 == seq && r.Stamp.Load() == stamp
}

// SetWait writes what the owner has waited for, for d so far.
func (s *Slot) SetWait(seq uint64, d time.Duration) {
	s.WaitFrom.Store(Now() - uint64(d))
	s.WaitSeq.Store(seq)
}

// SetBusy writes what the owner is in, cut to the room there is. One goroutine at a time.
func (s *Slot) SetBusy(what string) {
	what = what[:min(len(what), 8*BusyWords)]
	s.BusySeq.Add(1)
	s.BusyLen.Store(uint64(len(what)))
	putText(s.Busy[:], what)
	s.BusySeq.Add(1)
}

// BusyText is what SetBusy wrote last; "" when it is being written all the time.
func (s *Slot) BusyText() string {
	for range 1000 {
		seq := s.BusySeq.Load()
		if seq%2 != 0 {
			continue
		}
		text := takeText(s.Busy[:], s.BusyLen.Load())
		if s.BusySeq.Load() == seq {
			return text
		}
	}
	return ""
}

// SetName names the account, once in an opening.
func (s *Slot) SetName(name string) {
	name = name[:min(len(name), 8*NameWords)]
	putText(s.Name[:], name)
	s.NameLen.Store(uint64(len(name)))
}

// NameText is what SetName wrote; "" without a name.
func (s *Slot) NameText() string { return takeText(s.Name[:], s.NameLen.Load()) }

func putText(words []atomic.Uint64, text string) {
	for i := 0; i*8 < len(text); i++ {
		var word [8]byte
		copy(word[:], text[i*8:])
		words[i].Store(binary.LittleEndian.Uint64(word[:]))
	}
}

func takeText(words []atomic.Uint64, n uint64) string {
	if n == 0 {
		return ""
	}
	n = min(n, uint64(8*len(words)))
	text := make([]byte, 0, n+8)
	for i := 0; uint64(len(text)) < n; i++ {
		text = binary.LittleEndian.AppendUint64(text, words[i].Load())
	}
	return string(text[:n])
}

// Find is the slot of an account that is open, -1 without one.
func (p *Page) Find(id uint64) int {
	for w := range p.Used {
		for set := p.Used[w].Load(); set != 0; set &= set - 1 {
			if i := w*64 + bits.TrailingZeros64(set); p.ID[i].Load() == id {
				return i
			}
		}
	}
	return -1
}

// Now is the clock of WaitFrom: it is the same in all processes of a host.
func Now() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return uint64(ts.Nano())
}

// OpNames are the operations of records of the first kind, by the low byte of Desc[0].
var OpNames = [...]string{1: "all-reduce", 2: "reduce", 3: "broadcast", 4: "all-gather", 5: "reduce-scatter", 6: "send", 7: "recv"}

// FindID is the slot that an account has, or had last; -1 without one. An account that was given up stays readable until its slot is taken again.
func (p *Page) FindID(id uint64) int {
	for i := range p.ID {
		if id != 0 && p.ID[i].Load() == id {
			return i
		}
	}
	return -1
}
