package launcher

import (
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// freePort is an address with a port of a range that is free now, for TCP and UDP; with 0, any, without a range.
func freePort(on netip.Addr, from, to int) (netip.AddrPort, error) {
	if from == 0 {
		return netip.AddrPortFrom(on, 0), nil
	}
	for port := from; port <= to; port++ {
		at := netip.AddrPortFrom(on, uint16(port))
		l, err := net.Listen("tcp", at.String())
		if err != nil {
			continue
		}
		c, err := net.ListenPacket("udp", at.String())
		l.Close()
		if err == nil {
			c.Close()
			return at, nil
		}
	}
	return netip.AddrPort{}, fmt.Errorf("no port from %d to %d is free on %v (--port-range)", from, to, on)
}

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
