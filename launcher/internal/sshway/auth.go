package sshway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"github.com/gorun-dev/gorun/launcher/internal/files"
	"github.com/gorun-dev/gorun/launcher/internal/shell"
)

// maxKeySize bounds the file of a key or certificate, in bytes.
const maxKeySize = 1 << 20

// keyFiles are the private key files, read once.
type keyFiles struct {
	mu    sync.Mutex
	files map[string]*keyFile
}

// keyFile is what one identity file gave.
type keyFile struct {
	signer ssh.Signer    // nil if it cannot sign; err says why
	public ssh.PublicKey // nil if not even that is known
	err    error         // nil if the file is not there
	there  bool
}

func (k *keyFiles) load(file string) *keyFile {
	k.mu.Lock()
	defer k.mu.Unlock()
	if f := k.files[file]; f != nil {
		return f
	}
	if k.files == nil {
		k.files = map[string]*keyFile{}
	}
	f := readKeyFile(file)
	k.files[file] = f
	return f
}

func readKeyFile(file string) *keyFile {
	f := &keyFile{}
	text, err := files.Read(file, maxKeySize)
	switch {
	case err == nil:
		f.there = true
		f.signer, f.err = ssh.ParsePrivateKey(text)
		if missing, ok := errors.AsType[*ssh.PassphraseMissingError](f.err); ok {
			f.err = errEncrypted
			f.public = missing.PublicKey
		} else if f.err != nil {
			// A public key: its private half may be in the agent.
			if pub, _, _, _, err := ssh.ParseAuthorizedKey(text); err == nil {
				f.public, f.err = pub, errPublicOnly
			}
		}
	case !errors.Is(err, fs.ErrNotExist):
		f.there, f.err = true, err
	}
	if f.signer != nil {
		f.public = f.signer.PublicKey()
	}
	if f.public == nil {
		if text, err := files.Read(file+".pub", maxKeySize); err == nil {
			f.public, _, _, _, _ = ssh.ParseAuthorizedKey(text)
		}
	}
	return f
}

var (
	errEncrypted  = errors.New("encrypted")
	errPublicOnly = errors.New("a public key, and the agent has not its private half")
)

// readCertificate reads a certificate file; nil if it is not there or no certificate.
func readCertificate(file string) *ssh.Certificate {
	text, err := files.Read(file, maxKeySize)
	if err != nil {
		return nil
	}
	pub, _, _, _, err := ssh.ParseAuthorizedKey(text)
	if err != nil {
		return nil
	}
	cert, _ := pub.(*ssh.Certificate)
	return cert
}

// login is the authentication of one connection.
type login struct {
	o         *options
	signers   []ssh.Signer
	offered   []string // what each signer is, for messages
	unusable  []string // identity files that are there but cannot be used, and why
	encrypted []string // those of them that need a passphrase
	agentErr  error
	agentConn net.Conn     // nil without an agent; closed when the handshake is over
	held      []ssh.Signer // by the agent
	comments  []string     // of these
	used      []bool       // these are among signers

	methods []string // what the server allows
}

// newLogin collects the keys, in the order in which they are tried: those that the configuration names (an agent may
// hold them), then the agent's others, then the default files. A server stops listening after six by default, so what
// was named comes before whatever else an agent holds. ctx bounds each word with the agent, which may ask its user.
func newLogin(ctx context.Context, files *keyFiles, o *options) *login {
	l := &login{o: o}
	if o.agent != "" {
		l.held, l.comments, l.agentErr = l.askAgent(ctx)
	}
	l.used = make([]bool, len(l.held))
	var certs []*ssh.Certificate
	for _, file := range o.certificates {
		if c := readCertificate(file); c != nil {
			certs = append(certs, c)
		}
	}
	identities := func() {
		for _, file := range o.identities {
			l.addIdentity(file, files.load(file), certs)
		}
	}
	if o.explicit {
		identities()
	}
	if !o.identitiesOnly {
		for i, s := range l.held {
			if !l.used[i] {
				l.used[i] = true
				l.add(s, "the agent's "+strings.TrimSpace(s.PublicKey().Type()+" "+l.comments[i]))
			}
		}
	}
	if !o.explicit {
		identities()
	}
	return l
}

func (l *login) add(s ssh.Signer, what string) {
	l.signers = append(l.signers, s)
	l.offered = append(l.offered, what)
}

// inAgent is the index of a key that the agent holds, -1 if it does not.
func (l *login) inAgent(pub ssh.PublicKey) int {
	return slices.IndexFunc(l.held, func(s ssh.Signer) bool {
		return pub != nil && bytes.Equal(s.PublicKey().Marshal(), pub.Marshal())
	})
}

