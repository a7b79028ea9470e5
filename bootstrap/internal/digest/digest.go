// Package digest is what hosts tell each other of their ranks' ledgers: the state of one account, for all ranks of which it is the same at once.
package digest

import (
	"fmt"
	"slices"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// Query asks for the state of an account in the ledgers of some ranks. Two that ask for the same are equal.
type Query struct {
	ID       uint64
	Ranks    string // the encoding of RanksOf
	From, To uint64 // records that are wanted beside the newest; 0: none
}

// State is what the account says, in the ledgers of some ranks.
type State struct {
	Ranks   []int // in order
	Gone    bool  // they have no such account any more
	Last    uint64
	Done    uint64
	Closed  uint64 // n+1; 0: not closed
	Busy    string
	Records []ledgermem.Entry // the newest, and those that were asked for; ascending
}

// RanksOf encodes a list of ranks, which is in order.
func RanksOf(ranks []int) string {
	var e wire.Encoder
	encodeRanks(&e, ranks)
	return string(e.B)
}

// Wants are the ranks that a query is for.
func (q *Query) Wants(size int) ([]int, error) {
	d := wire.Decoder{B: []byte(q.Ranks)}
	ranks := decodeRanks(&d, size)
	return ranks, d.End()
}

// Ranks are written as runs: what is left out, and how many follow.
func encodeRanks(e *wire.Encoder, ranks []int) {
	runs := 0
	for i, r := range ranks {
		if i == 0 || ranks[i-1]+1 != r {
			runs++
		}
	}
	e.Uint(uint64(runs))
	next := 0
	for i := 0; i < len(ranks); {
		j := i + 1
		for j < len(ranks) && ranks[j] == ranks[j-1]+1 {
			j++
		}
		e.Uint(uint64(ranks[i] - next))
		e.Uint(uint64(j - i))
		next = ranks[i] + j - i
		i = j
	}
}

func decodeRanks(d *wire.Decoder, size int) []int {
	var ranks []int
	next := uint64(0)
	for range d.Count() {
		gap, n := d.Uint(), d.Uint()
		if d.Err == nil && (n == 0 || gap > uint64(size) || n > uint64(size) || next+gap+n > uint64(size)) {
			d.Fail("ranks that the job does not have")
		}
		if d.Err != nil {
			return nil
		}
		for r := next + gap; r < next+gap+n; r++ {
			ranks = append(ranks, int(r))
		}
		next += gap + n
	}
	return ranks
}

// Encode and DecodeQuery carry a query.
func (q *Query) Encode(e *wire.Encoder) {
	e.Uint(q.ID)
	e.String(q.Ranks)
	e.Uint(q.From)
	e.Uint(q.To)
}

// DecodeQuery reads one for a job of size ranks.
func DecodeQuery(d *wire.Decoder, size int) Query {
	q := Query{ID: d.Uint(), Ranks: d.String(), From: d.Uint(), To: d.Uint()}
	if _, err := q.Wants(size); err != nil && d.Err == nil {
		d.Fail(err.Error())
	}
	return q
}

// EncodeStates and DecodeStates carry an answer.
func EncodeStates(e *wire.Encoder, states []State) {
	e.Uint(uint64(len(states)))
	for i := range states {
		s := &states[i]
		encodeRanks(e, s.Ranks)
		e.Bool(s.Gone)
		if s.Gone {
			continue
		}
		e.Uint(s.Last)
		e.Uint(s.Done)
		e.Uint(s.Closed)
		e.String(s.Busy)
		e.Uint(uint64(len(s.Records)))
		for _, r := range s.Records {
			e.Uint(r.Seq)
			e.Uint(uint64(r.Kind))
			e.Uint(r.Desc[0])
			e.Uint(r.Desc[1])
			e.Uint(r.Sum)
		}
	}
}

// DecodeStates reads an answer in a job of size ranks.
func DecodeStates(d *wire.Decoder, size int) []State {
	var states []State
	ranks := 0
	for range d.Count() {
		s := State{Ranks: decodeRanks(d, size), Gone: d.Bool()}
		if !s.Gone {
			s.Last, s.Done, s.Closed, s.Busy = d.Uint(), d.Uint(), d.Uint(), d.String()
			for range d.Count() {
				s.Records = append(s.Records, ledgermem.Entry{Seq: d.Uint(), Kind: uint8(d.Uint()), Desc: [2]uint64{d.Uint(), d.Uint()}, Sum: d.Uint()})
			}
		}
		if ranks += len(s.Ranks); ranks > size {
			d.Fail("ranks that are told of twice")
		}
		if d.Err != nil {
			return nil
		}
		states = append(states, s)
	}
	return states
}

// Read is the state of an account in one ledger, which may have been given up by now, until another has its place.
func Read(m *ledgermem.Memory, q Query) State {
	i := m.Page.FindID(q.ID)
	if i < 0 {
		return State{Gone: true}
	}
	slot := m.Slot(i)
	opening := slot.Opening.Load()
	s := State{Closed: slot.ClosedAt.Load()} // first: what is closed has no newer records
	s.Last, s.Done, s.Busy = slot.Last.Load(), slot.Done.Load(), slot.BusyText()
	if q.From > 0 {
		from := max(q.From, s.Last-min(s.Last, ledgermem.Records-1))
		for seq := from; seq <= min(q.To, s.Last) && seq < s.Last; seq++ {
			if e, ok := slot.Entry(seq); ok {
				s.Records = append(s.Records, e)
			}
		}
	}
	if e, ok := slot.Entry(s.Last); ok {
		s.Records = append(s.Records, e)
	}
	if m.Page.ID[i].Load() != q.ID || slot.Opening.Load() != opening {
		return State{Gone: true}
	}
	return s
}

// Merge makes one of the states that are the same. The result shares memory with what it was given.
func Merge(all []State) []State {
	at := map[string]int{}
	var merged []State
	for _, s := range all {
		if len(s.Ranks) == 0 {
			continue
		}
		key := fmt.Sprint(s.Gone, s.Last, s.Done, s.Closed, s.Records, s.Busy)
		if i, ok := at[key]; ok {
			merged[i].Ranks = append(merged[i].Ranks, s.Ranks...)
			continue
		}
		at[key] = len(merged)
		s.Ranks = slices.Clone(s.Ranks)
		merged = append(merged, s)
	}
	for i := range merged {
		slices.Sort(merged[i].Ranks)
		merged[i].Ranks = slices.Compact(merged[i].Ranks)
	}
	return merged
}
