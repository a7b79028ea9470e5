package shell

import (
	"os"
	"os/exec"
	"testing"
)

// A shell reads what Quote writes.
func TestShellQuote(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		if os.Getenv("GORUN_CI") == "1" {
			t.Fatal("bash is not installed, and GORUN_CI=1 demands it")
		}
		t.Skip("bash is not installed")
	}
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
