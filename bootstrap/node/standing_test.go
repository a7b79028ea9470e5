package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
)

// standings are those of all hosts, as they come to the launcher.
func (c *cluster) standings() []Standing {
	c.t.Helper()
	var all []Standing
	for _, n := range c.nodes {
		b, err := json.Marshal(n.Standings())
		if err != nil {
			c.t.Fatal(err)
		}
		var some []Standing
		if err := json.Unmarshal(b, &some); err != nil {
			c.t.Fatal(err)
		}
		all = append(all, some...)
	}
	return all
}

// Who waits in a barrier, or in a collective, for a rank that does not come is told without a word of the ranks.
func TestStandings(t *testing.T) {
	c := newCluster(t, true, 2, 2)
	c.startAll()
	c.ready()
	c.joinAll()
	hosts := []string{"a", "b"}
	standings := func() []Standing {
		all := c.standings()
		for _, s := range all {
			for i := range s.Waits {
				s.Waits[i].For = min(s.Waits[i].For, 41*time.Second) // the test itself may take some
			}
		}
		return all
	}
	report := func() string { return strings.Join(Report(standings(), c.nodeOf, hosts), "\n") }
	if got := report(); got != "" {
		t.Errorf("nobody waits, and the report is %q", got)
	}

	// Collectives: all but rank 3 are in the second.
	for _, j := range c.jobs {
		l, err := j.Ledger(j.Rank())
		if err != nil {
			t.Fatal(err)
		}
		a, err := l.OpenAccount(77)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Release()
		a.SetName("world")
		a.Append(bootstrap.Enqueued, [2]uint64{3, 8}) // broadcast
		a.SetDone(1)
		if j.Rank() == 3 {
			defer a.SetBusy("")
			continue
		}
		a.Append(bootstrap.Enqueued, [2]uint64{1, 8}) // all-reduce
		a.SetWait(2, 41*time.Second)
		a.SetWait(2, time.Second) // the same wait, as it was before
	}
	want := "rank 3 of 4 (host b) has not entered all-reduce #2 on communicator world: it was last seen in broadcast #1; ranks 0-2 wait for it since 41 s"
	if diff := cmp.Diff(report(), want); diff != "" {
		t.Errorf("got -, want +\n%s", diff)
	}

	// A barrier: rank 0 alone has come. What a rank only listens for is no wait.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ended := make(chan error, 2)
	go func() { ended <- c.jobs[0].Barrier(ctx) }()
	go func() {
		_, err := c.jobs[2].Listen(ctx, "failure")
		ended <- err
	}()
	until(t, "rank 0 waits", func() bool { return strings.Contains(report(), "barrier") })
	lines := Report(standings(), c.nodeOf, hosts)
	if len(lines) != 2 || !strings.HasPrefix(lines[1], "ranks 1-3 of 4 have not entered barrier #1 of group world: "+
		"rank 1 (host a) waits in all-reduce #2 on communicator world since 41 s, rank 2 (host b) waits in all-reduce #2 on communicator world since 41 s, "+
		"rank 3 (host b) was last seen in broadcast #1 on communicator world; rank 0 waits for them since ") {
		t.Errorf("got %q", lines)
	}
	for _, j := range c.jobs[1:] {
		go func() { ended <- j.Barrier(ctx) }()
	}
	if err := c.jobs[2].Put(ctx, "failure", nil); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	until(t, "nobody waits in the barrier", func() bool { return !strings.Contains(report(), "barrier") })

	// A rank that has ended.
	c.nodes[1].RankExited(3, 1, "exited with code 1")
	want = "rank 3 of 4 (host b) has not entered all-reduce #2 on communicator world: it has ended; ranks 0-2 wait for it since 41 s"
	if diff := cmp.Diff(report(), want); diff != "" {
		t.Errorf("got -, want +\n%s", diff)
	}
}

