// Package wire is what a rank and its host's node say to each other: messages on an abstract unix socket
// that keeps packets apart (SOCK_SEQPACKET), so that a message and the descriptor in it stay together.
package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Version of the protocol; both sides are built from one source, a difference is a stale binary.
const Version = 7

// MaxPayload is how much of a message one packet carries; longer messages take several.
const MaxPayload = 64 << 10

// MaxStacks bounds the stacks that a rank tells, in bytes: those of more than a thousand goroutines.
const MaxStacks = 1 << 20

const (
	headerSize = 16
	magic      = 0x67 // 'g'
	flagMore   = 1    // the message goes on in the next packet
)

// Type says what a message is.
type Type uint8

const (
	Hello       Type = iota + 1 // rank: version, job, rank, size; with its ledger
	Welcome                     // node: placement, or why the rank is refused
	Request                     // rank: a store.Request
	Cancel                      // rank: give up request ID
	Reply                       // node: the answer to request ID, maybe with a descriptor
	Goodbye                     // rank: it leaves in good order
	Subscribe                   // rank: send all events from now on, those of the past first
	Events                      // node: the next events
	Deaths                      // node: events of deaths, for those who did not subscribe
	Ledger                      // rank: ask for the ledger of a rank
	Import                      // rank: ask for what a rank exports
	Fetch                       // node: ask for what this rank exports
	FetchCancel                 // node: nobody wants fetch ID any more
	Fetched                     // rank: the answer to fetch ID, maybe with a descriptor
	Suspect                     // rank: it fails because of the rank that it names; no answer
	Far                         // rank: ask for an account in the ledgers of ranks on other hosts
	Stacks                      // node: ask for the stacks of the rank's goroutines
	Stacked                     // rank: the answer to stacks ID, as runtime.Stack writes them
	lastType    = Stacked
)

// Message is what is said at once. ID ties answers to questions.
type Message struct {
	Type    Type
	ID      uint64
	Payload []byte
	File    *os.File // a descriptor; nil: none. The receiver owns it.
}

// Error is a violation of the protocol: the connection is of no use any more.
type Error struct{ Reason string }

func (e *Error) Error() string { return "malformed message: " + e.Reason }

func malformed(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

func appendHeader(b []byte, t Type, id uint64, n int, more bool) []byte {
	var flags byte
	if more {
		flags = flagMore
	}
	b = append(b, magic, byte(t), flags, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(n))
	return binary.LittleEndian.AppendUint64(b, id)
}

// parsePacket takes a packet apart.
func parsePacket(p []byte) (t Type, id uint64, payload []byte, more bool, err error) {
	switch {
	case len(p) < headerSize:
		err = malformed("packet of %d bytes", len(p))
	case p[0] != magic || p[3] != 0:
		err = malformed("packet begins with % x", p[:4])
	case p[1] == 0 || Type(p[1]) > lastType:
		err = malformed("unknown type %d", p[1])
	case p[2]&^flagMore != 0:
		err = malformed("unknown flags %#x", p[2])
	case len(p)-headerSize > MaxPayload:
		err = malformed("packet carries %d bytes, at most %d are allowed", len(p)-headerSize, MaxPayload)
	case binary.LittleEndian.Uint32(p[4:]) != uint32(len(p)-headerSize):
		err = malformed("packet says %d bytes and carries %d", binary.LittleEndian.Uint32(p[4:]), len(p)-headerSize)
	}
	if err != nil {
		return 0, 0, nil, false, err
	}
	return Type(p[1]), binary.LittleEndian.Uint64(p[8:]), p[headerSize:], p[2]&flagMore != 0, nil
}

// Conn is one connection. Send may be called from several goroutines, Recv from one.
type Conn struct {
	sock       *net.UnixConn
	raw        syscall.RawConn
	maxMessage int

	in  []byte
	oob []byte

	mu       sync.Mutex // guards the rest
	queue    []packet   // what the socket had no room for
	draining bool       // a goroutine writes the queue out: one, or packets would go twice
	drained  *sync.Cond // the queue has become empty, or err is set
	err      error
}

type packet struct {
	bytes []byte
	file  *os.File // own duplicate
}

// Listen opens an abstract socket; name is without the leading NUL.
func Listen(name string) (*net.UnixListener, error) {
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@" + name, Net: "unixpacket"})
}

// Dial connects to an abstract socket and checks that it is served by this user.
func Dial(ctx context.Context, name string, maxMessage int) (*Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", "@"+name)
	if err != nil {
		return nil, err
	}
	return NewConn(c.(*net.UnixConn), maxMessage)
}

// NewConn takes a connection over. It is closed if the other side is another user.
func NewConn(sock *net.UnixConn, maxMessage int) (*Conn, error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		sock.Close()
		return nil, err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		err = e
	}
	if err == nil && int(cred.Uid) != os.Geteuid() {
		err = fmt.Errorf("the other side runs as uid %d (pid %d), this is uid %d", cred.Uid, cred.Pid, os.Geteuid())
	}
	if err != nil {
		sock.Close()
		return nil, err
	}
	c := &Conn{
		sock: sock, raw: raw, maxMessage: maxMessage,
		// One byte more than is allowed, so that a longer packet is seen as one.
		in: make([]byte, headerSize+MaxPayload+1), oob: make([]byte, unix.CmsgSpace(4*4)),
	}
	c.drained = sync.NewCond(&c.mu)
	return c, nil
}

