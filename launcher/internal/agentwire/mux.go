package agentwire

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"
)

// maxQueued bounds what is said and not sent yet, in bytes.
const maxQueued = 2 * MaxMessage

// Mux is a session with its streams. Each stream has its own flow control: a reader that is slow holds up what it reads, and
// nothing else.
type Mux struct {
	session *yamux.Session
	control net.Conn
	in      *bufio.Reader
	heard   *heard

	mu     sync.Mutex // guards the rest
	queue  [][]byte
	queued int
	idle   chan struct{} // closed while the queue is empty and sent
	wake   chan struct{}
	broken error
	wrote  chan struct{} // closed when the writer has ended
}

// heard takes note of when bytes came. When yamux closes it, it lets the readers of streams go: in yamux they would spin from here on
// until the end of the connection below, which may take its time.
//
// It also puts the header of a frame and its data into one write, which yamux makes two of: each is a packet of ssh's, and wakes sshd and
// who reads there. One goroutine writes.
type heard struct {
	io.ReadWriteCloser
	last  atomic.Int64
	frame []byte // a header whose data comes next

	mu      sync.Mutex // guards the rest
	closed  bool
	streams map[*stream]bool
}

func (h *heard) Read(p []byte) (int, error) {
	n, err := h.ReadWriteCloser.Read(p)
	if n > 0 {
		h.last.Store(time.Now().UnixNano())
	}
	return n, err
}

// frameHeader is the size of yamux's header: version, type, flags, stream and length. A frame of type 0 is followed by that many bytes.
const frameHeader = 12

func (h *heard) Write(p []byte) (int, error) {
	held := len(h.frame)
	if held == 0 && len(p) == frameHeader && p[1] == 0 && [4]byte(p[8:]) != [4]byte{} {
		h.frame = append(h.frame, p...)
		return len(p), nil
	}
	if held == 0 {
		return h.ReadWriteCloser.Write(p)
	}
	n, err := h.ReadWriteCloser.Write(append(h.frame, p...))
	h.frame = h.frame[:0]
	return max(n-held, 0), err
}

func (h *heard) Close() error {
	h.mu.Lock()
	h.closed = true
	for s := range h.streams {
		s.expire()
	}
	h.mu.Unlock()
	return h.ReadWriteCloser.Close()
}

// stream is one of yamux whose reader learns of the session's end. What has come can still be read.
type stream struct {
	*yamux.Stream
	of *heard
}

func (h *heard) stream(y *yamux.Stream) *stream {
	s := &stream{y, h}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.streams[s] = true
	if h.closed {
		s.expire()
	}
	return s
}

func (s *stream) expire() { s.SetReadDeadline(time.Now()) }

func (s *stream) Read(p []byte) (int, error) {
	n, err := s.Stream.Read(p)
	if err == yamux.ErrTimeout {
		err = io.EOF
	}
	return n, err
}

func (s *stream) Close() error {
	s.of.mu.Lock()
	delete(s.of.streams, s)
	s.of.mu.Unlock()
	return s.Stream.Close()
}

// never is a time that no connection takes.
const never = 10 * 365 * 24 * time.Hour

func settings() *yamux.Config {
	c := yamux.DefaultConfig()
	// Both sides have a heartbeat of their own, and the other side may be stopped or slow for as long as it likes.
	c.EnableKeepAlive = false
	c.ConnectionWriteTimeout = never
	c.StreamOpenTimeout = 0
	c.StreamCloseTimeout = 0
	c.LogOutput, c.Logger = nil, log.New(io.Discard, "", 0)
	return c
}

// Dial is gorun's side of a session whose preface has been read. The Mux owns rwc.
func Dial(rwc io.ReadWriteCloser) (*Mux, error) {
	return newMux(rwc, yamux.Client, (*yamux.Session).OpenStream, "open")
}

// Accept is the agent's side of a session whose preface has been written. The Mux owns rwc.
func Accept(rwc io.ReadWriteCloser) (*Mux, error) {
	return newMux(rwc, yamux.Server, (*yamux.Session).AcceptStream, "wait for")
}

