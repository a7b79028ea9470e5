package launcher

import (
	"cmp"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"path/filepath"
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

// interfaceAddrs are the addresses of this host's interfaces that are up, in the kernel's order, without those of IPv6 that are temporary,
// deprecated or not yet confirmed. The kernel is asked once for all: a host may have hundreds of interfaces.
func interfaceAddrs() []ifAddr {
	links, err := net.Interfaces()
	if err != nil {
		return nil
	}
	rib, err := syscall.NetlinkRIB(unix.RTM_GETADDR, unix.AF_UNSPEC)
	if err != nil {
		return nil
	}
	messages, err := syscall.ParseNetlinkMessage(rib)
	if err != nil {
		return nil
	}
	bridges := map[string]bool{}
	var out []ifAddr
	for i := range messages {
		index, a, ok := parseAddr(&messages[i])
		at := slices.IndexFunc(links, func(l net.Interface) bool { return l.Index == index })
		if !ok || at < 0 || links[at].Flags&net.FlagUp == 0 || links[at].Flags&net.FlagLoopback != 0 {
			continue
		}
		a.name = links[at].Name
		if _, known := bridges[a.name]; !known {
			bridges[a.name] = bareBridge("/sys/class/net", a.name)
		}
		a.bridge = bridges[a.name]
		out = append(out, a)
	}
	return out
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

// bareBridge reports whether an interface is a bridge to which no network card belongs: it leads to containers or virtual machines of this host.
func bareBridge(sys, name string) bool {
	if _, err := os.Stat(filepath.Join(sys, name, "bridge")); err != nil {
		return false
	}
	ports, _ := filepath.Glob(filepath.Join(sys, name, "brif", "*"))
	return !slices.ContainsFunc(ports, func(p string) bool {
		_, err := os.Stat(filepath.Join(sys, filepath.Base(p), "device"))
		return err == nil
	})
}

// probers answer probes at the addresses of this host at which nothing else does.
type probers struct{ all []*prober }

// listen answers at addresses, each with the port where it is answered or why it is not; the first one is answered already.
func (p *probers) listen(key []byte, host int, addrs []agentwire.Address, from, to int) []agentwire.Address {
	out := slices.Clone(addrs)
	for i := range out {
		a := &out[i]
		if i == 0 || a.Port != 0 {
			continue
		}
		if a.Bind != "" { // what answers at the address behind it answers here, too
			for k := range out {
				if out[k].IP == a.Bind {
					a.Port, a.Err = out[k].Port, out[k].Err
				}
			}
			continue
		}
		p.all = append(p.all, answerAt(key, host, a, from, to).all...)
	}
	return out
}

// answerAt answers at one address, and enters the port or the error.
func answerAt(key []byte, host int, a *agentwire.Address, from, to int) *probers {
	ip, err := netip.ParseAddr(a.IP)
	var one *prober
	if err == nil {
		one, err = newProber(key, host, ip, from, to)
	}
	if err != nil {
		a.Err = err.Error()
		return &probers{}
	}
	a.Port = int(one.tcp.Addr().(*net.TCPAddr).Port)
	return &probers{[]*prober{one}}
}

func (p *probers) close() {
	for _, one := range p.all {
		one.close()
	}
	p.all = nil
}

// hostPort is an address at which a host answers.
func hostPort(a agentwire.Address) string { return net.JoinHostPort(a.IP, strconv.Itoa(a.Port)) }
