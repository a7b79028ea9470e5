package launcher

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// poller is an epoll set whose waiter holds no thread while nothing happens: the set is itself watched by the runtime's
// poller. Threads that only wait are much of what a short launch costs.
type poller struct {
	ep   int
	file *os.File // a copy of ep, with the runtime's poller; nil after keepThread
	raw  syscall.RawConn
}

func newPoller() (*poller, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	fd, err := unix.FcntlInt(uintptr(ep), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		if err = unix.SetNonblock(fd, true); err != nil { // os asks for it; epoll_wait does not care
			unix.Close(fd)
		}
	}
	if err != nil {
		unix.Close(ep)
		return nil, err
	}
	p := &poller{ep: ep, file: os.NewFile(uintptr(fd), "epoll")}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		p.close()
		return nil, err
	}
	if p.file.SetReadDeadline(time.Time{}) != nil {
		p.keepThread() // a kernel on which the runtime can't watch it
	}
	return p, nil
}

// wait waits for events for ms, without end if it is negative. One goroutine waits at a time.
func (p *poller) wait(events []unix.EpollEvent, ms int) (n int, err error) {
	if p.file == nil {
		return unix.EpollWait(p.ep, events, ms)
	}
	n, err = unix.EpollWait(p.ep, events, 0)
	if n != 0 || err != nil || ms == 0 {
		return n, err
	}
	var end time.Time
	if ms > 0 {
		end = time.Now().Add(time.Duration(ms) * time.Millisecond)
	}
	if err := p.file.SetReadDeadline(end); err != nil {
		return 0, err
	}
	over := p.raw.Read(func(uintptr) bool {
		n, err = unix.EpollWait(p.ep, events, 0)
		return n != 0 || err != nil
	})
	if err == nil && over != nil && !errors.Is(over, os.ErrDeadlineExceeded) {
		err = over
	}
	return n, err
}

// keepThread makes the waiter hold its thread from here on: with much to do, the runtime's poller would be woken for
// every event, too. To be called by the goroutine that waits.
func (p *poller) keepThread() {
	if p.file != nil {
		p.file.Close()
		p.file = nil
	}
}

func (p *poller) close() {
	p.keepThread()
	unix.Close(p.ep)
}
