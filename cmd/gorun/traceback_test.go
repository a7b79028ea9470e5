package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// A Python rank that has its faulthandler on writes where it is before the timeout ends it; one that wants SIGTERM for itself and does not end by it, before it is killed.
func TestTimeoutTellsTracebacks(t *testing.T) {
	python, err := exec.LookPath("/usr/bin/python3") // what else is in PATH may be a wrapper
	if err != nil {
		python = citest.Program(t, "python3")
	}
	script := `cat >$RANKDIR/$RANK.py <<'.'
import os, signal, sys, time
def load_batch():
    time.sleep(1000)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", file=sys.stderr)))
if os.environ["RANK"] == "3":
    signal.signal(signal.SIGTERM, lambda *_: None)
load_batch()
.
[ $RANK = 1 ] && unset PYTHONFAULTHANDLER; ulimit -c 0; [ $RANK = 2 ] || exec ` + python + ` $RANKDIR/$RANK.py; ` + python + ` $RANKDIR/2.py; echo script: $?`
	want := regexp.MustCompile(`(?s)(?:^|\n)gorun: what the ranks do after .*python.*\[2\]   File "\S+2\.py", line 3 in load_batch
.*\[3\]   File "\S+3\.py", line 3 in load_batch
.*
gorun: timeout: the job has run for \S+
  then: ranks 0,1 ended by gorun \(SIGTERM\); ranks 2,3 ended by gorun \(SIGABRT\)
$`)
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		slowly(t, 2*time.Second, func(d time.Duration) error {
			j := newJob(t, "-np", "4", "--tag-output", "--kill-grace", "2s", "--timeout", d.String(), "-x", "PYTHONFAULTHANDLER=1", "sh", "-c", script)
			if got := j.run(); got != launcher.ExitTimeout {
				t.Errorf("exit code %d", got)
			}
			j.gone()
			text := j.err.String()
			if !want.MatchString(text) || !regexp.MustCompile(`(?m)^\[0\] saved$`).MatchString(text) {
				return fmt.Errorf("stderr\n%s\nwant %v and rank 0's word", text, want)
			}
			return nil
		})
	})
	// Without a grace no SIGTERM comes, and they still write.
	at := regexp.MustCompile(`File "\S+2\.py", line 3 in load_batch`)
	slowly(t, 2*time.Second, func(d time.Duration) error {
		j := newJob(t, "-np", "4", "--kill-grace", "0s", "--timeout", d.String(), "-x", "PYTHONFAULTHANDLER=1", "sh", "-c", script)
		if got := j.run(); got != launcher.ExitTimeout {
			t.Errorf("without a grace: exit code %d", got)
		}
		j.gone()
		if text := j.err.String(); !at.MatchString(text) {
			return fmt.Errorf("without a grace: stderr\n%s\nwant %v", text, at)
		}
		return nil
	})
}
