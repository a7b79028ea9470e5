package testhosts

import (
	"os"
	"strconv"
	"strings"
)

// The kernel's table of neighbours is one for all namespaces, and holds 1024 entries by default: 64 hosts that all speak to each other need more, or
// packets are dropped.
var neighbourLimits = []struct {
	name string
	want int
}{{"gc_thresh3", 16384}, {"gc_thresh2", 8192}, {"gc_thresh1", 4096}} // none above the one before

// manyHosts is from where on the table would overflow.
const manyHosts = 24

// raiseNeighbours raises the limits where they are lower, and returns what puts them back. Where they cannot be changed they stay.
func raiseNeighbours() (restore func()) {
	type change struct{ file, old string }
	var changes []change
	for _, family := range []string{"ipv4", "ipv6"} {
		for _, l := range neighbourLimits {
			file := "/proc/sys/net/" + family + "/neigh/default/" + l.name
			old, err := os.ReadFile(file)
			if n, bad := strconv.Atoi(strings.TrimSpace(string(old))); err != nil || bad != nil || n >= l.want {
				continue
			}
			if os.WriteFile(file, []byte(strconv.Itoa(l.want)), 0o644) == nil {
				changes = append(changes, change{file, string(old)})
			}
		}
	}
	return func() {
		for i := len(changes) - 1; i >= 0; i-- {
			os.WriteFile(changes[i].file, []byte(changes[i].old), 0o644)
		}
	}
}
