package launcher

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"golang.org/x/sys/unix"
)

// agentConfig is what the agent of one host needs to run that host's ranks.
type agentConfig struct {
	ranks    []agentRank
	host     int               // index in the plan, for events
	events   chan<- agentEvent // has room for all that can come: eventRoom
	output   rankOutput
	merge    bool // the ranks' stderr is their stdout
	keeper   *keeper.Keeper
	onFork   func(rank int) // nil, but in tests: called when a rank was started, before it is watched
	ownChild bool           // the process has no children but ours and spare: adopt and end what ranks leave behind
	spare    map[int]bool   // children that are not ours
	files    bool           // the keeper has files to remove, too: it is stopped behind reap
	job      keeper.Job
}

// rankOutput takes the read ends of the pipes that are ranks' stdout, or stderr, and closes them. One that it returns an error for stays the caller's.
type rankOutput interface {
	add(rank int, stderr bool, fd int) error
}

// agentRank is one process to start.
type agentRank struct {
	rank  int
	path  string
	argv  []string
	env   []string
	dir   string
	stdin int      // a descriptor of this process, duplicated into the rank
	cpus  []int    // that it may use; nil: all that this process may
	mpi   *mpiRank // nil: it finds no process manager
}

// agentEvent is what an agent reports.
type agentEvent struct {
	kind    eventKind
	host    int // index in the plan
	rank    int // of rankFailed, rankExited, rankAborted
	pid     int
	status  exitStatus
	sent    syscall.Signal // of rankExited: the last signal to end it that it had been sent, 0: none
	err     error          // of rankFailed, sinkFailed, agentFailed, hostLost
	hosts   []int          // of hostApart: those that it has not met
	at      time.Time
	started []startedRank // of forksDone: all ranks of the host
}

// startedRank is the process of a rank; pid 0: it was not started, nor will be.
type startedRank struct {
	rank, pid int
	at        time.Time
}

// eventRoom is how many events the agents of some hosts with some ranks can report.
func eventRoom(ranks, hosts int) int { return 2*ranks + 8*hosts }

type eventKind uint8

const (
	rankFailed eventKind = iota + 1 // could not be started; no further rank is
	rankExited
	rankAborted // a rank asks for the end of the job: status.MPI says why. Its process has not ended yet
	forksDone   // every rank was started, or none will be any more
	keeperDied  // pid is the keeper's
	sinkFailed  // stdout can't be written; of no host
	agentFailed // the agent can't watch its ranks any more
	hostLost    // the agent, or the way to it, is gone; all that it had not reported is lost
	hostMet     // the host's node has met those of all others
	hostApart   // it has not, in time
)

// agent starts the ranks of this host, in order, and watches them. Its methods don't block for long.
type agent struct {
	cfg      agentConfig
	poller   *poller
	threads  sync.WaitGroup
	oom      *oomWatch                                      // the watcher's
	letDie   chan struct{}                                  // closed: the forking thread may end
	forked   atomic.Bool                                    // no more ranks are started
	left     bool                                           // reap gave up; of the goroutine that calls it
	register func(ep, op, fd int, e *unix.EpollEvent) error // unix.EpollCtl; tests make it fail

	mu       sync.Mutex       // guards the rest
	pids     []int            // by index in cfg.ranks; 0: not started
	since    []time.Time      // when they were
	stopped  bool             // no more forks
	held     bool             // none while the ranks are stopped (SIGSTOP)
	goOn     sync.Cond        // of stopped and held
	sent     syscall.Signal   // the last signal that asks ranks to end; a rank whose fork was on its way gets it, too
	starting int              // index of the rank that is started and not watched yet, -1: none
	forker   int              // the thread that starts them
	gone     []time.Time      // of ranks that had ended before they were watched: when that was first seen, by index
	sentTo   []syscall.Signal // the last of those that each rank got, by index in cfg.ranks
	forking  int              // index of the rank that is being started, -1: none; it may run already
	late     []syscall.Signal // for that one, when it is known
}

