package sshway

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	xknownhosts "golang.org/x/crypto/ssh/knownhosts"
	"golang.org/x/sys/unix"
)

// BenchmarkOpen is a connection, a session and its end. cpu-ms/op is what the client takes, the server's processes
// are others.
func BenchmarkOpen(b *testing.B) {
	sv := startServer(b, serverOptions{})
	c := newSite(b, "", sv).client(b, Config{})
	open := func() {
		s, err := c.Open(limited(b), target("h1"), "true")
		if err != nil {
			b.Fatal(err)
		}
		s.Close()
	}
	open() // reads configuration, known hosts and key
	begin := cpuTime(b)
	n := 0
	for b.Loop() {
		open()
		n++
	}
	b.ReportMetric(float64(cpuTime(b)-begin)/float64(time.Millisecond)/float64(n), "cpu-ms/op")
}

// BenchmarkResolve is the evaluation of a configuration with 1,000 hosts for one of them.
func BenchmarkResolve(b *testing.B) {
	text := ""
	for range 1000 {
		text += "Host other*\n HostName 10.0.0.1\n User x\n IdentityFile ~/.ssh/k\n"
	}
	sts, err := parseConfig(text, "file")
	if err != nil {
		b.Fatal(err)
	}
	who := account{name: "u", home: "/home/u", uid: "1000"}
	for b.Loop() {
		if _, err := resolve(b.Context(), sts, "none", who, target("a")); err != nil {
			b.Fatal(err)
		}
	}
}

func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkSend is 16 MiB to a host, about what gorun itself is.
func BenchmarkSend(b *testing.B) {
	sv := startServer(b, serverOptions{})
	s, err := newSite(b, "", sv).client(b, Config{}).Open(limited(b), target("h1"), "exec cat >/dev/null")
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	data := make([]byte, 16<<20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := s.Write(data); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHostKey is the check of one host's key against 5,000 hashed lines.
func BenchmarkHostKey(b *testing.B) {
	dir := b.TempDir()
	key := newKey(b, filepath.Join(dir, "k"), "ed25519", "")
	var text strings.Builder
	for i := range 5000 {
		text.WriteString(xknownhosts.HashHostname(fmt.Sprintf("10.0.%d.%d", i/256, i%256)) + " " + key.authorized())
	}
	write(b, filepath.Join(dir, "known"), text.String())
	o := &options{hostName: "10.0.3.3", port: 22, userKnownHosts: []string{filepath.Join(dir, "known")}}
	var keys knownKeys
	for b.Loop() {
		c, err := newHostKeyCheck(&keys, hop{target("a"), o}, Config{})
		if err != nil {
			b.Fatal(err)
		}
		if err := c.callback("", &net.TCPAddr{}, key.signer.PublicKey()); err != nil || len(c.algorithms()) != 1 {
			b.Fatal(err)
		}
	}
}
