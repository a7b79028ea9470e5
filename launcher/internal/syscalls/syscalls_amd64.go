package syscalls

import "golang.org/x/sys/unix"

var here = map[int]entry{
	unix.SYS_POLL: {"poll", Poll}, unix.SYS_SELECT: {"select", Select}, unix.SYS_EPOLL_WAIT: {"epoll_wait", Epoll},
	unix.SYS_PAUSE: {"pause", Else}, unix.SYS_OPEN: {"open", Else}, unix.SYS_FORK: {"fork", Else}, unix.SYS_VFORK: {"vfork", Else},

	3:   {"", Unclear}, // read
	142: {"", Unclear}, // _newselect
	145: {"", Unclear}, // readv
	168: {"", Unclear}, // poll
	187: {"", Unclear}, // sendfile
	256: {"", Unclear}, // epoll_wait
	308: {"", Unclear}, // pselect6
	309: {"", Unclear}, // ppoll
	313: {"", Unclear}, // splice
	319: {"", Unclear}, // epoll_pwait
}
