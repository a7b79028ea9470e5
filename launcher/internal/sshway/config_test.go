package sshway

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// configCases are configurations and the hosts to ask about. %d is the directory of the case's files.
var configCases = []struct {
	name, text string
	files      map[string]string
	targets    []way.Target
}{
	{"nothing", "", nil, []way.Target{{Addr: "a"}, {Addr: "10.0.0.1", User: "u", Port: 99}, {Addr: "::1"}, {Addr: "UPPER.example.org"}}},
	{"first value counts", "Port 1\nHost a\nPort 2\nUser x\nHost *\nUser y\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}, {Addr: "b", User: "me", Port: 7}}},
	{"patterns", "Host a? !ab *.net\n Port 2\nHost !a? *\n Port 3\nHost !a?\n User nobody\n", nil, []way.Target{{Addr: "ac"}, {Addr: "ab"}, {Addr: "x.net"}, {Addr: "zz"}}},
	{"spelling", "hOsT=a\n\tPORT = 2\nUser=\"a b\" # comment\nHostName \"x#y\" # comment\n  # comment\n\nIdentityFile \"/dir with space/k\"\n", nil, []way.Target{{Addr: "a"}}},
	{"tokens", "Host a\nHostName %h.example.org\nPort 2\nUser u\nIdentityFile %d/k_%h_%n_%p_%r_%u_%%\nIdentityFile ~/x_%i\nCertificateFile ~/c\n", nil, []way.Target{{Addr: "a"}}},
	{"several identities", "IdentityFile /1\nIdentityFile /2\nIdentityFile /1\nHost a\nIdentityFile /3\nIdentitiesOnly yes\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"match", "Match host *.org\nPort 2\nMatch originalhost a\nPort 3\nMatch user root,x\nUser never\nMatch all\nHostKeyAlias k\n", nil, []way.Target{{Addr: "a"}, {Addr: "b.org"}, {Addr: "c", User: "x"}}},
	{"match the name set before", "Host a\nHostName real.org\nMatch host real.org\nPort 2\nMatch originalhost a\nUser u\nMatch host a\nUser wrong\n", nil, []way.Target{{Addr: "a"}}},
	{"match several", "Match host a,b,!c user u\nPort 2\nMatch !host a\nPort 3\nMatch host *,!a\nUser x\nMatch canonical host a\nPort 4\nMatch all\nPort 5\n", nil,
		[]way.Target{{Addr: "a", User: "u"}, {Addr: "a", User: "v"}, {Addr: "b", User: "u"}, {Addr: "c", User: "u"}}},
	{"case", "Host UP\nPort 2\nMatch host UP*\nPort 3\nMatch originalhost UPX\nUser u\nMatch user U*\nHostKeyAlias k\n", nil, []way.Target{{Addr: "UP"}, {Addr: "upx"}, {Addr: "UPX"}, {Addr: "z", User: "Ux"}, {Addr: "z", User: "ux"}}},
	{"match user set before", "Host a\nUser set\nMatch user set\nPort 2\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"include", "Host a\nInclude %d/x*\nPort 9\nHost *\nUser last\n", map[string]string{"x1": "User inner\nHost b\nPort 1\nHost a\nPort 2\n", "x2": "HostKeyAlias second\n"}, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"include nested", "Include %d/one %d/missing %d/two\nPort 5\n", map[string]string{"one": "Include %d/three\n", "two": "Port 4\n", "three": "Host b\nPort 3\n"}, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"proxies", "Host a\nProxyJump j1,u@j2:22\nHost b\nProxyCommand nc %h %p # not a comment\nHost c\nProxyJump none\nHost d\nProxyCommand none\nHost *\nProxyJump all\n", nil,
		[]way.Target{{Addr: "a"}, {Addr: "b"}, {Addr: "c"}, {Addr: "d"}, {Addr: "e"}}},
	{"times", "Host a\nConnectTimeout 90\nServerAliveInterval 1m5\nServerAliveCountMax 7\nHost b\nConnectTimeout 1h2m\nHost c\nConnectTimeout none\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}, {Addr: "c"}}},
	{"known hosts", "UserKnownHostsFile /a ~/b\nGlobalKnownHostsFile \"/c\"\nStrictHostKeyChecking accept-new\nHashKnownHosts yes\nAddressFamily inet6\nBindAddress ::1\n", nil, []way.Target{{Addr: "a"}}},
	{"match exec", "Match exec \"test %n = yes\"\nPort 2\nMatch exec \"test %n = no\"\nPort 3\n", nil, []way.Target{{Addr: "yes"}, {Addr: "no"}, {Addr: "x"}}},
	{"match exec behind another criterion", "Match host a exec \"true\"\nPort 2\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"match final", "Match final host *.org\nPort 2\nHost a\nHostName x.org\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}}},
	{"canonical", "CanonicalizeHostname yes\nCanonicalDomains invalid\nHost a\nPort 2\n", nil, []way.Target{{Addr: "a"}, {Addr: "b"}}},
}

// The evaluation here and OpenSSH's own agree.
func TestConfigAsOpenSSH(t *testing.T) {
	ssh := program(t, "ssh")
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range configCases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			// %d of the case and %d of the configuration: only the first is in the name of a file of the case.
			here := func(s string) string {
				if c.files == nil {
					return s
				}
				return strings.ReplaceAll(s, "%d", dir)
			}
			for name, text := range c.files {
				write(t, filepath.Join(dir, name), here(text))
			}
			file := filepath.Join(dir, "config")
			write(t, file, here(c.text))
			sts, err := load(file, who)
			if err != nil {
				t.Fatal(err)
			}
			for _, tg := range c.targets {
				tg.Name = tg.Addr
				got, err := resolve(t.Context(), sts, file, who, tg)
				if err != nil {
					t.Errorf("%s: %v", tg.Name, err)
					continue
				}
				args := []string{"-G", "-F", file}
				if tg.User != "" {
					args = append(args, "-l", tg.User)
				}
				if tg.Port != 0 {
					args = append(args, "-p", strconv.Itoa(tg.Port))
				}
				out, err := exec.Command(ssh, append(args, tg.Addr)...).Output()
				if err != nil {
					t.Fatalf("ssh -G: %v", err)
				}
				if diff := cmp.Diff(summary(got), opensshSummary(t, who, got, string(out))); diff != "" {
					t.Errorf("%s (-got +openssh):\n%s", tg.Name, diff)
				}
			}
		})
	}
}

