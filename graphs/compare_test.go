package graphs

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

func callMessage(c nccl.Call) *message {
	return &message{kind: kindCall, calls: 2, place: "train.go:41", text: c.String(), desc: nccl.Describe([]nccl.Call{c})}
}

func endMessage(f fate, calls uint64, text string) *message {
	return &message{kind: kindEnd, calls: calls, fate: f, text: text, place: "train.go:40"}
}

func TestCompareCalls(t *testing.T) {
	reduce := nccl.Call{Op: nccl.OpAllReduce, Type: cuda.Float32DType, Count: 8}
	more := reduce
	more.Count = 9
	elsewhere := callMessage(more)
	elsewhere.place = "train.go:50"
	windowed := callMessage(reduce)
	windowed.require = nccl.Window
	for name, tt := range map[string]struct {
		msgs []*message
		err  error
		text string
	}{
		"equal":      {msgs: []*message{callMessage(reduce), callMessage(reduce)}},
		"alone":      {msgs: []*message{callMessage(reduce)}},
		"ends":       {msgs: []*message{endMessage(fateOK, 2, ""), endMessage(fateOK, 2, "")}},
		"first":      {[]*message{callMessage(more), callMessage(reduce), callMessage(reduce)}, nccl.ErrMismatch, "rank 1: all-reduce of 8 float32, sum; rank 0: all-reduce of 9 float32, sum (both at train.go:41); rank 2 as rank 1"},
		"last":       {[]*message{callMessage(reduce), callMessage(reduce), elsewhere}, nccl.ErrMismatch, "rank 2: all-reduce of 9 float32, sum; rank 0: all-reduce of 8 float32, sum (rank 2 at train.go:50, rank 0 at train.go:41); rank 1 as rank 0"},
		"require":    {[]*message{callMessage(reduce), windowed}, nccl.ErrMismatch, "rank 1 requires mode window, rank 0 none"},
		"early":      {[]*message{callMessage(reduce), endMessage(fateOK, 1, "")}, nccl.ErrMismatch, "rank 1 ended its capture at train.go:40 after 1 call; rank 0 (train.go:41): all-reduce of 8 float32, sum"},
		"early 0":    {[]*message{endMessage(fateOK, 0, ""), callMessage(reduce)}, nccl.ErrMismatch, "rank 0 ended its capture at train.go:40 without a call; rank 1 (train.go:41): all-reduce of 8 float32, sum"},
		"error":      {[]*message{callMessage(reduce), endMessage(fateFailed, 3, "no luck")}, ErrPeer, "rank 1 ended its capture at train.go:40 after 3 calls: no luck"},
		"panic":      {[]*message{endMessage(fatePanicked, 3, "boom"), endMessage(fateOK, 3, "")}, ErrPeer, "rank 0 panicked in its capture at train.go:40 after 3 calls: boom"},
		"cancelled":  {[]*message{callMessage(more), callMessage(reduce), endMessage(fateCancelled, 3, "context canceled")}, ErrPeer, "rank 2 gave up its capture at train.go:40 after 3 calls: context canceled"},
		"confirmed":  {msgs: []*message{{kind: kindConfirm}, {kind: kindConfirm}}},
		"revoked":    {[]*message{{kind: kindConfirm}, {kind: kindConfirm, fate: fateFailed, text: "x", place: "p"}}, ErrPeer, "rank 1 ended its capture at p without a call: x"},
		"three ways": {[]*message{callMessage(reduce), elsewhere, windowless(nccl.Call{Op: nccl.OpBroadcast, Type: cuda.Float32DType, Count: 8})}, nccl.ErrMismatch, "; rank 2 otherwise"},
	} {
		t.Run(name, func(t *testing.T) {
			d := compareCalls(tt.msgs)
			if tt.err == nil {
				if d != nil {
					t.Fatalf("difference %q, want none", d.text)
				}
				return
			}
			if d == nil {
				t.Fatal("no difference")
			}
			if !errors.Is(d.err, tt.err) || !strings.Contains(d.text, tt.text) {
				t.Errorf("difference %q (%v), want %q (%v)", d.text, d.err, tt.text, tt.err)
			}
		})
	}
}

