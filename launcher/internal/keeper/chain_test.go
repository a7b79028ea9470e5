package keeper

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// Processes that each start the next one and end are found, although at some moments none of them can be told by its environment.
func TestSweepChain(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{"KEEPER_TEST_CHAIN=1", "PATH=" + os.Getenv("PATH")}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// sweepChains is a process to which chains of processes belong when their parents have ended.
func sweepChains() {
	const subreaper, rounds = 36, 12                                  // PR_SET_CHILD_SUBREAPER
	const next = `[ $N -gt 1000 ] || N=$((N+1)) /bin/sh -c "$NEXT" &` // it ends by itself, later than the test looks for it
	if _, _, errno := syscall.Syscall(syscall.SYS_PRCTL, subreaper, 1, 0); errno != 0 {
		fmt.Println(errno)
		os.Exit(1)
	}
	null, err := os.OpenFile("/dev/null", os.O_RDWR, 0)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	// reap waits for those that have ended, and reports whether all have.
	reap := func() bool {
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if err == syscall.ECHILD {
				return true
			}
			if pid <= 0 && err != syscall.EINTR {
				return false
			}
		}
	}
	missed := 0
	for i := range rounds {
		job := Job{ID: fmt.Sprintf("chain-%d-%d", os.Getpid(), i)}
		env := []string{"N=0", "NEXT=" + next, jobVar + job.ID}
		_, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", next}, &syscall.ProcAttr{Env: env, Files: []uintptr{null.Fd(), null.Fd(), null.Fd()}})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		for begin := time.Now(); time.Since(begin) < 10*time.Millisecond; {
			reap()
		}
		left := Sweep(job, nil, 10*time.Second, true)
		gone := reap()
		for end := time.Now().Add(200 * time.Millisecond); !gone && time.Now().Before(end); gone = reap() {
			time.Sleep(time.Millisecond) // what was killed has no environment any more, and may wait for a CPU to end
		}
		if left == 0 && !gone {
			missed++
		}
		for !reap() {
			Sweep(job, nil, time.Second, true)
		}
	}
	if missed > 0 {
		fmt.Printf("missed %d of %d", missed, rounds)
		os.Exit(1)
	}
	os.Exit(0)
}
