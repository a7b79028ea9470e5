package launcher

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// unreadPoll is how often it is looked whether a rank has read what it got: there is no event for "the pipe is empty".
	unreadPoll = 10 * time.Millisecond
	// demandPoll is how often it is looked whether a rank waits for more, as long as that is not clear.
	demandPoll = 50 * time.Millisecond
	// busyPoll is the same for a rank that was busy at each look for a while: it may never read. A look reads the process table, which is long on some
	// machines: it is to take no more than one lookShare-th of a CPU, as long as input waits no longer than slowPoll.
	busyPoll  = 250 * time.Millisecond
	slowPoll  = time.Second
	lookShare = 50
	// unclearLooks is how often in a row it must be unclear whether a rank waits, before it gets input all the same: it must not wait for
	// what it does not get.
	unclearLooks = 8
)

// stdinPipe is gorun's, or an agent's, end of a pipe from which a rank reads its stdin.
type stdinPipe struct {
	file    *os.File
	inode   uint64
	written atomic.Int64

	asked chan int64
	quit  chan struct{}
	wait  sync.WaitGroup
	once  sync.Once
}

// newStdinPipe makes the pipe; readFD is the rank's end.
func newStdinPipe() (p *stdinPipe, readFD int, err error) {
	r, w, err := pipe()
	if err != nil {
		return nil, -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(w, &st); err == nil {
		err = unix.SetNonblock(w, true) // our end alone
	}
	if err != nil {
		unix.Close(r)
		unix.Close(w)
		return nil, -1, err
	}
	return &stdinPipe{file: os.NewFile(uintptr(w), "stdin"), inode: st.Ino, asked: make(chan int64, 1), quit: make(chan struct{})}, r, nil
}

// Write gives the rank text. An error says that it reads no more, or that the pipe was closed.
func (p *stdinPipe) Write(data []byte) (int, error) {
	n, err := p.file.Write(data)
	p.written.Add(int64(n))
	return n, err
}

// hasReader reports whether anybody can still read the pipe.
func (p *stdinPipe) hasReader() bool {
	has := true
	p.control(func(fd int) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		if _, err := unix.Poll(fds, 0); err == nil && fds[0].Revents&(unix.POLLERR|unix.POLLNVAL) != 0 {
			has = false
		}
	})
	return has
}

// control calls f with the descriptor, unless it is closed.
func (p *stdinPipe) control(f func(fd int)) {
	if raw, err := p.file.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { f(int(fd)) })
	}
}

// empty reports whether the rank has read all that was written.
func (p *stdinPipe) empty() bool {
	unread := 1
	p.control(func(fd int) {
		if n, err := unix.IoctlGetInt(fd, unix.TIOCINQ); err == nil {
			unread = n
		}
	})
	return unread == 0
}

// serve answers ask: wants is called when the rank, the process pid, has read so many bytes and waits for more. It ends with close.
func (p *stdinPipe) serve(pid func() int, wants func(bytes int64)) {
	p.wait.Go(func() {
		for {
			select {
			case bytes := <-p.asked:
				if p.awaitDemand(bytes, pid) {
					wants(bytes)
				}
			case <-p.quit:
				return
			}
		}
	})
}

// ask has it looked whether the rank has read so many bytes and waits for more. A later question takes the place of one before.
func (p *stdinPipe) ask(bytes int64) {
	for {
		select {
		case p.asked <- bytes:
			return
		default:
		}
		select {
		case <-p.asked:
		default:
		}
	}
}

// awaitDemand waits for what ask wants to know. It returns false if there is another question, or none any more.
func (p *stdinPipe) awaitDemand(bytes int64, pid func() int) bool {
	wait, unclear := unreadPoll, 0
	for len(p.asked) == 0 {
		if p.written.Load() == bytes && p.empty() {
			d, begin := demandNone, time.Now()
			if n := pid(); n != 0 {
				d = waitsFor(n, p.inode)
			}
			if d != demandUnclear {
				unclear = 0
			} else if unclear++; unclear >= unclearLooks {
				d = demandSure
			}
			if d == demandSure {
				return true
			}
			wait = nextLook(wait, time.Since(begin), unclear > 0)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-p.quit:
			t.Stop()
			return false
		}
	}
	return false
}

// nextLook is how long after a look that took some time the next comes, where the one before came after last.
func nextLook(last, took time.Duration, unclear bool) time.Duration {
	most := max(busyPoll, min(took*lookShare, slowPoll))
	if unclear {
		most = demandPoll
	}
	return min(last+last/4, most)
}

// close ends the rank's input, and serve.
func (p *stdinPipe) close() {
	p.once.Do(func() {
		close(p.quit)
		p.file.Close()
	})
	p.wait.Wait()
}
