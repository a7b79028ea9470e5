package launcher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// beside has a test run beside others: its hosts are its own, and most of its time it waits. With -short under the race detector it is
// skipped: TestHostsRun, TestHostsOneEnds, TestHostsFailures and TestStageFiles go the same ways then.
func beside(t *testing.T) {
	t.Helper()
	if raceEnabled && testing.Short() {
		t.Skip("-short under the race detector: others go the same ways with a gorun that is built for it")
	}
	t.Parallel()
}

// newHosts makes hosts. Under the race detector, what gorun's agents and ranks there find is left in /tmp, where clean finds it.
func newHosts(t *testing.T, n int, o testhosts.Options) *testhosts.Hosts {
	t.Helper()
	if raceEnabled {
		o.Config = append(o.Config, "SetEnv GORACE=log_path=/tmp/race,atexit_sleep_ms=0")
	}
	return testhosts.New(t, n, o)
}

// onHosts are hosts with the rank program as /root/rank.
func onHosts(t *testing.T, n int) *testhosts.Hosts {
	t.Helper()
	h := newHosts(t, n, testhosts.Options{})
	for i := range n {
		if err := copyProgram("/proc/self/exe", h.Path(i, "/root/rank")); err != nil {
			t.Fatal(err)
		}
	}
	haveAgent(t, h)
	return h
}

// haveAgent puts gorun where it sends itself, which takes some time, and is not what most tests are for.
func haveAgent(t *testing.T, h *testhosts.Hosts) {
	t.Helper()
	file, err := gorunFile()
	if err != nil {
		t.Fatal(err)
	}
	for i := range h.Hosts {
		placeAgent(t, file, h.Path(i, "/root"))
	}
}

func copyProgram(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	syscall.ForkLock.RLock() // as in placeAgent
	defer syscall.ForkLock.RUnlock()
	w, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// hostsJob is a gorun that reaches hosts by its own ssh client. Its ranks leave marks in their /root.
type hostsJob struct {
	t        *testing.T
	cmd      *exec.Cmd
	out, err bytes.Buffer // err without slow
	slow     []string     // lines of gorun's, slowLines
	waited   bool
}

// slowLines are what gorun says while something takes long, as it may on a busy machine.
var slowLines = regexp.MustCompile(`(?m)^gorun: (waiting for \d+ of \d+ hosts: .*|sending (gorun|files) to .*|.*; waiting up to \S+ \(--kill-grace\) for .* to end)\n`)

// gorunDir is removed at the end of the tests; "" if gorun was not built.
var gorunDir string

// gorunFile is gorun, built.
var gorunFile = sync.OnceValues(func() (string, error) {
	var err error
	if gorunDir, err = os.MkdirTemp("", "gorun-test-"); err != nil {
		return "", err
	}
	file := filepath.Join(gorunDir, "gorun")
	cmd := exec.Command("go", "build", "-o", file, "../cmd/gorun")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if raceEnabled {
		cmd = exec.Command("go", "build", "-race", "-o", file, "../cmd/gorun")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w: %s", err, out)
	}
	return file, nil
})

func newHostsJob(t *testing.T, h *testhosts.Hosts, slots int, args ...string) *hostsJob {
	t.Helper()
	file, err := gorunFile()
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, one := range h.Hosts {
		list = append(list, fmt.Sprintf("%s:%d", one.Name, slots))
	}
	j := &hostsJob{t: t}
	j.cmd = h.Launcher(context.Background(), file, append([]string{"--ssh-config", h.SSHConfig, "-H", strings.Join(list, ","), "--stage", "none"}, args...)...)
	j.cmd.Stdout, j.cmd.Stderr, j.cmd.WaitDelay = &j.out, &j.err, 30*time.Second
	t.Cleanup(func() {
		if j.cmd.Process != nil && !j.waited {
			j.cmd.Process.Kill()
			j.cmd.Wait()
		}
	})
	return j
}

func (j *hostsJob) start() *hostsJob {
	j.t.Helper()
	if err := j.cmd.Start(); err != nil {
		j.t.Fatal(err)
	}
	return j
}

func (j *hostsJob) run() int { j.t.Helper(); return j.start().wait() }

// wait waits for gorun's end and returns its exit code.
func (j *hostsJob) wait() int {
	j.t.Helper()
	stuck := time.AfterFunc(90*time.Second, func() { j.cmd.Process.Signal(syscall.SIGABRT) }) // it tells what it does
	err := j.cmd.Wait()
	j.waited = true
	if !stuck.Stop() {
		j.t.Fatalf("gorun did not end in 90 s; stderr:\n%s", j.err.String())
	}
	text := j.err.String()
	j.slow = slowLines.FindAllString(text, -1)
	j.err.Reset()
	j.err.WriteString(slowLines.ReplaceAllString(text, ""))
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		j.t.Fatal(err)
	}
	st := j.cmd.ProcessState.Sys().(syscall.WaitStatus)
	if st.Signaled() {
		return 128 + int(st.Signal())
	}
	return st.ExitStatus()
}

