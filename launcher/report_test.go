package launcher

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestReportIsWhole(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "r.json")
	a := &Account{Job: "x", Ranks: []RankAccount{{Rank: 0, Host: "a"}}}
	if err := a.WriteReport(file); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil || !bytes.HasPrefix(text, []byte("{\n  \"job\": \"x\"")) {
		t.Errorf("report %q, %v", text, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("files left: %v", left)
	}
	err = a.WriteReport("/nonexistent/r.json")
	if want := "write report /nonexistent/r.json: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

// What is no regular file is written to, not replaced; a link stays one.
func TestReportReplacesNoDevice(t *testing.T) {
	dir := t.TempDir()
	a := &Account{Job: "x"}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := os.OpenFile(fifo, os.O_RDWR, 0) // for writing, too: nobody waits for the other side
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := a.WriteReport(fifo); err != nil {
		t.Fatal(err)
	}
	info, err := os.Lstat(fifo)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode()&os.ModeNamedPipe == 0 {
		t.Fatalf("the fifo has become %v", info.Mode())
	}
	text := make([]byte, 14)
	if n, err := r.Read(text); err != nil || string(text[:n]) != "{\n  \"job\": \"x\"" {
		t.Errorf("fifo holds %q, %v", text[:n], err)
	}

	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, []byte("old"), 0o600), os.Symlink("file", link)); err != nil {
		t.Fatal(err)
	}
	if err := a.WriteReport(link); err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(link); err != nil || to != "file" {
		t.Errorf("the link has become %q, %v", to, err)
	}
	if text, err := os.ReadFile(file); err != nil || !bytes.HasPrefix(text, []byte("{")) {
		t.Errorf("the link's file holds %q, %v", text, err)
	}
	if err := a.WriteReport(dir); err == nil {
		t.Error("a directory was written")
	}

	// Also to a file that is still to be made.
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "sub"), 0o700), os.Symlink("sub/new", filepath.Join(dir, "one")), os.Symlink(filepath.Join(dir, "one"), filepath.Join(dir, "two"))); err != nil {
		t.Fatal(err)
	}
	two := filepath.Join(dir, "two")
	if err := errors.Join(CheckReport(two), a.WriteReport(two)); err != nil {
		t.Error(err)
	}
	if text, err := os.ReadFile(filepath.Join(dir, "sub", "new")); err != nil || !bytes.HasPrefix(text, []byte("{")) {
		t.Errorf("the new file holds %q, %v", text, err)
	}
	if err := os.Symlink("loop", filepath.Join(dir, "loop")); err != nil {
		t.Fatal(err)
	}
	if err := a.WriteReport(filepath.Join(dir, "loop")); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("a link to itself: %v, want %v", err, syscall.ELOOP)
	}
}

// Who may read a report is what the umask says, or whoever made the file before.
func TestReportPermissions(t *testing.T) {
	old := syscall.Umask(0o027)
	defer syscall.Umask(old)
	a, dir := &Account{Job: "x"}, t.TempDir()
	private := filepath.Join(dir, "private")
	if err := os.WriteFile(private, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		file string
		want os.FileMode
	}{{filepath.Join(dir, "new"), 0o640}, {private, 0o600}} {
		if err := a.WriteReport(c.file); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(c.file)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != c.want {
			t.Errorf("%s has mode %v, want %v", c.file, got, c.want)
		}
	}
}

// A link to a file that is not there yet leads where the kernel would make it, also through a directory that is a link.
func TestReportLinkThroughALink(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "x/y"), 0o700), os.Symlink("x/y", filepath.Join(dir, "d")), os.Symlink("../new", filepath.Join(dir, "x/y/r"))); err != nil {
		t.Fatal(err)
	}
	if err := (&Account{Job: "x"}).WriteReport(filepath.Join(dir, "d/r")); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(filepath.Join(dir, "x/new")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("%v, %v: want the report in x/new", info, err)
	}
}
