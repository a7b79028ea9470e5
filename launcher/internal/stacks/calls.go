package stacks

import "golang.org/x/sys/unix"

// System calls in which processes are found: those that take time. onFD have a descriptor as their first argument.
var (
	onFD = map[int]string{
		unix.SYS_READ: "read", unix.SYS_READV: "readv", unix.SYS_PREAD64: "pread", unix.SYS_PREADV: "preadv", unix.SYS_WRITE: "write", unix.SYS_WRITEV: "writev",
		unix.SYS_PWRITE64: "pwrite", unix.SYS_RECVFROM: "recvfrom", unix.SYS_RECVMSG: "recvmsg", unix.SYS_RECVMMSG: "recvmmsg", unix.SYS_SENDTO: "sendto", unix.SYS_SENDMSG: "sendmsg",
		unix.SYS_SENDFILE: "sendfile", unix.SYS_SPLICE: "splice", unix.SYS_ACCEPT: "accept", unix.SYS_ACCEPT4: "accept", unix.SYS_CONNECT: "connect", unix.SYS_IOCTL: "ioctl",
		unix.SYS_FLOCK: "flock", unix.SYS_FCNTL: "fcntl", unix.SYS_FSYNC: "fsync", unix.SYS_FDATASYNC: "fdatasync", unix.SYS_FALLOCATE: "fallocate", unix.SYS_EPOLL_PWAIT: "epoll_wait",
	}
	others = map[int]string{
		unix.SYS_FUTEX: "futex", unix.SYS_NANOSLEEP: "nanosleep", unix.SYS_CLOCK_NANOSLEEP: "clock_nanosleep", unix.SYS_WAIT4: "wait", unix.SYS_WAITID: "wait", unix.SYS_PPOLL: "poll",
		unix.SYS_PSELECT6: "select", unix.SYS_RT_SIGSUSPEND: "sigsuspend", unix.SYS_RT_SIGTIMEDWAIT: "sigtimedwait", unix.SYS_RESTART_SYSCALL: "restarted call", unix.SYS_MMAP: "mmap",
		unix.SYS_MUNMAP: "munmap", unix.SYS_OPENAT: "open", unix.SYS_EXECVE: "execve", unix.SYS_CLONE: "clone", unix.SYS_SCHED_YIELD: "sched_yield", unix.SYS_MSGRCV: "msgrcv",
		unix.SYS_SEMOP: "semop", unix.SYS_SEMTIMEDOP: "semop", unix.SYS_IO_URING_ENTER: "io_uring_enter", unix.SYS_IO_GETEVENTS: "io_getevents", unix.SYS_EXIT_GROUP: "exit",
	}
)