// summary is what is compared, in ssh -G's words.
func summary(o *options) map[string]string {
	m := map[string]string{
		"hostname": o.hostName, "port": strconv.Itoa(o.port), "user": o.user, "hostkeyalias": o.hostKeyAlias,
		"identityfile": strings.Join(o.identities, " "), "certificatefile": strings.Join(o.certificates, " "), "identitiesonly": yes(o.identitiesOnly),
		"proxyjump": o.jumps, "proxycommand": o.proxyCommand,
		"userknownhostsfile": strings.Join(o.userKnownHosts, " "), "globalknownhostsfile": strings.Join(o.globalKnownHosts, " "),
		"connecttimeout": o.connectTimeout.String(), "serveraliveinterval": o.aliveInterval.String(), "serveralivecountmax": strconv.Itoa(o.aliveCountMax),
		"hashknownhosts": yes(o.hashKnownHosts), "stricthostkeychecking": yes(o.acceptNew), "network": o.network, "bindaddress": o.bindAddress,
	}
	if !o.explicit {
		m["identityfile"] = ""
	}
	return m
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// opensshSummary reads ssh -G's output, with the values that OpenSSH expands only later expanded by o's tokens.
func opensshSummary(t *testing.T, who account, o *options, out string) map[string]string {
	t.Helper()
	m := map[string]string{"hostkeyalias": "", "certificatefile": "", "proxyjump": "", "proxycommand": "", "bindaddress": "", "network": "tcp"}
	expand := func(s string) string {
		v, err := expandTokens(tilde(s, who.home), o.tokens(who, o.jumps))
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	var ids, certs []string
	explicit := false
	for line := range strings.Lines(out) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch k {
		case "identityfile":
			ids = append(ids, expand(v))
			explicit = explicit || !strings.HasPrefix(v, "~/.ssh/id_")
		case "certificatefile":
			certs = append(certs, expand(v))
		case "userknownhostsfile", "globalknownhostsfile":
			var files []string
			for _, f := range strings.Fields(v) {
				files = append(files, expand(f))
			}
			m[k] = strings.Join(files, " ")
		case "connecttimeout":
			if v == "none" {
				v = "0"
			}
			m[k] = v + "s"
			if d, err := time.ParseDuration(m[k]); err == nil {
				m[k] = d.String()
			}
		case "serveraliveinterval":
			if v == "0" {
				v = "15" // our default
			}
			d, err := time.ParseDuration(v + "s")
			if err != nil {
				t.Fatal(err)
			}
			m[k] = d.String()
		case "stricthostkeychecking":
			m[k] = yes(v == "accept-new")
		case "addressfamily":
			m["network"] = map[string]string{"any": "tcp", "inet": "tcp4", "inet6": "tcp6"}[v]
		case "proxycommand":
			if v == "none" {
				v = ""
			}
			v, err := expandTokens(v, map[byte]string{'h': o.hostName, 'p': strconv.Itoa(o.port), 'r': o.user, 'n': o.original})
			if err != nil {
				t.Fatal(err)
			}
			m[k] = v
		case "hostname", "port", "user", "hostkeyalias", "identitiesonly", "proxyjump", "serveralivecountmax", "hashknownhosts", "bindaddress":
			m[k] = strings.ReplaceAll(v, "\"", "")
		}
	}
	m["identityfile"], m["certificatefile"] = "", strings.Join(certs, " ")
	if explicit {
		m["identityfile"] = strings.Join(ids, " ")
	}
	return m
}

func TestConfigErrors(t *testing.T) {
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "config")
	for _, c := range []struct{ name, text, want string }{
		{"no value", "Host a\n Port\n", ":2: port: no value"},
		{"port", "Port 70000\n", ":1: port 70000: not a number from 1 to 65535"},
		{"port of another host", "Host b\nPort x\n", ""},
		{"yes or no", "IdentitiesOnly perhaps\n", ":1: identitiesonly perhaps: neither yes nor no"},
		{"time", "\n\nConnectTimeout 1y\n", ":3: connecttimeout 1y: not a time such as 30 or 1m30s"},
		{"quote", "User \"x\n", ":1: user: the quote \" is not closed"},
		{"token", "HostName %q\n", ":1: hostname %q: the token %q is not known here"},
		{"variable", "IdentityFile ${NO_SUCH_VARIABLE}/k\n", ":1: identityfile ${NO_SUCH_VARIABLE}/k: variable NO_SUCH_VARIABLE is not set"},
		{"fd pass", "ProxyUseFdpass yes\n", ":1: proxyusefdpass yes: is not supported (--rsh ssh takes OpenSSH's client)"},
		{"key exchanges", "KexAlgorithms sntrup761x25519-sha512,x*\n", ":1: kexalgorithms sntrup761x25519-sha512,x*: gorun has none of them, only mlkem768x25519-sha256,"},
		{"family", "AddressFamily ipx\n", ":1: addressfamily ipx: not one of any, inet, inet6"},
		{"match without value", "Match host\n", ":1: match host: no value"},
		{"match all", "Match all host a\n", ":1: match: all stands alone"},
		{"include circle", "Include " + file + "\n", ":1: include: more than 16 deep"},
		{"two at once", "Port 0\nUser u\nServerAliveCountMax -1\n", ":3: serveralivecountmax -1: not a number from 0 to 1048576"},
	} {
		t.Run(c.name, func(t *testing.T) {
			write(t, file, c.text)
			sts, err := load(file, who)
			if err == nil {
				_, err = resolve(t.Context(), sts, file, who, target("a"))
			}
			if c.want == "" {
				if err != nil {
					t.Errorf("%v", err)
				}
				return
			}
			if err == nil || !strings.HasSuffix(err.Error(), file+c.want) && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %s%s", err, file, c.want)
			}
		})
	}
	if _, err := load(filepath.Join(dir, "missing"), who); !os.IsNotExist(err) {
		t.Errorf("missing file: %v", err)
	}
	for _, h := range []string{"", "-oProxyCommand=x", "a b", "a;b", "$(x)", "`x`"} {
		if _, err := resolve(t.Context(), nil, "none", who, way.Target{Addr: h}); err == nil {
			t.Errorf("host %q is taken", h)
		}
	}
	for u, ok := range map[string]bool{"DOM\\u": true, "u.v-w@x": true, "-l": false, "u;x": false, "u v": false, "u\\": false, "$(x)": false} {
		if _, err := resolve(t.Context(), nil, "none", who, way.Target{Addr: "a", User: u}); (err == nil) != ok {
			t.Errorf("user %q: %v", u, err)
		}
	}
}

