package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// job is a gorun under test, a process of its own.
type job struct {
	t        *testing.T
	cmd      *exec.Cmd
	dir      string       // where ranks leave marks
	out, err bytes.Buffer // err without slow
	slow     []string     // lines of gorun's, slowLines
	waited   bool
}

// slowLines are what gorun says while something takes long, as it may on a busy machine.
var slowLines = regexp.MustCompile(`(?m)^gorun: (waiting for \d+ of \d+ hosts: .*|sending (gorun|files) to .*|.*; waiting up to \S+ \(--kill-grace\) for .* to end)\n`)

// newJob prepares gorun with these arguments. Its ranks, and all that they start, are found again by RANKDIR.
func newJob(t *testing.T, args ...string) *job {
	t.Helper()
	path, err := exec.LookPath("gorun") // the test binary, by testscript.Main
	if err != nil {
		t.Fatal(err)
	}
	j := &job{t: t, dir: t.TempDir()}
	j.cmd = exec.Command(path, args...)
	j.cmd.Env = append(os.Environ(), "RANKDIR="+j.dir)
	j.cmd.Stdout, j.cmd.Stderr = &j.out, &j.err
	j.cmd.WaitDelay = 30 * time.Second
	t.Cleanup(func() {
		if j.cmd.Process != nil && !j.waited {
			j.cmd.Process.Kill()
			j.cmd.Wait()
		}
		for pid := range j.processes() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return j
}

func (j *job) start() *job {
	j.t.Helper()
	if err := j.cmd.Start(); err != nil {
		j.t.Fatal(err)
	}
	return j
}

// wait waits for gorun's end and returns its exit code.
func (j *job) wait() int {
	j.t.Helper()
	stuck := time.AfterFunc(90*time.Second, func() {
		for pid, line := range j.processes() {
			stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			j.t.Logf("pid %d is %s(stat %s)", pid, line, stat)
		}
		j.cmd.Process.Signal(syscall.SIGABRT) // says in stderr where it hangs
		time.Sleep(2 * time.Second)
		j.cmd.Process.Signal(syscall.SIGKILL)
	})
	err := j.cmd.Wait()
	j.waited = true
	if !stuck.Stop() {
		j.t.Fatalf("gorun did not end in 90 s; stderr:\n%s", j.err.String())
	}
	text := j.err.String()
	j.slow = slowLines.FindAllString(text, -1)
	j.err.Reset()
	j.err.WriteString(slowLines.ReplaceAllString(text, ""))
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		j.t.Fatal(err)
	}
	st := j.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if st.Signaled() {
		return 128 + int(st.Signal())
	}
	return st.ExitStatus()
}

func (j *job) run() int { j.t.Helper(); return j.start().wait() }

// until waits for a mark that a rank leaves.
func (j *job) until(names ...string) {
	j.t.Helper()
	for _, name := range names {
		j.eventually("mark "+name, 60*time.Second, func() bool { return exists(filepath.Join(j.dir, name)) })
	}
}

func (j *job) eventually(what string, bound time.Duration, f func() bool) {
	j.t.Helper()
	for end := time.Now().Add(bound); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			j.t.Fatalf("%s: not within %v", what, bound)
		}
	}
}

// mark is the process that left a mark.
func (j *job) mark(name string) int {
	j.t.Helper()
	text, err := os.ReadFile(filepath.Join(j.dir, name))
	if err != nil {
		j.t.Fatal(err)
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		j.t.Fatal(err)
	}
	return pid
}

// processes are the living processes of the job, gorun's own among them, by what they were started as.
func (j *job) processes() map[int]string {
	mark := []byte("RANKDIR=" + j.dir + "\x00")
	found := map[int]string{}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		j.t.Fatal(err)
	}
	for _, d := range dirs {
		env, err := os.ReadFile(d + "/environ")
		if err != nil || !bytes.Contains(append([]byte{0}, env...), append([]byte{0}, mark...)) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(d))
		if err != nil || !alive(pid) {
			continue
		}
		line, _ := os.ReadFile(d + "/cmdline")
		found[pid] = string(bytes.ReplaceAll(line, []byte{0}, []byte{' '}))
	}
	return found
}

// alive reports whether the process is there and no zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')'):], []byte{' '})
	return len(rest) > 0 && rest[0] != 'Z' && rest[0] != 'X'
}