func newAgent(cfg agentConfig) (*agent, error) {
	a := &agent{cfg: cfg, pids: make([]int, len(cfg.ranks)), since: make([]time.Time, len(cfg.ranks)), sentTo: make([]syscall.Signal, len(cfg.ranks)), gone: make([]time.Time, len(cfg.ranks)), starting: -1,
		oom: newOOMWatch(), letDie: make(chan struct{}), register: unix.EpollCtl, forking: -1}
	a.goOn.L = &a.mu
	var err error
	if a.poller, err = newPoller(); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	if cfg.keeper != nil {
		if err := a.poller.watch(cfg.keeper.Lost(), watchKeeper); err != nil {
			a.poller.close()
			return nil, fmt.Errorf("agent: %w", err)
		}
	}
	return a, nil
}

// watchKeeper is the data of the keeper's event. Beside it and rung there are the indices of ranks.
const watchKeeper = -2

// start begins to start the ranks.
func (a *agent) start() {
	a.threads.Add(2)
	go a.fork()
	go a.watch()
}

// fork starts all ranks from one thread, which then stays until close: a rank's parent-death signal is sent
// when the thread that forked it ends, not the process.
func (a *agent) fork() {
	defer a.threads.Done()
	runtime.LockOSThread() // never unlocked: the thread ends with this goroutine, after all ranks
	var untold []int       // ranks of which the keeper does not know yet
	told := time.Now()
	a.mu.Lock()
	a.forker = unix.Gettid()
	a.mu.Unlock()
	for i := range a.cfg.ranks {
		if now := time.Now(); now.Sub(told) > tellPeriod {
			told = now
			untold = a.tell(untold)
		}
		if !a.next(i) {
			break
		}
		if err := a.forkOne(i); err != nil {
			a.stopForks()
			a.mu.Lock()
			a.forking, a.late = -1, nil
			a.mu.Unlock()
			a.report(agentEvent{kind: rankFailed, rank: a.cfg.ranks[i].rank, err: err, at: time.Now()})
			break
		}
		untold = append(untold, i)
	}
	a.forked.Store(true)
	a.tell(untold)
	e := agentEvent{kind: forksDone, started: make([]startedRank, len(a.cfg.ranks))}
	for i := range e.started {
		s := &e.started[i]
		s.rank = a.cfg.ranks[i].rank
		s.pid, s.at = a.started(i)
	}
	a.report(e)
	<-a.letDie
}

// next begins with rank i, as soon as the ranks are not stopped; false: no more ranks are started.
func (a *agent) next(i int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for a.held && !a.stopped {
		a.goOn.Wait()
	}
	if !a.stopped {
		a.forking = i
	}
	return !a.stopped
}

// settled waits until no rank is being started, after SIGSTOP to all, for as long as the bound at most: the one that was has got the signal, too.
func (a *agent) settled(bound time.Duration) {
	for end := time.Now().Add(bound); time.Now().Before(end); time.Sleep(time.Millisecond) {
		a.mu.Lock()
		forking := a.forking
		a.mu.Unlock()
		if forking < 0 {
			return
		}
	}
}

func (a *agent) report(e agentEvent) {
	e.host = a.cfg.host
	a.cfg.events <- e
}

// tell gives the keeper the sessions of ranks. It is not done at each fork: that would wake the keeper each time, and
// until then it finds a rank by the job's id.
func (a *agent) tell(ranks []int) []int {
	if a.cfg.keeper != nil && len(ranks) > 0 {
		pids := make([]int, len(ranks))
		a.mu.Lock()
		for k, i := range ranks {
			pids[k] = a.pids[i]
		}
		a.mu.Unlock()
		_ = a.cfg.keeper.Sessions(pids) // if it is gone the watcher knows
	}
	return ranks[:0]
}

