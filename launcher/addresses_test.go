package launcher

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

func sorted(c <-chan string) []string {
	var all []string
	for s := range c {
		all = append(all, s)
	}
	slices.Sort(all)
	return all
}

func TestOrderAddrs(t *testing.T) {
	ip := netip.MustParseAddr
	held := []ifAddr{
		{ip("172.17.0.1"), 16, "docker0", true}, {ip("192.168.0.2"), 24, "eth0", false}, {ip("10.1.0.2"), 16, "eth1", false},
		{ip("fd00::2"), 64, "eth0", false}, {ip("fe80::2"), 64, "eth0", false},
	}
	rest := []string{"10.1.0.2 eth1", "fd00::2 eth0", "172.17.0.1 docker0 bridge"}
	for _, tt := range []struct {
		name          string
		sshd, reached string
		outward       string
		held          []ifAddr
		want          []string
	}{
		{"ssh's", "192.168.0.2", "192.168.0.2", "10.1.0.2", held, append([]string{"192.168.0.2 eth0 ssh"}, rest...)},
		{"mapped into IPv6", "::ffff:192.168.0.2", "", "10.1.0.2", held, append([]string{"192.168.0.2 eth0 ssh"}, rest...)},
		{"behind translation", "192.168.0.2", "203.0.113.5", "10.1.0.2", held, append(append([]string{"192.168.0.2 eth0 ssh"}, rest...), "203.0.113.5 ssh for 192.168.0.2")},
		{"translation between families", "192.168.0.2", "2001:db8::5", "10.1.0.2", held, append([]string{"192.168.0.2 eth0 ssh"}, rest...)},
		{"another way than ssh", "", "", "10.1.0.2", held, []string{"10.1.0.2 eth1", "192.168.0.2 eth0", "fd00::2 eth0", "172.17.0.1 docker0 bridge"}},
		{"only gorun knows", "", "10.1.0.2", "192.168.0.2", held, []string{"10.1.0.2 eth1 ssh", "192.168.0.2 eth0", "fd00::2 eth0", "172.17.0.1 docker0 bridge"}},
		{"a variable of another machine", "192.168.7.7", "", "192.168.0.2", held, append([]string{"192.168.0.2 eth0"}, rest...)},
		{"over the link", "fe80::2%eth0", "fe80::2%eth0", "", held, append([]string{"192.168.0.2 eth0"}, rest...)},
		{"over loopback", "127.0.0.1", "127.0.0.1", "", held, append([]string{"192.168.0.2 eth0"}, rest...)},
		{"nothing", "", "", "", nil, []string{"127.0.0.1"}},
	} {
		parse := func(s string) netip.Addr {
			a, _ := netip.ParseAddr(s)
			return a
		}
		var got []string
		for _, a := range orderAddrs(tt.held, parse(tt.sshd), parse(tt.reached), func() netip.Addr { return parse(tt.outward) }) {
			text := strings.TrimSpace(a.IP + " " + a.Interface)
			if a.Bridge {
				text += " bridge"
			}
			if a.SSH {
				text += " ssh"
			}
			if a.Bind != "" {
				text += " for " + a.Bind
			}
			got = append(got, text)
		}
		if d := cmp.Diff(got, tt.want); d != "" {
			t.Errorf("%s: -got +want:\n%s", tt.name, d)
		}
	}
}

// The kernel's answer is read as package net reads it.
func TestInterfaceAddrs(t *testing.T) {
	got := map[string]string{}
	for _, a := range interfaceAddrs() {
		got[netip.PrefixFrom(a.ip, a.bits).String()] = a.name
	}
	list, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for _, i := range list {
		if i.Flags&net.FlagUp == 0 || i.Flags&net.FlagLoopback != 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			want[a.String()] = i.Name
		}
	}
	if len(want) == 0 {
		citest.Lacking(t, "an interface beside the loopback")
	}
	for a, name := range got {
		if want[a] != name {
			t.Errorf("%s is held by %q, want %q", a, name, want[a])
		}
	}
	if len(got) == 0 { // some may be left out: temporary ones
		t.Errorf("no address of %v", want)
	}
}

