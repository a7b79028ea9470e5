package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// report is what a test reads of a job's report.
type report struct {
	Job         string
	Code, Cause int
	Reason      launcher.Reason
	Later       string
	Restarts    int
	Attempts    []report
	Ranks       []struct {
		Rank, PID, Code int
		Host            string
		Signal          string
		Core            bool `json:"core_dumped"`
		OOM             bool `json:"out_of_memory"`
		Cause           string
		Stderr          []string
		Start, End      time.Time
	}
}

// reporting makes the job write a report, which the function it returns reads.
func (j *job) reporting() func() report {
	file := filepath.Join(j.dir, "report.json")
	j.cmd.Args = slices.Insert(j.cmd.Args, 1, "--report", file)
	return func() (r report) {
		j.t.Helper()
		text, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &r)
		}
		if err != nil {
			j.t.Fatalf("report: %v; stderr:\n%s", err, j.err.String())
		}
		return r
	}
}

// everywhere runs a test with ranks on this machine, and on hosts that are all this machine.
func everywhere(t *testing.T, f func(t *testing.T, newJob func(t *testing.T, args ...string) *job)) {
	home := remoteHome(t)
	t.Run("here", func(t *testing.T) { f(t, newJob) })
	t.Run("hosts", func(t *testing.T) {
		f(t, func(t *testing.T, args ...string) *job { t.Helper(); return remoteJob(t, home, "a:2,b:2", args...) })
	})
}

// ended is shell code: whether a process has ended, told without another process, as many ranks ask for it again and again.
const ended = `ended() { { read -r _ _ state _ </proc/$1/stat; } 2>/dev/null || return 0; [ $state = Z ] || [ $state = X ]; }
`

// after is shell code: after RANK waits for the end of a rank that has said where it is.
const after = ended + `echo $$ >$RANKDIR/tmp$RANK; mv $RANKDIR/tmp$RANK $RANKDIR/pid$RANK
after() { until [ -e $RANKDIR/pid$1 ]; do sleep 0.01; done; read -r pid <$RANKDIR/pid$1; until ended $pid; do sleep 0.01; done; }
`

// together is shell code: no rank goes on before all have been started.
const together = `: >$RANKDIR/started$RANK.$GORUN_RESTART; for r in $(seq 0 $((WORLD_SIZE - 1))); do until [ -e $RANKDIR/started$r.$GORUN_RESTART ]; do sleep 0.01; done; done
`

// undisturbed is shell code: each rank ends as it wants to, even if the machine is so busy that gorun asks it to end before that.
const undisturbed = `trap '' TERM; ` + together

