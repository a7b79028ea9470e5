package launcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/launcher/internal/push"
)

const (
	// prepareWait bounds the wait for the host's part of the job.
	prepareWait = time.Minute
	// orphanGrace bounds the kill grace of ranks whose gorun is gone.
	orphanGrace = time.Second
	// pauseAfter is how long after a pause of gorun nothing follows from silence: it has to catch up.
	pauseAfter = 5 * time.Second
	// agentGC lets an agent's heap, of some MiB, grow to 16 MiB before it is collected: most jobs end before that, and hosts start them often.
	agentGC = 400
	// closeBound bounds the end of the host's bootstrap node.
	closeBound = time.Second
	// doubtEvery is how often gorun is told of a doubt that lasts.
	doubtEvery = time.Second
)

// VerifyAgent is an error unless the file of this process is the one with the hash (SHA-256, in hexadecimal digits): what was sent to a host has arrived.
func VerifyAgent(hash string) error { return push.Verify(hash) }

// ServeAgent is the life of an agent: it runs the ranks of this host as gorun says on stdin and stdout, which it takes over. Nothing
// of the job is left on the host when it returns, also when stdin has ended: then its ranks get SIGTERM, and SIGKILL after the kill
// grace, a second at most. An error says what ended it.
func ServeAgent() error { return serveAgent(nil) }

// serveAgent is ServeAgent. onFork is nil, but in tests: as of agentConfig.
func serveAgent(onFork func(rank int)) error {
	debug.SetGCPercent(agentGC)
	if isTerminal(0) {
		return errors.New("is started by gorun itself, on other hosts")
	}
	in, out, err := takeStdio()
	if err != nil {
		return err
	}
	if exe, err := os.Readlink("/proc/self/exe"); err == nil {
		os.Chtimes(exe, time.Time{}, time.Now()) // it is in use: the oldest builds on a host are removed
	}
	// An emulator of user programs may not know it: then init gets what ranks leave behind, and their environment tells whose it is.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil && err != unix.EINVAL {
		return fmt.Errorf("become child subreaper: %w", err)
	}
	if err := agentwire.WritePreface(out, buildName()); err != nil {
		return fmt.Errorf("speak to gorun: %w", err)
	}
	conn := &stdioConn{in, out}
	session := -1
	if raw, err := in.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { session = int(fd) })
	}
	silent := time.AfterFunc(prepareWait, func() { conn.Close() })
	mux, err := agentwire.Accept(conn)
	if err != nil {
		return err
	}
	silent.Stop()
	// From here on no one but gorun ends the agent in order. Signals are caught, not ignored: ranks would inherit that.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGTSTP, syscall.SIGPIPE)
	s := &agentServer{mux: mux, session: session, onFork: onFork, signals: signals, messages: make(chan *agentwire.Message)}
	s.looking, s.giveUp = context.WithCancel(context.Background())
	defer mux.Close()
	return s.serve()
}

// takeStdio moves stdin and stdout out of the way of anything that writes to descriptor 1 by mistake.
func takeStdio() (in, out *os.File, err error) {
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open /dev/null: %w", err)
	}
	defer unix.Close(null)
	var files [2]*os.File
	for fd := range files {
		n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		// So that Close ends a Read; a descriptor that cannot do it is read as it is.
		unix.SetNonblock(n, true)
		files[fd] = os.NewFile(uintptr(n), "session")
		if err := unix.Dup3(null, fd, 0); err != nil {
			return nil, nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
	}
	return files[0], files[1], nil
}

// stdioConn is a session as the agent sees it.
type stdioConn struct{ in, out *os.File }

func (c *stdioConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *stdioConn) Write(p []byte) (int, error) { return c.out.Write(p) }
func (c *stdioConn) Close() error                { return errors.Join(c.in.Close(), c.out.Close()) }

