package launcher

import (
	"bufio"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

func TestTracers(t *testing.T) {
	python := func(abrt, term bool) stacks.Process {
		return stacks.Process{Command: "python3.12", CatchesABRT: abrt, CatchesTERM: term}
	}
	shell, trap := stacks.Process{Command: "bash"}, stacks.Process{Command: "bash", CatchesTERM: true}
	rank := func(n int, p ...stacks.Process) RankStacks { return RankStacks{Rank: n, Processes: p} }
	for _, c := range []struct {
		name  string
		ranks []RankStacks
		want  map[int]bool
		later map[int]bool
		hint  bool
	}{
		{"no Python", []RankStacks{rank(0, shell)}, nil, nil, false},
		{"off", []RankStacks{rank(0, python(false, false)), rank(1, shell, python(false, true))}, nil, nil, true},
		{"on", []RankStacks{rank(0, python(true, false)), rank(1, shell, python(true, false)), rank(2, shell)}, map[int]bool{0: true, 1: true}, nil, false},
		{"on for one", []RankStacks{rank(0, python(false, false)), rank(1, python(true, false))}, map[int]bool{1: true}, nil, false},
		{"to save something", []RankStacks{rank(0, python(true, true)), rank(1, trap, python(true, false))}, nil, map[int]bool{0: true, 1: true}, false},
		{"another that catches SIGABRT", []RankStacks{rank(0, stacks.Process{Command: "prog", CatchesABRT: true})}, nil, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			atOnce, later := tracers(c.ranks)
			if d := cmp.Diff(atOnce, c.want, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			if d := cmp.Diff(later, c.later, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("later: -got +want:\n%s", d)
			}
			if hint := tracebackHint(c.ranks) != nil; hint != c.hint {
				t.Errorf("a hint: got %t, want %t", hint, c.hint)
			}
		})
	}
}

// Of each session those get SIGABRT that catch it, all of its group where none does, also a stopped one; another session gets none.
func TestAbort(t *testing.T) {
	const caught = `(trap 'kill $!; echo traced; exit 3' ABRT; sleep 1000 & echo ready; wait); echo script $?`
	const plain = "echo ready; exec sleep 1000"
	type session struct {
		cmd *exec.Cmd
		out *bufio.Reader
	}
	start := func(script string) session {
		c := exec.Command("sh", "-c", "ulimit -c 0; "+script)
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		c.WaitDelay = 10 * time.Second
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		end := time.AfterFunc(time.Minute, func() { syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
		t.Cleanup(func() {
			end.Stop()
			syscall.Kill(-c.Process.Pid, syscall.SIGKILL)
			c.Wait()
		})
		s := session{c, bufio.NewReader(out)}
		if line, err := s.out.ReadString('\n'); line != "ready\n" {
			t.Fatalf("%q, %v", line, err)
		}
		return s
	}
	scripts := []session{start(caught), start(plain), start(caught), start(plain)}
	syscall.Kill(scripts[1].cmd.Process.Pid, syscall.SIGSTOP)
	var sessions []int
	for _, s := range scripts[:3] {
		sessions = append(sessions, s.cmd.Process.Pid)
	}
	abort(sessions, keeper.Processes())
	syscall.Kill(scripts[3].cmd.Process.Pid, syscall.SIGTERM)
	for i, want := range []string{"traced script 3, exit status 0", ", signal: aborted", "traced script 3, exit status 0", ", signal: terminated"} {
		out, _ := io.ReadAll(scripts[i].out)
		scripts[i].cmd.Wait()
		if got := strings.Join(strings.Fields(string(out)), " ") + ", " + scripts[i].cmd.ProcessState.String(); got != want {
			t.Errorf("session %d: got %q, want %q", i, got, want)
		}
	}
}
