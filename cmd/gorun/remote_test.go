package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// agentHome is the directory of remoteHome; TestMain removes it.
var agentHome struct {
	sync.Mutex
	dir string
}

// remoteHome has gorun where it sends itself, which takes some time, and is not what most tests are for.
func remoteHome(t *testing.T) string {
	t.Helper()
	agentHome.Lock()
	defer agentHome.Unlock()
	if agentHome.dir == "" {
		home, err := os.MkdirTemp("", "gorun-home-")
		if err != nil {
			t.Fatal(err)
		}
		agentHome.dir = home
		self, err := os.ReadFile("/proc/self/exe")
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(self)
		agent := filepath.Join(home, ".cache", "gorun", "gorun-"+hex.EncodeToString(sum[:]))
		syscall.ForkLock.RLock() // a child that is forked meanwhile would have it open to write, and it would be busy
		defer syscall.ForkLock.RUnlock()
		if err := errors.Join(os.MkdirAll(filepath.Dir(agent), 0o700), os.WriteFile(agent, self, 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	return agentHome.dir
}

// remoteJob prepares gorun with hosts that are all this machine, each with an agent of its own.
func remoteJob(t *testing.T, home, hosts string, args ...string) *job {
	t.Helper()
	j := newJob(t, append([]string{"--rsh", "/bin/sh -c", "-H", hosts}, args...)...)
	j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
	return j
}

// agents are the processes of the agents of a job, by the ranks' parents.
func (j *job) agent(rank int) int {
	j.t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", j.mark("up"+strconv.Itoa(rank))))
	if err != nil {
		j.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[1])
	if err != nil {
		j.t.Fatal(err)
	}
	if line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); !bytes.Contains(line, []byte("\x00agent\x00")) {
		j.t.Fatalf("the parent of rank %d is %q, no agent", rank, line)
	}
	return pid
}

// keeperOf is the keeper of an agent.
func keeperOf(t *testing.T, agent int) int {
	t.Helper()
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		line, _ := os.ReadFile(d + "/cmdline")
		stat, _ := os.ReadFile(d + "/stat")
		if !bytes.HasPrefix(line, []byte("gorun: keeper\x00")) {
			continue
		}
		if f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])); len(f) > 1 && f[1] == strconv.Itoa(agent) {
			pid, _ := strconv.Atoi(filepath.Base(d))
			return pid
		}
	}
	t.Fatalf("agent %d has no keeper", agent)
	return 0
}

