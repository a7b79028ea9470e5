package way

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// killGrace is how long a command may take to end after SIGTERM, before SIGKILL. OpenSSH needs a millisecond.
const killGrace = time.Second

// Command is a way by a command of the user (--rsh): it gets [user@]host and the shell line as its last two
// arguments, as rsh and ssh take them, unless one of its words has %h in it: then %h is the host, %r the user,
// %p the port and %% a percent sign, and only the line is added ("docker exec -i %h /bin/sh -c").
type Command struct {
	argv   []string
	tokens bool
}

// NewCommand makes a way of a command line, which is split as a shell splits words (quotes and backslashes, no
// expansion of any kind).
func NewCommand(cmd string) (*Command, error) {
	argv, err := splitWords(cmd)
	if err != nil {
		return nil, fmt.Errorf("rsh command %q: %w", cmd, err)
	}
	if len(argv) == 0 {
		return nil, errors.New("rsh command: no word in it")
	}
	c := &Command{argv: argv}
	for _, w := range argv[1:] {
		_, host, err := expand(w, Target{Addr: "h"})
		if err != nil && !errors.Is(err, errNoToken) {
			return nil, fmt.Errorf("rsh command %q: %w", cmd, err)
		}
		c.tokens = c.tokens || host
	}
	return c, nil
}

// Shell is the way to this machine itself: the line is run by /bin/sh, whatever the target is.
func Shell() *Command { return &Command{argv: []string{"/bin/sh", "-c"}} }

func (c *Command) isShell() bool { return slices.Equal(c.argv, []string{"/bin/sh", "-c"}) }

// Args is the whole argument vector with which the line is run on t.
func (c *Command) Args(t Target, line string) ([]string, error) {
	argv := slices.Clone(c.argv)
	if !c.isShell() && (strings.HasPrefix(t.Host(), "-") || strings.HasPrefix(t.User, "-")) {
		return nil, fmt.Errorf("host %q or user %q would be taken for an option", t.Host(), t.User)
	}
	switch {
	case c.isShell():
	case c.tokens:
		for i, w := range argv[1:] {
			s, _, err := expand(w, t)
			if err != nil {
				return nil, err
			}
			argv[1+i] = s
		}
	default:
		if t.Port != 0 {
			// Only OpenSSH's option is known.
			if filepath.Base(argv[0]) != "ssh" {
				return nil, fmt.Errorf("%s cannot be told port %d (a word with %%h and %%p in the rsh command can)", argv[0], t.Port)
			}
			argv = append(argv, "-p", strconv.Itoa(t.Port))
		}
		host := t.Host()
		if t.User != "" {
			host = t.User + "@" + host
		}
		argv = append(argv, host)
	}
	return append(argv, line), nil
}

// Open starts the command. Whether it reaches the host shows only in what it writes: the caller's own start
// marker, or its end.
func (c *Command) Open(ctx context.Context, t Target, line string) (Session, error) {
	fail := func(phase string, err error, advice string) (Session, error) {
		return nil, &Error{Host: t.Name, Phase: phase, Cause: err, Advice: advice}
	}
	if err := ctx.Err(); err != nil {
		return fail(PhaseConnect, context.Cause(ctx), "")
	}
	argv, err := c.Args(t, line)
	if err != nil {
		return fail(PhaseConfigure, err, "")
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return fail(PhaseConfigure, err, "check the command given with --rsh")
	}
	s := &commandSession{done: make(chan struct{})}
	var files [3]*os.File // the command's ends
	var stderr *os.File
	for i, mine := range []**os.File{&s.stdin, &s.stdout, &stderr} {
		r, w, err := os.Pipe()
		if err != nil {
			closeAll(files[:]...)
			closeAll(s.stdin, s.stdout)
			return fail(PhaseConnect, err, "")
		}
		if i == 0 {
			files[i], *mine = r, w
		} else {
			files[i], *mine = w, r
		}
	}
	read := make(chan struct{})
	go func() {
		io.Copy(&s.tail, stderr)
		close(read)
	}()
	started := make(chan error)
	go func() {
		// The parent-death signal comes when the thread that forked ends, so this one waits for the command too.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		p, err := os.StartProcess(path, argv, &os.ProcAttr{
			// OpenSSH asks nobody: it has no terminal (its own session), and no program that opens a window.
			Env:   append(os.Environ(), "SSH_ASKPASS_REQUIRE=never"),
			Files: files[:],
			// Its own session, also so that Ctrl-C reaches gorun alone, which then ends the job in its order.
			Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
		})
		if err == nil {
			s.pid = p.Pid
		}
		started <- err
		if err != nil {
			return
		}
		s.await(p)
		// A master connection that the command left behind holds its stderr open: what is there by now is all.
		select {
		case <-read:
		case <-time.After(100 * time.Millisecond):
			stderr.Close()
			<-read
		}
		stderr.Close()
		close(s.done)
	}()
	err = <-started
	closeAll(files[:]...)
	if err != nil {
		closeAll(s.stdin, s.stdout)
		<-read
		stderr.Close()
		return fail(PhaseConnect, err, "")
	}
	return s, nil
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

type commandSession struct {
	stdin, stdout *os.File
	tail          Tail
	pid           int // of the command, which leads a session and a process group

	mu     sync.Mutex // guards reaped: a group is signalled only while its leader still has its number
	reaped bool
	err    error         // the command's end; valid when done is closed
	done   chan struct{} // closed when the command is reaped and its stderr read

	closed sync.Once
}

// await waits for the command and reaps it.
func (s *commandSession) await(p *os.Process) {
	for {
		// Not reaped here, so that its number stays taken until no one can signal it any more.
		err := unix.Waitid(unix.P_PID, s.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	state, err := p.Wait()
	s.reaped = true
	if err != nil {
		s.err = fmt.Errorf("wait for process %d: %w", s.pid, err)
		return
	}
	switch ws := state.Sys().(syscall.WaitStatus); {
	case ws.Signaled():
		s.err = &ExitError{Code: -1, Signal: strings.TrimPrefix(unix.SignalName(ws.Signal()), "SIG")}
	case ws.ExitStatus() != 0:
		s.err = &ExitError{Code: ws.ExitStatus()}
	}
}

// signal signals the command and what it started in its group.
func (s *commandSession) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.reaped {
		syscall.Kill(-s.pid, sig)
	}
}

func (s *commandSession) Read(p []byte) (int, error)  { return s.stdout.Read(p) }
func (s *commandSession) Write(p []byte) (int, error) { return s.stdin.Write(p) }
func (s *commandSession) Stderr() []byte              { return s.tail.Bytes() }

func (s *commandSession) CloseWrite() error {
	if err := s.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func (s *commandSession) Wait() error {
	<-s.done
	return s.err
}

func (s *commandSession) Close() error {
	s.closed.Do(func() {
		s.stdin.Close()
		s.stdout.Close()
		s.signal(syscall.SIGTERM)
		select {
		case <-s.done:
		case <-time.After(killGrace):
			s.signal(syscall.SIGKILL)
		}
	})
	<-s.done
	return nil
}

func (s *commandSession) Addrs() (local, remote net.Addr) { return nil, nil }
