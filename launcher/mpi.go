package launcher

import (
	"cmp"
	"debug/elf"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/pmi"
	"github.com/gorun-dev/gorun/launcher/internal/pmix"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
	"github.com/gorun-dev/gorun/rankenv"
)

// Values of Job.MPI: which process manager MPI_Init finds.
const (
	MPIAuto = "auto" // the one that the program's MPI library asks for, none if it is linked with none
	MPIPMI  = "pmi"  // PMI 1: MPICH, Intel MPI, MVAPICH2
	MPIPMIx = "pmix" // PMIx: Open MPI
	MPIOff  = "off"
)

// mpiServers are the process managers that gorun can be.
var mpiServers = map[string]func(procman.World) (procman.Server, error){
	MPIPMI:  pmi.Serve,
	MPIPMIx: pmix.Serve,
}

// planMPI decides what MPI_Init finds in the ranks of each app.
func (p *Plan) planMPI(apps []App, f Facts) error {
	for i := range p.Apps {
		a := &p.Apps[i]
		choice := cmp.Or(apps[i].MPI, MPIAuto)
		a.mpiWish = choice
		if i < len(f.Scripts) {
			a.script = f.Scripts[i]
		}
		switch choice {
		case MPIOff:
			continue
		case MPIAuto:
			choice = p.autoMPI(i)
		default:
			if mpiServers[choice] == nil {
				return flagf("--mpi", "%s: gorun does not speak it", choice)
			}
		}
		a.MPI = choice
	}
	return nil
}

// autoMPI is the process manager for an app's ranks, as the library of the program asks for, or of its script's mpi4py.
func (p *Plan) autoMPI(app int) string {
	library := p.Programs[p.Apps[app].Program].MPI
	if s := p.Apps[app].script; library == "" && !s.Named {
		library = s.Library
	}
	choice := mpiDialect(library)
	if mpiServers[choice] == nil || p.hasPMI(app) {
		return ""
	}
	return choice
}

// mpiDialect is the process manager that programs ask for which are linked with a library; "": none that is known.
func mpiDialect(library string) string {
	stem, version, _ := strings.Cut(library, ".so")
	major, err := strconv.Atoi(strings.Split(strings.TrimPrefix(version, "."), ".")[0])
	switch {
	case strings.HasPrefix(stem, "libmpich"):
		return MPIPMI
	case err != nil || stem == "libmpi_abi": // which implementation it is cannot be told from the name
		return ""
	case major >= 40: // Open MPI 3 and later
		return MPIPMIx
	case major == 12: // what MPICH and those made of it have agreed on
		return MPIPMI
	}
	return ""
}

// unserved says what comes of it that a library is none that is known.
const unserved = "gorun does not know which process manager it asks for (--mpi), each rank would be alone, rank 0 of 1; start it with its own mpirun"

// MPINotes say which programs of a job of several ranks are linked with MPI, or import mpi4py, although gorun cannot tell their ranks of each other, a line each:
// MPI_Init then makes a job of one rank, without an error.
func (p *Plan) MPINotes() []string {
	var notes []string
	if len(p.Ranks) < 2 {
		return nil // to be alone is right
	}
	told := map[int]bool{}
	for i, a := range p.Apps {
		prog := p.Programs[a.Program]
		if a.MPI != "" || a.mpiWish == MPIOff || told[a.Program] || p.hasPMI(i) {
			continue
		}
		if s := a.script; s.Script != "" {
			text := ", whose library is not found: each rank would be alone, rank 0 of 1; give --mpi pmi (MPICH, Intel MPI) or --mpi pmix (Open MPI)"
			if dialect := mpiDialect(s.Library); s.Named && dialect != "" {
				text = fmt.Sprintf(" (%s): each rank would be alone, rank 0 of 1; --mpi %s joins them, --mpi off says that it is meant so", s.Library, dialect)
			} else if s.Library != "" {
				text = fmt.Sprintf(" (%s): %s", s.Library, unserved)
			}
			notes = append(notes, s.text(prog.Name)+text)
			continue
		}
		if prog.MPI == "" {
			continue
		}
		told[a.Program] = true
		notes = append(notes, fmt.Sprintf("%s is linked with MPI (%s): %s", ShellQuote(prog.Name), prog.MPI, unserved))
	}
	return notes
}

// hasPMI reports whether ranks of an app are given a process manager's variables: the user has kept them.
func (p *Plan) hasPMI(app int) bool {
	pmi := func(kv string) bool {
		return slices.ContainsFunc([]string{"PMI_RANK", "PMI_FD", "PMI_PORT", "PMIX_RANK", "PMIX_NAMESPACE"}, func(name string) bool { return isVar(kv, name) })
	}
	a := p.Apps[app]
	return slices.ContainsFunc(p.Ranks, func(r PlanRank) bool {
		return r.App == app && (slices.ContainsFunc(r.Env, pmi) ||
			p.Hosts[r.Host].Local && slices.ContainsFunc(a.inherit, pmi) || !p.Hosts[r.Host].Local && slices.ContainsFunc(p.Remote.Forward, pmi))
	})
}

// mpiWorlds are the worlds of a job's ranks: those that find the same process manager make one.
func (p *Plan) mpiWorlds() []agentwire.World {
	var worlds []agentwire.World
	first := 0
	for i, a := range p.Apps {
		if a.MPI != "" {
			at := slices.IndexFunc(worlds, func(w agentwire.World) bool { return w.Dialect == a.MPI })
			if at < 0 {
				at = len(worlds)
				worlds = append(worlds, agentwire.World{Dialect: a.MPI})
			}
			worlds[at].Runs = append(worlds[at].Runs, agentwire.Run{First: first, Ranks: a.Ranks, App: i})
		}
		first += a.Ranks
	}
	return worlds
}

// universe is how many ranks the hosts take.
func (p *Plan) universe() int {
	n := 0
	for _, h := range p.Hosts {
		n += h.Slots
	}
	return max(n, len(p.Ranks))
}

// writeMPI says which ranks find a process manager.
func (p *Plan) writeMPI(b *strings.Builder) {
	for _, w := range p.mpiWorlds() {
		var ranks []int
		var why []string
		for _, r := range w.Runs {
			ranks = append(ranks, rankRange(r.First, r.Ranks)...)
			prog := p.Programs[p.Apps[r.App].Program]
			text := ShellQuote(prog.Name) + " is linked with " + prog.MPI
			switch s := p.Apps[r.App].script; {
			case prog.MPI != "":
			case s.Library != "" && p.Apps[r.App].mpiWish == MPIAuto:
				text = fmt.Sprintf("%s (%s)", s.text(prog.Name), s.Library)
			default:
				text = "--mpi " + w.Dialect
			}
			if !slices.Contains(why, text) {
				why = append(why, text)
			}
		}
		fmt.Fprintf(b, "mpi        %s for %s: %s\n", w.Dialect, rankenv.RankText(ranks), strings.Join(why, ", "))
	}
}

// mpiLibrary is the first MPI library that an executable needs, as its dynamic section names it: libmpi.so.40, libmpich.so.12, libmpi_mpifh.so.40;
// "" if it needs none or is none.
func mpiLibrary(file string) string {
	opened, _, err := openRegular(file)
	if err != nil {
		return ""
	}
	defer opened.Close()
	f, err := elf.NewFile(opened)
	if err != nil {
		return ""
	}
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