// testRank is what the test binary does as a rank.
func testRank(verb string) {
	ctx := context.Background()
	fail := func(err error) {
		fmt.Fprintf(os.Stderr, "rank %s: %v\n", os.Getenv("GORUN_RANK"), err)
		os.Exit(1)
	}
	up := func() {
		if err := os.WriteFile("/root/up"+os.Getenv("GORUN_RANK"), nil, 0o600); err != nil {
			fail(err)
		}
	}
	if verb == "burn" { // every core, until a signal comes
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGUSR1)
		up()
		for range runtime.NumCPU() {
			go func() {
				for len(c) == 0 {
				}
			}()
		}
		<-c
		os.Exit(0)
	}
	job, err := bootstrap.Join(ctx)
	if err == nil {
		err = job.Barrier(ctx)
	}
	if err != nil {
		fail(err)
	}
	switch verb {
	case "join":
		fmt.Printf("rank %d of %d joined\n", job.Rank(), job.Size())
		if err := job.Close(); err != nil {
			fail(err)
		}
	case "barriers": // without end
		up()
		for err == nil {
			err = job.Barrier(ctx)
		}
		fail(err)
	case "wait": // until a host is lost
		lost := make(chan error, 1)
		job.Watch(func(e bootstrap.Event) {
			if e.Kind == bootstrap.HostLost {
				lost <- e.Err
			}
		})
		up()
		fail(<-lost)
	}
	os.Exit(0)
}

// up waits for the marks of ranks on hosts with as many ranks each.
func up(t *testing.T, j *hostsJob, h *testhosts.Hosts, slots int) {
	t.Helper()
	for i := range h.Hosts {
		for r := range slots {
			file := h.Path(i, "/root/up"+strconv.Itoa(i*slots+r))
			for end := time.Now().Add(60 * time.Second); ; time.Sleep(time.Millisecond) {
				if _, err := os.Stat(file); err == nil {
					break
				}
				if time.Now().After(end) {
					j.cmd.Process.Signal(syscall.SIGABRT) // it tells what it does
					t.Fatalf("%s: not within 60 s; gorun ended with %d, stderr:\n%s", file, j.wait(), j.err.String())
				}
			}
		}
	}
}

// inTime tries something until two times are within their bounds: that of gorun's end, and that of the end of what runs on hosts after it. They
// are what is tested, and the machine may be busy.
func inTime(t *testing.T, job, hosts time.Duration, try func() (job, hosts time.Duration)) {
	t.Helper()
	for range 6 {
		took, last := try()
		t.Logf("gorun ended after %v, the hosts were empty %v later", took.Round(time.Millisecond), last.Round(time.Millisecond))
		if took <= job && last <= hosts || t.Failed() {
			return
		}
	}
	t.Errorf("in 6 tries gorun did not end within %v, or what ran on hosts not within another %v", job, hosts)
}

