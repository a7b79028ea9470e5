package launcher

import (
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// testReader is a process that waits in one way or another.
func testReader(how string) {
	r, w, _ := pipe() // nothing comes from it
	defer unix.Close(w)
	os.Stdout.WriteString("up\n")
	var buf [8]byte
	switch how {
	case "read":
		unix.Read(0, buf[:])
	case "read a copy":
		fd, _ := unix.Dup(0)
		unix.Read(fd, buf[:])
	case "poll":
		unix.Poll([]unix.PollFd{{Fd: int32(r), Events: unix.POLLIN}, {Fd: 0, Events: unix.POLLIN}}, -1)
	case "select":
		var set unix.FdSet
		set.Set(0)
		unix.Select(1, &set, nil, nil, nil)
	case "epoll":
		ep, _ := unix.EpollCreate1(0)
		unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, 0, &unix.EpollEvent{Events: unix.EPOLLIN})
		unix.EpollWait(ep, make([]unix.EpollEvent, 1), -1)
	case "a child":
		child := exec.Command("/proc/self/exe", "reader", "read")
		child.Stdin = os.Stdin
		child.Run()
	case "a child in a session of its own":
		child := exec.Command("/proc/self/exe", "reader", "read")
		child.Stdin, child.SysProcAttr = os.Stdin, &syscall.SysProcAttr{Setsid: true}
		child.Run()
	case "read another":
		unix.Read(r, buf[:])
	case "poll another":
		unix.Poll([]unix.PollFd{{Fd: int32(r), Events: unix.POLLIN}, {Fd: 0}}, -1)
	case "select another":
		var set unix.FdSet
		set.Set(r)
		unix.Select(r+1, &set, nil, nil, nil)
	case "epoll another":
		ep, _ := unix.EpollCreate1(0)
		unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, r, &unix.EpollEvent{Events: unix.EPOLLIN})
		unix.EpollWait(ep, make([]unix.EpollEvent, 1), -1)
	case "sleep":
		time.Sleep(time.Hour)
	}
	os.Exit(0)
}

// Whether a rank waits for input is seen from outside.
func TestWaitsFor(t *testing.T) {
	for _, c := range []struct {
		how  string
		want bool
	}{
		{"read", true}, {"read a copy", true}, {"poll", true}, {"select", true}, {"epoll", true}, {"a child", true}, {"a child in a session of its own", true},
		{"read another", false}, {"poll another", false}, {"select another", false}, {"epoll another", false}, {"sleep", false},
	} {
		t.Run(c.how, func(t *testing.T) {
			t.Parallel()
			p, r, err := newStdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer p.close()
			cmd := exec.Command("/proc/self/exe", "reader", c.how)
			in := os.NewFile(uintptr(r), "stdin")
			cmd.Stdin, cmd.SysProcAttr = in, &syscall.SysProcAttr{Setsid: true}
			out, err := cmd.StdoutPipe()
			if err == nil {
				err = cmd.Start()
			}
			in.Close()
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				p.close() // the child's read ends, too
				syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
				cmd.Wait()
			}()
			if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
				t.Fatal(err)
			}
			if c.want {
				eventually(t, "waits", func() bool { return waitsFor(cmd.Process.Pid, p.inode) == demandSure })
				return
			}
			for range 20 {
				if got := waitsFor(cmd.Process.Pid, p.inode); got != demandNone {
					t.Fatalf("seems to wait for input: %d", got)
				}
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
}

// Threads that can't be looked at count as waiting: a rank is not to wait for ever.
func TestWaitsForTheUnknown(t *testing.T) {
	r := reader{pid: os.Getpid(), pipe: "pipe:[0]"}
	for _, c := range []struct {
		line string
		want demand
	}{
		{"running", demandNone}, {"-1 0x7ffd 0x7f", demandNone}, {"", demandNone}, {"0", demandNone},
		{"x 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0", demandUnclear}, {"0 0xzz 0x0 0x0 0x0 0x0 0x0 0x0 0x0", demandUnclear},
		{strconv.Itoa(unix.SYS_IO_URING_ENTER) + " 0x3 0x0 0x1 0x1 0x0 0x0 0x0 0x0", demandUnclear},
		{strconv.Itoa(unix.SYS_PPOLL) + " 0x1 0xffffff 0x0 0x0 0x0 0x0 0x0 0x0", demandUnclear}, // too many
		{strconv.Itoa(unix.SYS_PPOLL) + " 0x1 0x1 0x0 0x0 0x0 0x0 0x0 0x0", demandUnclear},      // no such memory
		{strconv.Itoa(unix.SYS_PSELECT6) + " 0x1 0x0 0x0 0x0 0x0 0x0 0x0 0x0", demandNone},      // reads none
		{strconv.Itoa(unix.SYS_FUTEX) + " 0x1 0x0 0x0 0x0 0x0 0x0 0x0 0x0", demandNone},
	} {
		if got := r.callWaits(c.line); got != c.want {
			t.Errorf("%q: got %v, want %v", c.line, got, c.want)
		}
	}
}

// The longer a rank does not read, and the longer the process table is, the more seldom it is looked; what is not clear is so soon.
func TestNextLook(t *testing.T) {
	for _, c := range []struct {
		took    time.Duration
		unclear bool
		want    time.Duration // after many looks
		within  time.Duration // how long it takes until they come that seldom
	}{
		{0, false, busyPoll, 3 * time.Second}, {5 * time.Millisecond, false, busyPoll, 3 * time.Second}, {10 * time.Millisecond, false, 500 * time.Millisecond, 5 * time.Second},
		{time.Second, false, slowPoll, 10 * time.Second}, {time.Second, true, demandPoll, time.Second},
	} {
		wait, all, quick := unreadPoll, time.Duration(0), 0
		for wait < c.want && all < time.Minute {
			all += wait
			if all < time.Second {
				quick++
			}
			wait = nextLook(wait, c.took, c.unclear)
		}
		if wait != c.want || all > c.within || quick < 7 {
			t.Errorf("%+v: a look each %v after %v, %d in the first second", c, wait, all, quick)
		}
	}
}

func FuzzCallWaits(f *testing.F) {
	f.Add("0 0x0 0x7ffd 0x400 0x0 0x0 0x0 0x7ffd 0x7f")
	f.Add("271 0x1 0xffffffffffffffff 0x0 0x0 0x0 0x0 0x0 0x0")
	f.Fuzz(func(t *testing.T, line string) {
		reader{pid: os.Getpid(), pipe: "pipe:[0]"}.callWaits(line)
	})
}
