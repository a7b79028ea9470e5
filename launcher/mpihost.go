package launcher

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// chooseMPI is what the ranks find in MPI_Init, also of programs that only other hosts have: what these are linked with is known now.
func (r *runner) chooseMPI() (*agentwire.MPI, error) {
	p := r.plan
	p.Programs, p.Apps = slices.Clone(p.Programs), slices.Clone(p.Apps)
	late, told := false, p.MPINotes()
	for host := range r.hosts {
		rh := r.remote(host)
		if rh == nil {
			continue
		}
		on := p.programsOn(host)
		if n := len(rh.prepared.MPI); n != 0 && n != len(on) {
			return nil, &hostError{rh.name, fmt.Errorf("its agent tells the MPI libraries of %d programs, of %d", n, len(on))}
		}
		for i, library := range rh.prepared.MPI {
			if prog := &p.Programs[on[i]]; prog.Path == "" && prog.MPI == "" && library != "" {
				prog.MPI, late = library, true
			}
		}
	}
	if late {
		for i := range p.Apps {
			if a := &p.Apps[i]; a.mpiWish == MPIAuto {
				a.MPI = p.autoMPI(i)
			}
		}
		for _, note := range p.MPINotes() {
			if !slices.Contains(told, note) {
				r.say("%s", note)
			}
		}
	}
	worlds := p.mpiWorlds()
	if worlds == nil {
		return nil, nil
	}
	return &agentwire.MPI{Worlds: worlds, Hosts: agentwire.Pack(p.hostNames()), Universe: p.universe()}, nil
}

// mpiLibraries are the MPI libraries that programs are linked with; nil if none is.
func mpiLibraries(programs []Program) []string {
	if !slices.ContainsFunc(programs, func(p Program) bool { return p.MPI != "" }) {
		return nil
	}
	var libraries []string
	for _, p := range programs {
		libraries = append(libraries, p.MPI)
	}
	return libraries
}

// mpiRank is a rank that finds a process manager.
type mpiRank struct {
	server procman.Server
	rank   int // in its world

	mu     sync.Mutex
	stderr *os.File // the write end of the pipe that is the rank's; nil: it was not started, or has ended
}

// started takes note that the rank was started, and takes over the write end of the pipe that is its stderr.
func (m *mpiRank) started(stderr int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stderr = os.NewFile(uintptr(stderr), "stderr")
}

// say writes what the rank's process manager is to show for it.
func (m *mpiRank) say(text string) {
	m.mu.Lock()
	f := m.stderr
	m.mu.Unlock()
	if f != nil {
		f.WriteString(text) // none reads it any more if it fails
	}
}

func (m *mpiRank) files() ([]*os.File, error) { return m.server.Files(m.rank) }

// ended takes note that the rank's process has ended, and says how it had left.
func (m *mpiRank) ended() procman.Departure {
	defer m.close()
	return m.server.Ended(m.rank)
}

// close lets go of the rank's stderr, so that it has an end. m may be nil.
func (m *mpiRank) close() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stderr != nil {
		m.stderr.Close() // when who writes there is through
		m.stderr = nil
	}
}

// serveMPI starts the process managers that ranks of this host are to find.
func (h *localHost) serveMPI(m meeting) error {
	if m.mpi == nil {
		return nil
	}
	for _, of := range m.mpi.Worlds {
		w, err := h.mpiWorld(of, m)
		if err != nil {
			return err
		}
		local := w.Local()
		if len(local) == 0 {
			continue
		}
		serve := mpiServers[of.Dialect]
		if serve == nil {
			return fmt.Errorf("process manager %q is not known", of.Dialect)
		}
		says := map[int]*mpiRank{}
		for _, rank := range local {
			says[rank] = &mpiRank{rank: rank}
		}
		w.Say = func(rank int, text string) { says[rank].say(text) }
		w.Remove = func(path string) { _ = h.cfg.keeper.Remove(path) } // if it is gone the watcher knows
		server, err := serve(*w)
		if err != nil {
			return err
		}
		h.later(func() { server.Close() })
		for _, rank := range local {
			i := slices.IndexFunc(h.cfg.ranks, func(r agentRank) bool { return r.rank == w.Ranks[rank] })
			r := &h.cfg.ranks[i]
			r.mpi = says[rank]
			r.mpi.server = server
			// What it says of MPI libraries' settings is for want of the user's.
			env := withoutManagers(r.env)
			r.env = append(env, without(server.Environ(rank), setNames(env, nil))...)
		}
	}
	return nil
}

