package nccl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/rankenv"
)

// whereaboutsOf is whereabouts of the member that has the other end of a message of this rank: where the two wait for each other, whatever members are between them, all
// of those.
func (c *Comm) whereaboutsOf(op Op, peer int) string {
	if text := c.circle(op, peer); text != "" {
		return text
	}
	return c.whereabouts(peer)
}

// circle tells of members that each wait in a message with the next one, this rank among them, "" where there are none. All members name it alike.
func (c *Comm) circle(op Op, peer int) string {
	ranks := []int{c.rank}
	ops := []Op{op}
	for r := peer; r != c.rank; {
		a := c.peers[r].acct
		if a == nil || slices.Contains(ranks, r) {
			return ""
		}
		next, in, ok := otherEnd(a.Busy())
		if !ok || next >= len(c.ranks) {
			return ""
		}
		ranks, ops = append(ranks, r), append(ops, in)
		r = next
	}
	if len(ranks) == 2 && ops[0] != ops[1] {
		return "" // the two ends of one message
	}
	least := slices.Index(ranks, slices.Min(ranks))
	return rankenv.CircleText(slices.Concat(ranks[least:], ranks[:least])) + " all wait " + rankenv.CircleOps(slices.Contains(ops, OpSend), slices.Contains(ops, OpRecv))
}

// otherEnd reads what a member says of a message that it waits in (Account.SetMessage): "message #1, send of 8 float32, to rank 1".
func otherEnd(busy string) (rank int, op Op, ok bool) {
	if _, rest, found := strings.Cut(busy, ", "); found && strings.HasPrefix(busy, "message #") {
		busy = rest
	}
	var count uint64
	var typ string
	for op, format := range map[Op]string{OpSend: "send of %d %s to rank %d", OpRecv: "recv of %d %s from rank %d"} {
		if n, _ := fmt.Sscanf(busy, format, &count, &typ, &rank); n == 3 && rank >= 0 && strings.HasSuffix(busy, fmt.Sprintf(" rank %d", rank)) {
			return rank, op, true
		}
	}
	return 0, 0, false
}
