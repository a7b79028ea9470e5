package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Row 7: ranks get what they may want to know with its real number, and never what is gorun's own affair.
func TestForwardedSignals(t *testing.T) {
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		j := newJob(t, "-np", "2", "rank", "allsignals")
		j.start().until(marks("up", 2)...)
		forwarded := []syscall.Signal{syscall.SIGUSR1, syscall.SIGQUIT, syscall.SIGALRM, syscall.SIGXCPU, syscall.SIGPWR, syscall.SIGCONT, 35, 64}
		for _, sig := range forwarded {
			// Others that are not forwarded would end gorun: package launcher tests the table.
			for _, never := range []syscall.Signal{syscall.SIGWINCH, syscall.SIGCHLD, syscall.SIGURG} {
				j.cmd.Process.Signal(never)
			}
			j.cmd.Process.Signal(sig)
			j.until(fmt.Sprintf("sig0-%d", sig), fmt.Sprintf("sig1-%d", sig))
		}
		j.cmd.Process.Signal(syscall.SIGUSR2)
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		got := map[string]int{}
		for line := range strings.Lines(j.out.String()) {
			got[strings.TrimSpace(line)]++
		}
		for _, sig := range append(forwarded, syscall.SIGUSR2) {
			if n := got[strconv.Itoa(int(sig))]; n != 2 {
				t.Errorf("%v came %d times, want once to each rank", sig, n)
			}
			delete(got, strconv.Itoa(int(sig)))
		}
		if len(got) > 0 {
			t.Errorf("the ranks saw these, too: %v", got)
		}
	})
}

// Ranks are warned in time before the timeout, and may save what they have.
func TestTimeoutSignal(t *testing.T) {
	t.Parallel()
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		slowly(t, 500*time.Millisecond, func(d time.Duration) error {
			before := time.Minute - d // at its end, if the ranks were not there yet when the signal came
			j := newJob(t, "-np", "2", "--timeout", "1m", "--timeout-signal", "USR1@"+before.String(), "rank", "signals", "10")
			if got := j.run(); got != 0 || j.err.String() != fmt.Sprintf("gorun: timeout in %v: SIGUSR1 to the ranks\n", before) {
				return fmt.Errorf("exit code %d, output %q, stderr %q", got, j.out.String(), j.err.String())
			}
			return nil
		})
	})
	t.Run("then the timeout", func(t *testing.T) {
		slowly(t, 300*time.Millisecond, func(d time.Duration) error {
			j := newJob(t, "-np", "2", "--timeout", (2 * d).String(), "--timeout-signal", "USR1@"+d.String(), "rank", "signals", "15")
			if got := j.run(); got != 124 {
				return fmt.Errorf("exit code %d, want 124: %s", got, j.err.String())
			}
			for _, rank := range []string{"0", "1"} {
				if got, want := j.signals(rank), []syscall.Signal{syscall.SIGUSR1, syscall.SIGTERM}; !slices.Equal(got, want) {
					return fmt.Errorf("rank %s saw %v, want %v", rank, got, want)
				}
			}
			return nil
		})
	})
}

// through makes the job's command line that of a shell script, in which "$@" stands for gorun's.
func (j *job) through(script string) *job {
	j.cmd.Args = append([]string{"sh", "-c", script, "sh", j.cmd.Path}, j.cmd.Args[1:]...)
	j.cmd.Path = "/bin/sh"
	return j
}

// gorunPID is the process of gorun itself, where it runs below a script.
func (j *job) gorunPID() int {
	j.t.Helper()
	for pid, line := range j.processes() {
		if words := strings.Fields(line); len(words) > 1 && filepath.Base(words[0]) == "gorun" && words[1] == "-np" {
			return pid
		}
	}
	j.t.Fatalf("no gorun in %v", j.processes())
	return 0
}

