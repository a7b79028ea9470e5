package sshway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
	"golang.org/x/sys/unix"
)

// temporary reports whether opening again may help.
func temporary(err error) bool {
	e, ok := errors.AsType[*way.Error](err)
	return ok && e.Temporary
}

// serveRaw accepts connections and hands them to serve, until the test ends. It counts them.
func serveRaw(t testing.TB, serve func(net.Conn)) (port int, count *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	count = &atomic.Int64{}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			count.Add(1)
			all.Go(func() {
				defer conn.Close()
				stop := context.AfterFunc(ctx, func() { conn.Close() })
				defer stop()
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		cancel()
		l.Close()
		all.Wait()
	})
	return l.Addr().(*net.TCPAddr).Port, count
}

func TestRefused(t *testing.T) {
	st := newSite(t, "")
	port := freePort(t, "127.0.0.1")
	e := mustFail(t, st.client(t, Config{}), way.Target{Name: "a", Addr: "127.0.0.1", Port: port}, way.PhaseConnect,
		fmt.Sprintf("a: connect: dial 127.0.0.1:%d: connection refused", port), fmt.Sprintf("is sshd running there, on port %d?", port))
	if !errors.Is(e, syscall.ECONNREFUSED) || !temporary(e) {
		t.Errorf("%v: want a temporary ECONNREFUSED", e)
	}
}

func TestUnknownName(t *testing.T) {
	st := newSite(t, "")
	mustFail(t, st.client(t, Config{}), target("no-such-host.invalid"), way.PhaseResolve, "name no-such-host.invalid: ", "HostName")
}

// With patience, too, a name that the name service does not know is given up after a few tries, before the time is over.
func TestUnknownNamePatient(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	st := newSite(t, "ProxyJump nowhere.invalid")
	cl := st.client(t, Config{Patient: true})
	_, err := cl.Open(ctx, target("no-such-host"), "true")
	if ctx.Err() != nil {
		t.Fatalf("the time was over: %v", err)
	}
	if e, ok := errors.AsType[*way.Error](err); !ok || e.Phase != way.PhaseResolve || !strings.Contains(err.Error(), fmt.Sprintf("(tried %d times in ", nameTries)) {
		t.Errorf("%v, want it to be given up after %d tries", err, nameTries)
	}
}

// A name that only the system's name service knows.
func TestSystemName(t *testing.T) {
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	bin := t.TempDir()
	// The name service is a stand-in: what a machine has beside files and DNS differs.
	write(t, bin+"/getent", "#!/bin/sh\n[ \"$*\" = 'ahosts printer.invalid' ] || exit 2\necho '127.0.0.9  DGRAM'\necho '127.0.0.1       STREAM printer.invalid'\necho '127.0.0.1       DGRAM'\n")
	if err := os.Chmod(bin+"/getent", 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	c := st.client(t, Config{AcceptNewHostKeys: true})
	write(t, st.config, fmt.Sprintf("Port %d\nIdentityFile %s\n", sv.port, sv.key.file))
	mustRun(t, c, target("printer.invalid"))
	mustFail(t, c, target("other.invalid"), way.PhaseResolve, "name other.invalid: ")
	write(t, bin+"/getent", "#!/bin/sh\necho '127.0.0.1 STREAM x'\n")
	e := mustFail(t, c, way.Target{Name: "x", Addr: "x.invalid", Port: freePort(t, "127.0.0.1")}, way.PhaseConnect, "x.invalid", "connection refused")
	if !errors.Is(e, syscall.ECONNREFUSED) {
		t.Error(e)
	}
}

// Without any route.
func TestNoRoute(t *testing.T) {
	runtime.LockOSThread() // and never unlocked: the thread ends with the test, and its network with it
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		citest.Lacking(t, "a network namespace: %v", err)
	}
	e := mustFail(t, newSite(t, "").client(t, Config{}), way.Target{Name: "x", Addr: "127.0.0.1"}, way.PhaseConnect, "127.0.0.1", "unreachable", "routes")
	if !temporary(e) {
		t.Errorf("%v is not worth another try", e)
	}
}