// SetReadDeadline bounds Recv.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.sock.SetReadDeadline(t) }

// Recv returns the next message; io.EOF after the other side has closed, *Error if it broke the protocol.
func (c *Conn) Recv() (m Message, err error) {
	defer func() {
		if err != nil && m.File != nil {
			m.File.Close()
			m.File = nil
		}
	}()
	for first := true; ; first = false {
		n, oobn, flags, _, err := c.sock.ReadMsgUnix(c.in, c.oob)
		file, fdErr := takeFile(c.oob[:oobn])
		if file != nil {
			if m.File != nil {
				file.Close()
				return m, malformed("two descriptors in one message")
			}
			m.File = file
		}
		switch {
		case err != nil:
			return m, err
		case fdErr != nil:
			return m, fdErr
		case flags&unix.MSG_TRUNC != 0:
			return m, malformed("packet of more than %d bytes", headerSize+MaxPayload)
		case flags&unix.MSG_CTRUNC != 0:
			return m, malformed("more than one descriptor in a packet")
		}
		t, id, payload, more, err := parsePacket(c.in[:n])
		if err != nil {
			return m, err
		}
		if first {
			m.Type, m.ID = t, id
		} else if t != m.Type || id != m.ID {
			return m, malformed("message of type %d is interrupted by one of type %d", m.Type, t)
		}
		if len(m.Payload)+len(payload) > c.maxMessage {
			return m, malformed("message of more than %d bytes", c.maxMessage)
		}
		m.Payload = append(m.Payload, payload...)
		if !more {
			return m, nil
		}
	}
}

// takeFile finds the descriptor in control data. Whatever else comes is closed.
func takeFile(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, malformed("control data: %v", err)
	}
	var fds []int
	for _, m := range msgs {
		if got, err := unix.ParseUnixRights(&m); err == nil {
			fds = append(fds, got...)
		}
	}
	if len(fds) == 1 {
		return os.NewFile(uintptr(fds[0]), "received"), nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if len(fds) > 1 {
		return nil, malformed("%d descriptors in a packet", len(fds))
	}
	return nil, nil
}

// Send sends a message. It does not wait for the other side: what the socket has no room for is queued.
// The caller keeps m.File.
func (c *Conn) Send(m Message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	buf := make([]byte, 0, headerSize+min(len(m.Payload), MaxPayload))
	file := m.File
	for rest := m.Payload; ; {
		n := min(len(rest), MaxPayload)
		buf = appendHeader(buf[:0], m.Type, m.ID, n, n < len(rest))
		buf = append(buf, rest[:n]...)
		if err := c.sendPacket(buf, file); err != nil {
			c.fail(err)
			return err
		}
		file = nil
		if rest = rest[n:]; len(rest) == 0 {
			return nil
		}
	}
}

// sendPacket is called with mu held.
func (c *Conn) sendPacket(b []byte, file *os.File) error {
	if len(c.queue) == 0 {
		sent, err := c.try(b, file, false)
		if sent || err != nil {
			return err
		}
	}
	p := packet{bytes: append([]byte{}, b...)}
	if file != nil {
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return err
		}
		p.file = os.NewFile(uintptr(fd), "queued")
	}
	c.queue = append(c.queue, p)
	if !c.draining {
		c.draining = true
		go c.drain()
	}
	return nil
}

// try writes one packet; without wait it gives up when there is no room.
func (c *Conn) try(b []byte, file *os.File, wait bool) (sent bool, err error) {
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	werr := c.raw.Write(func(fd uintptr) bool {
		for {
			err = unix.Sendmsg(int(fd), b, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if err != unix.EINTR {
				break
			}
		}
		if err == unix.EAGAIN {
			err = nil
			return !wait
		}
		sent = err == nil
		return true
	})
	if werr != nil {
		return false, werr
	}
	return sent, err
}

// drain writes the queue out, as the socket has room.
func (c *Conn) drain() {
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || c.err != nil {
			c.draining = false
			c.drained.Broadcast()
			c.mu.Unlock()
			return
		}
		p := c.queue[0]
		c.queue[0].file = nil // who gives up the queue does not close it: its number could be another file's when there is room
		c.mu.Unlock()
		_, err := c.try(p.bytes, p.file, true)
		if p.file != nil {
			p.file.Close()
		}
		c.mu.Lock()
		if err != nil {
			c.fail(err)
		} else if len(c.queue) > 0 {
			c.queue = c.queue[1:]
		}
		c.mu.Unlock()
	}
}

// fail is called with mu held.
func (c *Conn) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	for _, p := range c.queue {
		if p.file != nil {
			p.file.Close()
		}
	}
	c.queue = nil
	c.drained.Broadcast()
}

// Flush waits until everything is with the other side, or the connection is broken, or the time is over.
func (c *Conn) Flush(d time.Duration) {
	timer := time.AfterFunc(d, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.queue) > 0 {
			c.fail(errors.New("the other side does not read"))
		}
	})
	defer timer.Stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) > 0 && c.err == nil {
		c.drained.Wait()
	}
}

// Close ends the connection; Recv returns.
func (c *Conn) Close() error {
	err := c.sock.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(net.ErrClosed)
	return err
}

// Clean reports whether an error of Recv is an ordinary end of the connection.
func Clean(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET)
}
