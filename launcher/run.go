package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv"
)

const (
	// patience is when a person is told that gorun waits for ranks that were asked to end.
	patience = time.Second
	// unkillable is how long after SIGKILL a rank may take to end: then it hangs in the kernel, and is given up.
	unkillable = 10 * time.Second
	// lastWords is how long ranks that fail by the same cause as the first one get to say so and to end by themselves, before SIGTERM:
	// long enough for a program's defers on a busy machine, too short to be noticed; repeated for ranks that don't get a CPU (mostWords). It does not count
	// as kill grace.
	lastWords = 150 * time.Millisecond
	// lastRites is how long a rank that had left the job, or lost its connection, before the first failure was seen may take
	// to end by itself: what it ends with may be the cause. It is longer than a driver takes to let go of a GPU.
	lastRites = 2 * time.Second
	// lostWords is lastWords after a host was lost: its ranks' peers hear of it from gorun.
	lostWords = 500 * time.Millisecond
	// samePress is how near two SIGINTs are one wish: timeout(1), make and other wrappers send one to gorun and one to its
	// process group, to which gorun belongs.
	samePress = 100 * time.Millisecond
	// drainAfterSignal bounds how long output is still carried to a slow reader, once the job was interrupted or its
	// time was over.
	drainAfterSignal = 500 * time.Millisecond
	// lossSeen is more than the time until the loss of a host is seen: a rank that failed longer before did not fail because of it.
	lossSeen = silentAlone + 5*time.Second
	// hearing bounds the wait for the report of a rank that has ended already.
	hearing = time.Second
	// adoptEvery is how often processes that ranks left behind are reaped.
	adoptEvery = 5 * time.Second
)

// Options are the surroundings of a run. The zero value runs without input, output and signals.
type Options struct {
	Stdin    int // descriptor that the ranks of Plan.Stdin read, when HasStdin
	HasStdin bool
	Stdout   io.Writer        // nil: discard. An FD is written directly
	Stderr   io.Writer        // nil: discard. Also gorun's own messages
	Signals  <-chan os.Signal // signals that this process received; nil: none
	Verbose  bool

	// OwnProcess says that this process does nothing but run the job: it has no other children. Then it adopts what
	// ranks leave behind (as a child subreaper) and ends it, whatever its environment says.
	OwnProcess bool

	start  func(context.Context, node.Config) (control, error) // nil: startNode
	way    way.Way                                             // nil: as the plan says
	onFork func(rank int)                                      // as of agentConfig
	bind   netip.Addr                                          // where the nodes of all hosts listen; zero: where the others reach them
}

// runner is a job that runs.
type runner struct {
	plan     *Plan
	o        Options
	acct     *Account
	hosts    []hostAgent // by index in the plan; host 0 holds the job's state
	events   chan agentEvent
	again    bool           // not the first attempt: the files of Plan.OutputDir go on with what is in them
	series   *series        // of the attempts that this one belongs to
	suspends chan os.Signal // SIGTSTP; nil where this process is not ours alone
	resumes  chan os.Signal // SIGCONT; nil likewise
	output   *outputs
	stdin    *stdin
	release  []func()    // what to give back at the end, in reverse order
	bringing []bool      // hosts that still start ranks
	lost     []bool      // hosts
	nMet     int         // hosts that have met all others
	met      atomic.Bool // that is all of them
	retries  retries
	speaking speaking
	dialing  *runBound   // of the connections; nil: none are made
	nodes    []nodePlace // where the nodes of the hosts are, where there are several

	places []*HostPlace // what hosts give their ranks; nil: not known

	started    bool // hosts were told to start their ranks
	ending     bool
	endAt      time.Time        // since when
	sequence   []syscall.Signal // what is still to be sent to the ranks
	next       <-chan time.Time // when
	remind     <-chan time.Time
	interrupt  syscall.Signal
	cannotRun  int
	forking    int // hosts that still start ranks
	nStarted   int // ranks; known when forking is 0
	nEnded     int
	lastSig    syscall.Signal
	starving   func() bool      // whether ranks have waited for a CPU since it was asked last; nil: there are enough
	traces     map[int]bool     // ranks that get SIGABRT for SIGTERM
	lateTraces map[int]bool     // ranks that get SIGABRT before SIGKILL
	asked      bool             // a signal to end the job came
	over       bool             // the job ends for a reason that a restart does not mend, whatever failed before
	pressed    time.Time        // when SIGINT came first
	failed     int              // the rank whose failure was seen first; -1: none
	suspects   map[int]bool     // ranks that are left alone for lastRites: they may be the cause of a failure
	spared     <-chan time.Time // when that is over
	looking    *looking         // a look at what the ranks do; nil: none is on its way
	found      <-chan *looked   // what came of it
}