// A server that accepts and never speaks, and ones that stop at other points, hold Open to its context, no longer.
func TestSilentServer(t *testing.T) {
	t.Parallel() // it waits
	silent, _ := serveRaw(t, func(c net.Conn) { io.Copy(io.Discard, c) })
	version, _ := serveRaw(t, func(c net.Conn) {
		io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n")
		io.Copy(io.Discard, c)
	})
	noise, _ := serveRaw(t, func(c net.Conn) {
		io.WriteString(c, "220 mail.example.org ESMTP\r\n")
		io.Copy(io.Discard, c)
	})
	for name, port := range map[string]int{"silent": silent, "version": version, "noise": noise} {
		t.Run(name, func(t *testing.T) {
			st := newSite(t, "")
			tg := way.Target{Name: "a", Addr: "127.0.0.1", Port: port}
			mustEnd(t, st.client(t, Config{}), tg, way.PhaseConnect, "no ssh server spoke")

			// The configuration's own limit, and a cancelled context.
			write(t, st.config, "ConnectTimeout 1\n")
			mustFail(t, st.client(t, Config{}), tg, way.PhaseConnect, "no answer in 1s (ConnectTimeout)")
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(50*time.Millisecond, cancel)
			write(t, st.config, "")
			if _, err := st.client(t, Config{}).Open(ctx, tg, "true"); !errors.Is(err, context.Canceled) || temporary(err) {
				t.Errorf("%v, want that it is cancelled", err)
			}
		})
	}
}

// Servers that drop connections before authentication are tried again until the context ends.
func TestDropped(t *testing.T) {
	t.Parallel() // it waits
	closes, n1 := serveRaw(t, func(c net.Conn) {})
	version, n2 := serveRaw(t, func(c net.Conn) { io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n") })
	resets, n3 := serveRaw(t, func(c net.Conn) {
		io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n")
		io.ReadFull(c, make([]byte, 30))
		c.(*net.TCPConn).SetLinger(0)
	})
	startups, n4 := serveRaw(t, func(c net.Conn) { io.WriteString(c, "Exceeded MaxStartups\r\n") })
	for _, c := range []struct {
		name  string
		port  int
		count *atomic.Int64
	}{{"closes", closes, n1}, {"closes behind the version", version, n2}, {"resets", resets, n3}, {"says why", startups, n4}} {
		t.Run(c.name, func(t *testing.T) {
			var retries atomic.Int64
			cl := newSite(t, "").client(t, Config{OnRetry: func(_ way.Target, err error) {
				if !temporary(err) {
					t.Errorf("tried again: %v", err)
				}
				retries.Add(1)
			}})
			var err error
			for _, d := range []time.Duration{time.Second, 30 * time.Second} { // the second on a busy machine
				ctx, cancel := context.WithTimeout(t.Context(), d)
				_, err = cl.Open(ctx, way.Target{Name: "a", Addr: "127.0.0.1", Port: c.port}, "true")
				cancel()
				if c.count.Load() >= 2 && retries.Load() >= 1 {
					break
				}
			}
			if c.count.Load() < 2 || retries.Load() < 1 {
				t.Errorf("%d connections, %d told of, want some", c.count.Load(), retries.Load())
			}
			e, ok := err.(*way.Error)
			if !ok || e.Phase != way.PhaseConnect || !e.Temporary || !strings.Contains(e.Error(), " times in ") {
				t.Errorf("%v", err)
			}
		})
	}
}

// More hosts than a server takes at once: all get in.
func TestMaxStartups(t *testing.T) {
	t.Parallel() // it waits
	sv := startServer(t, serverOptions{lines: "MaxStartups 1"})
	var drops atomic.Int64
	c := newSite(t, "", sv).client(t, Config{OnRetry: func(way.Target, error) { drops.Add(1) }})
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			s, err := c.Open(ctx, target("h1"), "echo well")
			if err != nil {
				t.Error(err)
				return
			}
			defer s.Close()
			if out, err := io.ReadAll(s); string(out) != "well\n" || err != nil {
				t.Errorf("%q, %v", out, err)
			}
		})
	}
	all.Wait()
	if drops.Load() == 0 {
		t.Error("the server dropped no one: the test shows nothing")
	}
}

