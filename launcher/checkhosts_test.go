package launcher

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

func TestSkew(t *testing.T) {
	at := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	for _, tt := range []struct {
		name  string
		its   time.Duration // since at, which is when it was asked
		came  time.Duration
		want  Skew
		fault string
	}{
		{"alike", 5 * time.Millisecond, 10 * time.Millisecond, Skew{0, 5 * time.Millisecond}, ""},
		{"ahead", 3 * time.Second, 100 * time.Millisecond, Skew{2950 * time.Millisecond, 50 * time.Millisecond}, "its clock is 3s ahead of this host's"},
		{"behind", -2 * time.Second, 0, Skew{-2 * time.Second, 0}, "its clock is 2s behind this host's"},
		{"a slow answer tells less", 3 * time.Second, 5 * time.Second, Skew{500 * time.Millisecond, 2500 * time.Millisecond}, ""},
		{"a little", time.Second, 0, Skew{time.Second, 0}, ""},
	} {
		got := skew(at, at.Add(tt.its), at.Add(tt.came))
		if d := cmp.Diff(got, tt.want); d != "" {
			t.Errorf("%s: got - want +:\n%s", tt.name, d)
		}
		if fault := got.fault(); fault != tt.fault {
			t.Errorf("%s: got %q, want %q", tt.name, fault, tt.fault)
		}
	}
}

func TestProbe(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	key := []byte("key")
	on := netip.MustParseAddr("127.0.0.1")
	p, err := newProber(key, 3, on, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	tcp := func(serve func(net.Conn)) string { // it answers nothing on UDP
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				serve(c)
				c.Close()
			}
		}()
		return l.Addr().String()
	}
	onlyTCP := tcp(func(c net.Conn) {
		q := make([]byte, 1+nonceSize)
		if _, err := c.Read(q); err == nil {
			c.Write(proof(key, 3, q[1:]))
		}
	})
	peers := []agentwire.Peer{
		{Host: 3, Addr: p.tcp.Addr().String()}, {Host: 4, Addr: p.tcp.Addr().String()}, {Host: 3, Addr: tcp(func(net.Conn) {})}, {Host: 3, Addr: "127.0.0.1:1"}, {Host: 3, Addr: onlyTCP}, {Host: 3, Addr: "nonsense"},
	}
	got := make([]agentwire.ReachedHost, len(peers))
	told := 0
	reach(ctx, key, peers, func(some []agentwire.ReachedHost) {
		for _, r := range some {
			told++
			got[slices.Index(peers, agentwire.Peer{Host: r.Host, Addr: r.Addr})] = r
		}
	})
	if told != len(peers) {
		t.Fatalf("%d of %d results were told", told, len(peers))
	}
	want := []string{"", "tcp: something else answers there", "tcp: (something else answers there|connection reset by peer)", "tcp: connection refused", "udp: connection refused", "tcp: .*missing port.*"}
	for i, r := range got {
		if !regexp.MustCompile("^" + want[i] + "$").MatchString(r.Err) {
			t.Errorf("%d: %q, want %s", i, r.Err, want[i])
		}
		if (r.Took > 0) != (r.Err == "") {
			t.Errorf("%d: %v, %q", i, r.Took, r.Err)
		}
	}
	if _, err := probe(ctx, []byte("other"), 3, p.tcp.Addr().String()); fmt.Sprint(err) != "tcp: something else answers there" {
		t.Errorf("with another key: %v", err)
	}
	port := int(netip.MustParseAddrPort(p.tcp.Addr().String()).Port())
	if _, err := newProber(key, 3, on, port, port); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("no port from %d to %d is free on 127.0.0.1 (--port-range): ", port, port)) {
		t.Errorf("a port that is taken: %v", err)
	}
}

// checked is gorun check of test hosts.
type checked struct {
	OK    bool
	Hosts []struct {
		Name     string
		Reached  bool
		Addr     string `json:"address"`
		Chosen   string
		Sent     bool `json:"agent_sent"`
		Reach    []HostReach
		Host     string
		Programs []struct{ Same, Sent bool }
		Faults   []HostFault
	}
	Faults []HostFault
}

