package launcher

import (
	"cmp"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// maxAddrs bounds the addresses of a host that are tried.
const maxAddrs = 16

// ifAddr is an address that an interface of this host holds.
type ifAddr struct {
	ip     netip.Addr
	bits   int
	name   string
	bridge bool
}

// hostAddrs are the addresses at which other hosts may reach this one, the likeliest first. bind, if it is one, is the only one. reached is where
// gorun reached this host over ssh, "" if it does not know.
func hostAddrs(bind, reached string) []agentwire.Address {
	if a, err := netip.ParseAddr(bind); err == nil {
		only := address(a, interfaceAddrs())
		return []agentwire.Address{only}
	}
	var sshd netip.Addr
	if f := strings.Fields(os.Getenv("SSH_CONNECTION")); len(f) == 4 {
		sshd, _ = netip.ParseAddr(f[2])
	}
	outer, _ := netip.ParseAddr(reached)
	return orderAddrs(interfaceAddrs(), sshd, outer, outwardAddr)
}

// orderAddrs is what hostAddrs does. sshd is the address at which the host's sshd was reached, reached the one that gorun used for it: where they
// differ, what is between them translates addresses.
func orderAddrs(held []ifAddr, sshd, reached netip.Addr, outward func() netip.Addr) []agentwire.Address {
	usable := func(a netip.Addr) bool {
		return a.IsValid() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsUnspecified() && !a.IsMulticast()
	}
	sshd, reached = sshd.Unmap(), reached.Unmap()
	var out []agentwire.Address
	add := func(a netip.Addr) *agentwire.Address {
		if !usable(a) || len(out) == maxAddrs || slices.ContainsFunc(out, func(o agentwire.Address) bool { return o.IP == a.String() }) {
			return nil
		}
		found := address(a, held)
		if found.Interface == "" {
			return nil // a variable may be left over from another machine
		}
		out = append(out, found)
		return &out[len(out)-1]
	}
	for _, a := range []netip.Addr{sshd, reached} {
		if at := add(a); at != nil {
			at.SSH = true
		}
	}
	if len(out) == 0 {
		add(outward())
	}
	rest := slices.Clone(held)
	slices.SortStableFunc(rest, func(a, b ifAddr) int {
		return cmp.Or(order(a.bridge)-order(b.bridge), order(a.ip.Is6())-order(b.ip.Is6()))
	})
	for _, a := range rest {
		add(a.ip)
	}
	// Address translation comes last: within one network the way through it is a detour.
	if usable(reached) && len(out) > 0 && address(reached, held).Interface == "" {
		bind := slices.IndexFunc(out, func(a agentwire.Address) bool { return a.SSH && netip.MustParseAddr(a.IP).Is4() == reached.Is4() })
		if bind >= 0 {
			out = append(out[:min(len(out), maxAddrs-1)], agentwire.Address{IP: reached.String(), Bind: out[bind].IP, SSH: true})
		}
	}
	if len(out) == 0 {
		out = append(out, address(loopback, held))
	}
	return out
}

// address is one with what its interface says of it.
func address(ip netip.Addr, held []ifAddr) agentwire.Address {
	ip = ip.Unmap()
	a := agentwire.Address{IP: ip.String()}
	for _, h := range held {
		if h.ip == ip {
			a.Interface, a.Bits, a.Bridge = h.name, h.bits, h.bridge
			break
		}
	}
	return a
}

// addrOf is the address of one end of a connection, if it has one.
func addrOf(a net.Addr) (netip.Addr, bool) {
	ap, err := netip.ParseAddrPort(a.String())
	return ap.Addr().Unmap(), err == nil
}

// outwardAddr is the address by which this host would speak to the world; nothing is sent.
func outwardAddr() netip.Addr {
	for _, to := range []string{"192.0.2.1:9", "[2001:db8::1]:9"} { // addresses of documentation
		c, err := net.Dial("udp", to)
		if err != nil {
			continue
		}
		a, ok := addrOf(c.LocalAddr())
		c.Close()
		if ok {
			return a
		}
	}
	return loopback
}

// interfaceAddrs are the addresses of this host's interfaces that are up, in the kernel's order, without those of IPv6 that are temporary,
// deprecated or not yet confirmed. The kernel is asked twice for all: a host may have hundreds of interfaces, and /sys may be of another network
// namespace.
func interfaceAddrs() []ifAddr {
	links := map[int]ifLink{}
	for _, m := range askKernel(unix.RTM_GETLINK) {
		if index, l, ok := parseLink(&m); ok {
			links[index] = l
		}
	}
	var out []ifAddr
	for _, m := range askKernel(unix.RTM_GETADDR) {
		index, a, ok := parseAddr(&m)
		l, known := links[index]
		if !ok || !known || l.flags&unix.IFF_UP == 0 || l.flags&unix.IFF_LOOPBACK != 0 {
			continue
		}
		a.name, a.bridge = l.name, bareBridge(links, index)
		out = append(out, a)
	}
	return out
}

// askKernel is all that the kernel says to a question; nothing if it does not answer.
func askKernel(question int) []syscall.NetlinkMessage {
	rib, err := syscall.NetlinkRIB(question, unix.AF_UNSPEC)
	if err != nil {
		return nil
	}
	messages, err := syscall.ParseNetlinkMessage(rib)
	if err != nil {
		return nil
	}
	return messages
}

// ifLink is an interface.
type ifLink struct {
	name   string
	kind   string // of one that is made of software: "bridge", "veth", "bond"; "": a card
	master int    // index of the bridge or bond that it belongs to; 0: none
	flags  uint32
}

// parseLink reads one answer of the kernel.
func parseLink(m *syscall.NetlinkMessage) (index int, l ifLink, ok bool) {
	if m.Header.Type != unix.RTM_NEWLINK || len(m.Data) < unix.SizeofIfInfomsg {
		return 0, l, false
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(m)
	if err != nil {
		return 0, l, false
	}
	for _, attr := range attrs {
		switch v := attr.Value; attr.Attr.Type &^ unix.NLA_F_NESTED {
		case unix.IFLA_IFNAME:
			l.name = unix.ByteSliceToString(v)
		case unix.IFLA_MASTER:
			if len(v) == 4 {
				l.master = int(binary.NativeEndian.Uint32(v))
			}
		case unix.IFLA_LINKINFO: // attributes in it: length, type, value, up to a multiple of 4 bytes
			for len(v) >= unix.SizeofRtAttr {
				n := int(binary.NativeEndian.Uint16(v))
				if n < unix.SizeofRtAttr || n > len(v) {
					break
				}
				if binary.NativeEndian.Uint16(v[2:]) == unix.IFLA_INFO_KIND {
					l.kind = unix.ByteSliceToString(v[unix.SizeofRtAttr:n])
				}
				v = v[min((n+3)&^3, len(v)):]
			}
		}
	}
	l.flags = binary.NativeEndian.Uint32(m.Data[8:12])
	return int(binary.NativeEndian.Uint32(m.Data[4:8])), l, l.name != ""
}

// parseAddr reads one answer of the kernel: the interface's index and the address, unless it does not last.
func parseAddr(m *syscall.NetlinkMessage) (index int, a ifAddr, ok bool) {
	if m.Header.Type != unix.RTM_NEWADDR || len(m.Data) < unix.SizeofIfAddrmsg {
		return 0, a, false
	}
	attrs, err := syscall.ParseNetlinkRouteAttr(m)
	if err != nil {
		return 0, a, false
	}
	flags := uint32(m.Data[2])
	for _, attr := range attrs {
		switch attr.Attr.Type {
		case unix.IFA_LOCAL: // of a link between two, IFA_ADDRESS is the other end's
			a.ip, _ = netip.AddrFromSlice(attr.Value)
		case unix.IFA_ADDRESS:
			if !a.ip.IsValid() {
				a.ip, _ = netip.AddrFromSlice(attr.Value)
			}
		case unix.IFA_FLAGS:
			if len(attr.Value) == 4 {
				flags = binary.NativeEndian.Uint32(attr.Value)
			}
		}
	}
	a.bits = int(m.Data[1])
	passing := uint32(unix.IFA_F_DADFAILED | unix.IFA_F_DEPRECATED | unix.IFA_F_TENTATIVE)
	if a.ip.Is6() {
		passing |= unix.IFA_F_TEMPORARY // of IPv4 the same bit says that the interface has another address before it
	}
	return int(binary.NativeEndian.Uint32(m.Data[4:8])), a, a.ip.IsValid() && flags&passing == 0
}

// bareBridge reports whether an interface is a bridge that leads to nothing but containers or virtual machines of this host.
func bareBridge(links map[int]ifLink, index int) bool {
	if links[index].kind != "bridge" {
		return false
	}
	for _, l := range links {
		if l.master == index && l.kind != "veth" && l.kind != "tun" {
			return false
		}
	}
	return true
}

// answerAt answers probes at an address of this host, and enters the port; or the error, and is nil.
func answerAt(key []byte, host int, a *agentwire.Address, from, to int) *prober {
	ip, err := netip.ParseAddr(a.IP)
	var one *prober
	if err == nil {
		one, err = newProber(key, host, ip, from, to)
	}
	if err != nil {
		a.Err = err.Error()
		return nil
	}
	a.Port = one.tcp.Addr().(*net.TCPAddr).Port
	return one
}

// hostPort is an address at which a host answers.
func hostPort(a agentwire.Address) string { return net.JoinHostPort(a.IP, strconv.Itoa(a.Port)) }
