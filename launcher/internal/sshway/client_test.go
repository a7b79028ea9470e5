package sshway

import (
	"bytes"
	"crypto/sha256"
	"io"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestSession(t *testing.T) {
	sv := startServer(t, serverOptions{})
	c := newSite(t, "", sv).client(t, Config{})
	before := openFDs(t)
	s, err := c.Open(limited(t), target("h1"), "echo noise >&2; cat; exit 3")
	if err != nil {
		t.Fatal(err)
	}
	// More than all windows and buffers hold, both ways at once.
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<19) // 8 MiB
	go func() {
		s.Write(in)
		s.CloseWrite()
	}()
	out, err := io.ReadAll(s)
	if err != nil || sha256.Sum256(out) != sha256.Sum256(in) {
		t.Errorf("%d bytes came back of %d, %v", len(out), len(in), err)
	}
	for range 2 {
		if diff := cmp.Diff(s.Wait(), error(&way.ExitError{Code: 3})); diff != "" {
			t.Errorf("Wait (-got +want):\n%s", diff)
		}
	}
	if got, want := string(s.Stderr()), "noise\n"; got != want {
		t.Errorf("stderr %q, want %q", got, want)
	}
	local, remote := s.Addrs()
	if ap, err := netip.ParseAddrPort(remote.String()); err != nil || ap.Addr().String() != sv.ip || int(ap.Port()) != sv.port || local == nil {
		t.Errorf("addresses %v, %v", local, remote)
	}
	for range 2 {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Write([]byte("x")); err == nil {
		t.Error("Write to a closed session works")
	}
	if got := openFDs(t); got > before+1 { // the runtime's poller
		t.Errorf("%d descriptors, %d before", got, before)
	}
}

func TestExit(t *testing.T) {
	sv := startServer(t, serverOptions{})
	c := newSite(t, "", sv).client(t, Config{})
	if _, err := run(t, c, target("h1"), "true"); err != nil {
		t.Errorf("true: %v", err)
	}
	_, err := run(t, c, target("h1"), "kill -9 $$")
	// The login shell may run the last command in its place, or report its signal as a status.
	if got := err.Error(); got != "killed by SIGKILL" && got != "exit status 137" {
		t.Errorf("kill -9: %v", err)
	}
}

// Close ends a session whose command does not end, and a reader and a waiter of it.
func TestCloseWhileRunning(t *testing.T) {
	sv := startServer(t, serverOptions{})
	c := newSite(t, "", sv).client(t, Config{})
	s, err := c.Open(limited(t), target("h1"), "echo up; exec cat >/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	up := make([]byte, 3)
	if _, err := io.ReadFull(s, up); err != nil {
		t.Fatal(err)
	}
	read, wait := make(chan struct{}), make(chan error)
	go func() {
		io.Copy(io.Discard, s)
		close(read)
	}()
	go func() { wait <- s.Wait() }()
	s.Close()
	<-read
	if err := <-wait; err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("Wait: %v, want that it is closed", err)
	}
}
