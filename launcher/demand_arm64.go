package launcher

import "golang.org/x/sys/unix"

// syscalls are those in which threads wait for input. Those of 32-bit programs have other numbers, which no thread of a 64-bit program
// sleeps in.
var syscalls = map[int]call{
	unix.SYS_READ: callRead, unix.SYS_READV: callRead, unix.SYS_SPLICE: callRead, unix.SYS_TEE: callRead, unix.SYS_SENDFILE: callSendfile,
	unix.SYS_PPOLL: callPoll, unix.SYS_PSELECT6: callSelect, unix.SYS_EPOLL_PWAIT: callEpoll, unix.SYS_EPOLL_PWAIT2: callEpoll,
	unix.SYS_IO_URING_ENTER: callUnknown,
	3:                       callUnknown, // read
	142:                     callUnknown, // _newselect
	145:                     callUnknown, // readv
	168:                     callUnknown, // poll
	187:                     callUnknown, // sendfile
	252:                     callUnknown, // epoll_wait
	335:                     callUnknown, // pselect6
	336:                     callUnknown, // ppoll
	340:                     callUnknown, // splice
	346:                     callUnknown, // epoll_pwait
}
