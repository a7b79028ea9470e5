package nccl

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

func TestExplainDifference(t *testing.T) {
	ar := Call{Op: OpAllReduce, Type: cuda.Float32DType, Red: Sum, Count: 1024}
	with := func(c Call, f func(*Call)) Call { f(&c); return c }
	bc := Call{Op: OpBroadcast, Type: cuda.BFloat16DType, Count: 3, Root: 2}
	send := Call{Op: OpSend, Type: cuda.Int8DType, Count: 9, Root: 1}
	cases := []struct {
		name string
		a, b []Call
		want string
	}{
		{"equal", []Call{ar, bc}, []Call{ar, bc}, ""},
		{"what need not agree", []Call{with(ar, func(c *Call) { c.Root = 5; c.Seq = 3; c.Send.Len = 3 })}, []Call{ar}, ""},
		{"messages are left out", []Call{ar, send}, []Call{ar}, ""},
		{"count", []Call{ar}, []Call{with(ar, func(c *Call) { c.Count = 2048 })},
			"rank 1: all-reduce of 2048 float32, sum; rank 0: all-reduce of 1024 float32, sum"},
		{"reduction", []Call{ar}, []Call{with(ar, func(c *Call) { c.Red = Avg })},
			"rank 1: all-reduce of 1024 float32, avg; rank 0: all-reduce of 1024 float32, sum"},
		{"root", []Call{ar, bc}, []Call{ar, with(bc, func(c *Call) { c.Root = 0 })},
			"call 2 of the group: rank 1: broadcast of 3 bfloat16, from rank 0; rank 0: broadcast of 3 bfloat16, from rank 2"},
		{"one call less", []Call{ar, bc}, []Call{ar}, "call 2 of the group: rank 1: no such call; rank 0: broadcast of 3 bfloat16, from rank 2"},
		{"nothing", nil, []Call{ar}, "rank 1: all-reduce of 1024 float32, sum; rank 0: no such call"},
	}
	for _, tc := range cases {
		if got := ExplainDifference(0, Describe(tc.a), 1, Describe(tc.b)); got != tc.want {
			t.Errorf("%s: got %q, want %q", tc.name, got, tc.want)
		}
	}
	if got := ExplainDifference(0, Describe([]Call{ar}), 2, []byte("xyz")); !strings.Contains(got, "rank 2: description of 3 bytes") {
		t.Errorf("a description that is none: %q", got)
	}
}

func TestDescribePair(t *testing.T) {
	msg := func(op Op, count uint64, peer int32) Call {
		return Call{Op: op, Type: cuda.Int32DType, Count: count, Root: peer}
	}
	one, two := &Comm{rank: 1}, &Comm{rank: 2}
	at1 := []Call{msg(OpRecv, 5, 2), msg(OpSend, 7, 2), msg(OpSend, 1, 0), msg(OpSend, 8, 2)}
	at2 := []Call{msg(OpRecv, 7, 1), msg(OpRecv, 8, 1), msg(OpSend, 5, 1), msg(OpRecv, 3, 2), msg(OpSend, 3, 2)}
	if d := ExplainDifference(1, one.DescribePair(at1, 2), 2, two.DescribePair(at2, 1)); d != "" {
		t.Errorf("they meet, but: %s", d)
	}
	at2[1].Count = 9
	want := "call 2 of the group: rank 2: send of 9 int32, to rank 2; rank 1: send of 8 int32, to rank 2"
	if d := ExplainDifference(1, one.DescribePair(at1, 2), 2, two.DescribePair(at2, 1)); d != want {
		t.Errorf("got %q, want %q", d, want)
	}
}

