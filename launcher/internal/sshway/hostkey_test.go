package sshway

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
	"golang.org/x/crypto/ssh"
	xknownhosts "golang.org/x/crypto/ssh/knownhosts"
)

func TestUnknownHostKey(t *testing.T) {
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	write(t, st.knownHosts(), "")
	c := st.client(t, Config{})
	e := mustFail(t, c, target("h1"), way.PhaseHostKey,
		"unknown key ssh-ed25519 "+ssh.FingerprintSHA256(sv.hostKeys[0].signer.PublicKey()), sv.knownName()+" is in none of "+st.knownHosts(), "--accept-new-host-keys")
	if temporary(e) {
		t.Error("an unknown host key is worth another try")
	}
	// The advice works as printed.
	advice := e.Advice
	start, end := strings.Index(advice, "ssh-keyscan"), strings.Index(advice, " (or")
	if start < 0 || end < 0 {
		t.Fatalf("advice %q", advice)
	}
	program(t, "ssh-keyscan")
	if out, err := exec.Command("/bin/sh", "-c", advice[start:end]).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", advice[start:end], err, out)
	}
	mustRun(t, st.client(t, Config{}), target("h1"))
}

func TestChangedHostKey(t *testing.T) {
	sv := startServer(t, serverOptions{})
	for _, accept := range []bool{false, true} {
		st := newSite(t, "", sv)
		other := newKey(t, filepath.Join(st.home, "other"), "ed25519", "")
		text := "# comment\n" + sv.knownName() + " " + other.authorized()
		write(t, st.knownHosts(), text)
		e := mustFail(t, st.client(t, Config{AcceptNewHostKeys: accept}), target("h1"), way.PhaseHostKey,
			"the key has changed", st.knownHosts()+":2 (ssh-ed25519)", "ssh-keygen -f "+st.knownHosts()+" -R '"+sv.knownName()+"'")
		if got, err := os.ReadFile(st.knownHosts()); string(got) != text || err != nil {
			t.Errorf("known_hosts was changed to %q, %v", got, err)
		}
		// The advice works as printed.
		start, end := strings.Index(e.Advice, "ssh-keygen"), strings.Index(e.Advice, ";")
		if out, err := exec.Command("/bin/sh", "-c", e.Advice[start:end]).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", e.Advice[start:end], err, out)
		}
		mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseHostKey, "unknown key")
	}
}

func TestKnownHostsForms(t *testing.T) {
	sv := startServer(t, serverOptions{hostKeys: []string{"ed25519", "ecdsa", "rsa"}})
	ed, ec, rs := sv.hostKeys[0].authorized(), sv.hostKeys[1].authorized(), sv.hostKeys[2].authorized()
	stranger := newKey(t, filepath.Join(t.TempDir(), "k"), "ed25519", "").authorized()
	name := sv.knownName()
	for _, c := range []struct {
		name, config, known string
		fails               string // text of the error; "" if it connects
	}{
		{"only ecdsa known", "", name + " " + ec, ""},
		{"only rsa known", "", name + " " + rs, ""},
		{"all known", "", name + " " + rs + name + " " + ec + name + " " + ed, ""},
		{"hashed", "", xknownhosts.HashHostname(name) + " " + ed, ""},
		{"hashed of another", "", xknownhosts.HashHostname("[127.0.0.2]:1") + " " + ed, "unknown key"},
		{"pattern", "", fmt.Sprintf("[127.0.*]:%d ", sv.port) + stranger, "changed"},
		{"wildcard without port", "", "127.* " + ed, ""},
		{"name without port", "", sv.ip + " " + ed, ""},
		{"another key without port", "", sv.ip + " " + stranger, "unknown key"},
		{"another key without port, right one with", "", sv.ip + " " + stranger + name + " " + ed, ""},
		{"negated", "", "!" + name + ",!" + sv.ip + ",* " + ed, "unknown key"},
		{"several names", "", "a,b," + name + ",c " + ed, ""},
		{"second line right", "", name + " " + stranger + name + " " + ed, ""},
		{"alias", "HostKeyAlias the-host", "the-host " + ed, ""},
		{"alias of another", "HostKeyAlias the-host", name + " " + ed, "the-host is in none of"},
		{"revoked", "", name + " " + ed + "@revoked * " + ed, "marked @revoked at"},
		{"garbage lines", "", "\n# x\nnonsense\n" + name + " ssh-ed25519 AAAA\n" + name + " future-type AAAAC3\n" + name + " " + ed, ""},
		{"crlf", "", strings.ReplaceAll(name+" "+ed, "\n", "\r\n"), ""},
		{"two files", "UserKnownHostsFile %d/.ssh/none %d/.ssh/known_hosts", name + " " + ed, ""},
		{"no file", "UserKnownHostsFile none\nGlobalKnownHostsFile none", name + " " + ed, "unknown key"},
		{"dev null", "UserKnownHostsFile /dev/null\nGlobalKnownHostsFile /dev/null", "", "unknown key"},
		{"global file", "UserKnownHostsFile none\nGlobalKnownHostsFile %d/.ssh/known_hosts", name + " " + ed, ""},
		{"strict no is not followed", "StrictHostKeyChecking no", "", "unknown key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := newSite(t, c.config, sv)
			write(t, st.knownHosts(), c.known)
			cl := st.client(t, Config{})
			if c.fails == "" {
				mustRun(t, cl, target("h1"))
				return
			}
			mustFail(t, cl, target("h1"), way.PhaseHostKey, c.fails)
		})
	}
}

