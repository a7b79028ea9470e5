package pmix

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// Limits of what clients send.
const (
	maxHello = 64 << 10
	maxBody  = 64 << 20
	// helloWait bounds the handshake. Clients wait some seconds for its answer.
	helloWait = 30 * time.Second
	// maxQueued bounds the answers that a client has not read, in bytes.
	maxQueued = 64 << 20
)

// conn is a connection of a client.
type conn struct {
	s    *server
	nc   net.Conn
	rank int // after the handshake
	kick chan struct{}

	// Guarded by s.mu.
	known  bool        // it is rank's
	told   []bool      // it has been told what the rank has published; nil: of none
	queue  net.Buffers // answers to write, in parts that other connections may have, too
	queued int         // bytes of those that are not written yet
	over   bool        // no more come
}

// accept takes connections, until the listener is closed.
func (s *server) accept() {
	most := 4*len(s.local) + 64 // a rank's children may connect, too
	for {
		nc, err := s.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Descriptors ran out, or the like: clients wait.
			select {
			case <-s.ctx.Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		if user, err := peerUser(nc); err != nil || user != os.Geteuid() {
			nc.Close()
			continue
		}
		c := &conn{s: s, nc: nc, kick: make(chan struct{}, 1)}
		s.mu.Lock()
		full := s.closed || len(s.conns) >= most
		if !full {
			s.conns[c] = true
			s.tasks.Go(c.serve)
		}
		s.mu.Unlock()
		if full {
			nc.Close()
		}
	}
}

// serve serves a client until it goes.
func (c *conn) serve() {
	s := c.s
	var writer sync.WaitGroup
	r := bufio.NewReader(c.nc)
	known, err := c.handshake(r)
	if known && err == nil {
		writer.Go(c.write)
		err = c.read(r)
	}
	if known && err != nil {
		s.end(c.rank, procman.Departure{Fault: err.Error()})
	}
	s.mu.Lock()
	delete(s.conns, c)
	for _, target := range s.ranks {
		target.wait = slices.DeleteFunc(target.wait, func(q request) bool { return q.conn == c })
	}
	if k := s.ranks[c.rank]; known {
		if k.conns--; k.conns == 0 {
			close(k.idle)
		}
	}
	c.over = true
	s.mu.Unlock()
	c.nc.SetWriteDeadline(time.Now().Add(endBound)) // of what is not written yet
	c.wake()
	writer.Wait()
	c.nc.Close()
}

// handshake reads who the client is, and answers. It reports whether the client is a rank; others are not answered.
func (c *conn) handshake(r io.Reader) (known bool, err error) {
	s := c.s
	c.nc.SetDeadline(time.Now().Add(helloWait))
	h, err := readHeader(r, binary.NativeEndian)
	if err != nil || h.length > maxHello {
		return false, err
	}
	body, err := readBody(r, h.length)
	if err != nil {
		return false, err
	}
	hello, err := parseHello(body)
	if err != nil {
		return false, err
	}
	if hello.kind != 0 || hello.proc.namespace != s.namespace || hello.proc.rank > 1<<31-1 || !slices.Contains(s.local, int(hello.proc.rank)) {
		return false, nil
	}
	c.rank = int(hello.proc.rank)
	k := s.ranks[c.rank]
	s.mu.Lock()
	c.known, k.connected, k.finalized = true, true, false
	if k.conns++; k.conns == 1 {
		k.idle = make(chan struct{})
	}
	s.mu.Unlock()
	if err := hello.check(); err != nil {
		return true, err
	}
	answer := &packer{}
	answer.u32(uint32(success))
	answer.u32(uint32(c.rank)) // its index here; it comes back in each header
	c.nc.Write(answer.b)       // if it is gone reading tells
	c.nc.SetDeadline(time.Time{})
	return true, nil
}

// check says why a client can't be served; it reads after "rank 3 ".
func (h *hello) check() error {
	number, _, _ := strings.Cut(h.version, ".")
	if major, err := strconv.Atoi(number); err != nil || major < 3 {
		return fmt.Errorf("has a PMIx library that is too old: 3.0 or later is needed (Open MPI 4.0), found %.32q", h.version)
	}
	if h.packing != packing || h.described {
		return fmt.Errorf("has a PMIx library (%.32q) that packs as %.32q, not as %q, which is announced", h.version, h.packing, packing)
	}
	return nil
}

// packing is the name of the packing that is announced.
const packing = "v3"

// read reads requests and carries them out, until the client goes. An error says what is wrong with one; it reads after "rank 3 ".
func (c *conn) read(r io.Reader) error {
	for {
		h, err := readHeader(r, binary.BigEndian)
		if err != nil {
			return nil
		}
		if h.length > maxBody {
			return fmt.Errorf("does not speak PMIx: a request of %d bytes, the limit is %d", h.length, maxBody)
		}
		body, err := readBody(r, h.length)
		if err != nil {
			return nil
		}
		if err := c.handle(h.tag, body); err != nil {
			return fmt.Errorf("does not speak PMIx: a request %w", err)
		}
	}
}

// write writes answers.
func (c *conn) write() {
	for range c.kick {
		c.s.mu.Lock()
		list, over := c.queue, c.over
		c.queue = nil
		c.s.mu.Unlock()
		n, err := list.WriteTo(c.nc)
		if over {
			return
		}
		if err != nil {
			continue // so does reading, then
		}
		c.s.mu.Lock()
		c.queued -= int(n)
		c.s.mu.Unlock()
	}
}

func (c *conn) wake() {
	select {
	case c.kick <- struct{}{}:
	default: // it will look
	}
}

// answer has an answer sent, which keeps its parts. A client that does not read its answers is cut off. s.mu is held.
func (c *conn) answer(tag uint32, parts ...[]byte) {
	if c.over {
		return
	}
	n := 0
	for _, b := range parts {
		n += len(b)
	}
	if c.queued += headerSize + n; c.queued > maxQueued {
		c.nc.Close()
		return
	}
	c.queue = append(append(c.queue, header{tag: tag, length: uint32(n)}.encode()), parts...)
	c.wake()
}

func (c *conn) answerStatus(tag uint32, st status) {
	p := &packer{}
	p.status(st)
	c.answer(tag, p.b)
}
