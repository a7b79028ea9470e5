package sshway

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeema/knownhosts"
	"golang.org/x/crypto/ssh"
	xknownhosts "golang.org/x/crypto/ssh/knownhosts"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/shell"
)

// knownKeys are the known_hosts files, read once for each set of names and again after a key was added.
type knownKeys struct {
	mu  sync.Mutex // guards dbs and is held while a file is written
	dbs map[string]*knownhosts.HostKeyDB
}

// load reads the files that exist.
func (k *knownKeys) load(files []string) (*knownhosts.HostKeyDB, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	key := strings.Join(files, "\x00")
	if db := k.dbs[key]; db != nil {
		return db, nil
	}
	db, err := readKnownHosts(files)
	if err != nil {
		return nil, err
	}
	if k.dbs == nil {
		k.dbs = map[string]*knownhosts.HostKeyDB{}
	}
	k.dbs[key] = db
	return db, nil
}

func readKnownHosts(files []string) (*knownhosts.HostKeyDB, error) {
	var there []string
	for _, f := range files {
		if info, err := os.Stat(f); errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
			continue // such as /dev/null
		}
		there = append(there, f)
	}
	return knownhosts.NewDB(there...)
}

// hostKeyError says why a host key was not accepted.
type hostKeyError struct {
	text, advice string
}

func (e *hostKeyError) Error() string { return e.text }

// hostKeyCheck is the check of one connection's host key.
type hostKeyCheck struct {
	keys  *knownKeys
	h     hop
	o     *options // the hop's
	conf  string   // configuration file, if it is not OpenSSH's own
	files []string
	db    *knownhosts.HostKeyDB
	names []string               // host:port under which the key is looked for; the first is the one that is written
	found []knownhosts.PublicKey // under these names, of hosts and authorities; what looking costs is mostly hashing
	// accept says that a key of a host that has none may be added.
	accept bool
	ok     bool // the key was accepted
}

func newHostKeyCheck(keys *knownKeys, h hop, conf Config) (*hostKeyCheck, error) {
	o := h.o
	c := &hostKeyCheck{keys: keys, h: h, o: o, conf: conf.File, accept: conf.AcceptNewHostKeys || o.acceptNew}
	c.files = append(slices.Clone(o.userKnownHosts), o.globalKnownHosts...)
	var err error
	if c.db, err = keys.load(c.files); err != nil {
		return nil, err
	}
	name, port := o.hostName, fmt.Sprint(o.port)
	if o.hostKeyAlias != "" {
		name, port = o.hostKeyAlias, "22" // an alias has no port
	}
	c.names = []string{net.JoinHostPort(name, port)}
	if port != "22" {
		// As OpenSSH does: a key that is known for the name without its port is good enough.
		c.names = append(c.names, net.JoinHostPort(name, "22"))
	}
	for _, n := range c.names {
		c.found = append(c.found, c.db.HostKeys(n)...)
	}
	return c, nil
}

// preferred orders host key algorithms. ssh-rsa (SHA-1) is not in it: OpenSSH has had it off since 8.8.
var preferred = []string{
	ssh.CertAlgoED25519v01, ssh.CertAlgoECDSA256v01, ssh.CertAlgoECDSA384v01, ssh.CertAlgoECDSA521v01, ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01,
	ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521, ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256,
}

// certSuffix makes an algorithm of keys one of their certificates.
const certSuffix = "-cert-v01@openssh.com"

// algorithms are those to negotiate: of the known keys, so that the server shows one that can be compared. Certificates
// are among them only where an authority is known, and all types of bare keys where none is.
func (c *hostKeyCheck) algorithms() []string {
	var known []string
	bare := false
	for _, k := range c.found {
		types := []string{k.Type()}
		if k.Type() == ssh.KeyAlgoRSA {
			types = []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
		}
		for _, t := range types {
			if k.Cert {
				t += certSuffix
			}
			known = append(known, t)
		}
		bare = bare || !k.Cert
	}
	var algos []string
	for _, a := range preferred {
		if slices.Contains(known, a) || !bare && !strings.HasSuffix(a, certSuffix) {
			algos = append(algos, a)
		}
	}
	if len(algos) == 0 { // only types that are not supported are known: whatever it shows has changed
		return preferred[slices.Index(preferred, ssh.KeyAlgoED25519):]
	}
	return algos
}

func (c *hostKeyCheck) callback(_ string, remote net.Addr, key ssh.PublicKey) error {
	err := c.check(c.db, remote, key)
	if err != nil && isUnknown(err) && c.accept {
		err = c.add(remote, key)
	}
	if err != nil {
		return c.explain(err, key)
	}
	c.ok = true
	return nil
}

// check compares the key with the files. A certificate is compared only with authorities, so an error of neither kind
// below may come back.
func (c *hostKeyCheck) check(db *knownhosts.HostKeyDB, remote net.Addr, key ssh.PublicKey) error {
	if _, _, err := net.SplitHostPort(remote.String()); err != nil {
		remote = &net.TCPAddr{IP: net.IPv4zero, Port: c.o.port} // of a proxy; the name counts
	}
	var first error
	for i, name := range c.names {
		err := c.withoutAuthorities(db.HostKeyCallback()(name, remote, key))
		if err == nil {
			return nil
		}
		if i == 0 {
			first = err
		}
		if !isUnknown(err) {
			if i > 0 { // another key without the port says nothing of this port
				return first
			}
			return err
		}
	}
	return first
}

