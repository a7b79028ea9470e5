package launcher

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// However often a job is started again, what is kept of it has a bound: the first attempt, the last ones, and the stacks of one.
func TestAttemptsAreBounded(t *testing.T) {
	numbers := func(all []*Account) string { // those with stacks in brackets
		var out []string
		for _, a := range all {
			n := fmt.Sprint(a.Restarts)
			if a.Hang != nil && len(a.Hang.Ranks) > 0 {
				n = "[" + n + "]"
			}
			out = append(out, n)
		}
		return strings.Join(out, " ")
	}
	var past attempts
	for k, want := range []struct {
		kept string
		out  int
	}{
		0: {"", 0}, 1: {"0", 0}, 2: {"0 [1]", 0}, 3: {"0 1 [2]", 0}, 10: {"0 1 [2] 3 4 5 6 7 8 9", 0}, 11: {"0 [2] 3 4 5 6 7 8 9 10", 1}, 12: {"0 3 4 5 6 7 8 9 10 11", 2},
		1000: {"0 991 992 993 994 995 996 997 998 999", 990},
	} {
		acct := &Account{Restarts: k, Ranks: make([]RankAccount, 1)}
		if k == 1 || k == 2 {
			acct.Hang = &Hang{Lines: make([]string, 1<<10), Ranks: make([]RankStacks, 1)}
		}
		past.tell(acct)
		if got := numbers(acct.Attempts); (want.kept != "" || k == 0) && (got != want.kept || acct.LeftOut != want.out) {
			t.Errorf("attempt %d: kept %q, %d left out, want %q, %d", k, got, acct.LeftOut, want.kept, want.out)
		}
		past.add(acct)
		if h := acct.Hang; h != nil {
			if n := len(h.Lines); n != attemptLines+1 || h.Lines[n-1] != "and 824 more lines" {
				t.Errorf("attempt %d: %d lines kept, the last %q", k, n, h.Lines[n-1])
			}
		}
		for _, a := range past.kept {
			if a.Attempts != nil || a.LeftOut != 0 {
				t.Fatalf("attempt %d keeps those before it", a.Restarts)
			}
		}
	}
}

func TestFailures(t *testing.T) {
	for _, c := range []struct {
		restarts Restarts
		k        int
		seconds  []int // when attempts failed
		failed   bool  // the last one did, at the last of these
		may      bool
		used     string
	}{
		{Restarts{}, 0, []int{1}, true, false, ""},
		{Restarts{N: 1}, 0, []int{1}, true, true, ""},
		{Restarts{N: 1}, 1, []int{1, 1000}, true, false, "restarted once; given up after 2 failures"},
		{Restarts{N: 2}, 1, []int{1, 1000}, true, true, "restarted once"},
		{Restarts{N: 1}, 1, []int{1}, false, true, "restarted once"},
		{Restarts{N: 0}, 1, []int{1}, false, false, "restarted once"},
		{Restarts{N: 2}, 2, []int{1, 2, 3}, true, false, "restarted 2 times; given up after 3 failures"},
		{Restarts{1, time.Minute}, 1, []int{1, 60}, true, false, "restarted once; given up after 2 failures within 1m0s"},
		{Restarts{1, time.Minute}, 1, []int{1, 61}, true, true, "restarted once"},
		{Restarts{1, time.Minute}, 3, []int{1, 61, 121, 200}, true, true, "restarted 3 times"},
		{Restarts{2, time.Minute}, 3, []int{1, 100, 120, 140}, true, false, "restarted 3 times; given up after 3 failures within 1m0s"},
	} {
		f := failures{restarts: c.restarts}
		for _, s := range c.seconds {
			f.add(time.Unix(int64(s), 0))
		}
		if may, used := f.mayRestart(), f.used(c.k, c.failed); may != c.may || used != c.used {
			t.Errorf("%+v, failures at %v: %v, %q, want %v, %q", c.restarts, c.seconds, may, used, c.may, c.used)
		}
	}
	// Those that do not count any more take no memory.
	f := failures{restarts: Restarts{1, time.Second}}
	for i := range 10_000 {
		f.add(time.Unix(0, int64(i)*int64(time.Millisecond)))
	}
	if d := cmp.Diff([]int{f.n, len(f.times)}, []int{1000, 1000}); d != "" || cap(f.times) > 4096 {
		t.Errorf("-got +want:\n%s; room for %d", d, cap(f.times))
	}
}