// internal sets the reason for an error of our own, or of the program's start.
func (r *runner) internal(err error) {
	r.acct.Reason, r.acct.Error = ReasonInternal, limitHint(err).Error()
	if err == errInterrupted {
		r.acct.Reason = ReasonSignal
	}
	if s, ok := errors.AsType[*StartError](err); ok {
		r.acct.Reason, r.cannotRun = ReasonCannotRun, s.Code
	}
	if _, ok := errors.AsType[*UsageError](err); ok {
		r.acct.Reason, r.cannotRun = ReasonCannotRun, ExitUsage
	}
	if _, ok := errors.AsType[*notStarted](err); ok {
		r.acct.Reason = ReasonNotStarted
	}
}

// build builds a program, if it is a Go package that was not built. A signal ends it.
func (r *runner) build(ctx context.Context, p *Program) error {
	if p.GoDir == "" || p.Path != "" {
		return nil
	}
	start := time.Now()
	err := r.interruptible(ctx, func(ctx context.Context) error { return p.Build(ctx, r.o.Stderr) })
	if scratch := p.scratch; scratch != "" {
		r.series.release = append(r.series.release, func() { os.RemoveAll(scratch) })
	}
	if err == nil {
		r.verbose("built %s in %v", p.GoDir, time.Since(start).Round(time.Millisecond))
	}
	return err
}

var errInterrupted = errors.New("interrupted before the ranks were started")

// later remembers what to give back.
func (r *runner) later(f func()) { r.release = append(r.release, f) }

func (r *runner) giveBack() {
	for i := len(r.release) - 1; i >= 0; i-- {
		r.release[i]()
	}
	r.release = nil
}

// prepare sets up all that the ranks need, and the agent. What it set up is given back by giveBack, also after
// an error.
func (r *runner) prepare(ctx context.Context) error {
	p := r.plan
	alone := len(p.Hosts) == 1 && p.Hosts[0].Local
	local := slices.ContainsFunc(p.Hosts, func(h PlanHost) bool { return h.Local })
	checked := make([]bool, len(p.Apps))
	for _, pr := range p.Ranks {
		if p.Hosts[pr.Host].Local && !checked[pr.App] {
			checked[pr.App] = true
			if err := checkDir(p.dirOf(pr.App)); err != nil {
				return err
			}
		}
	}
	for i := range p.Programs {
		if err := r.build(ctx, &p.Programs[i]); err != nil {
			return err
		}
	}
	r.acct.Job = newID()

	if r.o.OwnProcess && local {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("become child subreaper: %w", err)
		}
	}
	r.events = make(chan agentEvent, eventRoom(len(p.Ranks), len(p.Hosts)))
	if err := r.prepareStdio(); err != nil {
		return err
	}
	var m meeting
	var err error
	if alone {
		m, err = r.prepareLocal(ctx, 0, nil, netip.AddrPort{})
		m.addr = loopback.String()
	} else {
		m, err = r.connect(ctx)
	}
	if err != nil {
		return err
	}
	r.sayPlaces()
	if m.mpi, err = r.chooseMPI(); err != nil {
		return err
	}
	for i, h := range r.hosts {
		if len(r.nodes) > 1 {
			m.iface = r.nodes[i].at.Interface
		}
		if err := h.meet(m); err != nil {
			return err
		}
		r.bringing[i] = true
	}
	r.forking = len(r.hosts)
	return nil
}

