package launcher

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

// ended makes the account of a rank.
func ended(rank, order int, s exitStatus, stopped string) RankAccount {
	return RankAccount{Rank: rank, Host: "a", PID: 100 + rank, Start: time.Unix(9, 0), End: time.Unix(10, int64(order)*1e6), status: s, done: true, order: order, Stopped: stopped}
}

func TestSettle(t *testing.T) {
	ok := exitStatus{}
	code := func(n int) exitStatus { return exitStatus{Code: n} }
	sig := func(s syscall.Signal) exitStatus { return exitStatus{Signal: s} }
	lost := ended(2, 1, ok, "")
	lost.Joined = true
	left := lost
	left.Left = true
	late := ended(2, 2, ok, "")
	late.Joined = true
	heard := func(r RankAccount, n int) RankAccount { r.heard, r.Joined, r.Left = n, true, true; return r }
	alien := func(r RankAccount, n int) RankAccount { r.heard = n; return r }
	much := func(r RankAccount) RankAccount { r.End = r.End.Add(time.Minute); return r }
	for _, c := range []struct {
		name      string
		reason    Reason
		ranks     []RankAccount
		interrupt syscall.Signal
		cannot    int
		code      int
		cause     int
	}{
		{"all well", ReasonDone, []RankAccount{ended(0, 1, ok, ""), ended(1, 2, ok, "")}, 0, 0, 0, -1},
		{"first failure wins", ReasonFailed, []RankAccount{ended(0, 3, code(1), ""), ended(1, 2, code(7), ""), ended(2, 1, ok, "")}, 0, 0, 7, 1},
		{"signal", ReasonFailed, []RankAccount{ended(0, 2, sig(syscall.SIGTERM), "SIGTERM"), ended(1, 1, sig(syscall.SIGSEGV), "")}, 0, 0, 139, 1},
		{"codes are not mixed", ReasonFailed, []RankAccount{ended(0, 1, code(1), ""), ended(1, 2, code(2), "SIGTERM")}, 0, 0, 1, 0},
		{"silent end before", ReasonFailed, []RankAccount{ended(0, 2, code(1), ""), ended(1, 3, code(1), "SIGTERM"), lost}, 0, 0, 1, 2},
		{"goodbye is no cause", ReasonFailed, []RankAccount{ended(0, 2, code(1), ""), left}, 0, 0, 1, 0},
		{"silent end after", ReasonFailed, []RankAccount{ended(0, 1, code(4), ""), late}, 0, 0, 4, 0},
		{"goodbye, then failure", ReasonFailed, []RankAccount{heard(ended(0, 1, code(1), ""), 2), heard(ended(1, 2, code(7), ""), 1)}, 0, 0, 7, 1},
		{"connection lost first, process gone last", ReasonFailed, []RankAccount{heard(ended(0, 1, code(1), ""), 2), heard(ended(1, 2, sig(syscall.SIGSEGV), ""), 1)}, 0, 0, 139, 1},
		{"heard of late, from another host", ReasonFailed, []RankAccount{alien(ended(0, 2, code(1), ""), 1), alien(ended(1, 1, sig(syscall.SIGSEGV), ""), 2)}, 0, 0, 139, 1},
		{"goodbye, and a failure much later", ReasonFailed, []RankAccount{heard(ended(0, 1, code(1), ""), 2), much(heard(ended(1, 2, code(7), ""), 1))}, 0, 0, 1, 0},
		{"not heard of", ReasonFailed, []RankAccount{heard(ended(0, 2, code(1), ""), 1), ended(1, 1, code(7), "")}, 0, 0, 7, 1},
		{"timeout", ReasonTimeout, []RankAccount{ended(0, 1, sig(syscall.SIGTERM), "SIGTERM")}, 0, 0, 124, -1},
		{"ctrl-c", ReasonSignal, []RankAccount{ended(0, 1, ok, "SIGINT")}, syscall.SIGINT, 0, 130, -1},
		{"term", ReasonSignal, []RankAccount{ended(0, 1, ok, "SIGTERM")}, syscall.SIGTERM, 0, 143, -1},
		{"missing", ReasonCannotRun, nil, 0, 127, 127, -1},
		{"reader gone", ReasonReader, nil, 0, 0, 141, -1},
		{"gorun", ReasonInternal, nil, 0, 0, 125, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := &Account{Reason: c.reason, Ranks: c.ranks}
			a.settle(c.interrupt, c.cannot)
			if a.Code != c.code || a.Cause != c.cause {
				t.Errorf("got code %d, cause %d, want %d, %d", a.Code, a.Cause, c.code, c.cause)
			}
		})
	}
}

