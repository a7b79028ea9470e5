package keeper

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/rankenv/citest"
)

// The keeper of a host whose agent was killed waits for what other hosts of the job have in its directories.
func TestRemoveShared(t *testing.T) {
	base := t.TempDir()
	for _, f := range []string{"d/mine", "d/more/other", "d/" + TempName + "none-shared-1-2"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(base, f)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(base, f), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(base+"/last", 0o700); err != nil {
		t.Fatal(err)
	}
	cmd, stdin := startAlone(t)
	limit := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer limit.Stop()
	io.WriteString(stdin, "job none-shared\nshare "+base+"/d/mine\nshare "+base+"/d/more/other\nrmdir "+base+"/last\nrmdir "+base+"/d\nremove "+base+"/d/mine\n")
	stdin.Close()
	// The last directory goes behind the first look at the one that is shared.
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(base + "/last"); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a directory that is empty stays")
		}
	}
	for _, f := range []string{"d/more/other", "d/more", "d/" + TempName + "none-shared-1-2"} {
		if err := os.Remove(filepath.Join(base, f)); err != nil {
			t.Error(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(base); err != nil || len(left) > 0 {
		t.Errorf("left: %v %v", left, err)
	}
}

// A file that another job uses, too, stays, and is that job's alone then; its temporary name goes.
func TestRemoveMarked(t *testing.T) {
	base := t.TempDir()
	at, tmp := base+"/f", base+"/"+TempName+"none-1"
	if err := os.WriteFile(tmp, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Mark(tmp, "none"); err != nil {
		citest.Lacking(t, "extended attributes in %s: %v", base, err)
	}
	long := strings.Repeat("long", 50)
	for i, err := range []error{os.Link(tmp, at), Mark(at, "other"), Mark(at, long)} {
		if err != nil {
			t.Fatal(i, err)
		}
	}
	run := func(job, paths string) {
		t.Helper()
		cmd := exec.Command("/proc/self/exe")
		cmd.Args[0], cmd.Env = arg0, []string{keeperVar + "=1"}
		cmd.Stdin = strings.NewReader("job " + job + "\n" + paths)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		limit := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
		defer limit.Stop()
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	run("none", "remove "+tmp+"\nremove "+at+"\n")
	if _, err := os.Stat(tmp); err == nil {
		t.Errorf("%s stays", tmp)
	}
	if own, other := Marked(at, "none"); own || !other {
		t.Errorf("own mark %v, others' %v, want the others' alone", own, other)
	}
	run("other", "remove "+at+"\n")
	if own, other := Marked(at, long); !own || other {
		t.Errorf("own mark %v, others' %v, want that of the third job alone", own, other)
	}
	run(long, "remove "+at+"\n")
	if _, err := os.Stat(at); err == nil {
		t.Errorf("%s stays behind the last job", at)
	}
}