// agentServer runs the ranks of a host for a gorun elsewhere.
type agentServer struct {
	mux      *agentwire.Mux
	session  int // descriptor from which mux reads
	onFork   func(rank int)
	signals  chan os.Signal
	messages chan *agentwire.Message // closed at the end of the session

	job      *agentwire.Prepare
	programs []Program // as job.Programs, found on this host
	dir      string
	ownDir   bool
	noDir    bool // the directory of gorun's host is missing here
	files    jobFiles
	host     *localHost
	pumps    *pumps
	events   chan agentEvent
	began    time.Time
	stdin    map[int]*stdinPipe // by rank
	readFD   map[int]int        // the ranks' ends of these, until the ranks have their own

	place    agentwire.Place // what the ranks get
	placeEnv [][]string      // and what their environment says of it

	looks            sync.WaitGroup  // at what the ranks do
	looking          context.Context // of these
	giveUp           context.CancelFunc
	nStarted, nEnded int
	forked           bool
	orphaned         bool // gorun is gone

	mu      sync.Mutex // guards the rest
	doubts  map[int]doubtful
	lost    map[int]bool // hosts that gorun has given up
	cutOff  atomic.Bool  // gorun and other hosts are silent
	paused  atomic.Bool  // gorun has said Pause last
	resumed atomic.Int64 // when it has last said something else after that
	threads sync.WaitGroup
}

// doubtful is a host that gossip holds for dead.
type doubtful struct{ last, told time.Time }

// serve is what the agent does from its first message on.
func (s *agentServer) serve() error {
	go func() {
		defer close(s.messages)
		for {
			m, err := s.mux.Receive()
			if err != nil {
				return
			}
			s.messages <- m
		}
	}()
	// Whoever receives no more lets the goroutine go.
	defer func() {
		s.mux.Close()
		for range s.messages {
		}
	}()
	timeout := time.NewTimer(prepareWait)
	defer timeout.Stop()
	for s.job == nil {
		select {
		case m, ok := <-s.messages:
			switch {
			case !ok:
				return errors.New("the session ended before it said what to run")
			case m.Bye != nil:
				return nil
			case m.Check != nil:
				return s.check(m.Check)
			case m.Ping != nil: // a program is being built, or files are being read
				timeout.Reset(prepareWait)
			case m.Pause != nil:
				timeout.Stop()
			case m.Prepare == nil:
				return errors.New("the session does not begin with what to run")
			default:
				s.job = m.Prepare
			}
		case <-timeout.C:
			return fmt.Errorf("gorun did not say what to run within %v", prepareWait)
		case sig := <-s.signals:
			if sig == syscall.SIGTERM {
				return errors.New("terminated")
			}
		}
	}
	err := s.prepare()
	defer s.giveBack()
	if err != nil {
		f := &agentwire.Failed{Text: limitHint(err).Error()}
		if e, ok := errors.AsType[*StartError](err); ok {
			f.Code = e.Code
		}
		s.mux.Send(&agentwire.Message{Failed: f})
		s.mux.Flush(farewell)
		s.awaitBye()
		return nil
	}
	return s.run()
}

// awaitBye waits until gorun has all that was said.
func (s *agentServer) awaitBye() {
	timeout := time.NewTimer(farewell)
	defer timeout.Stop()
	for {
		select {
		case m, ok := <-s.messages:
			if !ok || m.Bye != nil {
				return
			}
		case <-timeout.C:
			return
		}
	}
}