// The ranks' own words about each other come before the order of their ends.
func TestOrigin(t *testing.T) {
	ok, one, two := exitStatus{}, exitStatus{Code: 1}, exitStatus{Code: 2}
	for _, c := range []struct {
		name  string
		ranks []RankAccount
		said  []node.Suspicion
		code  int
		cause int
	}{
		{"blamed by the first", []RankAccount{ended(0, 1, one, ""), ended(1, 2, two, ""), ended(2, 3, one, "")}, []node.Suspicion{{By: 0, Rank: 1}}, 2, 1},
		{"blamed by another", []RankAccount{ended(0, 1, one, ""), ended(1, 2, two, ""), ended(2, 3, one, "")}, []node.Suspicion{{By: 2, Rank: 1}}, 2, 1},
		{"in turn", []RankAccount{ended(0, 1, one, ""), ended(1, 2, one, ""), ended(2, 3, two, "")}, []node.Suspicion{{By: 0, Rank: 1}, {By: 1, Rank: 2}}, 2, 2},
		{"each other", []RankAccount{ended(0, 1, one, ""), ended(1, 2, two, "")}, []node.Suspicion{{By: 0, Rank: 1}, {By: 1, Rank: 0}}, 2, 1},
		{"the first is blamed", []RankAccount{ended(0, 1, two, ""), ended(1, 2, one, ""), ended(2, 3, one, "")}, []node.Suspicion{{By: 2, Rank: 1}, {By: 1, Rank: 0}}, 2, 0},
		{"ended well", []RankAccount{ended(0, 1, one, ""), ended(1, 2, ok, "")}, []node.Suspicion{{By: 0, Rank: 1}}, 1, 0},
		{"ended by gorun", []RankAccount{ended(0, 1, one, ""), ended(1, 2, exitStatus{Signal: syscall.SIGTERM}, "SIGTERM")}, []node.Suspicion{{By: 0, Rank: 1}}, 1, 0},
		{"the second reason", []RankAccount{ended(0, 1, one, ""), ended(1, 2, ok, ""), ended(2, 3, two, "")}, []node.Suspicion{{By: 0, Rank: 1}, {By: 0, Rank: 2}}, 2, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := &Account{Reason: ReasonFailed, Ranks: c.ranks, suspicions: c.said}
			a.settle(0, 0)
			if a.Code != c.code || a.Cause != c.cause {
				t.Errorf("got code %d, cause %d, want %d, %d", a.Code, a.Cause, c.code, c.cause)
			}
		})
	}
}

