package main

import (
	"os"
	"syscall"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// As root of a container gorun starts ranks as it does elsewhere, and has nothing to say of that.
func TestRootInAUserNamespace(t *testing.T) {
	j := newJob(t, "-np", "2", "--bind-to", "numa", "sh", "-c", "id -u")
	j.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if err := j.cmd.Start(); err != nil {
		citest.Lacking(t, "a user namespace: %v", err)
	}
	code := j.wait()
	if code != 0 || j.out.String() != "0\n0\n" || j.err.Len() > 0 {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, j.out.String(), j.err.String())
	}
}

// Jobs at once have ports of their own, which rank 0 can bind while others are being reserved.
func TestPortsOfJobsAtOnce(t *testing.T) {
	unraced(t)
	for range often(25) {
		var jobs []*job
		for range 8 {
			jobs = append(jobs, newJob(t, "-np", "2", "rank", "listen").start())
		}
		for _, j := range jobs {
			if code := j.wait(); code != 0 || j.out.String() != "listening\n" {
				t.Errorf("exit code %d: %s%s", code, j.out.String(), j.err.String())
			}
		}
	}
}