// prepareStdio sets up what carries the ranks' input and output.
func (r *runner) prepareStdio() error {
	p := r.plan
	cfg := outputConfig{stdout: r.o.Stdout, stderr: r.o.Stderr, tags: p.TagOutput, stamps: p.Timestamp, merged: p.Merge, filesOnly: p.FilesOnly, midLine: r.series.midLine}
	if p.OutputDir != "" {
		if err := r.takeOutputDir(); err != nil {
			return err
		}
		files, err := openOutputFiles(p.OutputDir, len(p.Ranks), p.Merge, r.again)
		if err != nil {
			return err
		}
		cfg.files = files
		r.later(func() {
			if err := files.close(); err != nil && r.acct.Reason == ReasonDone {
				r.internal(err)
			}
		})
	}
	output, err := newOutputs(cfg, len(p.Ranks), func(err error) { r.events <- agentEvent{kind: sinkFailed, err: err} })
	if err != nil {
		return err
	}
	r.output = output
	var readers []int
	if r.o.HasStdin {
		readers = p.stdinRanks()
	}
	if r.stdin, err = newStdin(r.o.Stdin, readers, func(rank int) bool { return p.Hosts[p.Ranks[rank].Host].Local }); err != nil {
		return fmt.Errorf("stdin: %w", err)
	}
	r.later(r.stdin.stop)
	r.later(func() {
		if !r.acct.Cut {
			<-output.finish()
		}
	})
	return nil
}

// prepareLocal prepares this host, which has an index in the plan. Its meeting has no address.
func (r *runner) prepareLocal(ctx context.Context, index int, key []byte, bind netip.AddrPort) (meeting, error) {
	p := r.plan
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return meeting{}, fmt.Errorf("open /dev/null: %w", err)
	}
	r.later(func() { unix.Close(null) })
	var ranks []agentRank
	for i := range p.Ranks {
		pr := &p.Ranks[i]
		if pr.Host != index {
			continue
		}
		ar := agentRank{rank: pr.Rank, path: p.program(pr).Path, argv: pr.Argv, dir: p.dirOf(pr.App), stdin: r.stdin.local(pr.Rank, null), cpus: pr.cpus}
		r.acct.Ranks[i].Place = pr.Place
		ranks = append(ranks, ar)
	}
	h, err := newLocalHost(ctx, hostConfig{
		agentConfig: agentConfig{ranks: ranks, events: r.events, output: r.output, merge: p.Merge, onFork: r.o.onFork, ownChild: r.o.OwnProcess},
		nodes:       node.Config{Job: r.acct.Job, Node: index, NodeOf: p.nodeOf(), Host: p.Hosts[index].Name, Key: key, Bind: bind, Ports: [2]int{p.Remote.PortFrom, p.Remote.PortTo}, Confirm: r.confirm},
		start:       r.o.start,
		// The first rank is on host 0, as hosts are numbered by their first ranks.
		masterPort: index == p.Ranks[0].Host,
		environ: func(rank int, control string, m meeting) []string {
			return onInterface(p.environ(&p.Ranks[rank], launchVars(r.acct.Job, control, m.addr, m.port)), m.iface)
		},
		ways:      len(p.Hosts) > 1,
		unreached: func(host int) { r.unreached(index, host) },
	})
	if err != nil {
		return meeting{}, err
	}
	r.hosts[index], r.places[index] = h, p.Hosts[index].Place
	return meeting{port: h.masterPort}, nil
}

// nodeOf is the host of each rank.
func (p *Plan) nodeOf() []int {
	nodeOf := make([]int, len(p.Ranks))
	for i, pr := range p.Ranks {
		nodeOf[i] = pr.Host
	}
	return nodeOf
}

func (r *runner) verbose(format string, args ...any) {
	if r.o.Verbose {
		r.say(format, args...)
	}
}