func windowless(c nccl.Call) *message { return callMessage(c) }

func TestChooseMode(t *testing.T) {
	send := func(k cuda.AllocKind, registered bool, off uint64) nccl.LayoutInfo {
		return nccl.LayoutInfo{Send: true, Kind: k, Registered: registered, Offset: off, Memory: "mem"}
	}
	recv := func(k cuda.AllocKind, registered bool, off uint64) nccl.LayoutInfo {
		l := send(k, registered, off)
		l.Send = false
		return l
	}
	reduce := nccl.Call{Op: nccl.OpAllReduce, Type: cuda.Float32DType, Count: 2}
	gather := nccl.Call{Op: nccl.OpAllGather, Type: cuda.Float32DType, Count: 2}
	scatter := nccl.Call{Op: nccl.OpReduceScatter, Type: cuda.Float32DType, Count: 2}
	none := nccl.Call{Op: nccl.OpAllReduce, Type: cuda.Float32DType}
	in := func(id uint64, l nccl.LayoutInfo) nccl.LayoutInfo { l.ID = id; return l }
	win := func(n uint64, l nccl.LayoutInfo) nccl.LayoutInfo { l.Window = n; return l }
	type bufs = []nccl.LayoutInfo
	const p, s = cuda.Private, cuda.Shareable
	for name, tt := range map[string]struct {
		call    nccl.Call // default: an all-reduce
		bufs    []bufs
		require nccl.Mode
		mode    nccl.Mode
		staged  string
		reason  string
		err     error
	}{
		"several hosts":           {bufs: []bufs{{send(s, true, 8), recv(s, false, 64)}, {send(s, true, 8), recv(s, false, 0)}}, staged: "several hosts", mode: nccl.Plain, reason: "several hosts"},
		"several hosts, demanded": {bufs: []bufs{{send(s, false, 8)}, {send(s, false, 8)}}, staged: "several hosts", require: nccl.Local, err: ErrMode, reason: "mode local is required, but several hosts"},
		"private":                 {bufs: []bufs{{send(p, false, 0), recv(p, false, 0)}, {send(p, false, 0), recv(p, false, 0)}}, mode: nccl.Plain, reason: "private"},
		"window":                  {bufs: []bufs{{send(s, false, 8), recv(s, false, 64)}, {send(s, false, 8), recv(s, false, 64)}}, mode: nccl.Window, reason: "registered by the capture, at the same offsets"},
		"user window":             {bufs: []bufs{{send(s, true, 8)}, {send(s, true, 8)}}, mode: nccl.Window, reason: "registered by the program, at the same offsets"},
		"graph":                   {bufs: []bufs{{send(s, false, 0)}, {send(s, false, 256)}}, mode: nccl.Graph, reason: "the send buffer is at offset 256 on rank 1, 0 on rank 0"},
		"local":                   {bufs: []bufs{{recv(s, true, 0)}, {recv(s, true, 256)}}, mode: nccl.Local, reason: "registered by the program; no window"},
		"half registered":         {bufs: []bufs{{send(s, true, 0), recv(s, false, 0)}, {send(s, true, 0), recv(s, false, 1)}}, mode: nccl.Graph, reason: "registered by the capture"},
		"half private":            {bufs: []bufs{{send(s, false, 0), recv(p, false, 0)}, {send(s, false, 0), recv(p, false, 0)}}, mode: nccl.Plain, reason: "the recv buffer is private"},
		"root only sends":         {bufs: []bufs{{send(s, false, 0), recv(s, false, 0)}, {recv(s, false, 0)}, {recv(s, false, 0)}}, mode: nccl.Window},
		"in place gather":         {call: gather, bufs: []bufs{{in(7, send(s, false, 64)), in(7, recv(s, false, 64))}, {in(9, send(s, false, 72)), in(9, recv(s, false, 64))}}, mode: nccl.Window},
		"in place scatter":        {call: scatter, bufs: []bufs{{in(7, send(s, false, 64)), in(7, recv(s, false, 64))}, {in(9, send(s, false, 64)), in(9, recv(s, false, 72))}}, mode: nccl.Window},
		"gather from elsewhere":   {call: gather, bufs: []bufs{{in(7, send(s, false, 64)), in(7, recv(s, false, 64))}, {in(8, send(s, false, 72)), in(9, recv(s, false, 64))}}, mode: nccl.Graph, reason: "the send buffer is at offset 72"},
		"nobody has data":         {call: none, bufs: []bufs{{}, {}}, require: nccl.Window, mode: nccl.Plain, reason: "no data"},
		"one unregistered":        {bufs: []bufs{{send(s, true, 0)}, {send(s, false, 0)}}, err: nccl.ErrMixed, reason: "rank 0 passes a send buffer in registered memory (mem), rank 1 a send buffer in memory that can be registered but is not (mem)"},
		"one private":             {bufs: []bufs{{recv(s, false, 0)}, {recv(s, false, 0)}, {recv(p, false, 0)}}, err: nccl.ErrMixed, reason: "rank 2 a recv buffer in private memory"},
		"window demanded":         {bufs: []bufs{{send(s, true, 0)}, {send(s, true, 256)}}, require: nccl.Window, err: ErrMode, reason: "mode window is required, but the send buffer is at offset 256 on rank 1, 0 on rank 0"},
		"in windows":              {bufs: []bufs{{win(1, send(s, false, 8)), win(3, recv(s, false, 64))}, {win(1, send(s, false, 8)), win(3, recv(s, false, 64))}}, mode: nccl.Window},
		"one in windows": {bufs: []bufs{{send(s, false, 8), win(3, recv(s, false, 64))}, {win(1, send(s, false, 8)), win(3, recv(s, false, 64))}}, err: nccl.ErrMixed,
			reason: "rank 1 passes buffers in windows, rank 0 does not"},
		"half in windows": {bufs: []bufs{{send(s, false, 8), win(3, recv(s, false, 0))}, {send(s, false, 8), win(3, recv(s, false, 64))}}, mode: nccl.Graph},
		"in other windows": {bufs: []bufs{{win(1, send(s, false, 8)), win(3, recv(s, false, 64))}, {win(1, send(s, false, 8)), win(5, recv(s, false, 64))}}, err: nccl.ErrMixed,
			reason: "ranks 0 and 1 pass buffers in different windows"},
		"offsets in windows": {bufs: []bufs{{win(1, send(s, false, 8)), win(3, recv(s, false, 64))}, {win(1, send(s, false, 8)), win(3, recv(s, false, 128))}}, err: nccl.ErrMixed,
			reason: "the recv buffer is at offset 128 on rank 1, 64 on rank 0: the buffers are in windows"},
		"registration demanded":   {bufs: []bufs{{send(p, false, 0)}, {send(p, false, 0)}}, require: nccl.Graph, err: ErrMode, reason: "mode graph is required, but the send buffer is private memory"},
		"local for graph will do": {bufs: []bufs{{send(s, true, 0)}, {send(s, true, 8)}}, require: nccl.Graph, mode: nccl.Local},
	} {
		t.Run(name, func(t *testing.T) {
			call := tt.call
			if call.Op == 0 {
				call = reduce
			}
			c, d := chooseMode(call, tt.bufs, tt.require, tt.staged)
			if tt.err != nil {
				if d == nil {
					t.Fatalf("mode %v, want an error", c.mode)
				}
				if !errors.Is(d.err, tt.err) || !strings.Contains(d.text, tt.reason) {
					t.Errorf("difference %q (%v), want %q (%v)", d.text, d.err, tt.reason, tt.err)
				}
				return
			}
			if d != nil {
				t.Fatalf("difference %q, want mode %v", d.text, tt.mode)
			}
			if c.mode != tt.mode || !strings.Contains(c.reason, tt.reason) {
				t.Errorf("mode %v because %q, want %v because %q", c.mode, c.reason, tt.mode, tt.reason)
			}
		})
	}
}

