package pmix

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// peerUser is the user who has made the other end of a TCP connection within this host, as the kernel knows it: TCP has no SO_PEERCRED. The other
// end must not be closed yet: one that is belongs to nobody, which looks like root.
func peerUser(nc net.Conn) (int, error) {
	local, ok1 := nc.LocalAddr().(*net.TCPAddr)
	remote, ok2 := nc.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 || local.IP.To4() == nil || remote.IP.To4() == nil {
		return 0, errors.New("not a TCP connection by IPv4")
	}
	user, err := diagUser(remote, local)
	if err != nil && err != errClosed {
		// The kernel may lack the module for it.
		return listedUser(remote, local)
	}
	return user, err
}

// Parts of linux/inet_diag.h and linux/sock_diag.h.
const (
	sockDiagByFamily = 20
	diagRequestSize  = 56
	diagStateOffset  = 1 // in an answer
	diagPortsOffset  = 4
	diagUserOffset   = 64
	established      = 1
	allStates        = 1<<32 - 1
)

var errClosed = errors.New("the other end is closed")

// diagUser asks for the owner of the socket from one address to another.
func diagUser(from, to *net.TCPAddr) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	timeout := unix.NsecToTimeval(int64(endBound))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return 0, os.NewSyscallError("setsockopt", err)
	}
	order := binary.NativeEndian
	q := make([]byte, 0, unix.NLMSG_HDRLEN+diagRequestSize)
	q = order.AppendUint32(q, unix.NLMSG_HDRLEN+diagRequestSize)
	q = order.AppendUint16(q, sockDiagByFamily)
	q = order.AppendUint16(q, unix.NLM_F_REQUEST)
	q = order.AppendUint32(q, 1) // sequence number
	q = order.AppendUint32(q, 0)
	q = append(q, unix.AF_INET, unix.IPPROTO_TCP, 0, 0)
	q = order.AppendUint32(q, allStates)
	q = binary.BigEndian.AppendUint16(q, uint16(from.Port))
	q = binary.BigEndian.AppendUint16(q, uint16(to.Port))
	for _, ip := range []net.IP{from.IP, to.IP} {
		var field [16]byte
		copy(field[:], ip.To4())
		q = append(q, field[:]...)
	}
	q = order.AppendUint32(q, 0)       // any interface
	q = order.AppendUint64(q, 1<<64-1) // no cookie
	if err := unix.Sendto(fd, q, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, os.NewSyscallError("sendto", err)
	}
	b := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, b, 0)
	if err != nil {
		return 0, os.NewSyscallError("recvfrom", err)
	}
	messages, err := syscall.ParseNetlinkMessage(b[:n])
	if err != nil {
		return 0, err
	}
	for _, m := range messages {
		switch {
		case m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4:
			return 0, syscall.Errno(-int32(order.Uint32(m.Data)))
		case m.Header.Type == sockDiagByFamily && len(m.Data) >= diagUserOffset+4:
			// It may be one that listens at the same port.
			if ports := m.Data[diagPortsOffset:]; m.Data[diagStateOffset] != established || binary.BigEndian.Uint16(ports) != uint16(from.Port) ||
				binary.BigEndian.Uint16(ports[2:]) != uint16(to.Port) {
				return 0, errClosed
			}
			return int(order.Uint32(m.Data[diagUserOffset:])), nil
		}
	}
	return 0, errors.New("no answer about a socket")
}

// listedUser looks for the owner of a socket in the list of all.
func listedUser(from, to *net.TCPAddr) (int, error) {
	list, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0, err
	}
	address := func(a *net.TCPAddr) string {
		return fmt.Sprintf("%08X:%04X", binary.NativeEndian.Uint32(a.IP.To4()), a.Port)
	}
	for line := range bytes.Lines(list) {
		const local, remote, state, user = 1, 2, 3, 7
		f := bytes.Fields(line)
		if len(f) > user && string(f[local]) == address(from) && string(f[remote]) == address(to) && string(f[state]) == "01" {
			return strconv.Atoi(string(f[user]))
		}
	}
	return 0, fmt.Errorf("the socket of %v is not listed", from)
}
