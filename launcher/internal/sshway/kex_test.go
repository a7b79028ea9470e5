package sshway

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestChosen(t *testing.T) {
	all := []string{"a1", "a2", "b", "curve"}
	for list, want := range map[string]string{
		"b,a1":             "b a1",
		"x,a*,b":           "a1 a2 b",
		"curve@libssh.org": "curve",
		"+x,b":             "a1 a2 b curve",
		"-a*":              "b curve",
		"^b,x":             "b a1 a2 curve",
		"x":                "",
		"-*":               "",
		"":                 "",
	} {
		if diff := cmp.Diff(strings.Join(chosen(all, list), " "), want); diff != "" {
			t.Errorf("%q (-got +want):\n%s", list, diff)
		}
	}
}

// What is agreed on with OpenSSH's server, which says it in its log.
func TestKeyExchange(t *testing.T) {
	for _, c := range []struct{ name, client, server, want string }{
		{"the cheaper of two", "", "KexAlgorithms curve25519-sha256,ecdh-sha2-nistp256", "ecdh-sha2-nistp256"},
		{"what there is", "", "KexAlgorithms curve25519-sha256", "curve25519-sha256"},
		{"as the user says", "KexAlgorithms curve25519-sha256", "", "curve25519-sha256"},
	} {
		t.Run(c.name, func(t *testing.T) {
			sv := startServer(t, serverOptions{lines: c.server + "\nLogLevel DEBUG1"})
			mustRun(t, newSite(t, c.client, sv).client(t, Config{}), target("h1"))
			if want := "kex: algorithm: " + c.want + " "; !strings.Contains(sv.log.String(), want) {
				t.Errorf("no %q in the log", want)
			}
		})
	}
}

// Without a word of the user's they are ours, also where OpenSSH's client is asked, which always names some.
func TestKeyExchangesOfConfig(t *testing.T) {
	program(t, "ssh")
	who, err := currentAccount()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config")
	own := "diffie-hellman-group16-sha512"
	for text, want := range map[string][]string{
		"":                            keyExchanges,
		"Match exec true\n":           keyExchanges,
		"KexAlgorithms " + own + "\n": {own},
		"KexAlgorithms " + own + "\nMatch exec true\n":               {own},
		"Match exec true\nHost b\nKexAlgorithms curve25519-sha256\n": keyExchanges,
	} {
		write(t, file, text)
		sts, err := load(file, who)
		if err != nil {
			t.Fatal(err)
		}
		o, err := resolve(t.Context(), sts, file, who, target("a"))
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if diff := cmp.Diff(o.kex, want); diff != "" {
			t.Errorf("%q (-got +want):\n%s", text, diff)
		}
	}
}
