package sshway

import (
	"bufio"
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"
)

func TestMain(m *testing.M) {
	os.Unsetenv("SSH_AUTH_SOCK")
	goleak.VerifyTestMain(m)
}

func program(t testing.TB, name string) string {
	t.Helper()
	for _, dir := range []string{"/usr/sbin", "/usr/local/sbin", "/usr/bin", "/usr/local/bin", "/sbin", "/bin"} {
		if p := filepath.Join(dir, name); exec.Command("test", "-x", p).Run() == nil {
			return p
		}
	}
	citest.Lacking(t, "%s", name)
	return ""
}

// keyPair is a key in a file, with its public half beside it.
type keyPair struct {
	file   string
	secret crypto.Signer
	signer ssh.Signer
}

func (k keyPair) authorized() string {
	return string(ssh.MarshalAuthorizedKey(k.signer.PublicKey()))
}

var rsaKey = sync.OnceValues(func() (*rsa.PrivateKey, error) { return rsa.GenerateKey(rand.Reader, 2048) })

// newKey makes a key of a kind: ed25519, ecdsa or rsa. A passphrase encrypts the file.
func newKey(t testing.TB, file, kind, passphrase string) keyPair {
	t.Helper()
	var secret crypto.Signer
	var err error
	switch kind {
	case "ed25519":
		_, secret, err = ed25519.GenerateKey(rand.Reader)
	case "ecdsa":
		secret, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	case "rsa":
		secret, err = rsaKey()
	}
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromSigner(secret)
	if err != nil {
		t.Fatal(err)
	}
	var block *pem.Block
	if passphrase != "" {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(secret, kind, []byte(passphrase))
	} else {
		block, err = ssh.MarshalPrivateKey(secret, kind)
	}
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, string(pem.EncodeToMemory(block)))
	k := keyPair{file, secret, signer}
	write(t, file+".pub", k.authorized())
	return k
}

func write(t testing.TB, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// server is an sshd of a test.
type server struct {
	dir      string
	ip       string
	port     int
	pid      int
	hostKeys []keyPair
	key      keyPair // that it lets in
	log      *logBuffer
}

// serverOptions say what differs from a plain server.
type serverOptions struct {
	ip       string   // 127.0.0.1 if ""
	hostKeys []string // kinds; ed25519 if none
	lines    string   // of sshd_config
	key      *keyPair // that is let in; a new one if nil
	port     int      // any if 0
}

// logBuffer keeps a log and lets a test wait for a line of it.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) add(s string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.WriteString(s + "\n")
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// startServer runs a real sshd until the test ends.
func startServer(t testing.TB, opts serverOptions) *server {
	t.Helper()
	sshd := program(t, "sshd")
	s := &server{dir: t.TempDir(), ip: opts.ip, log: &logBuffer{}}
	if s.ip == "" {
		s.ip = "127.0.0.1"
	}
	if opts.key != nil {
		s.key = *opts.key
	} else {
		s.key = newKey(t, filepath.Join(s.dir, "id"), "ed25519", "")
	}
	write(t, filepath.Join(s.dir, "authorized_keys"), s.key.authorized())
	var b strings.Builder
	kinds := opts.hostKeys
	if kinds == nil {
		kinds = []string{"ed25519"}
	}
	b.WriteString(opts.lines + "\n") // first: the first value counts
	for _, kind := range kinds {
		k := newKey(t, filepath.Join(s.dir, "host_"+kind), kind, "")
		s.hostKeys = append(s.hostKeys, k)
		fmt.Fprintf(&b, "HostKey %s\n", k.file)
	}
	fmt.Fprintf(&b, "AuthorizedKeysFile %s/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nUseDNS no\nPerSourcePenalties no\n", s.dir)
	if !strings.Contains(opts.lines, "MaxStartups") { // of this one the last counts
		b.WriteString("MaxStartups 100\n")
	}
	text := b.String()
	if !hasPenalties(t) {
		text = strings.ReplaceAll(text, "PerSourcePenalties no\n", "")
	}
	config := filepath.Join(s.dir, "sshd_config")
	write(t, config, text)
	for range 5 { // another process may take the port that was free
		s.port = opts.port
		if s.port == 0 {
			s.port = freePort(t, s.ip)
		}
		if s.run(t, sshd, config) {
			return s
		}
	}
	t.Fatalf("sshd does not start:\n%s", s.log)
	return nil
}

// hasPenalties says whether sshd drops clients that failed before, as it does since 9.8.
func hasPenalties(t testing.TB) bool {
	t.Helper()
	out, err := exec.Command(program(t, "ssh"), "-V").CombinedOutput()
	var major, minor int
	if _, serr := fmt.Sscanf(string(out), "OpenSSH_%d.%d", &major, &minor); serr != nil {
		t.Fatalf("ssh -V: %v, %q", err, out)
	}
	return major > 9 || major == 9 && minor >= 8
}

func (s *server) run(t testing.TB, sshd, config string) bool {
	args := []string{sshd, "-D", "-e", "-f", config, "-o", "ListenAddress=" + net.JoinHostPort(s.ip, strconv.Itoa(s.port))}
	if os.Getuid() == 0 {
		// Its directory for privilege separation is in /run, which is not a test's to write. An empty home spares
		// the login shell's start-up files, which can take more than all else.
		mounts := "mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd; "
		if who, err := currentAccount(); err == nil && !strings.HasPrefix(s.dir, who.home+"/") && !strings.HasPrefix(s.key.file, who.home+"/") {
			mounts += "mount -t tmpfs tmpfs '" + who.home + "'; "
		}
		args = append([]string{"unshare", "--mount", "--propagation", "private", "/bin/sh", "-ec", mounts + `exec "$@"`, "sh"}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	runtime.LockOSThread() // the signal comes when this thread ends; a test's goroutine lives as long as it needs
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	up := make(chan bool, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			s.log.add(lines.Text())
			if strings.Contains(lines.Text(), "Server listening on") {
				select {
				case up <- true:
				default:
				}
			}
		}
		select {
		case up <- false:
		default:
		}
	}()
	stop := func() {
		// Its children are in sessions of their own: they end with their connections, which the clients have closed.
		syscall.Kill(cmd.Process.Pid, syscall.SIGCONT)
		cmd.Process.Kill()
		<-read
		cmd.Wait()
	}
	var ok bool
	select {
	case ok = <-up:
	case <-time.After(60 * time.Second):
	}
	if !ok {
		stop()
		if strings.Contains(s.log.String(), "unshare failed") || strings.Contains(s.log.String(), "mount:") {
			citest.Lacking(t, "an sshd that has a /run of its own: %s", s.log.String())
		}
		return false
	}
	s.pid = cmd.Process.Pid
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("sshd on port %d:\n%s", s.port, s.log)
		}
	})
	return true
}