// prepare does what can fail before any rank runs.
func (s *agentServer) prepare() error {
	j := s.job
	s.stdin, s.readFD = map[int]*stdinPipe{}, map[int]int{}
	s.doubts, s.lost = map[int]doubtful{}, map[int]bool{}
	err := s.stage()
	if err != nil {
		return err
	}
	for _, p := range j.Programs {
		found, err := findHere(p)
		if err != nil {
			return err
		}
		s.programs = append(s.programs, found)
	}
	placed, err := s.placeRanks()
	if err != nil {
		return err
	}
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open /dev/null: %w", err)
	}
	addrs := hostAddrs(j.Bind, j.Reached)
	bind, err := netip.ParseAddr(addrs[0].IP)
	if err != nil {
		return err
	}
	at, err := freePort(bind, j.PortFrom, j.PortTo)
	if err != nil {
		return err
	}
	nodeOf, err := agentwire.Expand(j.Placement, MaxNP)
	if err != nil {
		return err
	}
	s.events = make(chan agentEvent, eventRoom(len(j.Ranks), 1))
	s.pumps = newPumps(s.mux, j.Timestamp)
	cfg := hostConfig{
		agentConfig: agentConfig{events: s.events, output: s.pumps, merge: j.Merge, onFork: s.onFork, ownChild: true, files: s.files.any()},
		nodes:       node.Config{Job: j.Job, Node: j.Node, NodeOf: nodeOf, Host: j.Host, Key: j.Key, Bind: at, Ports: [2]int{j.PortFrom, j.PortTo}, Confirm: s.confirm},
		start:       startNode,
		masterPort:  j.MasterPort,
		environ:     s.environ,
		unreached: func(host int) {
			if !s.inPause() {
				s.mux.Send(&agentwire.Message{Doubt: &agentwire.Doubt{Host: host, Unreached: true}})
			}
		},
	}
	if cfg.ranks, err = s.ranks(placed, null); err != nil {
		return err
	}
	if cfg.keeper, s.files.keeper = s.files.keeper, nil; cfg.keeper == nil {
		if cfg.keeper, err = keeper.StartIn(keeper.Job{ID: j.Job, Node: j.Node}, s.session); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), prepareWait)
	defer cancel()
	if s.host, err = newLocalHost(ctx, cfg); err != nil {
		return err
	}
	s.host.reachable(addrs, s.mux.Send)
	s.mux.Send(&agentwire.Message{Prepared: &agentwire.Prepared{Machine: machine(), Node: s.host.where(), At: s.host.at, Dir: []byte(s.dir), OwnDir: s.ownDir, NoDir: s.noDir,
		Notes: s.notes(), Place: s.place, MPI: mpiLibraries(s.programs)}})
	return nil
}

// ranks are the processes to start, with the pipes of those that read input; the others read null.
func (s *agentServer) ranks(placed placement.Placement, null int) ([]agentRank, error) {
	j := s.job
	var ranks []agentRank
	var argv []string
	for i, r := range j.Ranks {
		if r.Program < 0 || r.Program >= len(s.programs) {
			return nil, fmt.Errorf("rank %d runs program %d of %d", r.Rank, r.Program, len(s.programs))
		}
		if len(r.Argv) > 0 {
			argv = r.Argv.Unpack()
		} else if argv == nil {
			return nil, fmt.Errorf("rank %d has no arguments, not even its program's name", r.Rank)
		}
		ar := agentRank{rank: r.Rank, path: s.programs[r.Program].Path, argv: argv, dir: s.dirOf(&r), stdin: null, cpus: placed.Ranks[i].CPUs}
		s.placeEnv = append(s.placeEnv, placeVars(placed.Ranks[i], r.Env.Unpack()))
		if slices.Contains(j.Stdin, r.Rank) {
			p, fd, err := newStdinPipe()
			if err != nil {
				return nil, err
			}
			s.stdin[r.Rank], s.readFD[r.Rank], ar.stdin = p, fd, fd
		}
		ranks = append(ranks, ar)
	}
	return ranks, nil
}

// machine tells this machine from others, and a container from the machine that it runs on.
func machine() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	id := strings.TrimSpace(string(boot))
	for _, ns := range []string{"mnt", "net", "pid"} {
		name, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return ""
		}
		id += " " + name
	}
	return id
}

// dirOf is the working directory of a rank.
func (s *agentServer) dirOf(r *agentwire.Rank) string {
	return cmp.Or(string(r.Dir), s.dir)
}

// findHere finds a program on this host: a name in this host's PATH, else the file that gorun found.
func findHere(p agentwire.Program) (Program, error) {
	name, file := string(p.Name), string(p.Path)
	if !strings.Contains(name, "/") && name != "." && name != ".." {
		found, err := FindProgram(name, cmp.Or(os.Getenv("PATH"), "/usr/local/bin:/usr/bin:/bin"))
		if err == nil || executable(file) != nil {
			if s, ok := errors.AsType[*StartError](err); ok && s.Code == ExitNotFound && file != "" {
				s.Msg += "; given by its path, it would be sent there"
			}
			return found, err
		}
	}
	found, err := FindProgram(cmp.Or(file, name), "") // gorun's host may lack it
	found.Name = name
	if err == nil && found.GoDir != "" {
		err = &StartError{Code: ExitCannotRun, Msg: "run " + ShellQuote(name), Err: syscall.EISDIR}
	}
	return found, err
}