// tellPeriod bounds how long the keeper does not know of a rank that was started.
const tellPeriod = 5 * time.Millisecond

// started is the process of a rank and when it was started; 0 if it was not. After forksDone all are known.
func (a *agent) started(i int) (pid int, since time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pids[i], a.since[i]
}

// pidOf is the process of a rank while it may run, 0 if it was not started yet, or is reaped.
func (a *agent) pidOf(rank int) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.cfg.ranks {
		if a.cfg.ranks[i].rank == rank {
			return a.pids[i]
		}
	}
	return 0
}

// pipes are those for a rank's output. Where its stderr goes with its stdout, errW is outW and errR is -1.
type pipes struct{ outR, outW, errR, errW int }

func newPipes(merge bool) (p pipes, err error) {
	if p.outR, p.outW, err = pipe(); err != nil {
		return p, err
	}
	p.errR, p.errW = -1, p.outW
	if merge {
		return p, nil
	}
	if p.errR, p.errW, err = pipe(); err != nil {
		unix.Close(p.outR)
		unix.Close(p.outW)
	}
	return p, err
}

func (p *pipes) closeReads() {
	unix.Close(p.outR)
	if p.errR >= 0 {
		unix.Close(p.errR)
	}
}

// forkRank starts the process of rank i, and gives the write ends of its pipes away. A signal for it that comes meanwhile is kept.
func (a *agent) forkRank(i int, p *pipes) (pid, pidfd int, err error) {
	r := &a.cfg.ranks[i]
	given := false // errW, to its process manager
	defer func() {
		if p.outW != p.errW {
			unix.Close(p.outW)
		}
		if !given {
			unix.Close(p.errW)
		}
	}()
	files := []uintptr{uintptr(r.stdin), uintptr(p.outW), uintptr(p.errW)}
	if r.mpi != nil {
		more, err := r.mpi.files()
		if err != nil {
			return 0, -1, err
		}
		for _, f := range more {
			files = append(files, f.Fd())
			defer f.Close()
		}
	}
	a.mu.Lock()
	a.starting = i
	a.mu.Unlock()
	pid, err = syscall.ForkExec(r.path, r.argv, &syscall.ProcAttr{
		Dir:   r.dir,
		Env:   r.env,
		Files: files,
		Sys:   &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
	})
	if a.cfg.onFork != nil {
		a.cfg.onFork(r.rank)
	}
	if err == nil && r.mpi != nil {
		r.mpi.started(p.errW)
		given = true
	}
	if err == nil {
		// Nobody reaps it before, so the number is its. The fork could give the descriptor, too, but not in an emulator of user programs.
		if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
			syscall.Kill(pid, syscall.SIGKILL)
			syscall.Wait4(pid, nil, 0, nil)
			err = fmt.Errorf("no pidfd (Linux 5.4 or later is needed): %w", err)
		}
	}
	if err != nil {
		a.mu.Lock()
		a.starting = -1
		a.mu.Unlock()
		r.mpi.close()
	}
	return pid, pidfd, err
}

// enter takes note of a rank that was forked, which gets the signals that came meanwhile.
func (a *agent) enter(i, pid int, start time.Time) {
	a.mu.Lock()
	a.pids[i], a.since[i] = pid, start
	a.known(i)
	late := a.late
	if a.sent != 0 {
		late = append(late, a.sent)
		if a.startingLives() {
			a.sentTo[i] = a.sent
		}
	}
	for _, sig := range late {
		syscall.Kill(-pid, sig)
	}
	a.forking, a.late = -1, nil
	a.mu.Unlock()
}

