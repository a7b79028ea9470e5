package store

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// answers keeps the replies that a store gives.
type answers struct {
	s    *Store
	next uint64
	got  map[string]*Reply // by what was asked
}

func (a *answers) ask(as string, rank int, q Request) uint64 {
	a.next++
	if _, twice := a.got[as]; twice {
		panic(as)
	}
	a.got[as] = nil
	a.s.Start(rank, a.next, &q, func(r Reply) {
		if a.got[as] != nil {
			panic("second answer to " + as)
		}
		a.got[as] = &r
	})
	return a.next
}

// text is how a request stands.
func (a *answers) text(as string) string {
	r := a.got[as]
	switch {
	case r == nil:
		return "waits"
	case r.Err != nil && r.Err.Kind == Cancelled:
		return fmt.Sprintf("cancelled, missing %v", r.Err.Missing)
	case r.Err != nil:
		return r.Err.Error()
	}
	return fmt.Sprintf("%s", r.Values)
}

func (a *answers) want(t *testing.T, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	for as := range want {
		got[as] = a.text(as)
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("got -, want +:\n%s", diff)
	}
}

func newAnswers(t *testing.T, n int) *answers {
	s := New(make([]int, n))
	t.Cleanup(s.Close)
	for r := range n {
		if err := s.Join(r, "a"); err != nil {
			t.Fatal(err)
		}
	}
	return &answers{s: s, got: map[string]*Reply{}}
}

func gather(gen uint64, value string) Request {
	return Request{Kind: Gather, Name: "g", Gen: gen, Value: []byte(value)}
}

func TestGather(t *testing.T) {
	a := newAnswers(t, 3)
	a.ask("0", 0, gather(1, "x"))
	a.ask("2", 2, gather(1, "z"))
	a.ask("0 again", 0, gather(1, "x"))
	a.ask("stranger", 1, Request{Kind: Gather, Name: "pair", Ranks: []int{0, 2}, Gen: 1})
	a.want(t, map[string]string{
		"0": "waits", "2": "waits", "0 again": `group "g": rank 0 came twice to generation 1`,
		"stranger": `group "pair": rank 1 is not in it`,
	})
	// A rank may be a generation ahead.
	a.ask("2 ahead", 2, gather(2, "zz"))
	a.ask("1", 1, gather(1, "y"))
	a.want(t, map[string]string{"0": "[x y z]", "1": "[x y z]", "2": "[x y z]", "2 ahead": "waits"})
}

func TestCancel(t *testing.T) {
	a := newAnswers(t, 3)
	id := a.ask("0", 0, gather(1, "x"))
	a.s.Cancel(1, id) // another rank's
	a.want(t, map[string]string{"0": "waits"})
	a.s.Cancel(0, id)
	a.s.Cancel(0, id)
	a.want(t, map[string]string{"0": "cancelled, missing [1 2]"})
	// What was given stays.
	a.ask("1", 1, gather(1, "y"))
	a.ask("2", 2, gather(1, "z"))
	a.want(t, map[string]string{"1": "[x y z]", "2": "[x y z]"})

	id = a.ask("get", 0, Request{Kind: Get, Name: "k"})
	a.s.Cancel(0, id)
	a.want(t, map[string]string{"get": "cancelled, missing []"})
	a.ask("put", 1, Request{Kind: Put, Name: "k", Value: []byte("v")})
	a.ask("get again", 0, Request{Kind: Get, Name: "k"})
	a.want(t, map[string]string{"put": "[]", "get again": "[v]"})
}

func TestEnds(t *testing.T) {
	const exit3, left = "rank 1 (a) exited with code 3", "rank 2 (a) left the job"
	a := newAnswers(t, 4)
	a.ask("1", 1, gather(1, "y")) // it has given its value before it dies
	a.ask("2", 2, gather(1, "z"))
	a.ask("0 in 2", 0, gather(2, ""))
	a.ask("1 gets", 1, Request{Kind: Get, Name: "k"})
	a.s.Die(1, "a", "exited with code 3")
	a.want(t, map[string]string{"1": exit3, "2": "waits", "0 in 2": exit3, "1 gets": exit3})
	a.s.Leave(2, "a")
	a.ask("0", 0, gather(1, "x"))
	a.ask("3", 3, gather(1, "w"))
	a.want(t, map[string]string{"0": "[x y z w]", "3": "[x y z w]"})
	// Later waits fail at once and name the death, not who left because of it.
	a.ask("3 in 2", 3, gather(2, ""))
	a.ask("pair", 3, Request{Kind: Gather, Name: "pair", Ranks: []int{2, 3}, Gen: 1})
	a.want(t, map[string]string{"3 in 2": exit3, "pair": left})

	var got []string
	events, _ := a.s.Events(4)
	for _, e := range events {
		got = append(got, fmt.Sprint(e.Kind, e.End.Rank))
	}
	if diff := cmp.Diff(got, []string{fmt.Sprint(Died, 1), fmt.Sprint(Left, 2)}); diff != "" {
		t.Errorf("events, got -, want +:\n%s", diff)
	}
	if err := a.s.Join(1, "a"); err == nil || !strings.Contains(err.Error(), "rank 1 has ended") {
		t.Errorf("join after death: %v", err)
	}
	if err := a.s.Join(2, "a"); err == nil || !strings.Contains(err.Error(), "rank 2 has left") {
		t.Errorf("join after goodbye: %v", err)
	}
	// A failure after a goodbye is news.
	a.s.Die(2, "a", "exited with code 1")
	if _, end := a.s.Status(2); end == nil || end.Left || end.Cause != "exited with code 1" {
		t.Errorf("rank 2: %+v", end)
	}
}