func TestWeakest(t *testing.T) {
	for _, tt := range []struct {
		modes []nccl.Mode
		want  nccl.Mode
	}{
		{[]nccl.Mode{nccl.Window}, nccl.Window},
		{[]nccl.Mode{nccl.Window, nccl.Local}, nccl.Local},
		{[]nccl.Mode{nccl.Local, nccl.Graph}, nccl.Graph},
		{[]nccl.Mode{nccl.Graph, nccl.Local, nccl.Window}, nccl.Graph},
		{[]nccl.Mode{nccl.Graph, nccl.Plain, nccl.Window}, nccl.Plain},
	} {
		var cs []choice
		for _, m := range tt.modes {
			cs = append(cs, choice{mode: m})
		}
		if got := weakest(cs).mode; got != tt.want {
			t.Errorf("weakest of %v: %v, want %v", tt.modes, got, tt.want)
		}
	}
}

func TestComparePair(t *testing.T) {
	f := func(n uint64) transfer { return transfer{typ: cuda.Float32DType, count: n, place: "a.go:1"} }
	msg := func(sends, recvs []transfer) *message {
		return &message{kind: kindPair, sends: sends, recvs: recvs}
	}
	type ts = []transfer
	for name, tt := range map[string]struct {
		low, high  *message
		up, down   int
		difference string
	}{
		"send":              {low: msg(ts{f(1)}, nil), high: msg(nil, ts{f(1)}), up: 1},
		"exchange":          {low: msg(ts{f(1)}, ts{f(2)}), high: msg(ts{f(2)}, ts{f(1)}), up: 1, down: 1},
		"half of a group":   {low: msg(ts{f(1)}, nil), high: msg(ts{f(2)}, ts{f(1)}), up: 1},
		"two against one":   {low: msg(nil, ts{f(1), f(2)}), high: msg(ts{f(1)}, nil), down: 1},
		"count":             {low: msg(ts{f(1)}, nil), high: msg(nil, ts{f(2)}), difference: "rank 1 sends 1 float32 (a.go:1) to rank 4, which receives 2 float32 (a.go:1)"},
		"second count":      {low: msg(nil, ts{f(1), f(3)}), high: msg(ts{f(1), f(2)}, nil), difference: "rank 4 sends 2 float32 (a.go:1) to rank 1, which receives 3 float32 (a.go:1)"},
		"type":              {low: msg(ts{f(1)}, nil), high: msg(nil, ts{{typ: cuda.Int32DType, count: 1, place: "b.go:1"}}), difference: "rank 1 sends 1 float32 (a.go:1) to rank 4, which receives 1 int32 (b.go:1)"},
		"both send":         {low: msg(ts{f(1)}, nil), high: msg(ts{f(1)}, nil), difference: "rank 1 sends 1 float32 (a.go:1) to rank 4, rank 4 sends 1 float32 (a.go:1) to rank 1: make them one Group"},
		"both receive":      {low: msg(nil, ts{f(1)}), high: msg(nil, ts{f(1)}), difference: "rank 1 receives 1 float32 (a.go:1) from rank 4, rank 4 receives"},
		"different demands": {low: &message{kind: kindPair, require: nccl.Graph, sends: ts{f(1)}}, high: msg(nil, ts{f(1)}), difference: "rank 4 requires mode none, rank 1 graph"},
	} {
		t.Run(name, func(t *testing.T) {
			sent, received, d := comparePair(1, tt.low, 4, tt.high)
			sentHigh, receivedHigh, dHigh := comparePair(4, tt.high, 1, tt.low)
			if tt.difference != "" {
				if d == nil || dHigh == nil {
					t.Fatalf("differences %v and %v, want both", d, dHigh)
				}
				if d.text != dHigh.text || !strings.HasPrefix(d.text, tt.difference) {
					t.Errorf("differences %q and %q, want twice %q", d.text, dHigh.text, tt.difference)
				}
				return
			}
			if d != nil || dHigh != nil {
				t.Fatalf("differences %v and %v, want none", d, dHigh)
			}
			got, want := [4]int{sent, received, sentHigh, receivedHigh}, [4]int{tt.up, tt.down, tt.down, tt.up}
			if d := cmp.Diff(got, want); d != "" {
				t.Errorf("sent, received on both sides (-got +want):\n%s", d)
			}
		})
	}
}

