package push

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// What is damaged on its way, though it would run, does not, and is not kept.
func TestDamaged(t *testing.T) {
	dir := home(t)
	tools := t.TempDir() // without gzip, which would see it
	for _, name := range strings.Fields("sh uname id ls mkdir head cat chmod ln mv rm rmdir grep tail mktemp") {
		if err := os.Symlink(citest.Program(t, name), filepath.Join(tools, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", tools)
	_, err := talk(t, damagingWay{way.Shell()}, way.Target{Name: "x"}, Options{Builds: builds(t)})
	if want := "it is damaged: its SHA-256 is"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("error: %v, want %q in it", err, want)
	}
	if left := names(t, filepath.Join(dir, ".cache")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// damagingWay opens sessions that change the last byte of a program that is sent: what only debuggers read.
type damagingWay struct{ way.Way }

type damagingSession struct{ way.Session }

func (w damagingWay) Open(ctx context.Context, t way.Target, line string) (way.Session, error) {
	s, err := w.Way.Open(ctx, t, line)
	return damagingSession{s}, err
}

func (s damagingSession) Write(p []byte) (int, error) {
	if len(p) > 1<<20 {
		p = append([]byte(nil), p...)
		p[len(p)-1] ^= 1
	}
	return s.Session.Write(p)
}
