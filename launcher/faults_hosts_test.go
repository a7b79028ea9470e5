package launcher

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// rankScript is a rank that leaves a mark and then waits: for ever, or for SIGUSR1, after which it exits with code 3.
const rankScript = `trap "exit 3" USR1; touch /root/up$GORUN_RANK; sleep 1000 & wait`

// only is the one process on a host for which ok holds.
func only(t *testing.T, h *testhosts.Hosts, i int, what string, ok func(testhosts.Process) bool) int {
	t.Helper()
	all, err := h.Processes(i)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, p := range all {
		if ok(p) {
			if found != 0 {
				t.Fatalf("%s: two of them on %s: %v", what, h.Hosts[i].Name, all)
			}
			found = p.PID
		}
	}
	if found == 0 {
		t.Fatalf("no %s on %s: %v", what, h.Hosts[i].Name, all)
	}
	return found
}

func keeperOn(t *testing.T, h *testhosts.Hosts, i int) int {
	t.Helper()
	return only(t, h, i, "keeper", func(p testhosts.Process) bool { return p.Args[0] == "gorun: keeper" })
}

func rankOn(t *testing.T, h *testhosts.Hosts, i, rank int) int {
	t.Helper()
	mark := []byte("\x00GORUN_RANK=" + strconv.Itoa(rank) + "\x00")
	parent := []byte("\nPPid:\t" + strconv.Itoa(agentOn(t, h, i)) + "\n") // a child of the rank is the same shell until it runs its program
	return only(t, h, i, "rank", func(p testhosts.Process) bool {
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID))
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
		return bytes.Contains(status, parent) && bytes.Contains(append([]byte{0}, env...), mark)
	})
}

// sshdOn is the sshd that listens on a host.
func sshdOn(t *testing.T, h *testhosts.Hosts, i int) int {
	t.Helper()
	first := filepath.Base(filepath.Dir(h.Path(i, "")))
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		status, _ := os.ReadFile(d + "/status")
		if bytes.HasPrefix(status, []byte("Name:\tsshd\n")) && bytes.Contains(status, []byte("\nPPid:\t"+first+"\n")) {
			pid, _ := strconv.Atoi(filepath.Base(d))
			return pid
		}
	}
	t.Fatalf("no sshd on %s", h.Hosts[i].Name)
	return 0
}