// endless is a context whose deadline comes when the test says so.
type endless struct {
	context.Context
	over chan struct{}
}

func (e *endless) Done() <-chan struct{} { return e.over }

func (e *endless) Err() error {
	select {
	case <-e.over:
		return context.DeadlineExceeded
	default:
		return nil
	}
}

// No more connections than Pending are unauthenticated at one server; the others wait, no longer than their contexts.
func TestPending(t *testing.T) {
	t.Parallel() // it waits
	for _, pending := range []int{0, 3} {
		want := int64(pending)
		if pending == 0 {
			want = DefaultPending
		}
		port, count := serveRaw(t, func(c net.Conn) { io.Copy(io.Discard, c) })
		other, others := serveRaw(t, func(c net.Conn) { io.Copy(io.Discard, c) })
		c := newSite(t, "").client(t, Config{Pending: pending})
		// The time is over a second after as many as may have come.
		ctx := &endless{t.Context(), make(chan struct{})}
		go func() {
			for end := time.Now().Add(60 * time.Second); (count.Load() < want || others.Load() < want) && time.Now().Before(end); time.Sleep(time.Millisecond) {
			}
			time.Sleep(time.Second)
			close(ctx.over)
		}()
		var all sync.WaitGroup
		for range 20 {
			for _, p := range []int{port, other} {
				all.Go(func() {
					if _, err := c.Open(ctx, way.Target{Name: "x", Addr: "127.0.0.1", Port: p}, "true"); !errors.Is(err, context.DeadlineExceeded) || !temporary(err) {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		if a, b := count.Load(), others.Load(); a != want || b != want {
			t.Errorf("%d and %d connections, want %d each", a, b, want)
		}
	}
}

// A caller who gives up while a refusing host is tried again is told so.
func TestCancelledRetry(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cl := newSite(t, "").client(t, Config{Patient: true, OnRetry: func(way.Target, error) { cancel() }})
	_, err := cl.Open(ctx, way.Target{Name: "x", Addr: "127.0.0.1", Port: freePort(t, "127.0.0.1")}, "true")
	if !errors.Is(err, context.Canceled) || !errors.Is(err, syscall.ECONNREFUSED) || temporary(err) {
		t.Errorf("%v", err)
	}
}

// With patience a host that comes up late is waited for.
func TestPatient(t *testing.T) {
	port := freePort(t, "127.0.0.1")
	key := newKey(t, t.TempDir()+"/id", "ed25519", "")
	st := newSite(t, "IdentityFile "+key.file)
	refused := make(chan error, 100)
	cl := st.client(t, Config{Patient: true, AcceptNewHostKeys: true, OnRetry: func(_ way.Target, err error) { refused <- err }})
	opened := make(chan error)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
		defer cancel()
		s, err := cl.Open(ctx, way.Target{Name: "late", Addr: "127.0.0.1", Port: port}, "true")
		if err == nil {
			s.Close()
		}
		opened <- err
	}()
	if err := <-refused; !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, want a refusal", err)
	}
	startServer(t, serverOptions{port: port, key: &key})
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// sshd is stopped, or the path to it swallows everything: keep-alive ends the session.
func TestKeepAlive(t *testing.T) {
	t.Parallel() // it waits
	sv := startServer(t, serverOptions{})
	var s *session
	var pid int // of the sshd that serves the session
	lost := true
	for _, interval := range []int{1, 4} { // seconds: a busy machine's sshd may be still for longer than three of the first
		st := newSite(t, fmt.Sprintf("ServerAliveInterval %d\nServerAliveCountMax 3", interval), sv)
		open, err := st.client(t, Config{}).Open(limited(t), target("h1"), "echo $PPID; cat")
		if err != nil {
			t.Fatal(err)
		}
		defer open.Close()
		s = open.(*session)
		if _, err := fmt.Fscanln(s, &pid); err != nil {
			t.Fatal(err)
		}
		// It is alive and says nothing for longer than would be allowed: that loses nothing.
		select {
		case <-s.done:
			t.Logf("every %d s: ended: %v", interval, s.Wait())
			continue
		case <-time.After(time.Duration(interval) * 5500 * time.Millisecond):
		}
		lost = false
		break
	}
	if lost {
		t.FailNow()
	}
	if _, err := io.WriteString(s, "x\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer syscall.Kill(pid, syscall.SIGCONT)
	begin := time.Now()
	go func() { // a writer that fills every buffer is freed too
		for {
			if _, err := s.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	}()
	if n, err := io.Copy(io.Discard, s); n != 0 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
	err := s.Wait()
	e, ok := err.(*way.Error)
	if !ok || e.Phase != way.PhaseSession || !strings.Contains(err.Error(), "h1: session: connection lost: no answer in ") {
		t.Errorf("%T %v", err, err)
	}
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("found after %v", d)
	}
}

// sshd dies under a session.
func TestServerKilled(t *testing.T) {
	sv := startServer(t, serverOptions{})
	s, err := newSite(t, "", sv).client(t, Config{}).Open(limited(t), target("h1"), "echo $PPID; exec cat")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var pid int
	if _, err := fmt.Fscanln(s, &pid); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, s); err != nil {
		t.Error(err)
	}
	err = s.Wait()
	if e, ok := err.(*way.Error); !ok || e.Phase != way.PhaseSession || !strings.Contains(err.Error(), "the connection ended before the command") {
		t.Errorf("%T %v", err, err)
	}
}

// A way that dies in the middle of the handshake, at every packet boundary and beyond.
func TestCutInHandshake(t *testing.T) {
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	before := openSockets(t)
	for n := 0; n < 3000; n += 97 {
		t.Run(fmt.Sprint(n, " bytes"), func(t *testing.T) { cutBehind(t, sv, st, n) })
	}
	if got := openSockets(t); got > before {
		t.Errorf("%d sockets, %d before", got, before)
	}
}

// openSockets does not count the pipes that io.Copy keeps for splicing.
func openSockets(t testing.TB) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

func cutBehind(t *testing.T, sv *server, st *site, n int) {
	port, _ := serveRaw(t, func(c net.Conn) {
		to, err := net.Dial("tcp", net.JoinHostPort(sv.ip, fmt.Sprint(sv.port)))
		if err != nil {
			return
		}
		defer to.Close()
		sent := make(chan struct{})
		go func() {
			io.Copy(to, c)
			to.Close() // the client has gone
			close(sent)
		}()
		io.CopyN(c, to, int64(n))
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
		<-sent
	})
	write(t, st.knownHosts(), fmt.Sprintf("[127.0.0.1]:%d %s", port, sv.hostKeys[0].authorized()))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	s, err := st.client(t, Config{}).Open(ctx, way.Target{Name: "h1", Addr: "h1", Port: port}, "true")
	if err == nil { // all of the handshake fitted
		s.Close()
		return
	}
	if e, ok := err.(*way.Error); !ok || !e.Temporary && e.Phase != way.PhaseSession || strings.Contains(err.Error(), "closed network connection") {
		t.Errorf("%T %v", err, err)
	}
}

// An account that may not run commands.
func TestNoSessions(t *testing.T) {
	sv := startServer(t, serverOptions{lines: "MaxSessions 0"})
	mustFail(t, newSite(t, "", sv).client(t, Config{}), target("h1"), way.PhaseSession, "MaxSessions")
}