func TestBareBridge(t *testing.T) {
	links := map[int]ifLink{1: {name: "eth0", master: 6}, 2: {name: "docker0", kind: "bridge"}, 3: {name: "veth1", kind: "veth", master: 2}, 4: {name: "virbr0", kind: "bridge"},
		5: {name: "tap0", kind: "tun", master: 4}, 6: {name: "br0", kind: "bridge"}, 7: {name: "veth2", kind: "veth", master: 6}, 8: {name: "br1", kind: "bridge"},
		9: {name: "bond0", kind: "bond", master: 8}, 10: {name: "br2", kind: "bridge"}}
	for index, want := range map[int]bool{1: false, 2: true, 3: false, 4: true, 6: false, 8: false, 10: true, 11: false} {
		if got := bareBridge(links, index); got != want {
			t.Errorf("%s: %v, want %v", links[index].name, got, want)
		}
	}
}

// What the kernel says may be cut off anywhere.
func FuzzParseLink(f *testing.F) {
	for _, question := range []int{unix.RTM_GETLINK, unix.RTM_GETADDR} {
		for _, m := range askKernel(question) {
			f.Add(m.Header.Type, m.Data)
		}
	}
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		m := &syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: kind}, Data: data}
		if _, l, ok := parseLink(m); ok && l.name == "" {
			t.Error("an interface without a name")
		}
		if _, a, ok := parseAddr(m); ok && !a.ip.IsValid() {
			t.Error("no address")
		}
	})
}

func TestNamesInterface(t *testing.T) {
	names := []string{"lo", "eth0", "eth10", "ib0"}
	for value, want := range map[string]bool{
		"eth": true, "eth0": true, "=eth0": true, "=eth": false, "eth1": true, "=eth1": false, "enp": false, "enp,ib": true, "=enp,=eth0": false, "=enp,eth0": true,
		"^lo": true, "^lo,eth,ib": false, "^=eth0": true, "^=lo,eth0,eth10,ib0": false, "": false,
	} {
		if got := namesInterface(value, names); got != want {
			t.Errorf("%q: %v, want %v", value, got, want)
		}
	}
}

func TestOnInterface(t *testing.T) {
	home := t.TempDir()
	conf := filepath.Join(home, ".nccl.conf")
	other := filepath.Join(home, "other.conf")
	if err := os.WriteFile(conf, []byte("# NCCL_SOCKET_IFNAME\nNCCL_DEBUG=WARN\n NCCL_SOCKET_IFNAME = ib0\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, []byte("#NCCL_SOCKET_IFNAME=ib0\nNCCL_SOCKET_IFNAME=\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	all := []string{"NCCL_SOCKET_IFNAME==eth1", "MCCL_SOCKET_IFNAME==eth1", "GLOO_SOCKET_IFNAME=eth1"}
	for _, tt := range []struct {
		name, iface string
		env         []string
		added       []string
	}{
		{"all", "eth1", nil, all},
		{"not known", "", nil, nil},
		{"the user's", "eth1", []string{"NCCL_SOCKET_IFNAME=ib0", "GLOO_SOCKET_IFNAME=ib1"}, []string{"MCCL_SOCKET_IFNAME==eth1"}},
		{"NCCL's file", "eth1", []string{"HOME=" + home}, all[1:]},
		{"another file of NCCL's", "eth1", []string{"HOME=" + home, "NCCL_CONF_FILE=" + other}, all},
	} {
		got := onInterface(slices.Clone(tt.env), tt.iface)
		if d := cmp.Diff(got, append(slices.Clone(tt.env), tt.added...)); d != "" {
			t.Errorf("%s: -got +want:\n%s", tt.name, d)
		}
	}
}