// gone waits until no process of the job is left and returns how long that took. How soon it must be is TestNothingIsLeftInTime's.
func (j *job) gone() time.Duration {
	j.t.Helper()
	begin := time.Now()
	var left map[int]string
	for ; time.Since(begin) < 30*time.Second; time.Sleep(time.Millisecond) {
		if left = j.processes(); len(left) == 0 {
			return time.Since(begin)
		}
	}
	j.t.Errorf("still there after 30 s: %v", left)
	return time.Since(begin)
}

// keeper is the process id of this gorun's keeper.
func (j *job) keeper() int {
	j.t.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		line, _ := os.ReadFile(d + "/cmdline")
		stat, _ := os.ReadFile(d + "/stat")
		if !bytes.HasPrefix(line, []byte("gorun: keeper\x00")) {
			continue
		}
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(f) > 1 && f[1] == strconv.Itoa(j.cmd.Process.Pid) {
			pid, _ := strconv.Atoi(filepath.Base(d))
			return pid
		}
	}
	j.t.Fatal("gorun has no keeper")
	return 0
}

func marks(prefix string, n int) (names []string) {
	for i := range n {
		names = append(names, prefix+strconv.Itoa(i))
	}
	return names
}

func TestKillGorun(t *testing.T) {
	// Its ranks, their children, and grandchildren in sessions of their own.
	j := newJob(t, "-np", "3", "rank", "family").start()
	j.until(marks("up", 3)...)
	keeper := j.keeper()
	if n := len(j.processes()); n != 1+3*3 {
		t.Fatalf("%d processes, want gorun and 9 of its ranks: %v", n, j.processes())
	}
	j.cmd.Process.Kill()
	j.wait()
	j.gone()
	j.eventually("end of the keeper", 10*time.Second, func() bool { return !alive(keeper) })
}

// gorun is killed at any moment of a launch, and when some ranks run and others do not yet.
func TestKillGorunWhileItStarts(t *testing.T) {
	const ranks = 32
	launch := func() *job { return newJob(t, "-np", strconv.Itoa(ranks), "rank", "sleep").start() }
	kill := func(j *job) (ran int) {
		j.cmd.Process.Kill()
		j.wait()
		j.gone()
		files, _ := filepath.Glob(filepath.Join(j.dir, "up*"))
		return len(files)
	}
	begin := time.Now()
	j := launch()
	j.until(marks("up", ranks)...)
	whole := time.Since(begin)
	kill(j)
	const moments = 8
	for i := range moments {
		j := launch()
		time.Sleep(whole * time.Duration(i) / moments)
		kill(j)
	}
	for tries := 1; ; tries++ {
		j := launch()
		j.eventually("a rank", 60*time.Second, func() bool {
			files, _ := filepath.Glob(filepath.Join(j.dir, "up*"))
			return len(files) > 0
		})
		if ran := kill(j); ran < ranks {
			t.Logf("killed when %d of %d ranks ran; all do after %v", ran, ranks, whole)
			return
		}
		if tries == 20 {
			t.Fatalf("in %d tries all ranks ran when gorun was killed", tries)
		}
	}
}

func TestKillKeeper(t *testing.T) {
	j := newJob(t, "-np", "2", "rank", "family").start()
	j.until(marks("up", 2)...)
	syscall.Kill(j.keeper(), syscall.SIGKILL)
	if got := j.wait(); got != 125 {
		t.Errorf("exit code %d, want 125", got)
	}
	j.gone()
	if want := regexp.MustCompile(`(?m)^gorun: the keeper \(pid \d+\) died: `); !want.MatchString(j.err.String()) {
		t.Errorf("stderr %q, want %v", j.err.String(), want)
	}
}

func TestKillRank(t *testing.T) {
	j := newJob(t, "-np", "3", "rank", "family").start()
	j.until(marks("up", 3)...)
	pid := j.mark("up1")
	syscall.Kill(pid, syscall.SIGKILL)
	if got := j.wait(); got != 137 {
		t.Errorf("exit code %d, want 137", got)
	}
	j.gone()
	if want := fmt.Sprintf("pid %d) was killed by SIGKILL", pid); !strings.Contains(j.err.String(), want) {
		t.Errorf("stderr %q, want %q", j.err.String(), want)
	}
}