// The server has no key of a known type: it can't be compared.
func TestHostKeyTypeMissing(t *testing.T) {
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	write(t, st.knownHosts(), sv.knownName()+" "+newKey(t, filepath.Join(st.home, "k"), "ecdsa", "").authorized())
	for _, accept := range []bool{false, true} {
		mustFail(t, st.client(t, Config{AcceptNewHostKeys: accept}), target("h1"), way.PhaseHostKey, "key types known for it", "ssh-keyscan")
	}
}

// A host whose key is signed by a known authority.
func TestHostCertificate(t *testing.T) {
	dir := t.TempDir()
	ca := newKey(t, filepath.Join(dir, "ca"), "ed25519", "")
	host := newKey(t, filepath.Join(dir, "host"), "ed25519", "")
	certify(t, ca, host, ssh.HostCert, []string{"127.0.0.1"})
	sv := startServer(t, serverOptions{lines: "HostKey " + host.file + "\nHostCertificate " + host.file + "-cert.pub"})
	for _, c := range []struct {
		name, known, fails string
	}{
		{"authority", "@cert-authority " + sv.knownName() + " " + ca.authorized(), ""},
		{"authority of all", "@cert-authority * " + ca.authorized(), ""},
		{"authority of others", "@cert-authority *.example.org " + ca.authorized(), "unknown key"},
		{"bare key", sv.knownName() + " " + host.authorized(), ""},
		{"another authority", "@cert-authority * " + host.authorized(), "the certificate"},
		{"revoked authority", "@cert-authority * " + ca.authorized() + "@revoked * " + ca.authorized(), "revoked"},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := newSite(t, "", sv)
			write(t, st.knownHosts(), c.known)
			cl := st.client(t, Config{})
			if c.fails == "" {
				mustRun(t, cl, target("h1"))
				return
			}
			mustFail(t, cl, target("h1"), way.PhaseHostKey, c.fails)
		})
	}
}

// certify writes a certificate of key beside it.
func certify(t testing.TB, ca, key keyPair, kind uint32, principals []string) {
	t.Helper()
	cert := &ssh.Certificate{
		Key: key.signer.PublicKey(), CertType: kind, KeyId: "the-id", ValidPrincipals: principals, ValidBefore: ssh.CertTimeInfinity,
		Permissions: ssh.Permissions{Extensions: map[string]string{}},
	}
	if kind == ssh.UserCert {
		cert.Permissions.Extensions["permit-pty"] = ""
	}
	if err := cert.SignCert(rand.Reader, ca.signer); err != nil {
		t.Fatal(err)
	}
	write(t, key.file+"-cert.pub", string(ssh.MarshalAuthorizedKey(cert)))
}

// An authority is known for all hosts, and this one has no certificate: its key is unknown, or known, as any other.
func TestAuthorityWithoutCertificate(t *testing.T) {
	sv := startServer(t, serverOptions{})
	st := newSite(t, "", sv)
	line := "@cert-authority * " + newKey(t, filepath.Join(st.home, "ca"), "ed25519", "").authorized()
	write(t, st.knownHosts(), line)
	mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseHostKey, "unknown key")
	mustRun(t, st.client(t, Config{AcceptNewHostKeys: true}), target("h1"))
	mustRun(t, st.client(t, Config{}), target("h1"))
	write(t, st.knownHosts(), line+sv.knownName()+" "+newKey(t, filepath.Join(st.home, "k"), "ed25519", "").authorized())
	mustFail(t, st.client(t, Config{AcceptNewHostKeys: true}), target("h1"), way.PhaseHostKey, "changed", st.knownHosts()+":2")
}

func TestAcceptNewHostKeys(t *testing.T) {
	sv := startServer(t, serverOptions{})
	for _, c := range []struct {
		name, config string
		accept       bool
		before       string
	}{
		{"flag", "", true, ""},
		{"configuration", "StrictHostKeyChecking accept-new", false, ""},
		{"no file yet", "UserKnownHostsFile %d/.ssh/new/known", true, ""},
		{"hashed", "HashKnownHosts yes", true, ""},
		{"last line without end", "", true, "# no end of line"},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := newSite(t, c.config, sv)
			write(t, st.knownHosts(), c.before)
			mustRun(t, st.client(t, Config{AcceptNewHostKeys: c.accept}), target("h1"))
			file := st.knownHosts()
			if strings.Contains(c.config, "/new/") {
				file = filepath.Join(st.home, ".ssh/new/known")
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if hashed := strings.HasPrefix(string(text), "|1|"); hashed != (c.name == "hashed") {
				t.Errorf("known_hosts: %s", text)
			}
			// OpenSSH finds it, and so does a client that accepts nothing new, when that is not in the configuration.
			if out, err := exec.Command(program(t, "ssh-keygen"), "-f", file, "-F", sv.knownName()).CombinedOutput(); err != nil {
				t.Errorf("ssh-keygen -F: %v: %s", err, out)
			}
			if c.config == "" {
				mustRun(t, st.client(t, Config{}), target("h1"))
			}
		})
	}
	// There is nowhere to keep it.
	st := newSite(t, "UserKnownHostsFile none", sv)
	mustFail(t, st.client(t, Config{AcceptNewHostKeys: true}), target("h1"), way.PhaseHostKey, "UserKnownHostsFile is none")
}