// say shows a line of gorun's own.
func (r *runner) say(format string, args ...any) {
	line := "gorun: " + fmt.Sprintf(format, args...) + "\n"
	if r.output != nil {
		r.output.notice(line)
	} else {
		io.WriteString(r.o.Stderr, line)
	}
}

// run is the life of the job from the first fork until the last rank has ended.
func (r *runner) run(ctx context.Context) {
	var timeout, warn, adopt <-chan time.Time
	if r.plan.Timeout > 0 {
		if r.series.deadline.IsZero() {
			r.series.deadline = time.Now().Add(r.plan.Timeout)
		}
		t := time.NewTimer(time.Until(r.series.deadline))
		defer t.Stop()
		timeout = t.C
		// A restart that comes too late for the warning does without: ranks that just start do not expect it.
		if w := time.Until(r.series.deadline) - r.plan.TimeoutSignal.Before; r.plan.TimeoutSignal.Signal != 0 && w > 0 {
			t := time.NewTimer(w)
			defer t.Stop()
			warn = t.C
		}
	}
	if r.o.OwnProcess {
		t := time.NewTicker(adoptEvery)
		defer t.Stop()
		adopt = t.C
	}
	done := ctx.Done()
	r.acct.Prepared = time.Since(r.acct.Start)
	for _, h := range r.hosts {
		h.start()
	}
	r.stdin.start(func(rank int) *agentwire.Mux { return r.hosts[r.plan.Ranks[rank].Host].(*remoteHost).mux },
		func(rank int) *agent { return r.hosts[r.plan.Ranks[rank].Host].(*localHost).agent })
	r.started = true
	for r.forking > 0 || r.nEnded < r.nStarted {
		select {
		case e := <-r.events:
			r.event(e)
		case s := <-r.o.Signals:
			if sig, ok := s.(syscall.Signal); ok {
				r.signal(sig)
			}
		case <-r.suspends:
			r.suspend()
		case <-r.resumes:
			r.toRanks(syscall.SIGCONT, nil)
		case <-done:
			done = nil
			r.signal(syscall.SIGTERM)
		case <-warn:
			if !r.ending {
				r.say("timeout in %v: %s to the ranks", r.plan.TimeoutSignal.Before, signalName(r.plan.TimeoutSignal.Signal))
				r.toRanks(r.plan.TimeoutSignal.Signal, nil)
			}
		case <-timeout:
			r.endFor(ReasonTimeout, fmt.Sprintf("the job has run for %v", r.plan.Timeout), syscall.SIGTERM, syscall.SIGKILL)
		case <-r.next:
			if r.lastSig == 0 { // lastWords are over
				if r.starved() {
					r.next = time.After(lastWords)
					continue
				}
				r.suspect()
			}
			r.escalate()
		case <-r.spared:
			suspects := r.suspects
			r.suspects, r.spared = nil, nil
			r.toRanks(r.lastSig, func(rank int) bool { return suspects[rank] })
		case all := <-r.found:
			r.tellLook(all)
		case <-r.remind:
			r.remind = nil
			r.say("%s; waiting up to %v (--kill-grace) for %s to end", r.progress(), r.plan.KillGrace, r.living())
		case <-adopt:
			for _, h := range r.hosts {
				h.adopted()
			}
		}
	}
	r.dropLook()
}

// progress says why the job is being ended.
func (r *runner) progress() string {
	if r.acct.Later != "" {
		return r.acct.Later
	}
	switch r.acct.Reason {
	case ReasonFailed:
		r.acct.suspicions = r.hosts[0].state().suspicions
		a := r.acct.origin(&r.acct.Ranks[r.failed])
		return fmt.Sprintf("rank %d %v", a.Rank, a.status)
	case ReasonSignal:
		return "interrupted by " + signalName(r.interrupt)
	case ReasonTimeout:
		return r.acct.Error
	case ReasonHostLost:
		return r.acct.Error
	}
	return "the job ends"
}