// Without an ssh client, what is left to it names the line that needs it.
func TestConfigNoClient(t *testing.T) {
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config")
	write(t, file, "Host a\nPort 2\nMatch exec true\nPort 3\n")
	sts, err := load(file, who)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", t.TempDir())
	_, err = resolve(t.Context(), sts, file, who, target("a"))
	if want := file + ":3: Match exec is left to OpenSSH's client: ssh -G a: exec: \"ssh\": executable file not found in $PATH"; fmt.Sprint(err) != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// A command of Match exec that does not end is bounded by the context.
func TestMatchExecHangs(t *testing.T) {
	program(t, "ssh")
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config")
	pidFile := filepath.Join(filepath.Dir(file), "pid")
	write(t, file, "Match exec \"echo $$ >"+pidFile+"; exec sleep 1000\"\nPort 3\n")
	sts, err := load(file, who)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if _, err := resolve(ctx, sts, file, who, target("a")); err == nil {
		t.Error("it ends well")
	}
	if d := time.Since(begin); d > 20*time.Second {
		t.Errorf("it took %v", d)
	}
	// Where the machine is slow the command may not have begun.
	pid, err := os.ReadFile(pidFile)
	for deadline := time.Now().Add(60 * time.Second); err == nil && len(pid) > 0; {
		stat, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat")
		if err != nil || strings.Contains(string(stat), ") Z ") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the command is alive: %s", stat)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestUserAndSystemFiles(t *testing.T) {
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	who.home = t.TempDir()
	if sts, err := load("none", who); len(sts) != 0 || err != nil {
		t.Errorf("none: %v, %v", sts, err)
	}
	if _, err := load("", who); err != nil {
		t.Errorf("no file of the user: %v", err)
	}
	if err := os.Mkdir(filepath.Join(who.home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(who.home, ".ssh/config"), "Host b\nPort 1\nInclude more\nHost a\nPort 2\n")
	write(t, filepath.Join(who.home, ".ssh/more"), "User inc\n")
	sts, err := load("", who)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a": "2 " + who.name, "b": "1 inc"} {
		o, err := resolve(t.Context(), sts, "", who, target(name))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(o.port, " ", o.user); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func TestMatchPattern(t *testing.T) {
	for _, c := range []struct {
		pattern, s string
		want       bool
	}{
		{"", "", true}, {"", "a", false}, {"*", "", true}, {"?", "", false}, {"a*b", "ab", true}, {"a*b", "axxb", true}, {"a*b", "axxbc", false},
		{"*a*b*", "xxaxxbxx", true}, {"a?c", "abc", true}, {"***", "x", true}, {"a**", "a", true}, {"*.org", "x.y.org", true}, {"a", "*", false},
		{strings.Repeat("*a", 50), strings.Repeat("a", 200) + "b", false},
	} {
		if got := matchPattern(c.pattern, c.s); got != c.want {
			t.Errorf("%q, %q: %v", c.pattern, c.s, got)
		}
	}
}

func TestParseTime(t *testing.T) {
	for s, want := range map[string]time.Duration{"0": 0, "7": 7 * time.Second, "1m30s": 90 * time.Second, "1M30": 90 * time.Second, "2h": 2 * time.Hour, "1d": 24 * time.Hour, "1w": 7 * 24 * time.Hour} {
		if got, err := parseTime(s); got != want || err != nil {
			t.Errorf("%q: %v, %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "s", "-1", "1x", "1.5", "9999999999", "99999999w", "1 m"} {
		if got, err := parseTime(s); err == nil {
			t.Errorf("%q: %v, want an error", s, got)
		}
	}
}

// Whatever the text is, parsing ends; what it gives has keys and values, and evaluating it does not fail but by an
// error.
func FuzzConfig(f *testing.F) {
	for _, c := range configCases {
		if c.files == nil && !strings.Contains(c.text, "exec") {
			f.Add(c.text)
		}
	}
	who := account{name: "u", home: "/home/u", uid: "1000"}
	f.Fuzz(func(t *testing.T, text string) {
		sts, err := parseConfig(text, "file")
		if err != nil {
			if !strings.HasPrefix(err.Error(), "file:") {
				t.Errorf("error without a line: %v", err)
			}
			return
		}
		for _, st := range sts {
			if st.key == "" || len(st.args) == 0 || slices.Contains(st.args, "\x00") {
				t.Errorf("%+v", st)
			}
		}
		e := newEvaluation(who, target("a.example.org"))
		if err := e.walk(sts, true); err != nil {
			return
		}
		e.beyond = ""
		if o, err := e.finish(); err == nil && (o.port < 1 || o.port > 65535 || o.user == "" || o.connectTimeout < 0 || o.aliveInterval < 0) {
			t.Errorf("%+v", o)
		}
	})
}

func FuzzAnswer(f *testing.F) {
	f.Add("hostname a\nport 22\nuser u\nidentityfile ~/.ssh/id_rsa\nuserknownhostsfile a b\n")
	who := account{name: "u", home: "/home/u", uid: "1000"}
	f.Fuzz(func(t *testing.T, text string) {
		e := newEvaluation(who, target("a"))
		e.answer(text, "ssh -G a")
		if o, err := e.finish(); err == nil && o.user == "" {
			t.Errorf("%+v", o)
		}
	})
}

func FuzzParseJump(f *testing.F) {
	f.Add("ssh://u@[::1]:22")
	f.Fuzz(func(t *testing.T, text string) {
		tg, err := parseJump(text)
		if err == nil && (tg.Addr == "" || tg.Port < 0 || tg.Port > 65535) {
			t.Errorf("%q: %+v", text, tg)
		}
	})
}
