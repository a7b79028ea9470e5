package launcher

import (
	"fmt"
	"io"

	"golang.org/x/sys/unix"
)

// FD is a descriptor that this process inherited, as a Writer. Nothing about it is changed: it is shared with
// others (a shell, a pipeline), so its flags are theirs. One that is in non-blocking mode is waited for.
type FD int

// Write writes all of p.
func (fd FD) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Write(int(fd), p[done:])
		switch err {
		case nil:
			done += n
		case unix.EINTR:
		case unix.EAGAIN:
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, -1); err != nil && err != unix.EINTR {
				return done, err
			}
		default:
			return done, err
		}
	}
	return done, nil
}

// sameFile reports whether two sinks end in the same terminal, pipe or file, so that lines of one could cut
// lines of the other.
func sameFile(a, b io.Writer) bool {
	if fa, ok := a.(FD); ok {
		fb, ok := b.(FD)
		if !ok {
			return false
		}
		var sa, sb unix.Stat_t
		if unix.Fstat(int(fa), &sa) != nil || unix.Fstat(int(fb), &sb) != nil {
			return false
		}
		return sa.Dev == sb.Dev && sa.Ino == sb.Ino
	}
	defer func() { _ = recover() }() // a Writer of a type that can't be compared is another one
	return a == b
}

func isTerminal(fd int) bool {
	_, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	return err == nil
}

func pipe() (r, w int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return -1, -1, fmt.Errorf("pipe: %w", err)
	}
	return p[0], p[1], nil
}
