package sshway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/procgroup"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// options is what the ssh configuration says of one host, with defaults filled in and tokens expanded.
type options struct {
	original string // as given
	hostName string // the name or address to connect to
	port     int
	user     string

	identities     []string // private key files, tokens expanded
	explicit       bool     // they come from the configuration
	certificates   []string
	identitiesOnly bool
	agent          string // socket of the agent; "" if there is none

	jumps        string // ProxyJump's value; "" if there is none
	proxyCommand string // tokens expanded; "" if there is none

	userKnownHosts, globalKnownHosts []string
	hostKeyAlias                     string
	acceptNew, hashKnownHosts        bool

	connectTimeout time.Duration // 0: none of its own
	aliveInterval  time.Duration // 0: never
	aliveCountMax  int
	network        string // tcp, tcp4 or tcp6
	bindAddress    string
	kex            []string // key exchanges, the preferred first
}

// Keep-alive where the configuration says nothing: a dead connection is found within a minute. OpenSSH's own default
// is never.
const (
	defaultAliveInterval = 15 * time.Second
	defaultAliveCountMax = 3
)

// defaultIdentities are the names below ~/.ssh that are tried if the configuration names none.
var defaultIdentities = []string{"id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk"}

// account is the user who runs gorun.
type account struct{ name, home, uid string }

func currentAccount() (account, error) {
	u, err := user.Current()
	if err != nil {
		return account{}, err
	}
	return account{name: u.Username, home: u.HomeDir, uid: u.Uid}, nil
}

// setting is the value of one keyword and where it stands.
type setting struct {
	at   string
	args []string
}

func (s setting) value() string {
	if len(s.args) == 0 {
		return ""
	}
	return s.args[0]
}

// evaluation is one walk over the configuration for one host.
type evaluation struct {
	who      account
	original string
	first    map[string]setting   // the first value obtained, as in OpenSSH
	all      map[string][]setting // IdentityFile and CertificateFile add up
	// beyond is the first line that only OpenSSH itself can evaluate, and why; "" if there is none.
	beyond string
}

func newEvaluation(who account, t way.Target) *evaluation {
	e := &evaluation{who: who, original: t.Host(), first: map[string]setting{}, all: map[string][]setting{}}
	if t.User != "" {
		e.first["user"] = setting{"the target", []string{t.User}}
	}
	if t.Port != 0 {
		e.first["port"] = setting{"the target", []string{strconv.Itoa(t.Port)}}
	}
	return e
}

func (e *evaluation) walk(sts []statement, active bool) error {
	outer := active
	for _, st := range sts {
		switch st.key {
		case "host":
			active = outer && matchList(st.args, e.original)
		case "match":
			m, err := e.match(st)
			if err != nil {
				return err
			}
			active = outer && m
		case "include":
			for _, sub := range st.include {
				if err := e.walk(sub, active); err != nil {
					return err
				}
			}
		default:
			if active {
				e.set(st)
			}
		}
	}
	return nil
}

func (e *evaluation) set(st statement) {
	switch st.key {
	case "identityfile", "certificatefile":
		if !slices.ContainsFunc(e.all[st.key], func(s setting) bool { return s.value() == st.args[0] }) {
			e.all[st.key] = append(e.all[st.key], setting{st.at, st.args})
		}
		return
	case "proxyjump", "proxycommand": // the first of the two counts
		_, jump := e.first["proxyjump"]
		_, command := e.first["proxycommand"]
		if jump || command {
			return
		}
	case "canonicalizehostname":
		if _, ok := e.first[st.key]; !ok && st.args[0] != "no" {
			e.needs(st, "CanonicalizeHostname "+st.args[0])
		}
	}
	if _, ok := e.first[st.key]; !ok {
		e.first[st.key] = setting{st.at, st.args}
	}
}

func (e *evaluation) needs(st statement, what string) {
	if e.beyond == "" {
		e.beyond = st.at + ": " + what
	}
}