// forkOne starts rank i and has it watched.
func (a *agent) forkOne(i int) error {
	r := &a.cfg.ranks[i]
	if r.cpus != nil {
		// Before exec, so that the program's runtime counts the CPUs that it has: a rank has the mask of the thread that forks it.
		unbind, err := bindThread(r.cpus)
		if err != nil {
			return fmt.Errorf("bind rank %d to %w", r.rank, err)
		}
		defer unbind()
	}
	p, err := newPipes(a.cfg.merge)
	if err != nil {
		return err
	}
	start := time.Now()
	pid, pidfd, err := a.forkRank(i, &p)
	if err != nil {
		p.closeReads()
		return err
	}
	a.enter(i, pid, start)
	if err := a.watchRank(i, pidfd, p.outR, p.errR); err != nil {
		r.mpi.close()
		// Nothing would tell of its end: it counts as not started, and ends here.
		a.mu.Lock()
		a.pids[i] = 0
		a.mu.Unlock()
		syscall.Kill(-pid, syscall.SIGKILL)
		for {
			if _, err := syscall.Wait4(pid, nil, 0, nil); err != syscall.EINTR {
				break
			}
		}
		unix.Close(pidfd)
		return fmt.Errorf("watch pid %d: %w", pid, err)
	}
	return nil
}

// watchRank gives the pipes of a rank to whoever carries its output and its pidfd to the watcher. The pidfd comes last: the rank's
// end is reported only if all of it succeeded. errR is -1 if there is none.
func (a *agent) watchRank(i, pidfd, outR, errR int) error {
	rank := a.cfg.ranks[i].rank
	if err := a.cfg.output.add(rank, false, outR); err != nil {
		unix.Close(outR)
		if errR >= 0 {
			unix.Close(errR)
		}
		return err
	}
	if errR >= 0 {
		if err := a.cfg.output.add(rank, true, errR); err != nil {
			unix.Close(errR)
			return err
		}
	}
	a.mu.Lock()
	a.startingLives() // what ends from here on has its place in the order of the set
	a.mu.Unlock()
	err := a.register(a.poller.ep, unix.EPOLL_CTL_ADD, pidfd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i), Pad: int32(pidfd)})
	a.mu.Lock()
	a.starting = -1
	a.mu.Unlock()
	return err
}

// watch waits for the ranks and the keeper.
func (a *agent) watch() {
	defer a.threads.Done()
	events := make([]unix.EpollEvent, 128)
	for {
		wait := int(earlyLook.Milliseconds())
		if a.forked.Load() {
			wait = -1
		}
		n, err := a.poller.wait(events, wait)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			a.report(agentEvent{kind: agentFailed, err: fmt.Errorf("wait for the ranks: epoll: %w", err)})
			return
		}
		if n == 0 {
			a.lookEarly()
		}
		for _, e := range events[:n] {
			switch e.Fd {
			case rung: // by close
				return
			case watchKeeper:
				a.poller.drop(a.cfg.keeper.Lost())
				a.report(agentEvent{kind: keeperDied, pid: a.cfg.keeper.PID(), at: time.Now()})
			default:
				i, pidfd := int(e.Fd), int(e.Pad)
				status, ended := peek(unix.P_PIDFD, pidfd)
				if !ended {
					continue
				}
				a.poller.drop(pidfd)
				unix.Close(pidfd)
				if m := a.cfg.ranks[i].mpi; m != nil {
					status.MPI = m.ended()
				}
				a.mu.Lock()
				if !status.ok() && a.starting != i {
					a.startingLives() // if it does not, it ended before this one: what is not watched yet can only be seen later
				}
				pid, sent, at := a.pids[i], a.sentTo[i], a.gone[i]
				if at.IsZero() {
					at = time.Now()
				}
				a.mu.Unlock()
				if status.code() == exitSignalBase+int(syscall.SIGKILL) && sent != syscall.SIGKILL {
					status.OOM = a.oom.killed()
				}
				a.report(agentEvent{kind: rankExited, rank: a.cfg.ranks[i].rank, pid: pid, status: status, sent: sent, at: at})
			}
		}
	}
}

// isZombie reports whether a child has ended that nobody has waited for.
func isZombie(pid int) bool {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			return err == nil && info.Signo != 0
		}
	}
}

