package launcher

import (
	"os"
	"syscall"
	"testing"
)

// Who can't change the mode of a file is not told to.
func TestLacksX(t *testing.T) {
	file := t.TempDir() + "/p.py"
	for _, c := range []struct {
		mode  os.FileMode
		other int // uid beside the owner's
		want  bool
	}{
		{0o644, 0, true}, {0, 0, true}, {0o644, 1, false}, {0, 1, false}, {0o755, 0, false}, {0o001, 0, false},
	} {
		write(t, file, "", 0o600)
		if err := os.Chmod(file, c.mode); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		uid := int(info.Sys().(*syscall.Stat_t).Uid) + c.other
		if got := lacksX(info, uid); got != c.want {
			t.Errorf("mode %o, uid %d: got %v, want %v", c.mode, uid, got, c.want)
		}
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}
