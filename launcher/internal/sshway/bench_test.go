package sshway

import (
	"testing"
	"time"

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
