package launcher

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// forkBound bounds the wait for a fork that is on its way when the ranks are to stop.
const forkBound = time.Second

// resumeSeen bounds the wait for the signal that has ended a stop of this process.
const resumeSeen = time.Second

// suspend stops the ranks and this process, as Ctrl-Z asks, and lets the ranks go on when this process does. Agents of hosts that are being prepared wait for it
// as others do, and the time for connecting stands still.
func (r *runner) suspend() {
	if r.started {
		r.toRanks(syscall.SIGSTOP, nil)
		for _, h := range r.hosts {
			if l, ok := h.(*localHost); ok {
				l.agent.settled(forkBound) // a rank that runs and is not known yet would go on
			}
		}
	}
	agents := r.speaking.each((*remoteHost).pause)
	goOn := r.dialing.hold()
	// To this very thread, so that it stops before it goes on; one for the process may come to another thread first.
	runtime.LockOSThread()
	unix.Tgkill(unix.Getpid(), unix.Gettid(), syscall.SIGSTOP)
	runtime.UnlockOSThread()
	// SIGCONT ended the stop: it is taken here, that ranks get it once.
	select {
	case <-r.resumes:
	case <-time.After(resumeSeen):
	}
	goOn()
	for _, h := range agents {
		h.resume()
	}
	if r.started {
		r.toRanks(syscall.SIGCONT, nil)
	}
}

// speaking are the hosts whose agents speak, prepared or not.
type speaking struct {
	mu    sync.Mutex // guards the rest
	hosts []*remoteHost
}

func (s *speaking) add(h *remoteHost) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hosts = append(s.hosts, h)
}

func (s *speaking) all() []*remoteHost {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hosts[:len(s.hosts):len(s.hosts)]
}

// each calls f for all hosts at once, then for those that have begun to speak meanwhile, and returns them.
func (s *speaking) each(f func(*remoteHost)) (hosts []*remoteHost) {
	for {
		all := s.all()
		if len(all) == len(hosts) {
			return all
		}
		var wait sync.WaitGroup
		for _, h := range all[len(hosts):] {
			wait.Go(func() { f(h) })
		}
		wait.Wait()
		hosts = all
	}
}

// noAnswer is the cause of a context whose time for connecting is over.
type noAnswer time.Duration

func (e noAnswer) Error() string {
	return fmt.Sprintf("no answer within %v (--connect-timeout)", time.Duration(e))
}
func (e noAnswer) Unwrap() error { return context.DeadlineExceeded }

// runBound ends a context after some time, in which stops of this process do not count. A nil one bounds nothing.
type runBound struct {
	timer *time.Timer
	end   time.Time
}

// newRunBound makes a context with a bound, and a function that gives it up.
func newRunBound(ctx context.Context, timeout time.Duration) (*runBound, context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	b := &runBound{timer: time.AfterFunc(timeout, func() { cancel(noAnswer(timeout)) }), end: time.Now().Add(timeout)}
	return b, ctx, func() {
		b.timer.Stop()
		cancel(nil)
	}
}

// hold has the time stand still until it is to go on. One goroutine calls it.
func (b *runBound) hold() (goOn func()) {
	if b == nil || !b.timer.Stop() {
		return func() {}
	}
	left := time.Until(b.end)
	return func() {
		b.end = time.Now().Add(left)
		b.timer.Reset(left)
	}
}
