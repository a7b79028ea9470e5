package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Row 6 of what users of other launchers report: a rank that works on for longer than the default grace when it is asked to end is killed, and it is said for
// what gorun waits; with a longer --kill-grace it gets done.
func TestRankThatSavesForLong(t *testing.T) {
	unraced(t)
	t.Parallel()
	const script = `trap 'touch $RANKDIR/asked$RANK; sleep 6; touch $RANKDIR/saved$RANK; exit 0' TERM; touch $RANKDIR/up$RANK; while :; do sleep 0.05; done`
	home := remoteHome(t)
	type saver struct {
		*job
		grace string
	}
	var jobs []saver
	for _, newJob := range []func(args ...string) *job{
		func(args ...string) *job { return newJob(t, append([]string{"-np", "2"}, args...)...) },
		func(args ...string) *job { return remoteJob(t, home, "a,b", args...) },
	} {
		jobs = append(jobs, saver{newJob("sh", "-c", script), "5s"}, saver{newJob("--kill-grace", "10m", "sh", "-c", script), "10m0s"})
	}
	for _, j := range jobs {
		said, err := os.Create(filepath.Join(j.dir, "stderr"))
		if err != nil {
			t.Fatal(err)
		}
		defer said.Close()
		j.cmd.Stderr = said // all of it: gorun's lines about what takes its time, too
		j.start()
	}
	for _, j := range jobs {
		j.until(marks("up", 2)...)
		j.cmd.Process.Signal(syscall.SIGTERM)
	}
	for _, j := range jobs {
		if got := j.wait(); got != 143 {
			t.Errorf("grace of %s: exit code %d, want 143", j.grace, got)
		}
		j.gone()
		saved := exists(filepath.Join(j.dir, "saved0")) && exists(filepath.Join(j.dir, "saved1"))
		end := "  then: ranks 0,1 ended by gorun (SIGKILL)\n"
		if j.grace != "5s" {
			end = "  then: ranks 0,1 ended by gorun (SIGTERM)\n"
		}
		want := fmt.Sprintf("gorun: interrupted by SIGTERM; waiting up to %s (--kill-grace) for ranks 0,1 to end\ngorun: interrupted by SIGTERM\n%s", j.grace, end)
		text, err := os.ReadFile(filepath.Join(j.dir, "stderr"))
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.ReplaceAll(string(text), "Terminated\n", ""); got != want || saved != (j.grace != "5s") || !exists(filepath.Join(j.dir, "asked0")) {
			t.Errorf("grace of %s: saved: %v; stderr %q, want %q", j.grace, saved, got, want)
		}
	}
}

// Row 19: Ctrl-C ends a job that floods a reader which is slow, one that has stopped, and a terminal that shows nothing; the grace is not needed for it.
func TestCtrlCUnderFlood(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		for _, c := range []string{"slow reader", "stopped reader", "terminal"} {
			for _, flags := range [][]string{nil, {"--tag-output", "--timestamp"}} {
				t.Run(fmt.Sprint(c, flags), func(t *testing.T) {
					j := newJob(t, append(flags, "-np", "4", "--kill-grace", "1h", "rank", "flood")...)
					if c == "terminal" {
						master, slave := openTerminal(t)
						t.Cleanup(func() { master.Close() })
						j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = slave, slave, slave
						j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
						j.start().until(marks("up", 4)...)
						slave.Close()
						if _, err := master.WriteString("\x03"); err != nil {
							t.Fatal(err)
						}
					} else {
						r, w := pipe(t)
						j.cmd.Stdout = w
						j.start()
						w.Close()
						if _, err := io.ReadFull(r, make([]byte, 256<<10)); err != nil {
							t.Fatal(err)
						}
						if c == "slow reader" {
							go sip(r)
						}
						j.until(marks("up", 4)...)
						j.cmd.Process.Signal(syscall.SIGINT)
					}
					if got := j.wait(); got != 130 {
						t.Errorf("exit code %d, want 130: %s", got, j.err.String())
					}
					j.gone()
					if text := j.err.String(); c != "terminal" && text != "gorun: interrupted by SIGINT\n  then: ranks 0-3 ended by gorun (SIGINT)\n" {
						t.Errorf("stderr %q", text)
					}
				})
			}
		}
	})
}

// sip reads some 100 KiB a second, to the end.
func sip(r *os.File) {
	for buf := make([]byte, 1<<10); ; time.Sleep(10 * time.Millisecond) {
		if _, err := r.Read(buf); err != nil {
			return
		}
	}
}