func TestReport(t *testing.T) {
	waits := func(rank int, what, group string, d time.Duration, members ...int) Standing {
		w := Wait{What: what, For: d, Group: group}
		for _, m := range members {
			w.Members = append(w.Members, [2]int{m, 1})
		}
		return Standing{Rank: rank, Waits: []Wait{w}}
	}
	s := time.Second
	message := func(rank, other int, recv bool, d time.Duration) Standing {
		what := fmt.Sprintf("send of 8 float32, to rank %d on communicator world", other)
		if recv {
			what = fmt.Sprintf("recv of 8 float32, from rank %d on communicator world", other)
		}
		st := waits(rank, what, "", d)
		st.Waits[0].Other, st.Waits[0].Recv = other+1, recv
		return st
	}
	var ring []Standing
	for r := range 20 {
		ring = append(ring, message(r, (r+1)%20, true, 3*s))
	}
	many := make([]Standing, 0, 1000)
	for r := range 1000 {
		if r%100 != 7 {
			many = append(many, waits(r, "barrier #1 of group world", "w", 12*s))
		} else {
			many = append(many, Standing{Rank: r, Seen: []Seen{{Comm: 1, Name: "world"}}})
		}
	}
	for _, tc := range []struct {
		name string
		all  []Standing
		size int
		want []string
	}{
		{"nothing", nil, 4, nil},
		{"a rank of a host without answer", []Standing{waits(0, "init of communicator world", "i", 3*s)}, 2,
			[]string{"rank 1 of 2 (host b) has not entered init of communicator world: it has sent no word; rank 0 waits for it since 3.0 s"}},
		{"a part of the ranks", []Standing{waits(1, "barrier #1 of group pair", "p", 3*s, 1, 3), {Rank: 3, State: "has not joined"}}, 4,
			[]string{"rank 3 of 4 (host b) has not entered barrier #1 of group pair: it has not joined; rank 1 waits for it since 3.0 s"}},
		{"two operations", []Standing{waits(0, "barrier #1 of group world", "w", 3*s), waits(1, "init of communicator world", "i", 20*s)}, 2, []string{
			"rank 0 of 2 (host a) has not entered init of communicator world: it waits in barrier #1 of group world since 3.0 s; rank 1 waits for it since 20 s",
			"rank 1 of 2 (host b) has not entered barrier #1 of group world: it waits in init of communicator world since 20 s; rank 0 waits for it since 3.0 s"}},
		{"of no group", []Standing{waits(0, `get "x"`, "", 3*s), waits(1, `get "x"`, "", 4*s)}, 4, []string{`ranks 0,1 of 4: in get "x" since 4.0 s`}},
		{"all have come", []Standing{waits(0, "barrier #1 of group world", "w", 3*s), waits(1, "barrier #1 of group world", "w", 3*s)}, 2,
			[]string{"ranks 0,1 of 2: in barrier #1 of group world since 3.0 s, as all that take part"}},
		{"thousand", many, 1000, []string{"ranks 7,107,207,307,407,507,607,707,807,907 of 1000 have not entered barrier #1 of group world: " +
			"rank 7 has entered no collective of communicator world, rank 107 has entered no collective of communicator world, " +
			"rank 207 has entered no collective of communicator world, rank 307 has entered no collective of communicator world, and 6 more; " +
			"ranks 0-6,8-106,108-206,208-306,308-406,408-506,508-606,608-706,708-806,808-906,908-999 wait for them since 12 s"}},
		{"a circle of sends, and two that wait for it", []Standing{message(0, 1, false, 3*s), message(2, 3, false, 12*s), message(3, 1, false, 4*s), message(1, 2, false, 5*s)}, 4, []string{
			"ranks 1 -> 2 -> 3 -> 1 of 4 all wait in Send, each to the next, since 12 s: rank 1 (host a) in send of 8 float32, to rank 2 on communicator world, " +
				"rank 2 (host b) in send of 8 float32, to rank 3 on communicator world, rank 3 (host b) in send of 8 float32, to rank 1 on communicator world",
			"rank 0 (host a) of 4: in send of 8 float32, to rank 1 on communicator world since 3.0 s"}},
		{"two circles", []Standing{message(0, 1, true, 3*s), message(1, 0, true, 3*s), message(2, 3, true, 4*s), message(3, 2, true, 3*s)}, 4, []string{
			"ranks 2 -> 3 -> 2 of 4 all wait in Recv, each from the next, since 4.0 s: rank 2 (host b) in recv of 8 float32, from rank 3 on communicator world, " +
				"rank 3 (host b) in recv of 8 float32, from rank 2 on communicator world",
			"ranks 0 -> 1 -> 0 of 4 all wait in Recv, each from the next, since 3.0 s: rank 0 (host a) in recv of 8 float32, from rank 1 on communicator world, " +
				"rank 1 (host a) in recv of 8 float32, from rank 0 on communicator world"}},
		{"a circle of many", ring, 20, []string{
			"ranks 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> 8 -> 9 -> 10 -> 11 -> 12 -> 13 -> 14 -> (5 more) -> 0 of 20 all wait in Recv, each from the next, since 3.0 s: " +
				"rank 0 (host a) in recv of 8 float32, from rank 1 on communicator world, rank 1 (host a) in recv of 8 float32, from rank 2 on communicator world, " +
				"rank 2 (host a) in recv of 8 float32, from rank 3 on communicator world, rank 3 (host a) in recv of 8 float32, from rank 4 on communicator world, and 16 more"}},
		{"both ends of a message", []Standing{message(0, 1, false, 3*s), message(1, 0, true, 4*s)}, 2, []string{
			"rank 1 (host b) of 2: in recv of 8 float32, from rank 0 on communicator world since 4.0 s",
			"rank 0 (host a) of 2: in send of 8 float32, to rank 1 on communicator world since 3.0 s"}},
		{"a message with a rank out of range", []Standing{message(0, 7, false, 3*s)}, 2, []string{"rank 0 (host a) of 2: in send of 8 float32, to rank 7 on communicator world since 3.0 s"}},
		{"a rank out of range", []Standing{waits(9, "x", "", s), waits(-1, "x", "", s)}, 4, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			nodeOf := make([]int, tc.size)
			for r := range nodeOf {
				nodeOf[r] = r * 2 / tc.size
			}
			hosts := []string{"a", "b"}
			if tc.size == 1000 {
				hosts = nil
			}
			if diff := cmp.Diff(Report(tc.all, nodeOf, hosts), tc.want); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
	var lines []Standing
	for r := range 100 {
		lines = append(lines, waits(r, "get "+strings.Repeat("x", r), "", time.Duration(100-r)*s))
	}
	if got := Report(lines, make([]int, 100), nil); len(got) != maxLines || !slices.Contains(got, "and 81 more operations that ranks wait in") {
		t.Errorf("%d lines, the last %q", len(got), got[len(got)-1])
	}
}

// A host asks its ranks for their stacks; those that do not answer are left out.
func TestStacks(t *testing.T) {
	c := newCluster(t, true, 2, 2)
	c.startAll()
	c.ready()
	c.joinAll()
	// Behind the barrier every host has seen its ranks' hello through.
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error { return j.Barrier(ctx) }))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for host, want := range [][]int{{0, 1}, {2, 3}} {
		all := c.nodes[host].Stacks(ctx)
		if got := slices.Sorted(maps.Keys(all)); !slices.Equal(got, want) {
			t.Errorf("host %d: stacks of ranks %v, want %v", host, got, want)
		}
		for rank, text := range all {
			if !strings.HasPrefix(string(text), "goroutine ") || !strings.Contains(string(text), "TestStacks") {
				t.Errorf("rank %d: %.200q", rank, text)
			}
		}
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	c.nodes[0].Stacks(over) // returns
}
