package launcher

import (
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// tomlKey is a key of a TOML document and where it stands. A dotted key counts for all the tables that it names.
type tomlKey struct {
	path      []string
	element   bool // it is no key but an element of an array, and the last of the path is its index
	line, col int  // both from 1; the column counts characters
}

// indexKeys finds the keys of a document that the toml package has accepted, in the order in which they are written. The package
// itself tells the places of syntax errors only.
func indexKeys(doc string) []tomlKey {
	k := keyScanner{s: doc, elements: map[string]int{}, line: 1}
	k.document()
	return k.keys
}

type keyScanner struct {
	s        string
	i        int
	keys     []tomlKey
	elements map[string]int // how many tables an array of tables has so far, by its path

	line, lineStart, counted int // line and its start at offset counted
}

// record notes a key that begins at offset at.
func (k *keyScanner) record(path []string, element bool, at int) {
	for ; k.counted < at; k.counted++ {
		if k.s[k.counted] == '\n' {
			k.line, k.lineStart = k.line+1, k.counted+1
		}
	}
	k.keys = append(k.keys, tomlKey{slices.Clone(path), element, k.line, utf8.RuneCountInString(k.s[k.lineStart:at]) + 1})
}

func (k *keyScanner) peek() byte {
	if k.i < len(k.s) {
		return k.s[k.i]
	}
	return 0
}

// skip skips white space and, where they may stand, line ends and comments.
func (k *keyScanner) skip(lines bool) {
	for k.i < len(k.s) {
		switch c := k.s[k.i]; {
		case c == ' ' || c == '\t':
		case lines && (c == '\n' || c == '\r'):
		case lines && c == '#':
			k.toLineEnd()
			continue
		default:
			return
		}
		k.i++
	}
}

func (k *keyScanner) toLineEnd() {
	if n := strings.IndexByte(k.s[k.i:], '\n'); n >= 0 {
		k.i += n
	} else {
		k.i = len(k.s)
	}
}

func (k *keyScanner) document() {
	var table []string
	for {
		k.skip(true)
		if k.i >= len(k.s) {
			return
		}
		start := k.i
		if k.peek() == '[' {
			table = k.header()
			k.toLineEnd()
		} else {
			k.setting(table)
		}
		if k.i == start {
			return // not what the toml package would have accepted
		}
	}
}

// header reads [table] or [[table]].
func (k *keyScanner) header() []string {
	k.i++
	array := k.peek() == '['
	if array {
		k.i++
	}
	k.skip(false)
	at := k.i
	var path []string
	parts := k.key()
	for i, part := range parts {
		path = append(path, part)
		id := strings.Join(path, "\x00")
		if array && i == len(parts)-1 {
			k.elements[id]++
		}
		k.record(path, false, at)
		if n := k.elements[id]; n > 0 {
			path = append(path, strconv.Itoa(n-1))
			k.record(path, true, at)
		}
	}
	return path
}

// setting reads key = value in a table.
func (k *keyScanner) setting(table []string) {
	at := k.i
	path := slices.Clone(table)
	for _, part := range k.key() {
		path = append(path, part)
		k.record(path, false, at)
	}
	k.skip(false)
	if k.peek() == '=' {
		k.i++
		k.value(path)
	}
}

// key reads a key, which may be dotted.
func (k *keyScanner) key() []string {
	var parts []string
	for {
		k.skip(false)
		switch c := k.peek(); c {
		case '"', '\'':
			start := k.i
			k.text()
			part := k.s[start+1 : max(k.i-1, start+1)]
			if c == '"' {
				if q, err := strconv.Unquote(k.s[start:k.i]); err == nil {
					part = q
				}
			}
			parts = append(parts, part)
		default:
			n := strings.IndexAny(k.s[k.i:], " \t\r\n.=]#,}")
			if n < 0 {
				n = len(k.s) - k.i
			}
			parts = append(parts, k.s[k.i:k.i+n])
			k.i += n
		}
		k.skip(false)
		if k.peek() != '.' {
			return parts
		}
		k.i++
	}
}

// value skips a value and notes the keys in it.
func (k *keyScanner) value(path []string) {
	k.skip(false)
	switch k.peek() {
	case '"', '\'':
		k.text()
	case '[':
		k.i++
		for n := 0; ; n++ {
			k.skip(true)
			start := k.i
			if k.i >= len(k.s) || k.peek() == ']' {
				k.i++
				break
			}
			element := append(slices.Clone(path), strconv.Itoa(n))
			k.record(element, true, k.i)
			k.value(element)
			k.skip(true)
			if k.peek() == ',' {
				k.i++
			}
			if k.i == start {
				return
			}
		}
	case '{':
		k.i++
		for {
			k.skip(true)
			start := k.i
			if k.i >= len(k.s) || k.peek() == '}' {
				k.i++
				break
			}
			k.setting(path)
			k.skip(true)
			if k.peek() == ',' {
				k.i++
			}
			if k.i == start {
				return
			}
		}
	default:
		n := strings.IndexAny(k.s[k.i:], ",]}#\n")
		if n < 0 {
			n = len(k.s) - k.i
		}
		k.i += n
	}
	k.i = min(k.i, len(k.s))
}

// text skips a string of any of the four kinds.
func (k *keyScanner) text() {
	quote := k.s[k.i : k.i+1]
	escapes := quote == `"`
	end := quote
	if strings.HasPrefix(k.s[k.i:], quote+quote+quote) {
		end = quote + quote + quote
	}
	k.i += len(end)
	for k.i < len(k.s) {
		switch {
		case escapes && k.s[k.i] == '\\':
			k.i++
		case strings.HasPrefix(k.s[k.i:], end):
			k.i += len(end)
			for len(end) == 3 && strings.HasPrefix(k.s[k.i:], quote) {
				k.i++ // up to two quotes may stand before the three that end it
			}
			return
		}
		k.i++
	}
	k.i = min(k.i, len(k.s))
}