// gorun works in all the places from which it is started.
func TestSurroundings(t *testing.T) {
	t.Parallel()
	out := "0\n1\n"
	const quiet = `echo $RANK`
	for _, c := range []struct {
		name   string
		script string
		check  func(t *testing.T, j *job)
	}{
		{"cron", `exec env -i PATH="$PATH" HOME=/ LOGNAME=x SHELL=/bin/sh RANKDIR="$RANKDIR" setsid -w "$@" </dev/null`, nil},
		{"no environment but PATH", `exec env -i PATH="$PATH" "$@"`, nil},
		{"setsid", `exec setsid -w "$@"`, nil},
		{"nohup", `exec nohup "$@" </dev/null`, nil},
		{"background", `"$@" & wait $!`, nil},
		{"pipeline", `echo no | "$@" | cat`, nil},
		{"long TMPDIR", `TMPDIR=$RANKDIR/$(printf %0200d 7)/$(printf %0200d 8); export TMPDIR; mkdir -p $TMPDIR; exec "$@"`, nil},
		{"missing TMPDIR", `TMPDIR=$RANKDIR/none; export TMPDIR; exec "$@"`, nil},
		{"TMPDIR that is a file", `TMPDIR=$RANKDIR/f; export TMPDIR; touch $TMPDIR; exec "$@"`, nil},
		{"64 descriptors", `ulimit -n 64; exec "$@"`, nil},
		{"a million descriptors", `ulimit -n 1048576 2>/dev/null || ulimit -n $(ulimit -Hn); exec "$@"`, nil},
		{"no core files, small stack", `ulimit -c 0; ulimit -s 1024; exec "$@"`, nil},
		{"the children's signal is ignored", `trap '' CHLD; exec "$@"`, nil},
		{"a descriptor too many", `exec 3</dev/null 4>/dev/null 9>/dev/null "$@"`, nil},
		{"odd umask", `umask 777; exec "$@"`, nil},
		{"below itself", `exec gorun -np 1 "$@"`, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, "-np", "2", "sh", "-c", quiet).through(c.script)
			got := j.run()
			lines := strings.Split(strings.TrimSpace(j.out.String()), "\n")
			slices.Sort(lines)
			if text := strings.Join(lines, "\n") + "\n"; got != 0 || text != out || j.err.Len() > 0 {
				t.Errorf("exit code %d, output %q, stderr %q", got, text, j.err.String())
			}
			j.gone()
			// And a failure is one.
			j = newJob(t, "-np", "2", "sh", "-c", `[ $RANK = 0 ] || exit 3; sleep 1000`).through(c.script)
			if got := j.run(); got != 3 && c.name != "pipeline" {
				t.Errorf("exit code %d, want 3: %s", got, j.err.String())
			}
			j.gone()
			if !strings.Contains(j.err.String(), "gorun: rank 1 (host ") {
				t.Errorf("stderr %q", j.err.String())
			}
		})
	}
}

// In a container: as its root, as nobody, and as its first process, which the kernel treats in its own way.
func TestContainers(t *testing.T) {
	unraced(t)
	if out, err := exec.Command("unshare", "-Urpf", "--mount-proc", "true").CombinedOutput(); err != nil {
		citest.Lacking(t, "namespaces: %v: %s", err, out)
	}
	for _, c := range []struct{ name, script, id string }{
		{"root", `exec unshare -Ur "$@"`, "0"},
		{"nobody", `exec unshare -U "$@"`, "65534"},
		{"first process", `exec unshare -Urpf --mount-proc "$@"`, "0"},
		{"read-only", `exec unshare -Urm sh -c 'mount -t tmpfs -o ro none /tmp/../tmp 2>/dev/null; exec "$@"' sh "$@"`, "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "read-only" && strings.HasPrefix(t.TempDir(), "/tmp/") {
				// The test's own files are there: bind them again.
				c.script = `exec unshare -Urm sh -c 'export TMPDIR=/dev/shm/ro; mkdir -p $TMPDIR && mount -t tmpfs -o ro none $TMPDIR && exec "$@"' sh "$@"`
				t.Cleanup(func() { os.Remove("/dev/shm/ro") })
			}
			j := newJob(t, "-np", "2", "sh", "-c", `[ $RANK = 0 ] || exit 0; id -u`).through(c.script)
			if got := j.run(); got != 0 || j.out.String() != c.id+"\n" || j.err.Len() > 0 {
				t.Errorf("exit code %d, output %q, stderr %q", got, j.out.String(), j.err.String())
			}
			j.gone()
			j = newJob(t, "-np", "2", "rank", "family", "4").through(c.script)
			if got := j.run(); got != 4 {
				t.Errorf("exit code %d, want 4: %s", got, j.err.String())
			}
			j.gone()
		})
	}
	t.Run("first process, interrupted", func(t *testing.T) {
		j := newJob(t, "-np", "2", "rank", "signals", "15").through(`exec unshare -Urpf --mount-proc "$@"`)
		j.start().until(marks("up", 2)...)
		syscall.Kill(j.gorunPID(), syscall.SIGTERM)
		if got := j.wait(); got != 143 {
			t.Errorf("exit code %d, want 143: %s", got, j.err.String())
		}
		j.gone()
	})
}