// match evaluates a Match line.
func (e *evaluation) match(st statement) (bool, error) {
	args := st.args
	result := true
	for i := 0; i < len(args); i++ {
		name, value, hasValue := strings.Cut(args[i], "=")
		name, negate := strings.CutPrefix(strings.ToLower(name), "!")
		switch name {
		case "all":
			if len(args) > 1 && !(len(args) == 2 && i == 1 && slices.Contains([]string{"canonical", "final"}, strings.ToLower(args[0]))) {
				return false, fmt.Errorf("%s: match: all stands alone", st.at)
			}
			if negate {
				result = false
			}
			continue
		case "canonical": // the second pass after a name was made canonical: there is none here
			result = result && negate
			continue
		case "final":
			if result {
				e.needs(st, "Match final")
			}
			return false, nil
		}
		if !hasValue {
			if i++; i >= len(args) {
				return false, fmt.Errorf("%s: match %s: no value", st.at, name)
			}
			value = args[i]
		}
		if !result {
			continue
		}
		var m bool
		switch name {
		case "host":
			m = matchList(strings.Split(strings.ToLower(value), ","), e.hostName())
		case "originalhost":
			m = matchList(strings.Split(strings.ToLower(value), ","), strings.ToLower(e.original))
		case "user":
			m = matchList(strings.Split(value, ","), e.user())
		case "localuser":
			m = matchList(strings.Split(value, ","), e.who.name)
		default:
			e.needs(st, "Match "+name)
			return false, nil
		}
		result = m != negate
	}
	return result, nil
}

func (e *evaluation) hostName() string {
	s := e.first["hostname"].value()
	if s == "" {
		return strings.ToLower(e.original)
	}
	h, err := expandTokens(s, map[byte]string{'h': e.original})
	if err != nil {
		return strings.ToLower(e.original) // finish says what is wrong with it
	}
	return strings.ToLower(h)
}

func (e *evaluation) user() string {
	return cmp.Or(e.first["user"].value(), e.who.name)
}

// typing makes typed options of an evaluation's settings.
type typing struct {
	*evaluation
	tokens map[byte]string // of file names
	errs   []error
}

func (y *typing) fail(key string, s setting, err error) {
	y.errs = append(y.errs, fmt.Errorf("%s: %s %s: %w", s.at, key, strings.Join(s.args, " "), err))
}

// number is a number within bounds, def where the configuration says nothing.
func (y *typing) number(key string, def, lowest, highest int) int {
	s, ok := y.first[key]
	if !ok {
		return def
	}
	n, err := strconv.Atoi(s.value())
	if err != nil || n < lowest || n > highest {
		y.fail(key, s, fmt.Errorf("not a number from %d to %d", lowest, highest))
		return def
	}
	return n
}

// duration is a time, 0 for none, def where the configuration says nothing.
func (y *typing) duration(key string, def time.Duration) time.Duration {
	s, ok := y.first[key]
	if !ok {
		return def
	}
	if s.value() == "none" {
		return 0
	}
	d, err := parseTime(s.value())
	if err != nil {
		y.fail(key, s, err)
	}
	return d
}

func (y *typing) flag(key string) bool {
	s, ok := y.first[key]
	switch strings.ToLower(s.value()) {
	case "yes", "true":
		return true
	case "no", "false":
	default:
		if ok {
			y.fail(key, s, errors.New("neither yes nor no"))
		}
	}
	return false
}

// file is a file's name.
func (y *typing) file(key string, s setting) string {
	v, err := expandEnv(tilde(s.value(), y.who.home))
	if err == nil {
		v, err = expandTokens(v, y.tokens)
	}
	if err != nil {
		y.fail(key, s, err)
	}
	return v
}

// files are the names of files in one setting, def where the configuration says nothing.
func (y *typing) files(key string, def ...string) (names []string) {
	s, ok := y.first[key]
	if !ok {
		return def
	}
	for _, arg := range s.args {
		if arg != "none" {
			names = append(names, y.file(key, setting{s.at, []string{arg}}))
		}
	}
	return names
}

// expanded is the text of a setting with its tokens.
func (y *typing) expanded(key string, tokens map[byte]string) string {
	s := y.first[key]
	v, err := expandTokens(s.value(), tokens)
	if err != nil {
		y.fail(key, s, err)
	}
	return v
}

