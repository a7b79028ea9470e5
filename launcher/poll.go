package launcher

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// poller is an epoll set whose waiter holds no thread while nothing happens: the set is itself watched by the runtime's
// poller. Threads that only wait are much of what a short launch costs.
type poller struct {
	ep   int
	wake int      // eventfd in the set, whose event is rung
	file *os.File // a copy of ep, with the runtime's poller; nil after keepThread
	raw  syscall.RawConn
}

// rung is the data of the event that ring makes.
const rung = -1

func newPoller() (*poller, error) {
	p := &poller{ep: -1, wake: -1}
	if err := p.open(); err != nil {
		p.close()
		return nil, fmt.Errorf("epoll: %w", err)
	}
	return p, nil
}

func (p *poller) open() (err error) {
	if p.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return err
	}
	if p.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return err
	}
	if err = p.watch(p.wake, rung); err != nil {
		return err
	}
	fd, err := unix.FcntlInt(uintptr(p.ep), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	unix.SetNonblock(fd, true) // os asks for it; epoll_wait does not care
	p.file = os.NewFile(uintptr(fd), "epoll")
	if p.raw, err = p.file.SyscallConn(); err != nil {
		return err
	}
	if p.file.SetReadDeadline(time.Time{}) != nil {
		p.keepThread() // a kernel on which the runtime can't watch it
	}
	return nil
}

// watch adds a descriptor; data is what its events have as Fd.
func (p *poller) watch(fd, data int) error {
	return unix.EpollCtl(p.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(data)})
}

// drop takes a descriptor out, before it is closed: a child between fork and exec has a copy of it, by which it would stay in the set.
func (p *poller) drop(fd int) { unix.EpollCtl(p.ep, unix.EPOLL_CTL_DEL, fd, nil) }

// ring ends a wait, or the next one, until wake is read.
func (p *poller) ring() {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	unix.Write(p.wake, one[:])
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
	unix.Close(p.wake)
}
