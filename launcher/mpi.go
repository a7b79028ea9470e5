package launcher

import (
	"debug/elf"
	"fmt"
	"os"
	"slices"
	"strings"
)

// MPINotes say which programs of a job of several ranks are linked with MPI, a line each: MPI_Init finds the other ranks through the process
// manager that started them, and with none it makes a job of one rank, without an error. It touches no more than the programs' files on this host.
func (p *Plan) MPINotes() []string {
	var notes []string
	if len(p.Ranks) < 2 {
		return nil // to be alone is right
	}
	for i, prog := range p.Programs {
		if prog.Path == "" || p.hasPMI(i) {
			continue
		}
		if lib := mpiLibrary(prog.Path); lib != "" {
			notes = append(notes, fmt.Sprintf("%s is linked with MPI (%s): gorun does not speak PMI, each rank would be alone, rank 0 of 1; start it with mpirun", shellQuote(prog.Name), lib))
		}
	}
	return notes
}

// hasPMI reports whether ranks of a program are given a process manager's variables: the user has kept them.
func (p *Plan) hasPMI(program int) bool {
	pmi := func(kv string) bool {
		return slices.ContainsFunc([]string{"PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE"}, func(name string) bool { return isVar(kv, name) })
	}
	return slices.ContainsFunc(p.Ranks, func(r PlanRank) bool {
		a := p.Apps[r.App]
		return a.Program == program && (slices.ContainsFunc(r.Env, pmi) ||
			p.Hosts[r.Host].Local && slices.ContainsFunc(a.inherit, pmi) || !p.Hosts[r.Host].Local && slices.ContainsFunc(p.Remote.Forward, pmi))
	})
}

// mpiLibrary is the first MPI library that an executable needs, as its dynamic section names it: libmpi.so.40, libmpich.so.12, libmpi_mpifh.so.40;
// "" if it needs none or is none.
func mpiLibrary(file string) string {
	if info, err := os.Stat(file); err != nil || !info.Mode().IsRegular() { // to open a pipe waits for its writer
		return ""
	}
	f, err := elf.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	libs, err := f.ImportedLibraries()
	if err != nil {
		return ""
	}
	for _, lib := range libs {
		// libmpir has long integers.
		if strings.HasPrefix(lib, "libmpi") && strings.Contains(lib, ".so") && !strings.HasPrefix(lib, "libmpir.") {
			return lib
		}
	}
	return ""
}
