package sshway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/gorun-dev/gorun/launcher/internal/procgroup"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// maxJumps bounds a chain of jump hosts, each with ones of its own.
const maxJumps = 8

// clientVersion is what gorun calls itself to servers.
const clientVersion = "SSH-2.0-gorun"

// link is one authenticated connection and what it goes through.
type link struct {
	client *ssh.Client
	conn   *watchedConn
	// cut ends the lowest connection, a socket or a command, at once: closing an upper one would send a packet
	// first, which blocks if nothing is read any more.
	cut    func()
	below  func()        // closes what the connection goes through, when that is cut; nil if it is direct
	stderr func() []byte // of a ProxyCommand; nil if there is none
	direct bool

	closed sync.Once
}

func (l *link) close() {
	l.closed.Do(func() {
		l.cut()
		if l.below != nil {
			l.below()
		}
		l.client.Close()
		l.client.Wait()
	})
}

// watchedConn notes when something was last read: any packet shows that the other side lives.
type watchedConn struct {
	net.Conn
	last atomic.Int64 // nanoseconds since start

	mu  sync.Mutex // guards err
	err error      // the first of a read or write: the ones behind it only follow from it
}

func (c *watchedConn) note(err error) {
	if err == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
	}
}

func (c *watchedConn) firstError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *watchedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.note(err)
	return n, err
}

var start = time.Now()

func (c *watchedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.last.Store(int64(time.Since(start)))
	}
	c.note(err)
	return n, err
}

func (c *watchedConn) silence() time.Duration {
	return time.Since(start) - time.Duration(c.last.Load())
}

// hop is a host of a chain, resolved.
type hop struct {
	t way.Target
	o *options
}

func (h hop) address() string { return net.JoinHostPort(h.o.hostName, strconv.Itoa(h.o.port)) }

// connect makes the connection to a host, with whatever is in between. depth counts nested jumps.
func (c *Client) connect(ctx context.Context, h hop, depth int) (*link, error) {
	if h.o.connectTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, h.o.connectTimeout, fmt.Errorf("no answer in %v (ConnectTimeout)", h.o.connectTimeout))
		defer cancel()
	}
	switch {
	case h.o.jumps != "":
		jumps, err := c.jumpHops(ctx, h, depth)
		if err != nil {
			return nil, err
		}
		if len(jumps) > 0 {
			return c.jump(ctx, append(jumps, h), depth)
		}
	case h.o.proxyCommand != "":
		return c.command(ctx, h)
	}
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 15 * time.Second, Count: 3}}
	if h.o.bindAddress != "" {
		a, err := net.ResolveTCPAddr(h.o.network, net.JoinHostPort(h.o.bindAddress, "0"))
		if err != nil {
			return nil, failure(h, way.PhaseConfigure, fmt.Errorf("BindAddress %s: %w", h.o.bindAddress, err), "")
		}
		d.LocalAddr = a
	}
	leave, err := c.enter(ctx, h.address())
	if err != nil {
		e := failure(h, way.PhaseConnect, fmt.Errorf("wait for other logins at %s: %w", h.address(), err), "")
		e.Temporary = timedOut(ctx)
		return nil, e
	}
	defer leave()
	conn, err := dial(ctx, &d, h)
	if err != nil {
		return nil, dialFailure(ctx, h, err)
	}
	l, err := c.handshake(ctx, h, conn, func() { conn.Close() })
	if err != nil {
		conn.Close()
		return nil, err
	}
	l.direct = true
	return l, nil
}

// dial makes the TCP connection, with TCP_NODELAY, which is Go's default.
func dial(ctx context.Context, d *net.Dialer, h hop) (net.Conn, error) {
	conn, err := d.DialContext(ctx, h.o.network, h.address())
	if de, ok := errors.AsType[*net.DNSError](err); !ok || !de.IsNotFound || ctx.Err() != nil {
		return conn, err
	}
	// gorun is static: it reads /etc/hosts and asks DNS. What else the system knows of names (mDNS, LDAP, machines of
	// systemd) and ssh would find, getent finds.
	for _, a := range systemAddresses(ctx, h.o.hostName) {
		var derr error
		if conn, derr = d.DialContext(ctx, h.o.network, net.JoinHostPort(a, strconv.Itoa(h.o.port))); derr == nil {
			return conn, nil
		}
		err = derr
	}
	return nil, err
}

