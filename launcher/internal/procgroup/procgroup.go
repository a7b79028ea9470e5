// Package procgroup runs helpers (the go command, ssh -G, getent) as process groups, which end as a whole.
package procgroup

import (
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// pipeWait is how long a helper's output is still read after its end: what it left running outside of its group may hold the pipe.
const pipeWait = time.Second

// Run runs a command of exec.CommandContext. When its context ends, what it has started ends with it. The command also ends with this process, however
// that ends.
func Run(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeWait
	runtime.LockOSThread() // the parent-death signal belongs to the thread
	defer runtime.UnlockOSThread()
	return cmd.Run()
}
