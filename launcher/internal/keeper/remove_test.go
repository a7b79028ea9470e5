package keeper

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What the keeper was told of goes when its launcher dies, and stays when that says goodbye. Links are not followed.
func TestRemove(t *testing.T) {
	for _, bye := range []bool{false, true} {
		base := t.TempDir()
		for _, f := range []string{"job/a/b", "job/closed/c", "outside/o", "made/mine", "file"} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(base, f)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(base, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("../outside", filepath.Join(base, "job/link")); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(base, "job/closed"), 0); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(base, "made2/sub"), 0o700); err != nil {
			t.Fatal(err)
		}
		cmd, stdin := startAlone(t)
		orders := "job none-" + t.Name() + "\nrmdir " + base + "/made\nrmdir " + base + "/made2\nrmdir " + base + "/made2/sub\n" +
			"remove " + base + "/job\nremove " + base + "/file\nremove " + base + "/never\nremove relative\n"
		if bye {
			orders += "done\n"
		}
		io.WriteString(stdin, orders)
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
		var left []string
		entries, err := os.ReadDir(base)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			left = append(left, e.Name())
		}
		want := []string{"made", "outside"}
		if bye {
			want = []string{"file", "job", "made", "made2", "outside"}
			os.Chmod(filepath.Join(base, "job/closed"), 0o700)
		}
		if d := cmp.Diff(left, want); d != "" {
			t.Errorf("with goodbye %v, left: -got +want:\n%s", bye, d)
		}
		if _, err := os.Stat(filepath.Join(base, "outside/o")); err != nil {
			t.Error(err)
		}
	}
}

// startAlone starts a keeper without an agent: what is written to stdin are its orders.
func startAlone(t *testing.T) (cmd *exec.Cmd, stdin io.WriteCloser) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe")
	cmd.Args[0], cmd.Env = arg0, []string{keeperVar + "=1"}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, stdin
}