// systemAddresses asks the system's name service; nil if there is none or it knows nothing.
func systemAddresses(ctx context.Context, name string) (addrs []string) {
	cmd := exec.CommandContext(ctx, "getent", "ahosts", name)
	var out strings.Builder
	cmd.Stdout = &out
	if procgroup.Run(cmd) != nil {
		return nil
	}
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) >= 2 && f[1] == "STREAM" {
			addrs = append(addrs, f[0])
		}
	}
	return addrs
}

// jumpHops resolves ProxyJump's list. Only the first of a list keeps its own proxy. A host that would go through
// itself, as a jump host under "Host *" does, is reached directly.
func (c *Client) jumpHops(ctx context.Context, h hop, depth int) ([]hop, error) {
	var hops []hop
	for i, text := range strings.Split(h.o.jumps, ",") {
		t, err := parseJump(text)
		if err != nil {
			return nil, failure(h, way.PhaseConfigure, fmt.Errorf("ProxyJump %s: %w", h.o.jumps, err), "")
		}
		o, err := c.resolve(ctx, t)
		if err != nil {
			return nil, failure(h, way.PhaseConfigure, fmt.Errorf("ProxyJump %s: %w", text, err), "")
		}
		if o.hostName == h.o.hostName && o.port == h.o.port && o.user == h.o.user {
			return nil, nil
		}
		if i > 0 {
			o.jumps, o.proxyCommand = "", ""
		}
		hops = append(hops, hop{t, o})
	}
	if depth >= maxJumps {
		return nil, failure(h, way.PhaseConfigure, fmt.Errorf("more than %d jump hosts behind one another: does ProxyJump go in a circle?", maxJumps), "")
	}
	return hops, nil
}

// parseJump reads [user@]host[:port] or ssh://[user@]host[:port]. IPv6 addresses stand in brackets if a port follows.
func parseJump(text string) (way.Target, error) {
	s := strings.TrimSpace(text)
	if rest, ok := strings.CutPrefix(s, "ssh://"); ok {
		s = strings.TrimSuffix(rest, "/")
	}
	t := way.Target{Name: s}
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		t.User, s = s[:i], s[i+1:]
	}
	host, port := s, ""
	switch {
	case strings.HasPrefix(s, "["):
		end := strings.IndexByte(s, ']')
		if end < 0 {
			return t, fmt.Errorf("%q: no ] behind [", text)
		}
		host = s[1:end]
		if rest := s[end+1:]; rest != "" {
			var ok bool
			if port, ok = strings.CutPrefix(rest, ":"); !ok || port == "" {
				return t, fmt.Errorf("%q: %q behind ]", text, rest)
			}
		}
	case strings.Count(s, ":") == 1:
		host, port, _ = strings.Cut(s, ":")
	}
	if port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return t, fmt.Errorf("%q: port %q", text, port)
		}
		t.Port = int(n)
	}
	if host == "" {
		return t, fmt.Errorf("%q: no host", text)
	}
	t.Addr = host
	return t, nil
}

// jump connects through a chain: each connection is a channel of the one before.
func (c *Client) jump(ctx context.Context, hops []hop, depth int) (*link, error) {
	l, err := c.connect(ctx, hops[0], depth+1)
	if err != nil {
		return nil, via(hops[len(hops)-1], hops[0], err)
	}
	for i, h := range hops[1:] {
		before, prev := l, hops[i]
		conn, err := dialThrough(ctx, before, h.address())
		if err != nil {
			before.close()
			if ctx.Err() != nil {
				return nil, dialFailure(ctx, h, context.Cause(ctx))
			}
			e := failure(h, way.PhaseConnect, fmt.Errorf("through %s: %w", prev.t.Name, err), "")
			if oe, ok := errors.AsType[*ssh.OpenChannelError](err); ok {
				switch oe.Reason {
				case ssh.Prohibited:
					e.Advice = "allow AllowTcpForwarding on " + prev.t.Name
				case ssh.ConnectionFailed:
					e.Temporary, e.Advice = true, fmt.Sprintf("is sshd running on %s, and does %s reach it?", h.t.Name, prev.t.Name)
				}
			}
			return nil, e
		}
		if l, err = c.handshake(ctx, h, conn, before.cut); err != nil {
			before.close()
			return nil, err
		}
		l.below = before.close
	}
	return l, nil
}

