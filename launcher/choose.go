package launcher

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// fullMesh is the number of hosts up to which each is dialled by all others before the ranks start. Of more hosts each dials the first one, with
// which all speak, and the next: on any split of the hosts dials lie across it in both directions, and those of 64 hosts take no time that is noticed
// (of all pairs, or with the hosts at 2, 4, 8, ... places, they took 15 % of a launch on two cores). A pair that is cut all the same is found
// by gossip.
const fullMesh = 8

// dialled are the hosts that a host dials.
func dialled(n, host, full int) []int {
	var to []int
	if n <= full {
		for k := range n {
			if k != host {
				to = append(to, k)
			}
		}
		return to
	}
	next := (host + 1) % n
	if host == 0 || next == 0 {
		return []int{next}
	}
	return []int{0, next}
}

// chooser finds the address of each host at which the others reach it, from what they say.
type chooser struct {
	ids   []int // of the hosts in the job
	names []string
	addrs [][]agentwire.Address // of each host, the likeliest first
	all   []bool                // all addresses of a host are dialled, not the first alone
	by    [][]int               // the hosts that dial each host
	got   map[dial]agentwire.ReachedHost
	asked map[dial]bool
}

// dial is one host's way to an address of another.
type dial struct {
	by, host int
	addr     string // with the port
}

func newChooser(ids []int, names []string, first []agentwire.Address, full int) *chooser {
	c := &chooser{ids: ids, names: names, got: map[dial]agentwire.ReachedHost{}, asked: map[dial]bool{}, by: make([][]int, len(names)), all: make([]bool, len(names))}
	for i, a := range first {
		c.addrs = append(c.addrs, []agentwire.Address{a})
		for _, k := range dialled(len(names), i, full) {
			c.by[k] = append(c.by[k], i)
		}
	}
	return c
}

// dials are those that are still to be asked for, of each host.
func (c *chooser) dials() [][]agentwire.Peer {
	out := make([][]agentwire.Peer, len(c.names))
	for host, by := range c.by {
		for k, a := range c.addrs[host] {
			if a.Port == 0 || k > 0 && !c.all[host] {
				continue
			}
			for _, b := range by {
				d := dial{b, host, hostPort(a)}
				if !c.asked[d] {
					c.asked[d] = true
					out[b] = append(out[b], agentwire.Peer{Host: c.ids[host], Addr: d.addr})
				}
			}
		}
	}
	return out
}

// note takes what a host says of one of its dials. What it was not asked for is an error.
func (c *chooser) note(by int, r agentwire.ReachedHost) error {
	d := dial{by, slices.Index(c.ids, r.Host), r.Addr}
	if !c.asked[d] {
		return fmt.Errorf("it speaks of a way to host %d at %q", r.Host, r.Addr)
	}
	c.got[d] = r
	return nil
}

// open reports whether answers are missing.
func (c *chooser) open() bool { return len(c.got) < len(c.asked) }

// silent are the hosts of which answers are missing.
func (c *chooser) silent() []string {
	missing := map[int]bool{}
	for d := range c.asked {
		if _, ok := c.got[d]; !ok {
			missing[d.by] = true
		}
	}
	var names []string
	for i, name := range c.names {
		if missing[i] || len(missing) == 0 && len(c.addrs[i]) == 1 {
			names = append(names, name)
		}
	}
	return names
}

// state is what is known of an address: whether all have reached it, and if not whether they still may.
func (c *chooser) state(host int, a agentwire.Address) (proven, open bool) {
	if a.Port == 0 {
		return false, false
	}
	proven = true
	for _, by := range c.by[host] {
		d := dial{by, host, hostPort(a)}
		r, ok := c.got[d]
		switch {
		case !c.asked[d]:
			return false, false
		case ok && r.Err != "":
			return false, false
		case !ok:
			proven, open = false, true
		}
	}
	return proven, open
}

// best is the address that a host gets, -1 if none is proven. It is final if none that is better may still be.
func (c *chooser) best(host int) (k int, final bool) {
	k = -1
	for i, a := range c.addrs[host] {
		if proven, _ := c.state(host, a); proven && (k < 0 || c.compare(host, a, c.addrs[host][k]) < 0) {
			k = i
		}
	}
	final = true
	for i, a := range c.addrs[host] {
		if _, open := c.state(host, a); open && (k < 0 || c.compare(host, a, c.addrs[host][k]) < order(i > k)) {
			final = false
		}
	}
	return k, final
}

