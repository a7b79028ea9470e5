package launcher

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

var (
	// givenTwice is what the toml package says of a key that is there already. Its place is that of the value, or of what stands before it.
	givenTwice = regexp.MustCompile(`^Key '(.+)' (has already been defined|was already created .*)\.$`)
	// bareText is a setting whose value looks like text without its quotes.
	bareText = regexp.MustCompile(`^\s*([^\s=]+)\s*=\s*([A-Za-z./~$_][^"'#\[\]{}=]*|\d+[a-zA-Z]+)(#.*)?$`)
)

// syntaxError is an error of the toml package as one of a job file.
func syntaxError(name, doc string, p toml.ParseError) *UsageError {
	msg := cmp.Or(p.Message, p.Error())
	line, col := p.Position.Line, max(p.Position.Col, 1)
	lines := strings.SplitAfter(doc, "\n")
	lines = lines[:min(max(line, 0), len(lines))]
	e := &UsageError{}
	if m := givenTwice.FindStringSubmatch(msg); m != nil {
		if first, second := twiceGiven(strings.Join(lines, ""), m[1]); second != nil {
			line, col, msg = second.line, second.col, fmt.Sprintf("%s is given twice, first in line %d", m[1], first.line)
		}
	} else if len(lines) > 0 {
		m := bareText.FindStringSubmatch(strings.TrimRight(lines[len(lines)-1], "\r\n"))
		if m != nil && !slices.Contains([]string{"true", "false", "inf", "nan"}, strings.Fields(m[2])[0]) {
			e.Hint = fmt.Sprintf("text stands in quotes: %s = %q", m[1], strings.TrimSpace(m[2]))
		}
	}
	e.Msg = fmt.Sprintf("%s:%d:%d: %s", name, line, col, msg)
	return e
}

// twiceGiven are the first and the last place of a key in a document that ends with the line where it is given again.
func twiceGiven(doc, name string) (first, last *tomlKey) {
	keys := indexKeys(doc)
	for i := len(keys) - 1; i >= 0; i-- {
		k := &keys[i]
		switch {
		case k.element:
		case last == nil:
			if plainKey(keys, k.path).String() == name {
				last = k
			}
		case slices.Equal(k.path, last.path):
			first = k
		}
	}
	if first == nil {
		return nil, nil
	}
	return first, last
}

// plainKey is a path without the indices of elements.
func plainKey(keys []tomlKey, path []string) toml.Key {
	var key toml.Key
	for i := range path {
		if !slices.ContainsFunc(keys, func(k tomlKey) bool { return k.element && slices.Equal(k.path, path[:i+1]) }) {
			key = append(key, path[i])
		}
	}
	return key
}
