package node

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"
)

// A node answers probes beside its members' messages, and tells the others another address than its own if it is to.
func TestProbe(t *testing.T) {
	start := func(c Config) (*Node, string) {
		t.Helper()
		c.Job, c.NodeOf, c.Key = "job", []int{0, 1}, []byte(testKey)
		n, err := Start(t.Context(), c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n, n.Addr()
	}
	_, addr := start(Config{Probe: func(nonce []byte) []byte { return append([]byte("answer to "), nonce...) }})
	_, silent := start(Config{})
	nonce := []byte("0123456789abcdef")
	// ask returns what comes back until the other side says no more.
	ask := func(network, addr string, q []byte) string {
		t.Helper()
		c, err := net.Dial(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write(q); err != nil {
			t.Fatal(err)
		}
		if network == "tcp" {
			c.SetDeadline(time.Now().Add(20 * time.Second))
			b, err := io.ReadAll(c)
			if err, ok := err.(net.Error); ok && err.Timeout() {
				t.Fatal("the stream does not end")
			}
			return string(b)
		}
		b := make([]byte, 100)
		c.SetDeadline(time.Now().Add(300 * time.Millisecond)) // of what is not answered; of what is, it is asked again
		n, _ := c.Read(b)
		return string(b[:n])
	}
	probe := append([]byte{ProbeMark}, nonce...)
	want := "answer to 0123456789abcdef"
	if got := ask("tcp", addr, probe); got != want {
		t.Errorf("tcp: %q, want %q", got, want)
	}
	until(t, "a packet is answered", func() bool { return ask("udp", addr, probe) == want })
	for _, q := range [][]byte{probe[:16], append(bytes.Clone(probe), 'x'), append([]byte{'x'}, nonce...), {ProbeMark}} {
		if got := ask("udp", addr, q); got != "" {
			t.Errorf("udp: %q is answered by %q", q, got)
		}
	}
	if got := ask("tcp", silent, probe) + ask("udp", silent, probe); got != "" {
		t.Errorf("a node that answers no probes says %q", got)
	}

	n, _ := start(Config{Bind: netip.MustParseAddrPort("127.0.0.1:0"), Advertise: netip.MustParseAddr("192.0.2.1")})
	got, err := netip.ParseAddrPort(n.Addr())
	if err != nil || got.Addr().String() != "192.0.2.1" || got.Port() == 0 || n.dataAddr() != "192.0.2.1" {
		t.Errorf("a translated address: %v, %v; data at %s", got, err, n.dataAddr())
	}
}
