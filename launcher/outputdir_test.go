package launcher

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// A directory that earlier jobs wrote to holds, for the next, nothing that may be taken for its own; what gorun did not write stays, and stops the job
// where it is in the way.
func TestOutputDirOfAnEarlierJob(t *testing.T) {
	const record = outputRecordFile
	for _, c := range []struct {
		name  string
		files map[string]string // "-> x": a link
		ranks int
		merge bool
		left  string // the files after that, but the record
		note  string
		err   string
	}{
		{name: "new", ranks: 2},
		{name: "the same again", files: map[string]string{record: `{"ranks":2}`, "rank.0/stdout": "x", "rank.0/stderr": "x", "rank.1/stdout": "x", "rank.1/stderr": "x"}, ranks: 2,
			left: "rank.0/stderr rank.0/stdout rank.1/stderr rank.1/stdout"},
		{name: "fewer ranks", files: map[string]string{record: `{"ranks":3}`, "rank.0/stdout": "x", "rank.1/stdout": "x", "rank.1/stderr": "x", "rank.2/stdout": "x", "rank.2/mine": "x", "rank.3/notes": "x"}, ranks: 1,
			left: "rank.0/stdout rank.2/mine rank.3/notes"},
		{name: "merged now", files: map[string]string{record: `{"ranks":2}`, "rank.0/stdout": "x", "rank.0/stderr": "x", "rank.1/stderr": "x"}, ranks: 2, merge: true, left: "rank.0/stdout"},
		{name: "not merged now", files: map[string]string{record: `{"ranks":1,"merge":true}`, "rank.0/stdout": "x"}, ranks: 1, left: "rank.0/stdout"},
		{name: "stacks", files: map[string]string{record: `{"ranks":1,"stacks":true}`, stacksFile: "x"}, ranks: 1},
		{name: "stacks of somebody else", files: map[string]string{record: `{"ranks":1}`, stacksFile: "x"}, ranks: 1, left: stacksFile},
		{name: "somebody else's ranks", files: map[string]string{"rank.4/stdout": "x", "rank.5/stderr": "x", "rank.05/stdout": "x", "rank.6/x": "x"}, ranks: 1, left: "rank.05/stdout rank.4/stdout rank.5/stderr rank.6/x",
			note: "in DIR are files of ranks 4,5 that are not of this job, and that gorun did not write: they are left as they are"},
		{name: "somebody else's stderr", files: map[string]string{record: `{"ranks":1,"merge":true}`, "rank.0/stderr": "x"}, ranks: 1, merge: true, left: "rank.0/stderr",
			note: "in DIR are files of rank 0 that are not of this job, and that gorun did not write: they are left as they are"},
		{name: "in the way", files: map[string]string{"rank.1/stdout": "x"}, ranks: 2, left: "rank.1/stdout",
			err: "write output to DIR/rank.1/stdout (--output-dir): gorun did not write what is there; remove it, or give another directory"},
		{name: "in the way of more ranks", files: map[string]string{record: `{"ranks":1}`, "rank.0/stdout": "x", "rank.1/stdout": "x"}, ranks: 2, left: "rank.0/stdout rank.1/stdout",
			err: "write output to DIR/rank.1/stdout (--output-dir): gorun did not write what is there; remove it, or give another directory"},
		{name: "in the way of stderr", files: map[string]string{record: `{"ranks":1,"merge":true}`, "rank.0/stderr": "x"}, ranks: 1, left: "rank.0/stderr",
			err: "write output to DIR/rank.0/stderr (--output-dir): gorun did not write what is there; remove it, or give another directory"},
		{name: "a link in the way", files: map[string]string{"rank.0/stdout": "-> ../kept", "kept": "x"}, ranks: 1, left: "kept rank.0/stdout",
			err: "write output to DIR/rank.0/stdout (--output-dir): gorun did not write what is there; remove it, or give another directory"},
		{name: "a link to a new file", files: map[string]string{"rank.0/stdout": "-> ../new"}, ranks: 1, left: "rank.0/stdout"},
		{name: "empty", files: map[string]string{"rank.0/stdout": ""}, ranks: 1, left: "rank.0/stdout"},
		{name: "no record", files: map[string]string{record: `{"ranks":`, "rank.1/stdout": "x"}, ranks: 1, left: "rank.1/stdout",
			note: "in DIR are files of rank 1 that are not of this job, and that gorun did not write: they are left as they are"},
		{name: "a record of too many", files: map[string]string{record: `{"ranks":1000000000}`, "rank.1/stdout": "x"}, ranks: 1, left: "rank.1/stdout",
			note: "in DIR are files of rank 1 that are not of this job, and that gorun did not write: they are left as they are"},
		{name: "links", files: map[string]string{record: `{"ranks":3}`, "rank.1/stdout": "-> ../kept/stdout", "rank.2": "-> kept", "kept/stdout": "x"}, ranks: 1, left: "kept/stdout rank.1/stdout rank.2",
			note: "in DIR are files of ranks 1,2 that are not of this job, and that gorun did not write: they are left as they are"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "out")
			for name, text := range c.files {
				file := filepath.Join(dir, name)
				if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
					t.Fatal(err)
				}
				err := error(nil)
				if to, link := strings.CutPrefix(text, "-> "); link {
					err = os.Symlink(to, file)
				} else {
					err = os.WriteFile(file, []byte(text), 0o600)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			d, err := takeOutputDir(dir, "a", c.ranks, c.merge)
			note, said := "", ""
			if err != nil {
				said = err.Error()
			} else {
				note = d.note
				defer d.close()
			}
			if got := strings.ReplaceAll(said, dir, "DIR"); got != c.err {
				t.Errorf("error %q, want %q", got, c.err)
			}
			if got := strings.ReplaceAll(note, dir, "DIR"); got != c.note {
				t.Errorf("note %q, want %q", got, c.note)
			}
			var left []string
			err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
				if name, _ := filepath.Rel(dir, path); err == nil && !e.IsDir() && name != record {
					left = append(left, name)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(strings.Join(left, " "), c.left); d != "" {
				t.Errorf("files: -got +want:\n%s", d)
			}
			if info, err := os.Lstat(filepath.Join(dir, "rank.1")); err == nil && info.IsDir() && c.ranks < 2 && !strings.Contains(c.left, "rank.1/") {
				t.Error("rank.1 is left, empty")
			}
		})
	}
}

