package launcher

import (
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// stdinPiece is the most that is read from gorun's stdin at once.
const stdinPiece = 64 << 10

// stdinAhead is how many pieces a rank may be behind another that reads the same stdin, beside what its pipe holds.
const stdinAhead = 4

// backgroundPoll is how often gorun in a terminal's background looks whether it is in the foreground again.
const backgroundPoll = 200 * time.Millisecond

// stdin is gorun's stdin on its way to the ranks that read it.
//
// A pipe or a file that one rank on this host reads is handed over as it is: nothing is copied, nothing is read that the rank does not
// read. All else is carried: a piece goes to all ranks that read, and the slowest of them sets the pace. Ranks that read no more are done
// without. Nothing is changed about the descriptor itself, which others may share.
//
// A terminal can't be handed over: a rank lives in a session of its own, where reading it fails. What is typed is read a piece at a
// time, when a rank waits for it: the rest stays for the shell. In the background nothing is read.
type stdin struct {
	fd       int // -1: the ranks read nothing
	direct   int // rank that gets fd itself, -1: none
	terminal bool
	sinks    []*stdinSink

	quit         chan struct{}
	quitR, quitW int // a pipe, which ends with quit
	answered     chan struct{}
	wait         sync.WaitGroup
	stopOnce     sync.Once
}

// stdinSink is a rank that reads what is carried.
type stdinSink struct {
	of     *stdin
	rank   int
	pipe   *stdinPipe // of a rank on this host
	readFD int        // the rank's end of it, until the rank has its own; -1: none
	mux    *agentwire.Mux

	pieces chan []byte
	sent   int64         // bytes in pieces so far
	wanted atomic.Int64  // of so many the rank has read all, and waits for more
	gone   chan struct{} // closed: the rank reads no more
	once   sync.Once
}

// newStdin prepares fd as the stdin of ranks, of which here reports those on this host.
func newStdin(fd int, ranks []int, here func(rank int) bool) (*stdin, error) {
	s := &stdin{fd: fd, direct: -1, quitR: -1, quitW: -1}
	if fd < 0 || len(ranks) == 0 {
		s.fd = -1
		return s, nil
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		s.fd = -1
		return s, nil
	}
	s.terminal = isTerminal(fd)
	switch {
	case s.terminal && !s.foreground():
		s.fd = -1
		return s, nil
	case !s.terminal && len(ranks) == 1 && here(ranks[0]):
		s.direct = ranks[0]
		return s, nil
	}
	s.quit, s.answered = make(chan struct{}), make(chan struct{}, 1)
	var err error
	if s.quitR, s.quitW, err = pipe(); err != nil {
		return nil, err
	}
	for _, rank := range ranks {
		k := &stdinSink{of: s, rank: rank, readFD: -1, pieces: make(chan []byte, stdinAhead), gone: make(chan struct{})}
		k.wanted.Store(-1)
		if here(rank) {
			if k.pipe, k.readFD, err = newStdinPipe(); err != nil {
				s.stop()
				return nil, err
			}
		}
		s.sinks = append(s.sinks, k)
	}
	return s, nil
}

func (s *stdin) sink(rank int) *stdinSink {
	for _, k := range s.sinks {
		if k.rank == rank {
			return k
		}
	}
	return nil
}

// local is the descriptor that a rank on this host reads as its stdin; null if it reads nothing.
func (s *stdin) local(rank, null int) int {
	if s.fd >= 0 && s.direct == rank {
		return s.fd
	}
	if k := s.sink(rank); k != nil && k.readFD >= 0 {
		return k.readFD
	}
	return null
}

// started says that all ranks on this host have their own descriptors: the end of a rank is seen from now on.
func (s *stdin) started() {
	for _, k := range s.sinks {
		if k.readFD >= 0 {
			unix.Close(k.readFD)
			k.readFD = -1
		}
	}
}

// start begins to carry. Ranks elsewhere are reached by way of their hosts' muxes, those on this host belong to an agent.
func (s *stdin) start(mux func(rank int) *agentwire.Mux, of func(rank int) *agent) {
	if len(s.sinks) == 0 {
		return
	}
	for _, k := range s.sinks {
		if k.pipe == nil {
			k.mux = mux(k.rank)
			s.wait.Go(k.toStream)
			continue
		}
		s.wait.Go(k.toPipe)
		a := of(k.rank)
		k.pipe.serve(func() int { return a.pidOf(k.rank) }, k.wants)
	}
	s.wait.Go(s.carry)
}

// stop ends the carrying, and gives everything back.
func (s *stdin) stop() {
	s.stopOnce.Do(func() {
		if s.quit == nil {
			return
		}
		close(s.quit)
		if s.quitW >= 0 {
			unix.Close(s.quitW)
		}
		for _, k := range s.sinks {
			k.leave()
			if k.pipe != nil {
				k.pipe.close()
			}
		}
		s.wait.Wait()
		s.started()
		if s.quitR >= 0 {
			unix.Close(s.quitR)
		}
	})
}

// foreground reports whether this process may read its terminal.
func (s *stdin) foreground() bool {
	group, err := unix.IoctlGetInt(s.fd, unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// carry reads until the end of the input, of the last rank that reads, or stop.
func (s *stdin) carry() {
	defer func() {
		for _, k := range s.sinks {
			close(k.pieces)
		}
	}()
	for {
		ok, over := s.readable()
		if !ok {
			return
		}
		if s.terminal && !over {
			if !s.demanded() {
				return
			}
			if !s.foreground() {
				continue
			}
		}
		if len(s.reading()) == 0 {
			return
		}
		piece := make([]byte, stdinPiece)
		n, err := unix.Read(s.fd, piece)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil || n <= 0 {
			return
		}
		for _, k := range s.reading() {
			select {
			case k.pieces <- piece[:n]:
				k.sent += int64(n)
			case <-k.gone:
			case <-s.quit:
				return
			}
		}
	}
}

// reading are the ranks that read on.
func (s *stdin) reading() []*stdinSink {
	var on []*stdinSink
	for _, k := range s.sinks {
		select {
		case <-k.gone:
			continue
		default:
		}
		if k.pipe != nil && !k.pipe.hasReader() {
			k.leave()
			continue
		}
		on = append(on, k)
	}
	return on
}

// readable waits until there is something to read, and this process may read it. It returns false on stop. over says that nothing more will come: the
// terminal has hung up.
func (s *stdin) readable() (ok, over bool) {
	for {
		fds := []unix.PollFd{{Fd: int32(s.quitR), Events: unix.POLLIN}, {Fd: int32(s.fd), Events: unix.POLLIN}}
		wait := -1
		if s.terminal && !s.foreground() {
			fds[1].Events, wait = 0, int(backgroundPoll/time.Millisecond)
		}
		if _, err := unix.Poll(fds, wait); err != nil && err != unix.EINTR {
			return false, false
		}
		if fds[0].Revents != 0 {
			return false, false
		}
		if fds[1].Revents != 0 {
			return true, fds[1].Revents&(unix.POLLHUP|unix.POLLERR) != 0
		}
	}
}

// demanded waits until a rank has read all that it got, and waits for more. It returns false on stop.
func (s *stdin) demanded() bool {
	for {
		on := s.reading()
		if len(on) == 0 {
			return true // carry sees it, too
		}
		for _, k := range on {
			if k.wanted.Load() == k.sent {
				return true
			}
			k.ask()
		}
		select {
		case <-s.answered:
		case <-s.quit:
			return false
		}
	}
}

// ask has the rank's demand looked for; wants is called when it is there.
func (k *stdinSink) ask() {
	if k.pipe != nil {
		k.pipe.ask(k.sent)
		return
	}
	k.mux.Send(&agentwire.Message{StdinAsk: &agentwire.StdinAt{Rank: k.rank, Bytes: k.sent}})
}

// wants says that the rank has read so many bytes, and waits for more.
func (k *stdinSink) wants(bytes int64) {
	k.wanted.Store(bytes)
	k.of.ring()
}

func (s *stdin) ring() {
	select {
	case s.answered <- struct{}{}:
	default:
	}
}

// leave says that the rank reads no more.
func (k *stdinSink) leave() {
	k.once.Do(func() { close(k.gone) })
	k.of.ring()
}

// toPipe gives pieces to a rank on this host.
func (k *stdinSink) toPipe() {
	defer k.leave()
	defer k.pipe.close()
	k.give(k.pipe)
}

// toStream gives pieces to a rank elsewhere, by its agent.
func (k *stdinSink) toStream() {
	defer k.leave()
	to, err := k.mux.Open(agentwire.Header{Kind: agentwire.Stdin, Rank: k.rank})
	if err != nil {
		return
	}
	var unread sync.WaitGroup
	unread.Go(func() {
		// Nothing comes but the end: the rank reads no more.
		var one [1]byte
		to.Read(one[:])
		k.leave()
	})
	k.give(to)
	to.Close()
	unread.Wait()
}

func (k *stdinSink) give(w io.Writer) {
	for {
		select {
		case p, ok := <-k.pieces:
			if !ok {
				return
			}
			if _, err := w.Write(p); err != nil {
				return
			}
		case <-k.gone:
			return
		}
	}
}