// living names the ranks that have not ended.
func (r *runner) living() string {
	var ranks []int
	for i := range r.acct.Ranks {
		if a := &r.acct.Ranks[i]; a.PID != 0 && !a.done && !a.Lost {
			ranks = append(ranks, a.Rank)
		}
	}
	if len(ranks) == 0 {
		return "ranks that are being started"
	}
	return rankenv.RankText(ranks)
}

func (r *runner) event(e agentEvent) {
	switch e.kind {
	case rankFailed:
		if !r.ending {
			err := e.err
			if h := r.plan.Hosts[e.host]; h.Local {
				err = execError(*r.plan.program(&r.plan.Ranks[e.rank]), e.rank, err)
			} else {
				err = &hostError{h.Name, err}
			}
			r.internal(err)
			r.end(r.acct.Reason, syscall.SIGKILL)
		}
	case forksDone:
		for _, s := range e.started {
			a := &r.acct.Ranks[s.rank]
			if a.PID, a.Start = s.pid, s.at; a.PID != 0 {
				r.nStarted++
			}
		}
		r.hosts[e.host].note(e)
		r.brought(e.host)
	case rankExited:
		r.exited(e)
	case rankAborted:
		r.aborted(e)
	case keeperDied:
		text := fmt.Sprintf("the keeper (pid %d) died: the job was ended, for nothing would have ended it if gorun were killed", e.pid)
		if len(r.hosts) > 1 {
			text = fmt.Sprintf("host %s: %s", r.plan.Hosts[e.host].Name, text)
		}
		r.endFor(ReasonInternal, text, syscall.SIGTERM, syscall.SIGKILL)
	case agentFailed:
		r.endFor(ReasonInternal, e.err.Error(), syscall.SIGKILL)
	case hostLost:
		r.loseHost(e)
	case hostMet:
		r.acct.Hosts[e.host].Met = time.Since(r.acct.Start)
		if r.nMet++; r.nMet == len(r.hosts) {
			r.met.Store(true)
			r.acct.Met = time.Since(r.acct.Start)
			r.verbose("all hosts are members after %v", r.acct.Met.Round(time.Millisecond))
		}
	case hostApart:
		r.endFor(ReasonNotStarted, r.apart(e.host, e.hosts), syscall.SIGTERM, syscall.SIGKILL)
	case sinkFailed:
		r.over = true
		if errors.Is(e.err, unix.EPIPE) {
			r.endFor(ReasonReader, "nobody reads stdout any more", syscall.SIGTERM, syscall.SIGKILL)
		} else {
			if r.ending { // for something else, and output is lost all the same
				r.say("%v", e.err)
			}
			r.endFor(ReasonInternal, e.err.Error(), syscall.SIGTERM, syscall.SIGKILL)
		}
	}
}

// brought takes note that a host starts no more ranks.
func (r *runner) brought(host int) {
	if !r.bringing[host] {
		return
	}
	r.bringing[host] = false
	r.verbosePlaces(host)
	if r.forking--; r.forking == 0 {
		r.stdin.started()
		r.acct.Started = time.Since(r.acct.Start)
	}
}

// loseHost gives a host up, and its ranks.
func (r *runner) loseHost(e agentEvent) {
	if r.lost[e.host] {
		return
	}
	r.lost[e.host] = true
	r.acct.Hosts[e.host].Error = e.err.Error()
	name := r.plan.Hosts[e.host].Name
	for i, h := range r.hosts {
		if !r.lost[i] {
			h.lose(e.host, name, e.err.Error())
		}
	}
	for i := range r.acct.Ranks {
		if a := &r.acct.Ranks[i]; r.plan.Ranks[i].Host == e.host && !a.done {
			a.Lost = true
			if a.PID != 0 {
				r.nEnded++
			}
		}
	}
	r.brought(e.host)
	why := fmt.Sprintf("host %s is lost: %v", name, e.err)
	// What failed shortly before may be what followed from it.
	if r.acct.Reason == ReasonFailed && time.Since(r.acct.Ranks[r.failed].End) < lossSeen {
		r.acct.Reason, r.acct.Error = ReasonHostLost, why
	}
	r.endFor(ReasonHostLost, why, syscall.SIGTERM, syscall.SIGKILL)
}