func TestChoosePair(t *testing.T) {
	l := func(send bool, k cuda.AllocKind, registered bool, off uint64) nccl.LayoutInfo {
		return nccl.LayoutInfo{Send: send, Kind: k, Registered: registered, Offset: off, Memory: "mem"}
	}
	for name, tt := range map[string]struct {
		send, recv nccl.LayoutInfo
		require    nccl.Mode
		mode       nccl.Mode
		err        error
	}{
		"private":    {send: l(true, cuda.Private, false, 0), recv: l(false, cuda.Private, false, 0), mode: nccl.Plain},
		"graph":      {send: l(true, cuda.Shareable, false, 0), recv: l(false, cuda.Shareable, false, 9), mode: nccl.Graph},
		"local":      {send: l(true, cuda.Shareable, true, 0), recv: l(false, cuda.Shareable, true, 9), require: nccl.Window, mode: nccl.Local},
		"mixed":      {send: l(true, cuda.Shareable, true, 0), recv: l(false, cuda.Shareable, false, 0), err: nccl.ErrMixed},
		"one shares": {send: l(true, cuda.Private, false, 0), recv: l(false, cuda.Shareable, false, 0), mode: nccl.Plain},
		"demanded":   {send: l(true, cuda.Private, false, 0), recv: l(false, cuda.Private, false, 0), require: nccl.Graph, err: ErrMode},
	} {
		t.Run(name, func(t *testing.T) {
			c, d := choosePair(0, tt.send, 1, tt.recv, tt.require, "")
			if tt.err != nil {
				if d == nil || !errors.Is(d.err, tt.err) {
					t.Fatalf("mode %v, difference %v, want %v", c.mode, d, tt.err)
				}
				return
			}
			if d != nil || c.mode != tt.mode {
				t.Errorf("mode %v, difference %v, want %v", c.mode, d, tt.mode)
			}
		})
	}
}

func TestPairOrder(t *testing.T) {
	// All ranks walk the pairs in one order, so that a Group of sends to all cannot make a circle.
	const n = 5
	at := map[[2]int]int{}
	next := make([]int, n)
	for step := 0; step < 1000; step++ {
		for r := range n {
			if order := pairOrder(r, n); next[r] < n {
				peer := order[next[r]]
				pair := [2]int{min(r, peer), max(r, peer)}
				if peer == r {
					next[r]++
				} else if q := pairOrder(peer, n); next[peer] < n && q[next[peer]] == r {
					next[r]++
					next[peer]++
					at[pair]++
				}
			}
		}
	}
	if len(at) != n*(n-1)/2 {
		t.Errorf("%d pairs met, want %d: %v", len(at), n*(n-1)/2, next)
	}
}

func TestGraphKey(t *testing.T) {
	a, b := addHash(0, []byte("a")), addHash(0, []byte("b"))
	keys := map[uint64]bool{graphKey(a, 1): true, graphKey(a, 2): true, graphKey(b, 1): true, graphKey(b, 1<<60): true}
	if len(keys) != 4 {
		t.Errorf("keys of four graphs: %v", keys)
	}
}
