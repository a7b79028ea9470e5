package rankenv

import (
	"slices"
	"strings"
)

// Scrub splits environ into what a rank may inherit and the variables that another launcher left over
// (Foreign). OMPI_MCA_* are a user's settings of Open MPI, unless its mpirun has started this: then they say what it has. The order is kept.
func Scrub(environ []string) (kept, removed []string) {
	mpirun := slices.ContainsFunc(environ, func(kv string) bool { return strings.HasPrefix(kv, "OMPI_COMM_WORLD_RANK=") })
	for _, kv := range environ {
		name, _, _ := strings.Cut(kv, "=")
		if foreign(name) && (mpirun || !strings.HasPrefix(name, "OMPI_MCA_")) {
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
