package keeper

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		stat string
		want Process
		ok   bool
	}{
		{"12 (sh) S 1 10 9 0 -1", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'S'}, true},
		{"12 (a) b (c) R 1 10 9 0", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'R'}, true},
		{"12 (\n) Z 1 10 9", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'Z'}, true},
		{"", Process{}, false},
		{"12 (sh) S 1", Process{}, false},
		{")(", Process{}, false},
		{"x (sh) S 1 2 3", Process{}, false},
		{"(sh) S 1 2 3", Process{}, false},
		{"12 (sh) S 1 2 3\n", Process{}, false}, // the kernel writes more fields
	} {
		got, ok := parseStat([]byte(c.stat))
		if ok != c.ok || ok && !cmp.Equal(got, c.want) {
			t.Errorf("parseStat(%q) = %+v, %v, want %+v, %v", c.stat, got, ok, c.want, c.ok)
		}
	}
}

func TestProcessesFindsThisOne(t *testing.T) {
	for _, p := range Processes() {
		if p.PID == os.Getpid() {
			if p.Parent != os.Getppid() {
				t.Errorf("parent %d, want %d", p.Parent, os.Getppid())
			}
			return
		}
	}
	t.Error("this process is not in the table")
}

// The keeper starts fast because its package needs nothing that initialises late.
func TestImportsLittle(t *testing.T) {
	out, err := exec.Command("go", "list", "-f", `{{join .Imports " "}}`, ".").CombinedOutput()
	if got, want := strings.TrimSpace(string(out)), "strconv syscall time unsafe"; err != nil || got != want {
		t.Errorf("imports %s, %v, want %s", got, err, want)
	}
}

// Only the keeper is one: its name alone, or its variable alone, makes none.
func TestWhoIsAKeeper(t *testing.T) {
	for _, c := range []struct {
		name string
		arg0 string
		env  []string
		want bool
	}{
		{"keeper", arg0, []string{keeperVar + "=1"}, true},
		{"name", arg0, nil, false},
		{"variable", "gorun", []string{keeperVar + "=1"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run=^$")
			cmd.Args[0], cmd.Env = c.arg0, c.env
			if c.want || c.name == "name" {
				cmd.Args = cmd.Args[:1]
				cmd.Env = append(cmd.Env, "KEEPER_TEST_ALONE=1")
			}
			out, err := cmd.CombinedOutput() // its stdin is /dev/null: a keeper ends, and says nothing
			if err != nil {
				t.Fatal(err)
			}
			if got := len(out) == 0; got != c.want {
				t.Errorf("output %q, keeper: %v, want %v", out, got, c.want)
			}
		})
	}
}

// Without arguments the test binary would run all tests.
func TestMain(m *testing.M) {
	if os.Getenv("KEEPER_TEST_COUNT") != "" {
		fmt.Println(len(Processes()))
		return
	}
	if os.Getenv("KEEPER_TEST_ALONE") != "" {
		fmt.Println("no keeper")
		return
	}
	if os.Getenv("KEEPER_TEST_CHAIN") != "" {
		sweepChains()
	}
	if os.Getenv("KEEPER_TEST_AGENT") != "" {
		sessionAgent()
	}
	os.Exit(m.Run())
}

// The /proc of another process namespace names other processes: it is not believed.
func TestForeignProc(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"KEEPER_TEST_COUNT=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWUSER}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
		citest.Lacking(t, "namespaces: %v", err)
	}
	if got := strings.TrimSpace(string(out)); err != nil || got != "0" {
		t.Errorf("%s processes, %v, want 0", got, err)
	}
}

