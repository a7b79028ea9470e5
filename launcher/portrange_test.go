package launcher

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

// A port that another job takes after it was found free is replaced by the next one of the range; without one the error is that of a
// range in which none is free.
func TestPortTakenMeanwhile(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := int(netip.MustParseAddrPort(l.Addr().String()).Port())
	start := func(from, to int) (*localHost, error) {
		h := &localHost{masterFD: -1, cfg: hostConfig{start: startNode, nodes: node.Config{Job: "j", NodeOf: []int{0, 1}, Host: "a", Key: make([]byte, 32),
			Bind: netip.AddrPortFrom(loopback, uint16(taken)), Ports: [2]int{from, to}}}}
		return h, h.startNode(t.Context())
	}
	h, err := start(taken, taken)
	if want := fmt.Sprintf("no port from %d to %[1]d is free on 127.0.0.1 (--port-range)", taken); err == nil || err.Error() != want {
		t.Errorf("one port: error %v, want %s", err, want)
	}
	if h.node != nil {
		h.node.Close()
	}
	from, to := taken, min(taken+50, 65535)
	if to-from < 50 {
		from, to = taken-50, taken
	}
	h, err = start(from, to)
	if err != nil {
		t.Fatalf("several ports: %v", err)
	}
	defer h.node.Close()
	if at, err := netip.ParseAddrPort(h.node.Addr()); err != nil || int(at.Port()) == taken || int(at.Port()) < from || int(at.Port()) > to {
		t.Errorf("the node is at %v (%v), want another port from %d to %d than %d", h.node.Addr(), err, from, to, taken)
	}
}
