package launcher

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// Two programs of the same file name, and one that only the second host has, on two hosts: each host gets and looks for what its own
// ranks run.
func TestAppsOnHosts(t *testing.T) {
	beside(t)
	h := stageHosts(t, 2, testhosts.Options{})
	dir := t.TempDir()
	const say = "#!/bin/sh\necho $GORUN_RANK/$GORUN_SIZE $GORUN_APP $(hostname) $0 $(pwd) $PWD $WORD$ALL $*\n"
	write(t, filepath.Join(dir, "bin/say"), say, 0o755)
	write(t, filepath.Join(dir, "more/say"), strings.Replace(say, "echo ", "echo other ", 1), 0o755)
	j := stageJob(t, h, dir, "--map-by", "node", "-x", "ALL=a", "--oversubscribe",
		"-np", "2", "bin/say", "1", "2", ":", "-np", "1", "-x", "WORD=w", "--wdir", "/root", filepath.Join(dir, "more/say"), ":", "-np1", "--", "bin/say", ":", "x")
	if got := j.run(); got != 0 || j.err.Len() > 0 {
		t.Fatalf("exit code %d, stderr %s", got, j.err.String())
	}
	want := []string{
		"0/4 0 h1 /tmp/JOB/bin/say /tmp/JOB /tmp/JOB a 1 2",
		"1/4 0 h2 /tmp/JOB/bin/say /tmp/JOB /tmp/JOB a 1 2",
		"3/4 2 h2 /tmp/JOB/bin/say /tmp/JOB /tmp/JOB a : x",
		"other 2/4 1 h1 /tmp/JOB/.program1/say /root /root wa",
	}
	if d := cmp.Diff(j.lines(), want); d != "" {
		t.Errorf("-got +want:\n%s", d)
	}
	cleanStage(t, h)

	t.Run("a program of one host", func(t *testing.T) {
		write(t, h.Path(1, "/root/only"), say, 0o755)
		j := newHostsJob(t, h, 1, "-np", "1", "hostname", ":", "-np", "1", "/root/only")
		if got := j.run(); got != 0 || j.err.Len() > 0 {
			t.Fatalf("exit code %d, stderr %s", got, j.err.String())
		}
		l := j.lines()
		if len(l) != 2 || !strings.HasPrefix(l[0], "1/2 1 h2 /root/only ") || l[1] != "h1" {
			t.Errorf("got %q", l)
		}
	})
	t.Run("missing directory", func(t *testing.T) {
		j := newHostsJob(t, h, 1, "-np", "1", "hostname", ":", "-np", "1", "--wdir", "/not/there", "hostname")
		if got := j.run(); got != ExitCannotRun || !strings.Contains(j.err.String(), "host h2: change to working directory /not/there: no such file or directory") || j.out.Len() > 0 {
			t.Errorf("exit code %d, stdout %s, stderr %s", got, j.out.String(), j.err.String())
		}
	})
	t.Run("a rank fails", func(t *testing.T) {
		j := newHostsJob(t, h, 1, "-np", "1", "sleep", "60", ":", "-np", "1", "sh", "-c", "exit 7")
		if got := j.run(); got != 7 || !strings.Contains(j.err.String(), "gorun: rank 1 (sh, host h2, pid ") {
			t.Errorf("exit code %d, stderr %s", got, j.err.String())
		}
	})
}
