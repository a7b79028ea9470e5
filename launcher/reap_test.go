package launcher

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Who ends what ranks have left behind looks for it also when it has had to wait for the CPU until its time was over: with no time at all, children are
// killed, and those that they leave are.
func TestKillChildrenLate(t *testing.T) {
	out, err := exec.Command(os.Args[0], "kill-children").CombinedOutput()
	if err != nil || string(out) != "spared 2\nall 2\n" {
		t.Errorf("%v: %s", err, out)
	}
}

// A child that may not be killed, here of another user, is not waited for as one that is about to end, though it runs.
func TestKillChildrenForeign(t *testing.T) {
	if os.Getuid() != 0 {
		citest.Lacking(t, "root, for a process of another user")
	}
	out, err := exec.Command(os.Args[0], "kill-foreign").CombinedOutput()
	if strings.HasPrefix(string(out), "no other user: ") {
		citest.Lacking(t, "%s", out)
	}
	if err != nil || string(out) != "killed 0, left true\n" {
		t.Errorf("%v: %s", err, out)
	}
}

func testKillForeign() {
	const nobody = 65534
	pid, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", "ulimit -t 60; while :; do :; done"}, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if err := syscall.Setresuid(nobody, nobody, 0); err != nil {
		syscall.Kill(pid, syscall.SIGKILL)
		fmt.Println("no other user:", err)
		os.Exit(0)
	}
	begin := time.Now()
	killed, left := killChildren(nil, 500*time.Millisecond)
	fmt.Printf("killed %d, left %t\n", killed, left)
	if took := time.Since(begin); took > 4*time.Second { // of 6
		fmt.Println("after", took)
	}
	if err := errors.Join(syscall.Setresuid(0, 0, 0), syscall.Kill(pid, syscall.SIGKILL)); err != nil {
		fmt.Println(err)
	}
	os.Exit(0)
}

// An agent may reap twice: when it is told to, and when it ends, because a rank has not ended. The keeper, to which that is left, is none of what is ended then.
func TestReapTwice(t *testing.T) {
	out, err := exec.Command(os.Args[0], "reap-twice").CombinedOutput()
	if err != nil || string(out) != "killed 0\nkilled 0\n" {
		t.Errorf("%v: %s", err, out)
	}
}

func testReapTwice() {
	k, err := keeper.Start(keeper.Job{ID: fmt.Sprint("reap-twice-", os.Getpid())})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	a, err := newAgent(agentConfig{ownChild: true, keeper: k})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for range 2 { // no rank was started, so that one may still be
		fmt.Println("killed", a.reap())
	}
	os.Exit(0)
}

// testKillChildren is a process whose children are those of a test.
func testKillChildren() {
	check := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	check(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	start := func(script string) int {
		pid, err := syscall.ForkExec("/bin/sh", []string{"sh", "-c", script}, &syscall.ProcAttr{Env: os.Environ(), Files: []uintptr{0, 1, 2}, Sys: &syscall.SysProcAttr{Setsid: true}})
		check(err)
		return pid
	}
	two := func() {
		start("exec sleep 1000")
		// Its child is ours when it has ended.
		_, err := syscall.Wait4(start("sleep 1000 >/dev/null 2>&1 &"), nil, 0, nil)
		check(err)
	}
	spare := start("exec sleep 1000")
	two()
	killed, _ := killChildren(map[int]bool{spare: true}, 0)
	fmt.Println("spared", killed)
	check(syscall.Kill(spare, 0))
	check(syscall.Kill(spare, syscall.SIGKILL))
	// Those killed before may still be about to end: they would count again.
	for _, err := syscall.Wait4(-1, nil, 0, nil); err != syscall.ECHILD; _, err = syscall.Wait4(-1, nil, 0, nil) {
		if err != syscall.EINTR {
			check(err)
		}
	}
	two()
	killed, _ = killChildren(nil, 0)
	fmt.Println("all", killed)
	os.Exit(0)
}
