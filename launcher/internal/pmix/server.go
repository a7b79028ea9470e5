package pmix

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
)

// server serves the ranks of a world on one host.
//
// The protocol's own credential ("native") is no more than the user and group that a client says it is. So the kernel is asked whose the other end
// of a connection is (peerUser): one of another user is closed without a word.
type server struct {
	w         procman.World
	namespace string
	names     []string // of hosts, each another
	ranksOf   [][]int  // ranks by host
	local     []int    // those of this one
	hosts     []int    // of the world
	ctx       context.Context
	stop      context.CancelFunc
	ln        net.Listener
	dir       string        // a directory for ranks' files; "": none could be made
	shm       string        // one for memory that they share
	info      func() []byte // jobInfo, once
	kick      chan struct{} // there is something in outbox
	tasks     sync.WaitGroup

	mu      sync.Mutex // guards the rest
	closed  bool
	conns   map[*conn]bool
	ranks   []*rank
	fences  map[string][]*fence // by members: those that are not met, oldest first
	count   map[string]int      // how many such fences there were
	outbox  []exchange
	over    string   // no fence of all can be passed any more: why
	live    int      // local ranks that have not ended
	unheard int      // those of them that have published nothing yet
	held    int      // bytes that local ranks have published for other hosts
	has     bool     // what they have published is given to the other hosts
	clean   []string // files that ranks leave behind
}

// rank is what is known of a rank.
type rank struct {
	local  []byte    // published for ranks of its host: keys and values as it packed them
	remote []byte    // published for ranks of other hosts
	known  bool      // it has published, if only nothing
	dirty  bool      // remote has not been given to all hosts
	ended  bool      // its process has; of ranks of other hosts known if they have published nothing
	wait   []request // that wait for what it publishes

	// Of ranks of this host.
	connected bool
	finalized bool
	conns     int           // open ones
	idle      chan struct{} // closed while there is none
	why       procman.Departure
}

const (
	// maxNamespace bounds what clients hold of a namespace.
	maxNamespace = 255
	// endBound bounds what is still written to a rank, and how long the kernel is asked whose a connection is.
	endBound = time.Second
)

// announced is the release whose behaviour clients may expect. It has to have the packing "v3".
const announced = "3.2.5"

// Serve serves the ranks of a world on this host.
func Serve(w procman.World) (procman.Server, error) {
	s := &server{w: w, namespace: "gorun-" + w.Job, names: unlike(w.Hosts), local: w.Local(), hosts: w.HostsOf(nil), conns: map[*conn]bool{},
		fences: map[string][]*fence{}, count: map[string]int{}, kick: make(chan struct{}, 1)}
	if len(s.namespace) > maxNamespace {
		return nil, fmt.Errorf("pmix: the job's id has %d bytes", len(w.Job))
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("pmix: %w", err)
	}
	s.ln = ln
	s.dir, s.shm = s.makeDir(os.TempDir()), s.makeDir(shmDir)
	s.ranks = make([]*rank, len(w.Ranks))
	for i := range s.ranks {
		s.ranks[i] = &rank{idle: make(chan struct{})}
		close(s.ranks[i].idle)
	}
	s.ranksOf = make([][]int, len(s.names))
	for r, h := range w.HostOf {
		s.ranksOf[h] = append(s.ranksOf[h], r)
	}
	s.live, s.unheard = len(s.local), len(s.local)
	s.info = sync.OnceValue(s.jobInfo)
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.tasks.Go(s.accept)
	s.tasks.Go(s.send)
	return s, nil
}

// makeDir makes a directory for the job. Without one ranks make their own, which may stay.
func (s *server) makeDir(in string) string {
	dir, err := os.MkdirTemp(in, s.namespace+"-")
	if err != nil {
		return ""
	}
	if s.w.Remove != nil {
		s.w.Remove(dir)
	}
	return dir
}

// unlike are names that differ: clients take hosts with the same for one.
func unlike(names []string) []string {
	taken := map[string]bool{}
	for _, name := range names {
		taken[name] = true
	}
	out, seen := make([]string, len(names)), map[string]bool{}
	for i, name := range names {
		name = strings.NewReplacer(",", "_", ";", "_").Replace(name) // they are listed with these between them
		for n := 2; seen[name]; n++ {
			if other := fmt.Sprintf("%s-%d", names[i], n); !taken[other] {
				name = other
			}
		}
		out[i], seen[name] = name, true
	}
	return out
}

