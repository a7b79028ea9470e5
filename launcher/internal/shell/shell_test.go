package shell

import (
	"os/exec"
	"testing"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// A shell reads what Quote writes.
func TestShellQuote(t *testing.T) {
	bash := citest.Program(t, "bash")
	all := make([]byte, 255)
	for i := range all {
		all[i] = byte(i + 1)
	}
	for _, s := range []string{"", "a", "a b", "it's", `back\slash`, `"q"`, "$HOME", "`x`", "tab\t", "\n", "ü", "\xff'", "*", "~", "-x", string(all)} {
		out, err := exec.Command(bash, "-c", "printf %s "+Quote(s)).Output()
		if err != nil || string(out) != s {
			t.Errorf("Quote(%q) = %s: the shell reads %q (%v)", s, Quote(s), out, err)
		}
	}
}
