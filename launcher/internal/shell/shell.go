// Package shell writes words for a shell: commands that gorun shows work as they stand.
package shell

import (
	"strconv"
	"strings"
)

// Quote writes a word so that a shell reads it back.
func Quote(s string) string {
	plain := s != ""
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("_-+=:,./@%^", c) >= 0 {
			continue
		}
		plain = false
		if c < ' ' || c >= 0x7f {
			q := strconv.QuoteToASCII(s)
			return "$'" + strings.ReplaceAll(q[1:len(q)-1], "'", `\'`) + "'"
		}
	}
	if plain {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