// Several clients add the keys of several hosts at once: each key is there once, on a line of its own.
func TestAcceptNewAtOnce(t *testing.T) {
	sv := []*server{startServer(t, serverOptions{}), startServer(t, serverOptions{})}
	st := newSite(t, "", sv...)
	write(t, st.knownHosts(), "")
	clients := []*Client{st.client(t, Config{AcceptNewHostKeys: true}), st.client(t, Config{AcceptNewHostKeys: true})}
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			s, err := clients[i%2].Open(limited(t), target([]string{"h1", "h2"}[i/2%2]), "true")
			if err != nil {
				t.Error(err)
				return
			}
			s.Close()
		})
	}
	all.Wait()
	got, err := os.ReadFile(st.knownHosts())
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(got), "\n")
	want := []string{sv[0].known(), sv[1].known(), ""}
	if lines[0] != want[0] {
		want[0], want[1] = want[1], want[0]
	}
	for i, w := range want { // what ssh-keygen writes has a comment, ours has none
		want[i] = strings.Join(strings.Fields(w), " ")
		if i < len(lines) {
			lines[i] = strings.TrimSpace(lines[i])
		}
	}
	if diff := cmp.Diff(lines, want); diff != "" {
		t.Errorf("known_hosts (-got +want):\n%s", diff)
	}
}

// Two servers at one address are two hosts, and two names of one server are two targets.
func TestTwoServersOneAddress(t *testing.T) {
	a, b := startServer(t, serverOptions{}), startServer(t, serverOptions{})
	st := newSite(t, "Host also-h1\n HostName "+a.ip+"\n Port "+fmt.Sprint(a.port)+"\n IdentityFile "+a.key.file, a, b)
	c := st.client(t, Config{})
	ports := map[string]bool{}
	for _, name := range []string{"h1", "h2", "also-h1"} {
		out, err := run(t, c, target(name), "echo $SSH_CONNECTION")
		if err != nil {
			t.Fatal(err)
		}
		f := strings.Fields(out)
		if len(f) != 4 {
			t.Fatalf("SSH_CONNECTION %q", out)
		}
		ports[name+" "+f[3]] = true
	}
	want := map[string]bool{fmt.Sprint("h1 ", a.port): true, fmt.Sprint("h2 ", b.port): true, fmt.Sprint("also-h1 ", a.port): true}
	if diff := cmp.Diff(ports, want); diff != "" {
		t.Errorf("servers reached (-got +want):\n%s", diff)
	}
	// The key of one does not do for the other.
	write(t, st.knownHosts(), a.knownName()+" "+b.hostKeys[0].authorized())
	mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseHostKey, "changed")
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		citest.Lacking(t, "IPv6: %v", err)
	}
	l.Close()
	sv := startServer(t, serverOptions{ip: "::1"})
	st := newSite(t, "IdentityFile "+sv.key.file, sv)
	c := st.client(t, Config{})
	mustRun(t, c, target("h1"))
	mustRun(t, c, way.Target{Name: fmt.Sprintf("[::1]:%d", sv.port), Addr: "::1", Port: sv.port})
	write(t, st.config, "AddressFamily inet\nIdentityFile "+sv.key.file)
	mustFail(t, st.client(t, Config{}), way.Target{Name: "x", Addr: "::1", Port: sv.port}, way.PhaseConnect, "::1")
	// With a zone: an address of a link needs one, and loopback takes one too.
	write(t, st.config, "IdentityFile "+sv.key.file)
	mustRun(t, st.client(t, Config{AcceptNewHostKeys: true}), way.Target{Name: "x", Addr: "::1%lo", Port: sv.port})
}

// known_hosts that another process holds is waited for, but not for ever.
func TestKnownHostsLocked(t *testing.T) {
	file := filepath.Join(t.TempDir(), "known_hosts")
	write(t, file, "")
	open := func() *os.File {
		f, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	held, mine := open(), open()
	defer mine.Close()
	if err := lock(held, time.Second); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(lock(mine, 50*time.Millisecond)), file+" has been locked by another process for 50ms"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	free := time.AfterFunc(50*time.Millisecond, func() { held.Close() })
	defer free.Stop()
	if err := lock(mine, 20*time.Second); err != nil {
		t.Error(err)
	}
}