// A wrapper that ends leaves nothing behind, however well it hid it.
func TestLeftOverIsKilled(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		hide bool
		code int
	}{
		{"success", []string{"rank", "family", "0"}, false, 0},
		{"failure", []string{"rank", "family", "4"}, false, 4},
		{"without the job's id", []string{"rank", "family", "0"}, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, append([]string{"-np", "2"}, c.args...)...)
			if c.hide {
				j.cmd.Env = append(j.cmd.Env, "HIDE=1")
			}
			if got := j.run(); got != c.code {
				t.Errorf("exit code %d, want %d; stderr %s", got, c.code, j.err.String())
			}
			if left := j.processes(); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestExitOfOne(t *testing.T) {
	j := newJob(t, "-np", "4", "rank", "2:exit", "3")
	if got := j.run(); got != 3 {
		t.Errorf("exit code %d, want 3", got)
	}
	j.gone()
	if want := "\n  then: ranks 0,1,3 ended by gorun (SIGTERM)\n"; !strings.HasSuffix(j.err.String(), want) {
		t.Errorf("stderr %q, want it to end in %q", j.err.String(), want)
	}
}

// signals reports in which order the rank saw its signals.
func (j *job) signals(rank string) (got []syscall.Signal) {
	files, _ := filepath.Glob(filepath.Join(j.dir, "sig"+rank+"-*"))
	slices.SortFunc(files, func(a, b string) int {
		x, _ := os.Stat(a)
		y, _ := os.Stat(b)
		return x.ModTime().Compare(y.ModTime())
	})
	for _, f := range files {
		n, _ := strconv.Atoi(f[strings.LastIndexByte(f, '-')+1:])
		got = append(got, syscall.Signal(n))
	}
	return got
}

func TestSignals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		send []syscall.Signal // each after the ranks have seen the one before
		code int
		saw  []syscall.Signal
		text string // in stderr
	}{
		{"ctrl-c", []string{"rank", "signals", "2"}, []syscall.Signal{syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT}, "gorun: interrupted by SIGINT\n"},
		{"ctrl-c twice", []string{"--kill-grace", "1h", "rank", "signals"}, []syscall.Signal{syscall.SIGINT, syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT}, "ended by gorun (SIGKILL)"},
		{"ctrl-c, then by time", []string{"--kill-grace", "1s", "rank", "signals"}, []syscall.Signal{syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT, syscall.SIGTERM}, "ended by gorun (SIGKILL)"},
		{"term", []string{"rank", "signals", "15"}, []syscall.Signal{syscall.SIGTERM}, 143, []syscall.Signal{syscall.SIGTERM}, "gorun: interrupted by SIGTERM\n"},
		{"hang up", []string{"rank", "signals", "15"}, []syscall.Signal{syscall.SIGHUP}, 129, []syscall.Signal{syscall.SIGTERM}, "gorun: interrupted by SIGHUP\n"},
		{"no grace", []string{"--kill-grace", "0", "rank", "signals"}, []syscall.Signal{syscall.SIGTERM}, 143, nil, "ended by gorun (SIGKILL)"},
		{"forwarded", []string{"rank", "signals", "3"}, []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT}, 0, []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT}, "gorun: what the ranks do after "},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, append([]string{"-np", "2"}, c.args...)...).start()
			j.until(marks("up", 2)...)
			for i, sig := range c.send {
				j.cmd.Process.Signal(sig)
				if i < len(c.send)-1 {
					j.until(fmt.Sprintf("sig0-%d", sig), fmt.Sprintf("sig1-%d", sig))
					time.Sleep(200 * time.Millisecond) // a person's second Ctrl-C does not come at once
				}
			}
			if got := j.wait(); got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
			j.gone()
			if c.saw != nil {
				for _, rank := range []string{"0", "1"} {
					if got := j.signals(rank); !slices.Equal(got, c.saw) {
						t.Errorf("rank %s saw %v, want %v", rank, got, c.saw)
					}
				}
			}
			if got := j.err.String(); !strings.Contains(got, c.text) || c.text == "" && got != "" {
				t.Errorf("stderr %q, want %q", got, c.text)
			}
		})
	}
}

// stopAndGoOn suspends gorun as Ctrl-Z does, sees that its ranks stop with it, and lets it go on.
func (j *job) stopAndGoOn(ranks ...int) {
	j.t.Helper()
	all := append([]int{j.cmd.Process.Pid}, ranks...)
	state := func(pid int) byte {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			j.t.Fatal(err)
		}
		return stat[bytes.LastIndexByte(stat, ')')+2]
	}
	j.cmd.Process.Signal(syscall.SIGTSTP)
	for i, pid := range all {
		j.eventually(fmt.Sprintf("a stop of %d of gorun and its ranks (now %c)", i, state(pid)), 10*time.Second, func() bool { return state(pid) == 'T' })
	}
	j.cmd.Process.Signal(syscall.SIGCONT)
	for _, pid := range all {
		j.eventually("the end of a stop", 10*time.Second, func() bool { return state(pid) != 'T' })
	}
}

