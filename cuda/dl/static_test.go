package dl_test

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// TestStaticBuild builds a program that uses the package with the tag nogpu: it must be static.
func TestStaticBuild(t *testing.T) {
	goTool := citest.Program(t, "go")
	dir := t.TempDir()
	const program = "package main\n\nimport (\n\t\"os\"\n\n\t\"github.com/gorun-dev/gorun/cuda/dl\"\n\t\"github.com/gorun-dev/gorun/rankenv/gpulib\"\n)\n\nfunc main() {\n\t_, err := dl.Open(dl.Spec{Name: \"x\", Search: gpulib.Search{Sonames: []string{\"libc.so.6\"}}, Symbol: \"abs\"})\n\tif err != nil {\n\t\tos.Stdout.WriteString(err.Error())\n\t}\n}\n"
	src := filepath.Join(dir, "main.go")
	if err := os.WriteFile(src, []byte(program), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		tags, out string
		dynamic   bool
	}{
		{"nogpu", "load x: no usable library\n\tlibc.so.6 (system): built without GPU support (build tag nogpu)", false},
		{"", "", true},
	} {
		bin := filepath.Join(dir, "program"+tt.tags)
		cmd := exec.CommandContext(t.Context(), goTool, "build", "-tags", tt.tags, "-o", bin, src)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOARCH=") // also where the test itself is emulated
		if b, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("go build -tags %q: %v\n%s", tt.tags, err, b)
		}
		f, err := elf.Open(bin)
		if err != nil {
			t.Fatal(err)
		}
		dynamic := false
		for _, p := range f.Progs {
			dynamic = dynamic || p.Type == elf.PT_INTERP
		}
		f.Close()
		if dynamic != tt.dynamic {
			t.Errorf("tags %q: needs an interpreter: %t, want %t", tt.tags, dynamic, tt.dynamic)
		}
		if b, err := exec.CommandContext(t.Context(), bin).Output(); err != nil || string(b) != tt.out {
			t.Errorf("tags %q: output %q, %v, want %q", tt.tags, b, err, tt.out)
		}
	}
}
