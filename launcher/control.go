package launcher

import (
	"context"
	"net"
	"net/netip"
	"time"

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
	Addr() string
	AddSeeds(addrs ...string)
	Ready(ctx context.Context) error
	LoseHost(host int, name, cause string)
	Unreached(d time.Duration) []int
	Standings() []node.Standing
	Stacks(ctx context.Context) map[int][]byte
	Exchange(name string, hosts []int, data []byte, done func(all [][]byte, err error))
	Over()
	Close() error
}

func startNode(ctx context.Context, c node.Config) (control, error) { return node.Start(ctx, c) }

// meetTimeout bounds the time until the nodes of all hosts have met.
const meetTimeout = 30 * time.Second

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// reservePort takes a port on an address for the job's meeting point (MASTER_PORT) and keeps it from
// everybody but a rank: the socket is bound with SO_REUSEADDR and never listens, so the kernel gives the port to no
// one who asks for any, while a rank that binds it by number (PyTorch, gRPC and Go set SO_REUSEADDR) gets it.
func reservePort(on netip.Addr) (fd, port int, err error) {
	on = on.Unmap()
	family := unix.AF_INET
	var addr unix.Sockaddr
	if on.Is4() {
		addr = &unix.SockaddrInet4{Addr: on.As4()}
	} else {
		family = unix.AF_INET6
		to := &unix.SockaddrInet6{Addr: on.As16()}
		if zone, err := net.InterfaceByName(on.Zone()); err == nil {
			to.ZoneId = uint32(zone.Index)
		}
		addr = to
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, 0, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = unix.Bind(fd, addr)
	}
	if err == nil {
		var name unix.Sockaddr
		if name, err = unix.Getsockname(fd); err == nil {
			switch name := name.(type) {
			case *unix.SockaddrInet4:
				return fd, name.Port, nil
			case *unix.SockaddrInet6:
				return fd, name.Port, nil
			}
		}
	}
	unix.Close(fd)
	return -1, 0, err
}
