package rankenv

import "strings"

// Scrub splits environ into what a rank may inherit and the variables that another launcher left over
// (Foreign). The order is kept.
func Scrub(environ []string) (kept, removed []string) {
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if foreign(name) {
			removed = append(removed, kv)
		} else {
			kept = append(kept, kv)
		}
	}
	return kept, removed
}

func foreign(name string) bool {
	for _, p := range Foreign {
		prefix, isPrefix := strings.CutSuffix(p.Name, "*")
		if name == p.Name || isPrefix && strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}
