// Package citest ends tests that want a part of the machine, such as a compiler, that is not there: they are skipped, and fail in
// continuous integration (GORUN_CI=1), whose machine has all parts. It is for gorun's own tests, and stands here because all of them may import it.
package citest

import (
	"os"
	"os/exec"
	"testing"
)

// Lacking ends the test; the text names what is not here.
func Lacking(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("GORUN_CI") == "1" {
		t.Fatalf("GORUN_CI=1 demands what is not here: "+format, args...)
	}
	t.Skipf("not here: "+format, args...)
}

// Program is the path of a program, looked for in PATH, that the test needs.
func Program(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Lacking(t, "%v", err)
	}
	return path
}
