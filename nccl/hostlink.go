package nccl

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The host platform between hosts. Each host has a control segment of its own, and every rank sends what it writes into its parts of the
// segment to all other hosts of the communicator, in order: first the data, then the word that publishes it. On each host one member, the
// lowest, takes that and writes it into its host's segment, where the others see it as if its writer were on their host. So a call does the
// same within a host and between hosts; only registered buffers, which peers map, are staged between hosts.
//
// Nothing is copied for it: what is to be sent stays in the segment, where it is not overwritten before the protocol of calls has told that all
// members have it.

// hostLinks are a rank's connections of one communicator.
type hostLinks struct {
	h      *host
	leader []int             // by member: the member that receives for its host
	out    map[int]*hostLink // by leader: to the other hosts

	listener net.Listener // of a leader
	mu       sync.Mutex   // guards the rest
	closed   bool
	conns    map[net.Conn]bool // accepted ones
	from     map[int]bool      // members that have connected
	strange  int               // refused connections
	wg       sync.WaitGroup

	ended map[int]time.Time // members of other hosts that have ended, and when it was noticed; under mu

	ready chan struct{} // closed: the other members of this host are known, and out is complete
	dirty []span        // of the segment, since the last phase; under host.mu
}

// span is a part of the segment.
type span struct{ off, len int }

const (
	linkDial    = 20 * time.Second       // to connect and prove the key
	linkSilence = 15 * time.Second       // unacknowledged data, or no sign of life, for that long: the connection is broken
	linkLinger  = time.Second            // what is still to be sent at the end
	lastWords   = 250 * time.Millisecond // what a member of another host has sent before its end may come later than the job's word about that
	linkCause   = time.Second            // how long a broken connection waits for the job's word about its cause
	linkGreet   = 8 * time.Second        // to prove the key, once connected
)

// strangeLimit is how many connections at once may not have proved the key; the others wait. A test has its own.
var strangeLimit = 64

// Frames: kind in the top byte of the first word, length below; the second word is an offset in the segment, or an argument.
const (
	frameData   = iota + 1 // bytes for a place in the segment
	frameWord              // 8 bytes that are stored as one word, and publish what came before
	frameTold              // the communicator's failure
	frameHeader = 16
	maxFrame    = 1 << 24
)

// spansHosts reports whether the members are on more than one host.
func (c *Comm) spansHosts() bool {
	return slices.ContainsFunc(c.ranks, func(r int) bool { return c.job.NodeOf(r) != c.job.NodeOf(c.ranks[0]) })
}

// Staged is why no call of the communicator reaches registered buffers directly, "" where calls do: on the host platform, members on several hosts. (Messages
// between two members of one host still do.) For libraries.
func (c *Comm) Staged() string {
	if h, ok := c.be.(*host); ok && h.links != nil {
		return "the members are on several hosts, between which the host platform sends staged copies"
	}
	return ""
}

// near reports whether a member is on this host.
func (c *Comm) near(r int) bool { return c.job.NodeOf(c.ranks[r]) == c.job.Node() }

// newHostLinks prepares the connections; a leader listens from here on.
func newHostLinks(h *host) (*hostLinks, error) {
	c := h.c
	l := &hostLinks{h: h, out: map[int]*hostLink{}, conns: map[net.Conn]bool{}, from: map[int]bool{}, ended: map[int]time.Time{}, ready: make(chan struct{})}
	first := map[int]int{}
	for i, r := range c.ranks {
		node := c.job.NodeOf(r)
		if _, ok := first[node]; !ok {
			first[node] = i
		}
		l.leader = append(l.leader, first[node])
	}
	if c.job.DataKey() == nil || c.job.HostAddr() == "" {
		return nil, errors.New("the members are on several hosts, and nobody told this rank the address of its own: start the job with gorun")
	}
	if l.leader[c.rank] != c.rank {
		return l, nil
	}
	cfg := net.ListenConfig{KeepAliveConfig: linkKeepAlive}
	var err error
	on := c.job.HostAddr()
	for port, last := c.job.DataPorts(); ; port++ {
		if l.listener, err = cfg.Listen(context.Background(), "tcp", net.JoinHostPort(on, strconv.Itoa(port))); err == nil {
			return l, nil
		}
		if errors.Is(err, unix.EADDRNOTAVAIL) && on != "" { // no interface holds it: address translation leads to this host
			on, port = "", port-1
			continue
		}
		if port >= last || !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("listen for the members on other hosts: %w", err)
		}
	}
}

var linkKeepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 5}

// address is what the other hosts are told.
func (l *hostLinks) address() string {
	if l.listener == nil {
		return "" // not this host's first member
	}
	addr := l.listener.Addr().(*net.TCPAddr)
	return net.JoinHostPort(l.h.c.job.HostAddr(), strconv.Itoa(addr.Port))
}

// listen begins to take connections. The segment is there.
func (l *hostLinks) listen() {
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		l.accept()
	}()
}

// accept takes connections of members, and goes on until the listener is closed.
func (l *hostLinks) accept() {
	turns := make(chan struct{}, strangeLimit)
	for {
		conn, err := l.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // out of descriptors: the dialler's deadline bounds it
			continue
		}
		// Members of many hosts come at once, and strangers may: who comes later waits for those before, not for long.
		turns <- struct{}{}
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			conn.Close()
			return
		}
		l.conns[conn] = true
		l.wg.Add(1)
		l.mu.Unlock()
		go func() {
			defer l.wg.Done()
			defer func() {
				l.mu.Lock()
				delete(l.conns, conn)
				l.mu.Unlock()
				conn.Close()
			}()
			rank, err := l.greet(conn)
			<-turns
			if err != nil {
				l.refuse(conn, err)
				return
			}
			select {
			case <-l.ready:
				l.receive(conn, rank)
			case <-l.h.c.ctx.Done():
			}
		}()
	}
}

// refuse says that a stranger has come, a few times at most.
func (l *hostLinks) refuse(conn net.Conn, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.strange++; l.closed || l.strange > 3 {
		return
	}
	fmt.Fprintf(os.Stderr, "gorun: rank %d: refused a connection from %v to communicator %s: %v\n", l.h.c.job.Rank(), conn.RemoteAddr(), l.h.c.name, err)
}

// greet is the receiver's side of the proof; it returns the member.
func (l *hostLinks) greet(conn net.Conn) (int, error) {
	conn.SetDeadline(time.Now().Add(linkGreet))
	c := l.h.c
	rank, err := acceptProof(conn, c.job.DataKey(), c.uid[:], c.rank)
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if rank < 0 || rank >= len(c.ranks) || c.near(rank) || l.from[rank] {
		return 0, fmt.Errorf("member %d is not awaited", rank)
	}
	l.from[rank] = true
	if _, err := conn.Write([]byte{1}); err != nil {
		return 0, err
	}
	return rank, conn.SetDeadline(time.Time{})
}

// connect connects to the leaders of the other hosts; offers are what the members said about themselves.
func (l *hostLinks) connect(ctx context.Context, offers [][]byte) error {
	c := l.h.c
	for r, lead := range l.leader {
		if r != lead || c.near(r) {
			continue
		}
		var f facts
		if err := json.Unmarshal(offers[r], &f); err != nil {
			return fmt.Errorf("rank %d: what it says about itself: %w", r, err)
		}
		conn, err := l.dialOne(ctx, r, f.Data)
		if err != nil {
			return fmt.Errorf("connect to rank %d at %q: %w", r, f.Data, err)
		}
		o := &hostLink{l: l, to: r, conn: conn, wake: make(chan struct{}, 1), done: make(chan struct{})}
		l.out[r] = o
		go o.send()
	}
	close(l.ready) // only now: who receives may fail the communicator, which is told to all in out
	return nil
}

func (l *hostLinks) dialOne(ctx context.Context, r int, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, linkDial)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: linkKeepAlive}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	c := l.h.c
	if err = offerProof(conn, c.job.DataKey(), c.uid[:], c.rank, r); err == nil {
		var ok [1]byte
		_, err = io.ReadFull(conn, ok[:])
	}
	if !stop() || err != nil {
		conn.Close()
		if err == nil || ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	silence(conn)
	return conn, nil
}

// silence bounds how long sent data may stay without acknowledgement.
func silence(conn net.Conn) {
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return
	}
	raw.Control(func(fd uintptr) {
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(linkSilence/time.Millisecond))
	})
}