// environ is the environment of a rank: this login's, what gorun forwards, and the rank's own.
func (s *agentServer) environ(rank int, control string, m meeting) []string {
	i := slices.IndexFunc(s.job.Ranks, func(r agentwire.Rank) bool { return r.Rank == rank })
	at := launchVars(s.job.Job, control, m.addr, m.port)
	own := s.job.Ranks[i].Env.Unpack()
	if vars := s.placeEnv[i]; len(vars) > 0 {
		own = append(vars[:len(vars):len(vars)], without(own, setNames(vars, nil))...)
	}
	env := remoteEnviron(os.Environ(), s.job.Forward.Unpack(), own, append(at, "PWD="+s.dirOf(&s.job.Ranks[i])))
	return onInterface(env, m.iface)
}

// notes are what a person is to know of this host's part.
func (s *agentServer) notes() []string {
	if len(s.job.Ranks) == 0 {
		return nil
	}
	return interfaceNotes(remoteEnviron(os.Environ(), s.job.Forward.Unpack(), s.job.Ranks[0].Env.Unpack(), nil))
}

// run is the life of the host's part from the preparation on.
func (s *agentServer) run() error {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	adopt := time.NewTicker(adoptEvery)
	defer adopt.Stop()
	pulse := newHeartbeat(s.mux)
	for {
		select {
		case e := <-s.events:
			s.event(e)
		case m, ok := <-s.messages:
			if !ok {
				s.endOrphans(0)
				return errors.New("the session has ended")
			}
			if done, err := s.handle(m); err != nil || done {
				if err != nil {
					s.endOrphans(0)
				}
				return err
			}
		case sig := <-s.signals:
			if sig == syscall.SIGTERM {
				s.mux.Send(&agentwire.Message{AgentFailed: &agentwire.Text{Text: "the agent was terminated (SIGTERM)"}})
				s.endOrphans(0)
				return errors.New("terminated")
			}
		case <-adopt.C:
			if s.host.agent != nil {
				s.host.adopted()
			}
		case <-tick.C:
			now := time.Now()
			if silent := s.silence(pulse, now); silent > silentAgent || silent > silentAgreed && s.doubting(now) {
				s.cutOff.Store(true) // the node may tell the ranks
				s.endOrphans(orphanGrace)
				return fmt.Errorf("gorun has been silent for %v", silent.Round(time.Second))
			}
		}
	}
}

// handle does what gorun says. The agent is done after Bye.
func (s *agentServer) handle(m *agentwire.Message) (done bool, err error) {
	started := s.host.agent != nil
	s.heard(m)
	switch {
	case m.Pause != nil:
	case m.Ping != nil:
	case m.Bye != nil:
		if started && s.nEnded < s.nStarted {
			s.endOrphans(0)
		}
		s.host.over()
		return true, nil
	case m.Start != nil:
		if started {
			return false, errors.New("the ranks are to be started twice")
		}
		return false, s.start(m.Start)
	case m.Lose != nil:
		s.mu.Lock()
		s.lost[m.Lose.Host] = true
		s.mu.Unlock()
		s.host.lose(m.Lose.Host, m.Lose.Name, m.Lose.Cause)
	case !started && s.host.reach.handle(m):
	case m.Move != nil && !started:
		s.host.reach.close()
		ctx, cancel := context.WithTimeout(context.Background(), prepareWait)
		defer cancel()
		where, err := s.host.move(ctx, m.Move)
		if err != nil {
			s.mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: err.Error()}})
			return false, nil
		}
		s.mux.Send(&agentwire.Message{Moved: &agentwire.Moved{Node: where}})
	case m.Query != nil:
		s.mux.Send(&agentwire.Message{State: s.state()})
	case !started:
		return false, errors.New("an order before the ranks are started")
	case m.StdinAsk != nil:
		p := s.stdin[m.StdinAsk.Rank]
		if p == nil {
			return false, fmt.Errorf("a question about the stdin of rank %d, which has none", m.StdinAsk.Rank)
		}
		p.ask(m.StdinAsk.Bytes)
	case m.Look != nil:
		s.look(m.Look)
	case m.StopForks != nil:
		s.host.stopForks()
	case m.Signal != nil:
		var pick func(int) bool
		if !m.Signal.All {
			pick = func(rank int) bool { return slices.Contains(m.Signal.Ranks, rank) }
		}
		s.host.signal(syscall.Signal(m.Signal.Signal), pick)
	case m.Reap != nil:
		s.reap()
	default:
		return false, errors.New("an order that an agent does not know")
	}
	return false, nil
}

