package launcher

import (
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// sharedJob is a job whose hosts have one file system. Each file's text is its name.
type sharedJob struct {
	t     *testing.T
	id    string
	root  string
	items []agentwire.Item
}

func newSharedJob(t *testing.T, root string, files ...string) *sharedJob {
	j := &sharedJob{t: t, id: strings.ToLower(rand.Text())[:16], root: root}
	for _, f := range files {
		sum := sha256.Sum256([]byte(f))
		j.items = append(j.items, agentwire.Item{At: []byte(filepath.Join(root, f)), Size: int64(len(f)), Sum: sum[:], Mode: 0o644})
	}
	return j
}

// host is the part of a host's agent that puts files.
func (j *sharedJob) host(node int) *agentServer {
	j.t.Helper()
	k, err := keeper.Start(keeper.Job{ID: j.id})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(k.Stop)
	s := &agentServer{job: &agentwire.Prepare{Job: j.id, Node: node, Items: j.items}, files: jobFiles{job: j.id, keeper: k}}
	var places []string
	for _, it := range j.items {
		places = append(places, string(it.At))
	}
	s.files.share(places)
	return s
}

// put puts one of the files.
func (j *sharedJob) put(s *agentServer, file string) {
	j.t.Helper()
	if _, err := s.put(j.item(file), writes(file)); err != nil {
		j.t.Fatalf("put %s: %v", file, err)
	}
}

// have reports whether a host has one of the files.
func (j *sharedJob) have(s *agentServer, file string) bool {
	j.t.Helper()
	err := s.have(j.t.Context(), j.item(file), false)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		j.t.Errorf("look for %s: %v", file, err)
	}
	return err == nil
}

func (j *sharedJob) item(file string) agentwire.Item {
	j.t.Helper()
	for _, it := range j.items {
		if string(it.At) == filepath.Join(j.root, file) {
			return it
		}
	}
	j.t.Fatalf("no file %s", file)
	return agentwire.Item{}
}

func writes(s string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

// tree lists all that is below a directory.
func tree(t *testing.T, root string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && path != root {
			rel, _ := filepath.Rel(root, path)
			all = append(all, rel)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return all
}

// A directory that one host has made and others have put something into goes with the last of that, and is not waited for if a rank has left a
// file in it. Time is the bubble's: a host that waits is seen to, and how long it waits is exact.
func TestSharedDirs(t *testing.T) {
	for _, c := range []struct {
		name  string
		ranks func(root string) error // what they do
		waits [2]bool                 // whether each host waits if it ends first
		left  []string
	}{
		{"no rank's file", nil, [2]bool{true, true}, nil},
		{"a file", func(root string) error { return os.WriteFile(root+"/d/rank", nil, 0o600) }, [2]bool{false, true}, []string{"d", "d/rank"}},
		{"a directory", func(root string) error { return os.Mkdir(root+"/d/rank", 0o700) }, [2]bool{false, true}, []string{"d", "d/rank"}},
		{"a file in the other's directory", func(root string) error { return os.WriteFile(root+"/d/more/rank", nil, 0o600) }, [2]bool{}, []string{"d", "d/more", "d/more/rank"}},
		{"a link where a directory was", func(root string) error {
			return errors.Join(os.Rename(root+"/d/more", root+"/elsewhere"), os.Symlink("../elsewhere", root+"/d/more"))
		}, [2]bool{}, []string{"d", "d/more", "elsewhere"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for early, late := range []int{1, 0} { // the hosts
				synctest.Test(t, func(t *testing.T) {
					root := t.TempDir()
					j := newSharedJob(t, root, "d/f", "d/more/g", "d/more/h")
					hosts := []*agentServer{j.host(0), j.host(1)}
					j.put(hosts[0], "d/f")      // makes d
					j.put(hosts[1], "d/more/g") // makes d/more
					j.put(hosts[0], "d/more/h")
					if c.ranks != nil {
						if err := c.ranks(root); err != nil {
							t.Fatal(err)
						}
					}
					begin := time.Now()
					done := make(chan error, 1)
					go func() { done <- hosts[early].files.remove() }()
					synctest.Wait() // it waits, or has ended
					if waits := len(done) == 0; waits != c.waits[early] {
						t.Errorf("host %d, which ends first, waits: %v, want %v", early, waits, c.waits[early])
					}
					if err := hosts[late].files.remove(); err != nil {
						t.Error(err)
					}
					if err := <-done; err != nil {
						t.Error(err)
					}
					if took := time.Since(begin); took > time.Second {
						t.Errorf("it took %v", took)
					}
					if d := cmp.Diff(tree(t, root), c.left); d != "" {
						t.Errorf("host %d ends last, left: -got +want:\n%s", late, d)
					}
				})
			}
		})
	}
}

// A host that is dead does not remove what it has put: the other waits, and not for ever. Nor does it wait for a file that it could not remove itself.
func TestSharedDirsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		j := newSharedJob(t, root, "d/f", "d/g")
		a, dead := j.host(0), j.host(1)
		j.put(a, "d/f")
		j.put(dead, "d/g")
		begin := time.Now()
		if err := a.files.remove(); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took < sharedWait || took > sharedWait+time.Second {
			t.Errorf("it waited for %v, want %v", took, sharedWait)
		}
		if d := cmp.Diff(tree(t, root), []string{"d", "d/g"}); d != "" {
			t.Errorf("left: -got +want:\n%s", d)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		j := newSharedJob(t, root, "d/f")
		a := j.host(0)
		j.put(a, "d/f")
		// A directory in its place that is not empty: also root cannot unlink that.
		if err := errors.Join(os.Remove(root+"/d/f"), os.Mkdir(root+"/d/f", 0o700), os.Mkdir(root+"/d/f/x", 0o700)); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if err := a.files.remove(); err == nil || !strings.Contains(err.Error(), root+"/d/f") {
			t.Errorf("error %v, want one of %s/d/f", err, root)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("it waited for %v", took)
		}
	})
}

