package citest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// ending is a test that notes how it ends.
type ending struct {
	testing.TB
	said string
}

func (e *ending) Helper()                        {}
func (e *ending) Fatalf(format string, a ...any) { e.end("failed: ", format, a) }
func (e *ending) Skipf(format string, a ...any)  { e.end("skipped: ", format, a) }
func (e *ending) end(how, format string, a []any) {
	e.said += how + fmt.Sprintf(format, a...)
	runtime.Goexit()
}

func TestProgram(t *testing.T) {
	dir := t.TempDir()
	tool := filepath.Join(dir, "tool")
	if err := os.WriteFile(tool, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir)
	const missing = `exec: "other": executable file not found in $PATH`
	for _, c := range []struct{ ci, name, want string }{
		{"", "tool", tool},
		{"1", "tool", tool},
		{"", "other", "skipped: not here: " + missing},
		{"0", "other", "skipped: not here: " + missing},
		{"1", "other", "failed: GORUN_CI=1 demands what is not here: " + missing},
	} {
		t.Setenv("GORUN_CI", c.ci)
		e := &ending{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			e.said += Program(e, c.name)
		}()
		<-done
		if e.said != c.want {
			t.Errorf("GORUN_CI=%q, %s: got %q, want %q", c.ci, c.name, e.said, c.want)
		}
	}
}
