package digest

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

func entry(seq uint64) ledgermem.Entry {
	return ledgermem.Entry{Seq: seq, Kind: 1, Desc: [2]uint64{3, seq}, Sum: seq * 0x9e3779b97f4a7c15}
}

// ledger has one account, with records up to last.
func ledger(rank int, id, last uint64) *ledgermem.Memory {
	m := ledgermem.Heap(rank)
	s := m.Slot(7)
	s.Opening.Add(1)
	for seq := uint64(1); seq <= last; seq++ {
		e := entry(seq)
		r := &s.Record[(seq-1)%ledgermem.Records]
		r.Desc[0].Store(e.Desc[0])
		r.Desc[1].Store(e.Desc[1])
		r.Sum.Store(e.Sum)
		r.Stamp.Store(seq<<8 | uint64(e.Kind))
	}
	s.Last.Store(last)
	s.SetBusy("capture at train.go:41")
	m.Page.ID[7].Store(id)
	m.Page.Used[0].Or(1 << 7)
	return m
}

func coded(t testing.TB, states []State, size int) []State {
	t.Helper()
	var e wire.Encoder
	EncodeStates(&e, states)
	d := wire.Decoder{B: e.B}
	got := DecodeStates(&d, size)
	if err := d.End(); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestRead(t *testing.T) {
	m := ledger(3, 42, 600)
	state := func(records ...ledgermem.Entry) State {
		return State{Last: 600, Busy: "capture at train.go:41", Records: records}
	}
	var kept []ledgermem.Entry
	for seq := uint64(345); seq <= 600; seq++ {
		kept = append(kept, entry(seq))
	}
	for _, tc := range []struct {
		name string
		q    Query
		want State
	}{
		{"newest", Query{ID: 42}, state(entry(600))},
		{"some", Query{ID: 42, From: 590, To: 592}, state(entry(590), entry(591), entry(592), entry(600))},
		{"up to the newest", Query{ID: 42, From: 599, To: 1000}, state(entry(599), entry(600))},
		{"all that are kept", Query{ID: 42, From: 1, To: 1 << 63}, state(kept...)},
		{"older than those", Query{ID: 42, From: 1, To: 2}, state(entry(600))},
		{"no such account", Query{ID: 43}, State{Gone: true}},
		{"no account", Query{}, State{Gone: true}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(Read(m, tc.q), tc.want); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
	// Given up, it is there until its place is another's.
	m.Page.Used[0].And(^uint64(1 << 7))
	if got := Read(m, Query{ID: 42}); got.Gone || got.Last != 600 {
		t.Errorf("after it was given up: %+v", got)
	}
	m.Page.ID[7].Store(44)
	if got := Read(m, Query{ID: 42}); !got.Gone {
		t.Errorf("with another in its place: %+v", got)
	}
}

func TestMergeAndCode(t *testing.T) {
	a := State{Ranks: []int{4, 0}, Last: 7, Done: 6, Closed: 3, Busy: "x", Records: []ledgermem.Entry{entry(7)}}
	b := State{Ranks: []int{2}, Last: 7, Done: 6, Closed: 3, Busy: "x", Records: []ledgermem.Entry{entry(7)}}
	c := State{Ranks: []int{9}, Last: 7, Done: 7, Closed: 3, Busy: "x", Records: []ledgermem.Entry{entry(7)}}
	g := State{Ranks: []int{1, 3}, Gone: true}
	got := coded(t, Merge([]State{a, g, b, c, {}}), 10)
	want := []State{a, g, c}
	want[0].Ranks = []int{0, 2, 4}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("got -, want +\n%s", diff)
	}
	if !slices.Equal(a.Ranks, []int{4, 0}) {
		t.Errorf("Merge has changed what it was given: %v", a.Ranks)
	}
}

// A query, and what it is for.
func TestQuery(t *testing.T) {
	for _, ranks := range [][]int{nil, {0}, {9}, {0, 1, 2, 7, 9}} {
		q := Query{ID: 1 << 63, Ranks: RanksOf(ranks), From: 3, To: 9}
		var e wire.Encoder
		q.Encode(&e)
		d := wire.Decoder{B: e.B}
		got := DecodeQuery(&d, 10)
		if err := d.End(); err != nil || got != q {
			t.Errorf("%v: got %+v, %v, want %+v", ranks, got, err, q)
		}
		if wants, err := got.Wants(10); err != nil || !slices.Equal(wants, ranks) {
			t.Errorf("%v: wants %v, %v", ranks, wants, err)
		}
		d = wire.Decoder{B: e.B}
		if DecodeQuery(&d, 9); (d.Err != nil) != slices.Contains(ranks, 9) {
			t.Errorf("%v in a job of 9: %v", ranks, d.Err)
		}
	}
}

// What travels where a thousand ranks wait for one is small; at worst, where each has another state, it is bounded by the ranks.
func TestSize(t *testing.T) {
	const n = 1000
	size := func(last func(r int) uint64) int {
		var states []State
		for r := range n {
			s := Read(ledger(r, 42, last(r)), Query{ID: 42})
			s.Ranks = []int{r}
			states = append(states, s)
		}
		var e wire.Encoder
		EncodeStates(&e, Merge(states))
		return len(e.B)
	}
	if got := size(func(r int) uint64 { return 1042 - uint64(r/500*(r%2)) }); got > 2000 {
		t.Errorf("%d bytes where the ranks have two states", got)
	}
	if got := size(func(r int) uint64 { return uint64(r) }); got > 80*n {
		t.Errorf("%d bytes where the ranks have %d states", got, n)
	}
}

func FuzzStates(f *testing.F) {
	for _, states := range [][]State{nil, {{Ranks: []int{0, 2}, Last: 7, Busy: "x", Records: []ledgermem.Entry{entry(7)}}, {Ranks: []int{1}, Gone: true}}} {
		var e wire.Encoder
		EncodeStates(&e, states)
		f.Add(e.B)
	}
	f.Add([]byte{0xff, 0xff, 0x03, 1, 0, 0xe8, 7})
	f.Fuzz(func(t *testing.T, b []byte) {
		d := wire.Decoder{B: b}
		states := DecodeStates(&d, 16)
		if d.End() != nil {
			return
		}
		ranks := 0
		for _, s := range states {
			ranks += len(s.Ranks)
			for _, r := range s.Ranks {
				if r < 0 || r >= 16 {
					t.Fatalf("rank %d of 16", r)
				}
			}
		}
		if ranks > 16 {
			t.Fatalf("%d ranks of 16", ranks)
		}
		if diff := cmp.Diff(coded(t, states, 16), states); diff != "" {
			t.Errorf("coded again: got -, want +\n%s", diff)
		}
	})
}