// toRanks sends a signal to the ranks that pick picks, of all hosts.
func (r *runner) toRanks(sig syscall.Signal, pick func(rank int) bool) {
	for _, h := range r.hosts {
		h.signal(sig, pick)
	}
}

func (r *runner) exited(e agentEvent) {
	a := &r.acct.Ranks[e.rank]
	r.nEnded++
	a.PID, a.order, a.done, a.End, a.status = e.pid, r.nEnded, true, e.at, e.status
	a.Code, a.Core, a.OOM = e.status.code(), e.status.Core, e.status.OOM
	if e.status.Signal != 0 {
		a.Signal = signalName(e.status.Signal)
	}
	if e.sent != 0 {
		a.Stopped = signalName(e.sent)
	}
	r.hosts[e.host].note(e)
	if e.status.ok() {
		return
	}
	if r.ending {
		r.failedBefore(e)
		return
	}
	first := r.failed < 0
	if first {
		r.failed, r.acct.Reason = e.rank, ReasonFailed
	}
	switch {
	case r.plan.OnFail != OnFailWait:
		r.end(ReasonFailed, syscall.SIGTERM, syscall.SIGKILL)
	case first && r.nEnded < len(r.acct.Ranks):
		r.say("rank %d %v; the others go on (--on-fail wait)", e.rank, e.status)
	}
}

// failedBefore takes note of a failure that is older than what ends the job, though it was seen later: the rank had ended before, and had not
// been sent a signal.
func (r *runner) failedBefore(e agentEvent) {
	if r.acct.Reason != ReasonSignal && r.acct.Reason != ReasonTimeout || e.sent != 0 || !e.at.Before(r.endAt) {
		return
	}
	r.failed, r.acct.Later, r.acct.Error = e.rank, r.progress(), ""
	r.acct.Reason = ReasonFailed
}

// suspect spares the ranks that the job lost before it lost the one that has failed, and those that others blame for their failure, and
// those that have written why they fail, as far as they have not ended yet: what we see may be what followed from the end of one of them.
func (r *runner) suspect() {
	if r.failed < 0 || r.plan.OnFail == OnFailWait {
		return
	}
	var maybe []int
	state := r.hosts[0].state()
	for _, rank := range state.ended {
		if rank == r.failed {
			break
		}
		maybe = append(maybe, rank)
	}
	for _, s := range state.suspicions {
		maybe = append(maybe, s.Rank)
	}
	maybe = append(maybe, r.raisers()...)
	for _, rank := range maybe {
		if a := &r.acct.Ranks[rank]; a.PID != 0 && !a.done && !a.Lost {
			if r.suspects == nil {
				r.suspects = map[int]bool{}
			}
			r.suspects[rank] = true
		}
	}
	if r.suspects != nil {
		r.spared = time.After(min(lastRites, r.plan.KillGrace/2)) // the rest is for SIGTERM
	}
}

// endFor is end for a cause that text tells.
func (r *runner) endFor(why Reason, text string, signals ...syscall.Signal) {
	if why == ReasonTimeout { // the others are events themselves: what came before them has been heard
		r.hear()
	}
	switch {
	case r.ending:
		return
	case r.acct.Reason == ReasonFailed: // a rank had failed, and the others were to go on: that stays the cause
		r.acct.Later = text
	case why != ReasonSignal && why != ReasonReader:
		r.acct.Error = text
	}
	r.over = r.over || why != ReasonHostLost
	r.end(why, signals...)
}