// finish makes typed options of the settings.
func (e *evaluation) finish() (*options, error) {
	y := &typing{evaluation: e}
	o := &options{
		original:       e.original,
		hostName:       strings.ToLower(e.original),
		user:           e.user(),
		port:           y.number("port", 22, 1, 65535),
		identitiesOnly: y.flag("identitiesonly"),
		hashKnownHosts: y.flag("hashknownhosts"),
		connectTimeout: y.duration("connecttimeout", 0),
		aliveInterval:  y.duration("serveraliveinterval", defaultAliveInterval),
		aliveCountMax:  y.number("serveralivecountmax", defaultAliveCountMax, 0, 1<<20),
		hostKeyAlias:   strings.ToLower(e.first["hostkeyalias"].value()),
		bindAddress:    e.first["bindaddress"].value(),
		// "no" would accept a changed key too: never here.
		acceptNew: e.first["stricthostkeychecking"].value() == "accept-new",
	}
	if _, ok := e.first["hostname"]; ok {
		o.hostName = strings.ToLower(y.expanded("hostname", map[byte]string{'h': e.original}))
	}
	y.transport(o)
	y.proxy(o)
	y.keys(o)
	if err := errors.Join(y.errs...); err != nil {
		return nil, err
	}
	return o, nil
}

// transport is what concerns the connection alone.
func (y *typing) transport(o *options) {
	switch s := y.first["addressfamily"]; strings.ToLower(s.value()) {
	case "", "any":
		o.network = "tcp"
	case "inet":
		o.network = "tcp4"
	case "inet6":
		o.network = "tcp6"
	default:
		y.fail("addressfamily", s, errors.New("not one of any, inet, inet6"))
	}
	o.kex = keyExchanges
	if s, ok := y.first["kexalgorithms"]; ok {
		if o.kex = chosen(keyExchanges, s.value()); len(o.kex) == 0 {
			y.fail("kexalgorithms", s, fmt.Errorf("gorun has none of them, only %s (--rsh ssh takes OpenSSH's client)", strings.Join(keyExchanges, ",")))
		}
	}
	if s := y.first["proxyusefdpass"]; s.value() == "yes" {
		y.fail("proxyusefdpass", s, errors.New("is not supported (--rsh ssh takes OpenSSH's client)"))
	}
}

// proxy is what the connection goes through.
func (y *typing) proxy(o *options) {
	tokens := map[byte]string{'h': o.hostName, 'n': y.original, 'p': strconv.Itoa(o.port), 'r': o.user}
	if jump := y.first["proxyjump"].value(); jump != "" && jump != "none" {
		o.jumps = y.expanded("proxyjump", tokens)
	}
	if command := y.first["proxycommand"].value(); command != "" && command != "none" {
		o.proxyCommand = y.expanded("proxycommand", tokens)
	}
}

