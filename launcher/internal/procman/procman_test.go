package procman

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHosts(t *testing.T) {
	w := &World{HostOf: []int{2, 0, 2, 3}, Host: 2}
	if diff := cmp.Diff(w.Local(), []int{0, 2}); diff != "" {
		t.Errorf("ranks of this host (-got +want):\n%s", diff)
	}
	for _, c := range []struct {
		ranks []int
		want  []int
	}{
		{nil, []int{0, 2, 3}},
		{[]int{3, 0, 2}, []int{2, 3}},
		{[]int{}, nil},
	} {
		if diff := cmp.Diff(w.HostsOf(c.ranks), c.want); diff != "" {
			t.Errorf("hosts of ranks %v (-got +want):\n%s", c.ranks, diff)
		}
	}
}
