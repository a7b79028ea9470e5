package node

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// A probe is a stream or a packet of ProbeMark and a nonce. Whoever sends it learns by the answer which host is reached there (Config.Probe).
const (
	// ProbeMark is the first byte: no message of memberlist begins with it (they begin with 244, the mark of a label).
	ProbeMark = 'g'
	// NonceSize is the number of bytes that follow it.
	NonceSize = 16
)

// transport is memberlist's own, with a deadline on the streams that it opens: memberlist writes messages
// without one, and a host that is stopped or cut off must not hold us up. It answers probes itself.
type transport struct {
	*memberlist.NetTransport
	timeout time.Duration
	probe   func(nonce []byte) []byte // nil: probes are not answered

	packets chan *memberlist.Packet
	streams chan net.Conn
	quit    context.Context
	end     context.CancelFunc
	wg      sync.WaitGroup
}

// listen opens the sockets of a member, as c says. TCP and UDP need the same port, which may take several
// tries where any will do.
func listen(c *memberlist.Config, probe func(nonce []byte) []byte) (*transport, error) {
	for tries := 10; ; tries-- {
		t, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{c.BindAddr}, BindPort: c.BindPort, Logger: c.Logger,
		})
		if err == nil {
			c.BindPort = t.GetAutoBindPort()
			c.AdvertisePort = c.BindPort
			return newTransport(t, c.TCPTimeout, probe), nil
		}
		if c.BindPort != 0 || tries == 0 || !strings.Contains(err.Error(), "address already in use") {
			return nil, err
		}
	}
}

func newTransport(under *memberlist.NetTransport, timeout time.Duration, probe func(nonce []byte) []byte) *transport {
	t := &transport{NetTransport: under, timeout: timeout, probe: probe, packets: make(chan *memberlist.Packet), streams: make(chan net.Conn)}
	t.quit, t.end = context.WithCancel(context.Background())
	t.wg.Go(t.takePackets)
	t.wg.Go(t.takeStreams)
	return t
}

func (t *transport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *transport) StreamCh() <-chan net.Conn           { return t.streams }

// Shutdown ends the transport below first: until then memberlist takes what comes.
func (t *transport) Shutdown() error {
	err := t.NetTransport.Shutdown()
	t.end()
	t.wg.Wait()
	return err
}

func (t *transport) takePackets() {
	for {
		select {
		case p := <-t.NetTransport.PacketCh():
			if len(p.Buf) == 1+NonceSize && p.Buf[0] == ProbeMark {
				if t.probe != nil {
					t.NetTransport.WriteTo(t.probe(p.Buf[1:]), p.From.String()) // lost, it is asked for again
				}
				continue
			}
			select {
			case t.packets <- p:
			case <-t.quit.Done():
				return
			}
		case <-t.quit.Done():
			return
		}
	}
}

func (t *transport) takeStreams() {
	for {
		select {
		case c := <-t.NetTransport.StreamCh():
			t.wg.Go(func() { t.take(c) })
		case <-t.quit.Done():
			return
		}
	}
}

// take answers a probe, or passes the stream on.
func (t *transport) take(c net.Conn) {
	stop := context.AfterFunc(t.quit, func() { c.Close() })
	defer stop()
	c.SetDeadline(time.Now().Add(t.timeout))
	first := make([]byte, 1)
	if _, err := io.ReadFull(c, first); err != nil {
		c.Close()
		return
	}
	if first[0] == ProbeMark {
		defer c.Close()
		var nonce [NonceSize]byte
		if _, err := io.ReadFull(c, nonce[:]); err == nil && t.probe != nil {
			c.Write(t.probe(nonce[:]))
		}
		return
	}
	c.SetDeadline(time.Time{})
	select {
	case t.streams <- &begun{c, first}:
	case <-t.quit.Done():
		c.Close()
	}
}

// begun is a stream of which the first bytes were read.
type begun struct {
	net.Conn
	first []byte
}

func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) == 0 || len(p) == 0 {
		return b.Conn.Read(p)
	}
	n := copy(p, b.first)
	b.first = b.first[n:]
	return n, nil
}

func (t *transport) DialTimeout(addr string, d time.Duration) (net.Conn, error) {
	return t.DialAddressTimeout(memberlist.Address{Addr: addr}, d)
}

func (t *transport) DialAddressTimeout(a memberlist.Address, d time.Duration) (net.Conn, error) {
	c, err := t.NetTransport.DialAddressTimeout(a, d)
	if err == nil {
		err = c.SetDeadline(time.Now().Add(t.timeout))
		if err != nil {
			c.Close()
			return nil, err
		}
	}
	return c, err
}
