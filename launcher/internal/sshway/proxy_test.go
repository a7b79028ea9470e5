package sshway

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// host is a Host block for a server.
func host(name string, sv *server, lines string) string {
	return fmt.Sprintf("Host %s\n HostName %s\n Port %d\n IdentityFile %s\n %s\n", name, sv.ip, sv.port, sv.key.file, lines)
}

func TestProxyJump(t *testing.T) {
	a, b, c := startServer(t, serverOptions{}), startServer(t, serverOptions{}), startServer(t, serverOptions{})
	st := newSite(t, "", a, b, c)
	closed := startServer(t, serverOptions{lines: "AllowTcpForwarding no"})
	write(t, st.knownHosts(), a.known()+b.known()+c.known()+closed.known())
	for _, x := range []struct {
		name, config string
		through      string // the servers that let someone in
		phase        string // "" if it connects
		texts        []string
	}{
		{"one", host("j", a, "") + host("t", c, "ProxyJump j"), "ac", "", nil},
		{"two in one list", host("j", a, "") + host("k", b, "") + host("t", c, "ProxyJump j,k"), "abc", "", nil},
		{"each through the next", host("j", a, "") + host("k", b, "ProxyJump j") + host("t", c, "ProxyJump k"), "abc", "", nil},
		{"written out", fmt.Sprintf("IdentityFile %s\nIdentityFile %s\nHost t\nHostName %s\nPort %d\nProxyJump ssh://%s@%s:%d", a.key.file, c.key.file, c.ip, c.port, me(t), a.ip, a.port), "ac", "", nil},
		{"under Host *", host("j", a, "") + host("t", c, "") + "Host *\n ProxyJump j\n", "ac", "", nil},
		{"none", host("t", c, "ProxyJump none") + "Host *\n ProxyJump j\n", "c", "", nil},
		{"circle", host("j", a, "ProxyJump k") + host("k", b, "ProxyJump j") + host("t", c, "ProxyJump j"), "", way.PhaseConfigure, []string{"circle"}},
		{"jump host unknown", host("t", c, "ProxyJump nowhere.invalid"), "", way.PhaseResolve, []string{"jump host nowhere.invalid", "name nowhere.invalid"}},
		{"jump host refuses", host("j", a, "Port 1\n HostName 127.0.0.1") + host("t", c, "ProxyJump 127.0.0.1:1"), "", way.PhaseConnect, []string{"jump host 127.0.0.1:1: dial 127.0.0.1:1: connection refused"}},
		{"key of the jump host refused", fmt.Sprintf("Host j\n HostName %s\n Port %d\n IdentityFile %s\n", a.ip, a.port, c.key.file) + host("t", c, "ProxyJump j"), "", way.PhaseAuthenticate, []string{"jump host j", "no key was accepted"}},
		{"no forwarding", host("j", closed, "") + host("t", c, "ProxyJump j"), "", way.PhaseConnect, []string{"through j", "AllowTcpForwarding on j"}},
		{"target refuses", host("j", a, "") + fmt.Sprintf("Host t\n HostName 127.0.0.1\n Port %d\n ProxyJump j", freePort(t, "127.0.0.1")), "a", way.PhaseConnect, []string{"through j", "does j reach it?"}},
		{"bad", host("t", c, "ProxyJump a:b:c:d@"), "", way.PhaseConfigure, []string{"ProxyJump a:b:c:d@", "no host"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			write(t, st.config, x.config)
			cl := st.client(t, Config{})
			before := openSockets(t)
			var logins [3]int
			for i, sv := range []*server{a, b, c} {
				logins[i] = sv.logins()
			}
			if x.phase == "" {
				mustRun(t, cl, target("t"))
			} else {
				mustFail(t, cl, target("t"), x.phase, x.texts...)
			}
			for i, sv := range []*server{a, b, c} {
				sv.wantLogins(t, logins[i]+strings.Count(x.through, "abc"[i:i+1]))
			}
			if got := openSockets(t); got > before {
				t.Errorf("%d sockets, %d before", got, before)
			}
		})
	}
	t.Run("addresses", func(t *testing.T) {
		write(t, st.config, host("j", a, "")+host("t", c, "ProxyJump j"))
		s, err := st.client(t, Config{}).Open(limited(t), target("t"), "cat")
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if l, r := s.Addrs(); l != nil || r != nil {
			t.Errorf("addresses %v, %v: those of the jump host are not the host's", l, r)
		}
	})
	t.Run("the target's key counts", func(t *testing.T) {
		write(t, st.config, host("j", a, "")+host("t", c, "ProxyJump j"))
		write(t, st.knownHosts(), a.known()+c.knownName()+" "+b.hostKeys[0].authorized())
		mustFail(t, st.client(t, Config{}), target("t"), way.PhaseHostKey, "changed")
		// A scan would not go through the jump host.
		write(t, st.knownHosts(), a.known())
		mustFail(t, st.client(t, Config{}), target("t"), way.PhaseHostKey, "unknown key", "ssh -F "+st.config+" t true")
		write(t, st.knownHosts(), c.known())
		mustFail(t, st.client(t, Config{}), target("t"), way.PhaseHostKey, "jump host j: unknown key", fmt.Sprintf("ssh-keyscan -p %d %s >> ", a.port, a.ip))
	})
}

