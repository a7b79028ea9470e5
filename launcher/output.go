package launcher

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	// readSize is one read from a rank.
	readSize = 256 << 10
	// flood is a read that says that much is to come.
	flood = 4 << 10
	// pipeSize is a pipe's default capacity. A read of so much says that the rank is held up: its pipe gets readSize, which spares turns.
	// Only maxGrown pipes of a collector do: what an unprivileged user may have in pipes has a limit (16384 pages).
	pipeSize = 64 << 10
	maxGrown = 16
	// maxLine is the longest line that is kept back until it is complete. A longer one is passed on in pieces,
	// and the other ranks wait until its end or until it pauses.
	maxLine = 64 << 10
	// pause is how long text without a line end is kept back after its last byte: a prompt should be seen.
	pause = 50 * time.Millisecond
	// longPause is how long it is kept back after its first byte, also when more comes all the time: dots, one for each step.
	longPause = 3 * pause
	// hold is how long the other ranks then wait for the rest of that line, once a line, before they may cut it.
	// A rank that was only descheduled in the middle of a line comes back within it.
	hold = 500 * time.Millisecond
	// quiet is how long a pipe may stay silent after all ranks have ended: somebody outside the job holds it open.
	quiet = 200 * time.Millisecond
	// tailSize is how much of the end of each rank's stderr is kept for the account of a failure.
	tailSize = 8 << 10
)

// stream is one pipe from a rank.
type stream struct {
	rank     int
	index    int       // in the collector's streams
	fd       int       // -1: ended
	sink     io.Writer // nil: none, there is a file
	file     *os.File  // gets all that comes, as it comes; nil: none
	fileErr  func(error)
	stamp    *stamper  // nil: no times
	part     []byte    // text without line end that is kept back
	since    time.Time // when part began
	due      time.Time
	begun    bool   // the sink shows the beginning of a line of this stream
	cr       bool   // the last that the sink got of this stream is a carriage return
	tag      string // "" or "[3] "
	grown    bool   // its pipe
	keepTail bool
	tailMu   sync.Mutex // guards tail
	tail     []byte
}

// collector carries the output of ranks to a sink, whole lines of one rank at a time. One goroutine does it for
// all streams of a sink: a slow sink blocks the ranks by their pipes, and memory is bounded by maxLine a stream.
type collector struct {
	poller  *poller
	sinkErr func(error) // called once, on the collector's goroutine; nil: a sink that fails is done without
	done    chan struct{}

	mu        sync.Mutex // guards what follows up to the blank line; held briefly
	streams   []*stream
	open      int
	finishing bool
	notices   []string
	over      bool // the loop has ended: its descriptors are closed, and their numbers may be others'

	failed  error
	owner   *stream // has begun a line; only it is read
	long    bool    // the owner's line is longer than maxLine: it keeps the sink while it goes on
	release time.Time
	mid     *stream // the sink stands in the middle of a line of this stream
	last    *stream // wrote last
	grown   int     // streams
	buf     []byte
	stamped []byte
	tagged  []byte
	errSink io.Writer // where notices go
}

func newCollector(errSink io.Writer, sinkErr func(error)) (*collector, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	c := &collector{poller: p, sinkErr: sinkErr, errSink: errSink, done: make(chan struct{})}
	go c.loop()
	return c, nil
}

// add gives the read end of a pipe to the collector, which closes it at its end.
func (c *collector) add(s *stream) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return errors.New("nobody carries output any more")
	}
	s.index = len(c.streams)
	if err := c.poller.watch(s.fd, s.index); err != nil {
		return err
	}
	c.streams = append(c.streams, s)
	c.open++
	return nil
}

// notice shows a line of gorun's own between the lines of the ranks.
func (c *collector) notice(line string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notices = append(c.notices, line)
	c.ring()
}

// finish says that no rank is left. The collector carries what is still in the pipes, and ends.
func (c *collector) finish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finishing = true
	c.ring()
}

// ring wakes the loop. The caller holds mu.
func (c *collector) ring() {
	if !c.over {
		c.poller.ring()
	}
}

func (c *collector) loop() {
	defer func() {
		c.mu.Lock()
		c.over = true
		c.poller.close()
		c.mu.Unlock()
		close(c.done)
	}()
	c.buf = make([]byte, maxLine+readSize)
	var events []unix.EpollEvent
	var drain [8]byte
	for {
		c.mu.Lock()
		streams, open, finishing, notices := c.streams, c.open, c.finishing, c.notices
		c.notices = nil
		c.mu.Unlock()
		for _, line := range notices {
			c.emitNotice(line)
		}
		if finishing && open == 0 {
			break
		}
		if n := len(streams) + 1; cap(events) < n {
			events = make([]unix.EpollEvent, 2*n)
		}
		events = events[:cap(events)]
		wait := c.timeout(streams, finishing)
		n, woken, err := c.wait(events, wait)
		if err != nil {
			if err == unix.EINTR {
				continue
			}
			c.fail(fmt.Errorf("wait for the ranks' output: %w", err))
			if c.sinkErr == nil {
				break
			}
			return
		}
		if woken {
			unix.Read(c.poller.wake, drain[:])
		}
		c.mu.Lock()
		streams = c.streams // one may have come while we waited
		c.mu.Unlock()
		now := time.Now()
		if finishing && n == 0 && !woken && wait >= int(quiet/time.Millisecond) {
			break // somebody outside the job holds a pipe open and writes nothing
		}
		for _, e := range events[:n] {
			if c.owner != nil && streams[e.Fd] != c.owner {
				continue // a stream before this one has just taken the sink; level-triggered: it comes again
			}
			c.read(streams[e.Fd], now)
		}
		c.expire(streams, now)
	}
	for _, s := range c.streams {
		c.end(s)
	}
}