func TestRecord(t *testing.T) {
	ar := Call{Op: OpAllReduce, Type: cuda.Float64DType, Red: Max, Count: 1 << 40}
	rd := Call{Op: OpReduce, Type: cuda.F8E5M2DType, Red: Avg, Count: 3, Root: 1<<31 - 1}
	send := Call{Op: OpSend, Type: cuda.Int8DType, Count: 9, Root: 1}
	for _, c := range []Call{ar, rd} {
		if d := cmp.Diff(unpackCall(packCall(&c)), c, cmp.AllowUnexported(cuda.Range{}), cmp.Comparer(func(a, b cuda.Range) bool { return a == b })); d != "" {
			t.Error(d)
		}
	}
	texts := map[string]bootstrap.Record{
		"all-reduce of 1099511627776 float64, max": {Kind: bootstrap.Enqueued, Desc: packRecord([]Call{ar, send})},
		"a group of 2 calls":                       {Kind: bootstrap.Enqueued, Desc: packRecord([]Call{ar, rd})},
		"a capture":                                {Kind: bootstrap.Capture},
		"a replay of graph 2a":                     {Kind: bootstrap.Replay, Desc: [2]uint64{recReplay, 42}},
	}
	for want, r := range texts {
		if got := recordText(r); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if packRecord([]Call{ar, rd}) == packRecord([]Call{rd, ar}) {
		t.Error("the order of a group's calls makes no difference")
	}
}

func FuzzDescription(f *testing.F) {
	f.Add(Describe([]Call{{Op: OpAllReduce, Type: cuda.Float32DType, Count: 7}, {Op: OpReduce, Root: 3}}))
	f.Add([]byte{})
	f.Add([]byte{descVersion, 1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		calls, err := decodeDesc(b)
		text := ExplainDifference(0, Describe(nil), 1, b)
		if err == nil && len(calls) > 0 && text == "" {
			t.Errorf("%d calls are no difference to none", len(calls))
		}
		// What it understands it can say again: Sends apart, and words without a meaning.
		again, err2 := decodeDesc(Describe(calls))
		if err == nil && (err2 != nil || len(again) > len(calls)) {
			t.Errorf("%v became %v, %v", calls, again, err2)
		}
	})
}

func FuzzLayout(f *testing.F) {
	f.Add([]byte{layoutVersion, 0, 0})
	one := []byte{layoutVersion, 1, 0, byte(OpAllReduce), 0, 0, 0, 0, 1, layoutSend, byte(cuda.Shareable)}
	f.Add(append(one, make([]byte, 32)...))
	f.Add(one)
	f.Fuzz(func(t *testing.T, b []byte) {
		calls, err := decodeLayout(b)
		infos, err2 := DecodeLayout(b)
		if (err == nil) != (err2 == nil) || len(calls) != len(infos) {
			t.Fatalf("%d calls, %v; %d infos, %v", len(calls), err, len(infos), err2)
		}
		for _, c := range calls {
			for _, buf := range c.buffers {
				if buf.off+buf.len > buf.memLen || buf.off+buf.len < buf.off {
					t.Errorf("a range outside of its memory: %+v", buf)
				}
			}
		}
	})
}

// Segments of every size keep their parts apart and aligned.
func TestSegment(t *testing.T) {
	for _, n := range []int{2, 3, 7, 64, 256} {
		s := newSegment(n)
		ends := []int{headerSize + n*rankSize, s.pairs + n*n*pairSize, s.staging + n*2*stagingHalf, s.size()}
		starts := []int{s.pairs, s.staging, s.messages, s.messages + n*n*2*s.chunk}
		for i := range ends {
			if starts[i] < ends[i] || starts[i]%64 != 0 {
				t.Errorf("%d ranks: part %d begins at %d, the one before ends at %d", n, i+1, starts[i], ends[i])
			}
		}
	}
	if got := atSlots + 2*slotSize; got > atUnlisted || 8*slotWords > slotSize || atTable+8*tableLen > rankSize {
		t.Error("a rank's parts overlap")
	}
	s := newSegment(2)
	b := make([]byte, s.size()+64)
	if err := s.adopt(b[:s.size()], true); err != nil {
		t.Fatal(err)
	}
	other := newSegment(2)
	if err := other.adopt(b[:s.size()], false); err != nil {
		t.Error(err)
	}
	// The table of registrations says "live" where it cannot know.
	for id := range uint64(tableLen + 2) {
		s.list(1, id+1)
	}
	if !other.live(1, 3) || !other.live(1, 5000) {
		t.Error("a full table denies")
	}
	s.unlist(1, tableLen+1)
	s.unlist(1, tableLen+2)
	s.unlist(1, 3)
	if other.live(1, 3) || !other.live(1, 4) {
		t.Error("the table does not follow")
	}
	// The first failure stays.
	if !s.tell(codeMixed, 7, strings.Repeat("x", 2*textSize)) || other.tell(codeRank, 1, "later") {
		t.Error("two failures")
	}
	code, rank, text := other.told()
	if code != codeMixed || rank != 7 || text != strings.Repeat("x", textSize) {
		t.Errorf("told %d, rank %d, %d bytes", code, rank, len(text))
	}
}
