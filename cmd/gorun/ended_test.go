package main

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Who ends what ranks have left behind is killed in the middle of it: somebody is still there who goes on. The keeper ends last, so that this is
// done as soon as it has ended.
func TestKilledWhileItEnds(t *testing.T) {
	t.Parallel()
	home := remoteHome(t)
	for _, c := range []struct {
		name   string
		newJob func() *job
		hosts  bool
	}{
		{"gorun", func() *job { return newJob(t, "-np", "2", "rank", "family") }, false},
		// The agent is not the session's own process: that ends with gorun.
		{"agent", func() *job {
			j := newJob(t, "--rsh", `/bin/sh -c '/bin/sh -c "$2"; exit' gorun`, "-H", "a:2", "rank", "family")
			j.cmd.Env = append(j.cmd.Env, "HOME="+home, "XDG_CACHE_HOME=")
			return j
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := c.newJob().start()
			j.until(marks("up", 2)...)
			ends, keeper := j.cmd.Process.Pid, 0
			if c.hosts {
				ends = j.agent(0)
				keeper = keeperOf(t, ends)
			} else {
				keeper = j.keeper()
			}
			fd, err := unix.PidfdOpen(keeper, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			j.cmd.Process.Signal(syscall.SIGINT)
			n := 0
			for err = error(unix.EINTR); err == unix.EINTR; {
				n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 30_000)
			}
			if n != 1 {
				t.Errorf("the keeper has not ended within 30 s: %v", err)
			}
			syscall.Kill(ends, syscall.SIGKILL)
			j.wait()
			j.gone()
		})
	}
}
