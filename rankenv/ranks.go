package rankenv

import (
	"strconv"
	"strings"
)

// RankText names ranks as gorun's messages do: "rank 3", "ranks 0,1", "ranks 0-2,5". They are in ascending order.
func RankText(ranks []int) string {
	if len(ranks) == 1 {
		return "rank " + RankList(ranks)
	}
	return "ranks " + RankList(ranks)
}

// RankList is ranks in ascending order as a list of ranges: "3", "0,1", "0-2,5".
func RankList(ranks []int) string {
	var b strings.Builder
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(ranks[i]))
		if j > i {
			sep := "-"
			if j == i+1 {
				sep = "," // two are two, not a range
			}
			b.WriteString(sep + strconv.Itoa(ranks[j]))
		}
		i = j + 1
	}
	return b.String()
}