// dialThrough opens a channel to addr; ctx ends the wait for it, at the price of the connection.
func dialThrough(ctx context.Context, l *link, addr string) (net.Conn, error) {
	stop := context.AfterFunc(ctx, l.cut)
	conn, err := l.client.DialContext(ctx, "tcp", addr)
	if !stop() && err == nil {
		conn.Close()
		return nil, context.Cause(ctx)
	}
	return conn, err
}

// command connects through a ProxyCommand.
func (c *Client) command(ctx context.Context, h hop) (*link, error) {
	s, err := way.Shell().Open(ctx, h.t, "exec "+h.o.proxyCommand)
	if err != nil {
		return nil, err
	}
	l, err := c.handshake(ctx, h, &commandConn{s}, func() { s.Close() })
	if err != nil {
		// If it ended by itself, that is the cause, and it is about to be known.
		ended := make(chan error)
		go func() { ended <- s.Wait() }()
		var end error
		select {
		case end = <-ended:
			s.Close()
		case <-time.After(200 * time.Millisecond):
			s.Close()
			<-ended
		}
		e, ok := errors.AsType[*way.Error](err)
		if ok && e.Phase == way.PhaseConnect && ctx.Err() == nil {
			cause := fmt.Errorf("ProxyCommand %s: %w", h.o.proxyCommand, e.Cause)
			if end != nil {
				cause = fmt.Errorf("ProxyCommand %s: %w", h.o.proxyCommand, end)
			}
			if text := strings.TrimSpace(string(s.Stderr())); text != "" {
				cause = fmt.Errorf("%w: %s", cause, text)
			}
			e.Cause, e.Advice = cause, "run the command by hand to see what it says"
		}
		return nil, err
	}
	l.below = func() { s.Close() }
	l.stderr = s.Stderr
	return l, nil
}

// commandConn makes a connection of a command's stdin and stdout. It has no deadlines, and closing it does not end the
// command: both are done by ending that.
type commandConn struct{ way.Session }

type commandAddr struct{}

func (commandAddr) Network() string { return "command" }
func (commandAddr) String() string  { return "command" }

func (c *commandConn) Close() error                     { return c.CloseWrite() }
func (c *commandConn) LocalAddr() net.Addr              { return commandAddr{} }
func (c *commandConn) RemoteAddr() net.Addr             { return commandAddr{} }
func (c *commandConn) SetDeadline(time.Time) error      { return nil }
func (c *commandConn) SetReadDeadline(time.Time) error  { return nil }
func (c *commandConn) SetWriteDeadline(time.Time) error { return nil }

// handshake makes an ssh connection of raw. cut ends what is below: it
// is called here when the context ends, by the caller if there is an error.
func (c *Client) handshake(ctx context.Context, h hop, raw net.Conn, cut func()) (*link, error) {
	conn := &watchedConn{Conn: raw}
	conn.last.Store(int64(time.Since(start)))
	check, err := newHostKeyCheck(&c.known, h, c.conf)
	if err != nil {
		return nil, failure(h, way.PhaseHostKey, err, "")
	}
	stop := context.AfterFunc(ctx, cut) // x/crypto/ssh knows no contexts
	var l *login
	cc := &ssh.ClientConfig{
		Config:            ssh.Config{KeyExchanges: h.o.kex},
		User:              h.o.user,
		ClientVersion:     clientVersion,
		HostKeyAlgorithms: check.algorithms(),
		HostKeyCallback:   check.callback,
		// Asked for the first time when the server has refused no authentication at all: before that no key is
		// read and no agent asked.
		AuthCallback: func(a *ssh.ClientAuthContext) (ssh.AuthMethod, error) {
			if l == nil {
				l = newLogin(ctx, &c.files, h.o)
			}
			l.methods = a.AllowedMethods
			return nil, nil
		},
		Auth: []ssh.AuthMethod{ssh.PublicKeysCallback(func() ([]ssh.Signer, error) { return l.signers, nil })},
	}
	sc, chans, reqs, err := ssh.NewClientConn(conn, h.address(), cc)
	if l != nil {
		l.close()
	}
	if !stop() && err == nil { // the context ended just now
		cut()
		sc.Close()
		sc.Wait()
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, handshakeFailure(ctx, h, conn, check, l, err)
	}
	return &link{client: ssh.NewClient(sc, chans, reqs), conn: conn, cut: cut}, nil
}