func freePort(t testing.TB, ip string) int {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(ip, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// logins counts who was let in.
func (s *server) logins() int { return strings.Count(s.log.String(), "Accepted publickey") }

// wantLogins waits for the log to say so many; one more is as wrong as one less.
func (s *server) wantLogins(t testing.TB, want int) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for s.logins() < want && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	if got := s.logins(); got != want {
		t.Errorf("%d logins on port %d, want %d", got, s.port, want)
	}
}

// knownName is the server's name in known_hosts.
func (s *server) knownName() string { return fmt.Sprintf("[%s]:%d", s.ip, s.port) }

// known is the server's lines for known_hosts.
func (s *server) known() string {
	var b strings.Builder
	for _, k := range s.hostKeys {
		b.WriteString(s.knownName() + " " + k.authorized())
	}
	return b.String()
}

// site is a user's side: a home directory and configuration.
type site struct {
	home   string
	config string // file
}

// newSite makes one whose configuration has the text, then for each server a host h1, h2 and so on, all with their
// keys and known.
func newSite(t testing.TB, text string, servers ...*server) *site {
	t.Helper()
	home := t.TempDir()
	if err := os.Mkdir(filepath.Join(home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	s := &site{home, filepath.Join(home, ".ssh/config")}
	var known strings.Builder
	b := strings.Builder{}
	b.WriteString(text + "\n")
	for i, sv := range servers {
		fmt.Fprintf(&b, "Host h%d\n HostName %s\n Port %d\n IdentityFile %s\n", i+1, sv.ip, sv.port, sv.key.file)
		known.WriteString(sv.known())
	}
	write(t, s.config, b.String())
	write(t, s.knownHosts(), known.String())
	return s
}

func (s *site) knownHosts() string { return filepath.Join(s.home, ".ssh/known_hosts") }

// client makes a client whose home is the site's.
func (s *site) client(t testing.TB, conf Config) *Client {
	t.Helper()
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	who.home = s.home
	if conf.File == "" {
		conf.File = s.config
	}
	c := New(conf)
	c.load = sync.OnceValues(func() (*environment, error) { return readEnvironment(who, conf.File) })
	return c
}

// limited is a context that ends before the test does.
func limited(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func target(name string) way.Target { return way.Target{Name: name, Addr: name} }

// run runs a line and returns what it wrote.
func run(t testing.TB, w way.Way, tg way.Target, line string) (stdout string, wait error) {
	t.Helper()
	s, err := w.Open(limited(t), tg, line)
	if err != nil {
		t.Fatalf("%v (%s)", err, way.Advice(err))
	}
	defer s.Close()
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(out), s.Wait()
}

// mustRun runs a line that prints "well".
func mustRun(t testing.TB, w way.Way, tg way.Target) {
	t.Helper()
	if out, err := run(t, w, tg, "echo well"); out != "well\n" || err != nil {
		t.Fatalf("%s: stdout %q, %v", tg.Name, out, err)
	}
}

// mustFail opens and wants an error of a phase with texts in it and in its advice.
func mustFail(t testing.TB, w way.Way, tg way.Target, phase string, texts ...string) *way.Error {
	t.Helper()
	s, err := w.Open(limited(t), tg, "true")
	if err == nil {
		s.Close()
		t.Fatalf("%s opens", tg.Name)
	}
	e, ok := err.(*way.Error)
	if !ok {
		t.Fatalf("error of type %T: %v", err, err)
	}
	if e.Phase != phase || e.Host != tg.Name {
		t.Errorf("host %q, phase %q, want %q, %q", e.Host, e.Phase, tg.Name, phase)
	}
	for _, text := range texts {
		if !strings.Contains(e.Error()+"\n"+e.Advice, text) {
			t.Errorf("%q is in neither error nor advice:\n%s\n%s", text, e, e.Advice)
		}
	}
	return e
}

func me(t testing.TB) string {
	t.Helper()
	u, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	return u.Username
}

// mustEnd opens with a short limit and wants the error of a host that does not answer, in time.
func mustEnd(t testing.TB, w way.Way, tg way.Target, phase string, texts ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	begin := time.Now()
	s, err := w.Open(ctx, tg, "true")
	if err == nil {
		s.Close()
		t.Fatal("it opens")
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("the limit of half a second took %v", d)
	}
	e, ok := err.(*way.Error)
	if !ok || e.Phase != phase || !errors.Is(err, context.DeadlineExceeded) || !temporary(err) {
		t.Errorf("%T %v, want a temporary deadline of phase %s", err, err, phase)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q is not in %v", text, err)
		}
	}
}