// peek reads how a process ended and leaves it a zombie: so its process group's number stays ours, and what
// it left running in the group can be signalled safely, until close.
func peek(kind, id int) (exitStatus, bool) {
	// The kernel's siginfo_t for SIGCHLD on 64-bit Linux.
	var info struct {
		signo, errno, code, _ int32
		pid, uid, status, _   int32
		_                     [96]byte
	}
	for {
		err := unix.Waitid(kind, id, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			// Somebody else has waited for our child: its status is lost, but it has ended.
			return exitStatus{Code: ExitInternal}, true
		}
		break
	}
	const cldExited, cldKilled, cldDumped = 1, 2, 3
	switch {
	case info.pid == 0:
		return exitStatus{}, false
	case info.code == cldKilled, info.code == cldDumped:
		return exitStatus{Signal: syscall.Signal(info.status), Core: info.code == cldDumped}, true
	default:
		return exitStatus{Code: int(info.status)}, true
	}
}

// ended are the ranks whose processes have ended, reported or not.
func (a *agent) ended() (ranks []int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.startingLives() // its end is reported later, with the time of now
	for i, pid := range a.pids {
		if pid == 0 {
			continue
		}
		if _, ended := peek(unix.P_PID, pid); ended {
			ranks = append(ranks, a.cfg.ranks[i].rank)
		}
	}
	return ranks
}

// stopForks keeps ranks that have not been started from being started.
func (a *agent) stopForks() {
	a.mu.Lock()
	a.stopped = true
	a.goOn.Broadcast()
	a.mu.Unlock()
}

// signal sends a signal to the process group of every rank, also of those that have ended: a wrapper script
// may have left its program running. SIGABRT, once the job is ending, is for those who write where they are then. Only the ranks that pick picks get it; nil picks all. A stopped process is continued, so that it can see the
// signal.
func (a *agent) signal(sig syscall.Signal, pick func(rank int) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if pick == nil && (sig == syscall.SIGSTOP || sig == syscall.SIGCONT) {
		a.held = sig == syscall.SIGSTOP
		a.goOn.Broadcast()
	}
	toEnd := sig == syscall.SIGTERM || sig == syscall.SIGINT || sig == syscall.SIGKILL
	if toEnd {
		a.sent = sig
	}
	if sig == syscall.SIGABRT && a.stopped { // for some instead of SIGTERM
		toEnd, a.sent = true, syscall.SIGTERM
	}
	var traced []int
	for i, pid := range a.pids {
		if pick != nil && !pick(a.cfg.ranks[i].rank) {
			continue
		}
		if pid == 0 {
			switch {
			case i != a.forking:
			case !toEnd:
				a.late = append(a.late, sig)
			case a.startingLives(): // it gets the signal as soon as it is known
				a.sentTo[i] = sig
			}
			continue
		}
		if toEnd && !isZombie(pid) { // its end is still to be noted: the signal has no part in it
			a.sentTo[i] = sig
		}
		if sig == syscall.SIGABRT && toEnd {
			traced = append(traced, pid)
			continue
		}
		syscall.Kill(-pid, sig)
		if toEnd {
			syscall.Kill(-pid, syscall.SIGCONT)
		}
	}
	if len(traced) > 0 {
		abort(traced, keeper.Processes()) // read once: read for each, the last would have less time to write
	}
}

// adopted reaps processes that ranks left behind and that have ended since (we are their subreaper). It is
// called now and then, so that they don't fill the process table.
func (a *agent) adopted() {
	self := syscall.Getpid()
	for _, p := range keeper.Processes() {
		if p.Parent != self || p.State != 'Z' || a.cfg.spare[p.PID] || a.cfg.keeper != nil && p.PID == a.cfg.keeper.PID() {
			continue
		}
		a.mu.Lock()
		if a.forking < 0 && !slices.Contains(a.pids, p.PID) { // else it is a rank, or may be one
			syscall.Wait4(p.PID, nil, syscall.WNOHANG, nil)
		}
		a.mu.Unlock()
	}
}