// The directory is one job's as long as that one runs, and the next learns what it wrote.
func TestOutputDirIsOneJobs(t *testing.T) {
	dir := t.TempDir()
	first, err := takeOutputDir(dir, "a", 2, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takeOutputDir(dir, "b", 2, false); err == nil || !strings.HasPrefix(err.Error(), "write output to "+dir+" (--output-dir): another job is writing there: gorun on a, pid ") {
		t.Errorf("a second job beside the first: %v", err)
	}
	for range 2 {
		if _, err := first.writeStacks("title", []string{"line"}); err != nil {
			t.Fatal(err)
		}
	}
	files, err := openOutputFiles(dir, 2, false, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := files.close(); err != nil {
		t.Fatal(err)
	}
	first.close()
	next, err := takeOutputDir(dir, "b", 1, true)
	if err != nil {
		t.Fatal(err)
	}
	defer next.close()
	left, err := filepath.Glob(filepath.Join(dir, "*", "*"))
	if d := cmp.Diff(left, []string{filepath.Join(dir, "rank.0", "stdout")}); err != nil || d != "" {
		t.Errorf("%v, -got +want:\n%s", err, d)
	}
	if _, err := os.Lstat(filepath.Join(dir, stacksFile)); err == nil {
		t.Errorf("%s of the first job is left", stacksFile)
	}
}