// Ctrl-Z stops the ranks, too, although they have sessions of their own.
func TestSuspend(t *testing.T) {
	j := newJob(t, "-np", "2", "rank", "signals", "10").start()
	j.until(marks("up", 2)...)
	for range 2 {
		j.stopAndGoOn(j.mark("up0"), j.mark("up1"))
	}
	j.cmd.Process.Signal(syscall.SIGUSR1)
	if got := j.wait(); got != 0 || j.err.Len() > 0 {
		t.Errorf("exit code %d, stderr %q, want 0", got, j.err.String())
	}
	j.gone()
}

func TestRankIgnoresTerm(t *testing.T) {
	// Rank 0 fails once the others are up; they ignore SIGTERM.
	j := newJob(t, "-np", "3", "--kill-grace", "100ms", "sh", "-c",
		`if [ $RANK = 0 ]; then while ! [ -e $RANKDIR/up1 -a -e $RANKDIR/up2 ]; do sleep 0.01; done; exit 7; fi; exec rank signals`)
	if got := j.run(); got != 7 {
		t.Errorf("exit code %d, want 7", got)
	}
	j.gone()
	if want := "then: ranks 1,2 ended by gorun (SIGKILL)\n"; !strings.Contains(j.err.String(), want) {
		t.Errorf("stderr %q, want %q", j.err.String(), want)
	}
}

func TestWaitingIsSaid(t *testing.T) {
	t.Parallel()
	j := newJob(t, "-np", "2", "--kill-grace", "1h", "sh", "-c",
		`if [ $RANK = 0 ]; then while ! [ -e $RANKDIR/up1 ]; do sleep 0.01; done; exit 7; fi; exec rank signals`)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	j.cmd.Stderr = w
	j.start()
	w.Close()
	line := make([]byte, 200)
	n, err := r.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	want := "gorun: rank 0 exited with code 7; waiting up to 1h0m0s (--kill-grace) for rank 1 to end\n"
	if got := string(line[:n]); got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	j.cmd.Process.Signal(syscall.SIGINT) // ends the waiting at once
	if got := j.wait(); got != 7 {
		t.Errorf("exit code %d, want 7", got)
	}
	j.gone()
}

func TestTimeout(t *testing.T) {
	j := newJob(t, "-np", "2", "--timeout", "100ms", "--kill-grace", "50ms", "rank", "family")
	if got := j.run(); got != 124 {
		t.Errorf("exit code %d, want 124", got)
	}
	j.gone()
}

