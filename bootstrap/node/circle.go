package node

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/rankenv"
)

// messageOf is which of a rank's waits is for a message whose other end is known, the longest; -1: none.
func messageOf(st *Standing) int {
	if st == nil {
		return -1
	}
	return slices.IndexFunc(st.Waits, func(w Wait) bool { return w.Other > 0 })
}

// circles finds ranks of which each waits in a message for the next one, all around. By rank, each in the circle from its lowest rank on.
func (r *report) circles() map[int]*joint {
	found := map[int]*joint{}
	past := map[int]bool{}
	for first := range r.size {
		// Along the waits, until one ends elsewhere or where it has been before.
		var way []int
		rank := first
		for !past[rank] && messageOf(r.of[rank]) >= 0 {
			past[rank] = true
			way = append(way, rank)
			st := r.of[rank]
			rank = st.Waits[messageOf(st)].Other - 1
		}
		at := slices.Index(way, rank)
		if at < 0 || len(way)-at < 2 {
			continue
		}
		ranks := way[at:]
		least := slices.Index(ranks, slices.Min(ranks))
		j := &joint{ranks: slices.Concat(ranks[least:], ranks[:least]), circle: true}
		sends, recvs := 0, 0
		for _, rank := range ranks {
			w := r.message(rank)
			j.For = max(j.For, w.For)
			if w.Recv {
				recvs++
			} else {
				sends++
			}
		}
		if len(ranks) == 2 && sends == recvs {
			continue // the two ends of one message
		}
		for _, rank := range ranks {
			found[rank] = j
		}
	}
	return found
}

// message is the wait that a rank in a circle has in it.
func (r *report) message(rank int) Wait {
	st := r.of[rank]
	return st.Waits[messageOf(st)]
}

// circleLine is one line for a circle.
func (r *report) circleLine(j *joint) string {
	sends, recvs := false, false
	var each []string
	for i, rank := range j.ranks {
		w := r.message(rank)
		sends, recvs = sends || !w.Recv, recvs || w.Recv
		switch {
		case i < maxTold || i == maxTold && len(j.ranks) == maxTold+1:
			each = append(each, fmt.Sprintf("rank %d%s in %s", rank, r.host(rank), w.What))
		case i == maxTold:
			each = append(each, fmt.Sprintf("and %d more", len(j.ranks)-i))
		}
	}
	return fmt.Sprintf("%s of %d all wait %s, since %s: %s", rankenv.CircleText(j.ranks), r.size, rankenv.CircleOps(sends, recvs), age(j.For), strings.Join(each, ", "))
}