// end begins to end the job: the signals go to all ranks, each a kill grace after the one before.
func (r *runner) end(why Reason, signals ...syscall.Signal) {
	if r.ending {
		return
	}
	r.ending, r.endAt = true, time.Now()
	if r.acct.Reason == ReasonDone {
		r.acct.Reason = why
	}
	for _, h := range r.hosts {
		h.stopForks()
	}
	if r.plan.KillGrace == 0 {
		signals = signals[len(signals)-1:] // they would come all at once
	}
	r.sequence = signals
	switch {
	case why == ReasonFailed && r.failed >= 0 && r.acct.Ranks[r.failed].status.onlyUnfinished():
		// Programs leave out MPI_Finalize: if all do, they may end.
		r.next = time.After(lastRites)
	case why == ReasonFailed && r.plan.KillGrace > 0:
		r.hosts[0].refresh()
		for _, h := range r.hosts {
			if r.starving = h.starving(); r.starving != nil {
				break // only one is this host
			}
		}
		r.next = time.After(lastWords)
	case why == ReasonHostLost && r.plan.KillGrace > 0:
		r.next = time.After(lostWords)
	case why == ReasonTimeout:
		r.look(func() {
			if r.lastSig == 0 { // no signal to gorun was faster
				r.traces, r.lateTraces = tracers(r.acct.Hang.Ranks)
				if r.sequence[0] == syscall.SIGKILL { // no SIGTERM comes, in whose place the others would be asked
					maps.Copy(r.lateTraces, r.traces)
				}
				r.escalate()
				r.remindLater()
			}
		})
		return
	default:
		r.escalate()
	}
	r.remindLater()
}

// remindLater has a person told that gorun waits for ranks, if that takes long.
func (r *runner) remindLater() {
	if r.plan.KillGrace > patience && r.lastSig != syscall.SIGKILL {
		r.remind = time.After(patience)
	}
}

// escalate sends the next signal of the sequence.
func (r *runner) escalate() {
	r.next = nil
	if len(r.sequence) == 0 {
		// SIGKILL was not enough.
		r.say("%s did not end after SIGKILL: hangs in the kernel, given up", r.living())
		r.forking, r.nStarted = 0, 0
		return
	}
	if late := r.lateTraces; len(late) > 0 && r.sequence[0] == syscall.SIGKILL {
		r.lateTraces = nil
		r.toRanks(syscall.SIGABRT, func(rank int) bool { return late[rank] })
		r.next = time.After(tracebackTime)
		return
	}
	r.lastSig = r.sequence[0]
	r.sequence = r.sequence[1:]
	if r.lastSig == syscall.SIGKILL {
		r.suspects, r.spared = nil, nil
	}
	var pick func(rank int) bool
	if len(r.suspects) > 0 {
		pick = func(rank int) bool { return !r.suspects[rank] }
	}
	if r.lastSig == syscall.SIGTERM {
		r.askToEnd(pick)
	} else {
		r.toRanks(r.lastSig, pick)
	}
	switch {
	case len(r.sequence) == 0 && r.lastSig == syscall.SIGKILL:
		r.next = time.After(unkillable)
	default:
		r.next = time.After(r.plan.KillGrace)
	}
}

// signal is what gorun does on a signal to itself.
func (r *runner) signal(sig syscall.Signal) {
	switch sig {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP:
		r.asked = true
		r.hear()
		if !r.ending {
			r.interrupt = sig
			signals := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}
			if sig == syscall.SIGINT {
				r.pressed = time.Now()
				signals = append([]syscall.Signal{sig}, signals...)
			}
			r.endFor(ReasonSignal, "interrupted by "+signalName(sig), signals...)
			return
		}
		if r.lastSig == 0 { // a rank has failed, and the wait for lastWords is over now; or the ranks are looked at
			r.pressed = time.Now()
			r.escalate()
			return
		}
		if sig == syscall.SIGINT && r.lastSig != syscall.SIGKILL && time.Since(r.pressed) > samePress {
			r.sequence = []syscall.Signal{syscall.SIGKILL}
			r.escalate()
		}
	case syscall.SIGQUIT:
		r.look(func() { r.toRanks(sig, nil) })
	case syscall.SIGIO:
		r.look(func() {})
	default:
		if isForwarded(sig) {
			r.toRanks(sig, nil)
		}
	}
}

