package launcher

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/launcher/internal/testhosts"
)

// Hosts that have addresses of IPv6 only, and hosts that all have the same address on a bridge of their own, as docker makes it. None knows the
// others' names, and each takes its own name for 127.0.1.1.
func TestHostsNetworks(t *testing.T) {
	beside(t)
	for _, c := range []struct {
		name string
		o    testhosts.Options
		addr func(h testhosts.Host) string
	}{
		{"IPv6 only", testhosts.Options{NoIPv4: true}, func(h testhosts.Host) string { return h.Addr6.String() }},
		{"a bridge that is the same everywhere", testhosts.Options{Bridge: true}, func(h testhosts.Host) string { return h.Addr.String() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := newHosts(t, 3, c.o)
			haveAgent(t, h)
			for i := range h.Hosts {
				if err := copyProgram("/proc/self/exe", h.Path(i, "/root/rank")); err != nil {
					t.Fatal(err)
				}
			}
			j := newHostsJob(t, h, 2, "/root/rank", "rank", "join")
			if got := j.run(); got != 0 {
				t.Fatalf("exit code %d, stderr %s", got, j.err.String())
			}
			if got := strings.Count(j.out.String(), " of 6 joined\n"); got != 6 {
				t.Errorf("%d ranks joined, want 6: %s", got, j.out.String())
			}
			j = newHostsJob(t, h, 1, "sh", "-c", "echo $GORUN_RANK $MASTER_ADDR")
			if got := j.run(); got != 0 {
				t.Fatalf("exit code %d, stderr %s", got, j.err.String())
			}
			got := strings.Split(strings.TrimSpace(j.out.String()), "\n")
			slices.Sort(got)
			first := c.addr(h.Hosts[0])
			if d := cmp.Diff(got, []string{"0 " + first, "1 " + first, "2 " + first}); d != "" {
				t.Errorf("MASTER_ADDR: -got +want:\n%s", d)
			}
			clean(t, h)
		})
	}
}