// addHeld adds a key, once, if the agent holds it, and reports whether it does.
func (l *login) addHeld(pub ssh.PublicKey, what string) bool {
	i := l.inAgent(pub)
	if i >= 0 && !l.used[i] {
		l.used[i] = true
		l.add(l.held[i], what+" (held by the agent)")
	}
	return i >= 0
}

// addIdentity adds what an identity file gave, with those of some certificates that are for it and its own.
func (l *login) addIdentity(file string, f *keyFile, certs []*ssh.Certificate) {
	if c := readCertificate(file + "-cert.pub"); c != nil {
		certs = append(certs[:len(certs):len(certs)], c)
	}
	// A certificate goes before its bare key.
	for _, c := range certs {
		if f.public == nil || !bytes.Equal(c.Key.Marshal(), f.public.Marshal()) {
			continue
		}
		what := file + " with certificate " + c.KeyId
		if l.addHeld(c, what) {
			continue
		}
		base := f.signer
		if i := l.inAgent(f.public); base == nil && i >= 0 {
			base = l.held[i]
		}
		if base == nil {
			continue
		}
		if s, err := ssh.NewCertSigner(c, base); err == nil {
			l.add(s, what)
		}
	}
	switch {
	case l.addHeld(f.public, file):
	case f.signer != nil:
		l.add(f.signer, file)
	case f.there:
		if f.err == errEncrypted {
			l.encrypted = append(l.encrypted, file)
		}
		l.unusable = append(l.unusable, fmt.Sprintf("%s (%v)", file, f.err))
	case l.o.explicit:
		l.unusable = append(l.unusable, file+" (not there)")
	}
}

func (l *login) askAgent(ctx context.Context) (signers []ssh.Signer, comments []string, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", l.o.agent)
	if err != nil {
		return nil, nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	l.agentConn = &stopConn{conn, stop}
	signers, err = agent.NewClient(conn).Signers()
	if err != nil {
		return nil, nil, err
	}
	for _, s := range signers {
		comment := ""
		if k, ok := s.PublicKey().(*agent.Key); ok { // as the agent lists it: it need not be asked for the list again
			comment = k.Comment
		}
		comments = append(comments, comment)
	}
	return signers, comments, nil
}

type stopConn struct {
	net.Conn
	stop func() bool
}

func (c *stopConn) Close() error {
	c.stop()
	return c.Conn.Close()
}

func (l *login) close() {
	if l.agentConn != nil {
		l.agentConn.Close()
	}
}

// explain says what was tried, and what to do.
func (l *login) explain() (advice string, cause error) {
	var b strings.Builder
	public := len(l.methods) == 0
	for _, m := range l.methods {
		public = public || m == "publickey"
	}
	fmt.Fprintf(&b, "%s is not let in: ", l.o.user)
	switch {
	case !public:
		fmt.Fprintf(&b, "the server wants %s, gorun has keys only", strings.Join(l.methods, " or "))
		advice = "allow PubkeyAuthentication on the host, or take OpenSSH's client by --rsh ssh"
	case len(l.offered) > 0:
		fmt.Fprintf(&b, "no key was accepted of %s", strings.Join(l.offered, ", "))
		key := "~/.ssh/id_ed25519.pub"
		if l.o.explicit && len(l.o.identities) > 0 {
			key = strings.TrimSuffix(l.o.identities[0], ".pub") + ".pub"
		}
		advice = fmt.Sprintf("ssh-copy-id -i %s%s %s puts a key there", word(key), portFlag(l.o.port), shell.Quote(l.o.user+"@"+l.o.hostName))
	default:
		b.WriteString("there is no key to offer")
		advice = "ssh-keygen -t ed25519 makes a key, ssh-copy-id puts it on a host"
	}
	if len(l.unusable) > 0 {
		fmt.Fprintf(&b, "; not usable: %s", strings.Join(l.unusable, ", "))
	}
	if l.agentErr != nil {
		fmt.Fprintf(&b, "; the agent at %s: %v", l.o.agent, l.agentErr)
	} else if l.o.agent == "" && len(l.encrypted) > 0 {
		b.WriteString("; no agent runs (SSH_AUTH_SOCK is not set)")
	}
	if len(l.encrypted) > 0 && public {
		advice = "ssh-add"
		for _, file := range l.encrypted {
			advice += " " + word(file)
		}
		if l.o.agent == "" {
			advice = "eval $(ssh-agent); " + advice
		}
	}
	return advice, errors.New(b.String())
}

func portFlag(port int) string {
	if port == 22 {
		return ""
	}
	return fmt.Sprintf(" -p %d", port)
}