func TestStdin(t *testing.T) {
	const size = 64 << 20
	block := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
	h := sha256.New()
	for range size / len(block) {
		h.Write(block)
	}
	empty := sha256.Sum256(nil)
	want := []string{
		fmt.Sprintf("0 %d %s", size, hex.EncodeToString(h.Sum(nil))),
		fmt.Sprintf("1 0 %s", hex.EncodeToString(empty[:])),
	}
	t.Run("pipe", func(t *testing.T) {
		j := newJob(t, "-np", "2", "rank", "sum")
		in, err := j.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		j.start()
		go func() {
			defer in.Close()
			for range size / len(block) {
				if _, err := in.Write(block); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got)
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("what is not read stays", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "in")
		if err := os.WriteFile(file, []byte("first\nsecond\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		in, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		j := newJob(t, "-np", "2", "rank", "exit", "0")
		j.cmd.Stdin = in
		if got := j.run(); got != 0 {
			t.Errorf("exit code %d", got)
		}
		rest, err := io.ReadAll(in)
		if err != nil || string(rest) != "first\nsecond\n" {
			t.Errorf("left in stdin: %q, %v", rest, err)
		}
	})
}

func TestArgumentsAndEnvironment(t *testing.T) {
	var all []byte
	for i := 1; i < 256; i++ {
		all = append(all, byte(i))
	}
	words := []string{"", " ", "a b", "it's", `"`, `\`, "tail\\", "$HOME", "*", "a=b", "-np", "--", "\n", "\xff\xfe", "ü", string(all), strings.Repeat("x", 100_000)}
	for i := range 200 {
		words = append(words, strconv.Itoa(i))
	}
	j := newJob(t, append([]string{"-x", "ODD1=" + string(all), "-x", "ODD2=", "rank", "args"}, words...)...)
	j.cmd.Env = append(j.cmd.Env, "ODD3=a=b\n\xff")
	if got := j.run(); got != 0 {
		t.Fatalf("exit code %d: %s", got, j.err.String())
	}
	var want []string
	for _, w := range words {
		want = append(want, strconv.Quote(w))
	}
	env := []string{strconv.Quote("ODD1=" + string(all)), strconv.Quote("ODD2="), strconv.Quote("ODD3=a=b\n\xff")}
	got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
	gotEnv := got[min(len(want), len(got)):]
	slices.Sort(gotEnv)
	if d := cmp.Diff(got, append(want, env...)); d != "" {
		t.Errorf("-got +want:\n%.3000s", d)
	}
}

func TestClosedDescriptors(t *testing.T) {
	for _, redirect := range []string{"<&-", ">&-", "2>&-", "<&- >&- 2>&-"} {
		t.Run(redirect, func(t *testing.T) {
			j := newJob(t)
			j.cmd = exec.Command("sh", "-c", "exec gorun -np 4 sh -c 'read x; echo out; echo err >&2; exit $RANK' "+redirect)
			j.cmd.Env = append(os.Environ(), "RANKDIR="+j.dir)
			j.cmd.Stdout, j.cmd.Stderr = &j.out, &j.err
			if got := j.run(); got < 1 || got > 3 {
				t.Errorf("exit code %d, want that of rank 1, 2 or 3; stderr %s", got, j.err.String())
			}
			j.gone()
			if strings.Contains(redirect, "2>&-") && j.err.Len() > 0 {
				t.Errorf("stderr %q", j.err.String())
			}
		})
	}
}

func TestManyRanks(t *testing.T) {
	report := filepath.Join(t.TempDir(), "r.json")
	j := newJob(t, "-np", "64", "--report", report, "sh", "-c", "echo $GORUN_RANK")
	if got := j.run(); got != 0 {
		t.Fatalf("exit code %d: %s", got, j.err.String())
	}
	got := strings.Fields(j.out.String())
	slices.Sort(got)
	var want []string
	for i := range 64 {
		want = append(want, strconv.Itoa(i))
	}
	slices.Sort(want)
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	var acct struct {
		Code  int
		Ranks []struct{ Rank, PID int }
	}
	text, err := os.ReadFile(report)
	if err == nil {
		err = json.Unmarshal(text, &acct)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(acct.Ranks) != 64 || acct.Ranks[63].Rank != 63 || acct.Ranks[63].PID == 0 {
		t.Errorf("report %+v", acct)
	}
}

// Nobody reads stderr: whatever ends the job ends gorun, although its last words can't be written.
func TestStuckReaderOfStderr(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		send []syscall.Signal
		code int
	}{
		{"term", nil, []syscall.Signal{syscall.SIGTERM}, 143},
		{"ctrl-c", nil, []syscall.Signal{syscall.SIGINT}, 130},
		{"timeout", []string{"--timeout", "4s"}, nil, 124},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, append(c.args, "-np", "2", "sh", "-c", "exec rank flood >&2")...)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			j.cmd.Stderr = w
			j.start()
			j.until(marks("up", 2)...)
			j.eventually("full pipe", 30*time.Second, func() bool {
				fds := []unix.PollFd{{Fd: int32(w.Fd()), Events: unix.POLLOUT}}
				_, err := unix.Poll(fds, 0)
				return err == nil && fds[0].Revents == 0
			})
			w.Close()
			for _, s := range c.send {
				j.cmd.Process.Signal(s)
			}
			if got := j.wait(); got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
			j.gone()
		})
	}
}

// GORUN_TEST_LAUNCHES=1000 is what a release is tested with.
func TestManyLaunches(t *testing.T) {
	n := often(50)
	if s := os.Getenv("GORUN_TEST_LAUNCHES"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		j := newJob(t, "-np", "32", "true")
		if got := j.run(); got != 0 || j.err.Len() > 0 || j.out.Len() > 0 {
			t.Fatalf("launch %d: exit code %d, stdout %q, stderr %q", i, got, j.out.String(), j.err.String())
		}
	}
}

func TestTwoAtOnceHaveTheirOwnPorts(t *testing.T) {
	var jobs []*job
	for range 8 {
		jobs = append(jobs, newJob(t, "sh", "-c", "echo $MASTER_PORT; sleep 0.3").start())
	}
	ports := map[string]bool{}
	for _, j := range jobs {
		if got := j.wait(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		if port := j.out.String(); ports[port] {
			t.Errorf("port %s was given twice", port)
		} else {
			ports[port] = true
		}
	}
}

// gorun under gorun: each job ends its own, and the outer one all.
func TestNested(t *testing.T) {
	j := newJob(t, "-np", "2", "gorun", "-np", "2", "rank", "family").start()
	j.until(marks("up", 2)...)
	j.cmd.Process.Kill()
	j.wait()
	j.gone()
}
