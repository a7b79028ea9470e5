package files

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		file      string
		most      int64
		want, err string
	}{
		{file, 6, "12345", ""},
		{file, 5, "12345", ""},
		{file, 4, "", "more than 0 KiB"},
		{"/dev/zero", 1 << 20, "", "more than 1024 KiB"}, // it never ends
		{file + "x", 5, "", "no such file or directory"},
		{filepath.Dir(file), 5, "", "is a directory"},
	} {
		text, err := Read(c.file, c.most)
		why := ""
		if err != nil {
			why = Reason(err)
		}
		if string(text) != c.want || why != c.err {
			t.Errorf("%s, at most %d bytes: %q, %q, want %q, %q", c.file, c.most, text, why, c.want, c.err)
		}
	}
}

// A quoted path is found by its own pattern, and no other is.
func TestGlobQuote(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a*b", "a?b", "a[x]b", `a\b`, "axb", "plain"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		file := filepath.Join(dir, e.Name())
		got, err := filepath.Glob(GlobQuote(file))
		if d := cmp.Diff(got, []string{file}); err != nil || d != "" {
			t.Errorf("%s: %v, -got +want:\n%s", file, err, d)
		}
	}
}
