package sshway

import (
	"errors"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/way"
)

func TestRoute(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config")
	write(t, file, `Host gate
 Port 2200
Host inner
 HostName 10.1.1.1
 ProxyJump gate
Host deep
 HostName 10.2.2.2
 ProxyJump me@inner:23
Host listed
 ProxyJump gate,[fe80::1]:24
Host command
 ProxyCommand connect %h:%p
Host behind
 ProxyJump command
Host direct
 ProxyJump none
Host circle
 ProxyJump circle2
Host circle2
 ProxyJump circle
Host *
 User someone
`)
	cl := New(Config{File: file})
	for _, c := range []struct {
		to   way.Target
		want Route
	}{
		{way.Target{Addr: "gate"}, Route{User: "someone", Host: "gate", Port: 2200}},
		{way.Target{Addr: "gate", User: "me", Port: 9}, Route{User: "me", Host: "gate", Port: 9}},
		{way.Target{Addr: "inner"}, Route{User: "someone", Host: "10.1.1.1", Port: 22, Jumps: []string{"someone@gate:2200"}}},
		{way.Target{Addr: "deep"}, Route{User: "someone", Host: "10.2.2.2", Port: 22, Jumps: []string{"someone@gate:2200", "me@10.1.1.1:23"}}},
		{way.Target{Addr: "listed"}, Route{User: "someone", Host: "listed", Port: 22, Jumps: []string{"someone@gate:2200", "someone@[fe80::1]:24"}}},
		{way.Target{Addr: "command"}, Route{User: "someone", Host: "command", Port: 22, Command: "connect command:22"}},
		{way.Target{Addr: "behind"}, Route{User: "someone", Host: "behind", Port: 22, Jumps: []string{"someone@command:22"}, Command: "connect command:22"}},
		{way.Target{Addr: "direct"}, Route{User: "someone", Host: "direct", Port: 22}},
	} {
		got, err := cl.Route(t.Context(), c.to)
		if err != nil {
			t.Errorf("%v: %v", c.to, err)
		}
		if d := cmp.Diff(got, c.want); d != "" {
			t.Errorf("%v: -got +want:\n%s", c.to, d)
		}
	}
	for _, name := range []string{"circle", "a b"} {
		if r, err := cl.Route(t.Context(), way.Target{Addr: name}); err == nil {
			t.Errorf("%s: %+v, want an error", name, r)
		} else if e, ok := errors.AsType[*way.Error](err); ok && e.Phase != way.PhaseConfigure {
			t.Errorf("%s: %v", name, err)
		}
	}
}