// A jump host that stops takes its sessions with it: keep-alive finds it, Close does not wait for it.
func TestJumpHostStops(t *testing.T) {
	t.Parallel() // it waits
	a, c := startServer(t, serverOptions{}), startServer(t, serverOptions{})
	st := newSite(t, "")
	write(t, st.knownHosts(), a.known()+c.known())
	write(t, st.config, host("j", a, "")+host("t", c, "ProxyJump j\n ServerAliveInterval 1\n ServerAliveCountMax 1"))
	cl := st.client(t, Config{})
	for _, closeIt := range []bool{false, true} {
		s, err := cl.Open(limited(t), target("t"), "cat")
		if err != nil {
			t.Fatal(err)
		}
		stopped := stopSessions(t, a)
		written := make(chan struct{})
		go func() { // fills every buffer
			for {
				if _, err := s.Write(make([]byte, 1<<16)); err != nil {
					break
				}
			}
			close(written)
		}()
		if closeIt {
			s.Close()
		} else if err := s.Wait(); err == nil || !strings.Contains(err.Error(), "connection lost") {
			t.Errorf("%v, want that the connection is lost", err)
		}
		s.Close()
		<-written
		for _, pid := range stopped {
			syscall.Kill(pid, syscall.SIGCONT)
		}
	}
}

// stopSessions stops the processes of sshd's connections.
func stopSessions(t *testing.T, sv *server) (pids []int) {
	t.Helper()
	// Depth first: a session's process is the child of the monitor.
	var walk func(pid int)
	walk = func(pid int) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if err != nil {
			citest.Lacking(t, "a kernel that lists children: %v", err)
		}
		for _, f := range strings.Fields(string(b)) {
			var child int
			fmt.Sscan(f, &child)
			if syscall.Kill(child, syscall.SIGSTOP) == nil {
				pids = append(pids, child)
			}
			walk(child)
		}
	}
	walk(sv.pid)
	if len(pids) == 0 {
		t.Fatal("sshd has no connection")
	}
	return pids
}

func TestProxyCommand(t *testing.T) {
	sv := startServer(t, serverOptions{})
	bash := program(t, "bash")
	relay := filepath.Join(t.TempDir(), "relay")
	write(t, relay, "exec 3<>/dev/tcp/$1/$2 || exit 9\ncat <&3 &\ncat >&3\nkill $!\n")
	st := newSite(t, "")
	write(t, st.knownHosts(), sv.known())
	for _, x := range []struct {
		name, command string
		phase         string
		texts         []string
	}{
		{"relay", bash + " " + relay + " %h %p", "", nil},
		{"fails", "sh -c 'echo no way to %n >&2; exit 4'", way.PhaseConnect, []string{"ProxyCommand sh -c ", "exit status 4: no way to t", "by hand"}},
		{"missing", "/nonexistent/proxy %h", way.PhaseConnect, []string{"ProxyCommand /nonexistent/proxy 127.0.0.1: exit status 127"}},
		{"bad token", "nc %q", way.PhaseConfigure, []string{st.config + ":5: proxycommand nc %q: the token %q"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			before := openFDs(t)
			write(t, st.config, host("t", sv, "ProxyCommand "+x.command))
			cl := st.client(t, Config{})
			if x.phase == "" {
				mustRun(t, cl, target("t"))
			} else {
				mustFail(t, cl, target("t"), x.phase, x.texts...)
			}
			if got := openFDs(t); got > before+1 {
				t.Errorf("%d descriptors, %d before", got, before)
			}
		})
	}
	// It says nothing: the context ends it, and the process is gone.
	pidFile := filepath.Join(st.home, "pid")
	write(t, st.config, host("t", sv, "ProxyCommand sh -c 'echo $$ >"+pidFile+"; exec sleep 1000'"))
	mustEnd(t, st.client(t, Config{}), target("t"), way.PhaseConnect, "no ssh server spoke")
	b, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(b))); err == nil {
		t.Error("the proxy command is alive")
	}
	// It dies under a session.
	write(t, st.config, host("t", sv, "ProxyCommand "+bash+" -c 'echo $$ >"+pidFile+"; echo joined >&2; . "+relay+"' x %h %p"))
	s, err := st.client(t, Config{}).Open(limited(t), target("t"), "cat")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if b, err = os.ReadFile(pidFile); err != nil {
		t.Fatal(err)
	}
	var pid int
	fmt.Sscan(string(b), &pid)
	syscall.Kill(-pid, syscall.SIGKILL)
	if _, err := io.Copy(io.Discard, s); err != nil {
		t.Error(err)
	}
	if err := s.Wait(); err == nil || !strings.Contains(err.Error(), "the connection ended before the command") {
		t.Errorf("%v", err)
	}
	if got := string(s.Stderr()); got != "joined\n" {
		t.Errorf("stderr %q, want the proxy command's", got)
	}
}