// Two jobs that put files into one directory that was missing: the end of the first removes it while the second is about to use it.
func TestSharedDirOfTwoJobs(t *testing.T) {
	for _, at := range []string{"d/f", "d/more/f", "f"} {
		root := t.TempDir() + "/top"
		first, second := newSharedJob(t, root, "d/more/x"), newSharedJob(t, root, at)
		a, b := first.host(0), second.host(0)
		first.put(a, "d/more/x")
		file := filepath.Join(root, at)
		calls := 0
		f, err := createIn(func() error {
			err := b.makeDirs(filepath.Dir(file))
			if calls++; calls == 1 { // they are there, and go
				err = errors.Join(err, a.files.remove())
			}
			return err
		}, file, 0o600)
		if err != nil {
			t.Fatalf("%s: %v", at, err)
		}
		f.Close()
		if calls != 2 {
			t.Errorf("%s: directories were made %d times, want 2", at, calls)
		}
		b.files.elsewhere(file)
		if err := b.files.remove(); err != nil {
			t.Errorf("%s: %v", at, err)
		}
		if d := cmp.Diff(tree(t, filepath.Dir(root)), []string(nil)); d != "" {
			t.Errorf("%s, left: -got +want:\n%s", at, d)
		}
	}
	// A directory can go between two that are made.
	root := t.TempDir()
	tries := 0
	f, err := createIn(func() error {
		if tries++; tries == 1 {
			return os.Mkdir(root+"/d/more", 0o700)
		}
		return os.MkdirAll(root+"/d/more", 0o700)
	}, root+"/d/more/f", 0o600)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	// It is not tried for ever.
	tries = 0
	if _, err := createIn(func() error { tries++; return nil }, root+"/nowhere/f", 0o600); !errors.Is(err, fs.ErrNotExist) || tries != maxTries {
		t.Errorf("%v after %d tries, want %v after %d", err, tries, fs.ErrNotExist, maxTries)
	}
}

// marks skips a test where files cannot be marked.
func marks(t *testing.T, dir string) {
	t.Helper()
	if err := keeper.Mark(dir, "none"); err != nil {
		citest.Lacking(t, "extended attributes in %s: %v", dir, err)
	}
}

