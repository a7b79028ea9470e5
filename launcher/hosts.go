package launcher

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Host is a host that the user or a resource manager named.
type Host struct {
	Name     string // for messages
	User     string // "": from the ssh configuration
	Addr     string // a name, an alias of the ssh configuration or an address without brackets
	Port     int    // 0: from the ssh configuration
	Slots    int    // how many ranks it takes; 0: not said, which counts as 1
	MaxSlots int    // how many it takes with oversubscription; 0: any number
}

// maxSlots bounds what is believed of a number of slots.
const maxSlots = MaxNP

func (h Host) slots() int { return max(h.Slots, 1) }

// String writes the host as ParseHosts reads it.
func (h Host) String() string {
	s := h.Addr
	if strings.Contains(s, ":") {
		s = "[" + s + "]"
	}
	if h.User != "" {
		s = h.User + "@" + s
	}
	if h.Port != 0 {
		s = "ssh://" + s + ":" + strconv.Itoa(h.Port)
	}
	if h.Slots != 0 {
		s += ":" + strconv.Itoa(h.Slots)
	}
	return s
}

// ParseHosts reads a list of hosts, separated by commas: [user@]host[:slots] or ssh://[user@]host[:port[:slots]], an IPv6
// address in brackets.
func ParseHosts(list string) ([]Host, error) {
	var hosts []Host
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		h, err := parseHost(item)
		if err != nil {
			return nil, fmt.Errorf("host %q: %w", item, err)
		}
		if len(hosts) == maxHosts {
			return nil, fmt.Errorf("more than %d hosts", maxHosts)
		}
		hosts = append(hosts, h)
	}
	return hosts, nil
}

// maxHosts bounds a list of hosts: one that has no rank is useless.
const maxHosts = MaxNP

// parseHost reads one item of a list.
func parseHost(s string) (Host, error) {
	var h Host
	rest, url := strings.CutPrefix(s, "ssh://")
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		if h.User, rest = rest[:at], rest[at+1:]; h.User == "" {
			return h, errors.New("its user is empty")
		}
	}
	addr, numbers, err := cutHost(rest)
	if err != nil {
		return h, err
	}
	h.Addr = addr
	var fields []string
	if numbers != "" {
		fields = strings.Split(numbers[1:], ":")
	}
	if url && len(fields) > 0 {
		if h.Port, err = parsePort(fields[0]); err != nil {
			return h, err
		}
		fields = fields[1:]
	}
	if len(fields) > 0 {
		if h.Slots, err = parseSlots(fields[0]); err != nil {
			return h, err
		}
		fields = fields[1:]
	}
	if len(fields) > 0 {
		if url {
			return h, errors.New("has more than a port and a number of slots")
		}
		return h, errors.New("has more than a number of slots; a port is given with ssh://host:port")
	}
	h.Name = h.Addr
	return h, h.check()
}

// cutHost splits a host from the numbers behind it, which begin with a colon.
func cutHost(s string) (addr, numbers string, err error) {
	if inner, ok := strings.CutPrefix(s, "["); ok {
		addr, numbers, ok := strings.Cut(inner, "]")
		if !ok || numbers != "" && numbers[0] != ':' {
			return "", "", errors.New("must be [address] or [address]:slots")
		}
		if a, err := netip.ParseAddr(addr); err != nil || !a.Is6() {
			return "", "", fmt.Errorf("%q is no IPv6 address", addr)
		}
		return addr, numbers, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Is6() {
		return "", "", fmt.Errorf("an IPv6 address is written in brackets: [%s]", s)
	}
	if colon := strings.IndexByte(s, ':'); colon >= 0 {
		return s[:colon], s[colon:], nil
	}
	return s, "", nil
}

func parseSlots(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maxSlots {
		return 0, fmt.Errorf("slots %q: must be a number from 1 to %d", s, maxSlots)
	}
	return n, nil
}

func parsePort(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 65535 {
		return 0, fmt.Errorf("port %q: must be a number from 1 to 65535", s)
	}
	return n, nil
}

// check refuses what no host or user is called, and what a command that gets it as an argument could take for a flag.
func (h Host) check() error {
	if h.Addr == "" {
		return errors.New("its name is empty")
	}
	if a, err := netip.ParseAddr(h.Addr); err != nil || !a.Is6() {
		if c := notIn(h.Addr, "._-"); c != "" {
			return fmt.Errorf("%s is in no host's name", c)
		}
	} else if c := notIn(a.Zone(), "._-"); c != "" {
		return fmt.Errorf("%s is in no interface's name", c)
	}
	if strings.HasPrefix(h.Addr, "-") {
		return errors.New("a host's name does not begin with -")
	}
	if c := notIn(h.User, `._-+@\`); c != "" {
		return fmt.Errorf("%s is in no user's name", c)
	}
	if strings.HasPrefix(h.User, "-") || strings.HasSuffix(h.User, `\`) {
		return fmt.Errorf("user %q is no user's name", h.User)
	}
	return nil
}

// notIn is the first character of s that is no letter, no digit and not in other, quoted; "" if there is none.
func notIn(s, other string) string {
	for i, c := range s {
		if c == utf8.RuneError {
			return strconv.QuoteToASCII(s[i:min(i+1, len(s))])
		}
		if !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune(other, c) {
			return strconv.QuoteRune(c)
		}
	}
	return ""
}

// uniteHosts makes one host of those with the same name, user and port, at the place of the first: their slots add up. Hosts for which
// local is true are one, whatever they are called.
func uniteHosts(hosts []Host, local func(Host) bool) ([]Host, error) {
	type key struct {
		user, addr string
		port       int
		local      bool
	}
	at := make(map[key]int, len(hosts))
	var out []Host
	for _, h := range hosts {
		k := key{user: h.User, addr: strings.ToLower(h.Addr), port: h.Port}
		if local(h) {
			k = key{local: true}
		}
		i, twice := at[k]
		if !twice {
			at[k] = len(out)
			out = append(out, h)
			continue
		}
		o := &out[i]
		o.Slots = o.slots() + h.slots()
		o.MaxSlots = max(o.MaxSlots, h.MaxSlots)
		if o.Slots > maxSlots {
			return nil, usagef("host %s: more than %d slots", h.Name, maxSlots)
		}
	}
	for i := range out {
		if m := out[i].MaxSlots; m > 0 && out[i].slots() > m {
			return nil, usagef("host %s: %d slots, more than its max_slots %d", out[i].Name, out[i].slots(), m)
		}
	}
	nameApart(out)
	return out, nil
}

// nameApart gives hosts that messages could not tell apart longer names.
func nameApart(hosts []Host) {
	count := map[string]int{}
	for _, h := range hosts {
		count[h.Name]++
	}
	for i := range hosts {
		h := &hosts[i]
		if count[h.Name] < 2 {
			continue
		}
		long := *h
		long.Slots = 0
		h.Name = strings.TrimPrefix(long.String(), "ssh://")
	}
}