// wait waits for readable streams: events[:n].Fd are indexes of streams.
func (c *collector) wait(events []unix.EpollEvent, ms int) (n int, woken bool, err error) {
	if c.owner != nil {
		fds := []unix.PollFd{{Fd: int32(c.poller.wake), Events: unix.POLLIN}, {Fd: int32(c.owner.fd), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, ms); err != nil {
			return 0, false, err
		}
		if fds[1].Revents != 0 {
			events[0] = unix.EpollEvent{Fd: int32(c.owner.index)}
			n = 1
		}
		return n, fds[0].Revents != 0, nil
	}
	m, err := c.poller.wait(events, ms)
	if err != nil {
		return 0, false, err
	}
	for _, e := range events[:m] {
		if e.Fd == rung {
			woken = true
			continue
		}
		events[n] = e
		n++
	}
	return n, woken, nil
}

// timeout is the time in ms until something is due, -1 for none.
func (c *collector) timeout(streams []*stream, finishing bool) int {
	var due time.Time
	if c.owner != nil {
		due = c.release
	} else {
		for _, s := range streams {
			if len(s.part) > 0 && (due.IsZero() || s.due.Before(due)) {
				due = s.due
			}
		}
	}
	if due.IsZero() {
		if finishing {
			return int(quiet / time.Millisecond)
		}
		return -1
	}
	return max(0, int((time.Until(due)+time.Millisecond-1)/time.Millisecond))
}

// expire shows text that was kept back long enough, and takes the sink from an owner that paused. It runs after
// everything that was readable has been read.
func (c *collector) expire(streams []*stream, now time.Time) {
	if c.owner != nil {
		if now.Before(c.release) {
			return
		}
		c.owner = nil
		return // the others are read before anything else is shown
	}
	for _, s := range streams {
		if len(s.part) == 0 || now.Before(s.due) {
			continue
		}
		first := !s.begun
		part := s.part
		s.part = s.part[:0]
		c.emitRunes(s, part, now)
		if first {
			c.own(s, false)
			return
		}
	}
}

// own gives a stream the sink. Its time begins now: the text before may have waited for a slow reader.
func (c *collector) own(s *stream, long bool) {
	if s.fd < 0 {
		return
	}
	c.owner, c.long, c.release = s, long, time.Now().Add(hold)
}

func (c *collector) read(s *stream, now time.Time) {
	if s.fd < 0 {
		return
	}
	kept := copy(c.buf, s.part)
	n, err := unix.Read(s.fd, c.buf[kept:kept+readSize])
	if err == unix.EINTR || err == unix.EAGAIN {
		return
	}
	if err != nil || n <= 0 {
		c.end(s)
		return
	}
	if n >= flood {
		c.poller.keepThread()
	}
	if n >= pipeSize && !s.grown && c.grown < maxGrown {
		s.grown = true
		c.grown++
		unix.FcntlInt(uintptr(s.fd), unix.F_SETPIPE_SZ, readSize) // refused: it stays as it is
	}
	data := c.buf[:kept+n]
	if s.stamp != nil {
		c.stamped = s.stamp.append(append(c.stamped[:0], data[:kept]...), data[kept:], time.Now())
		data = c.stamped
	}
	s.keep(data[kept:])
	if s.sink == nil {
		return
	}
	if kept == 0 {
		s.since = now
	}
	if cut := lineEnd(data); cut > 0 {
		c.emit(s, data[:cut])
		data = data[cut:]
		s.since = now
		if c.owner == s {
			c.owner = nil
		}
	}
	s.part = s.part[:0]
	switch {
	case len(data) == 0:
	case c.owner == s:
		c.emitRunes(s, data, now)
		if c.long {
			c.release = time.Now().Add(hold)
		}
	case len(data) >= maxLine:
		c.emitRunes(s, data, now)
		c.own(s, true)
	default:
		s.part = append(s.part, data...)
		if s.due = now.Add(pause); s.due.After(s.since.Add(longPause)) {
			s.due = s.since.Add(longPause)
		}
	}
}

// keep takes what has come into the stream's file and tail.
func (s *stream) keep(data []byte) {
	if s.file != nil {
		if _, err := s.file.Write(data); err != nil {
			s.file = nil // its end is the job's: what comes till then is not wanted any more
			s.fileErr(outputFileError(err))
		}
	}
	if !s.keepTail {
		return
	}
	s.tailMu.Lock()
	defer s.tailMu.Unlock()
	if len(data) > tailSize {
		s.tail, data = s.tail[:0], data[len(data)-tailSize:]
	}
	s.tail = append(s.tail, data...)
	if len(s.tail) > 2*tailSize {
		s.tail = append(s.tail[:0], s.tail[len(s.tail)-tailSize:]...)
	}
}

// emitRunes is emit for text that goes on: a character whose other bytes are still to come is kept back a while, so that no other text
// gets into it.
func (c *collector) emitRunes(s *stream, data []byte, now time.Time) {
	n := wholeRunes(data)
	if n == 0 {
		n = len(data)
	}
	c.emit(s, data[:n])
	s.part = append(s.part[:0], data[n:]...)
	s.since, s.due = now, now.Add(hold)
}

// wholeRunes is the length of data without the beginning of a UTF-8 sequence at its end.
func wholeRunes(data []byte) int {
	for i := len(data) - 1; i >= 0 && i >= len(data)-utf8.UTFMax; i-- {
		if utf8.RuneStart(data[i]) {
			if !utf8.FullRune(data[i:]) {
				return i
			}
			break
		}
	}
	return len(data)
}

// end closes a stream at its end of file and shows what was kept back.
func (c *collector) end(s *stream) {
	if s.fd < 0 {
		return
	}
	c.poller.drop(s.fd)
	unix.Close(s.fd)
	s.fd = -1
	if c.owner == s {
		c.owner = nil
	}
	c.emit(s, s.part)
	s.part = nil
	c.mu.Lock()
	c.open--
	c.mu.Unlock()
}

// lineEnd is the index behind the last line end in data, 0 without one. A carriage return ends a line, too
// (progress bars), unless it is the last byte: a newline may follow.
func lineEnd(data []byte) int {
	nl := bytes.LastIndexByte(data, '\n') + 1
	if nl == len(data) {
		return nl
	}
	return nl + bytes.LastIndexByte(data[nl:len(data)-1], '\r') + 1
}

func endsLine(data []byte) bool {
	return data[len(data)-1] == '\n' || data[len(data)-1] == '\r'
}

// emit writes text of a stream to its sink. Without tags it is exactly the rank's bytes. With tags each line
// begins with "[3] "; a line that was cut by another rank's goes on after "[3]+ ".
func (c *collector) emit(s *stream, data []byte) {
	if len(data) == 0 || c.failed != nil || s.sink == nil {
		return
	}
	out := data
	if s.tag != "" {
		t := c.tagged[:0]
		if c.mid != nil && c.mid != s {
			t = append(t, '\n')
			c.mid = nil
		}
		goesOn := c.mid == s || s.cr && c.last == s && data[0] == '\n'
		t = appendTagged(t, s.tag, data, goesOn, s.begun && c.mid != s)
		c.tagged, out = t[:0], t
	}
	if _, err := s.sink.Write(out); err != nil {
		c.fail(fmt.Errorf("write stdout: %w", err))
		return
	}
	c.last = s
	s.begun, s.cr = !endsLine(data), data[len(data)-1] == '\r'
	c.mid = nil
	if s.begun {
		c.mid = s
	}
}

// appendTagged appends data with the tag before each line. inLine: data goes on where the sink stands;
// cont: data goes on with a line that was cut.
func appendTagged(t []byte, tag string, data []byte, inLine, cont bool) []byte {
	for len(data) > 0 {
		switch {
		case inLine:
		case cont:
			t = append(t, tag[:len(tag)-1]...)
			t = append(t, '+', ' ')
		default:
			t = append(t, tag...)
		}
		inLine, cont = false, false
		n := lineLength(data) // a carriage return starts the line again: it is tagged again
		t = append(t, data[:n]...)
		data = data[n:]
	}
	return t
}

func tagOf(rank int) string { return "[" + strconv.Itoa(rank) + "] " }

func (c *collector) emitNotice(line string) {
	if c.mid != nil {
		line = "\n" + line
		c.mid = nil
	}
	c.last = nil
	io.WriteString(c.errSink, line)
}

// midLine reports whether the sink stands in the middle of a line. After done.
func (c *collector) midLine() bool { return c.mid != nil }

// fail takes note that the sink can't be written. With sinkErr the ranks' pipes are closed, so that they see what a
// program in a pipeline sees when its reader has gone; without, they are read on and the text is dropped.
func (c *collector) fail(err error) {
	if c.failed != nil {
		return
	}
	c.failed = err
	if c.sinkErr == nil {
		return
	}
	c.sinkErr(err) // before the ranks see it: what they die of then is not the cause
	c.mu.Lock()
	streams := c.streams
	c.mu.Unlock()
	for _, s := range streams {
		s.part = nil
		c.end(s)
	}
}
