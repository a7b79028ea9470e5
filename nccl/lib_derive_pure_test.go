package nccl

import (
	"math"
	"testing"
)

func TestRootsOf(t *testing.T) {
	for ranks, want := range map[int]int{1: 1, 128: 1, 129: 2, 256: 2, 257: 3, 1024: 8} {
		if got := rootsOf(ranks); got != want {
			t.Errorf("%d ranks: %d roots, want %d", ranks, got, want)
		}
	}
}

func TestLibraryColor(t *testing.T) {
	cases := []struct {
		name   string
		colors []int
		want   []int32
		any    bool
	}{
		{"one part", []int{5, 5, 5}, []int32{0, 0, 0}, true},
		{"two parts", []int{9, 2, 9, 2}, []int32{1, 0, 1, 0}, true},
		{"one alone", []int{9, 2, 9}, []int32{0, -1, 0}, true},
		{"some in none", []int{-1, 0, 0, -1}, []int32{-1, 0, 0, -1}, true},
		{"each alone", []int{3, 2, 1}, []int32{-1, -1, -1}, false},
		{"nobody", []int{-1, -7, -7}, []int32{-1, -1, -1}, false},
		{"beyond 32 bits", []int{math.MaxInt, math.MaxInt, math.MaxInt32, math.MaxInt32}, []int32{1, 1, 0, 0}, true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			for r, want := range tc.want {
				if got, any := libraryColor(tc.colors, r); got != want || any != tc.any {
					t.Errorf("rank %d: got %d, %t, want %d, %t", r, got, any, want, tc.any)
				}
			}
		})
	}
}
