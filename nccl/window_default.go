package nccl

import (
	"fmt"
	"math"
)

// Windows without being asked for.
//
// The library uses a window for every later call on its memory, captured or eager, whatever the size, and windows do not win everywhere. So captured calls
// get one by themselves only in memory so small that no call in it can be where they lose: no call is longer than the memory that the program asked for (the
// allocation is rounded up, but a window is of what was asked for).

// windowGains, by number of ranks, is up to how many bytes (of the whole: all parts together) a captured call was faster in windows, at every size that was measured up to there: 20 calls a
// graph, NCCL 2.28.3 on H200, without multicast. µs a call, plain and in windows, at the last size that wins and the first that loses:
//
//	2 ranks  all-reduce     32 KiB 7.2, 6.0   128 KiB 7.4, 10.1    (wins again from 2 to 8 MiB, and loses from 32 MiB)
//	         all-gather    128 KiB 6.5, 6.1   512 KiB 8.2, 8.8     (wins again from 2 MiB)
//	         reduce-scatter 32 KiB 6.0, 4.6   128 KiB 6.4, 6.9     (wins again from 2 MiB)
//	4 ranks  all-reduce     32 KiB 10.7, 6.7  128 KiB 11.0, 12.3   (wins again from 512 KiB to 8 MiB, and loses from 32 MiB)
//	         all-gather    128 MiB 347, 303   never
//	         reduce-scatter 128 KiB 8.3, 5.3  512 KiB 9.5, 13.1    (wins again from 2 MiB)
//
// At 8 bytes it is 5.7 against 3.5 (2 ranks, all-reduce), and 8.0 against 3.7 (4 ranks).
var windowGains = []struct {
	ranks int
	upTo  map[Op]uint64
}{
	{2, map[Op]uint64{OpAllReduce: 32 << 10, OpAllGather: 128 << 10, OpReduceScatter: 32 << 10}},
	{4, map[Op]uint64{OpAllReduce: 32 << 10, OpAllGather: 128 << 20, OpReduceScatter: 128 << 10}},
}

// windowLimit is the size of memory up to which captured calls of a communicator get a window without being asked for; 0: never, where nothing was measured.
// Between two numbers of ranks that were, it is what holds for both.
func windowLimit(ranks int) uint64 {
	var below, above map[Op]uint64
	for _, g := range windowGains {
		if g.ranks <= ranks {
			below = g.upTo
		}
		if g.ranks >= ranks && above == nil {
			above = g.upTo
		}
	}
	if below == nil || above == nil {
		return 0
	}
	limit := uint64(math.MaxUint64)
	for _, upTo := range []map[Op]uint64{below, above} {
		for _, n := range upTo {
			limit = min(limit, n)
		}
	}
	return limit
}

// unasked says why memory of this size gets no window without being asked for; "": it gets one.
func unasked(ranks int, size uint64) string {
	limit := windowLimit(ranks)
	switch {
	case limit == 0:
		return fmt.Sprintf("whether windows are faster with %d ranks was not measured", ranks)
	case size > limit:
		return fmt.Sprintf("it would be of %s, and with more than %s a call in it can be slower", bytesText(size), bytesText(limit))
	}
	return ""
}

// unaskedText is the rule, for Explain.
func unaskedText(ranks int) string {
	limit := windowLimit(ranks)
	if limit == 0 {
		return fmt.Sprintf("where the program makes or demands them (whether they are faster with %d ranks was not measured)", ranks)
	}
	return fmt.Sprintf("by themselves where both buffers lie in memory of at most %s at equal offsets (GORUN_WINDOWS=off: only where the program makes or demands them)", bytesText(limit))
}

// bytesText is "32 KiB", or "100 bytes".
func bytesText(n uint64) string {
	for _, u := range []struct {
		size uint64
		name string
	}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.size && n%u.size == 0 {
			return fmt.Sprintf("%d %s", n/u.size, u.name)
		}
	}
	return fmt.Sprintf("%d bytes", n)
}
