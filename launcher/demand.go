package launcher

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/launcher/internal/syscalls"
)

// demand says whether a process waits for input.
type demand uint8

const (
	demandNone    demand = iota
	demandUnclear        // it can't be seen, or not now: a program that is just being started can't be looked at
	demandSure
)

// waitsFor looks whether a process of the session waits for input from the pipe with this inode: whether a thread sleeps in a system
// call that reads it, or watches it.
func waitsFor(session int, inode uint64) demand {
	holds, most := false, demandNone
	all := keeper.Processes()
	for _, p := range all {
		if p.State == 'Z' {
			continue
		}
		r := reader{pid: p.PID, pipe: "pipe:[" + strconv.FormatUint(inode, 10) + "]"}
		mine := p.Session == session
		if !mine && !r.isPipe(0) { // a child may have a session of its own
			continue
		}
		has, known := r.has()
		if !known && !mine {
			continue
		}
		if has || !known {
			holds = true
			if most = max(most, r.waits()); most == demandSure {
				return most
			}
		}
	}
	if !holds {
		return demandUnclear
	}
	return most
}

// reader is a process that may read a pipe.
type reader struct {
	pid  int
	pipe string // as /proc shows it
}

func (r reader) proc(format string, args ...any) string {
	return fmt.Sprintf("/proc/%d/", r.pid) + fmt.Sprintf(format, args...)
}

func (r reader) isPipe(fd int) bool {
	name, err := os.Readlink(r.proc("fd/%d", fd))
	return err == nil && name == r.pipe
}

// has reports whether the process has the pipe open, if that can be known.
func (r reader) has() (has, known bool) {
	fds, err := os.ReadDir(r.proc("fd"))
	if err != nil {
		return false, os.IsNotExist(err)
	}
	for _, e := range fds {
		if fd, err := strconv.Atoi(e.Name()); err == nil && r.isPipe(fd) {
			return true, true
		}
	}
	return false, true
}

// waits looks whether any thread waits for the pipe.
func (r reader) waits() demand {
	threads, err := os.ReadDir(r.proc("task"))
	if err != nil {
		return demandNone // it has ended
	}
	most := demandNone
	for _, t := range threads {
		text, err := os.ReadFile(r.proc("task/%s/syscall", t.Name()))
		if err != nil {
			if os.IsNotExist(err) || err == unix.ESRCH {
				if _, err := os.Stat(r.proc("task/%s", t.Name())); err != nil {
					continue // the thread has ended
				}
			}
			most = max(most, demandUnclear) // not for us to see
			continue
		}
		most = max(most, r.callWaits(string(text)))
	}
	return most
}

// callWaits looks at what a thread is in, as the kernel writes it.
func (r reader) callWaits(line string) demand {
	c, in, err := syscalls.Parse(line)
	if err != nil {
		return demandUnclear
	}
	if !in {
		return demandNone
	}
	sure := func(yes bool) demand {
		if yes {
			return demandSure
		}
		return demandNone
	}
	switch c.Kind() {
	case syscalls.Unclear:
		return demandUnclear
	case syscalls.Read:
		return sure(r.isPipe(c.Descriptor(0)))
	case syscalls.Copy:
		return sure(r.isPipe(c.Descriptor(1)))
	case syscalls.Poll:
		return r.polls(c.Args[0], c.Args[1])
	case syscalls.Select:
		return r.selects(c.Args[0], c.Args[1])
	case syscalls.Epoll:
		return r.watches(c.Descriptor(0))
	}
	return demandNone
}

// memory reads n bytes of the process's memory.
func (r reader) memory(at uint64, n int) ([]byte, bool) {
	f, err := os.Open(r.proc("mem"))
	if err != nil {
		return nil, false
	}
	defer f.Close()
	b := make([]byte, n)
	got, err := f.ReadAt(b, int64(at))
	return b, err == nil && got == n
}

const pollRdNorm = 0x40

// maxWatched bounds how many descriptors of a poll or select are looked at.
const maxWatched = 4096

func (r reader) polls(at, n uint64) demand {
	if n > maxWatched {
		return demandUnclear
	}
	b, ok := r.memory(at, int(n)*8) // struct pollfd: an int, two shorts
	if !ok {
		return demandUnclear
	}
	for ; len(b) >= 8; b = b[8:] {
		fd, events := int32(binary.NativeEndian.Uint32(b)), binary.NativeEndian.Uint16(b[4:])
		if fd >= 0 && events&(unix.POLLIN|pollRdNorm) != 0 && r.isPipe(int(fd)) {
			return demandSure
		}
	}
	return demandNone
}

func (r reader) selects(n, set uint64) demand {
	if set == 0 {
		return demandNone
	}
	if n > maxWatched {
		return demandUnclear
	}
	b, ok := r.memory(set, int(n+63)/64*8)
	if !ok {
		return demandUnclear
	}
	for fd := range int(n) {
		if b[fd/8]>>(fd%8)&1 != 0 && r.isPipe(fd) { // amd64 and arm64 are little-endian
			return demandSure
		}
	}
	return demandNone
}

func (r reader) watches(epoll int) demand {
	text, err := os.ReadFile(r.proc("fdinfo/%d", epoll))
	if err != nil {
		return demandUnclear
	}
	for line := range bytes.Lines(text) {
		if f := bytes.Fields(line); len(f) > 1 && string(f[0]) == "tfd:" {
			if fd, err := strconv.Atoi(string(f[1])); err != nil || r.isPipe(fd) {
				return demandSure
			}
		}
	}
	return demandNone
}
