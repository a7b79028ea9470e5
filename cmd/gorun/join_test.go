package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRanksJoin(t *testing.T) {
	j := newJob(t, "-np", "4", "rank", "join", "well")
	if got := j.run(); got != 0 || j.err.Len() > 0 {
		t.Fatalf("exit code %d, stderr %s", got, j.err.String())
	}
	got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
	slices.Sort(got)
	var want []string
	for i := range 4 {
		want = append(want, fmt.Sprintf("rank %d of 4 joined", i))
	}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

// A rank that says goodbye and then fails, as a program with a deferred Job.Close does, is the cause, although what followed
// from its goodbye, the failure of the others, has ended before it.
func TestFailureAfterGoodbye(t *testing.T) {
	j := newJob(t, "-np", "3", "rank", "join", "badly")
	if got := j.run(); got != 7 {
		t.Errorf("exit code %d, want 7", got)
	}
	j.gone()
	if got, want := j.err.String(), regexp.MustCompile(`gorun: rank 2 \(host \S+, pid \d+\) exited with code 7 after \S+\n`); !want.MatchString(got) {
		t.Errorf("stderr %q, want %v", got, want)
	}
	if want := "  then: ranks 0,1 exited with code 1\n"; !strings.HasSuffix(j.err.String(), want) && !strings.Contains(j.err.String(), "ended by gorun (SIGTERM)") {
		t.Errorf("stderr %q, want it to end in %q", j.err.String(), want)
	}
}

// The rank that fails first is the cause, with its own words and code, although its defers have closed the communicator before it could say
// anything, and the others, which that ended, are gone first.
func TestCauseIsNamed(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"panic", "error", "in-capture", "in-messages", "aborts"} {
		t.Run(how, func(t *testing.T) {
			runs := 10
			if how == "in-messages" {
				runs = 3 // that the ranks wait in a circle takes seconds to come out
			}
			for range often(runs) {
				j := newJob(t, "-np", "4", "rank", "fail", how)
				j.cmd.Env = append(j.cmd.Env, "GORUN_DEVICE=host")
				got := j.run()
				cause := regexp.MustCompile(`(?m)^gorun: rank 1 \(host \S+, pid \d+\) exited with code 2 after `)
				if got != 2 || !cause.MatchString(j.err.String()) {
					t.Errorf("exit code %d, want 2 and rank 1 named; stderr %s", got, j.err.String())
				}
				// Its own words; the others' begin with where they failed.
				own := map[string]string{"panic": `panic: `, "in-capture": `capture at \S+: `, "in-messages": `capture at \S+: `}[how] + "no shard for rank 1"
				if !regexp.MustCompile(`(?m)^` + own).MatchString(j.err.String()) {
					t.Errorf("stderr %q, want %q in it", j.err.String(), own)
				}
				j.gone()
				if t.Failed() {
					break
				}
			}
		})
	}
}

// What one rank says of an error that all of them see is heard, whichever ends first.
func TestOneRankSpeaksForAll(t *testing.T) {
	for range often(10) {
		j := newJob(t, "-np", "4", "rank", "fail", "usage")
		if got := j.run(); got != 2 || !strings.Contains(j.err.String(), "invalid size 64Q\n") {
			t.Fatalf("exit code %d, want 2 and the words of rank 0; stderr %q", got, j.err.String())
		}
		j.gone()
	}
}

// A rank that exits with code 0 without goodbye is a death to the others, and the account says so.
func TestRankEndsSilently(t *testing.T) {
	j := newJob(t, "-np", "3", "rank", "join", "silently")
	if got := j.run(); got != 1 {
		t.Errorf("exit code %d, want 1, that of the first rank that failed", got)
	}
	j.gone()
	for _, want := range []string{
		"barrier #2 of group world: rank 2",
		"gorun: rank 2 (host ",
		"exited with code 0",
		"without leaving the job (Job.Close), which is a death to the other ranks\n",
	} {
		if !strings.Contains(j.err.String(), want) {
			t.Errorf("stderr %q, want %q in it", j.err.String(), want)
		}
	}
}
