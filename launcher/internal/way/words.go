package way

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// splitWords splits a line into words as a POSIX shell does: blanks separate, single and double quotes and
// backslashes quote. Nothing is expanded, so what a shell would expand or act on must be quoted.
func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	in := false // a word has begun (it may be empty: "")
	for i := 0; i < len(line); i++ {
		switch c := line[i]; c {
		case ' ', '\t', '\n':
			if in {
				words = append(words, word.String())
				word.Reset()
			}
			in = false
		case '\'':
			end := strings.IndexByte(line[i+1:], '\'')
			if end < 0 {
				return nil, errors.New("a single quote is not closed")
			}
			word.WriteString(line[i+1 : i+1+end])
			i += 1 + end
			in = true
		case '"':
			in = true
			for i++; ; i++ {
				if i >= len(line) {
					return nil, errors.New("a double quote is not closed")
				}
				if line[i] == '"' {
					break
				}
				if line[i] == '$' || line[i] == '`' {
					return nil, fmt.Errorf("%q is not expanded here: quote it with a backslash or single quotes", line[i])
				}
				if line[i] == '\\' && i+1 < len(line) && strings.IndexByte("$`\"\\\n", line[i+1]) >= 0 {
					if i++; line[i] == '\n' {
						continue
					}
				}
				word.WriteByte(line[i])
			}
		case '\\':
			if i++; i >= len(line) {
				return nil, errors.New("a backslash at the end")
			}
			if line[i] == '\n' {
				continue
			}
			in = true
			word.WriteByte(line[i])
		case '|', '&', ';', '<', '>', '(', ')', '$', '`':
			return nil, fmt.Errorf("%q is not for a shell here: quote it", c)
		case 0:
			return nil, errors.New("a zero byte")
		default:
			in = true
			word.WriteByte(c)
		}
	}
	if in {
		words = append(words, word.String())
	}
	return words, nil
}

var errNoToken = errors.New("not known")

// expand puts t into a word of an rsh command. It says whether the word names the host.
func expand(word string, t Target) (s string, host bool, err error) {
	var b strings.Builder
	for i := 0; i < len(word); i++ {
		if word[i] != '%' {
			b.WriteByte(word[i])
			continue
		}
		i++
		if i >= len(word) {
			return "", false, errors.New("a percent sign at the end of a word (write %%)")
		}
		switch word[i] {
		case '%':
			b.WriteByte('%')
		case 'h':
			b.WriteString(t.Host())
			host = true
		case 'r':
			if t.User == "" {
				err = fmt.Errorf("%%r: the user of %s is %w", t.Name, errNoToken)
			}
			b.WriteString(t.User)
		case 'p':
			if t.Port == 0 {
				err = fmt.Errorf("%%p: the port of %s is %w", t.Name, errNoToken)
			}
			b.WriteString(strconv.Itoa(t.Port))
		default:
			return "", false, fmt.Errorf("%%%c in %q: tokens are %%h, %%r, %%p and %%%%", word[i], word)
		}
	}
	return b.String(), host, err
}