// empty waits until nothing of the job runs on a host any more; it returns how long that took.
func empty(t *testing.T, h *testhosts.Hosts, i int) time.Duration {
	t.Helper()
	begin := time.Now()
	for {
		left, err := h.Processes(i)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			return time.Since(begin)
		}
		if took := time.Since(begin); took > 60*time.Second {
			t.Errorf("on %s there is still after %v: %v", h.Hosts[i].Name, took, left)
			return took
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// clean fails the test unless the hosts have nothing of the job: no process, no file but the cache, no shared memory.
func clean(t *testing.T, h *testhosts.Hosts) {
	t.Helper()
	for i := range h.Hosts {
		empty(t, h, i)
		for _, dir := range []string{"/root", "/home", "/tmp", "/var/tmp", "/run", "/dev/shm"} {
			files, err := h.Files(i, dir)
			if err != nil {
				t.Error(err)
			}
			for _, f := range files {
				switch {
				case strings.HasPrefix(f, "/root/.cache/gorun/"), strings.HasPrefix(f, "/run/"), strings.HasPrefix(f, "/root/up"), f == "/root/rank",
					strings.HasSuffix(f, "/.profile"), strings.HasSuffix(f, "/.bashrc"), strings.HasSuffix(f, "/.bash_profile"):
				case strings.HasPrefix(f, "/tmp/race."):
					text, _ := os.ReadFile(h.Path(i, f))
					t.Errorf("on %s: %s", h.Hosts[i].Name, text)
				default:
					t.Errorf("left on %s: %s", h.Hosts[i].Name, f)
				}
			}
		}
	}
}

func TestHostsRun(t *testing.T) {
	t.Parallel()
	h := onHosts(t, 4)
	t.Run("join", func(t *testing.T) {
		report := filepath.Join(t.TempDir(), "report")
		j := newHostsJob(t, h, 2, "--report", report, "/root/rank", "rank", "join")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		if text, err := os.ReadFile(report); err != nil || bytes.Contains(text, []byte(`"sent": true`)) {
			t.Errorf("the agent was sent, although it is there: %v", err)
		}
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got)
		var want []string
		for i := range 8 {
			want = append(want, fmt.Sprintf("rank %d of 8 joined", i))
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		clean(t, h)
	})
	t.Run("places", func(t *testing.T) {
		// There is no directory of this name on the hosts: the ranks run in one of the job's own.
		j := newHostsJob(t, h, 1, "-v", "sh", "-c", `echo "$GORUN_RANK $(hostname) $MASTER_ADDR $(echo $PWD | sed "s/gorun-.*/gorun/")"; [ $PWD = $(pwd -P) ] && touch file`)
		j.cmd.Dir = t.TempDir()
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got)
		var want []string
		for i := range 4 {
			want = append(want, fmt.Sprintf("%d h%d %v /tmp/gorun", i, i+1, h.Hosts[0].Addr))
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		if want := "gorun: host h2: there is no directory " + j.cmd.Dir + ": the ranks run in /tmp/gorun-"; !strings.Contains(j.err.String(), want) {
			t.Errorf("stderr %s, want %q in it", j.err.String(), want)
		}
		clean(t, h)
	})
	t.Run("here and there", func(t *testing.T) {
		citest.Program(t, "bash") // its /dev/tcp is a ProxyCommand
		// What ranks leave behind is ended on both, also what hides; the way to h1, a child of gorun as well, is not.
		config, err := os.ReadFile(h.SSHConfig)
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		file := filepath.Join(dir, "config")
		proxied := fmt.Sprintf("Host h1\n ProxyCommand bash -c 'exec 3<>/dev/tcp/%%h/%%p; cat <&3 & exec cat >&3'\n")
		if err := os.WriteFile(file, []byte(proxied+string(config)), 0o600); err != nil {
			t.Fatal(err)
		}
		j := newHostsJob(t, h, 1, "--ssh-config", file, "-H", "localhost", "sh", "-c",
			`env -u GORUN_JOB_ID setsid sleep 1000 >/dev/null 2>&1 & [ $GORUN_RANK = 4 ] && echo $! >"$0/pid"; echo "$GORUN_RANK $MASTER_ADDR"`, dir)
		if got := j.run(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		if n := strings.Count(j.out.String(), fmt.Sprintf(" %v\n", h.Hosts[0].Addr)); n != 5 {
			t.Errorf("output %q", j.out.String())
		}
		text, err := os.ReadFile(filepath.Join(dir, "pid"))
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(line), "sleep") {
			t.Errorf("pid %d is left behind", pid)
			syscall.Kill(pid, syscall.SIGKILL)
		}
		clean(t, h)
	})
	t.Run("directory missing on one", func(t *testing.T) {
		for i := range 3 {
			if err := os.Mkdir(h.Path(i, "/home/data"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		j := newHostsJob(t, h, 1, "--wdir", "/home/data", "true")
		if got, want := j.run(), "gorun: host h4: change to working directory /home/data: no such file or directory\n"; got != 126 || j.err.String() != want {
			t.Errorf("exit code %d, stderr %q, want 126, %q", got, j.err.String(), want)
		}
		clean(t, h)
	})
	t.Run("two names of one host", func(t *testing.T) {
		config, err := os.ReadFile(h.SSHConfig)
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "config")
		alias := fmt.Sprintf("Host other\n HostName %v\n", h.Hosts[1].Addr)
		if err := os.WriteFile(file, []byte(alias+strings.Replace(string(config), "Host h2", "Host h2 other", 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		j := newHostsJob(t, h, 1, "--ssh-config", file, "-H", "h1,other", "true")
		if got, want := j.run(), "gorun: hosts h2 and other are the same machine; give one of the names, with the slots of both\n"; got != 2 || j.err.String() != want {
			t.Errorf("exit code %d, stderr %q, want 2, %q", got, j.err.String(), want)
		}
		clean(t, h)
	})
	t.Run("program missing on one", func(t *testing.T) {
		if err := os.Rename(h.Path(1, "/root/rank"), h.Path(1, "/root/.cache/gorun/rank")); err != nil {
			t.Fatal(err)
		}
		defer os.Rename(h.Path(1, "/root/.cache/gorun/rank"), h.Path(1, "/root/rank"))
		j := newHostsJob(t, h, 1, "/root/rank", "rank", "join")
		if got, want := j.run(), "gorun: host h2: run /root/rank: no such file or directory\n"; got != 127 || j.err.String() != want {
			t.Errorf("exit code %d, stderr %q, want 127, %q", got, j.err.String(), want)
		}
		clean(t, h)
	})
}

// Each fault, how long it takes until gorun has ended, and until nothing is left.
func TestHostsFaults(t *testing.T) {
	beside(t)
	if testing.Short() {
		t.Skip("-short: waits for hosts to be missed")
	}
	sshd := func(t *testing.T, h *testhosts.Hosts, i int) {
		// The session's sshd is the agent's parent or grandparent.
		all, err := h.Processes(i)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if len(p.Args) == 2 && p.Args[1] == "agent" {
				for pid := p.PID; ; {
					status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
					m := regexp.MustCompile(`PPid:\s+(\d+)`).FindSubmatch(status)
					if m == nil {
						t.Fatalf("no sshd above %v", p)
					}
					pid, _ = strconv.Atoi(string(m[1]))
					comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
					if strings.HasPrefix(string(comm), "sshd") {
						syscall.Kill(pid, syscall.SIGKILL)
						return
					}
				}
			}
		}
		t.Fatalf("no agent in %v", all)
	}
	agent := func(t *testing.T, h *testhosts.Hosts, i int, sig syscall.Signal) {
		all, err := h.Processes(i)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if len(p.Args) == 2 && p.Args[1] == "agent" {
				syscall.Kill(p.PID, sig)
				return
			}
		}
		t.Fatalf("no agent in %v", all)
	}
	for _, c := range []struct {
		name  string
		fault func(t *testing.T, h *testhosts.Hosts, j *hostsJob)
		mend  func(h *testhosts.Hosts)
		code  int
		err   string        // a pattern, in stderr
		job   time.Duration // bound for gorun
		hosts time.Duration // and then for what runs on the hosts
	}{
		{"gorun killed", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) { j.cmd.Process.Kill() }, nil, 137, `^$`, time.Second, 2 * time.Second},
		{"agent killed", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) { agent(t, h, 1, syscall.SIGKILL) }, nil, 123, `host h2 is lost: its agent has ended`, 3 * time.Second, time.Second},
		{"agent of host 0 killed", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) { agent(t, h, 0, syscall.SIGKILL) }, nil, 123, `host h1 is lost: its agent has ended`, 3 * time.Second, time.Second},
		{"sshd killed", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) { sshd(t, h, 2) }, nil, 123, `host h3 is lost: `, 3 * time.Second, 2 * time.Second},
		{"link cut", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) {
			if err := h.Cut(1); err != nil {
				t.Fatal(err)
			}
		}, func(h *testhosts.Hosts) { h.Join(1) }, 123, `gorun: host h2 is lost: no answer for \d+s, and the other hosts do not reach it either`, 15 * time.Second, 15 * time.Second},
		{"link of host 0 cut", func(t *testing.T, h *testhosts.Hosts, j *hostsJob) {
			if err := h.Cut(0); err != nil {
				t.Fatal(err)
			}
		}, func(h *testhosts.Hosts) { h.Join(0) }, 123, `gorun: host h1 is lost: no answer for \d+s, and the other hosts do not reach it either`, 15 * time.Second, 15 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			if strings.HasPrefix(c.name, "link") {
				t.Parallel() // it takes 10 s in which nothing happens
			}
			h := onHosts(t, 3)
			inTime(t, c.job, c.hosts, func() (took, last time.Duration) {
				noMarks(t, h)
				j := newHostsJob(t, h, 2, "/root/rank", "rank", "wait").start()
				up(t, j, h, 2)
				begin := time.Now()
				c.fault(t, h, j)
				if got := j.wait(); got != c.code {
					t.Errorf("exit code %d, want %d", got, c.code)
				}
				took = time.Since(begin)
				if !regexp.MustCompile(c.err).MatchString(j.err.String()) {
					t.Errorf("stderr %q, want %s", j.err.String(), c.err)
				}
				if m := regexp.MustCompile(`gorun: host h(\d) is lost`).FindStringSubmatch(j.err.String()); m != nil {
					lost, _ := strconv.Atoi(m[1])
					for r := range 6 {
						if r/2 != lost-1 && !regexp.MustCompile(fmt.Sprintf(`(?m)^rank %d: .*\bh%d\b`, r, lost)).MatchString(j.err.String()) {
							t.Errorf("rank %d does not say that host h%d is lost", r, lost)
						}
					}
				}
				for i := range h.Hosts {
					last = max(last, empty(t, h, i))
				}
				t.Logf("%s", j.err.String())
				if c.mend != nil {
					c.mend(h)
				}
				clean(t, h)
				return took, last
			})
		})
	}
}

