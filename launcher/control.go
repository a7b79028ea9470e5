package launcher

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

// control is what the launcher needs of this host's bootstrap node.
type control interface {
	Control() string
	RankExited(rank, code int, cause string)
	Joined(rank int) (joined, left bool)
	Ended() []int
	Suspicions() []node.Suspicion
	Close() error
}

func startNode(ctx context.Context, c node.Config) (control, error) { return node.Start(ctx, c) }

// reservePort takes a port on the loopback address for the job's meeting point (MASTER_PORT) and keeps it from
// everybody but a rank: the socket is bound with SO_REUSEADDR and never listens, so the kernel gives the port to no
// one who asks for any, while a rank that binds it by number (PyTorch, gRPC and Go set SO_REUSEADDR) gets it.
func reservePort() (fd, port int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		var name unix.Sockaddr
		if name, err = unix.Getsockname(fd); err == nil {
			return fd, name.(*unix.SockaddrInet4).Port, nil
		}
	}
	unix.Close(fd)
	return -1, 0, err
}
