package launcher

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseHosts(t *testing.T) {
	for list, want := range map[string][]Host{
		"a":                      {{Name: "a", Addr: "a"}},
		"a:8, b:4,c":             {{Name: "a", Addr: "a", Slots: 8}, {Name: "b", Addr: "b", Slots: 4}, {Name: "c", Addr: "c"}},
		"me@a.b.c:2":             {{Name: "a.b.c", User: "me", Addr: "a.b.c", Slots: 2}},
		"me@corp@a":              {{Name: "a", User: "me@corp", Addr: "a"}},
		`CORP\me@a`:              {{Name: "a", User: `CORP\me`, Addr: "a"}},
		"10.0.0.1:2":             {{Name: "10.0.0.1", Addr: "10.0.0.1", Slots: 2}},
		"[::1]":                  {{Name: "::1", Addr: "::1"}},
		"me@[fe80::1%eth0]:3":    {{Name: "fe80::1%eth0", User: "me", Addr: "fe80::1%eth0", Slots: 3}},
		"ssh://a":                {{Name: "a", Addr: "a"}},
		"ssh://me@a:2222":        {{Name: "a", User: "me", Addr: "a", Port: 2222}},
		"ssh://a:2222:4,ssh://b": {{Name: "a", Addr: "a", Port: 2222, Slots: 4}, {Name: "b", Addr: "b"}},
		"ssh://[::1]:22:2":       {{Name: "::1", Addr: "::1", Port: 22, Slots: 2}},
		"gpu_node-1.x":           {{Name: "gpu_node-1.x", Addr: "gpu_node-1.x"}},
		"rechner-ä":              {{Name: "rechner-ä", Addr: "rechner-ä"}},
	} {
		got, err := ParseHosts(list)
		if err != nil {
			t.Errorf("%q: %v", list, err)
			continue
		}
		if d := cmp.Diff(got, want); d != "" {
			t.Errorf("%q: -got +want:\n%s", list, d)
		}
	}
}

func TestParseHostsErrors(t *testing.T) {
	for list, want := range map[string]string{
		"":              `host "": its name is empty`,
		"a,,b":          `host "": its name is empty`,
		"a,":            `host "": its name is empty`,
		"a:":            `host "a:": slots "": must be a number from 1 to 16384`,
		"a:0":           `host "a:0": slots "0": must be a number from 1 to 16384`,
		"a:x":           `host "a:x": slots "x": must be a number from 1 to 16384`,
		"a:22:4":        `host "a:22:4": has more than a number of slots; a port is given with ssh://host:port`,
		"::1":           `host "::1": an IPv6 address is written in brackets: [::1]`,
		"[::1":          `host "[::1": must be [address] or [address]:slots`,
		"[::1]4":        `host "[::1]4": must be [address] or [address]:slots`,
		"[10.0.0.1]":    `host "[10.0.0.1]": "10.0.0.1" is no IPv6 address`,
		"[fe80::1%;]":   `host "[fe80::1%;]": ';' is in no interface's name`,
		"ssh://a:0":     `host "ssh://a:0": port "0": must be a number from 1 to 65535`,
		"ssh://a:1:2:3": `host "ssh://a:1:2:3": has more than a port and a number of slots`,
		"@a":            `host "@a": its user is empty`,
		"-oProxy=x":     `host "-oProxy=x": '=' is in no host's name`,
		"-a":            `host "-a": a host's name does not begin with -`,
		"a b":           `host "a b": ' ' is in no host's name`,
		"a$(x)":         `host "a$(x)": '$' is in no host's name`,
		"-l@a":          `host "-l@a": user "-l" is no user's name`,
		"me;x@a":        `host "me;x@a": ';' is in no user's name`,
		"a\xff":         "host \"a\\xff\": \"\\xff\" is in no host's name",
		"http://a":      `host "http://a": slots "//a": must be a number from 1 to 16384`,
	} {
		if got, err := ParseHosts(list); err == nil || err.Error() != want {
			t.Errorf("%q: got %v, %v, want %s", list, got, err, want)
		}
	}
}

func TestUniteHosts(t *testing.T) {
	hosts, err := ParseHosts("localhost:2,b,A:2,b,me@b,here,a,ssh://b:2222")
	if err != nil {
		t.Fatal(err)
	}
	got, err := uniteHosts(hosts, func(h Host) bool { return h.Addr == "localhost" || h.Addr == "here" })
	if err != nil {
		t.Fatal(err)
	}
	want := []Host{{Name: "localhost", Addr: "localhost", Slots: 3}, {Name: "b", Addr: "b", Slots: 2}, {Name: "A", Addr: "A", Slots: 3},
		{Name: "me@b", User: "me", Addr: "b"}, {Name: "b:2222", Addr: "b", Port: 2222}}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	_, err = uniteHosts([]Host{{Name: "a", Addr: "a", Slots: 2, MaxSlots: 2}, {Name: "a", Addr: "a"}}, func(Host) bool { return false })
	if want := "host a: 3 slots, more than its max_slots 2"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// What a host is written as is read back as the same.
func FuzzParseHosts(f *testing.F) {
	for _, s := range []string{"a", "a:8,b", "me@[fe80::1%eth0]:3", "ssh://me@a:22:4", "::1", "a,,b", `CORP\me@a`, "[::]:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, list string) {
		hosts, err := ParseHosts(list)
		if err != nil {
			return
		}
		var words []string
		for _, h := range hosts {
			if h.Addr == "" || strings.HasPrefix(h.Addr, "-") || strings.HasPrefix(h.User, "-") || strings.ContainsAny(h.Addr+h.User, " \t\n'\"$`;&|<>()*?") {
				t.Fatalf("%q: accepted host %+v", list, h)
			}
			words = append(words, h.String())
		}
		again, err := ParseHosts(strings.Join(words, ","))
		if err != nil {
			t.Fatalf("%q was written as %q: %v", list, words, err)
		}
		if d := cmp.Diff(again, hosts); d != "" {
			t.Fatalf("%q was written as %q (-read back +read):\n%s", list, words, d)
		}
	})
}
