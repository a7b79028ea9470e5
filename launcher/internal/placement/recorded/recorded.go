// Package recorded lays out hosts that were recorded for tests.
package recorded

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Host lays out a recorded host as files below a new root: "path: text" a line of file, | for a line end in the text. The line "allowed: 0-3" is what the
// scheduler said there. # begins a comment.
func Host(t testing.TB, file string) (root, allowed string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	root = t.TempDir()
	for line := range strings.Lines(string(text)) {
		// Names on the PCI bus have colons, too.
		name, content, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		switch {
		case strings.HasPrefix(line, "#"):
		case !ok:
			t.Fatalf("%s: %q", file, line)
		case name == "allowed":
			allowed = content
		default:
			name = filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(name, []byte(strings.ReplaceAll(content, "|", "\n")+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root, allowed
}
