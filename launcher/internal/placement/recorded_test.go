package placement

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/placement/recorded"
)

var update = flag.Bool("update", false, "write golden files")

// recordedHost is a host of testdata.
func recordedHost(t testing.TB, name string) (root string, allowed Set) {
	t.Helper()
	root, list := recorded.Host(t, filepath.Join("testdata", name+".topo"))
	allowed, err := ParseSet(list)
	if err != nil {
		t.Fatal(err)
	}
	return root, allowed
}

func ask(b Bind, n int, device string, environ ...string) Ask {
	a := Ask{Bind: b}
	for range n {
		a.Ranks = append(a.Ranks, RankAsk{Device: device, Env: LookupIn(environ)})
	}
	return a
}

// text is a placement for a person who reads golden files.
func text(p Placement, err error) string {
	if err != nil {
		return "  error: " + err.Error() + "\n"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "  %s\n", p.Why)
	if p.Crowded != "" {
		fmt.Fprintf(&b, "  crowded: %s\n", p.Crowded)
	}
	if p.Refused != "" {
		fmt.Fprintf(&b, "  refused: %s\n", p.Refused)
	}
	for i, r := range p.Ranks {
		if r.CPUs == nil && r.GPU == "" && r.Vars == nil {
			continue
		}
		fmt.Fprintf(&b, "  %d:", i)
		if r.CPUs != nil {
			fmt.Fprintf(&b, " CPUs %v, shared by %d: %s;", r.CPUs, r.Share, r.Where)
		}
		if r.GPU != "" {
			fmt.Fprintf(&b, " GPU %s of %s", r.GPU, r.Shown)
		}
		for _, kv := range r.Vars {
			b.WriteString(" " + kv)
		}
		b.WriteString("\n")
	}
	return b.String()
}

// TestRecordedHosts compares what is done on recorded hosts with golden files: a person reads their differences.
func TestRecordedHosts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.topo")
	if err != nil || len(files) < 10 {
		t.Fatalf("recorded hosts: %q, %v", files, err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".topo")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root, allowed := recordedHost(t, name)
			var b strings.Builder
			for _, to := range []Bind{{}, {To: None}, {To: ToCore}, {ToCore, 1}, {ToCore, 3}, {To: ToNUMA}} {
				m := Read(root, allowed, to)
				for _, n := range []int{1, 2, 3, 8, 64} {
					what := to.String()
					if what == "" {
						what = "default"
					}
					got := text(m.Place(ask(to, n, "")))
					if n > 8 {
						got, _, _ = strings.Cut(got, "  0:")
					}
					fmt.Fprintf(&b, "%s, %d ranks\n%s", what, n, got)
				}
			}
			golden := strings.TrimSuffix(file, ".topo") + ".golden"
			if *update {
				if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(b.String(), string(want)); d != "" {
				t.Errorf("-got +want:\n%s", d)
			}
		})
	}
}
