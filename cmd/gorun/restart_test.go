package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher"
)

// starts is how often the ranks of a job that runs startScript were started.
func (j *job) starts() int {
	files, _ := filepath.Glob(filepath.Join(j.dir, "start-*"))
	return len(files)
}

// startScript leaves a mark of each start.
const startScript = `touch $RANKDIR/start-$RANK-$GORUN_RESTART-$GORUN_JOB_ID; `

func TestRestart(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		t.Run("until it works", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "3", "sh", "-c", startScript+`touch $RANKDIR/run-$TORCHELASTIC_RUN_ID; `+together+
				`echo $RANK of $WORLD_SIZE on $GORUN_NODE: $GORUN_RESTART $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] && [ $GORUN_RESTART -lt 2 ] && { echo bad luck >&2; exit 4; }; [ $GORUN_RESTART = 2 ] || sleep 1000`)
			report := j.reporting()
			if got := j.run(); got != 0 || j.starts() != 6 {
				t.Errorf("exit code %d, %d starts, want 0, 6", got, j.starts())
			}
			j.gone()
			got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
			slices.Sort(got)
			var want []string
			for rank := range 2 {
				for k := range 3 {
					want = append(want, fmt.Sprintf("%d of 2 on 0: %d %d", rank, k, k))
				}
			}
			// What rank 0 says is lost if it is killed before.
			for _, line := range got {
				if !slices.Contains(want, line) {
					t.Errorf("output %q", line)
				}
			}
			if !slices.Contains(got, want[2]) || !slices.Contains(got, want[5]) {
				t.Errorf("output %q, want both ranks' of the last attempt", got)
			}
			block := `gorun: rank 1 \(host \S+, pid \d+\) exited with code 4 after \S+\n  then: rank 0 ended by gorun \(SIGTERM\)\ngorun: restart %d of 3\n`
			if want := regexp.MustCompile("^bad luck\n" + fmt.Sprintf(block, 1) + "bad luck\n" + fmt.Sprintf(block, 2) + `\z`); !want.MatchString(j.err.String()) {
				t.Errorf("stderr %q, want %v", j.err.String(), want)
			}
			r := report()
			if r.Restarts != 2 || r.Reason != launcher.ReasonDone || r.Code != 0 || len(r.Attempts) != 2 {
				t.Fatalf("report %+v", r)
			}
			jobs := map[string]bool{r.Job: true}
			for k, a := range r.Attempts {
				jobs[a.Job] = true
				if a.Restarts != k || a.Code != 4 || a.Cause != 1 || len(a.Attempts) != 0 || a.Ranks[1].Host != r.Ranks[1].Host || !slices.Equal(a.Ranks[1].Stderr, []string{"bad luck"}) {
					t.Errorf("attempt %d: %+v", k, a)
				}
			}
			if len(jobs) != 3 {
				t.Errorf("job ids %v, want three", jobs)
			}
			if runs, _ := filepath.Glob(filepath.Join(j.dir, "run-?*")); len(runs) != 1 {
				t.Errorf("run ids %q, want one", runs)
			}
		})
		t.Run("given up", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "1", "--restart-window", "1h", "sh", "-c", startScript+`[ $RANK = 1 ] && exit 5; sleep 1000`)
			if got := j.run(); got != 5 {
				t.Errorf("exit code %d, want 5", got)
			}
			if n := len(j.startsOf(1)); n != 2 {
				t.Errorf("rank 1 was started %d times, want 2", n)
			}
			if want := regexp.MustCompile(`(?s)^gorun: rank 1 .*\ngorun: restart 1\ngorun: rank 1 .*\n  restarted once; given up after 2 failures within 1h0m0s\n\z`); !want.MatchString(j.err.String()) {
				t.Errorf("stderr %q, want %v", j.err.String(), want)
			}
		})
		t.Run("after its end by the others' leave", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "1", "--on-fail", "wait", "sh", "-c", startScript+`exit $((RANK * (1 - GORUN_RESTART)))`)
			if got := j.run(); got != 0 || j.starts() != 4 {
				t.Errorf("exit code %d, %d starts: %s", got, j.starts(), j.err.String())
			}
		})
		t.Run("a line that an attempt has left is over", func(t *testing.T) {
			j := newJob(t, "-np", "1", "--restarts", "2", "--tag-output", "sh", "-c", `[ $GORUN_RESTART = 1 ] || printf $GORUN_RESTART; exit $((2 - GORUN_RESTART))`)
			if got := j.run(); got != 0 || j.out.String() != "[0] 0\n[0] 2" {
				t.Errorf("exit code %d, output %q, want 0, %q: %s", got, j.out.String(), "[0] 0\n[0] 2", j.err.String())
			}
		})
		t.Run("files go on", func(t *testing.T) {
			dir := t.TempDir()
			j := newJob(t, "-np", "2", "--restarts", "1", "--on-fail", "wait", "--output-dir", dir, "sh", "-c", `echo $RANK: $GORUN_RESTART; exit $((1 - GORUN_RESTART))`)
			if got := j.run(); got != 0 {
				t.Errorf("exit code %d: %s", got, j.err.String())
			}
			for rank := range 2 {
				text, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("rank.%d", rank), "stdout"))
				if want := fmt.Sprintf("%d: 0\n%d: 1\n", rank, rank); err != nil || string(text) != want {
					t.Errorf("file of rank %d: %q, %v, want %q", rank, text, err, want)
				}
			}
		})
		t.Run("not after ctrl-c", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "5", "sh", "-c", startScript+`trap 'exit 3' INT; echo $$ >$RANKDIR/tmp$RANK; mv $RANKDIR/tmp$RANK $RANKDIR/up$RANK; while :; do sleep 0.01; done`)
			j.start().until(marks("up", 2)...)
			j.cmd.Process.Signal(syscall.SIGINT)
			if got := j.wait(); got != 130 || j.starts() != 2 {
				t.Errorf("exit code %d, %d starts, want 130, 2: %s", got, j.starts(), j.err.String())
			}
		})
		t.Run("nor while it ends", func(t *testing.T) {
			// Rank 1 fails, rank 0 takes its time, and the user has had enough.
			j := newJob(t, "-np", "2", "--restarts", "5", "--kill-grace", "1h", "sh", "-c", startScript+`[ $RANK = 1 ] && { until [ -e $RANKDIR/up0 ]; do sleep 0.01; done; exit 6; }; exec rank signals`)
			j.start().until("sig0-15")
			j.cmd.Process.Signal(syscall.SIGINT)
			if got := j.wait(); got != 6 || j.starts() != 2 {
				t.Errorf("exit code %d, %d starts, want 6, 2: %s", got, j.starts(), j.err.String())
			}
		})
		t.Run("the timeout is for all attempts", func(t *testing.T) {
			slowly(t, 1500*time.Millisecond, func(d time.Duration) error {
				j := newJob(t, "-np", "1", "--restarts", "1000000", "--timeout", d.String(), "sh", "-c", startScript+`sleep 0.2; exit 3`)
				begin := time.Now()
				if got := j.run(); got != 124 {
					return fmt.Errorf("exit code %d, want 124: %s", got, j.err.String())
				}
				if n := j.starts(); n < 2 || time.Since(begin) < d {
					return fmt.Errorf("%d starts in %v", n, time.Since(begin))
				}
				return nil
			})
		})
		t.Run("nor after it, though a rank failed before", func(t *testing.T) {
			slowly(t, 500*time.Millisecond, func(d time.Duration) error {
				j := newJob(t, "-np", "2", "--restarts", "5", "--on-fail", "wait", "--timeout", d.String(), "sh", "-c", startScript+`[ $RANK = 1 ] && exit 3; sleep 1000`)
				if got := j.run(); got != 3 || j.starts() != 2 || !strings.HasSuffix(j.err.String(), fmt.Sprintf("\n  then: the job has run for %v; rank 0 ended by gorun (SIGTERM)\n", d)) {
					return fmt.Errorf("exit code %d, %d starts, want 3, 2: %s", got, j.starts(), j.err.String())
				}
				return nil
			})
		})
		t.Run("nor where nobody reads", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "5", "--on-fail", "wait", "sh", "-c", startScript+`[ $RANK = 1 ] && exit 3; touch $RANKDIR/up0; while :; do echo; sleep 0.01; done`)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			j.cmd.Stdout = w
			said := j.stderrLines()
			j.start().until("up0")
			w.Close() // gorun has its own
			if line := said(); !strings.HasSuffix(line, "the others go on (--on-fail wait)\n") {
				t.Errorf("stderr %q", line)
			}
			r.Close()
			said()
			if line := said(); line != "  then: nobody reads stdout any more; rank 0 ended by gorun (SIGTERM)\n" {
				t.Errorf("stderr %q", line)
			}
			if got := j.wait(); got != 3 || j.starts() != 2 {
				t.Errorf("exit code %d, %d starts, want 3, 2", got, j.starts())
			}
		})
		t.Run("nor on a full disk, and that is said", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "5", "sh", "-c", startScript+`[ $RANK = 1 ] && { until [ -e $RANKDIR/up0 ]; do sleep 0.01; done; exit 3; }; trap 'echo x; exit 0' TERM; touch $RANKDIR/up0; while :; do sleep 0.01; done`)
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer full.Close()
			j.cmd.Stdout = full
			if got := j.run(); got != 3 || j.starts() != 2 || strings.Count(j.err.String(), "gorun: write stdout: no space left on device\n") != 1 {
				t.Errorf("exit code %d, %d starts, want 3, 2: %s", got, j.starts(), j.err.String())
			}
		})
		t.Run("no program", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--restarts", "5", "nonexistent-program")
			if got := j.run(); got != 127 || strings.Contains(j.err.String(), "restart") {
				t.Errorf("exit code %d, %q, want 127", got, j.err.String())
			}
		})
	})
	t.Run("stdin goes on", func(t *testing.T) {
		j := newJob(t, "-np", "2", "--restarts", "1", "sh", "-c", `[ $RANK = 1 ] && sleep 1000; read x; echo $x; exit $((1 - GORUN_RESTART))`)
		in := filepath.Join(t.TempDir(), "in")
		if err := os.WriteFile(in, []byte("first\nsecond\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(in)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		j.cmd.Stdin = f
		j.cmd.Args = append(j.cmd.Args[:len(j.cmd.Args)-1], strings.Replace(j.cmd.Args[len(j.cmd.Args)-1], "sleep 1000", "{ [ $GORUN_RESTART = 0 ] && sleep 1000; exit 0; }", 1))
		if got := j.run(); got != 0 || j.out.String() != "first\nsecond\n" {
			t.Errorf("exit code %d, output %q: %s", got, j.out.String(), j.err.String())
		}
	})
}

// startsOf are the marks of one rank's starts.
func (j *job) startsOf(rank int) []string {
	files, _ := filepath.Glob(filepath.Join(j.dir, fmt.Sprintf("start-%d-*", rank)))
	return files
}

// A host whose agent is killed is there again for the next attempt.
func TestRestartAfterLostHost(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	j := remoteJob(t, home, "a,b", "--restarts", "1", "sh", "-c", startScript+`[ $GORUN_RESTART = 1 ] && exit 0; exec rank sleep`)
	report := j.reporting()
	j.start().until(marks("up", 2)...)
	syscall.Kill(j.agent(1), syscall.SIGKILL)
	if got := j.wait(); got != 0 || j.starts() != 4 {
		t.Errorf("exit code %d, %d starts, want 0, 4: %s", got, j.starts(), j.err.String())
	}
	j.gone()
	if r := report(); len(r.Attempts) != 1 || r.Attempts[0].Reason != launcher.ReasonHostLost || r.Attempts[0].Code != 123 || r.Reason != launcher.ReasonDone {
		t.Errorf("report %+v", r)
	}
}

// Row 47: a job is not started again unasked, and what never started has a code of its own.
func TestNoRestartUnasked(t *testing.T) {
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		j := newJob(t, "-np", "2", "sh", "-c", startScript+`exit 9`)
		if got := j.run(); got != 9 || len(j.startsOf(0)) > 1 || len(j.startsOf(1)) > 1 {
			t.Errorf("exit code %d, %d starts, want 9, 2 at most", got, j.starts())
		}
	})
	j := newJob(t, "--rsh", "sh -c 'exit 9'", "-H", "a,b", "--restarts", "3", "sh", "-c", startScript+"exit 9")
	if got := j.run(); got != 122 || j.starts() != 0 || strings.Contains(j.err.String(), "restart") {
		t.Errorf("exit code %d, %d starts, want 122, 0: %s", got, j.starts(), j.err.String())
	}
}