func (s *server) Environ(number int) []string {
	uri := fmt.Sprintf("%s.%d;tcp4://%s", serverName, s.w.Host, s.ln.Addr())
	env := []string{
		"PMIX_NAMESPACE=" + s.namespace,
		"PMIX_RANK=" + strconv.Itoa(number),
		"PMIX_ID=" + s.namespace + "." + strconv.Itoa(number),
		"PMIX_SERVER_URI3=" + uri,
		// For clients that are too old: they are told so.
		"PMIX_SERVER_URI21=" + uri,
		"PMIX_SERVER_URI2=" + uri,
		"PMIX_VERSION=" + announced,
		"PMIX_SECURITY_MODE=native",
		"PMIX_GDS_MODULE=hash",
		"PMIX_BFROP_BUFFER_TYPE=PMIX_BFROP_BUFFER_NON_DESC",
		"PMIX_HOSTNAME=" + s.names[s.w.Host],
		// Open MPI 4 believes that it is alone unless it knows who has started it. These are those who make it believe something else; then it
		// asks PMIx.
		"OMPI_MCA_schizo=^orte,slurm,alps,flux,moab,jsm",
		// It does not bind ranks: gorun does, or nobody.
		"OMPI_MCA_orte_externally_bound=1",
		"OMPI_MCA_hwloc_base_binding_policy=none",
	}
	if len(s.local) > runtime.NumCPU() {
		// Ranks that wait leave the CPU to others. Open MPI counts them by itself only under its own launcher.
		env = append(env, "OMPI_MCA_mpi_oversubscribe=1")
	}
	if s.w.Interface != "" && len(s.hosts) > 1 {
		// Else it takes any that might do, and waits for an answer there.
		env = append(env, "OMPI_MCA_btl_tcp_if_include="+s.w.Interface)
	}
	if s.shm != "" {
		// Open MPI names segments by the job and the rank on its host: in directories of their own even ranks of two hosts that are one machine are
		// apart, and nothing is left when ranks were killed.
		env = append(env, "OMPI_MCA_btl_vader_backing_directory="+s.shm, "OMPI_MCA_btl_sm_backing_directory="+s.shm)
	}
	if s.dir != "" {
		env = append(env, "PMIX_SERVER_TMPDIR="+s.dir, "PMIX_SYSTEM_TMPDIR="+s.dir)
	}
	return env
}

// shmDir is where Linux has files in memory.
const shmDir = "/dev/shm"

// serverName is the servers' own namespace.
const serverName = "gorun-server"

// Files are none: ranks connect.
func (s *server) Files(int) ([]*os.File, error) { return nil, nil }

func (s *server) Ended(number int) procman.Departure {
	s.mu.Lock()
	r := s.ranks[number]
	idle := r.idle
	for c := range s.conns {
		if c.known && c.rank == number {
			// What is there is still read, and then comes an end, though a child of the process may have the socket, too.
			c.nc.(*net.TCPConn).CloseRead()
		}
	}
	s.mu.Unlock()
	procman.AwaitEnd(idle)
	s.mu.Lock()
	defer s.mu.Unlock()
	why := r.why
	why.Unfinished, why.Silent = r.connected && !r.finalized, !r.connected
	if r.ended {
		return why
	}
	s.live--
	if !r.known {
		s.unheard--
	}
	s.never(number)
	if s.unheard == 0 {
		s.spread()
	}
	s.endFences(number)
	return why
}

func (s *server) Standing(number int) node.Standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[number]
	st := node.Standing{Rank: s.w.Ranks[number]}
	switch {
	case r.ended:
		st.State = "ended"
	case !r.connected:
		st.State = "has not called MPI_Init"
	case r.finalized:
		st.State = "has called MPI_Finalize"
	}
	for name, list := range s.fences {
		for _, f := range list {
			if q, here := f.in[number]; here {
				st.Waits = append(st.Waits, s.wait(node.Wait{What: fmt.Sprintf("PMIx fence #%d (MPI_Init, MPI_Finalize)", f.number),
					Group: fmt.Sprintf("pmix %s %d", name, f.number)}, q.since, f.all))
			}
		}
	}
	for target, t := range s.ranks {
		for _, q := range t.wait {
			if q.conn.rank == number {
				st.Waits = append(st.Waits, s.wait(node.Wait{What: fmt.Sprintf("PMIx get from rank %d", s.w.Ranks[target])}, q.since, []int{target}))
			}
		}
	}
	return st
}

// wait is a wait for ranks of the world, ascending.
func (s *server) wait(w node.Wait, since time.Time, ranks []int) node.Wait {
	w.For = time.Since(since)
	of := make([]int, len(ranks))
	for i, r := range ranks {
		of[i] = s.w.Ranks[r]
	}
	w.Members = node.Runs(of)
	return w
}

// Close also removes what ranks have left behind.
func (s *server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	for c := range s.conns {
		c.nc.Close()
	}
	clean := s.clean
	s.mu.Unlock()
	s.stop()
	err := s.ln.Close()
	s.tasks.Wait()
	for _, path := range clean {
		if e := os.Remove(path); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	for _, dir := range []string{s.dir, s.shm} {
		if dir != "" {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}
	return err
}

// end asks for the end of the job because of a rank, once.
func (s *server) end(number int, why procman.Departure) {
	s.mu.Lock()
	r := s.ranks[number]
	again := r.ended || s.closed || r.why != procman.Departure{}
	if !again {
		r.why = why
	}
	s.mu.Unlock()
	if !again {
		s.w.End(number, why)
	}
}