// Each key of the report is in help report.
func TestReportIsDocumented(t *testing.T) {
	words := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^  +((?:[a-z_]+, )*[a-z_]+)(?::|  )`).FindAllStringSubmatch(reportHelp, -1) {
		for key := range strings.SplitSeq(m[1], ", ") {
			words[key] = true
		}
	}
	for _, typ := range []reflect.Type{reflect.TypeFor[launcher.Account](), reflect.TypeFor[launcher.RankAccount](), reflect.TypeFor[launcher.HostAccount](), reflect.TypeFor[launcher.RankPlace](), reflect.TypeFor[launcher.Hang](), reflect.TypeFor[launcher.RankStacks]()} {
		for i := range typ.NumField() {
			f := typ.Field(i)
			key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			switch {
			case !f.IsExported():
			case key == "":
				t.Errorf("%v.%s has no key", typ, f.Name)
			case !words[key]:
				t.Errorf("%s is not in help report", key)
			}
		}
	}
}

// Row 22 of what users of other launchers report: codes are not mixed, a signal is no success, and all are in the report.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		for _, c := range []struct {
			name, script string
			code, cause  int
			ends         string // of ranks, in the report
		}{
			{"1 and 2", undisturbed + after + `case $RANK in 0) exit 1;; 1) after 0; exit 2;; esac`, 1, 0, "exited with code 1; exited with code 2"},
			{"2 and 1", undisturbed + after + `case $RANK in 1) exit 2;; 0) after 1; exit 1;; esac`, 2, 1, "exited with code 1; exited with code 2"},
			{"255", together + `[ $RANK = 1 ] && exit 255; sleep 1000`, 255, 1, "ended by gorun (SIGTERM); exited with code 255"},
			{"fault", together + `[ $RANK = 0 ] && kill -SEGV $$; sleep 1000`, 139, 0, "was killed by SIGSEGV; ended by gorun (SIGTERM)"},
			{"abort", together + `[ $RANK = 0 ] && kill -ABRT $$; sleep 1000`, 134, 0, "was killed by SIGABRT; ended by gorun (SIGTERM)"},
			{"all well", `exit 0`, 0, -1, "exited with code 0; exited with code 0"},
		} {
			t.Run(c.name, func(t *testing.T) {
				j := newJob(t, "-np", "2", "sh", "-c", c.script)
				report := j.reporting()
				if got := j.run(); got != c.code {
					t.Errorf("exit code %d, want %d: %s", got, c.code, j.err.String())
				}
				j.gone()
				r := report()
				// Whether a core was dumped is the machine's matter.
				ends := strings.ReplaceAll(r.Ranks[0].Cause+"; "+r.Ranks[1].Cause, " (core dumped)", "")
				if r.Code != c.code || r.Cause != c.cause || ends != c.ends {
					t.Errorf("report: code %d, cause %d, %q, want %d, %d, %q", r.Code, r.Cause, ends, c.code, c.cause, c.ends)
				}
				for _, k := range r.Ranks {
					if k.PID == 0 || k.Host == "" || !k.End.After(k.Start) || k.Code == 0 != (k.Cause == "exited with code 0") {
						t.Errorf("report of rank %d: %+v", k.Rank, k)
					}
				}
			})
		}
	})
}

// Row 23: one fails at once, the others would sleep for ever. With --on-fail wait they end as they like.
func TestOneFailsOthersGoOn(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		t.Run("kill", func(t *testing.T) {
			j := newJob(t, "-np", "3", "sh", "-c", together+`[ $RANK = 1 ] && { echo no luck >&2; exit 7; }; sleep 1000`)
			report := j.reporting()
			if got := j.run(); got != 7 {
				t.Errorf("exit code %d, want 7", got)
			}
			j.gone()
			// The last words are repeated where something came after them: that gorun waits, on a slow machine.
			if want := regexp.MustCompile(`(?m)^gorun: rank 1 \(host \S+, pid \d+\) exited with code 7 after \S+\n(  its last lines on stderr:\n    no luck\n)?  then: ranks 0,2 ended by gorun \(SIGTERM\)\n\z`); !want.MatchString(j.err.String()) {
				t.Errorf("stderr %q, want %v", j.err.String(), want)
			}
			r := report()
			// When the last of them ended, by gorun's clock.
			if end := slices.MaxFunc([]time.Time{r.Ranks[0].End, r.Ranks[2].End}, time.Time.Compare); end.Sub(r.Ranks[1].End) > 3*time.Second {
				t.Errorf("the others ended %v after the failure", end.Sub(r.Ranks[1].End))
			}
			if got := r.Ranks[1].Stderr; !slices.Equal(got, []string{"no luck"}) {
				t.Errorf("stderr in the report: %q", got)
			}
		})
		t.Run("wait", func(t *testing.T) {
			j := newJob(t, "-np", "3", "--on-fail", "wait", "sh", "-c", after+`case $RANK in 1) exit 7;; 0) after 1; sleep 0.4; echo done;; 2) after 0; exit 9;; esac`)
			report := j.reporting()
			if got := j.run(); got != 7 || j.out.String() != "done\n" {
				t.Errorf("exit code %d, want 7; output %q", got, j.out.String())
			}
			want := regexp.MustCompile(`^gorun: rank 1 exited with code 7; the others go on \(--on-fail wait\)\ngorun: rank 1 \(host \S+, pid \d+\) exited with code 7 after \S+\n  then: rank 0 exited with code 0; rank 2 exited with code 9\n\z`)
			if !want.MatchString(j.err.String()) {
				t.Errorf("stderr %q, want %v", j.err.String(), want)
			}
			if r := report(); r.Reason != launcher.ReasonFailed || r.Cause != 1 {
				t.Errorf("report %+v", r)
			}
		})
		t.Run("wait, then ctrl-c", func(t *testing.T) {
			j := newJob(t, "-np", "2", "--on-fail", "wait", "sh", "-c", `[ $RANK = 1 ] && exit 7; exec rank signals`)
			said := j.stderrLines()
			j.start().until("up0")
			if line := said(); line != "gorun: rank 1 exited with code 7; the others go on (--on-fail wait)\n" {
				t.Errorf("stderr %q", line)
			}
			j.cmd.Process.Signal(syscall.SIGINT)
			j.until("sig0-2")
			time.Sleep(200 * time.Millisecond) // a person's second Ctrl-C does not come at once
			j.cmd.Process.Signal(syscall.SIGINT)
			if got := j.wait(); got != 7 {
				t.Errorf("exit code %d, want 7: %s", got, j.err.String())
			}
			j.gone()
			if line := said() + said(); !strings.Contains(line, "exited with code 7 after ") || !strings.HasSuffix(line, "\n  then: interrupted by SIGINT; rank 0 ended by gorun (SIGKILL)\n") {
				t.Errorf("stderr %q", line)
			}
		})
	})
}

// A rank has sent gorun a signal and failed: the summary is written all the same.
func TestSignalWhileTelling(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	full, err := unix.FcntlInt(w.Fd(), unix.F_GETPIPE_SZ, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, full)); err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 1)
	signals <- syscall.SIGTERM
	acct := &launcher.Account{Reason: launcher.ReasonInternal, Error: "it went wrong"}
	told := make(chan struct{})
	go func() {
		tell(stdio{err: launcher.FD(w.Fd()), signals: signals}, acct)
		w.Close()
		close(told)
	}()
	for end := time.Now().Add(20 * time.Second); len(signals) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the signal was not taken within 20 s")
		}
	}
	select {
	case <-told:
		t.Error("the summary was given up at once")
	case <-time.After(lastWords / 10):
	}
	text, err := io.ReadAll(r)
	if got := strings.TrimLeft(string(text), "\x00"); err != nil || got != "gorun: it went wrong\n" {
		t.Errorf("told %q, %v", got, err)
	}
	<-told
}

// A report that nobody reads is given up when gorun is to end; one that is read in time is written.
func TestReportWithoutReader(t *testing.T) {
	write := func(bound time.Duration) (fifo string, written chan error) {
		fifo = filepath.Join(t.TempDir(), "fifo")
		if err := syscall.Mkfifo(fifo, 0o600); err != nil {
			t.Fatal(err)
		}
		signals := make(chan os.Signal, 1)
		signals <- syscall.SIGINT
		written = make(chan error, 1)
		go func() { written <- writeReport(stdio{signals: signals}, &launcher.Account{Job: "x"}, fifo, bound) }()
		return fifo, written
	}
	fifo, written := write(time.Millisecond)
	select {
	case err := <-written:
		if want := "write report " + fifo + ": not done 1ms after gorun was to end (a pipe without a reader?)"; err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	case <-time.After(20 * time.Second):
		t.Error("it is waited for a reader, signal or not")
	}
	if _, err := os.ReadFile(fifo); err != nil { // lets the writer go
		t.Error(err)
	}
	fifo, written = write(time.Minute)
	text, err := os.ReadFile(fifo)
	if err := errors.Join(err, <-written); err != nil || !strings.HasPrefix(string(text), "{\n") {
		t.Errorf("the pipe held %q, %v", text, err)
	}
}

// stderrLines gives what gorun says, without slow, a line a call.
func (j *job) stderrLines() func() string {
	j.t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		j.t.Fatal(err)
	}
	j.cmd.Stderr = w
	j.t.Cleanup(func() { r.Close() })
	lines := bufio.NewReader(r)
	return func() string {
		j.t.Helper()
		w.Close() // gorun has its own
		r.SetReadDeadline(time.Now().Add(30 * time.Second))
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				j.t.Fatalf("stderr of gorun: %q, %v", line, err)
			}
			if !slowLines.MatchString(line) {
				return line
			}
		}
	}
}

// Row 24: the end of a rank with code 0 ends nothing, however long the others take.
func TestEarlySuccessIsNoFault(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		j := newJob(t, "-np", "3", "--kill-grace", "10ms", "sh", "-c", after+`[ $RANK = 0 ] && { after 1; after 2; sleep 1; echo last; }; exit 0`)
		if got := j.run(); got != 0 || j.out.String() != "last\n" || j.err.Len() > 0 {
			t.Errorf("exit code %d, %q, stderr %q", got, j.out.String(), j.err.String())
		}
	})
}

// The kernel kills a rank that takes more memory than its control group has, and the account says so.
func TestOutOfMemory(t *testing.T) {
	group, limit := controlGroup(t, "memory", "memory.limit_in_bytes", "memory.max")
	if err := os.WriteFile(filepath.Join(group, limit), []byte("128M"), 0o600); err != nil {
		t.Fatal(err)
	}
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		for _, c := range []struct{ name, script, cause string }{
			{"rank", `[ $RANK = 1 ] && exec rank memory; sleep 1000`, "was killed by SIGKILL (by the kernel: out of memory)"},
			{"its child", `[ $RANK = 1 ] && { rank memory; exit $?; }; sleep 1000`, "exited with code 137 (a process of it was killed by the kernel: out of memory)"},
			{"killed by hand", `[ $RANK = 1 ] && kill -KILL $$; sleep 1000`, "was killed by SIGKILL"},
		} {
			t.Run(c.name, func(t *testing.T) {
				j := newJob(t, "-np", "2", "sh", "-c", c.script)
				report := j.reporting()
				args := append([]string{"-c", `echo 0 >"$0/cgroup.procs" && exec "$@"`, group, j.cmd.Path}, j.cmd.Args[1:]...)
				j.cmd.Path, j.cmd.Args = "/bin/sh", append([]string{"sh"}, args...)
				if got := j.run(); got != 137 {
					t.Errorf("exit code %d, want 137: %s", got, j.err.String())
				}
				j.gone()
				if r := report(); r.Ranks[1].Cause != c.cause || r.Ranks[1].OOM != strings.Contains(c.cause, "out of memory") || r.Cause != 1 {
					t.Errorf("report %+v, want %s", r, c.cause)
				}
				if !strings.Contains(j.err.String(), ") "+c.cause+" after ") {
					t.Errorf("stderr %q, want %q", j.err.String(), c.cause)
				}
			})
		}
	})
}

// controlGroup makes a control group, and says which of its files limits what a controller controls: the older kind's or the unified one's.
func controlGroup(t *testing.T, controller, older, unified string) (dir, limit string) {
	t.Helper()
	name := "gorun-test-" + strconv.Itoa(os.Getpid())
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	why := error(nil)
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		switch {
		case slices.Contains(strings.Split(f[1], ","), controller):
			dir, limit = filepath.Join("/sys/fs/cgroup", controller, f[2], name), older
		case f[1] == "":
			dir, limit = filepath.Join("/sys/fs/cgroup", f[2], name), unified
		}
		if why = os.Mkdir(dir, 0o700); why != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, limit)); err != nil {
			os.Remove(dir)
			why = err
			continue
		}
		t.Cleanup(func() {
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				err := os.Remove(dir)
				if err == nil {
					return
				}
				if time.Now().After(end) {
					t.Error(err)
					return
				}
			}
		})
		return dir, limit
	}
	citest.Lacking(t, "a control group with a limit of %s: %v", controller, why)
	return "", ""
}

// Row 43: a directory or a program that one host lacks is told once, with the host's name, and nothing is left running.
func TestMissingOnOneHost(t *testing.T) {
	if out, err := exec.Command("unshare", "-m", "true").CombinedOutput(); err != nil {
		citest.Lacking(t, "namespaces: %v: %s", err, out)
	}
	home := remoteHome(t)
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "work"), 0o700); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("#!/bin/sh\nexec sleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	// Host b has what it has, but for what is hidden.
	rsh := filepath.Join(t.TempDir(), "rsh")
	if err := os.WriteFile(rsh, []byte(`#!/bin/sh
