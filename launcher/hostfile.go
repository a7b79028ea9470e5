package launcher

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/gorun-dev/gorun/launcher/internal/files"
)

// maxHostfile bounds a hostfile, in bytes.
const maxHostfile = 16 << 20

// ReadHostfile reads the hosts of a hostfile. An error is a *UsageError that names file, line and column.
func ReadHostfile(name string) ([]Host, error) {
	data, err := files.Read(name, maxHostfile)
	if err != nil {
		return nil, flagf("--hostfile", "%s: %s", name, files.Reason(err))
	}
	return DecodeHostfile(name, data)
}

// DecodeHostfile decodes the text of a hostfile; name is for errors. A line holds a host as in a list of hosts, and then settings:
// Open MPI's slots=N and max_slots=N, MPICH's user=NAME, and port=N. A # begins a comment. The same host twice has the slots of both.
func DecodeHostfile(name string, data []byte) ([]Host, error) {
	var hosts []Host
	n := 0
	for line := range strings.SplitSeq(string(data), "\n") {
		n++
		text, _, _ := strings.Cut(line, "#")
		words := hostfileWords(text)
		if len(words) == 0 {
			continue
		}
		h, at, err := hostfileLine(words)
		if err != nil {
			col := utf8.RuneCountInString(line[:words[at].pos]) + 1
			msg := fmt.Sprintf("%s:%d:%d: %v", name, n, col, err)
			if n == 1 && strings.HasPrefix(strings.TrimSpace(text), "[") {
				return nil, &UsageError{Msg: msg, Hint: "if it is a job file, give it with --job"}
			}
			if strings.Contains(words[0].text, ",") {
				return nil, &UsageError{Msg: msg, Hint: "each host has a line of its own"}
			}
			return nil, &UsageError{Msg: msg}
		}
		if len(hosts) == maxHosts {
			return nil, usagef("%s:%d:1: more than %d hosts", name, n, maxHosts)
		}
		hosts = append(hosts, h)
	}
	if len(hosts) == 0 {
		return nil, usagef("%s: no host in it", name)
	}
	return hosts, nil
}

type hostfileWord struct {
	text string
	pos  int // offset in the line
}

// hostfileWords takes a line apart: words, and = signs, which need no space around them.
func hostfileWords(s string) []hostfileWord {
	var words []hostfileWord
	for i := 0; i < len(s); {
		if strings.IndexByte(" \t\r", s[i]) >= 0 {
			i++
			continue
		}
		n := 1
		if s[i] != '=' {
			if n = strings.IndexAny(s[i:], " \t\r="); n < 0 {
				n = len(s) - i
			}
		}
		words = append(words, hostfileWord{s[i : i+n], i})
		i += n
	}
	return words
}

// hostfileKeys are the settings of a host.
var hostfileKeys = []string{"slots", "max_slots", "port", "user"}

// hostfileLine reads the words of a line. With an error comes the index of the word that it is about.
func hostfileLine(words []hostfileWord) (Host, int, error) {
	first := words[0].text
	switch {
	case strings.HasPrefix(first, "^"):
		return Host{}, 0, errors.New("a host can't be excluded; leave its line out")
	case first == "rank" && len(words) > 2 && words[2].text == "=":
		return Host{}, 0, errors.New("this is a line of a rankfile; ranks are placed by --map-by and the order of the hosts")
	case first == "=":
		return Host{}, 0, errors.New("a line begins with a host")
	}
	h, err := parseHost(first)
	if err != nil {
		return h, 0, fmt.Errorf("host %q: %w", first, err)
	}
	seen := map[string]bool{"slots": h.Slots != 0, "port": h.Port != 0, "user": h.User != ""}
	for i := 1; i < len(words); i += 3 {
		key := strings.ReplaceAll(strings.ToLower(words[i].text), "-", "_")
		if i+2 >= len(words) || words[i+1].text != "=" || words[i+2].text == "=" {
			if key == "=" {
				return h, i, errors.New("= without a name before it")
			}
			return h, i, fmt.Errorf("%q must be a setting such as slots=4", words[i].text)
		}
		value := words[i+2].text
		if key == "slots_max" {
			key = "max_slots"
		}
		if seen[key] {
			return h, i, fmt.Errorf("%s is given twice", key)
		}
		seen[key] = true
		var err error
		switch key {
		case "slots":
			h.Slots, err = parseSlots(value)
		case "max_slots":
			if h.MaxSlots, err = parseSlots(value); err != nil {
				err = fmt.Errorf("max_%w", err)
			}
		case "port":
			h.Port, err = parsePort(value)
		case "user":
			h.User = value
			err = h.check()
		default:
			msg := "unknown setting " + words[i].text
			if near := Nearest(key, hostfileKeys); near != "" {
				return h, i, fmt.Errorf("%s; did you mean %s?", msg, near)
			}
			return h, i, fmt.Errorf("%s; there are %s", msg, strings.Join(hostfileKeys, ", "))
		}
		if err != nil {
			return h, i + 2, err
		}
	}
	if h.MaxSlots > 0 && h.slots() > h.MaxSlots {
		return h, 0, fmt.Errorf("host %s: %d slots, more than its max_slots %d", h.Name, h.slots(), h.MaxSlots)
	}
	return h, 0, nil
}
