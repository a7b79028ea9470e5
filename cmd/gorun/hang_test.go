package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/launcher"
)

// hang is a rank that joins and waits for the others. The one that args[0] names locks a mutex twice instead, the one that args[1] names stops itself.
func hang(args []string) {
	job, err := bootstrap.Join(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	me := strconv.Itoa(job.Rank())
	if err := os.WriteFile(filepath.Join(os.Getenv("RANKDIR"), "up"+me), []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
		panic(err)
	}
	switch {
	case me == args[0]:
		lockForever()
	case len(args) > 1 && me == args[1]:
		syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		time.Sleep(time.Hour) // another thread may have got it
	}
	job.Barrier(context.Background())
}

func lockForever() {
	var mu sync.Mutex
	mu.Lock()
	mu.Lock()
}

// Whatever ranks are and hang in, gorun can say it, and ends nothing for that; with SIGQUIT they then get it.
func TestLook(t *testing.T) {
	t.Parallel()
	const script = `ulimit -c 0; case $RANK in 0) exec rank hang 1 5;; 1) exec rank hang 1 5;; 2) sleep 1000; true;; 3) exec rank sleep;; 4) exec rank signals;; 5) exec rank hang 1 5;; esac`
	want := []string{
		`(?m)^  ranks 1-5 of 6 have not entered barrier #1 of group world: rank 1.* waits in nothing of gorun, .*; rank 0 waits for them since `,
		`(?m)^  rank 0.*: main goroutine, select\n(    .*\n)*    \S*\.hang \(`,
		`(?m)^  rank 1.*: main goroutine, sync\.Mutex\.Lock\n    sync\..*\n    \S*\.lockForever \(gorun/hang_test\.go:\d+\)$`,
		`(?m)^  rank 2.*: \S+, sleeping in wait$`,
		`(?m)^  rank 2.*: \S+, sleeping in clock_nanosleep$`,
		`(?m)^  (rank 3.*|ranks 3,4): \S+, sleeping in `,
		`(?m)^  (rank 4.*|ranks 3,4): \S+, sleeping in `,
		`(?m)^  rank 5.*: \S+, stopped`,
		`(?m)^  rank 5.*: does not answer the question for its goroutines$`,
	}
	home := remoteHome(t)
	for _, c := range []struct {
		name string
		job  func(args ...string) *job
	}{
		{"here", func(args ...string) *job { return newJob(t, args...) }},
		{"hosts", func(args ...string) *job { return remoteJob(t, home, "a:3,b:3", args...) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := c.job("-np", "6", "--kill-grace", "100ms", "sh", "-c", script)
			file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			j.cmd.Stderr = file
			j.start().until("up0", "up1", "up3", "up4", "up5")
			said := func() string {
				text, err := os.ReadFile(file.Name())
				if err != nil {
					t.Fatal(err)
				}
				return string(text)
			}
			const title = "gorun: what the ranks do after "
			looks := 0
			look := func(sig syscall.Signal) string {
				looks++
				j.cmd.Process.Signal(sig)
				j.eventually("a look", 30*time.Second, func() bool { return strings.Count(said(), title) == looks })
				all := said()
				return all[strings.LastIndex(all, title):]
			}
			var missing []string
			for end := time.Now().Add(30 * time.Second); looks == 0 || len(missing) > 0 && time.Now().Before(end); { // they may have to get there
				text := look(syscall.SIGIO)
				missing = nil
				for _, re := range want {
					if !regexp.MustCompile(re).MatchString(text) {
						missing = append(missing, re)
					}
				}
			}
			if len(missing) > 0 {
				t.Errorf("not found:\n%s\nin\n%s", strings.Join(missing, "\n"), said())
			}
			if pid := j.mark("up4"); !alive(pid) || exists(filepath.Join(j.dir, "sig4-29")) {
				t.Error("to be looked at has changed rank 4")
			}
			if !regexp.MustCompile(want[2]).MatchString(look(syscall.SIGQUIT)) {
				t.Errorf("after SIGQUIT:\n%s", said())
			}
			if got := j.wait(); got == 0 {
				t.Error("exit code 0")
			}
			j.gone()
			if !exists(filepath.Join(j.dir, "sig4-3")) {
				t.Error("rank 4 got no SIGQUIT")
			}
		})
	}
}

// Row 57: before a job that has run too long is ended, the report names what the rank does that holds it up.
func TestTimeoutTellsStacks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	report, stacks := filepath.Join(dir, "r.json"), filepath.Join(dir, "out", "stacks.txt")
	if err := os.Mkdir(filepath.Dir(stacks), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{stacks: "of an earlier job", filepath.Join(dir, "out", ".gorun.json"): `{"ranks":1,"stacks":true}`} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	slowly(t, 3*time.Second, func(d time.Duration) error {
		j := newJob(t, "-np", "8", "--timeout", d.String(), "--report", report, "--output-dir", filepath.Dir(stacks), "rank", "hang", "3")
		if got := j.run(); got != launcher.ExitTimeout {
			t.Errorf("exit code %d", got)
		}
		j.gone()
		want := regexp.MustCompile(`^gorun: what the ranks do after \S+s:
  rank 3 of 8 has not entered barrier #1 of group world: it waits in nothing of gorun; ranks 0-2,4-7 wait for it since \S+ s
  rank 3: main goroutine, sync\.Mutex\.Lock
    sync\.\(\*Mutex\)\.Lock \(sync/mutex\.go:\d+\)
    \S*\.lockForever \(gorun/hang_test\.go:\d+\)
(?s).*  ranks 0-2,4-7: main goroutine, select
.*  whole stacks: ` + regexp.QuoteMeta(stacks) + `
gorun: timeout: the job has run for ` + d.String() + `
  then: ranks 0-7 ended by gorun \(SIGTERM\)
$`)
		if !want.MatchString(j.err.String()) {
			return fmt.Errorf("stderr\n%s\nwant %v", j.err.String(), want)
		}
		return nil
	})
	var r struct {
		Hang struct {
			Lines []string
			Ranks []struct {
				Rank       int
				Goroutines []struct{ Frames []struct{ Func string } }
			}
		}
	}
	text, err := os.ReadFile(report)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Hang.Ranks) != 8 || len(r.Hang.Lines) == 0 || !strings.HasPrefix(r.Hang.Lines[0], "rank 3 of 8 ") {
		t.Fatalf("report: %+v", r.Hang)
	}
	locks := false
	for _, g := range r.Hang.Ranks[3].Goroutines {
		for _, f := range g.Frames {
			locks = locks || strings.HasSuffix(f.Func, ".lockForever")
		}
	}
	if !locks {
		t.Errorf("report of rank 3: %+v", r.Hang.Ranks[3])
	}
	text, err = os.ReadFile(stacks)
	if s := string(text); err != nil || strings.Contains(s, "earlier") || !strings.Contains(s, ".lockForever") || !strings.Contains(s, "bootstrap.(*remote).read") {
		t.Errorf("%s: %v\n%s", stacks, err, s)
	}
}

// What many ranks do alike is told once.
func TestLookAtManyRanks(t *testing.T) {
	t.Parallel()
	slowly(t, time.Second, func(d time.Duration) error {
		j := newJob(t, "-np", "64", "--timeout", d.String(), "sleep", "1000")
		if got := j.run(); got != launcher.ExitTimeout {
			t.Errorf("exit code %d", got)
		}
		j.gone()
		if got, want := j.err.String(), "  ranks 0-63: sleep, sleeping in clock_nanosleep\ngorun: timeout"; !strings.Contains(got, want) {
			return fmt.Errorf("stderr\n%s", got)
		}
		return nil
	})
}
