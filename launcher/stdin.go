package launcher

import (
	"sync"

	"golang.org/x/sys/unix"
)

// stdinFor gives the descriptor that rank 0 reads as its stdin, a function to call after it was started, and one for the end. A pipe or
// a file is handed over as it is: nothing is copied, nothing is read that the rank does not read.
//
// A terminal can't be handed over: the rank lives in a session of its own, where reading it fails. Where gorun is in
// the terminal's foreground, what is typed is forwarded through a pipe, a piece at a time and only when the rank has
// read the one before, so that at most one line is taken that was meant for the shell. In the background the rank
// reads nothing.
func stdinFor(fd int) (rankFD int, started, stop func(), err error) {
	none := func() {}
	null := func() (int, func(), func(), error) {
		n, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return n, func() { unix.Close(n) }, none, err
	}
	if fd < 0 {
		return null()
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return null()
	}
	if !isTerminal(fd) {
		return fd, none, none, nil
	}
	if group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err != nil || group != unix.Getpgrp() {
		return null()
	}
	r, w, err := pipe()
	if err != nil {
		return -1, nil, nil, err
	}
	stopR, stopW, err := pipe()
	if err != nil {
		unix.Close(r)
		unix.Close(w)
		return -1, nil, nil, err
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		forward(fd, w, stopR)
		unix.Close(w)
		unix.Close(stopR)
	})
	return r, func() { unix.Close(r) }, func() {
		unix.Close(stopW)
		wait.Wait()
	}, nil
}

// unreadPoll is how often, in ms, forward looks whether the rank has read what it got.
const unreadPoll = 10

// forward copies from a terminal to a pipe until the end of either, or until stop ends.
func forward(tty, w, stop int) {
	buf := make([]byte, 4096)
	for {
		fds := []unix.PollFd{{Fd: int32(stop), Events: unix.POLLIN}, {Fd: int32(w)}, {Fd: int32(tty), Events: unix.POLLIN}}
		wait := -1
		if unread, err := unix.IoctlGetInt(w, unix.TIOCINQ); err == nil && unread > 0 {
			// There is no event for "the pipe is empty": look again soon.
			fds = fds[:2]
			wait = unreadPoll
		}
		if _, err := unix.Poll(fds, wait); err != nil && err != unix.EINTR {
			return
		}
		if fds[0].Revents != 0 || fds[1].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
			return
		}
		if len(fds) < 3 || fds[2].Revents == 0 {
			continue
		}
		n, err := unix.Read(tty, buf)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		// The pipe is empty and n is less than it holds: this does not block.
		if _, err := FD(w).Write(buf[:n]); err != nil {
			return
		}
	}
}
