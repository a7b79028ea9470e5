package launcher

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPlacesOfBuild(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"./main.go:23:10: syntax error\n", "syn/main.go:23:10: syntax error\n"},
		{"main.go:4:2: package x is not in std\n", "syn/main.go:4:2: package x is not in std\n"},
		{"../lib/a b.go:3:1: x\n\t./main.go:5:6: other declaration of x\n", "lib/a b.go:3:1: x\n\tsyn/main.go:5:6: other declaration of x\n"},
		{"# example.org/syn\ngo: downloading x v1\n/usr/lib/go/src/fmt/print.go:1:1: x\n", "# example.org/syn\ngo: downloading x v1\n/usr/lib/go/src/fmt/print.go:1:1: x\n"},
		{"../../../u/a.go:1:1: x\n", "/u/a.go:1:1: x\n"},
		{"./main.go:1:1: no end", "syn/main.go:1:1: no end"},
	} {
		for _, size := range []int{1, len(c.in)} { // of a write
			var out bytes.Buffer
			w := &placeWriter{w: &out, dir: "/w/d/syn", from: "/w/d"}
			for at := 0; at < len(c.in); at += size {
				w.Write([]byte(c.in[at:min(at+size, len(c.in))]))
			}
			w.flush()
			if got := out.String(); got != c.want {
				t.Errorf("%q in writes of %d: got %q, want %q", c.in, size, got, c.want)
			}
		}
	}
}

func TestBuildFailureNamesTheFile(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module example.org/m\n", 0o600)
	write(t, filepath.Join(dir, "syn/main.go"), "package main\n\nfunc main() {\n\tx\n}\n", 0o600)
	write(t, filepath.Join(dir, "lacks/main.go"), "package main\n\nimport _ \"none\"\n", 0o600)
	t.Chdir(dir)
	for name, want := range map[string]string{"./syn": "syn/main.go:4:2: ", "./lacks": "lacks/main.go:3:8: "} {
		p, err := FindProgram(name, "")
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := p.Build(t.Context(), &out); err == nil || !strings.Contains("\n"+out.String(), "\n"+want) {
			t.Errorf("%s: %v, output %q, want a line that begins with %q", name, err, out.String(), want)
		}
		os.RemoveAll(p.scratch)
	}
}