[ $1 = b ] || exec /bin/sh -c "$2"
exec unshare -m /bin/sh -c 'mount --make-rprivate / && eval "$HIDE" && exec /bin/sh -c "$0"' "$2"
`), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, hide string
		args       []string
		code       int
		err        string
	}{
		{"directory", `mount -t tmpfs none $DIR`, []string{"--wdir", dir + "/work", "sleep", "1000"}, 126, "gorun: host b: change to working directory " + dir + "/work: no such file or directory\n"},
		{"program", `mount -t tmpfs none $DIR`, []string{"--stage", "none", program}, 127, "gorun: host b: run " + program + ": no such file or directory\n"},
		{"permission", `mount --bind /dev/null $DIR/program`, []string{"--stage", "none", program}, 126, "gorun: host b: run " + program + ": permission denied\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, append([]string{"--rsh", rsh, "-H", "a:2,b:2,c:2"}, c.args...)...)
			j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=", "HIDE="+c.hide, "DIR="+dir)
			if got := j.run(); got != c.code || j.err.String() != c.err {
				t.Errorf("exit code %d, stderr %q, want %d, %q", got, j.err.String(), c.code, c.err)
			}
			j.gone()
		})
	}
}

// A rank on a host that is far away fails first; word of another failure, which followed from it, comes first. What counts is when they failed,
// by what their agents saw when they got to run: the second fails a third of that way later.
func TestFirstFailureIsFarAway(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	slowly(t, 250*time.Millisecond, func(far time.Duration) error {
		j := newJob(t, "--rsh", "rank far "+far.String(), "-H", "a,b", "sh", "-c", after+fmt.Sprintf(`[ $RANK = 1 ] && exit 7; after 1; sleep %v; exit 8`, far.Seconds()/3))
		j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
		report := j.reporting()
		if got := j.run(); got != 7 {
			return fmt.Errorf("exit code %d, want 7: %s", got, j.err.String())
		}
		j.gone()
		r := report()
		if r.Cause != 1 || r.Ranks[0].Code != 8 || !r.Ranks[1].End.Before(r.Ranks[0].End) {
			return fmt.Errorf("report %+v", r)
		}
		// Both started at nearly the same time, and so they say; a far host's start lags by what its order took.
		if d := r.Ranks[1].Start.Sub(r.Ranks[0].Start); d < far/2 || d > 10*time.Second+far {
			return fmt.Errorf("rank 1 started %v after rank 0, and its host is %v away", d, far)
		}
		return nil
	})
}
