package launcher

import (
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// remoteStdin carries gorun's stdin to a rank on another host. Of a pipe or a file more may be read than the rank reads; of a
// terminal a piece is read only when the rank has read the one before.
type remoteStdin struct {
	rank     int
	fd       int
	terminal bool
	release  func()        // gives back what fd needed
	quitR    int           // ends with quitW
	read     chan struct{} // a token: the rank has read all

	mu    sync.Mutex // guards quitW
	quitW int        // -1: closed
}

func newRemoteStdin(fd, rank int) (*remoteStdin, error) {
	s := &remoteStdin{rank: rank, fd: fd, release: func() {}, read: make(chan struct{}, 1)}
	if fd >= 0 && isTerminal(fd) {
		if group, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err == nil && group == unix.Getpgrp() {
			s.terminal = true
		}
	}
	if !s.terminal {
		from, started, stop, err := stdinFor(fd)
		if err != nil {
			return nil, err
		}
		s.fd, s.release = from, func() { started(); stop() }
	}
	var err error
	if s.quitR, s.quitW, err = pipe(); err != nil {
		s.release()
		return nil, err
	}
	return s, nil
}

func (s *remoteStdin) wasRead() {
	select {
	case s.read <- struct{}{}:
	default:
	}
}

// stop ends forward, and gives everything back if it never ran.
func (s *remoteStdin) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.quitW >= 0 {
		unix.Close(s.quitW)
		s.quitW = -1
	}
}

// close gives everything back.
func (s *remoteStdin) close() {
	s.stop()
	unix.Close(s.quitR)
	s.release()
}

// forward carries until the end of the input, of the rank, of the session, or stop.
func (s *remoteStdin) forward(m *agentwire.Mux) {
	to, err := m.Open(agentwire.Header{Kind: agentwire.Stdin, Rank: s.rank})
	if err != nil {
		return
	}
	var unread sync.WaitGroup
	over := make(chan struct{})
	unread.Go(func() {
		// Nothing comes but the end: the rank reads no more.
		var one [1]byte
		to.Read(one[:])
		close(over)
		s.stop()
	})
	s.copy(to, over)
	to.Close()
	unread.Wait()
}

func (s *remoteStdin) copy(to net.Conn, over <-chan struct{}) {
	buf := make([]byte, 32<<10)
	for {
		fds := []unix.PollFd{{Fd: int32(s.quitR), Events: unix.POLLIN}, {Fd: int32(s.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil {
			if err == unix.EINTR {
				continue
			}
			return
		}
		if fds[0].Revents != 0 {
			return
		}
		n, err := unix.Read(s.fd, buf)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
		if s.terminal {
			select {
			case <-s.read:
			case <-over:
				return
			}
		}
	}
}
