package sshway

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/files"
)

// maxInclude is how deep Include may nest; OpenSSH's limit.
const maxInclude = 16

// maxConfigSize bounds a configuration file, in bytes.
const maxConfigSize = 4 << 20

// statement is one line of an ssh configuration file.
type statement struct {
	at      string // file:line
	key     string // keyword, lower case
	args    []string
	include [][]statement // of Include: the files, in order
}

// rawKeys take the rest of the line as it is.
var rawKeys = []string{"proxycommand", "localcommand", "remotecommand", "knownhostscommand"}

// readConfig reads a configuration file and what it includes. home is the user's home directory; relative names in
// Include are below dir.
func readConfig(file, home, dir string, depth int) ([]statement, error) {
	text, err := files.Read(file, maxConfigSize)
	if err != nil {
		return nil, err
	}
	sts, err := parseConfig(string(text), file)
	if err != nil {
		return nil, err
	}
	for i := range sts {
		st := &sts[i]
		if st.key != "include" {
			continue
		}
		if depth >= maxInclude {
			return nil, fmt.Errorf("%s: include: more than %d deep", st.at, maxInclude)
		}
		for _, arg := range st.args {
			pattern, err := expandEnv(tilde(arg, home))
			if err != nil {
				return nil, fmt.Errorf("%s: include: %w", st.at, err)
			}
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(dir, pattern)
			}
			names, err := filepath.Glob(pattern)
			if err != nil {
				return nil, fmt.Errorf("%s: include %s: %w", st.at, arg, err)
			}
			for _, name := range names {
				sub, err := readConfig(name, home, dir, depth+1)
				if errors.Is(err, fs.ErrNotExist) {
					continue
				}
				if err != nil {
					return nil, fmt.Errorf("%s: include: %w", st.at, err)
				}
				st.include = append(st.include, sub)
			}
		}
	}
	return sts, nil
}

// parseConfig splits a configuration file's text into statements.
func parseConfig(text, file string) ([]statement, error) {
	var sts []statement
	num := 0
	for line := range strings.Lines(text) {
		num++
		line = strings.TrimRight(line, " \t\r\n\f")
		line = strings.TrimLeft(line, " \t")
		if line == "" || line[0] == '#' {
			continue
		}
		at := fmt.Sprintf("%s:%d", file, num)
		end := strings.IndexAny(line, " \t=")
		if end < 0 {
			end = len(line)
		}
		st := statement{at: at, key: strings.ToLower(line[:end])}
		if st.key == "" {
			return nil, fmt.Errorf("%s: no keyword", at)
		}
		rest := strings.TrimLeft(line[end:], " \t")
		if after, ok := strings.CutPrefix(rest, "="); ok {
			rest = strings.TrimLeft(after, " \t")
		}
		if slices.Contains(rawKeys, st.key) {
			if rest != "" {
				st.args = []string{rest}
			}
		} else {
			args, err := splitArgs(rest)
			if err != nil {
				return nil, fmt.Errorf("%s: %s: %w", at, st.key, err)
			}
			st.args = args
		}
		if len(st.args) == 0 {
			return nil, fmt.Errorf("%s: %s: no value", at, st.key)
		}
		sts = append(sts, st)
	}
	return sts, nil
}

// splitArgs splits a line into arguments as OpenSSH does: blanks separate, quotes of both kinds quote, a backslash
// quotes quotes, itself and, outside quotes, a space; a word that begins with # and all behind it is a comment.
func splitArgs(s string) ([]string, error) {
	var args []string
	var word strings.Builder
	in, quote := false, byte(0)
	flush := func() {
		if in {
			args = append(args, word.String())
			word.Reset()
			in = false
		}
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case quote == 0 && (c == ' ' || c == '\t'):
			flush()
		case quote == 0 && c == '#' && !in:
			return args, nil
		case c == '\\' && i+1 < len(s) && (s[i+1] == '\'' || s[i+1] == '"' || s[i+1] == '\\' || quote == 0 && s[i+1] == ' '):
			i++
			word.WriteByte(s[i])
			in = true
		case quote == 0 && (c == '"' || c == '\''):
			quote, in = c, true
		case quote != 0 && c == quote:
			quote = 0
		case c == 0:
			return nil, errors.New("a zero byte")
		default:
			word.WriteByte(c)
			in = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("the quote %c is not closed", quote)
	}
	flush()
	return args, nil
}

// matchPattern says whether s matches a pattern of * (any text) and ? (one byte).
func matchPattern(pattern, s string) bool {
	// On a mismatch go back to the last star and let it take one byte more: no recursion, no exponential time.
	p, i, star, mark := 0, 0, -1, 0
	for i < len(s) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, i
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == s[i]):
			p++
			i++
		case star >= 0:
			mark++
			p, i = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(pattern[p:], "*") == ""
}

// matchList says whether s matches one of the patterns and none of the negated ones (!pattern).
func matchList(patterns []string, s string) bool {
	found := false
	for _, p := range patterns {
		if neg, ok := strings.CutPrefix(p, "!"); ok {
			if matchPattern(neg, s) {
				return false
			}
			continue
		}
		found = found || matchPattern(p, s)
	}
	return found
}