// Another user than root, whose home is not writable.
func TestAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("is root's to test: who is not root runs all tests so")
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	for dir := bin; len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(bin, "gorun"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(out, in)
	if cerr := out.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	j := newJob(t, "-np", "2", "sh", "-c", `[ $RANK = 0 ] || exit 0; id -u; exit 8`)
	j.cmd.Path = filepath.Join(bin, "gorun")
	j.cmd.Dir = "/"
	j.cmd.Env = append(j.cmd.Env, "HOME=/root")
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if got := j.run(); got != 8 || j.out.String() != "65534\n" {
		t.Errorf("exit code %d, output %q, stderr %q", got, j.out.String(), j.err.String())
	}
	j.gone()
}

// Too few descriptors for the ranks: the limit is named.
func TestTooFewDescriptors(t *testing.T) {
	j := newJob(t, "-np", "64", "sleep", "1000").through(`ulimit -n 64; exec "$@"`)
	if got := j.run(); got != 125 || !strings.Contains(j.err.String(), "the limit is 64, and each rank needs 3; raise it with ulimit -n") {
		t.Errorf("exit code %d, stderr %q", got, j.err.String())
	}
	j.gone()
}

// Ranks have the limit of descriptors that gorun was started with, though it raises its own.
func TestRanksKeepTheLimit(t *testing.T) {
	j := newJob(t, "sh", "-c", "ulimit -Sn").through(`ulimit -Sn 200; exec "$@"`)
	if got := j.run(); got != 0 || j.out.String() != "200\n" {
		t.Errorf("exit code %d, %q: %s", got, j.out.String(), j.err.String())
	}
}

// What was ignored when gorun started stays so, for it and its ranks.
func TestIgnoredSignalsStayIgnored(t *testing.T) {
	for _, c := range []struct {
		name, script string
		send         syscall.Signal
	}{
		{"nohup", `nohup "$@" </dev/null; echo $? >$RANKDIR/code`, syscall.SIGHUP},
		{"background of a script", `"$@" & wait $!; echo $? >$RANKDIR/code`, syscall.SIGINT},
	} {
		t.Run(c.name, func(t *testing.T) {
			// A rank that is ended by what it and gorun are sent, unless it is ignored.
			j := newJob(t, "-np", "1", "sh", "-c", `printf %s $$ >$RANKDIR/tmp; mv $RANKDIR/tmp $RANKDIR/up0; until [ -e $RANKDIR/end ]; do sleep 0.01; done`).through(c.script)
			j.start().until("up0")
			pid := j.gorunPID()
			syscall.Kill(pid, c.send)
			syscall.Kill(j.mark("up0"), c.send)
			syscall.Kill(pid, syscall.SIGUSR2) // this one ends the rank
			got := j.wait()
			code, _ := os.ReadFile(filepath.Join(j.dir, "code"))
			if got != 0 || strings.TrimSpace(string(code)) != "140" {
				t.Errorf("exit code %q, want 140 (SIGUSR2); %s", code, j.err.String())
			}
			j.gone()
		})
	}
}

// gorun in a rank of gorun: signals go through, codes come back, and the inner ranks are of the inner job.
func TestNestedJobs(t *testing.T) {
	t.Run("code", func(t *testing.T) {
		j := newJob(t, "-np", "2", "gorun", "-np", "3", "sh", "-c", `echo $GORUN_RANK of $GORUN_SIZE; exit 5`)
		if got := j.run(); got != 5 || strings.Contains(j.out.String(), "of 2") {
			t.Errorf("exit code %d, output %q", got, j.out.String())
		}
		j.gone()
	})
	t.Run("ctrl-c", func(t *testing.T) {
		j := newJob(t, "-np", "1", "gorun", "-np", "2", "rank", "signals", "2")
		j.start().until(marks("up", 2)...)
		j.cmd.Process.Signal(syscall.SIGINT)
		if got := j.wait(); got != 130 {
			t.Errorf("exit code %d, want 130: %s", got, j.err.String())
		}
		for _, rank := range []string{"0", "1"} {
			if got := j.signals(rank); len(got) != 1 || got[0] != syscall.SIGINT {
				t.Errorf("rank %s saw %v, want SIGINT", rank, got)
			}
		}
		j.gone()
	})
}

