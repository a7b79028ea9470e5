package keeper

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseStat(t *testing.T) {
	for _, c := range []struct {
		stat string
		want Process
		ok   bool
	}{
		{"12 (sh) S 1 10 9 0 -1", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'S'}, true},
		{"12 (a) b (c) R 1 10 9 0", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'R'}, true},
		{"12 (\n) Z 1 10 9", Process{PID: 12, Parent: 1, Group: 10, Session: 9, State: 'Z'}, true},
		{"", Process{}, false},
		{"12 (sh) S 1", Process{}, false},
		{")(", Process{}, false},
		{"x (sh) S 1 2 3", Process{}, false},
	} {
		got, ok := parseStat([]byte(c.stat))
		if ok != c.ok || ok && !cmp.Equal(got, c.want) {
			t.Errorf("parseStat(%q) = %+v, %v, want %+v, %v", c.stat, got, ok, c.want, c.ok)
		}
	}
}

func TestProcessesFindsThisOne(t *testing.T) {
	for _, p := range Processes() {
		if p.PID == os.Getpid() {
			if p.Parent != os.Getppid() {
				t.Errorf("parent %d, want %d", p.Parent, os.Getppid())
			}
			return
		}
	}
	t.Error("this process is not in the table")
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("12 (a) b (c) R 1 10 9 0"))
	f.Fuzz(func(t *testing.T, stat []byte) {
		if p, ok := parseStat(stat); ok && p.State == 0 {
			t.Error("no state")
		}
	})
}