// withoutAuthorities takes the lines of authorities out of the keys that a bare key was compared with: that an authority
// is known says nothing of a host that has no certificate.
func (c *hostKeyCheck) withoutAuthorities(err error) error {
	ke, ok := errors.AsType[*xknownhosts.KeyError](err)
	if !ok {
		return err
	}
	return &xknownhosts.KeyError{Want: slices.DeleteFunc(slices.Clone(ke.Want), func(w xknownhosts.KnownKey) bool {
		return slices.ContainsFunc(c.found, func(k knownhosts.PublicKey) bool {
			return k.Cert && string(k.Marshal()) == string(w.Key.Marshal())
		})
	})}
}

func isUnknown(err error) bool {
	ke, ok := errors.AsType[*xknownhosts.KeyError](err)
	return ok && len(ke.Want) == 0
}

// add appends the key to the first of the user's files. Several hosts and several gorun may do so at once: the file
// is locked, and read again under the lock.
func (c *hostKeyCheck) add(remote net.Addr, key ssh.PublicKey) error {
	if len(c.o.userKnownHosts) == 0 {
		return &hostKeyError{"its key cannot be kept: UserKnownHostsFile is none", ""}
	}
	file := c.o.userKnownHosts[0]
	c.keys.mu.Lock()
	defer c.keys.mu.Unlock()
	fail := func(err error) error {
		return &hostKeyError{fmt.Sprintf("keep its new key: %v", err), ""}
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return fail(err)
	}
	f, err := os.OpenFile(file, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	if err := lock(f, lockBound); err != nil {
		return fail(err)
	}
	db, err := readKnownHosts(c.files)
	if err != nil {
		return fail(err)
	}
	if err := c.check(db, remote, key); err == nil || !isUnknown(err) {
		return err
	}
	name := xknownhosts.Normalize(c.names[0])
	if c.o.hashKnownHosts {
		name = xknownhosts.HashHostname(name)
	}
	line := name + " " + strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))) + "\n"
	if end, err := f.Seek(0, io.SeekEnd); err == nil && end > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, end-1); err == nil && last[0] != '\n' {
			line = "\n" + line
		}
	}
	if _, err := f.WriteString(line); err != nil {
		return fail(err)
	}
	c.keys.dbs = nil
	return nil
}

// lockBound is how long another process may hold known_hosts: a line is added in no time, so one that holds it longer hangs.
const lockBound = 5 * time.Second

// lock locks a file until it is closed. Some file systems have no locks: then the one append is still whole.
func lock(f *os.File, bound time.Duration) error {
	for end := time.Now().Add(bound); ; time.Sleep(5 * time.Millisecond) {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err != unix.EWOULDBLOCK && err != unix.EINTR:
			return nil
		case time.Now().After(end):
			return fmt.Errorf("%s has been locked by another process for %v", f.Name(), bound)
		}
	}
}

// explain turns what the check found into an error with what to do.
func (c *hostKeyCheck) explain(err error, key ssh.PublicKey) error {
	if he, ok := errors.AsType[*hostKeyError](err); ok {
		return he
	}
	name := xknownhosts.Normalize(c.names[0])
	presented := fmt.Sprintf("%s %s", key.Type(), ssh.FingerprintSHA256(key))
	if re, ok := errors.AsType[*xknownhosts.RevokedError](err); ok {
		at := fmt.Sprintf("%s:%d", re.Revoked.Filename, re.Revoked.Line)
		return &hostKeyError{fmt.Sprintf("the key %s is marked @revoked at %s", presented, at), "give the host a new key; a revoked one is never accepted"}
	}
	ke, ok := errors.AsType[*xknownhosts.KeyError](err)
	if !ok {
		return &hostKeyError{fmt.Sprintf("the certificate %s: %v", presented, err), "a line \"@cert-authority " + name + " KEY\" in " + c.file() + " makes its authority known"}
	}
	if len(ke.Want) == 0 {
		return &hostKeyError{
			fmt.Sprintf("unknown key %s: %s is in none of %s", presented, name, strings.Join(c.files, ", ")),
			fmt.Sprintf("compare the fingerprint, then: %s (or gorun --accept-new-host-keys)", c.learn()),
		}
	}
	var at []string
	for _, w := range ke.Want {
		at = append(at, fmt.Sprintf("%s:%d (%s)", w.Filename, w.Line, w.Key.Type()))
	}
	return &hostKeyError{
		fmt.Sprintf("the key has changed: it shows %s, known are other keys at %s", presented, strings.Join(at, ", ")),
		fmt.Sprintf("if the host was installed anew: ssh-keygen -f %s -R '%s'; if not, someone may be in between", word(ke.Want[0].Filename), name),
	}
}

// file is where the user keeps the keys of hosts.
func (c *hostKeyCheck) file() string {
	if len(c.o.userKnownHosts) == 0 {
		return "~/.ssh/known_hosts"
	}
	return c.o.userKnownHosts[0]
}

// learn is a command that adds the host's key to the user's file.
func (c *hostKeyCheck) learn() string {
	if c.o.jumps == "" && c.o.proxyCommand == "" && c.o.hostKeyAlias == "" {
		return fmt.Sprintf("ssh-keyscan%s %s >> %s", portFlag(c.o.port), shell.Quote(c.o.hostName), word(c.file()))
	}
	// A scan goes through no proxy, and knows no alias. OpenSSH's client asks whether to keep the key.
	cmd := "ssh"
	if c.conf != "" {
		cmd += " -F " + word(c.conf)
	}
	if c.h.t.Port != 0 {
		cmd += portFlag(c.h.t.Port)
	}
	if c.h.t.User != "" {
		return cmd + " " + shell.Quote(c.h.t.User+"@"+c.h.t.Host()) + " true"
	}
	return cmd + " " + shell.Quote(c.h.t.Host()) + " true"
}
