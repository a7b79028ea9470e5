package launcher

import "strings"

// Nearest is the word of a list that a misspelt one most likely means, "" if none is near.
func Nearest(word string, list []string) string { return nearest(word, list, len(word)) }

// Slip is as Nearest, for words that may be right: it must be two slips at most.
func Slip(word string, list []string) string { return nearest(word, list, 2) }

func nearest(word string, list []string, most int) string {
	best, at := "", 0
	w := strings.ToLower(strings.TrimLeft(word, "-"))
	for _, l := range list {
		d := distance(w, strings.TrimLeft(l, "-"))
		// One slip in three letters: more is another word.
		if d <= min((len(w)+2)/3, most) && (best == "" || d < at) {
			best, at = l, d
		}
	}
	return best
}

// distance is the number of letters to insert, delete, replace or swap with their neighbour.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			rows[i][j] = min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