func TestParseJump(t *testing.T) {
	for text, want := range map[string]way.Target{
		"a":                        {Name: "a", Addr: "a"},
		"u@a:22022":                {Name: "u@a:22022", User: "u", Addr: "a", Port: 22022},
		"ssh://u@a:1/":             {Name: "u@a:1", User: "u", Addr: "a", Port: 1},
		"[::1]:22":                 {Name: "[::1]:22", Addr: "::1", Port: 22},
		"u@[fe80::1%eth0]":         {Name: "u@[fe80::1%eth0]", User: "u", Addr: "fe80::1%eth0"},
		"fe80::1%eth0":             {Name: "fe80::1%eth0", Addr: "fe80::1%eth0"},
		"user@domain.example@host": {Name: "user@domain.example@host", User: "user@domain.example", Addr: "host"},
	} {
		got, err := parseJump(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
		}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("%q (-got +want):\n%s", text, diff)
		}
	}
	for _, text := range []string{"", "u@", "a:0", "a:65536", "a:x", "[::1", "[::1]22", "[::1]:"} {
		if got, err := parseJump(text); err == nil {
			t.Errorf("%q: %+v, want an error", text, got)
		}
	}
}

// OpenSSH's own client as --rsh.
func TestRSH(t *testing.T) {
	ssh := program(t, "ssh")
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	// Its home is the account's, not the test's: every file is named.
	text, err := os.ReadFile(st.config)
	if err != nil {
		t.Fatal(err)
	}
	write(t, st.config, "UserKnownHostsFile "+st.knownHosts()+"\n"+string(text))
	w, err := way.NewCommand(ssh + " -F '" + st.config + "'")
	if err != nil {
		t.Fatal(err)
	}
	mustRun(t, w, target("h1"))
	mustRun(t, w, way.Target{Name: "x", User: me(t), Addr: "h1", Port: sv.port})
	if _, err := run(t, w, target("h1"), "exit 3"); fmt.Sprint(err) != "exit status 3" {
		t.Errorf("exit 3: %v", err)
	}
	// It asks nothing: an unknown key ends it at once, and says so.
	write(t, st.knownHosts(), "")
	s, err := w.Open(limited(t), target("h1"), "true")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Wait(); fmt.Sprint(err) != "exit status 255" || !strings.Contains(string(s.Stderr()), "Host key verification failed") {
		t.Errorf("%v, stderr %q", err, s.Stderr())
	}
	// Its process ends with the session.
	write(t, st.knownHosts(), sv.known())
	s, err = w.Open(limited(t), target("h1"), "echo up; cat; sleep 5") // the end of its stdin does not end it
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(s, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if err := s.Wait(); err == nil {
		t.Error("a closed session ended well")
	}
}

// A master connection of OpenSSH stays behind the client: sessions through it end all the same.
func TestRSHMaster(t *testing.T) {
	ssh := program(t, "ssh")
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	dir, err := os.MkdirTemp("", "cm") // a socket's name must be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	text, err := os.ReadFile(st.config)
	if err != nil {
		t.Fatal(err)
	}
	write(t, st.config, "UserKnownHostsFile "+st.knownHosts()+"\nControlMaster auto\nControlPersist 60\nControlPath "+dir+"/s\n"+string(text))
	w, err := way.NewCommand(ssh + " -F '" + st.config + "'")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		exec.CommandContext(ctx, ssh, "-F", st.config, "-O", "exit", "h1").Run()
	}()
	for range 3 {
		mustRun(t, w, target("h1"))
	}
}
