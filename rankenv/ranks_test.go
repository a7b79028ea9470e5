package rankenv

import (
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestRankText(t *testing.T) {
	for _, c := range []struct {
		ranks []int
		want  string
	}{
		{[]int{3}, "rank 3"},
		{[]int{0, 1}, "ranks 0,1"},
		{[]int{0, 1, 2}, "ranks 0-2"},
		{[]int{0, 1, 2, 5}, "ranks 0-2,5"},
		{[]int{0, 2, 3, 4, 9, 11, 12}, "ranks 0,2-4,9,11,12"},
		{[]int{1, 3, 4, 6, 7, 8, 9}, "ranks 1,3,4,6-9"},
	} {
		if got := RankText(c.ranks); got != c.want {
			t.Errorf("RankText(%v) = %q, want %q", c.ranks, got, c.want)
		}
	}
}

// Each rank is in the list, and nothing else: bit i of the input is rank i.
func FuzzRankList(f *testing.F) {
	for _, bits := range []uint64{0, 1, 3, 7, 0b100111, 0b1111011010, ^uint64(0)} {
		f.Add(bits)
	}
	f.Fuzz(func(t *testing.T, bits uint64) {
		var ranks, back []int
		for i := range 64 {
			if bits>>i&1 == 1 {
				ranks = append(ranks, i)
			}
		}
		list := RankList(ranks)
		for part := range strings.SplitSeq(list, ",") {
			if list == "" {
				break
			}
			first, last, isRange := strings.Cut(part, "-")
			if !isRange {
				last = first
			}
			a, err1 := strconv.Atoi(first)
			b, err2 := strconv.Atoi(last)
			if err1 != nil || err2 != nil || isRange && b < a+2 {
				t.Fatalf("RankList(%v) = %q", ranks, list)
			}
			for r := a; r <= b; r++ {
				back = append(back, r)
			}
		}
		if !slices.Equal(back, ranks) {
			t.Errorf("RankList(%v) = %q, which are %v", ranks, list, back)
		}
	})
}
