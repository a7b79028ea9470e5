package sshway

import "testing"

// The commands of an advice work as they stand, also where a path has spaces.
func TestAdviceIsQuoted(t *testing.T) {
	o := &options{user: "me", hostName: "b", port: 22, explicit: true, identities: []string{"/home/a b/id"}, userKnownHosts: []string{"/home/a b/known_hosts"}}
	for _, c := range []struct {
		login login
		want  string
	}{
		{login{o: o, offered: []string{"a key"}}, "ssh-copy-id -i '/home/a b/id.pub' me@b puts a key there"},
		{login{o: o, encrypted: []string{"/home/a b/id", "/home/c"}}, "eval $(ssh-agent); ssh-add '/home/a b/id' /home/c"},
	} {
		if got, _ := c.login.explain(); got != c.want {
			t.Errorf("advice %s, want %s", got, c.want)
		}
	}
	check := &hostKeyCheck{o: o, h: hop{o: o}}
	if got, want := check.learn(), "ssh-keyscan b >> '/home/a b/known_hosts'"; got != want {
		t.Errorf("advice %s, want %s", got, want)
	}
	if got, want := word("~/.ssh/known_hosts"), "~/.ssh/known_hosts"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