// reap ends what is left of the job after all ranks have ended and returns how many processes it killed.
// It ends the keeper, too, if from here on nothing is left for it to do: behind all others, as this process may be killed meanwhile. What does not
// end is left to the keeper.
func (a *agent) reap() (killed int) {
	a.mu.Lock()
	for i, pid := range a.pids {
		if pid == 0 {
			continue
		}
		// The group goes first, while the zombie keeps its number.
		syscall.Kill(-pid, syscall.SIGKILL)
		syscall.Wait4(pid, nil, syscall.WNOHANG, nil) // not there yet: it can't be killed
		a.pids[i] = 0
	}
	a.mu.Unlock()
	if !a.cfg.ownChild {
		n := keeper.Sweep(a.cfg.job, nil, reapBound, false)
		a.left = n > 0
		a.stopKeeper()
		return n
	}
	if a.keeps() {
		spare := maps.Clone(a.cfg.spare)
		if spare == nil {
			spare = map[int]bool{}
		}
		spare[a.cfg.keeper.PID()] = true
		a.mu.Lock()
		a.cfg.spare = spare // from here on: it may have been left something when this is called again
		a.mu.Unlock()
	}
	killed, a.left = killChildren(a.cfg.spare, reapBound)
	if !a.cfg.files {
		a.stopKeeper()
	}
	return killed
}

// reapBound is how long a process that was left behind may take to die of SIGKILL.
const reapBound = time.Second

// killChildren ends all children of this process but those to spare, and those that they leave to it, its subreaper. It returns how many it killed,
// and whether some have not ended.
// It gives up when for as long as bound none has been found that was not killed before, and those wait for no CPU; who has waited for the CPU for so
// long itself still looks.
func killChildren(spare map[int]bool, bound time.Duration) (killed int, left bool) {
	dead := map[int]bool{}
	begin := time.Now()
	for last := begin; ; time.Sleep(time.Millisecond) {
		if len(spare) == 0 { // else it is not to be waited for any child
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			for err == syscall.EINTR || pid > 0 {
				pid, err = syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			}
			if err != nil {
				return len(dead), false // ECHILD
			}
		} else if keeper.OnlyChildren(spare) {
			return len(dead), false
		}
		self, starved := syscall.Getpid(), false
		left = false
		for _, p := range keeper.Processes() {
			if p.Parent != self || spare[p.PID] {
				continue
			}
			left = true
			switch {
			case p.State == 'Z':
				syscall.Wait4(p.PID, nil, syscall.WNOHANG, nil)
			case syscall.Kill(p.PID, syscall.SIGKILL) != nil: // it has ended, or is another user's
			case !dead[p.PID]:
				dead[p.PID] = true
				last = time.Now()
			default:
				starved = starved || p.State == 'R'
			}
		}
		if !left && len(spare) > 0 {
			return len(dead), false
		}
		if time.Since(last) > bound && !starved || time.Since(begin) > 10*bound+time.Second {
			return len(dead), true
		}
	}
}

// keeps reports whether there is a keeper.
func (a *agent) keeps() bool { return a.cfg.keeper != nil && a.cfg.keeper.PID() != 0 }

// stopKeeper ends the keeper, or leaves to it what is left.
func (a *agent) stopKeeper() {
	if !a.keeps() {
		return
	}
	a.poller.drop(a.cfg.keeper.Lost())
	if a.left || !a.forked.Load() { // a rank may still be started
		a.cfg.keeper.Leave()
	} else {
		a.cfg.keeper.Stop()
	}
}

// close ends the agent's threads. The ranks have been reaped.
func (a *agent) close() {
	close(a.letDie)
	a.poller.ring()
	a.threads.Wait()
	a.poller.close()
}