// receive carries what a member sends into this host's segment.
func (l *hostLinks) receive(conn net.Conn, rank int) {
	silence(conn)
	err := l.read(bufio.NewReaderSize(conn, 64<<10), rank)
	l.broken(rank, conn, err)
}

func (l *hostLinks) read(r *bufio.Reader, rank int) error {
	h := l.h
	var head [frameHeader]byte
	due := false // words have come that the members of this host have not been told of
	// tell is called before something is read that may not be here yet.
	tell := func(bytes uint64) {
		if due && uint64(r.Buffered()) < bytes {
			due = false
			h.ringNear()
		}
	}
	for {
		tell(frameHeader)
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return err
		}
		w, off := binary.LittleEndian.Uint64(head[:]), binary.LittleEndian.Uint64(head[8:])
		kind, n := w>>56, w&(1<<56-1)
		if n > maxFrame {
			return fmt.Errorf("frame of %d bytes", n)
		}
		tell(n)
		switch kind {
		case frameData:
			if !h.seg.owns(rank, off, n) {
				return fmt.Errorf("%d bytes at %d of the segment are not its own", n, off)
			}
			if _, err := io.ReadFull(r, h.seg.b[off:off+n]); err != nil {
				return err
			}
		case frameWord:
			var v [8]byte
			if n != 8 || off%8 != 0 || !h.seg.owns(rank, off, n) {
				return fmt.Errorf("word of %d bytes at %d of the segment is not its own", n, off)
			}
			if _, err := io.ReadFull(r, v[:]); err != nil {
				return err
			}
			h.seg.word(int(off)).Store(binary.LittleEndian.Uint64(v[:]))
			due = true
		case frameTold:
			if n > textSize {
				return fmt.Errorf("failure of %d bytes", n)
			}
			text := make([]byte, n)
			if _, err := io.ReadFull(r, text); err != nil {
				return err
			}
			h.seg.tell(uint32(off), int(int32(off>>32)), string(text))
			h.ringNear()
		default:
			return fmt.Errorf("frame of kind %d", kind)
		}
	}
}

// broken follows the end of a connection: the communicator's failure, unless it is over or the job knows better.
func (l *hostLinks) broken(rank int, conn net.Conn, err error) {
	c := l.h.c
	l.mu.Lock()
	closed := l.closed
	l.mu.Unlock()
	if closed {
		return
	}
	if _, over := l.h.peerClosed(rank); over && errors.Is(err, io.EOF) {
		return
	}
	// A dead process is told by its host; that is the better text.
	select {
	case <-c.ctx.Done():
		return
	case <-time.After(linkCause):
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("it was closed")
	}
	c.fail(&cause{kind: ErrAborted, err: err, text: fmt.Sprintf("the connection between rank %d (%v) and rank %d (%v) broke: %v", c.rank, conn.LocalAddr(), rank, conn.RemoteAddr(), err)}, true, false)
}

// tell sends the communicator's failure to the other hosts.
func (l *hostLinks) tell(code uint32, jobRank int, text string) {
	if l == nil {
		return
	}
	for _, o := range l.out {
		o.put(frame{kind: frameTold, off: uint64(code) | uint64(uint32(jobRank))<<32, data: []byte(text[:min(len(text), textSize)])})
	}
}

