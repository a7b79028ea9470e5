package keeper

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// sessionAgent is an agent as its keeper sees one: it has a keeper for its stdin, and a child in a session of its own.
func sessionAgent() {
	k, err := StartIn(Job{ID: "session-test"}, 0)
	if err != nil {
		os.Exit(3)
	}
	child := exec.Command("sleep", "1000")
	child.Env = []string{jobVar + "session-test"}
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if child.Start() != nil || k.Sessions([]int{child.Process.Pid}) != nil {
		os.Exit(3)
	}
	os.Stdout.WriteString("up\n")
	select {}
}

// An agent that is stopped is ended by its keeper once its session has ended, and not before; so is what it started.
func TestSessionEnds(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: takes 10 s")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"KEEPER_TEST_AGENT=1", "PATH=" + os.Getenv("PATH")}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	limit := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer limit.Stop()
	if n, err := out.Read(make([]byte, 3)); n != 3 {
		t.Fatal(n, err)
	}
	syscall.Kill(cmd.Process.Pid, syscall.SIGSTOP)
	time.Sleep(time.Second)                              // while the session lives nothing happens
	if state := stateOf(cmd.Process.Pid); state != 'T' { // a zombie would take signals, too
		t.Fatalf("the agent is in state %c, want T (stopped)", state)
	}
	begin := time.Now()
	in.Close()
	cmd.Wait()
	if st := cmd.ProcessState.Sys().(syscall.WaitStatus); st.Signal() != syscall.SIGKILL {
		t.Errorf("the agent: %v, want it killed", cmd.ProcessState)
	}
	if took := time.Since(begin); took < agentBound-time.Second || !limit.Stop() {
		t.Errorf("the agent was killed after %v", took)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		left, job := 0, Job{ID: "session-test"}
		for _, p := range Processes() {
			if p.State != 'Z' && job.marks(readFile("/proc/"+strconv.Itoa(p.PID)+"/environ")) {
				left++
			}
		}
		if left == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatal("what the agent had started is still there")
		}
	}
}

// stateOf is a process's state as the kernel's table has it, '-' where it is not there.
func stateOf(pid int) byte {
	for _, p := range Processes() {
		if p.PID == pid {
			return p.State
		}
	}
	return '-'
}
