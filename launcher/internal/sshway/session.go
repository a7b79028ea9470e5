package sshway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"golang.org/x/crypto/ssh"
)

// session is one command on a connection of its own.
type session struct {
	h      hop
	link   *link
	remote *ssh.Session
	stdin  io.WriteCloser
	stdout io.Reader
	tail   way.Tail

	done chan struct{} // closed when err is set
	err  error

	mu   sync.Mutex // guards lost
	lost error      // why the connection was ended from here; nil if it was not

	quit   chan struct{}  // closed by Close
	alive  sync.WaitGroup // the keep-alive's goroutines
	closed sync.Once
}

// startSession starts the line on the connection, which the session then owns.
func startSession(ctx context.Context, h hop, l *link, line string) (*session, error) {
	stop := context.AfterFunc(ctx, l.cut)
	s := &session{h: h, link: l, done: make(chan struct{}), quit: make(chan struct{})}
	err := s.start(line)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, sessionFailure(ctx, h, err)
	}
	go func() {
		s.err = s.end(s.remote.Wait())
		close(s.done)
	}()
	if h.o.aliveInterval > 0 {
		s.alive.Go(s.keepAlive)
	}
	return s, nil
}

func (s *session) start(line string) (err error) {
	if s.remote, err = s.link.client.NewSession(); err != nil {
		return err
	}
	if s.stdin, err = s.remote.StdinPipe(); err != nil {
		return err
	}
	if s.stdout, err = s.remote.StdoutPipe(); err != nil {
		return err
	}
	s.remote.Stderr = &s.tail
	return s.remote.Start(line)
}

func sessionFailure(ctx context.Context, h hop, err error) *way.Error {
	e := failure(h, way.PhaseSession, err, "")
	switch {
	case ctx.Err() != nil:
		e.Cause = fmt.Errorf("the command did not start: %w", context.Cause(ctx))
		e.Temporary = timedOut(ctx)
	case isEnd(err):
		e.Cause = fmt.Errorf("the server closed the connection behind authentication: %w", err)
		e.Advice = fmt.Sprintf("is the account %s locked or expired? sshd's log on the host says why", h.o.user)
	default:
		e.Advice = fmt.Sprintf("may %s run commands there? see ForceCommand, PermitTTY and MaxSessions in its sshd_config", h.o.user)
	}
	return e
}

// end turns the end that x/crypto/ssh saw into ours.
func (s *session) end(err error) error {
	if err == nil {
		return nil
	}
	if ee, ok := errors.AsType[*ssh.ExitError](err); ok {
		if ee.Signal() != "" {
			return &way.ExitError{Code: -1, Signal: ee.Signal()}
		}
		return &way.ExitError{Code: ee.ExitStatus()}
	}
	s.mu.Lock()
	lost := s.lost
	s.mu.Unlock()
	if lost == nil {
		lost = errors.New("the connection ended before the command")
	}
	return failure(s.h, way.PhaseSession, lost, "")
}

// keepAlive ends the connection when the host has been silent for the interval more often than the configuration
// allows. Whatever comes counts as life, and something always comes: each silent interval asks for an answer.
func (s *session) keepAlive() {
	o := s.h.o
	timer := time.NewTimer(o.aliveInterval)
	defer timer.Stop()
	asking := make(chan struct{}, 1)
	for missed, heard := 0, s.link.conn.last.Load(); ; {
		select {
		case <-s.quit:
			return
		case <-s.done:
			return
		case <-timer.C:
		}
		// Not a ticker: after a late tick the next would leave the host less time than the interval to answer.
		timer.Reset(o.aliveInterval)
		// The answer to the question before may have come right after it: a late tick then finds a whole interval of silence.
		before := heard
		if heard = s.link.conn.last.Load(); heard != before {
			missed = 0
		}
		if s.link.conn.silence() < o.aliveInterval {
			continue
		}
		if missed++; missed > o.aliveCountMax {
			s.lose(fmt.Errorf("connection lost: no answer in %v", s.link.conn.silence().Round(time.Second)))
			return
		}
		select {
		case asking <- struct{}{}:
			s.alive.Go(func() {
				// It waits for the answer, or for the connection's end. Not even sending it is sure to return.
				s.link.client.SendRequest("keepalive@openssh.com", true, nil)
				<-asking
			})
		default: // the one before has not been answered
		}
	}
}

// lose ends the connection for a reason.
func (s *session) lose(why error) {
	s.mu.Lock()
	if s.lost == nil {
		s.lost = why
	}
	s.mu.Unlock()
	s.link.cut()
}

func (s *session) Read(p []byte) (int, error)  { return s.stdout.Read(p) }
func (s *session) Write(p []byte) (int, error) { return s.stdin.Write(p) }

func (s *session) CloseWrite() error {
	if err := s.stdin.Close(); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// Stderr is the command's, behind a ProxyCommand's if that said something.
func (s *session) Stderr() []byte {
	b := s.tail.Bytes()
	if s.link.stderr != nil {
		b = append(s.link.stderr(), b...)
	}
	return b[max(0, len(b)-way.TailSize):]
}

func (s *session) Wait() error {
	<-s.done
	return s.err
}

func (s *session) Close() error {
	s.closed.Do(func() {
		s.lose(errors.New("closed"))
		close(s.quit)
		s.link.close()
		<-s.done
		s.alive.Wait()
	})
	return nil
}

// Addrs are nil behind a proxy: what the connection ends at is not the host.
func (s *session) Addrs() (local, remote net.Addr) {
	if !s.link.direct {
		return nil, nil
	}
	return s.link.conn.LocalAddr(), s.link.conn.RemoteAddr()
}