// mpiWorld is a world as its process manager on this host has it.
func (h *localHost) mpiWorld(of agentwire.World, m meeting) (*procman.World, error) {
	nodeOf := h.cfg.nodes.NodeOf
	w := &procman.World{Job: h.cfg.job.ID, Host: h.cfg.host, Hosts: m.mpi.Hosts.Unpack(), Universe: m.mpi.Universe, Interface: m.iface, Exchange: h.node.Exchange}
	for _, run := range of.Runs {
		if run.First < 0 || run.Ranks < 0 || run.First > len(nodeOf)-run.Ranks {
			return nil, fmt.Errorf("process manager for %d ranks from %d, of %d", run.Ranks, run.First, len(nodeOf))
		}
		for rank := run.First; rank < run.First+run.Ranks; rank++ {
			w.Ranks, w.HostOf, w.AppOf = append(w.Ranks, rank), append(w.HostOf, nodeOf[rank]), append(w.AppOf, run.App)
		}
	}
	if manyHosts(nodeOf) {
		at := h.cfg.nodes.Bind.Addr()
		if h.cfg.nodes.Advertise.IsValid() {
			at = h.cfg.nodes.Advertise
		}
		w.Addr = at.Unmap().String()
	}
	w.End = func(rank int, why procman.Departure) {
		h.agent.report(agentEvent{kind: rankAborted, rank: w.Ranks[rank], status: exitStatus{MPI: why}, at: time.Now()})
	}
	return w, nil
}

// withoutManagers is the environment of a rank without what another process manager left in it: where gorun runs under mpirun or srun and the user keeps
// their variables, MPI_Init would find two. Settings stay.
func withoutManagers(env []string) []string {
	return slices.DeleteFunc(env, func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		if name == "I_MPI_PMI_LIBRARY" || name == "I_MPI_PMI" { // by which modules have Intel MPI use Slurm's
			return true
		}
		if name == "PMI_DEBUG" || strings.HasPrefix(name, "PMIX_MCA_") {
			return false
		}
		return slices.ContainsFunc([]string{"PMI_", "PMI2_", "PMIX_", "MPI_LOCAL", "OMPI_COMM_WORLD_"}, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
	})
}

// standing says of a rank that has not joined the job what its process manager knows, if it has one.
func (h *localHost) standing(s *node.Standing) {
	for i := range h.cfg.ranks {
		if r := &h.cfg.ranks[i]; r.rank == s.Rank && r.mpi != nil {
			found := r.mpi.server.Standing(r.mpi.rank)
			s.State, s.Waits = found.State, found.Waits
		}
	}
}

// aborted takes note that a rank asks for the end of the job, or says to its process manager what it does not understand. Its process may live on.
func (r *runner) aborted(e agentEvent) {
	a := &r.acct.Ranks[e.rank]
	if a.done || r.ending {
		return // what it ends with tells
	}
	a.status.MPI, a.fell = e.status.MPI, e.at
	if r.failed < 0 {
		r.failed, r.acct.Reason = e.rank, ReasonFailed
	}
	r.end(ReasonFailed, syscall.SIGTERM, syscall.SIGKILL)
}

// tellSilent says which programs are linked with MPI although none of their ranks has asked for its place: where they called MPI_Init, their library asks another
// process manager, and each of them was alone.
func (r *runner) tellSilent() {
	for _, w := range r.plan.mpiWorlds() {
		told := map[int]bool{}
		for _, run := range w.Runs {
			prog := r.plan.Apps[run.App].Program
			library := r.plan.Programs[prog].MPI
			silent := run.Ranks > 1 && library != "" && !told[prog]
			for rank := run.First; silent && rank < run.First+run.Ranks; rank++ {
				a := &r.acct.Ranks[rank]
				silent = a.done && a.Stopped == "" && a.status == exitStatus{MPI: procman.Departure{Silent: true}}
			}
			if silent {
				told[prog] = true
				r.say("%s is linked with MPI (%s), and no rank asked for its place by %s: if it called MPI_Init, each rank was alone, rank 0 of 1 (--mpi)", ShellQuote(r.plan.Programs[prog].Name), library, w.Dialect)
			}
		}
	}
}

// maxUserAbort is the largest code that is taken for one of the user's: MPI's own errors, with which MPI_Abort is called where the user handles none, have larger ones.
const maxUserAbort = 255

// abortOrigin is the failed rank behind a call of MPI_Abort: MPI calls it, too, when a connection to another rank ends, and that may be seen before the end of that
// rank's process. Who was killed, or left without MPI_Finalize, did not do so because of the call; who exited with another code did not if MPI made the call.
func (a *Account) abortOrigin(first *RankAccount) *RankAccount {
	if !first.status.MPI.Aborted {
		return first
	}
	origin := first
	for i := range a.Ranks {
		r := &a.Ranks[i]
		if !r.failedItself() || r.status.MPI.Aborted || r.status.MPI.Fault != "" || r.End.Sub(first.fallen()) >= lastRites {
			continue
		}
		if (r.status.Signal != 0 || r.status.onlyUnfinished() || first.status.MPI.Code > maxUserAbort) && (origin == first || r.before(origin)) {
			origin = r
		}
	}
	return origin
}