// noMarks removes what ranks left.
func noMarks(t *testing.T, h *testhosts.Hosts) {
	t.Helper()
	for i := range h.Hosts {
		files, _ := filepath.Glob(h.Path(i, "/root/up*"))
		for _, f := range files {
			if err := os.Remove(f); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The end of one process on a host, and how soon gorun has ended after it.
func TestHostsOneEnds(t *testing.T) {
	h := newHosts(t, 3, testhosts.Options{})
	haveAgent(t, h)
	for _, c := range []struct {
		name  string
		fault func(t *testing.T, j *hostsJob)
		code  int
		err   string        // a pattern, in stderr
		job   time.Duration // bound for gorun
		hosts time.Duration // and then for what runs on the hosts
	}{
		{"rank exits", func(t *testing.T, j *hostsJob) { syscall.Kill(rankOn(t, h, 1, 3), syscall.SIGUSR1) }, 3,
			`^gorun: rank 3 \(host h2, pid \d+\) exited with code 3 after \S+\n`, 500 * time.Millisecond, time.Second},
		{"rank killed", func(t *testing.T, j *hostsJob) { syscall.Kill(rankOn(t, h, 2, 4), syscall.SIGKILL) }, 137,
			`^gorun: rank 4 \(host h3, pid \d+\) was killed by SIGKILL `, 500 * time.Millisecond, time.Second},
		{"keeper killed", func(t *testing.T, j *hostsJob) { syscall.Kill(keeperOn(t, h, 1), syscall.SIGKILL) }, 125,
			`^gorun: host h2: the keeper \(pid \d+\) died: `, 3 * time.Second, time.Second},
		{"agent killed", func(t *testing.T, j *hostsJob) { syscall.Kill(agentOn(t, h, 1), syscall.SIGKILL) }, 123,
			`^gorun: host h2 is lost: its agent has ended`, 3 * time.Second, time.Second},
		{"gorun killed", func(t *testing.T, j *hostsJob) { j.cmd.Process.Kill() }, 137, `^$`, time.Second, 2 * time.Second},
		{"gorun interrupted", func(t *testing.T, j *hostsJob) { j.cmd.Process.Signal(syscall.SIGINT) }, 130, ``, 3 * time.Second, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			inTime(t, c.job, c.hosts, func() (took, last time.Duration) {
				noMarks(t, h)
				j := newHostsJob(t, h, 2, "sh", "-c", rankScript).start()
				up(t, j, h, 2)
				begin := time.Now()
				c.fault(t, j)
				if got := j.wait(); got != c.code || !regexp.MustCompile(c.err).MatchString(j.err.String()) {
					t.Errorf("exit code %d, want %d; stderr %q, want %s", got, c.code, j.err.String(), c.err)
				}
				took = time.Since(begin)
				for i := range h.Hosts {
					last = max(last, empty(t, h, i))
				}
				clean(t, h)
				return took, last
			})
		})
	}
}

// Agents that are stopped: for good, and on all hosts.
func TestHostsAgentStopped(t *testing.T) {
	beside(t)
	if testing.Short() {
		t.Skip("-short: waits for hosts to be missed")
	}
	h := newHosts(t, 3, testhosts.Options{})
	inTime(t, 15*time.Second, 15*time.Second, func() (took, last time.Duration) {
		noMarks(t, h)
		j := newHostsJob(t, h, 2, "sh", "-c", rankScript).start()
		up(t, j, h, 2)
		agent := agentOn(t, h, 1)
		begin := time.Now()
		if err := syscall.Kill(agent, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		// On a busy machine it is some time until the thread that is to stop all of them gets to run.
		eventually(t, "the agent's stop", func() bool {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", agent))
			return err == nil && bytes.Contains(stat, []byte(") T "))
		})
		// A look at the ranks does without it.
		j.cmd.Process.Signal(syscall.SIGIO)
		if got := j.wait(); got != 123 || !regexp.MustCompile(`(?s)gorun: what the ranks do after \S+:\n  host h2 does not answer\n  rank.*gorun: host h2 is lost: no answer for \d+s`).MatchString(j.err.String()) {
			t.Errorf("exit code %d, stderr %s", got, j.err.String())
		}
		took = time.Since(begin)
		for _, i := range []int{0, 2} {
			if d := empty(t, h, i); d > 2*time.Second {
				last = time.Minute // the others do not take what the stopped one may
			}
		}
		// Nobody wakes the agent: its keeper sees the end of the session.
		last = max(last, empty(t, h, 1))
		clean(t, h)
		return took, last
	})
}

// A host that does not start: gorun says so in time, and the others have nothing left.
func TestHostsNotStarted(t *testing.T) {
	beside(t)
	h := newHosts(t, 3, testhosts.Options{})
	haveAgent(t, h)
	for _, c := range []struct {
		name        string
		fault, mend func() error
		err         string // a pattern, in stderr
	}{
		{"is not there", func() error { return h.Cut(1) }, func() error { return h.Join(1) }, `^gorun: host h2: connect: dial .*10\.77\.0\.2:22022: (i/o timeout|no answer within 1.5s)`},
		{"accepts and says nothing", func() error { return syscall.Kill(sshdOn(t, h, 1), syscall.SIGSTOP) }, func() error { return syscall.Kill(sshdOn(t, h, 1), syscall.SIGCONT) },
			`^gorun: host h2: connect: connected to 10\.77\.0\.2:22022, but no ssh server spoke: no answer within 1.5s \(--connect-timeout\)\n`},
		{"refuses", func() error { return syscall.Kill(sshdOn(t, h, 1), syscall.SIGKILL) }, nil, `^gorun: host h2: connect: .*refused`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.fault(); err != nil {
				t.Fatal(err)
			}
			inTime(t, 5*time.Second, 2*time.Second, func() (took, last time.Duration) {
				j := newHostsJob(t, h, 1, "--connect-timeout", "1500ms", "sh", "-c", rankScript)
				begin := time.Now()
				if got := j.run(); got != 122 || !regexp.MustCompile(c.err).MatchString(j.err.String()) {
					// The time may have been too short for the other hosts, too.
					t.Logf("exit code %d, want 122; stderr %q, want %s", got, j.err.String(), c.err)
					return time.Hour, 0
				}
				took = time.Since(begin)
				for i := range h.Hosts {
					last = max(last, empty(t, h, i))
				}
				return took, last
			})
			if c.mend != nil {
				if err := c.mend(); err != nil {
					t.Fatal(err)
				}
			}
			clean(t, h)
			for i := range h.Hosts {
				if _, err := os.Stat(h.Path(i, fmt.Sprintf("/root/up%d", i))); err == nil {
					t.Errorf("a rank ran on %s", h.Hosts[i].Name)
				}
			}
		})
	}
}

// An agent that ends while another host is not prepared yet: the launch is given up at once, for that reason.
func TestHostsAgentEndsWhileOthersPrepare(t *testing.T) {
	beside(t)
	h := newHosts(t, 3, testhosts.Options{})
	haveAgent(t, h)
	slow := sshdOn(t, h, 1)
	if err := syscall.Kill(slow, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(slow, syscall.SIGCONT)
	for sig, want := range map[syscall.Signal]string{
		syscall.SIGKILL: `its agent has ended.*`,
		syscall.SIGTERM: `the agent was terminated \(SIGTERM\)`,
	} {
		t.Run(sig.String(), func(t *testing.T) {
			said := filepath.Join(t.TempDir(), "stderr")
			f, err := os.Create(said)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			j := newHostsJob(t, h, 1, "--verbose", "--connect-timeout", "100s", "true")
			j.cmd.Stderr = f
			j.start()
			stderr := func() string {
				text, err := os.ReadFile(said)
				if err != nil {
					t.Fatal(err)
				}
				return string(text)
			}
			for _, name := range []string{"h1", "h3"} {
				prepared := regexp.MustCompile(`(?m)^gorun: host ` + name + `: agent .* is prepared after `)
				eventually(t, name+" is prepared", func() bool { return prepared.MatchString(stderr()) })
			}
			if err := syscall.Kill(agentOn(t, h, 2), sig); err != nil {
				t.Fatal(err)
			}
			last := regexp.MustCompile(`\ngorun: host h3: ` + want + `\n$`)
			if got := j.wait(); got != 122 || !last.MatchString(stderr()) {
				t.Errorf("exit code %d, want 122; stderr %s, want %s", got, stderr(), last)
			}
			clean(t, h)
		})
	}
}

// gorun is killed, an agent is, and a link is cut, at any moment of a launch that sends gorun, program and file to hosts that have nothing.
func TestHostsFaultsWhileTheyStart(t *testing.T) {
	beside(t)
	if testing.Short() {
		t.Skip("-short: takes 30 s")
	}
	h := newHosts(t, 3, testhosts.Options{})
	prog := filepath.Join(t.TempDir(), "prog")
	data := filepath.Join(t.TempDir(), "data")
	write(t, prog, "#!/bin/sh\n"+rankScript+"\n", 0o755)
	noise := make([]byte, 4<<20)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	write(t, data, string(noise), 0o644)
	if _, err := gorunFile(); err != nil { // its build is not a part of a launch
		t.Fatal(err)
	}
	limit := "30s"
	launch := func() *hostsJob {
		noMarks(t, h)
		for i := range h.Hosts {
			if err := os.RemoveAll(h.Path(i, "/root/.cache")); err != nil {
				t.Fatal(err)
			}
		}
		return stageJob(t, h, filepath.Dir(prog), "--connect-timeout", limit, "--stage", data, prog).start()
	}
	begin := time.Now()
	j := launch()
	defer func() {
		if t.Failed() {
			t.Log(j.err.String())
		}
	}()
	up(t, j, h, 1)
	whole := time.Since(begin)
	j.cmd.Process.Signal(syscall.SIGTERM)
	if got := j.wait(); got != 143 {
		t.Fatalf("exit code %d: %s", got, j.err.String())
	}
	cleanStage(t, h)
	t.Logf("a launch takes %v", whole)
	const moments = 5
	for _, c := range []struct {
		name  string
		fault func() bool // false: not now
		mend  func()
		codes map[int]bool
		hosts time.Duration
	}{
		{"gorun is killed", func() bool { j.cmd.Process.Kill(); return true }, nil, map[int]bool{137: true}, 2 * time.Second},
		{"an agent is killed", func() bool {
			all, _ := h.Processes(1)
			for _, p := range all {
				if len(p.Args) == 2 && p.Args[1] == "agent" {
					return syscall.Kill(p.PID, syscall.SIGKILL) == nil
				}
			}
			return false
		}, nil, map[int]bool{122: true, 123: true}, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			done := 0
			for k := range moments {
				inTime(t, time.Minute, c.hosts, func() (took, last time.Duration) {
					j = launch()
					if k < moments-1 {
						moment := time.NewTimer(whole * time.Duration(k) / (moments - 1))
						<-moment.C
					} else { // this launch may take longer than the first one took
						up(t, j, h, 1)
					}
					if !c.fault() {
						j.cmd.Process.Signal(syscall.SIGTERM)
						if got := j.wait(); got != 143 {
							t.Errorf("moment %d, SIGTERM: exit code %d: %s", k, got, j.err.String())
						}
						cleanStage(t, h)
						return 0, 0
					}
					done++
					begin := time.Now()
					if got := j.wait(); !c.codes[got] {
						t.Errorf("moment %d: exit code %d: %s", k, got, j.err.String())
					}
					took = time.Since(begin)
					for i := range h.Hosts {
						last = max(last, empty(t, h, i))
					}
					cleanStage(t, h)
					if t.Failed() {
						t.Fatalf("at %v of a launch (moment %d); stderr %s", whole*time.Duration(k)/(moments-1), k, j.err.String())
					}
					return took, last
				})
			}
			if done == 0 {
				t.Error("no moment of a launch had the fault")
			}
		})
	}
	t.Run("a link is cut", func(t *testing.T) {
		// Until gorun itself is sent, and when its last byte has been, nothing else bounds the wait. Beside other tests a launch takes longer than the first one.
		patience := max(6*time.Second, 4*whole).Round(time.Millisecond)
		limit = patience.String()
		for k := range 2 {
			inTime(t, patience+9*time.Second, 2*time.Second, func() (took, last time.Duration) {
				j = launch()
				moment := time.NewTimer(whole * time.Duration(k+1) / 3)
				<-moment.C
				begin := time.Now()
				if err := h.Cut(1); err != nil {
					t.Fatal(err)
				}
				got := j.wait()
				took = time.Since(begin)
				if got != 122 && got != 123 || !strings.Contains(j.err.String(), "gorun: host h2") {
					t.Errorf("moment %d: exit code %d: %s", k, got, j.err.String())
				}
				for _, i := range []int{0, 2} {
					last = max(last, empty(t, h, i))
				}
				t.Logf("moment %d: gorun ended with %d: %s", k, got, j.err.String())
				if err := h.Join(1); err != nil {
					t.Fatal(err)
				}
				cleanStage(t, h)
				return took, last
			})
		}
	})
}