// Two jobs that use one file, or put files into one directory: the first that ends leaves them to the other, and does not wait for it. What was
// there before stays.
func TestSharedByTwoJobs(t *testing.T) {
	marks(t, t.TempDir())
	for _, c := range []struct {
		name, file string   // that the second job needs
		there      []string // the user's
		left       []string // by each of them, if it ends first
	}{
		{"one file", "d/more/f", nil, []string{"d", "d/more", "d/more/f"}},
		{"one directory", "d/more/g", nil, nil},
		{"a directory above", "d/g", nil, nil},
		{"a user's directory", "d/more/f", []string{"d"}, []string{"d", "d/more", "d/more/f"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for early := range 2 {
				synctest.Test(t, func(t *testing.T) {
					root := t.TempDir()
					for _, dir := range c.there {
						if err := os.Mkdir(filepath.Join(root, dir), 0o700); err != nil {
							t.Fatal(err)
						}
					}
					jobs := []*sharedJob{newSharedJob(t, root, "d/more/f"), newSharedJob(t, root, c.file)}
					hosts := []*agentServer{jobs[0].host(0), jobs[1].host(0)}
					jobs[0].put(hosts[0], "d/more/f")
					if jobs[1].have(hosts[1], c.file) != (c.file == "d/more/f") {
						t.Errorf("the second job finds %s: %v", c.file, c.file != "d/more/f")
					}
					if c.file != "d/more/f" {
						jobs[1].put(hosts[1], c.file)
					}
					late := 1 - early
					begin := time.Now()
					if err := hosts[early].files.remove(); err != nil {
						t.Error(err)
					}
					if took := time.Since(begin); took != 0 {
						t.Errorf("the first to end waited for %v", took)
					}
					if _, err := os.Stat(string(jobs[late].items[0].At)); err != nil {
						t.Errorf("of the job that goes on: %v", err)
					}
					if d := cmp.Diff(tree(t, root), c.left); c.left != nil && d != "" {
						t.Errorf("left by the first: -got +want:\n%s", d)
					}
					if err := hosts[late].files.remove(); err != nil {
						t.Error(err)
					}
					if d := cmp.Diff(tree(t, root), c.there); d != "" {
						t.Errorf("left: -got +want:\n%s", d)
					}
				})
			}
		})
	}
	// A file, or a link to one, that no job has put is the user's.
	root := t.TempDir()
	first, second := newSharedJob(t, root, "f"), newSharedJob(t, root, "f", "link", "mine")
	a, b := first.host(0), second.host(0)
	first.put(a, "f")
	second.items[1].Sum, second.items[1].Size = second.items[0].Sum, second.items[0].Size
	write(t, root+"/mine", "mine", 0o600)
	if err := os.Symlink("f", root+"/link"); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"f", "link", "mine"} {
		if !second.have(b, file) {
			t.Errorf("%s is not there", file)
		}
	}
	for _, s := range []*agentServer{a, b} {
		if err := s.files.remove(); err != nil {
			t.Error(err)
		}
	}
	if d := cmp.Diff(tree(t, root), []string{"link", "mine"}); d != "" {
		t.Errorf("left: -got +want:\n%s", d)
	}
}

// A file that is there when a name is to be given, and has gone when it is looked at, was another job's: the name is given then.
func TestPublish(t *testing.T) {
	for _, c := range []struct {
		name string
		at   string                // what is there; "": nothing
		same func(at string) error // what is found then
		ours bool
		err  error
	}{
		{name: "nothing there", ours: true},
		{"the same", "text", func(string) error { return nil }, false, nil},
		{"another", "other", func(string) error { return errOther }, false, errOther},
		{"it goes", "text", func(at string) error { return errors.Join(os.Remove(at), fs.ErrNotExist) }, true, nil},
		{"it never comes", "text", func(string) error { return fs.ErrNotExist }, false, fs.ErrNotExist},
	} {
		t.Run(c.name, func(t *testing.T) {
			tmp, at := filepath.Join(t.TempDir(), "tmp"), filepath.Join(t.TempDir(), "at")
			write(t, tmp, "text", 0o600)
			if c.at != "" {
				write(t, at, c.at, 0o600)
			}
			ours, err := publish(tmp, at, func() error { return c.same(at) })
			if ours != c.ours || !errors.Is(err, c.err) {
				t.Errorf("ours %v, error %v, want %v, %v", ours, err, c.ours, c.err)
			}
			if is := oneFile(tmp, at); is != c.ours {
				t.Errorf("the file has the name: %v, want %v", is, c.ours)
			}
		})
	}
}

// A server of NFS that is asked again as its answer was lost says that the name is there: it is the file's own.
func TestPublishAskedAgain(t *testing.T) {
	root := t.TempDir()
	j := newSharedJob(t, root, "d/f")
	s := j.host(0)
	_, err := s.put(j.item("d/f"), func(w io.Writer) error {
		io.WriteString(w, "d/f")
		names := tree(t, root+"/d")
		if len(names) != 1 {
			return fmt.Errorf("names %q, want a temporary one", names)
		}
		return os.Link(filepath.Join(root, "d", names[0]), root+"/d/f")
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.files.remove(); err != nil {
		t.Error(err)
	}
	if left := tree(t, root); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// A file that is not there is not another one; a link to nothing is.
func TestSameGone(t *testing.T) {
	root := t.TempDir()
	j := newSharedJob(t, root, "f")
	s := &agentServer{}
	at := filepath.Join(root, "f")
	if err := s.same(t.Context(), j.item("f"), false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing there: %v", err)
	}
	if err := os.Symlink("nowhere", at); err != nil {
		t.Fatal(err)
	}
	if err := s.same(t.Context(), j.item("f"), false); err != errOther {
		t.Errorf("a dangling link: %v, want %v", err, errOther)
	}
}