func TestSummary(t *testing.T) {
	start := time.Unix(9, 0)
	failed := ended(1, 1, exitStatus{Code: 3}, "")
	failed.tail = []byte("one\ntwo\npanic: bad\n")
	shown := failed
	shown.shown = true
	silent := ended(1, 1, exitStatus{}, "")
	silent.Joined = true
	never := RankAccount{Rank: 3, Host: "a"}
	for _, c := range []struct {
		name   string
		reason Reason
		err    string
		ranks  []RankAccount
		want   string
	}{
		{"done", ReasonDone, "", nil, ""},
		{"failed", ReasonFailed, "", []RankAccount{ended(0, 2, exitStatus{Signal: syscall.SIGTERM}, "SIGTERM"), failed, ended(2, 3, exitStatus{Code: 1}, "SIGTERM"), never}, `
gorun: rank 1 (host a, pid 101) exited with code 3 after 1.001s
  its last lines on stderr:
    one
    two
    panic: bad
  then: rank 0 ended by gorun (SIGTERM); rank 2 exited with code 1; rank 3 not started
`},
		{"lines of both, merged", ReasonFailed, "", []RankAccount{ended(0, 2, exitStatus{Signal: syscall.SIGTERM}, "SIGTERM"), failed}, `
gorun: rank 1 (host a, pid 101) exited with code 3 after 1.001s
  its last lines:
    one
    two
    panic: bad
  then: rank 0 ended by gorun (SIGTERM)
`},
		{"lines were just shown", ReasonFailed, "", []RankAccount{ended(0, 2, exitStatus{Signal: syscall.SIGKILL}, "SIGKILL"), shown}, `
gorun: rank 1 (host a, pid 101) exited with code 3 after 1.001s
  then: rank 0 ended by gorun (SIGKILL)
`},
		{"one rank", ReasonFailed, "", []RankAccount{ended(0, 1, exitStatus{Signal: syscall.SIGSEGV, Core: true}, "")}, `
gorun: rank 0 (host a, pid 100) was killed by SIGSEGV (core dumped) after 1.001s
`},
		{"silent end", ReasonFailed, "", []RankAccount{ended(0, 2, exitStatus{Code: 1}, ""), silent}, `
gorun: rank 1 (host a, pid 101) exited with code 0 after 1.001s without leaving the job (Job.Close), which is a death to the other ranks
  then: rank 0 exited with code 1
`},
		{"timeout", ReasonTimeout, "the job has run for 1s", []RankAccount{ended(0, 1, exitStatus{Signal: syscall.SIGTERM}, "SIGTERM"), ended(1, 2, exitStatus{Signal: syscall.SIGTERM}, "SIGTERM")}, `
gorun: timeout: the job has run for 1s
  then: ranks 0,1 ended by gorun (SIGTERM)
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := &Account{Start: start, Reason: c.reason, Error: c.err, Ranks: c.ranks, merged: strings.HasSuffix(c.name, "merged")}
			a.settle(0, 0)
			if d := cmp.Diff(a.Summary(), strings.TrimPrefix(c.want, "\n")); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}

func TestLastLines(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
	}{
		{"", nil}, {"\n\n", nil}, {"a", []string{"a"}}, {"a\nb\nc\n", []string{"b", "c"}}, {"a\npanic: b\n\ngoroutine 1 [running]:\nmain.main()\nexit\n", []string{"panic: b", ""}}, {"a\npanic: b\nc\n", []string{"panic: b", "c"}}, {"fatal error: a\nb\nc\nd", []string{"fatal error: a", "b"}}, {"10%\r20%\r\nend\r\n", []string{"20%", "end"}},
		{"2026-11-30T02:29:07.555946Z panic: a\n2026-11-30T02:29:07.555946Z b\n2026-11-30T02:29:07.555946Z c\n", []string{"2026-11-30T02:29:07.555946Z panic: a", "2026-11-30T02:29:07.555946Z b"}},
	} {
		if got := lastLines([]byte(c.text), 2); !cmp.Equal(got, c.want) {
			t.Errorf("lastLines(%q) = %q, want %q", c.text, got, c.want)
		}
	}
	if got := lastLines([]byte("x"+strings.Repeat("é", 1000)), 1); len(got) != 1 || got[0] != "x"+strings.Repeat("é", 199)+"..." {
		t.Errorf("a line that is cut within a character: %q", got)
	}
	if got := lastLines([]byte(strings.Repeat("x", 1000)), 1); len(got) != 1 || len(got[0]) != 403 {
		t.Errorf("a long line is %d bytes, want 403", len(got[0]))
	}
}
