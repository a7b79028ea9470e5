package keeper

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A keeper to which what is left of a job was left ends it, and removes nothing: the files may be another job's by then.
func TestLeave(t *testing.T) {
	job := Job{ID: "left-" + strconv.Itoa(os.Getpid())}
	k, err := Start(job)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	pid, file := k.PID(), t.TempDir()+"/f"
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	left := exec.Command("sleep", "1000")
	left.Env = []string{jobVar + job.ID}
	left.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	limit := time.AfterFunc(time.Minute, func() { left.Process.Signal(syscall.SIGTERM) })
	defer limit.Stop()
	if err := k.Remove(file); err != nil {
		t.Fatal(err)
	}
	k.Leave()
	left.Wait()
	if st := left.ProcessState.Sys().(syscall.WaitStatus); st.Signal() != syscall.SIGKILL {
		t.Errorf("what is left: %v, want it killed", left.ProcessState)
	}
	for end := time.Now().Add(30 * time.Second); stateOf(pid) != '-'; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the keeper has not ended")
		}
	}
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
}

// Only those children that are told are not looked for any more.
func TestOnlyChildren(t *testing.T) {
	start := func() int {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		return cmd.Process.Pid
	}
	a, b := start(), start()
	both := OnlyChildren(map[int]bool{a: true, b: true})
	if _, err := os.Stat("/proc/thread-self/children"); err == nil && !both {
		t.Error("there are other children")
	}
	if OnlyChildren(map[int]bool{a: true}) || OnlyChildren(nil) {
		t.Errorf("%d is overlooked", b)
	}
}
