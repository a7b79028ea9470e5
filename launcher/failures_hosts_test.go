package launcher

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// Over ssh: restarts, and ends of jobs that are here and there.
func TestHostsFailures(t *testing.T) {
	t.Parallel()
	h := newHosts(t, 2, testhosts.Options{})
	haveAgent(t, h)
	t.Run("restart after a lost host", func(t *testing.T) {
		j := newHostsJob(t, h, 1, "--restarts", "1", "sh", "-c", `[ $GORUN_RESTART = 1 ] && { echo again $GORUN_RANK; exit 0; }; `+rankScript).start()
		up(t, j, h, 1)
		syscall.Kill(agentOn(t, h, 1), syscall.SIGKILL)
		got := j.wait()
		lines := strings.Fields(j.out.String())
		slices.Sort(lines)
		if got != 0 || strings.Join(lines, " ") != "0 1 again again" {
			t.Errorf("exit code %d, output %q: %s", got, j.out.String(), j.err.String())
		}
		if want := "gorun: host h2 is lost: "; !strings.Contains(j.err.String(), want) || !strings.HasSuffix(j.err.String(), "\ngorun: restart 1 of 1\n") {
			t.Errorf("stderr %q, want %q", j.err.String(), want)
		}
		clean(t, h)
	})
	// Row 3 of what users of other launchers report: ranks beside the launcher end as those elsewhere do.
	for _, c := range []struct {
		name string
		args []string
		code int
		said string // in stderr
	}{
		{"timeout here and there", []string{"--timeout", "3s", "sleep", "98761"}, ExitTimeout, "\n  ranks 0-3: sleep, sleeping in clock_nanosleep\n"},
		{"failure here and there", []string{"sh", "-c", "[ $GORUN_RANK = 1 ] && exit 9; exec sleep 98761"}, 9, ""},
		{"restart here and there", []string{"--restarts", "1", "--on-fail", "wait", "sh", "-c", "exit $((9 - 9 * GORUN_RESTART))"}, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			j := newHostsJob(t, h, 1, append([]string{"-H", "localhost:2"}, c.args...)...)
			if got := j.run(); got != c.code || !strings.Contains(j.err.String(), c.said) {
				t.Errorf("exit code %d, want %d: stderr %q, want %q", got, c.code, j.err.String(), c.said)
			}
			clean(t, h)
			lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, file := range lines {
				if text, _ := os.ReadFile(file); bytes.Equal(text, []byte("sleep\x0098761\x00")) {
					t.Errorf("%s is left here", file)
				}
			}
		})
	}
}
