package launcher

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// Where a file of the job is looked for on a host, and where it is put.
func TestStagePlan(t *testing.T) {
	dir := t.TempDir()
	for _, f := range []string{"prog", "data/f", "data/more/g"} {
		write(t, filepath.Join(dir, f), f, 0o755)
	}
	if err := os.Symlink("f", filepath.Join(dir, "data/link")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		program Program
		wdir    string
		stage   []string
		want    []string // at > to; the program last
	}{
		{"a name in PATH", Program{Name: "sh", Path: "/bin/sh"}, "", nil, nil},
		{"relative", Program{Name: "./prog", Path: dir + "/prog"}, "", nil, []string{dir + "/prog > prog"}},
		{"outside", Program{Name: "../x/prog", Path: dir + "/prog"}, "", nil, []string{dir + "/prog > .program/prog"}},
		{"absolute", Program{Name: dir + "/prog", Path: dir + "/prog"}, "", nil, []string{dir + "/prog > .program/prog"}},
		{"other directory", Program{Name: "./prog", Path: dir + "/prog"}, "/w", []string{"data/f", dir + "/data/f"},
			[]string{"/w/data/f > ", dir + "/data/f > ", dir + "/prog > .program/prog"}},
		{"directory", Program{Name: "sh", Path: "/bin/sh"}, "", []string{"./data/", "prog"},
			[]string{dir + "/data/f > data/f", dir + "/data/link > data/link", dir + "/data/more/g > data/more/g", dir + "/prog > prog"}},
		{"twice", Program{Name: "./prog", Path: dir + "/prog"}, "", []string{"data/f", "data/", "./data/more/g", "."},
			[]string{dir + "/data/f > data/f", dir + "/data/link > data/link", dir + "/data/more/g > data/more/g", dir + "/prog > prog"}},
		{"twice, other directory", Program{Name: "./prog", Path: dir + "/prog"}, dir, []string{"data/f", dir + "/data/f", "prog"},
			[]string{dir + "/data/f > ", dir + "/prog > ", dir + "/prog > .program/prog"}},
		{"none", Program{Name: "./prog", Path: dir + "/prog"}, "", []string{"none"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := Job{Hosts: []Host{{Name: "a", Addr: "a"}}, Stage: c.stage, Dir: c.wdir}.Plan(Facts{Programs: []Program{c.program}, Host: "here", Dir: dir})
			if err != nil {
				t.Fatal(err)
			}
			s, err := newStaging(t.Context(), p, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			defer s.end()
			items, at, err := s.offer(t.Context(), "amd64", []int{0})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, it := range items {
				got = append(got, it.at+" > "+it.to)
			}
			if d := cmp.Diff(got, c.want); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
			if want := len(c.want) > 0 && strings.HasPrefix(c.want[len(c.want)-1], dir+"/prog") && c.name != "directory"; (at[0] > 0) != want || want && at[0] != len(items) {
				t.Errorf("the program is item %d of %d", at[0], len(items))
			}
		})
	}
}

func TestStageErrors(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/d/f", "", 0o600)
	if err := os.Symlink("nowhere", filepath.Join(dir, "d/dangling")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ file, want string }{
		{"../x", "--stage ../x: it lies outside of the current directory, so it has no place in the ranks' directory elsewhere: give its absolute path"},
		{"gone", "--stage gone: no such file or directory"},
		{"d", "--stage d: " + dir + "/d/dangling is a symbolic link, and not to a file"},
		{"pipe", "send pipe: not a regular file"},
	} {
		p, err := Job{Hosts: []Host{{Name: "a", Addr: "a"}}, Stage: []string{c.file}}.Plan(Facts{Programs: []Program{{Name: "sh"}}, Host: "here", Dir: dir})
		if err == nil {
			var s *staging
			if s, err = newStaging(t.Context(), p, io.Discard); err == nil {
				_, _, err = s.offer(t.Context(), "amd64", []int{0})
				s.end()
			}
		}
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: %v, want %s", c.file, err, c.want)
		}
	}
}

// A file that changes behind the making of its hash is not taken, nor is one that is damaged on the way.
func TestStageChanged(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"first", ""},
		{"other", "what came of /nowhere/f is not what was read before: the file was changed meanwhile"},
		{"longer than before", "what came of /nowhere/f is not what was read before: the file was changed meanwhile"},
		{"less", "send f: the file was changed meanwhile"},
	} {
		file := filepath.Join(t.TempDir(), "f")
		write(t, file, "first", 0o600)
		it := newItem("f", file, "/nowhere/f", "f")
		it.read(t.Context())
		write(t, file, c.text, 0o600)
		a, b := net.Pipe()
		agent := &agentServer{job: &agentwire.Prepare{Items: wireItems([]*item{it})}, files: jobFiles{dir: t.TempDir()}}
		received := make(chan error)
		go func() {
			var err error
			if agent.mux, err = agentwire.Accept(b); err == nil {
				_, err = agent.receive(t.Context(), 0)
			}
			received <- err
		}()
		mux, err := agentwire.Dial(a)
		if err != nil {
			t.Fatal(err)
		}
		s := &staging{turns: make(chan struct{}, 1)}
		_, sendErr := s.send(t.Context(), mux, []*item{it}, []int{0})
		err = <-received
		if sendErr != nil {
			err = sendErr
		}
		if got := fmt.Sprint(err); got != c.want && (err != nil || c.want != "") {
			t.Errorf("%q: %v, want %s", c.text, err, c.want)
		}
		mux.Close()
		agent.mux.Close()
	}
}

// The directory of an agent that died is removed by the next one, that of a living one is not.
func TestJobDirSweep(t *testing.T) {
	base := t.TempDir()
	if !ownDisk(base) {
		citest.Lacking(t, "a directory on a file system of this machine alone: %s is not", base)
	}
	t.Setenv("TMPDIR", base)
	write(t, filepath.Join(base, jobDirPrefix+"dead-1/closed/f"), "", 0o600)
	if err := os.Chmod(filepath.Join(base, jobDirPrefix+"dead-1/closed"), 0); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(base, jobDirPrefix+"a file"), "", 0o600)
	write(t, filepath.Join(base, "gorun-other/f"), "", 0o600)
	lives := filepath.Join(base, jobDirPrefix+"lives-1")
	write(t, lives+"/f", "", 0o600)
	d, err := os.Open(lives)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	var f jobFiles
	f.sweep(base, time.Hour)
	left := func() (names []string) {
		entries, err := os.ReadDir(base)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if got := left(); len(got) != 4 {
		t.Errorf("left of young ones: %q, want all", got)
	}
	f.sweep(base, 0)
	if d := cmp.Diff(left(), []string{jobDirPrefix + "a file", jobDirPrefix + "lives-1", "gorun-other"}); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
}