func TestGone(t *testing.T) {
	s := New([]int{0, 0})
	defer s.Close()
	a := &answers{s: s, got: map[string]*Reply{}}
	s.Join(0, "a")
	a.ask("0", 0, gather(1, ""))
	s.Gone(1, "a")
	a.want(t, map[string]string{"0": "rank 1 (a) ended (exit code 0) without joining the job"})
	if events, _ := s.Events(0); len(events) != 1 {
		t.Errorf("events %v, want only the join of rank 0", events)
	}
}

// A value that nobody is left to put.
func TestOrphans(t *testing.T) {
	a := newAnswers(t, 3)
	a.ask("0", 0, Request{Kind: WaitID, Name: "id"})
	a.ask("1", 1, Request{Kind: WaitID, Name: "id"})
	a.want(t, map[string]string{"0": "waits", "1": "waits"})
	a.s.Die(2, "a", "killed by SIGKILL")
	const want = "rank 2 (a) killed by SIGKILL"
	a.ask("0 later", 0, Request{Kind: Get, Name: "other"})
	a.want(t, map[string]string{"0": want, "1": want, "0 later": "waits"})
	a.ask("1 later", 1, Request{Kind: Get, Name: "other"})
	a.want(t, map[string]string{"0 later": want, "1 later": want})
}

func TestGroupsAreForgotten(t *testing.T) {
	a := newAnswers(t, 3)
	for round := range 5 {
		for rank := range 3 {
			q := Request{Kind: Gather, Name: "g", Opening: uint32(round), Gen: 1, Ranks: []int{0, 1, 2}}
			a.ask(fmt.Sprint("meet", round, rank), rank, q)
		}
		for rank := range 3 {
			a.ask(fmt.Sprint("close", round, rank), rank, Request{Kind: CloseGroup, Name: "g", Opening: uint32(round)})
		}
	}
	// One member ends instead of closing.
	for rank := range 3 {
		a.ask(fmt.Sprint("last", rank), rank, Request{Kind: Gather, Name: "g", Opening: 9, Gen: 1, Ranks: []int{0, 1, 2}})
	}
	a.ask("close 0", 0, Request{Kind: CloseGroup, Name: "g", Opening: 9})
	a.s.Leave(1, "a")
	if len(a.s.groups) != 1 {
		t.Errorf("%d groups, want the one that rank 2 holds", len(a.s.groups))
	}
	a.ask("close 2", 2, Request{Kind: CloseGroup, Name: "g", Opening: 9})
	if len(a.s.groups) != 0 || len(a.s.pending) != 0 {
		t.Errorf("left over: %d groups, %d waits", len(a.s.groups), len(a.s.pending))
	}
}

// A value that is waited for and never put, as the failure of a communicator, leaves nothing behind when nobody waits for it any more.
func TestUnputValuesAreForgotten(t *testing.T) {
	a := newAnswers(t, 2)
	first := a.ask("0", 0, Request{Kind: Get, Name: "failure"})
	second := a.ask("1", 1, Request{Kind: Get, Name: "failure"})
	id := a.ask("id", 0, Request{Kind: WaitID, Name: "failure"})
	a.s.Cancel(0, first)
	a.s.Cancel(0, id)
	a.ask("put", 0, Request{Kind: Put, Name: "failure", Value: []byte("v")})
	a.want(t, map[string]string{"0": "cancelled, missing []", "id": "cancelled, missing []", "1": "[v]"})
	a.s.Cancel(1, second)
	for i := range 10 {
		a.s.Cancel(1, a.ask(fmt.Sprint("never", i), 1, Request{Kind: Get, Name: fmt.Sprint("never", i)}))
	}
	if len(a.s.keys) != 1 || len(a.s.ids) != 0 || len(a.s.pending) != 0 {
		t.Errorf("%d keys, %d ids and %d waits are left, want one key", len(a.s.keys), len(a.s.ids), len(a.s.pending))
	}
}

func meet(group string, ranks []int, what string) Request {
	return Request{Kind: Gather, Name: group, Ranks: ranks, Gen: 1, What: what}
}

