package node

import (
	"net"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"
)

// transport is memberlist's own, with a deadline on the streams that it opens: memberlist writes messages
// without one, and a host that is stopped or cut off must not hold us up.
type transport struct {
	*memberlist.NetTransport
	timeout time.Duration
}

// listen opens the sockets of a member, as c says. TCP and UDP need the same port, which may take several
// tries where any will do.
func listen(c *memberlist.Config) (*transport, error) {
	for tries := 10; ; tries-- {
		t, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{
			BindAddrs: []string{c.BindAddr}, BindPort: c.BindPort, Logger: c.Logger,
		})
		if err == nil {
			c.BindPort = t.GetAutoBindPort()
			c.AdvertisePort = c.BindPort
			return &transport{t, c.TCPTimeout}, nil
		}
		if c.BindPort != 0 || tries == 0 || !strings.Contains(err.Error(), "address already in use") {
			return nil, err
		}
	}
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