func TestOrders(t *testing.T) {
	const all = "job ab12 3\nremove /gone\nshare /gone\nrmdir /gone\nleft\nsession 17\nsession 0\nsession -4\nsession 1\nsession x\nunknown\nsession 18\n" +
		"remove /a b\nremove c\nrmdir /d\nrmdir /\nshare /d/e\nrmdir /f\nshare \n"
	want := orders{job: Job{"ab12", 3}, sessions: map[int]bool{17: true, 18: true}, paths: []string{"/a b"}, dirs: []string{"/d", "/f"}, shared: []string{"/d/e"}}
	for cut := range len(all) {
		var o orders
		if o.feed([]byte(all[:cut])) || o.feed([]byte(all[cut:])) {
			t.Fatal("over before done")
		}
		if len(o.part) > 0 {
			t.Errorf("cut at %d: %q stays", cut, o.part)
		}
		o.part = nil
		if d := cmp.Diff(o, want, cmp.AllowUnexported(orders{})); d != "" {
			t.Errorf("cut at %d: -got +want:\n%s", cut, d)
		}
		if o.feed([]byte("do")) || !o.feed([]byte("ne\n")) {
			t.Errorf("cut at %d: done was not seen", cut)
		}
	}
}

// A process is found by its session or by the job's id, and only by those.
func TestSweep(t *testing.T) {
	start := func(sys *syscall.SysProcAttr, env ...string) *exec.Cmd {
		cmd := exec.Command("sleep", "1000")
		cmd.Env, cmd.SysProcAttr = env, sys
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return cmd
	}
	id := "test-" + strconv.Itoa(os.Getpid())
	named := start(&syscall.SysProcAttr{}, "A=1", "GORUN_JOB_ID="+id)
	session := start(&syscall.SysProcAttr{Setsid: true})
	here := start(&syscall.SysProcAttr{Setsid: true}, "GORUN_JOB_ID="+id, "GORUN_NODE=1")
	others := []*exec.Cmd{start(&syscall.SysProcAttr{Setsid: true}, "GORUN_JOB_ID="+id+"0", "GORUN_NODE=1", "X=GORUN_JOB_ID="+id),
		start(&syscall.SysProcAttr{Setsid: true}, "GORUN_JOB_ID="+id, "GORUN_NODE=11")}
	if left := Sweep(Job{id, 1}, map[int]bool{session.Process.Pid: true}, 10*time.Second, true); left != 0 {
		t.Errorf("%d processes left", left)
	}
	for _, cmd := range []*exec.Cmd{named, session, here} {
		cmd.Wait()
		if st := cmd.ProcessState.Sys().(syscall.WaitStatus); st.Signal() != syscall.SIGKILL {
			t.Errorf("pid %d: %v, want it killed", cmd.Process.Pid, cmd.ProcessState)
		}
	}
	for _, cmd := range others {
		if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("a process of another job, or another host: %v: %v", cmd.Env, err)
		}
	}
}

func FuzzOrders(f *testing.F) {
	f.Add([]byte("job a 0\nsession 3\nremove /a\nrmdir /b\nshare /b/c\ndone\n"), 3)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		var whole, parts orders
		cut = min(max(cut, 0), len(data))
		done := whole.feed(data)
		partDone := parts.feed(data[:cut]) || parts.feed(data[cut:])
		if done != partDone || !done && !(cmp.Equal(whole.sessions, parts.sessions) && cmp.Equal(whole.paths, parts.paths) && cmp.Equal(whole.dirs, parts.dirs) && cmp.Equal(whole.shared, parts.shared)) {
			t.Errorf("in one piece %v %+v, in two %v %+v", done, whole, partDone, parts)
		}
		s := NewShared(whole.job.ID)
		for _, path := range whole.shared {
			if s.Add(path); !s.files[path] {
				t.Errorf("%q is not known", path)
			}
		}
		for pid := range whole.sessions {
			if pid <= 1 {
				t.Errorf("session %d", pid)
			}
		}
	})
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (a) b (c) R 1 10 9 0"))
	f.Fuzz(func(t *testing.T, stat []byte) {
		if p, ok := parseStat(stat); ok && p.State == 0 {
			t.Error("no state")
		}
	})
}