// The network between two hosts is cut, though gorun and a third one reach both.
func TestHostsApart(t *testing.T) {
	beside(t)
	if testing.Short() {
		t.Skip("-short: takes 20 s")
	}
	for _, to := range []int{0, 2} {
		t.Run(fmt.Sprintf("from %d to %d", 2-to, to), func(t *testing.T) {
			t.Parallel()
			h := onHosts(t, 3)
			inTime(t, 12*time.Second, 2*time.Second, func() (took, last time.Duration) {
				noMarks(t, h)
				j := newHostsJob(t, h, 1, "/root/rank", "rank", "barriers").start()
				up(t, j, h, 1)
				begin := time.Now()
				if err := h.Blackhole(2-to, to, true); err != nil {
					t.Fatal(err)
				}
				if got := j.wait(); got != 123 || !regexp.MustCompile(`(?m)^gorun: host h[13] is lost: host h[13] has not reached it for 8s; gorun does`).MatchString(j.err.String()) {
					t.Errorf("exit code %d, stderr %s", got, j.err.String())
				}
				took = time.Since(begin)
				for i := range h.Hosts {
					last = max(last, empty(t, h, i))
				}
				if err := h.Blackhole(2-to, to, false); err != nil {
					t.Fatal(err)
				}
				clean(t, h)
				return took, last
			})
		})
	}
}

