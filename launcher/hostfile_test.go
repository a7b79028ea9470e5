package launcher

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeHostfile(t *testing.T) {
	got, err := DecodeHostfile("hosts", []byte("# the cluster\n\na slots=4 max_slots=8   # Open MPI\r\nb:4\t# MPICH\nme@c  slots = 2\nd user=you port=2222\nssh://e:22:3\n[::1]:2\na\nf Max-Slots=3\n  g"))
	if err != nil {
		t.Fatal(err)
	}
	want := []Host{{Name: "a", Addr: "a", Slots: 4, MaxSlots: 8}, {Name: "b", Addr: "b", Slots: 4}, {Name: "c", User: "me", Addr: "c", Slots: 2},
		{Name: "d", User: "you", Addr: "d", Port: 2222}, {Name: "e", Addr: "e", Port: 22, Slots: 3}, {Name: "::1", Addr: "::1", Slots: 2},
		{Name: "a", Addr: "a"}, {Name: "f", Addr: "f", MaxSlots: 3}, {Name: "g", Addr: "g"}}
	if d := cmp.Diff(got, want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}

func TestDecodeHostfileErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                        "hosts: no host in it",
		"# a\n\n":                 "hosts: no host in it",
		"a\nb slots=x\n":          `hosts:2:9: slots "x": must be a number from 1 to 16384`,
		"ä slots=x\n":             `hosts:1:9: slots "x": must be a number from 1 to 16384`,
		"a slot=4\n":              "hosts:1:3: unknown setting slot; did you mean slots?",
		"a   xyzzy=4\n":           "hosts:1:5: unknown setting xyzzy; there are slots, max_slots, port, user",
		"a slots\n":               `hosts:1:3: "slots" must be a setting such as slots=4`,
		"a slots=\n":              `hosts:1:3: "slots" must be a setting such as slots=4`,
		"a 4\n":                   `hosts:1:3: "4" must be a setting such as slots=4`,
		"a slots=4 slots=4\n":     "hosts:1:11: slots is given twice",
		"a:4 slots=4\n":           "hosts:1:5: slots is given twice",
		"me@a user=you\n":         "hosts:1:6: user is given twice",
		"a user=-l\n":             `hosts:1:8: user "-l" is no user's name`,
		"a max_slots=0\n":         `hosts:1:13: max_slots "0": must be a number from 1 to 16384`,
		"a slots=4 max_slots=2\n": "hosts:1:1: host a: 4 slots, more than its max_slots 2",
		"\n  a:b\n":               `hosts:2:3: host "a:b": slots "b": must be a number from 1 to 16384`,
		"a\nb, c\n":               `hosts:2:1: host "b,": ',' is in no host's name; each host has a line of its own`,
		"^a\n":                    "hosts:1:1: a host can't be excluded; leave its line out",
		"rank 0=a slot=1\n":       "hosts:1:1: this is a line of a rankfile; ranks are placed by --map-by and the order of the hosts",
		"= a\n":                   "hosts:1:1: a line begins with a host",
		"a = b c\n":               "hosts:1:3: = without a name before it",
		"[job]\nnp = 4\n":         `hosts:1:1: host "[job]": "job" is no IPv6 address; if it is a job file, give it with --job`,
	} {
		_, err := DecodeHostfile("hosts", []byte(text))
		if _, ok := errors.AsType[*UsageError](err); !ok {
			t.Errorf("%q: got %v (%T), want a *UsageError", text, err, err)
		} else if err.Error() != want {
			t.Errorf("%q: got\n  %v, want\n  %s", text, err, want)
		}
	}
	// A device that never ends is not read to its end.
	if _, err := ReadHostfile("/dev/zero"); err == nil || err.Error() != "--hostfile /dev/zero: more than 16384 KiB" {
		t.Errorf("got %v", err)
	}
	if _, _, err := ReadJobFile("/dev/zero"); err == nil || err.Error() != "job file /dev/zero: more than 16384 KiB" {
		t.Errorf("got %v", err)
	}
	_, err := ReadHostfile("/nonexistent/hosts")
	if want := "--hostfile /nonexistent/hosts: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func FuzzDecodeHostfile(f *testing.F) {
	f.Add([]byte("a slots=4 max_slots=8\nb:4 # x\nme@c user = d port=22\n"))
	f.Add([]byte("[::1]:2 slots=\n^a\nrank 0=a\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		hosts, err := DecodeHostfile("hosts", data)
		if err != nil {
			if _, ok := errors.AsType[*UsageError](err); !ok || !strings.HasPrefix(err.Error(), "hosts:") {
				t.Fatalf("error %v (%T) does not name the file", err, err)
			}
			return
		}
		for _, h := range hosts {
			if err := h.check(); err != nil || h.Slots < 0 || h.Port < 0 {
				t.Fatalf("accepted %+v: %v", h, err)
			}
		}
	})
}
