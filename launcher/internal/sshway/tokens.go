package sshway

import (
	"cmp"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/shell"
)

// tilde replaces a leading ~/ by the home directory.
func tilde(s, home string) string {
	if s == "~" {
		return home
	}
	if rest, ok := strings.CutPrefix(s, "~/"); ok {
		return filepath.Join(home, rest)
	}
	return s
}

// word is a path as a word of a command that is shown. A shell expands a leading ~/ itself.
func word(path string) string {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		return "~/" + shell.Quote(rest)
	}
	return shell.Quote(path)
}

// expandEnv replaces ${NAME}.
func expandEnv(s string) (string, error) {
	var b strings.Builder
	for {
		before, rest, ok := strings.Cut(s, "${")
		b.WriteString(before)
		if !ok {
			return b.String(), nil
		}
		name, after, ok := strings.Cut(rest, "}")
		if !ok || name == "" {
			return "", errors.New("${ without a name and }")
		}
		v, ok := os.LookupEnv(name)
		if !ok {
			return "", fmt.Errorf("variable %s is not set", name)
		}
		b.WriteString(v)
		s = after
	}
}

// expandTokens replaces %c by its value; %% is a percent sign.
func expandTokens(s string, values map[byte]string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		if i++; i >= len(s) {
			return "", errors.New("a percent sign at the end")
		}
		if s[i] == '%' {
			b.WriteByte('%')
			continue
		}
		v, ok := values[s[i]]
		if !ok {
			return "", fmt.Errorf("the token %%%c is not known here", s[i])
		}
		b.WriteString(v)
	}
	return b.String(), nil
}

// tokens are those of file names (IdentityFile, UserKnownHostsFile and so on).
func (o *options) tokens(who account, jump string) map[byte]string {
	local, err := os.Hostname()
	if err != nil {
		local = "localhost"
	}
	short, _, _ := strings.Cut(local, ".")
	port := strconv.Itoa(o.port)
	// OpenSSH's hash of a connection.
	sum := sha1.Sum([]byte(local + o.hostName + port + o.user + jump))
	return map[byte]string{
		'C': hex.EncodeToString(sum[:]), 'd': who.home, 'h': o.hostName, 'i': who.uid, 'j': jump, 'k': cmp.Or(o.hostKeyAlias, o.original),
		'L': short, 'l': local, 'n': o.original, 'p': port, 'r': o.user, 'u': who.name,
	}
}
