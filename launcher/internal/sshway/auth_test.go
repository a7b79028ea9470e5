package sshway

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// serveAgent runs an agent that holds keys, until the test ends, and returns its socket.
func serveAgent(t testing.TB, keys ...agent.AddedKey) string {
	t.Helper()
	ring := agent.NewKeyring()
	for _, k := range keys {
		if err := ring.Add(k); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(t.TempDir(), "agent")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				agent.ServeAgent(ring, conn)
				conn.Close()
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		all.Wait()
	})
	return socket
}

func TestKeyKinds(t *testing.T) {
	for _, kind := range []string{"ed25519", "ecdsa", "rsa"} {
		t.Run(kind, func(t *testing.T) {
			key := newKey(t, filepath.Join(t.TempDir(), "id"), kind, "")
			// Permissions that OpenSSH's client would refuse.
			if err := os.Chmod(key.file, 0o644); err != nil {
				t.Fatal(err)
			}
			sv := startServer(t, serverOptions{key: &key})
			mustRun(t, newSite(t, "", sv).client(t, Config{}), target("h1"))
		})
	}
}

func TestDefaultKeyFiles(t *testing.T) {
	dir := t.TempDir()
	key := newKey(t, filepath.Join(dir, "k"), "ecdsa", "")
	sv := startServer(t, serverOptions{key: &key})
	st := newSite(t, "")
	write(t, st.config, fmt.Sprintf("Host h1\n HostName %s\n Port %d\n", sv.ip, sv.port))
	write(t, st.knownHosts(), sv.known())
	mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, "there is no key to offer", "ssh-keygen -t ed25519")
	newKey(t, filepath.Join(st.home, ".ssh/id_ed25519"), "ed25519", "")
	e := mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate,
		me(t)+" is not let in: no key was accepted of "+st.home+"/.ssh/id_ed25519", fmt.Sprintf("ssh-copy-id -i ~/.ssh/id_ed25519.pub -p %d %s@%s", sv.port, me(t), sv.ip))
	if temporary(e) {
		t.Error("a refused key is worth another try")
	}
	if err := os.Rename(key.file, filepath.Join(st.home, ".ssh/id_ecdsa")); err != nil {
		t.Fatal(err)
	}
	mustRun(t, st.client(t, Config{}), target("h1"))
}

func TestEncryptedKey(t *testing.T) {
	key := newKey(t, filepath.Join(t.TempDir(), "id"), "ed25519", "secret")
	sv := startServer(t, serverOptions{key: &key})
	st := newSite(t, "", sv)
	e := mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, key.file+" (encrypted)", "no agent runs")
	if want := "eval $(ssh-agent); ssh-add " + key.file; e.Advice != want {
		t.Errorf("advice %q, want %q", e.Advice, want)
	}
	// An agent that does not hold it, and none that answers.
	t.Setenv("SSH_AUTH_SOCK", serveAgent(t))
	e = mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate)
	if want := "ssh-add " + key.file; e.Advice != want {
		t.Errorf("advice %q, want %q", e.Advice, want)
	}
	t.Setenv("SSH_AUTH_SOCK", filepath.Join(st.home, "nobody"))
	mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, "the agent at "+st.home+"/nobody: ", "connect: no such file")
	// One that holds it; IdentitiesOnly does not shut it out.
	t.Setenv("SSH_AUTH_SOCK", serveAgent(t, agent.AddedKey{PrivateKey: key.secret}))
	mustRun(t, st.client(t, Config{}), target("h1"))
	only := newSite(t, "IdentitiesOnly yes", sv)
	mustRun(t, only.client(t, Config{}), target("h1"))
}

func TestAgent(t *testing.T) {
	dir := t.TempDir()
	key := newKey(t, filepath.Join(dir, "id"), "rsa", "") // with SHA-2, which the agent must be told
	sv := startServer(t, serverOptions{key: &key})
	strangers := []agent.AddedKey{}
	for i := range 7 { // more than a server lets one try
		strangers = append(strangers, agent.AddedKey{PrivateKey: newKey(t, filepath.Join(dir, fmt.Sprint(i)), "ed25519", "").secret, Comment: fmt.Sprint("stranger ", i)})
	}
	right := agent.AddedKey{PrivateKey: key.secret}
	plain := func(config string) *site {
		st := newSite(t, fmt.Sprintf("%s\nHost h1\n HostName %s\n Port %d\n", config, sv.ip, sv.port))
		write(t, st.knownHosts(), sv.known())
		return st
	}
	socket := serveAgent(t, right)
	many := serveAgent(t, append(append([]agent.AddedKey{}, strangers...), right)...)
	// Its private half is in the agent alone.
	publicOnly := filepath.Join(dir, "only.pub")
	write(t, publicOnly, key.authorized())

	for _, c := range []struct {
		name, config, socket string
		fails                []string
	}{
		{"any key of it", "", socket, nil},
		{"IdentityAgent", "IdentityAgent " + socket, "", nil},
		{"IdentityAgent variable", "IdentityAgent $THE_AGENT", "", nil},
		{"IdentityAgent none", "IdentityAgent none", socket, []string{"no key to offer"}},
		{"identities only, none named", "IdentitiesOnly yes", socket, []string{"no key to offer"}},
		{"public key named", "IdentitiesOnly yes\nIdentityFile " + publicOnly, many, nil},
		{"too many keys", "", many, []string{"Too many authentication failures", "the agent's ssh-ed25519 stranger 0", "IdentitiesOnly yes"}},
		{"too many keys, but one is named", "IdentityFile " + key.file, many, nil},
		{"public key named, agent without it", "IdentityFile " + publicOnly, serveAgent(t), []string{"the agent has not its private half"}},
		{"named and missing", "IdentityFile " + dir + "/missing", "", []string{dir + "/missing (not there)"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Setenv("SSH_AUTH_SOCK", c.socket)
			t.Setenv("THE_AGENT", socket)
			cl := plain(c.config).client(t, Config{})
			if c.fails == nil {
				mustRun(t, cl, target("h1"))
				return
			}
			mustFail(t, cl, target("h1"), way.PhaseAuthenticate, c.fails...)
		})
	}
}