// What is no loss: agents that are stopped for 3 s, one alone and all at once, while ranks burn every core.
func TestHostsNotLost(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: takes 10 s")
	}
	h := onHosts(t, 3)
	j := newHostsJob(t, h, 1, "/root/rank", "rank", "burn").start()
	up(t, j, h, 1)
	signal := func(which []int, sig syscall.Signal) {
		for _, i := range which {
			all, err := h.Processes(i)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range all {
				if len(p.Args) == 2 && p.Args[1] == "agent" {
					syscall.Kill(p.PID, sig)
				}
			}
		}
	}
	for _, which := range [][]int{{1}, {0, 1, 2}} {
		signal(which, syscall.SIGSTOP)
		time.Sleep(3 * time.Second)
		signal(which, syscall.SIGCONT)
	}
	time.Sleep(3 * time.Second) // gossip speaks of it for some time
	j.cmd.Process.Signal(syscall.SIGUSR1)
	if got := j.wait(); got != 0 || j.err.Len() > 0 {
		t.Errorf("exit code %d, stderr %q, want 0", got, j.err.String())
	}
	clean(t, h)
}

// Many hosts at once; how long it takes is in the log.
func TestHostsMany(t *testing.T) {
	beside(t)
	n := 16
	if s := os.Getenv("GORUN_TEST_HOSTS"); s != "" {
		var err error
		if n, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	} else if testing.Short() {
		t.Skip("-short: starts 16 sshds")
	}
	h := onHosts(t, n)
	for _, args := range [][]string{{"true"}, {"/root/rank", "rank", "join"}} {
		for range 3 {
			j := newHostsJob(t, h, 1, append([]string{"--report", filepath.Join(t.TempDir(), "report")}, args...)...)
			begin := time.Now()
			if got := j.run(); got != 0 || j.err.Len() > 0 {
				t.Fatalf("exit code %d: %s", got, j.err.String())
			}
			u := j.cmd.ProcessState
			t.Logf("%v on %d hosts: %v; gorun used %v + %v", args, n, time.Since(begin), u.UserTime(), u.SystemTime())
			if args[0] != "true" && strings.Count(j.out.String(), "joined\n") != n {
				t.Errorf("output %q", j.out.String())
			}
		}
	}
	clean(t, h)
}
