package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Row 1 of what users of other launchers report: in no state that a job may stay in for long do gorun, its keepers and its agents take a CPU. All
// states are looked at at once; a process that spins does so in every second that it is watched.
func TestNothingSpins(t *testing.T) {
	unraced(t)
	home := remoteHome(t)
	here := func(t *testing.T, args ...string) *job {
		t.Helper()
		return newJob(t, append([]string{"-np", "2"}, args...)...)
	}
	hosts := func(t *testing.T, args ...string) *job { t.Helper(); return remoteJob(t, home, "a,b", args...) }
	var jobs []*job
	var names []string
	for _, c := range []struct {
		name string
		job  func(t *testing.T, newJob func(*testing.T, ...string) *job) *job // started, and in that state
	}{
		{"a rank has failed, the other goes on", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "--on-fail", "wait", "sh", "-c", `[ $RANK = 1 ] && exit 3; exec rank sleep`)
			said := j.stderrLines()
			j.start().until("up0")
			said()
			return j
		}},
		{"the ranks have closed their streams", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "sh", "-c", `exec rank sleep <&- >&- 2>&-`).start()
			j.until(marks("up", 2)...)
			return j
		}},
		{"nobody reads stdout", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "flood")
			_, w := pipe(t)
			j.cmd.Stdout = w
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"the reader of stdout is gone", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep")
			r, w := pipe(t)
			j.cmd.Stdout = w
			j.start().until(marks("up", 2)...)
			r.Close()
			return j
		}},
		{"the reader of stderr is gone", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "sh", "-c", `echo $RANK >&2; exec rank sleep`)
			r, w := pipe(t)
			j.cmd.Stderr = w
			r.Close()
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"stdin is closed", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep")
			j.cmd.Path, j.cmd.Args = "/bin/sh", append([]string{"sh", "-c", `exec "$0" "$@" <&-`}, append([]string{j.cmd.Path}, j.cmd.Args[1:]...)...)
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"stdin is at its end, and no rank reads", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep")
			r, w := pipe(t)
			w.Close()
			j.cmd.Stdin = r
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"stdin waits, and no rank reads", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "--stdin", "all", "rank", "sleep")
			r, w := pipe(t)
			if _, err := w.Write(make([]byte, 60<<10)); err != nil {
				t.Fatal(err)
			}
			j.cmd.Stdin = r
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"ranks read, and nothing comes", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "--stdin", "all", "rank", "sum")
			r, _ := pipe(t)
			j.cmd.Stdin = r
			j.start().until(marks("up", 2)...)
			return j
		}},
		{"the terminal has hung up", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep")
			j.cmd.Path, j.cmd.Args = "/bin/sh", append([]string{"sh", "-c", `trap '' HUP; exec "$0" "$@"`}, append([]string{j.cmd.Path}, j.cmd.Args[1:]...)...) // as nohup does
			master, slave := openTerminal(t)
			j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = slave, slave, slave
			j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			j.start()
			slave.Close()
			j.until(marks("up", 2)...)
			master.Close()
			return j
		}},
		{"lines wait in the terminal, and no rank reads", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep")
			master, slave := openTerminal(t)
			j.cmd.Stdin, j.cmd.Stdout, j.cmd.Stderr = slave, slave, slave
			j.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
			t.Cleanup(func() { master.Close() })
			j.start()
			slave.Close()
			j.until(marks("up", 2)...)
			if _, err := master.WriteString("ls\nls\n"); err != nil {
				t.Fatal(err)
			}
			return j
		}},
		{"suspended", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "rank", "sleep").start()
			j.until(marks("up", 2)...)
			j.cmd.Process.Signal(syscall.SIGTSTP)
			j.eventually("gorun's stop", 30*time.Second, func() bool {
				stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", j.cmd.Process.Pid))
				return bytes.Contains(stat, []byte(") T "))
			})
			return j
		}},
		{"a rank takes its time to end", func(t *testing.T, newJob func(*testing.T, ...string) *job) *job {
			j := newJob(t, "--kill-grace", "1h", "rank", "signals").start()
			j.until(marks("up", 2)...)
			j.cmd.Process.Signal(syscall.SIGTERM)
			j.until("sig0-15", "sig1-15")
			return j
		}},
	} {
		for where, newJob := range map[string]func(*testing.T, ...string) *job{"here": here, "hosts": hosts} {
			jobs, names = append(jobs, c.job(t, newJob)), append(names, c.name+", "+where)
		}
	}
	lost := hosts(t, "--kill-grace", "1h", "rank", "signals").start()
	lost.until(marks("up", 2)...)
	syscall.Kill(lost.agent(1), syscall.SIGKILL)
	lost.until("sig0-15")
	jobs, names = append(jobs, lost), append(names, "a host is lost")

	for tries := 0; ; tries++ {
		const enough = 5 // ticks of 10 ms
		begin := gorunTicks(t)
		time.Sleep(time.Second)
		var busy []string
		for i, j := range jobs {
			for pid := range j.machinery(begin) {
				if now, ok := ticksOf(pid); ok && now-begin[pid].ticks > enough {
					busy = append(busy, fmt.Sprintf("%s: process %d (%s) took %d ms of CPU in a second", names[i], pid, begin[pid].what, 10*(now-begin[pid].ticks)))
				}
			}
		}
		if len(busy) == 0 {
			break
		}
		if tries == 20 {
			t.Errorf("they spin:\n%s", strings.Join(busy, "\n"))
			break
		}
	}
	for i, j := range jobs {
		n := len(j.machinery(gorunTicks(t)))
		// gorun and its keeper; on hosts also two agents with theirs, but for those of a lost host.
		want := 2
		if strings.HasSuffix(names[i], "hosts") {
			want = 5
		} else if j == lost {
			want = 3
		}
		if n != want {
			t.Errorf("%s: %d processes of gorun's were watched, want %d", names[i], n, want)
		}
	}
}