func TestCycles(t *testing.T) {
	all := []int{0, 1, 2, 3}
	for _, c := range []struct {
		name  string
		meets []string // by rank: the group
		want  []string // by rank
	}{
		{"two", []string{"a", "b", "b", "a"}, []string{"0a 1b", "0a 1b", "0a 1b", "0a 1b"}},
		{"three, one apart", []string{"a", "b", "c", ""}, []string{"0a 1b", "0a 1b", "waits", ""}},
		{"no circle", []string{"a", "a", "a", ""}, []string{"waits", "waits", "waits", ""}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a := newAnswers(t, 4)
				defer a.s.Close()
				for rank, group := range c.meets {
					if group != "" {
						a.ask(fmt.Sprint(rank), rank, meet(group, all, group))
					}
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				for rank, want := range c.want {
					if want == "" {
						continue
					}
					got := a.text(fmt.Sprint(rank))
					if r := a.got[fmt.Sprint(rank)]; r != nil && r.Err != nil && r.Err.Kind == Cycle {
						var links []string
						for _, w := range r.Err.Waits {
							links = append(links, fmt.Sprintf("%d%s", w.Rank, w.What))
						}
						got = strings.Join(links, " ")
					}
					if got != want {
						t.Errorf("rank %d: got %q, want %q", rank, got, want)
					}
				}
			})
		})
	}
}

// A circle that does not last is none: a second goroutine of a rank comes.
func TestCycleThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAnswers(t, 2)
		defer a.s.Close()
		a.ask("0a", 0, meet("a", []int{0, 1}, "a"))
		a.ask("1b", 1, meet("b", []int{0, 1}, "b"))
		time.Sleep(cycleAge / 2)
		a.ask("0b", 0, meet("b", []int{0, 1}, "b"))
		a.ask("1a", 1, meet("a", []int{0, 1}, "a"))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		a.want(t, map[string]string{"0a": "[ ]", "1b": "[ ]", "0b": "[ ]", "1a": "[ ]"})
	})
}

// Ranks 0 and 1 wait in a circle of "a" and "b"; rank 1 also waits in "c" for rank 2, who may yet come and
// free it: no circle while that wait can end.
func TestRankWithTwoWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAnswers(t, 3)
		defer a.s.Close()
		a.ask("0a", 0, meet("a", []int{0, 1}, "a"))
		a.ask("1b", 1, meet("b", []int{0, 1}, "b"))
		a.ask("1c", 1, meet("c", []int{1, 2}, "c"))
		time.Sleep(2 * time.Second)
		synctest.Wait()
		a.want(t, map[string]string{"0a": "waits", "1b": "waits", "1c": "waits"})
	})
}

func TestReplica(t *testing.T) {
	a := newAnswers(t, 3)
	a.s.Die(1, "a", "exited with code 3")
	a.s.LoseHost(0, "a", "no answer")
	events, _ := a.s.Events(0)
	if got := events[len(events)-1].End.Cause; got != "was lost with its host a: no answer" {
		t.Errorf("cause %q", got)
	}
	r := New(make([]int, 3))
	defer r.Close()
	for range 2 { // applied twice they change nothing
		for _, e := range events {
			if err := r.Apply(e); err != nil {
				t.Fatal(err)
			}
		}
	}
	got, _ := r.Events(0)
	if diff := cmp.Diff(got, events); diff != "" {
		t.Errorf("got -, want +:\n%s", diff)
	}
	for _, e := range []Event{{Kind: Died, End: End{Rank: 3}}, {Kind: 9}, {Kind: HostLost, Node: 1, End: End{Rank: -1}}} {
		if err := r.Apply(e); err == nil {
			t.Errorf("%+v was accepted", e)
		}
	}
}

func TestBreak(t *testing.T) {
	a := newAnswers(t, 2)
	a.ask("0", 0, gather(1, ""))
	a.s.Break("the node has ended")
	a.ask("1", 1, gather(1, ""))
	a.want(t, map[string]string{"0": "the node has ended", "1": "the node has ended"})
}

func TestNamedRanks(t *testing.T) {
	many := make([]int, 20)
	hosts := make([]string, 20)
	for i := range many {
		many[i], hosts[i] = 2*i, string(rune('a'+i))
	}
	for _, c := range []struct {
		ranks []int
		hosts []string
		want  string
	}{
		{[]int{3}, nil, "rank 3"},
		{[]int{3, 4}, nil, "ranks 3,4"},
		{[]int{3}, []string{"b"}, "rank 3 (host b)"},
		{[]int{3}, []string{""}, "rank 3"},
		{[]int{3, 4, 6, 7, 8}, []string{"b", "b", "b", "c", "c"}, "ranks 3,4,6 (host b), ranks 7,8 (host c)"},
		{[]int{3, 4}, []string{"b"}, "ranks 3,4"},
		{many, hosts, "rank 0 (host a), rank 2 (host b), rank 4 (host c), rank 6 (host d), rank 8 (host e), rank 10 (host f), rank 12 (host g), " +
			"ranks 14,16,18,20,22,24,26,28,30,32,34,36,38"},
	} {
		if got := NamedRanks(c.ranks, c.hosts); got != c.want {
			t.Errorf("%v on %q: got %q, want %q", c.ranks, c.hosts, got, c.want)
		}
	}
}
