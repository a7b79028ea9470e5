package rankenv

import "fmt"

// CircleText names ranks of which each waits for the next one, and the last for the first: "ranks 0 -> 2 -> 1 -> 0". Of many it names some.
func CircleText(ranks []int) string {
	const most = 16
	text := "ranks "
	for i, r := range ranks {
		if i == most-1 && len(ranks) > most {
			text += fmt.Sprintf("(%d more) -> ", len(ranks)-i)
			break
		}
		text += fmt.Sprintf("%d -> ", r)
	}
	return text + fmt.Sprint(ranks[0])
}

// CircleOps is in which messages they wait: sends, receives, or some in one and some in the other.
func CircleOps(sends, recvs bool) string {
	switch {
	case !recvs:
		return "in Send, each to the next"
	case !sends:
		return "in Recv, each from the next"
	}
	return "in Send or Recv, each with the next"
}