// hear takes the reports of the ranks of this host that have ended already: a signal that was sent because of a rank's end, or merely
// later, may come here before that end does, and so may the timeout. What ends later may follow from what is done now.
func (r *runner) hear() {
	late := time.After(hearing)
	for _, h := range r.hosts {
		h, ok := h.(*localHost)
		if !ok || r.ending {
			continue
		}
		for _, rank := range h.agent.ended() {
			for !r.acct.Ranks[rank].done {
				select {
				case e := <-r.events:
					r.event(e)
				case <-late:
					return
				}
			}
		}
	}
}

// wind ends what ranks left behind, lets the output run dry and gives everything back.
func (r *runner) wind() {
	a := r.acct
	a.Ended = time.Since(a.Start)
	killed := make([]int, len(r.hosts))
	r.eachHost(func(i int, h hostAgent) { killed[i] = h.reap() })
	r.sayRemoved()
	r.tellSilent()
	for i, h := range r.hosts {
		a.LeftOver += killed[i]
		for k := range a.Ranks {
			if r.plan.Ranks[k].Host == i && a.Ranks[k].PID != 0 {
				a.Ranks[k].Joined, a.Ranks[k].Left = h.joined(a.Ranks[k].Rank)
			}
		}
	}
	state := r.hosts[0].state()
	for k, rank := range state.ended {
		a.Ranks[rank].heard = k + 1
	}
	a.suspicions = state.suspicions
	if a.LeftOver > 0 {
		r.verbose("killed %d processes that ranks had left behind", a.LeftOver)
	}
	r.verbose("%s started in %v, all ended after %v", count(len(a.Ranks), "rank"), (a.Started - a.Prepared).Round(time.Microsecond), (a.Ended - a.Prepared).Round(time.Microsecond))
	if r.drain() {
		for i := range a.Ranks {
			a.Ranks[i].tail, a.Ranks[i].shown = r.output.tail(i)
		}
		a.midLine = r.output.err.midLine()
		r.series.midLine = r.output.out != r.output.err && r.output.out.midLine() // else Summary ends the line
	} else {
		a.Cut = true
	}
	for _, h := range r.hosts {
		h.over()
	}
	r.closeHosts()
	r.giveBack()
}

// eachHost does something with all hosts at once.
func (r *runner) eachHost(f func(i int, h hostAgent)) {
	if len(r.hosts) == 1 {
		f(0, r.hosts[0])
		return
	}
	var wait sync.WaitGroup
	for i, h := range r.hosts {
		wait.Go(func() { f(i, h) })
	}
	wait.Wait()
}

func (r *runner) closeHosts() {
	r.eachHost(func(_ int, h hostAgent) {
		if h != nil {
			h.close()
		}
	})
}

// drain waits for the output of all hosts, and the collectors. A slow reader is waited for as long as it takes, unless the user has
// interrupted the job or does so now: then it has drainAfterSignal, for the signal may be one that a rank sent before it ended. If that is not enough drain
// returns false, and a collector may still hang in its last write.
func (r *runner) drain() bool {
	done := make(chan struct{})
	go func() {
		for _, h := range r.hosts {
			<-h.drained()
		}
		<-r.output.finish()
		close(done)
	}()
	var giveUp <-chan time.Time
	if r.acct.Reason == ReasonSignal || r.acct.Reason == ReasonTimeout {
		giveUp = time.After(drainAfterSignal)
	}
	for {
		select {
		case <-done:
			for len(r.events) > 0 { // the last text may have had no place
				r.event(<-r.events)
			}
			return true
		case <-giveUp:
			return false
		case <-r.suspends:
			r.suspend()
		case e := <-r.events:
			r.event(e)
		case s := <-r.o.Signals:
			if EndsJob(s) {
				r.asked = true
				if !r.ending && r.failed < 0 {
					r.ending, r.interrupt, r.acct.Reason = true, s.(syscall.Signal), ReasonSignal
				}
				if giveUp == nil {
					giveUp = time.After(drainAfterSignal)
				}
			}
		}
	}
}
