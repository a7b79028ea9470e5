// Package syscalls reads which system call a thread of another process is in.
package syscalls

import (
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Call is a system call that a thread is in.
type Call struct {
	Number int // of this architecture
	Args   [6]uint64
}

// Kind is what a call has to do with descriptors.
type Kind uint8

const (
	Else    Kind = iota // nothing that shows in its arguments
	FD                  // its first argument is a descriptor
	Read                // FD, from which it reads
	Copy                // FD, to which it writes; it reads from the second argument, a descriptor
	Epoll               // FD, an epoll set
	Poll                // an array of pollfd, its length
	Select              // a number of descriptors, the set of those to be read
	Unclear             // it may read, from what is not seen
)

// x32 marks the system calls of programs with 32-bit pointers on amd64.
const x32 = 0x40000000

// Parse reads /proc/PID/task/TID/syscall: the number and six arguments, the stack pointer and the instruction. in is false for a
// thread that is in none: "running", or -1 where a fault or a signal holds it.
func Parse(line string) (c Call, in bool, err error) {
	words := strings.Fields(line)
	if len(words) < 7 || words[0] == "-1" {
		return Call{}, false, nil
	}
	n, err := strconv.ParseUint(words[0], 10, 31)
	if err != nil {
		return Call{}, false, fmt.Errorf("system call %q: no number", words[0])
	}
	c.Number = int(n) &^ x32
	for i := range c.Args {
		if c.Args[i], err = strconv.ParseUint(strings.TrimPrefix(words[i+1], "0x"), 16, 64); err != nil {
			return Call{}, false, fmt.Errorf("system call %d: argument %q", n, words[i+1])
		}
	}
	return c, true, nil
}

// Name is the call's name as people know it, "system call 3" for one that is not in the table.
func (c Call) Name() string {
	if e := c.entry(); e.name != "" {
		return e.name
	}
	return fmt.Sprintf("system call %d", c.Number)
}

// Kind is Else for a call that is not in the table.
func (c Call) Kind() Kind { return c.entry().kind }

// FD is the call's first argument, if that is a descriptor that may be open.
func (c Call) FD() (int, bool) {
	switch c.Kind() {
	case FD, Read, Copy, Epoll:
		fd := c.Descriptor(0)
		return fd, fd >= 0
	}
	return 0, false
}

// Descriptor is an argument as a descriptor: a C int.
func (c Call) Descriptor(arg int) int { return int(int32(c.Args[arg])) }

type entry struct {
	name string
	kind Kind
}

func (c Call) entry() entry {
	if e, ok := here[c.Number]; ok {
		return e
	}
	return common[c.Number]
}

// common are the calls in which processes are found on every architecture: those that take time. here are those of this one, and the
// numbers that 32-bit programs read and wait by: these are other calls' for 64-bit programs, in which no thread of theirs sleeps.
var common = map[int]entry{
	unix.SYS_READ: {"read", Read}, unix.SYS_READV: {"readv", Read}, unix.SYS_SPLICE: {"splice", Read}, unix.SYS_TEE: {"tee", Read}, unix.SYS_SENDFILE: {"sendfile", Copy},
	unix.SYS_PPOLL: {"poll", Poll}, unix.SYS_PSELECT6: {"select", Select}, unix.SYS_EPOLL_PWAIT: {"epoll_wait", Epoll}, unix.SYS_EPOLL_PWAIT2: {"epoll_wait", Epoll},
	unix.SYS_IO_URING_ENTER: {"io_uring_enter", Unclear},

	unix.SYS_PREAD64: {"pread", FD}, unix.SYS_PREADV: {"preadv", FD}, unix.SYS_WRITE: {"write", FD}, unix.SYS_WRITEV: {"writev", FD}, unix.SYS_PWRITE64: {"pwrite", FD},
	unix.SYS_RECVFROM: {"recvfrom", FD}, unix.SYS_RECVMSG: {"recvmsg", FD}, unix.SYS_RECVMMSG: {"recvmmsg", FD}, unix.SYS_SENDTO: {"sendto", FD}, unix.SYS_SENDMSG: {"sendmsg", FD},
	unix.SYS_ACCEPT: {"accept", FD}, unix.SYS_ACCEPT4: {"accept", FD}, unix.SYS_CONNECT: {"connect", FD}, unix.SYS_IOCTL: {"ioctl", FD}, unix.SYS_FLOCK: {"flock", FD},
	unix.SYS_FCNTL: {"fcntl", FD}, unix.SYS_FSYNC: {"fsync", FD}, unix.SYS_FDATASYNC: {"fdatasync", FD}, unix.SYS_FALLOCATE: {"fallocate", FD},

	unix.SYS_FUTEX: {"futex", Else}, unix.SYS_NANOSLEEP: {"nanosleep", Else}, unix.SYS_CLOCK_NANOSLEEP: {"clock_nanosleep", Else}, unix.SYS_WAIT4: {"wait", Else},
	unix.SYS_WAITID: {"wait", Else}, unix.SYS_RT_SIGSUSPEND: {"sigsuspend", Else}, unix.SYS_RT_SIGTIMEDWAIT: {"sigtimedwait", Else},
	unix.SYS_RESTART_SYSCALL: {"restarted call", Else}, unix.SYS_MMAP: {"mmap", Else}, unix.SYS_MUNMAP: {"munmap", Else}, unix.SYS_OPENAT: {"open", Else},
	unix.SYS_EXECVE: {"execve", Else}, unix.SYS_CLONE: {"clone", Else}, unix.SYS_SCHED_YIELD: {"sched_yield", Else}, unix.SYS_MSGRCV: {"msgrcv", Else},
	unix.SYS_SEMOP: {"semop", Else}, unix.SYS_SEMTIMEDOP: {"semop", Else}, unix.SYS_IO_GETEVENTS: {"io_getevents", Else}, unix.SYS_EXIT_GROUP: {"exit", Else},
}