// reap ends what is left of the ranks, and carries the rest of their output.
func (s *agentServer) reap() {
	calm := tend(s.mux, nil, nil) // what is removed may be much
	defer calm()
	r := &agentwire.Reaped{Killed: s.host.reap()}
	for _, k := range s.job.Ranks {
		if joined, left := s.host.joined(k.Rank); joined {
			r.Joined = append(r.Joined, agentwire.Joined{Rank: k.Rank, Left: left})
		}
	}
	if s.job.Node == 0 {
		r.State = s.state()
	}
	if s.ownDir {
		var made []string
		made, r.NMade = s.files.made()
		r.Made = agentwire.Pack(made)
	}
	s.unstage()
	s.mux.Send(&agentwire.Message{Reaped: r})
	s.threads.Go(func() {
		s.pumps.finish()
		if c, err := s.mux.Open(agentwire.Header{Kind: agentwire.End}); err == nil {
			c.Close()
		}
	})
}

func (s *agentServer) start(m *agentwire.Start) error {
	s.host.reach.close()
	s.began = time.Now()
	if err := s.host.meet(meeting{addr: m.MasterAddr, port: m.MasterPort, seeds: m.Seeds, iface: m.Interface, mpi: m.MPI}); err != nil {
		return err
	}
	a := s.host.agent
	for rank, p := range s.stdin {
		p.serve(func() int { return a.pidOf(rank) }, func(bytes int64) {
			s.mux.Send(&agentwire.Message{StdinWanted: &agentwire.StdinAt{Rank: rank, Bytes: bytes}})
		})
	}
	s.threads.Go(s.feed)
	s.host.start()
	return nil
}

// state is what the node of host 0 knows of the job.
func (s *agentServer) state() *agentwire.State {
	st := s.host.state()
	w := &agentwire.State{Ended: st.ended}
	for _, p := range st.suspicions {
		w.Suspicions = append(w.Suspicions, agentwire.Suspicion{By: p.By, Rank: p.Rank})
	}
	return w
}

// event reports an event to gorun.
func (s *agentServer) event(e agentEvent) {
	s.host.note(e)
	var m agentwire.Message
	switch e.kind {
	case rankFailed:
		i := slices.IndexFunc(s.job.Ranks, func(r agentwire.Rank) bool { return r.Rank == e.rank })
		err := limitHint(execError(s.programs[s.job.Ranks[i].Program], e.rank, e.err))
		f := &agentwire.RankFailed{Rank: e.rank, Failed: agentwire.Failed{Text: err.Error()}}
		if x, ok := errors.AsType[*StartError](err); ok {
			f.Code = x.Code
		}
		m.RankFailed = f
	case forksDone:
		s.forked = true
		m.Started = &agentwire.Started{At: time.Since(s.began)}
		for _, r := range e.started {
			after := time.Duration(0)
			if r.pid != 0 {
				s.nStarted++
				after = r.at.Sub(s.began)
			}
			m.Started.Ranks = append(m.Started.Ranks, agentwire.StartedRank{Rank: r.rank, PID: r.pid, After: after})
		}
		s.closeReadFDs() // the ranks' alone: their ends are seen
	case rankExited:
		s.nEnded++
		m.Exited = &agentwire.Exited{Rank: e.rank, PID: e.pid, Code: e.status.Code, Signal: int(e.status.Signal), Core: e.status.Core, OOM: e.status.OOM, Sent: int(e.sent), After: e.at.Sub(s.began), MPI: e.status.MPI}
		if s.job.Node == 0 {
			m.Exited.State = s.state()
		}
	case rankAborted:
		m.Aborted = &agentwire.Aborted{Rank: e.rank, After: e.at.Sub(s.began), MPI: e.status.MPI}
	case keeperDied:
		m.KeeperDied = &agentwire.KeeperDied{PID: e.pid}
	case agentFailed:
		m.AgentFailed = &agentwire.Text{Text: e.err.Error()}
	case hostMet:
		m.Met = &agentwire.Met{}
	case hostApart:
		m.Met = &agentwire.Met{Missing: e.hosts}
	default:
		return
	}
	s.mux.Send(&m)
}