// pipe is a pipe whose ends are closed with the test.
func pipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	unix.CloseOnExec(int(r.Fd()))
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// gorunProcess is a process of gorun's.
type gorunProcess struct {
	what   string
	parent int
	ticks  int
}

// gorunTicks are all processes of gorun's: gorun, keepers, agents.
func gorunTicks(t *testing.T) map[int]gorunProcess {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	found := map[int]gorunProcess{}
	for _, d := range dirs {
		line, _ := os.ReadFile(d + "/cmdline")
		what := ""
		switch args := bytes.Split(line, []byte{0}); {
		case bytes.HasPrefix(line, []byte("gorun: keeper\x00")):
			what = "keeper"
		case len(args) > 1 && string(args[1]) == "agent":
			what = "agent"
		case filepath.Base(string(args[0])) == "gorun":
			what = "gorun"
		default:
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(d))
		fields, ok := statOf(pid)
		if !ok {
			continue
		}
		parent, _ := strconv.Atoi(fields[1])
		ticks, _ := ticksOf(pid)
		found[pid] = gorunProcess{what, parent, ticks}
	}
	return found
}

// machinery are those of a job.
func (j *job) machinery(all map[int]gorunProcess) map[int]gorunProcess {
	mine := map[int]gorunProcess{}
	marked := j.processes()
	for pid, p := range all {
		_, own := marked[pid]
		_, parents := marked[p.parent]
		if own || p.what == "keeper" && parents {
			mine[pid] = p
		}
	}
	return mine
}

// statOf are the fields of /proc/PID/stat from the state on.
func statOf(pid int) ([]string, bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, false
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	return f, len(f) > 13
}

// ticksOf is the CPU time that a process has taken.
func ticksOf(pid int) (int, bool) {
	f, ok := statOf(pid)
	if !ok {
		return 0, false
	}
	user, err1 := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	return user + system, err1 == nil && err2 == nil
}