// silent reports whether what a member has sent before its end, which the job has told, must have come by now.
func (l *hostLinks) silent(r int) bool {
	if l.h.c.near(r) {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	since, ok := l.ended[r]
	if !ok {
		l.ended[r] = time.Now()
		return false
	}
	return time.Since(since) >= lastWords
}

// afterLastWords calls f then, unless the communicator is over.
func (l *hostLinks) afterLastWords(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.closed {
		l.h.c.afterwards(&l.wg, lastWords, f)
	}
}

// awaitLastWords waits until the communicator's failure is told, or the member's end is all that there is to know.
func (l *hostLinks) awaitLastWords(r int) {
	for !l.silent(r) && l.h.c.usable() == nil {
		time.Sleep(5 * time.Millisecond)
	}
}

// hostLink is the sending end of a connection.
type hostLink struct {
	l    *hostLinks
	to   int
	conn net.Conn
	wake chan struct{}
	done chan struct{} // all was sent, or the connection broke

	mu    sync.Mutex // guards the rest
	queue []frame
	end   bool
	err   error
}

type frame struct {
	kind uint64
	off  uint64
	data []byte // of the segment, or text
	word uint64
}

func (o *hostLink) put(frames ...frame) {
	o.mu.Lock()
	if o.err == nil && !o.end {
		o.queue = append(o.queue, frames...)
	}
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// send writes the queue until the end.
func (o *hostLink) send() {
	defer close(o.done)
	var spare []frame // memory that is not in use
	var heads []byte
	for {
		o.mu.Lock()
		frames := o.queue
		o.queue = spare[:0]
		end := o.end
		o.mu.Unlock()
		if len(frames) == 0 {
			spare = frames // the queue has the other one's memory now
			if end {
				return
			}
			<-o.wake
			continue
		}
		if need := len(frames) * (frameHeader + 8); cap(heads) < need {
			heads = make([]byte, 0, 2*need)
		}
		heads = heads[:0]
		var bufs net.Buffers
		for _, f := range frames {
			at := len(heads)
			n := len(f.data)
			if f.kind == frameWord {
				n = 8
			}
			heads = binary.LittleEndian.AppendUint64(heads, f.kind<<56|uint64(n))
			heads = binary.LittleEndian.AppendUint64(heads, f.off)
			if f.kind == frameWord {
				heads = binary.LittleEndian.AppendUint64(heads, f.word)
			}
			bufs = append(bufs, heads[at:])
			if f.kind != frameWord {
				bufs = append(bufs, f.data)
			}
		}
		if _, err := bufs.WriteTo(o.conn); err != nil {
			o.mu.Lock()
			o.err, o.queue = err, nil
			end := o.end
			o.mu.Unlock()
			if !end {
				o.l.broken(o.to, o.conn, err)
			}
			return
		}
		clear(frames)
		spare = frames
	}
}

// close sends what is left, for a bounded time.
func (o *hostLink) close() {
	o.mu.Lock()
	o.end = true
	o.mu.Unlock()
	o.conn.SetWriteDeadline(time.Now().Add(linkLinger))
	select {
	case o.wake <- struct{}{}:
	default:
	}
	<-o.done
	o.conn.Close()
}

// close ends all connections.
func (l *hostLinks) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	if l.listener != nil {
		l.listener.Close()
	}
	var ends sync.WaitGroup // each lingers for a while
	for _, o := range l.out {
		ends.Go(o.close)
	}
	ends.Wait()
	l.mu.Lock()
	for conn := range l.conns {
		conn.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// touched notes a part of this rank's segment that its next phase publishes.
func (h *host) touched(b []byte) {
	if h.links != nil && len(b) > 0 {
		h.links.dirty = append(h.links.dirty, span{h.seg.offset(unsafe.Pointer(&b[0])), len(b)})
	}
}

// publishAll sends what was touched, and then the word, to all other hosts.
func (h *host) publishAll(w *atomic.Uint64, v uint64) {
	if h.links == nil {
		return
	}
	for _, o := range h.links.out {
		o.publish(h.links.dirty, h.seg.b, h.seg.offset(unsafe.Pointer(w)), v)
	}
	h.links.dirty = h.links.dirty[:0]
}

func (o *hostLink) publish(spans []span, seg []byte, word int, v uint64) {
	frames := make([]frame, 0, len(spans)+1)
	for _, s := range spans {
		frames = append(frames, frame{kind: frameData, off: uint64(s.off), data: seg[s.off : s.off+s.len]})
	}
	o.put(append(frames, frame{kind: frameWord, off: uint64(word), word: v})...)
}

// signal publishes a word for one member, behind data for it in this rank's part of the segment.
func (h *host) signal(r int, w *atomic.Uint64, v uint64, data ...[]byte) {
	w.Store(v)
	if h.c.near(r) {
		h.ring(r)
		return
	}
	spans := make([]span, 0, 1)
	for _, b := range data {
		if len(b) > 0 {
			spans = append(spans, span{h.seg.offset(unsafe.Pointer(&b[0])), len(b)})
		}
	}
	h.links.out[h.links.leader[r]].publish(spans, h.seg.b, h.seg.offset(unsafe.Pointer(w)), v)
}

// ringNear wakes the members of this host.
func (h *host) ringNear() {
	for r, p := range h.c.peers {
		switch {
		case r == h.rank:
			h.c.dev.Ring()
		case p.bell != nil:
			p.bell.Ring()
		}
	}
}