func TestRemote(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	t.Run("ranks", func(t *testing.T) {
		j := remoteJob(t, home, "a:2,b:3", "rank", "join", "well")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got)
		var want []string
		for i := range 5 {
			want = append(want, fmt.Sprintf("rank %d of 5 joined", i))
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
		j.gone()
	})
	t.Run("meeting point", func(t *testing.T) {
		j := remoteJob(t, home, "a,b", "rank", "listen")
		if got := j.run(); got != 0 || j.out.String() != "listening\n" {
			t.Errorf("exit code %d, %s%s", got, j.out.String(), j.err.String())
		}
	})
	for _, c := range []struct {
		name string
		args []string
		code int
		err  string // a pattern, in stderr
	}{
		{"exit", []string{"rank", "2:exit", "3"}, 3, `^gorun: rank 2 \(host b, pid \d+\) exited with code 3 after \S+\n  then: ranks? 0.* ended by gorun \(SIGTERM\)`},
		{"exit on host 0", []string{"rank", "1:exit", "4"}, 4, `^gorun: rank 1 \(host a, pid \d+\) exited with code 4 `},
		{"killed", []string{"rank", "3:kill"}, 137, `^gorun: rank 3 \(host b, pid \d+\) was killed by SIGKILL `},
		{"silent death", []string{"rank", "join", "silently"}, 1, `(?s)barrier #2 of group world: rank 3.*gorun: rank 3 \(host b, pid \d+\) exited with code 0 .*without leaving the job`},
		{"goodbye, then a failure", []string{"rank", "join", "badly"}, 7, `(?m)^gorun: rank 3 \(host b, pid \d+\) exited with code 7 `},
		{"cause on another host", []string{"rank", "fail", "error"}, 2, `(?m)^gorun: rank 1 \(host a, pid \d+\) exited with code 2 `},
		{"missing program", []string{"nonexistent-program"}, 127, `nonexistent-program`},
		{"missing directory", []string{"--wdir", "/nonexistent/dir", "true"}, 126, `host a: change to working directory /nonexistent/dir: no such file or directory`},
		{"timeout", []string{"--timeout", "1s", "rank", "sleep"}, 124, `(?s)^gorun: what the ranks do after \S+:\n  .*\ngorun: timeout: `},
		{"left over", []string{"rank", "family", "0"}, 0, `^$`},
		{"left over of a failure", []string{"rank", "family", "4"}, 4, `^gorun: rank \d`},
		{"stderr is shown once", []string{"rank", "1:stderr"}, 5, `^something is wrong on 1\ngorun: rank 1 \(host a, pid \d+\) exited with code 5 after \S+\n  then:`},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := remoteJob(t, home, "a:2,b:2", c.args...)
			if got := j.run(); got != c.code {
				t.Errorf("exit code %d, want %d", got, c.code)
			}
			if got := j.err.String(); !regexp.MustCompile(c.err).MatchString(got) {
				t.Errorf("stderr %q, want %s", got, c.err)
			}
			j.gone()
		})
	}
	for _, c := range []struct {
		name string
		args []string
		send []syscall.Signal
		code int
		saw  []syscall.Signal
	}{
		{"ctrl-c", []string{"rank", "signals", "2"}, []syscall.Signal{syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT}},
		{"ctrl-c twice", []string{"--kill-grace", "1h", "rank", "signals"}, []syscall.Signal{syscall.SIGINT, syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT}},
		{"ctrl-c, then by time", []string{"--kill-grace", "1s", "rank", "signals"}, []syscall.Signal{syscall.SIGINT}, 130, []syscall.Signal{syscall.SIGINT, syscall.SIGTERM}},
		{"forwarded", []string{"rank", "signals", "3"}, []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT}, 0, []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGQUIT}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := remoteJob(t, home, "a,b", c.args...).start()
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
			for _, rank := range []string{"0", "1"} {
				if got := j.signals(rank); !slices.Equal(got, c.saw) {
					t.Errorf("rank %s saw %v, want %v", rank, got, c.saw)
				}
			}
		})
	}
	t.Run("ctrl-z", func(t *testing.T) {
		j := remoteJob(t, home, "a,b", "rank", "signals", "10").start()
		j.until(marks("up", 2)...)
		j.stopAndGoOn(j.mark("up0"), j.mark("up1"))
		j.cmd.Process.Signal(syscall.SIGUSR1)
		if got := j.wait(); got != 0 || j.err.Len() > 0 {
			t.Errorf("exit code %d, stderr %q, want 0", got, j.err.String())
		}
	})
	t.Run("stdin", func(t *testing.T) {
		data := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
		sum, none := sha256.Sum256(data), sha256.Sum256(nil)
		j := remoteJob(t, home, "a,b", "rank", "sum")
		j.cmd.Stdin = bytes.NewReader(data)
		if got := j.run(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got)
		want := []string{fmt.Sprintf("0 %d %s", len(data), hex.EncodeToString(sum[:])), "1 0 " + hex.EncodeToString(none[:])}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%s", d)
		}
	})
	t.Run("stdin that is not read, nor ends", func(t *testing.T) {
		j := remoteJob(t, home, "a,b", "rank", "exit", "0")
		in, err := j.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		if got := j.run(); got != 0 {
			t.Errorf("exit code %d: %s", got, j.err.String())
		}
	})
	t.Run("arguments and environment", func(t *testing.T) {
		var all []byte
		for i := 1; i < 256; i++ {
			all = append(all, byte(i))
		}
		words := []string{"", " ", "it's", `"`, `\`, "$HOME", "*", "--", "\n", "\xff\xfe", string(all), strings.Repeat("x", 100_000)}
		for i := range 200 {
			words = append(words, strconv.Itoa(i))
		}
		j := remoteJob(t, home, "a", append([]string{"-x", "ODD1=" + string(all), "-x", "ODD2=", "rank", "args"}, words...)...)
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		var want []string
		for _, w := range words {
			want = append(want, strconv.Quote(w))
		}
		want = append(want, strconv.Quote("ODD1="+string(all)), strconv.Quote("ODD2="))
		got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
		slices.Sort(got[min(len(words), len(got)):])
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("-got +want:\n%.3000s", d)
		}
	})
	t.Run("environment that shells choke on", func(t *testing.T) {
		odd := map[string]string{"BASH_FUNC_f%%": "() {  echo \"it's\"; }", "LESSOPEN": "||/usr/bin/lesspipe '%s'", "A.B-C": `--x="a b"\\`}
		var args []string
		for name, value := range odd {
			args = append(args, "-x", name+"="+value)
		}
		j := remoteJob(t, home, "a,b", append(args, "/usr/bin/env", "-0")...)
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		for name, value := range odd {
			if got := strings.Count(j.out.String(), name+"="+value+"\x00"); got != 2 {
				t.Errorf("%s=%s arrives on %d hosts of 2", name, value, got)
			}
		}
	})
	t.Run("report", func(t *testing.T) {
		report := filepath.Join(t.TempDir(), "r.json")
		j := remoteJob(t, home, "a,b", "--report", report, "rank", "join", "well")
		if got := j.run(); got != 0 {
			t.Fatalf("exit code %d: %s", got, j.err.String())
		}
		var acct struct {
			Ranks []struct {
				Host         string
				PID          int
				Joined, Left bool
				Start, End   time.Time
			}
		}
		text, err := os.ReadFile(report)
		if err == nil {
			err = json.Unmarshal(text, &acct)
		}
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range acct.Ranks {
			if r.Host != []string{"a", "b"}[i] || r.PID == 0 || !r.Joined || !r.Left || !r.End.After(r.Start) || time.Since(r.Start) > time.Minute {
				t.Errorf("rank %d: %+v", i, r)
			}
		}
	})
}

func TestRemoteFaults(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	t.Run("gorun is killed", func(t *testing.T) {
		j := remoteJob(t, home, "a:2,b:2", "rank", "family").start()
		j.until(marks("up", 4)...)
		j.cmd.Process.Kill()
		j.wait()
		j.gone()
	})
	t.Run("the session ends", func(t *testing.T) {
		// What carries it is killed, as sshd may be; the agent lives on, and sees the end of its stdin.
		j := newJob(t, "--rsh", "/bin/sh -c 'cat | { /bin/sh -c \"$2\"; } | cat' gorun", "-H", "a:2", "--kill-grace", "200ms", "rank", "family")
		j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
		j.start()
		j.until(marks("up", 2)...)
		cat := 0
		for pid, line := range j.processes() {
			if line == "cat " {
				cat = pid
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		if cat == 0 {
			t.Fatalf("no session in %v", j.processes())
		}
		if got := j.wait(); got != 123 {
			t.Errorf("exit code %d, want 123: %s", got, j.err.String())
		}
		j.gone()
	})
	t.Run("an agent is killed", func(t *testing.T) {
		j := remoteJob(t, home, "a:2,b:2", "rank", "family").start()
		j.until(marks("up", 4)...)
		syscall.Kill(j.agent(2), syscall.SIGKILL)
		if got := j.wait(); got != 123 {
			t.Errorf("exit code %d, want 123", got)
		}
		j.gone()
		if want := regexp.MustCompile(`^gorun: host b is lost: its agent has ended \(killed by SIGKILL\)\n  then: .*ranks 2,3 lost with host b`); !want.MatchString(j.err.String()) {
			t.Errorf("stderr %q, want %v", j.err.String(), want)
		}
	})
	t.Run("a keeper is killed", func(t *testing.T) {
		j := remoteJob(t, home, "a:2,b:2", "rank", "sleep").start()
		j.until(marks("up", 4)...)
		syscall.Kill(keeperOf(t, j.agent(2)), syscall.SIGKILL)
		if got := j.wait(); got != 125 {
			t.Errorf("exit code %d, want 125", got)
		}
		j.gone()
		if want := regexp.MustCompile(`^gorun: host b: the keeper \(pid \d+\) died: `); !want.MatchString(j.err.String()) {
			t.Errorf("stderr %q, want %v", j.err.String(), want)
		}
	})
	t.Run("an agent is terminated", func(t *testing.T) {
		j := remoteJob(t, home, "a,b", "rank", "sleep").start()
		j.until(marks("up", 2)...)
		syscall.Kill(j.agent(1), syscall.SIGTERM)
		if got := j.wait(); got != 125 || !strings.Contains(j.err.String(), "gorun: host b: the agent was terminated (SIGTERM)") {
			t.Errorf("exit code %d, stderr %q, want 125", got, j.err.String())
		}
		j.gone()
	})
	t.Run("an agent is stopped for 3 s", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short: takes 3 s")
		}
		j := remoteJob(t, home, "a,b", "rank", "signals", "10").start()
		j.until(marks("up", 2)...)
		for _, rank := range []int{0, 1} {
			syscall.Kill(j.agent(rank), syscall.SIGSTOP)
		}
		time.Sleep(3 * time.Second)
		for _, rank := range []int{0, 1} {
			syscall.Kill(j.agent(rank), syscall.SIGCONT)
		}
		j.cmd.Process.Signal(syscall.SIGUSR1)
		if got := j.wait(); got != 0 || j.err.Len() > 0 {
			t.Errorf("exit code %d, stderr %q, want 0", got, j.err.String())
		}
	})
	t.Run("an agent is stopped for good", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short: takes 10 s")
		}
		// One of two hosts, and, meanwhile, the only host of a job.
		j, alone := remoteJob(t, home, "a,b", "rank", "sleep").start(), remoteJob(t, home, "c", "rank", "sleep").start()
		j.until(marks("up", 2)...)
		alone.until(marks("up", 1)...)
		agents := []int{j.agent(1), alone.agent(0)}
		begin := time.Now()
		for _, pid := range agents {
			syscall.Kill(pid, syscall.SIGSTOP)
		}
		if got := j.wait(); got != 123 || !regexp.MustCompile(`^gorun: host b is lost: no answer for \d+s, and (the other hosts do not reach it either|it has not met the other hosts yet)\n`).MatchString(j.err.String()) {
			t.Errorf("exit code %d, stderr %q, want 123", got, j.err.String())
		}
		if got := alone.wait(); got != 123 || !regexp.MustCompile(`^gorun: host c is lost: no answer for \d+s\n`).MatchString(alone.err.String()) {
			t.Errorf("exit code %d, stderr %q, want 123", got, alone.err.String())
		}
		if d := time.Since(begin); d > 15*time.Second {
			t.Errorf("the job ended after %v", d)
		}
		j.gone()
		alone.gone()
	})
}

// A host that does not start is told with its reason, and the others are ended.
func TestRemoteNotStarted(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	sh := func(b string) string { return `sh -c 'case $1 in b) ` + b + `;; *) exec /bin/sh -c "$2";; esac' rsh` }
	for _, c := range []struct {
		name, rsh string
		args      []string
		err       string // a pattern, in stderr
	}{
		{"refuses", sh(`echo go away >&2; exit 7`), nil, `^gorun: host b: start the agent: .*exit status 7.*go away`},
		{"needs no shell", sh(`exec "$2"`), nil, `(?m)^gorun: host b: start the agent: the session ended before it: exit status 127; it said: .*\n    the command of --rsh must hand its last argument to a shell there`},
		{"says nothing", sh(`exec sleep 1000`), []string{"--connect-timeout"}, `^gorun: host b: .*no answer within [0-9.]+m?s`},
		{"says something else", sh(`echo hello; exec cat >/dev/null`), []string{"--connect-timeout"}, `^gorun: host b: .*hello`},
		{"another agent", sh(`exec /bin/sh -c "$2" 2>&1 | sed -u "s/^gorun agent 1 .*/gorun agent 1 v0.0.1/"`), nil, `^gorun: host b: the agent is gorun v0\.0\.1, this is `},
		{"another protocol", sh(`exec /bin/sh -c "$2" 2>&1 | sed -u "s/^gorun agent 1 /gorun agent 99 /"`), nil, `^gorun: host b: the agent speaks version 99 of the protocol, gorun version 1`},
		{"garbage", sh(`exec /bin/sh -c "$2" 2>&1 | sed -u "/^gorun agent 1 /q"; echo garbage garbage garbage`), nil, `^gorun: host b: `},
	} {
		t.Run(c.name, func(t *testing.T) {
			slowly(t, 500*time.Millisecond, func(d time.Duration) error { // the time is for all hosts
				args := c.args
				if len(args) > 0 {
					args = append(args[:len(args):len(args)], d.String())
				}
				j := newJob(t, slices.Concat([]string{"--rsh", c.rsh, "-H", "a,b,c"}, args, []string{"rank", "sleep"})...)
				j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
				if got := j.run(); got != 122 || !regexp.MustCompile(c.err).MatchString(j.err.String()) {
					return fmt.Errorf("exit code %d, want 122; stderr %q, want %s", got, j.err.String(), c.err)
				}
				j.gone()
				return nil
			})
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		j := newJob(t, "--rsh", sh(`touch $RANKDIR/asked; exec sleep 1000`), "-H", "a,b,c", "rank", "sleep")
		j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
		j.start()
		j.until("asked")
		j.cmd.Process.Signal(syscall.SIGINT)
		if got := j.wait(); got != 130 {
			t.Errorf("exit code %d, want 130: %s", got, j.err.String())
		}
		j.gone()
	})
	t.Run("waiting is said", func(t *testing.T) {
		slowly(t, 2500*time.Millisecond, func(d time.Duration) error {
			j := newJob(t, "--rsh", sh(`exec sleep 1000`), "-H", "a,b,c", "--connect-timeout", d.String(), "rank", "sleep")
			j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
			if got := j.run(); got != 122 || !strings.HasPrefix(j.err.String(), "gorun: host b: ") || !regexp.MustCompile(`gorun: waiting for \d of 3 hosts: (a, )?b(, c)?\n`).MatchString(strings.Join(j.slow, "")) {
				return fmt.Errorf("exit code %d, stderr %q, and %q", got, j.err.String(), j.slow)
			}
			return nil
		})
	})
}
