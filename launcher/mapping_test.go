package launcher

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlace(t *testing.T) {
	hosts := func(list string) []Host {
		h, err := ParseHosts(list)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	node, ppr2 := MapBy{Node: true}, MapBy{PPR: 2}
	limited := []Host{{Name: "a", Slots: 1, MaxSlots: 2}, {Name: "b", Slots: 2}, {Name: "c", Slots: 1, MaxSlots: 1}}
	for _, c := range []struct {
		name  string
		np    int
		hosts []Host
		m     MapBy
		over  bool
		want  []int
	}{
		{"every slot", 0, hosts("a:2,b:3"), MapBy{}, false, []int{0, 0, 1, 1, 1}},
		{"a host without a number has one", 0, hosts("a,b"), MapBy{}, false, []int{0, 1}},
		{"filled in order", 3, hosts("a:2,b:3"), MapBy{}, false, []int{0, 0, 1}},
		{"by node", 0, hosts("a:1,b:3,c:2"), node, false, []int{0, 1, 2, 1, 2, 1}},
		{"by node, fewer", 2, hosts("a:4,b:4,c:4"), node, false, []int{0, 1}},
		{"by node, too many", 6, hosts("a:1,b:2"), node, true, []int{0, 1, 0, 1, 0, 1}},
		{"ppr", 0, hosts("a,b"), ppr2, false, []int{0, 0, 1, 1}},
		{"ppr with fewer ranks", 3, hosts("a:4,b:4"), ppr2, false, []int{0, 0, 1}},
		{"ppr with more than the slots", 0, hosts("a:1,b"), ppr2, true, []int{0, 0, 1, 1}},
		{"oversubscribed evenly", 8, hosts("a:2,b:1,c:1"), MapBy{}, true, []int{0, 0, 0, 0, 1, 1, 2, 2}},
		{"max_slots", 6, limited, MapBy{}, true, []int{0, 0, 1, 1, 1, 2}},
		{"max_slots by node", 6, limited, node, true, []int{0, 1, 2, 0, 1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := place(c.np, c.hosts, c.m, c.over)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(got, c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}

	for _, c := range []struct {
		name  string
		np    int
		hosts []Host
		m     MapBy
		over  bool
		want  string
	}{
		{"few slots", 9, hosts("a:4,me@b:4"), MapBy{}, false, "9 ranks, but the 2 hosts have 8 slots (a 4, b 4); give their slots (-H a:5,me@b:4), or --oversubscribe"},
		{"one host", 2, hosts("a"), node, false, "2 ranks, but host a has 1 slot; give their slots (-H a:2), or --oversubscribe"},
		{"many hosts", 20, hosts("a,b,c,d,e,f,g,h,i,j"), MapBy{}, false,
			"20 ranks, but the 10 hosts have 10 slots (a 1, b 1, c 1, d 1, e 1, f 1, g 1, h 1, 2 more); give their slots (-H host:slots, slots= in a hostfile), or --oversubscribe"},
		{"ppr above the slots", 0, hosts("a:4,b:1"), ppr2, false, "2 ranks on each host, but host b has 1 slot; give it more slots, or --oversubscribe"},
		{"ppr and more ranks", 5, hosts("a,b"), ppr2, true, "5 ranks, but 2 hosts with 2 each take 4; leave -np away, or give another ppr"},
		{"ppr above max_slots", 0, limited, MapBy{PPR: 2}, true, "2 ranks on each host, but host c takes 1 at most (max_slots)"},
		{"above all max_slots", 4, []Host{{Name: "a", MaxSlots: 3}}, MapBy{}, true, "4 ranks, but the hosts take 3 at most (max_slots)"},
		{"far too many", 0, hosts("a:16384,b:16384"), MapBy{}, false, "number of ranks 32768: must be from 1 to 16384"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := place(c.np, c.hosts, c.m, c.over)
			if _, ok := errors.AsType[*UsageError](err); !ok || err.Error() != c.want {
				t.Errorf("got (%T)\n  %v, want\n  %s", err, err, c.want)
			}
		})
	}
}

func TestParseMapBy(t *testing.T) {
	for s, want := range map[string]MapBy{"slot": {}, "node": {Node: true}, "ppr:4:node": {PPR: 4}} {
		got, err := ParseMapBy(s)
		if err != nil || got != want || got.String() != s {
			t.Errorf("%s: got %v, %v", s, got, err)
		}
	}
	for s, want := range map[string]string{
		"":                   `"" must be slot, node or ppr:N:node`,
		"ppr:0:node":         `"ppr:0:node" must be ppr:N:node, N ranks on each host`,
		"ppr:2:socket":       `"ppr:2:socket" must be ppr:N:node, N ranks on each host`,
		"slot:OVERSUBSCRIBE": `"slot:OVERSUBSCRIBE" must be slot, and --oversubscribe`,
		"numa:PE=4":          `"numa:PE=4" must be slot, node or ppr:N:node: ranks are placed on hosts, and bound to a part of one by --bind-to core or numa`,
	} {
		if got, err := ParseMapBy(s); err == nil || err.Error() != want {
			t.Errorf("%q: got %v, %v, want %s", s, got, err, want)
		}
	}
}

// Whatever is asked for: every rank has a host, no host gets more than it takes, and ranks on one host are stable.
func FuzzPlace(f *testing.F) {
	f.Add(uint16(4), []byte{2, 2, 1, 3}, uint8(0), false)
	f.Add(uint16(0), []byte{2, 0, 1, 1}, uint8(1), true)
	f.Add(uint16(9), []byte{2, 4, 0, 0}, uint8(3), true)
	f.Fuzz(func(t *testing.T, np uint16, sizes []byte, how uint8, over bool) {
		var hosts []Host
		for i := 0; i+1 < len(sizes) && i < 64; i += 2 {
			h := Host{Name: "h", Slots: int(sizes[i] % 8), MaxSlots: int(sizes[i+1] % 16)}
			if h.MaxSlots > 0 && h.MaxSlots < h.slots() {
				continue
			}
			hosts = append(hosts, h)
		}
		if len(hosts) == 0 {
			return
		}
		m := MapBy{Node: how == 1}
		if how > 1 {
			m.PPR = int(how - 1)
		}
		on, err := place(int(np), hosts, m, over)
		if err != nil {
			if _, ok := errors.AsType[*UsageError](err); !ok {
				t.Fatalf("%v is a %T", err, err)
			}
			return
		}
		if np > 0 && len(on) != int(np) || len(on) == 0 {
			t.Fatalf("%d ranks, want %d", len(on), np)
		}
		n := make([]int, len(hosts))
		for r, i := range on {
			n[i]++
			if !m.Node && r > 0 && i < on[r-1] {
				t.Fatalf("rank %d is on host %d, the one before it on %d", r, i, on[r-1])
			}
		}
		for i, h := range hosts {
			limit := h.slots()
			switch {
			case m.PPR > 0 && h.Slots == 0:
				limit = m.PPR
			case over && h.MaxSlots > 0:
				limit = h.MaxSlots
			case over:
				limit = MaxNP
			}
			if n[i] > limit {
				t.Fatalf("host %d has %d ranks and takes %d: %+v", i, n[i], limit, h)
			}
		}
	})
}
