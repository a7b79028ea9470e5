package stacks

import "golang.org/x/sys/unix"

var (
	onFDHere   = map[int]string{unix.SYS_EPOLL_WAIT: "epoll_wait"}
	othersHere = map[int]string{unix.SYS_POLL: "poll", unix.SYS_SELECT: "select", unix.SYS_PAUSE: "pause", unix.SYS_OPEN: "open", unix.SYS_FORK: "fork", unix.SYS_VFORK: "vfork"}
)