// Row 8: Ctrl-Z in a shell with job control stops gorun and its ranks, the shell has the terminal, and fg lets all go on.
func TestShellJobControl(t *testing.T) {
	bash := citest.Program(t, "bash")
	home := remoteHome(t)
	for _, hosts := range []string{"", `--rsh "/bin/sh -c" -H a,b `} {
		t.Run("hosts="+strconv.FormatBool(hosts != ""), func(t *testing.T) {
			j := newJob(t)
			j.cmd.Path, j.cmd.Args = bash, []string{"bash", "--norc", "--noprofile", "-i"}
			j.cmd.Env = append(j.cmd.Env, "PS1=ready> ", "HOME="+home, "XDG_CACHE_HOME=", "HISTFILE=")
			term := onTerminal(t, j)
			shows := func(what string, n int) {
				t.Helper()
				j.eventually("the terminal shows "+what, 30*time.Second, func() bool { return strings.Count(term.shows(), what) >= n })
			}
			shows("ready> ", 1)
			term.master.WriteString("gorun -np 2 " + hosts + "rank signals 10\n")
			j.until(marks("up", 2)...)
			all := []int{j.gorunPID(), j.mark("up0"), j.mark("up1")}
			term.master.WriteString("\x1a")
			shows("ready> ", 2) // the shell has the terminal again
			for _, pid := range all {
				j.eventually("a stop", 20*time.Second, func() bool { return state(pid) == 'T' })
			}
			term.master.WriteString("echo $((40 + 2))\n")
			shows("42\r\n", 1)
			term.master.WriteString("fg\n")
			for _, pid := range all {
				j.eventually("the end of a stop", 20*time.Second, func() bool { s := state(pid); return s == 'S' || s == 'R' })
			}
			syscall.Kill(all[0], syscall.SIGUSR1)
			shows("ready> ", 4) // rank 0 would get what is typed before
			term.master.WriteString("exit $?\n")
			if got := j.wait(); got != 0 {
				t.Errorf("exit code %d: %s", got, term.shows())
			}
			j.gone()
		})
	}
}

// state is what a process does, as in ps: 'T' is stopped.
func state(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	return stat[strings.LastIndexByte(string(stat), ')')+2]
}

// The terminal goes away: the job ends as by SIGHUP.
func TestTerminalCloses(t *testing.T) {
	j := newJob(t, "-np", "2", "rank", "signals", "15")
	master, slave := openTerminal(t)
	j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = slave, slave, slave
	j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	j.start()
	slave.Close()
	j.until(marks("up", 2)...)
	master.Close() // as at the end of a connection
	if got := j.wait(); got != 129 {
		t.Errorf("exit code %d, want 129", got)
	}
	for _, rank := range []string{"0", "1"} {
		if got := j.signals(rank); len(got) != 1 || got[0] != syscall.SIGTERM {
			t.Errorf("rank %s saw %v, want SIGTERM", rank, got)
		}
	}
	j.gone()
}

// Where that signal is ignored, as under nohup, the job goes on, and ranks that read see the end of their input.
func TestTerminalClosesUnderNohup(t *testing.T) {
	everywhere(t, func(t *testing.T, newJob func(*testing.T, ...string) *job) {
		j := newJob(t, "-np", "2", "--stdin", "1", "sh", "-c", `[ $RANK = 1 ] && { touch $RANKDIR/reads; read x; touch $RANKDIR/end; }; exec rank signals 10`)
		j.cmd.Path, j.cmd.Args = "/bin/sh", append([]string{"sh", "-c", `trap '' HUP; exec "$0" "$@"`, j.cmd.Path}, j.cmd.Args[1:]...)
		master, slave := openTerminal(t)
		j.cmd.Stdin = slave
		j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		j.start()
		slave.Close()
		j.until("reads", "up0")
		master.Close()
		j.until("end", "up1")
		j.cmd.Process.Signal(syscall.SIGUSR1)
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		j.gone()
	})
}

// Agents work in odd places, too.
func TestRemoteSurroundings(t *testing.T) {
	unraced(t)
	t.Parallel()
	home := remoteHome(t)
	for _, c := range []struct{ name, before string }{
		{"64 descriptors", "ulimit -n 64"},
		{"a million descriptors", "ulimit -n 1048576 2>/dev/null || ulimit -n $(ulimit -Hn)"},
		{"missing TMPDIR", "export TMPDIR=/nonexistent/dir"},
		{"the children's signal is ignored", "trap '' CHLD"},
		{"nothing but PATH", "export -n LANG"},
		{"odd umask", "umask 777"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "rsh")
			if err := os.WriteFile(file, []byte("#!/bin/sh\n"+strings.ReplaceAll(c.before, "export -n LANG", "unset LANG TERM USER LOGNAME SHELL")+"\nexec /bin/sh -c \"$2\"\n"), 0o700); err != nil {
				t.Fatal(err)
			}
			j := newJob(t, "--rsh", file, "-H", "a:2,b:2", "rank", "family", "4")
			j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
			if got := j.run(); got != 4 {
				t.Errorf("exit code %d, want 4: %s", got, j.err.String())
			}
			j.gone()
		})
	}
}