// An agent that takes the question and never answers holds the opening to its context, and no longer.
func TestAgentThatHangs(t *testing.T) {
	sv := startServer(t, serverOptions{})
	socket := filepath.Join(t.TempDir(), "agent")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("SSH_AUTH_SOCK", socket)
	mustEnd(t, newSite(t, "", sv).client(t, Config{}), target("h1"), way.PhaseAuthenticate, "authentication did not end")
}

func TestUserCertificate(t *testing.T) {
	dir := t.TempDir()
	ca := newKey(t, filepath.Join(dir, "ca"), "ed25519", "")
	write(t, filepath.Join(dir, "ca.pub"), ca.authorized())
	sv := startServer(t, serverOptions{lines: "TrustedUserCAKeys " + ca.file + ".pub"})
	for _, kind := range []string{"ed25519", "rsa"} {
		key := newKey(t, filepath.Join(dir, "id_"+kind), kind, "")
		cfg := fmt.Sprintf("IdentityFile %s\nHost h1\n HostName %s\n Port %d\n", key.file, sv.ip, sv.port)
		st := newSite(t, "")
		write(t, st.config, cfg)
		write(t, st.knownHosts(), sv.known())
		mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, "no key was accepted of "+key.file)
		certify(t, ca, key, ssh.UserCert, []string{me(t)})
		mustRun(t, st.client(t, Config{}), target("h1"))

		// Elsewhere, named by CertificateFile.
		elsewhere := filepath.Join(st.home, "cert")
		if err := os.Rename(key.file+"-cert.pub", elsewhere); err != nil {
			t.Fatal(err)
		}
		write(t, st.config, "CertificateFile ~/cert\n"+cfg)
		mustRun(t, st.client(t, Config{}), target("h1"))

		// The private half is in the agent.
		t.Setenv("SSH_AUTH_SOCK", serveAgent(t, agent.AddedKey{PrivateKey: key.secret}))
		if err := os.Remove(key.file); err != nil {
			t.Fatal(err)
		}
		mustRun(t, st.client(t, Config{}), target("h1"))
		t.Setenv("SSH_AUTH_SOCK", "")

		// Of another user.
		key = newKey(t, key.file, kind, "")
		certify(t, ca, key, ssh.UserCert, []string{"somebody-else"})
		write(t, st.config, cfg)
		mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, "with certificate the-id")
	}
}

// The server takes no keys at all.
func TestPasswordOnly(t *testing.T) {
	sv := startServer(t, serverOptions{lines: "PubkeyAuthentication no\nPasswordAuthentication yes"})
	mustFail(t, newSite(t, "", sv).client(t, Config{}), target("h1"), way.PhaseAuthenticate, "the server wants password, gorun has keys only", "--rsh ssh")
}

// A key is not enough.
func TestTwoFactors(t *testing.T) {
	sv := startServer(t, serverOptions{lines: "PasswordAuthentication yes\nAuthenticationMethods publickey,password"})
	mustFail(t, newSite(t, "", sv).client(t, Config{}), target("h1"), way.PhaseAuthenticate, "the server wants password, gorun has keys only")
}

func TestUserRefused(t *testing.T) {
	sv := startServer(t, serverOptions{lines: "DenyUsers " + me(t)})
	mustFail(t, newSite(t, "", sv).client(t, Config{}), target("h1"), way.PhaseAuthenticate, "no key was accepted")
	mustFail(t, newSite(t, "", sv).client(t, Config{}), way.Target{Name: "nobody-here@h1", User: "nobody-here", Addr: "h1"}, way.PhaseAuthenticate, "nobody-here is not let in")
}

// A key file that is none is told apart from one that is encrypted.
func TestBrokenKeyFile(t *testing.T) {
	sv := startServer(t, serverOptions{})
	file := filepath.Join(t.TempDir(), "id")
	write(t, file, "-----BEGIN NONSENSE-----\n")
	st := newSite(t, "IdentityFile "+file)
	write(t, st.config, fmt.Sprintf("IdentityFile %s\nHost h1\n HostName %s\n Port %d\n", file, sv.ip, sv.port))
	write(t, st.knownHosts(), sv.known())
	e := mustFail(t, st.client(t, Config{}), target("h1"), way.PhaseAuthenticate, "no key to offer", "not usable: "+file+" (ssh: ")
	if strings.Contains(e.Advice, "ssh-add") {
		t.Errorf("advice %q", e.Advice)
	}
}
