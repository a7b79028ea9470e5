package launcher

import (
	"fmt"
	"slices"
	"time"
)

const (
	// lateAttempts is how many of the last attempts an account keeps beside the first: how it began, and how it goes now. A job that may fail once a
	// day for a year is not to fill gorun's memory.
	lateAttempts = 9
	// attemptLines bounds what is kept of what the ranks of an earlier attempt did.
	attemptLines = 200
)

// attempts are those that have ended, as far as they are kept.
type attempts struct {
	kept    []*Account
	leftOut int
}

// add adds the account of one that has ended. The stacks of its ranks are kept until those of another are there.
func (a *attempts) add(acct *Account) {
	acct.Attempts, acct.LeftOut = nil, 0
	if h := acct.Hang; h != nil {
		if n := len(h.Lines); n > attemptLines {
			h.Lines = append(slices.Clone(h.Lines[:attemptLines]), fmt.Sprintf("and %d more lines", n-attemptLines))
		}
		if len(h.Ranks) > 0 {
			for _, k := range a.kept {
				if k.Hang != nil {
					k.Hang.Ranks = nil
				}
			}
		}
	}
	if len(a.kept) > lateAttempts {
		a.kept = slices.Delete(a.kept, 1, 2)
		a.leftOut++
	}
	a.kept = append(a.kept, acct)
}

// tell gives an account those before it.
func (a *attempts) tell(acct *Account) {
	acct.Attempts, acct.LeftOut = slices.Clone(a.kept), a.leftOut
}

// failures are those of a job that count.
type failures struct {
	restarts Restarts
	times    []time.Time // with a window: those within it
	n        int
}

// add takes note of a failure.
func (f *failures) add(now time.Time) {
	if f.restarts.Window == 0 {
		f.n++
		return
	}
	f.times = append(slices.DeleteFunc(f.times, func(t time.Time) bool { return now.Sub(t) >= f.restarts.Window }), now)
	f.n = len(f.times)
}

// mayRestart reports whether the job may be started again after the failure that was added last.
func (f *failures) mayRestart() bool { return f.n <= f.restarts.N }

// used says for the end of a job how often it was restarted, and why not once more if its last attempt has failed; "" for a job that was not.
func (f *failures) used(k int, failed bool) string {
	if k == 0 {
		return ""
	}
	t := fmt.Sprintf("restarted %d times", k)
	if k == 1 {
		t = "restarted once"
	}
	if !failed || f.mayRestart() {
		return t
	}
	t += fmt.Sprintf("; given up after %d failures", f.n)
	if f.restarts.Window > 0 {
		t += fmt.Sprintf(" within %v", f.restarts.Window)
	}
	return t
}