func check(t *testing.T, h *testhosts.Hosts, args ...string) (*checked, int) {
	t.Helper()
	file, err := gorunFile()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := h.Launcher(ctx, file, append([]string{"check", "--json", "--ssh-config", h.SSHConfig}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if _, ended := err.(*exec.ExitError); err != nil && !ended {
		t.Fatalf("%v: %s", err, errs.String())
	}
	r := &checked{}
	if out.Len() > 0 {
		if err := json.Unmarshal(out.Bytes(), r); err != nil {
			t.Fatalf("%v: %s%s", err, out.String(), errs.String())
		}
	}
	return r, cmd.ProcessState.ExitCode()
}

// faults are what would stop a job on a host, or hamper it.
func (c *checked) faults(host int, stops bool) string {
	var all []string
	for _, f := range c.Hosts[host].Faults {
		if f.Advice == "" {
			all = append(all, "NO ADVICE")
		}
		if f.Stops == stops {
			all = append(all, f.What)
		}
	}
	return strings.Join(all, "\n")
}

func TestCheckHosts(t *testing.T) {
	beside(t) // what is sent, first, is many times as slow to make ready under the race detector
	h := newHosts(t, 5, testhosts.Options{})
	all := "h1,h2,h3,h4,h5"
	t.Run("well", func(t *testing.T) {
		for _, sent := range []bool{true, false} {
			c, code := check(t, h, "-H", all)
			if !c.OK || code != 0 {
				t.Errorf("exit code %d: %+v", code, c)
			}
			for i, host := range c.Hosts {
				if !host.Reached || host.Sent != sent || host.Host != host.Name || len(host.Reach) != 4 || !strings.HasPrefix(host.Addr, h.Hosts[i].Addr.String()+":") {
					t.Errorf("host %d: %+v", i, host)
				}
				for _, r := range host.Reach {
					if r.Err != "" {
						t.Errorf("%s to %s: %s", host.Name, r.Host, r.Err)
					}
				}
			}
		}
		clean(t, h)
	})
	t.Run("job", func(t *testing.T) {
		dir := t.TempDir()
		prog := filepath.Join(dir, "prog")
		if err := os.WriteFile(prog, []byte("#!/bin/sh\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		for i := range 2 {
			if err := os.MkdirAll(h.Path(i, "/home/data"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		job := filepath.Join(dir, "job.toml")
		if err := os.WriteFile(job, fmt.Appendf(nil, "[job]\nprogram = %q\nwdir = \"/home/data\"\nnp = 1\n[[host]]\nname = \"h1\"\n[[host]]\nname = \"h3\"\n", prog), 0o600); err != nil {
			t.Fatal(err)
		}
		c, code := check(t, h, job)
		if code != 1 || len(c.Hosts) != 2 {
			t.Fatalf("exit code %d: %+v", code, c)
		}
		for i, host := range c.Hosts {
			if len(host.Programs) != 1 || !host.Programs[0].Sent {
				t.Errorf("program on host %d: %+v", i, host.Programs)
			}
		}
		if got := c.faults(0, true); got != "" {
			t.Errorf("h1: %s", got)
		}
		if got, want := c.faults(1, true), "working directory /home/data: not there"; got != want {
			t.Errorf("h3: got %q, want %q", got, want)
		}
		if c, code = check(t, h, "--stage", "none", job); code != 1 || c.faults(0, true) != "run "+prog+": no such file or directory" {
			t.Errorf("--stage none: exit code %d, %q", code, c.faults(0, true))
		}
	})
	t.Run("faults", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short: waits for a host that is down")
		}
		if err := h.Cut(1); err != nil {
			t.Fatal(err)
		}
		defer h.Join(1)
		known := filepath.Join(h.Dir, "known_hosts")
		text, err := os.ReadFile(known)
		if err != nil {
			t.Fatal(err)
		}
		other, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", filepath.Join(t.TempDir(), "key")).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, other)
		}
		spoiled := regexp.MustCompile(`(?m)^(\[(10\.77\.0\.3|h3)\]\S* \S+ \S{40})\S{8}`).ReplaceAll(text, []byte("${1}AAAAAAAA"))
		if err := os.WriteFile(known, spoiled, 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.WriteFile(known, text, 0o600)
		accounts := filepath.Join(h.Dir, "h4", "passwd")
		passwd, err := os.ReadFile(accounts)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(accounts, bytes.Replace(passwd, []byte("/root:/bin/sh"), []byte("/root:/usr/sbin/nologin"), 1), 0o644); err != nil {
			t.Fatal(err)
		}
		defer os.WriteFile(accounts, passwd, 0o644)
		fill := h.Command(t.Context(), 4, "sh", "-c", "cat /dev/zero >/root/full 2>/dev/null")
		fill.Run() // until the disk is full
		defer os.Remove(h.Path(4, "/root/full"))
		c, code := check(t, h, "-H", all, "--connect-timeout", "3s")
		if !c.Hosts[0].Reached || !c.Hosts[4].Reached { // a busy machine: the time is for all hosts
			c, code = check(t, h, "-H", all, "--connect-timeout", "30s")
		}
		if code != 1 || c.OK {
			t.Fatalf("exit code %d, %+v", code, c)
		}
		for i, want := range []string{
			"", `connect: dial (tcp )?10\.77\.0\.2:22022: .*(no route to host|no answer within \d+s|i/o timeout).*`, `host key: .*`, `start the agent: .*; it said: .*not available.*`, "",
		} {
			if got := c.faults(i, true); !regexp.MustCompile("^" + want + "$").MatchString(got) {
				t.Errorf("host %d: got %q, want %s", i+1, got, want)
			}
			if c.Hosts[i].Reached != (want == "") {
				t.Errorf("host %d: reached: %v", i+1, c.Hosts[i].Reached)
			}
		}
		if got, want := c.faults(4, false), "cache directory /root/.cache/gorun has 0 bytes left"; got != want {
			t.Errorf("host 5: got %q, want %q", got, want)
		}
	})
	t.Run("apart", func(t *testing.T) {
		if err := h.Blackhole(0, 4, true); err != nil {
			t.Fatal(err)
		}
		defer h.Blackhole(0, 4, false)
		c, code := check(t, h, "-H", "h1,h3,h5", "--port-range", "7000-7003")
		if code != 1 {
			t.Fatalf("exit code %d, %+v", code, c)
		}
		if got := c.faults(0, true); !regexp.MustCompile(`^it does not reach h5 at 10\.77\.0\.5:7000: tcp: .+$`).MatchString(got) {
			t.Errorf("h1: %q", got)
		}
		if got := c.faults(1, true); got != "" {
			t.Errorf("h3: %q", got)
		}
	})
	clean(t, h)
}