// keys are who logs in, and which hosts are known.
func (y *typing) keys(o *options) {
	jump := y.first["proxyjump"].value()
	if jump == "none" {
		jump = ""
	}
	y.tokens = o.tokens(y.who, jump)
	for _, s := range y.all["identityfile"] {
		if s.value() != "none" {
			o.identities = append(o.identities, y.file("identityfile", s))
		}
		o.explicit = true
	}
	home := filepath.Join(y.who.home, ".ssh")
	if !o.explicit {
		for _, name := range defaultIdentities {
			o.identities = append(o.identities, filepath.Join(home, name))
		}
	}
	for _, s := range y.all["certificatefile"] {
		if s.value() != "none" {
			o.certificates = append(o.certificates, y.file("certificatefile", s))
		}
	}
	o.userKnownHosts = y.files("userknownhostsfile", filepath.Join(home, "known_hosts"), filepath.Join(home, "known_hosts2"))
	o.globalKnownHosts = y.files("globalknownhostsfile", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
	switch s, ok := y.first["identityagent"]; {
	case !ok || s.value() == "SSH_AUTH_SOCK":
		o.agent = os.Getenv("SSH_AUTH_SOCK")
	case s.value() == "none":
	case strings.HasPrefix(s.value(), "$") && !strings.HasPrefix(s.value(), "${"):
		o.agent = os.Getenv(s.value()[1:])
	default:
		o.agent = y.file("identityagent", s)
	}
}

// parseTime is OpenSSH's time format: seconds, or numbers with units ("1m30s").
func parseTime(s string) (time.Duration, error) {
	bad := errors.New("not a time such as 30 or 1m30s")
	units := map[byte]time.Duration{
		's': time.Second, 'm': time.Minute, 'h': time.Hour, 'd': 24 * time.Hour, 'w': 7 * 24 * time.Hour,
	}
	var sum time.Duration
	for i := 0; i < len(s); {
		start := i
		for i < len(s) && s[i] >= '0' && s[i] <= '9' {
			i++
		}
		n, err := strconv.Atoi(s[start:i])
		if err != nil {
			return 0, bad
		}
		unit := time.Second
		if i < len(s) {
			u, ok := units[s[i]|0x20] // lower case
			if !ok {
				return 0, bad
			}
			unit = u
			i++
		}
		// A bound that no real timeout reaches, so that nothing overflows.
		if n > 1<<31/int(unit/time.Second) {
			return 0, bad
		}
		sum += time.Duration(n) * unit
	}
	if s == "" || sum > 1<<31*time.Second {
		return 0, bad
	}
	return sum, nil
}

// load reads the configuration files once: only file if it is not "", else the user's and the system's.
func load(file string, who account) ([]statement, error) {
	dir := filepath.Join(who.home, ".ssh")
	if file == "none" { // as for ssh -F
		return nil, nil
	}
	if file != "" {
		return readConfig(file, who.home, dir, 0)
	}
	var all []statement
	for _, f := range []struct{ name, dir string }{{filepath.Join(dir, "config"), dir}, {"/etc/ssh/ssh_config", "/etc/ssh"}} {
		sts, err := readConfig(f.name, who.home, f.dir, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		// Blocks do not reach over the end of a file: each is walked as an included one.
		all = append(all, statement{key: "include", include: [][]statement{sts}})
	}
	return all, nil
}

// resolve says what the configuration has for t.
func resolve(ctx context.Context, sts []statement, file string, who account, t way.Target) (*options, error) {
	if h := t.Host(); h == "" || strings.HasPrefix(h, "-") || strings.ContainsAny(h, " \t\n\"'`$\\;&<>|(){}\x00") {
		return nil, fmt.Errorf("%q is not a host's name", h)
	}
	// As %r it may come before a shell. A backslash joins a domain to a name.
	if u := t.User; strings.HasPrefix(u, "-") || strings.HasSuffix(u, "\\") || strings.ContainsAny(u, " \t\n\"'`$;&<>|(){}\x00") {
		return nil, fmt.Errorf("%q is not a user's name", u)
	}
	e := newEvaluation(who, t)
	if err := e.walk(sts, true); err != nil {
		return nil, err
	}
	if e.beyond != "" {
		beyond, kex := e.beyond, e.first["kexalgorithms"]
		e = newEvaluation(who, t)
		if len(kex.args) > 0 {
			e.first["kexalgorithms"] = kex
		}
		if err := e.askClient(ctx, file, t); err != nil {
			return nil, fmt.Errorf("%s is left to OpenSSH's client: %w", beyond, err)
		}
	}
	return e.finish()
}

// askClient takes all settings from ssh -G.
func (e *evaluation) askClient(ctx context.Context, file string, t way.Target) error {
	args := []string{"-G"}
	if file != "" {
		args = append(args, "-F", file)
	}
	if t.User != "" {
		args = append(args, "-l", t.User)
	}
	if t.Port != 0 {
		args = append(args, "-p", strconv.Itoa(t.Port))
	}
	cmd := exec.CommandContext(ctx, "ssh", append(args, "--", t.Host())...)
	var out, errText bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errText
	if err := procgroup.Run(cmd); err != nil { // with a command of Match exec
		if msg := strings.TrimSpace(errText.String()); msg != "" {
			return fmt.Errorf("ssh -G %s: %w: %s", t.Host(), err, msg)
		}
		return fmt.Errorf("ssh -G %s: %w", t.Host(), err)
	}
	e.answer(out.String(), "ssh -G "+t.Host())
	return nil
}

// answer takes the settings from ssh -G's output. It names every keyword, also those that are at their defaults.
func (e *evaluation) answer(out, at string) {
	for line := range strings.Lines(out) {
		key, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
		if !ok || value == "" {
			continue
		}
		st := statement{at: at, key: key, args: []string{value}}
		switch key {
		case "canonicalizehostname": // done already
			continue
		case "userknownhostsfile", "globalknownhostsfile":
			st.args = strings.Fields(value)
		case "kexalgorithms": // its own default, too: what the files say is taken from them
			continue
		case "serveraliveinterval":
			if value == "0" { // the same as nothing said
				continue
			}
		case "identityfile":
			if slices.Contains(defaultIdentities, strings.TrimPrefix(value, "~/.ssh/")) || value == "~/.ssh/id_xmss" || value == "~/.ssh/id_dsa" {
				continue
			}
		}
		e.set(st)
	}
}