// newMux makes one side of a session, and its first stream; verb says how that comes.
func newMux(rwc io.ReadWriteCloser, side func(io.ReadWriteCloser, *yamux.Config) (*yamux.Session, error), first func(*yamux.Session) (*yamux.Stream, error), verb string) (*Mux, error) {
	h := &heard{ReadWriteCloser: rwc, streams: map[*stream]bool{}}
	s, err := side(h, settings())
	if err != nil {
		return nil, err
	}
	c, err := first(s)
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("%s the control stream: %w", verb, err)
	}
	control := h.stream(c)
	m := &Mux{session: s, control: control, in: bufio.NewReader(control), heard: h, wake: make(chan struct{}, 1), wrote: make(chan struct{}), idle: make(chan struct{})}
	close(m.idle)
	h.last.Store(time.Now().UnixNano())
	go m.write()
	return m, nil
}

// Send says something. It does not wait; what cannot be sent is lost, and the session broken.
func (m *Mux) Send(msg *Message) {
	b, err := Encode(msg)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken != nil {
		return
	}
	if err == nil && m.queued+len(b) > maxQueued {
		err = errors.New("the other side does not read what it is told")
	}
	if err != nil {
		m.broken = err
		go m.session.Close()
		return
	}
	if len(m.queue) == 0 && m.queued == 0 {
		m.idle = make(chan struct{})
	}
	m.queue = append(m.queue, b)
	m.queued += len(b)
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *Mux) write() {
	defer close(m.wrote)
	for {
		m.mu.Lock()
		batch, n := m.queue, m.queued
		m.queue = nil
		m.mu.Unlock()
		for _, b := range batch {
			if _, err := m.control.Write(b); err != nil {
				m.mu.Lock()
				if m.broken == nil {
					m.broken = err
				}
				m.mu.Unlock()
				m.session.Close()
				return
			}
		}
		m.mu.Lock()
		m.queued -= n
		if n > 0 && m.queued == 0 {
			close(m.idle)
		}
		m.mu.Unlock()
		if n > 0 {
			continue
		}
		select {
		case <-m.wake:
		case <-m.session.CloseChan():
			return
		}
	}
}

// Flush waits until all that was said is sent, the session ends or the time is over.
func (m *Mux) Flush(bound time.Duration) {
	m.mu.Lock()
	idle := m.idle
	m.mu.Unlock()
	t := time.NewTimer(bound)
	defer t.Stop()
	select {
	case <-idle:
	case <-m.wrote:
	case <-t.C:
	}
}

// Idle reports whether all that was said is sent.
func (m *Mux) Idle() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.queued == 0
}

// Receive waits for the next message. One goroutine receives.
func (m *Mux) Receive() (*Message, error) {
	msg, err := Read(m.in)
	if err != nil {
		m.mu.Lock()
		if m.broken != nil {
			err = m.broken
		}
		m.mu.Unlock()
	}
	return msg, err
}

// Heard is when bytes came last from the other side.
func (m *Mux) Heard() time.Time { return time.Unix(0, m.heard.last.Load()) }

// Open opens a stream.
func (m *Mux) Open(h Header) (net.Conn, error) {
	y, err := m.session.OpenStream()
	if err != nil {
		return nil, err
	}
	s := m.heard.stream(y)
	if _, err := s.Write(h.encode()); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Accept waits for the next stream of the other side.
func (m *Mux) Accept() (Header, net.Conn, error) {
	y, err := m.session.AcceptStream()
	if err != nil {
		return Header{}, nil, err
	}
	s := m.heard.stream(y)
	h, err := readHeader(s)
	if err != nil {
		s.Close()
		return Header{}, nil, err
	}
	return h, s, nil
}

// Done is closed when the session has ended.
func (m *Mux) Done() <-chan struct{} { return m.session.CloseChan() }

// Close ends the session: what is not sent is lost. Streams that are open end; what has come in them can still be read.
func (m *Mux) Close() error {
	err := m.session.Close()
	<-m.wrote
	return err
}