func (s *agentServer) closeReadFDs() {
	for _, fd := range s.readFD {
		unix.Close(fd)
	}
	clear(s.readFD)
}

// confirm answers the node, which holds another host for dead: it is given up if gorun says so, or gorun is silent, too.
func (s *agentServer) confirm(host int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost[host] || s.cutOff.Load() {
		return true
	}
	if s.inPause() {
		return false // gorun may be that host, and cannot be asked
	}
	d := s.doubts[host]
	d.last = time.Now()
	if d.last.Sub(d.told) >= doubtEvery {
		d.told = d.last
		s.mux.Send(&agentwire.Message{Doubt: &agentwire.Doubt{Host: host}})
	}
	s.doubts[host] = d
	return false
}

// heard takes note whether gorun stops, or goes on.
func (s *agentServer) heard(m *agentwire.Message) {
	if was := s.paused.Swap(m.Pause != nil); was && m.Pause == nil {
		s.resumed.Store(time.Now().UnixNano())
	}
}

// silence is called every beat: for how long gorun has been silent.
func (s *agentServer) silence(pulse *heartbeat, now time.Time) time.Duration {
	silent, _ := pulse.beat(now, false)
	if s.inPause() {
		pulse.heard, silent = now, 0
	}
	return silent
}

// inPause reports whether gorun is stopped, or was a moment ago: then nothing follows from silence.
func (s *agentServer) inPause() bool {
	return s.paused.Load() || time.Since(time.Unix(0, s.resumed.Load())) < pauseAfter
}

// doubting reports whether gossip holds any host for dead.
func (s *agentServer) doubting(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range s.doubts {
		if now.Sub(d.last) < doubtLasts {
			return true
		}
	}
	return false
}

// endOrphans ends the ranks of a gorun that is gone, after they had some time to hear of it.
func (s *agentServer) endOrphans(words time.Duration) {
	s.orphaned = true
	if s.host.agent == nil {
		return
	}
	s.host.stopForks()
	grace := min(s.job.KillGrace, orphanGrace)
	next := time.After(words)
wait:
	for steps := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL, 0}; !s.forked || s.nEnded < s.nStarted; {
		select {
		case e := <-s.events:
			s.event(e)
		case <-next:
			sig := steps[0]
			steps = steps[1:]
			if sig == 0 { // they hang in the kernel, and the signal is pending; or we have waited for the CPU ourselves
				break wait
			}
			s.host.signal(sig, nil)
			next = time.After(grace)
			if sig == syscall.SIGKILL {
				next = time.After(reapBound)
			}
		}
	}
	s.host.reap()
}

// giveBack leaves the host as it was.
func (s *agentServer) giveBack() {
	if s.host != nil {
		s.host.reach.close()
	}
	s.unstage()
	if s.files.keeper != nil {
		s.files.keeper.Stop()
	}
	s.mux.Flush(farewell)
	if s.orphaned {
		s.mux.Close() // what ranks wrote has no reader
		if s.host != nil {
			s.host.over()
		}
	}
	s.giveUp()
	s.looks.Wait()
	s.closeReadFDs()
	for _, p := range s.stdin {
		p.close()
	}
	if s.host != nil {
		closed := make(chan struct{})
		go func() {
			s.host.close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(closeBound): // the node still calls hosts that do not answer; it ends with this process
		}
	}
	s.mux.Close() // gorun sees the end when all of it has ended
	if s.pumps != nil {
		s.pumps.stop()
	}
	s.threads.Wait()
}

// feed carries the stdin of the ranks that have one from their streams.
func (s *agentServer) feed() {
	for range s.job.Stdin {
		head, conn, err := s.mux.Accept()
		if err != nil {
			break
		}
		p := s.stdin[head.Rank]
		if head.Kind != agentwire.Stdin || p == nil {
			conn.Close()
			continue
		}
		s.threads.Go(func() {
			io.Copy(p, conn) // ends with either
			p.close()
			conn.Close()
		})
	}
}
