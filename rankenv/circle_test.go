package rankenv

import "testing"

func TestCircleText(t *testing.T) {
	many := make([]int, 20)
	for i := range many {
		many[i] = i
	}
	for _, c := range []struct {
		ranks []int
		want  string
	}{
		{[]int{0, 1}, "ranks 0 -> 1 -> 0"},
		{[]int{0, 2, 1}, "ranks 0 -> 2 -> 1 -> 0"},
		{many[:16], "ranks 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> 8 -> 9 -> 10 -> 11 -> 12 -> 13 -> 14 -> 15 -> 0"},
		{many, "ranks 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> 8 -> 9 -> 10 -> 11 -> 12 -> 13 -> 14 -> (5 more) -> 0"},
	} {
		if got := CircleText(c.ranks); got != c.want {
			t.Errorf("CircleText(%v) = %q, want %q", c.ranks, got, c.want)
		}
	}
}
