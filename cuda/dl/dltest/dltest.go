// Package dltest builds small C libraries for tests, so that calls into C are checked by a C compiler's view of the ABI.
package dltest

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// The compiler and its environment are those of the test binary's start: tests change PATH.
var (
	gcc, gccErr = exec.LookPath(cmp.Or(os.Getenv("CC"), "gcc"))
	environ     = os.Environ()
)

// built are the libraries that this process has compiled, by source, name and arguments.
var built struct {
	sync.Mutex
	files map[string][]byte
}

// Build compiles a C source file to a shared library called soname in a new folder and returns its path. args go to
// gcc (-DNAME=VALUE); CC names another compiler, for tests of another architecture under an emulator. Without gcc the
// test is skipped, and fails in continuous integration.
func Build(t testing.TB, source, soname string, args ...string) string {
	t.Helper()
	if gccErr != nil {
		citest.Lacking(t, "a C compiler, for the library that this test calls: %v", gccErr)
	}
	out := filepath.Join(t.TempDir(), soname)
	// Many tests of a process want the same library.
	key := fmt.Sprintf("%q", append([]string{source, soname}, args...))
	built.Lock()
	defer built.Unlock()
	if lib := built.files[key]; lib != nil {
		if err := os.WriteFile(out, lib, 0o700); err != nil {
			t.Fatal(err)
		}
		return out
	}
	argv := append([]string{"-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden",
		"-Wl,-soname," + soname, "-o", out}, args...)
	cmd := exec.Command(gcc, append(argv, source)...)
	cmd.Env = environ
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("gcc %s: %v\n%s", source, err, b)
	}
	lib, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if built.files == nil {
		built.files = map[string][]byte{}
	}
	built.files[key] = lib
	return out
}