// compare orders the addresses of a host: the one that ssh used, then those in a network in which many other hosts are, the near, those of no
// bridge. It is negative if a is better.
func (c *chooser) compare(host int, a, b agentwire.Address) int {
	ssh := func(a agentwire.Address) int { return order(a.SSH && a.Bind == "") }
	return cmp.Or(ssh(b)-ssh(a), c.shared(host, b)-c.shared(host, a), c.far(host, a)-c.far(host, b), order(a.Bridge)-order(b.Bridge))
}

// shared is how many other hosts have an address in an address's network.
func (c *chooser) shared(host int, a agentwire.Address) int {
	ours, ok := network(a)
	if !ok {
		return 0
	}
	n := 0
	for k, addrs := range c.addrs {
		if k != host && slices.ContainsFunc(addrs, func(o agentwire.Address) bool { its, ok := network(o); return ok && its == ours }) {
			n++
		}
	}
	return n
}

func network(a agentwire.Address) (netip.Prefix, bool) {
	ip, err := netip.ParseAddr(a.IP)
	if err != nil || a.Bits == 0 {
		return netip.Prefix{}, false
	}
	p, err := ip.Prefix(a.Bits)
	return p, err == nil
}

// far says coarsely how far the farthest host is: 0 below a millisecond, then one more for each factor of 4. A finer measure would choose by chance.
func (c *chooser) far(host int, a agentwire.Address) int {
	var most time.Duration
	for _, by := range c.by[host] {
		most = max(most, c.got[dial{by, host, hostPort(a)}].Took)
	}
	return (bits.Len64(uint64(most/time.Millisecond)) + 1) / 2
}

// plain reports whether a host is reached at its first address.
func (c *chooser) plain(host int) bool {
	proven, _ := c.state(host, c.addrs[host][0])
	return proven
}

// why is who does not reach a host at an address, and the reason; "" if all do.
func (c *chooser) why(host int, a agentwire.Address) string {
	if a.Port == 0 {
		return a.Err
	}
	var hosts alike[string]
	for _, by := range c.by[host] {
		if text := c.missed(by, host, a); text != "" {
			hosts.add(text, c.names[by])
		}
	}
	var reasons []string
	for _, text := range hosts.texts {
		reasons = append(reasons, fmt.Sprintf("not reached by %s: %s", HostList(hosts.of[text]), text))
	}
	return strings.Join(reasons, "; ")
}

// missed is why one host does not reach another at an address, "" if it does.
func (c *chooser) missed(by, host int, a agentwire.Address) string {
	r, ok := c.got[dial{by, host, hostPort(a)}]
	switch {
	case a.Port == 0:
		return a.Err
	case !ok:
		return "no answer"
	}
	return r.Err
}

// chosen is a host's address with the reason for it: "10.1.0.2 (eth1): ssh's 192.168.0.2 was not reached by c: tcp: connection refused".
func (c *chooser) chosen(host, k int) string {
	text := addrText(c.addrs[host][k])
	if k == 0 {
		return text
	}
	first := c.addrs[host][0]
	whose := ""
	if first.SSH {
		whose = "ssh's "
	}
	return fmt.Sprintf("%s: %s%s was %s", text, whose, first.IP, c.why(host, first))
}

// none says why a host has no address.
func (c *chooser) none(host int) error {
	var all []string
	for _, a := range c.addrs[host] {
		all = append(all, addrText(a)+": "+c.why(host, a))
	}
	if len(all) == 1 {
		return fmt.Errorf("the other hosts do not reach it: %s", all[0])
	}
	return fmt.Errorf("the other hosts do not all reach it at any of its addresses: %s", strings.Join(all, "; "))
}

func addrText(a agentwire.Address) string {
	switch {
	case a.Bind != "":
		return fmt.Sprintf("%s (translated to %s)", a.IP, a.Bind)
	case a.Interface != "":
		return fmt.Sprintf("%s (%s)", a.IP, a.Interface)
	}
	return a.IP
}
