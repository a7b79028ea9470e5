package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/push"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

// The heartbeat. Each side of a session says something every beat; any byte counts. A host is lost when it has been silent for
// silentAgreed and the gossip of others holds it for dead, too, or does not know it yet; or for silentAlone whatever gossip says. An
// agent ends its ranks by the same rule, and after silentAgent if no gossip tells it more: gorun itself may be stopped for a while.
const (
	beat         = time.Second
	silentAgreed = 8 * time.Second
	silentAlone  = 20 * time.Second
	silentAgent  = 45 * time.Second
	// doubtLasts is how long a doubt of gossip counts; it is said again as long as it lasts.
	doubtLasts = 2500 * time.Millisecond
	// doubtAlone is how long gossip may hold a host for dead that still answers us: then its way to the others is cut.
	doubtAlone = 15 * time.Second
	// paused is a gap between two beats that says that this process was stopped: what it did not hear meanwhile says nothing.
	paused = 3 * time.Second
)

const (
	// pauseWait bounds the wait until an agent is told that gorun stops.
	pauseWait = 500 * time.Millisecond
	// farewell bounds the end of an agent that was told to end.
	farewell = 3 * time.Second
	// reapSilence bounds the silence of an agent that ends what is left of the ranks: that takes reapBound at most, but the job's own directory may
	// hold a million files. reapMost bounds all of it.
	reapSilence = 10 * time.Second
	reapMost    = 5 * time.Minute
)

// remoteHost is a hostAgent at the other end of a session.
type remoteHost struct {
	index     int
	name      string
	size      int // of the job
	ranks     []int
	events    chan<- agentEvent
	output    *outputs
	session   *push.Started
	mux       *agentwire.Mux
	calm      func() // ends the heartbeat of a host that is prepared while others are not; may be called again
	prepared  *agentwire.Prepared
	staged    int64                            // bytes of files that were sent to it
	opened    time.Time                        // its agent spoke
	ready     time.Time                        // it had prepared
	alone     bool                             // the job has no other host
	met       func() bool                      // all hosts have met: gossip knows of each
	answer    atomic.Pointer[func(addrAnswer)] // takes what it says of addresses; nil: nobody asks
	reading   sync.Once
	doubt     func(host int)
	unreached func(by, host int)
	log       func(line string) // for --verbose
	stdin     *stdin

	where     meeting
	began     time.Time // Start was sent; zero before
	doubted   atomic.Int64
	paused    atomic.Bool   // this process is about to stop
	gone      chan struct{} // closed when nothing comes any more
	wasReaped chan struct{} // closed when the answer to Reap came
	carried   chan struct{} // closed when all output has come
	threads   sync.WaitGroup

	mu      sync.Mutex    // guards the rest
	lag     time.Duration // estimate of what Start took to get there
	lagged  bool          // there is one
	last    jobState
	left    map[int]bool // ranks that joined: whether they said goodbye
	running map[int]bool // ranks whose end was not reported
	forked  bool
	killed  int
	made    []string // names of files that ranks made in the job's own directory, some of nMade
	nMade   int
	reports int                    // events
	looks   uint64                 // questions what the ranks do
	looked  chan *agentwire.Looked // has room for the answer to the last of them; nil: nobody waits for it
	ending  bool                   // its end is no loss
	pipes   []*os.File             // to the collectors
}

func (h *remoteHost) meet(m meeting) error {
	h.where = m
	return nil
}

func (h *remoteHost) start() {
	h.mu.Lock()
	h.running = map[int]bool{}
	for _, r := range h.ranks {
		h.running[r] = true
	}
	h.began = time.Now()
	h.mu.Unlock()
	h.mux.Send(&agentwire.Message{Start: &agentwire.Start{Seeds: h.where.seeds, MasterAddr: h.where.addr, MasterPort: h.where.port, Interface: h.where.iface, MPI: h.where.mpi}})
	h.listen()
	h.threads.Go(h.watch)
	h.threads.Go(h.carry)
}

// listen begins to read what the agent says.
func (h *remoteHost) listen() { h.reading.Do(func() { h.threads.Go(h.read) }) }

// read takes what the agent reports.
func (h *remoteHost) read() {
	for {
		m, err := h.mux.Receive()
		if err == nil {
			err = h.handle(m)
		}
		if err != nil {
			h.end(err)
			return
		}
	}
}

// handle takes a message of the agent, which may say anything: an error ends the session. What it calls has mu.
func (h *remoteHost) handle(m *agentwire.Message) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ending { // its ranks are counted already
		return nil
	}
	if h.reports == eventRoom(len(h.ranks), 1)-1 { // one place is for its loss
		return errors.New("its agent reports more than can be")
	}
	switch {
	case m.Ping != nil:
	case m.Listening != nil, m.Reached != nil, m.Moved != nil, m.Failed != nil:
		if answer := h.answer.Load(); answer != nil {
			(*answer)(addrAnswer{host: h.index, m: m})
		}
	case m.Log != nil:
		h.log(fmt.Sprintf("host %s: %s", h.name, m.Log.Text))
	case h.began.IsZero() && m.KeeperDied == nil && m.AgentFailed == nil:
		return errors.New("its agent speaks of ranks before any is started")
	case m.Started != nil:
		return h.ranksStarted(m.Started)
	case m.RankFailed != nil:
		h.report(agentEvent{kind: rankFailed, rank: m.RankFailed.Rank, err: failure(&m.RankFailed.Failed)})
	case m.Exited != nil:
		return h.rankExited(m.Exited)
	case m.Aborted != nil:
		return h.rankAborted(m.Aborted)
	case m.StdinWanted != nil:
		return h.stdinWanted(m.StdinWanted)
	case m.KeeperDied != nil:
		h.report(agentEvent{kind: keeperDied, pid: m.KeeperDied.PID})
	case m.AgentFailed != nil:
		h.report(agentEvent{kind: agentFailed, err: &hostError{h.name, errors.New(m.AgentFailed.Text)}})
	case m.Met != nil && len(m.Met.Missing) == 0:
		h.report(agentEvent{kind: hostMet})
	case m.Met != nil:
		h.report(agentEvent{kind: hostApart, hosts: m.Met.Missing})
	case m.Doubt != nil:
		h.doubts(m.Doubt)
	case m.State != nil:
		h.know(m.State)
	case m.Reaped != nil:
		return h.reaped(m.Reaped)
	case m.Looked != nil:
		if m.Looked.ID == h.looks && h.looked != nil { // else it is too late
			h.looked <- m.Looked
			h.looked = nil
		}
	default:
		return errors.New("its agent says what only gorun says")
	}
	return nil
}

func (h *remoteHost) report(e agentEvent) {
	e.host = h.index
	h.events <- e
	h.reports++
}

func (h *remoteHost) ranksStarted(s *agentwire.Started) error {
	if h.forked || len(s.Ranks) != len(h.ranks) {
		return fmt.Errorf("its agent reports the start of %d ranks, of %d", len(s.Ranks), len(h.ranks))
	}
	h.forked = true
	h.travel(s.At)
	e := agentEvent{kind: forksDone}
	for i, r := range s.Ranks {
		if r.Rank != h.ranks[i] {
			return fmt.Errorf("its agent reports the start of rank %d, which is not there", r.Rank)
		}
		e.started = append(e.started, startedRank{r.Rank, r.PID, h.at(r.After)})
	}
	h.report(e)
	return nil
}

func (h *remoteHost) rankExited(x *agentwire.Exited) error {
	if !h.running[x.Rank] {
		return fmt.Errorf("its agent reports the end of rank %d, which does not run there", x.Rank)
	}
	delete(h.running, x.Rank)
	h.know(x.State)
	h.travel(x.After)
	h.report(agentEvent{kind: rankExited, rank: x.Rank, pid: x.PID, at: h.at(x.After), sent: syscall.Signal(x.Sent),
		status: exitStatus{Code: x.Code, Signal: syscall.Signal(x.Signal), Core: x.Core, OOM: x.OOM, MPI: x.MPI}})
	return nil
}

func (h *remoteHost) rankAborted(x *agentwire.Aborted) error {
	if !h.running[x.Rank] {
		return fmt.Errorf("its agent reports that rank %d ends the job, which does not run there", x.Rank)
	}
	h.travel(x.After)
	h.report(agentEvent{kind: rankAborted, rank: x.Rank, at: h.at(x.After), status: exitStatus{MPI: x.MPI}})
	return nil
}

func (h *remoteHost) stdinWanted(w *agentwire.StdinAt) error {
	k := h.stdin.sink(w.Rank)
	if k == nil || !slices.Contains(h.ranks, k.rank) {
		return fmt.Errorf("its agent reports that rank %d wants input, which it has not", w.Rank)
	}
	k.wants(w.Bytes)
	return nil
}

func (h *remoteHost) doubts(d *agentwire.Doubt) {
	switch {
	case !d.Unreached:
		h.doubt(d.Host)
	case d.Host != h.index:
		h.threads.Go(func() { h.unreached(h.index, d.Host) }) // not here: it may be the end of this host, and mu is held
	}
}

func (h *remoteHost) reaped(r *agentwire.Reaped) error {
	h.know(r.State)
	h.killed = r.Killed
	h.made, h.nMade = r.Made.Unpack(), r.NMade
	h.left = map[int]bool{}
	for _, j := range r.Joined {
		h.left[j.Rank] = j.Left
	}
	select {
	case <-h.wasReaped:
		return errors.New("its agent reaps twice")
	default:
		close(h.wasReaped)
	}
	return nil
}

// travel estimates, at the first message that the agent says when it said it, how long Start was on its way: half of what both were. So
// times of different hosts can be compared. The caller holds mu.
func (h *remoteHost) travel(said time.Duration) {
	if !h.lagged {
		h.lag, h.lagged = max(0, (time.Since(h.began)-said)/2), true
	}
}

// at is a time of the agent, since Start came, by our clock. The caller holds mu.
func (h *remoteHost) at(after time.Duration) time.Time { return h.began.Add(h.lag + after) }

// know takes the job's state. The caller holds mu.
func (h *remoteHost) know(s *agentwire.State) {
	if s == nil {
		return
	}
	is := func(rank int) bool { return rank >= 0 && rank < h.size }
	h.last = jobState{}
	for _, r := range s.Ended {
		if is(r) {
			h.last.ended = append(h.last.ended, r)
		}
	}
	for _, p := range s.Suspicions {
		if is(p.By) && is(p.Rank) {
			h.last.suspicions = append(h.last.suspicions, node.Suspicion{By: p.By, Rank: p.Rank})
		}
	}
}

// failure is the error that a Failed is about.
func failure(f *agentwire.Failed) error {
	if f.Code != 0 {
		return &StartError{Code: f.Code, Msg: f.Text}
	}
	return errors.New(f.Text)
}

// watch keeps the heartbeat.
func (h *remoteHost) watch() {
	tick := time.NewTicker(beat)
	defer tick.Stop()
	pulse := newHeartbeat(h.mux)
	var doubts time.Time
	for {
		select {
		case <-h.gone:
			return
		case <-tick.C:
		}
		now := time.Now()
		silent, stopped := pulse.beat(now, h.paused.Load())
		if stopped {
			doubts = time.Time{}
		}
		doubted := now.Sub(time.Unix(0, h.doubted.Load())) < doubtLasts
		if !doubted {
			doubts = time.Time{}
		} else if doubts.IsZero() {
			doubts = now
		}
		switch {
		case silent > silentAgreed && doubted:
			h.lost(fmt.Errorf("no answer for %v, and the other hosts do not reach it either", silent.Round(time.Second)))
		case silent > silentAgreed && h.alone:
			h.lost(fmt.Errorf("no answer for %v", silent.Round(time.Second)))
		case silent > silentAgreed && !h.met():
			h.lost(fmt.Errorf("no answer for %v, and it has not met the other hosts yet", silent.Round(time.Second)))
		case silent > silentAlone:
			h.lost(fmt.Errorf("no answer for %v", silent.Round(time.Second)))
		case doubted && now.Sub(doubts) > doubtAlone:
			h.lost(fmt.Errorf("the other hosts have not reached it for %v; gorun does", now.Sub(doubts).Round(time.Second)))
		}
	}
}

// end is the end of the session: what the agent reports is over.
func (h *remoteHost) end(err error) {
	h.mu.Lock()
	over := h.ending
	h.mu.Unlock()
	if !over {
		err = h.endOf(err)
	}
	h.lost(err)
}

// endOf says why nothing can be read any more: err, or how the session ended.
func (h *remoteHost) endOf(err error) error {
	// Which of them comes first when the session ends is chance: the reader's or the writer's.
	if err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.EPIPE) {
		return h.sessionEnd()
	}
	return err
}

// await keeps the heartbeat of a host that is prepared while others are not. It calls lost, once, when the host is silent or its agent has ended. The
// function that it returns ends it, and may be called again; nobody else may read what the agent says before.
func (h *remoteHost) await(lost func(error)) (end func()) {
	var once sync.Once
	tell := func(err error) { once.Do(func() { lost(err) }) }
	calm := tend(h.mux, &h.paused, tell)
	quit := make(chan struct{})
	var wait sync.WaitGroup
	wait.Go(func() {
		select {
		case <-quit:
		case <-h.mux.Done():
			tell(h.lastWord())
		}
	})
	return sync.OnceFunc(func() {
		calm()
		close(quit)
		wait.Wait()
	})
}

// lastWord is why an agent has ended that has: what it said, or how its session ended.
func (h *remoteHost) lastWord() error {
	for {
		m, err := h.mux.Receive()
		switch {
		case err != nil:
			return h.endOf(err)
		case m.AgentFailed != nil:
			return errors.New(m.AgentFailed.Text)
		case m.Failed != nil:
			return failure(m.Failed)
		}
	}
}

// sessionEnd says how a session ended that has.
func (h *remoteHost) sessionEnd() error {
	ended := make(chan error, 1)
	go func() { ended <- h.session.Wait() }()
	var err error
	select {
	case err = <-ended:
	case <-time.After(time.Second):
		h.session.Close()
		err = <-ended
	}
	text := "its agent has ended"
	if x, ok := errors.AsType[*way.ExitError](err); ok {
		text = "its agent has ended (" + x.Error() + ")"
	} else if w, ok := errors.AsType[*way.Error](err); ok {
		text = w.Cause.Error()
	} else if err != nil {
		text = "the connection has ended: " + err.Error()
	}
	if said := lastLines(h.session.Stderr(), 1); len(said) > 0 {
		text += "; it said: " + said[0]
	}
	return errors.New(text)
}

// lost gives the host up, unless it was told to end: nothing comes from it any more.
func (h *remoteHost) lost(err error) {
	h.mu.Lock()
	if !h.ending {
		h.events <- agentEvent{kind: hostLost, host: h.index, err: err}
		if answer := h.answer.Load(); answer != nil {
			(*answer)(addrAnswer{host: h.index, err: err})
		}
	}
	h.ending = true
	select {
	case <-h.gone:
	default:
		close(h.gone)
	}
	h.mu.Unlock()
	h.mux.Close()
}

// carry takes the output of the ranks to the collectors.
func (h *remoteHost) carry() {
	defer close(h.carried)
	var copies sync.WaitGroup
	defer copies.Wait()
	seen := map[agentwire.Header]bool{}
	for {
		head, conn, err := h.mux.Accept()
		if err != nil || head.Kind == agentwire.End {
			if err == nil {
				conn.Close()
			}
			return
		}
		if seen[head] || head.Kind != agentwire.Stdout && head.Kind != agentwire.Stderr || !slices.Contains(h.ranks, head.Rank) {
			conn.Close()
			h.lost(fmt.Errorf("its agent opens a stream of rank %d that there cannot be", head.Rank))
			return
		}
		seen[head] = true
		r, w, err := pipe()
		if err == nil {
			if err = h.output.addStream(head.Rank, head.Kind == agentwire.Stderr, r, false); err != nil {
				unix.Close(r)
				unix.Close(w)
			}
		}
		if err != nil {
			conn.Close()
			h.lost(limitHint(fmt.Errorf("take the output of rank %d: %w", head.Rank, err)))
			return
		}
		unix.SetNonblock(w, true) // our end alone: the collector's is another description
		f := os.NewFile(uintptr(w), "pipe")
		h.mu.Lock()
		h.pipes = append(h.pipes, f)
		h.mu.Unlock()
		copies.Go(func() {
			defer f.Close()
			defer conn.Close()
			if _, err := io.Copy(f, struct{ io.Reader }{conn}); err != nil {
				io.Copy(io.Discard, conn) // the sink has gone: the rank is not to hang
			}
		})
	}
}

func (h *remoteHost) stopForks() { h.mux.Send(&agentwire.Message{StopForks: &agentwire.Empty{}}) }

func (h *remoteHost) signal(sig syscall.Signal, pick func(rank int) bool) {
	h.paused.Store(false)
	s := &agentwire.Signal{Signal: int(sig), All: pick == nil}
	if pick != nil {
		for _, r := range h.ranks {
			if pick(r) {
				s.Ranks = append(s.Ranks, r)
			}
		}
		if len(s.Ranks) == 0 {
			return
		}
	}
	h.mux.Send(&agentwire.Message{Signal: s})
}

// resume says that this process goes on.
func (h *remoteHost) resume() {
	h.paused.Store(false)
	h.mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
}

// pause says that this process is about to stop, until something else is said.
func (h *remoteHost) pause() {
	h.paused.Store(true) // no more beats
	h.mux.Send(&agentwire.Message{Pause: &agentwire.Empty{}})
	h.mux.Flush(pauseWait)
}

func (h *remoteHost) note(agentEvent) {} // its agent does

func (h *remoteHost) refresh() { h.mux.Send(&agentwire.Message{Query: &agentwire.Empty{}}) }

func (h *remoteHost) state() jobState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.last
}

func (h *remoteHost) joined(rank int) (joined, left bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	left, joined = h.left[rank]
	return joined, left
}

func (h *remoteHost) lose(host int, name, cause string) {
	h.mux.Send(&agentwire.Message{Lose: &agentwire.Lose{Host: host, Name: name, Cause: cause}})
}

func (h *remoteHost) adopted() {}

func (h *remoteHost) reap() int {
	h.mux.Send(&agentwire.Message{Reap: &agentwire.Empty{}})
	h.awaitReaped(reapSilence, reapMost)
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.killed
}

// awaitReaped waits for the answer to Reap as long as the agent is heard, and gives the host up behind that.
func (h *remoteHost) awaitReaped(silence, most time.Duration) {
	begin := time.Now()
	for wait := silence; wait > 0; wait = min(time.Until(h.mux.Heard().Add(silence)), most-time.Since(begin)) {
		t := time.NewTimer(wait)
		select {
		case <-h.wasReaped:
		case <-h.gone:
		case <-t.C:
			continue
		}
		t.Stop()
		return
	}
	h.lost(fmt.Errorf("its agent did not end what was left of the ranks within %v", time.Since(begin).Round(time.Second)))
}

func (h *remoteHost) drained() <-chan struct{} { return h.carried }

func (h *remoteHost) over() {} // its agent knows when it is told Bye

func (h *remoteHost) close() {
	h.calm()
	h.mu.Lock()
	h.ending = true
	pipes := h.pipes
	h.mu.Unlock()
	sayBye(context.Background(), h.mux)
	for _, f := range pipes {
		f.Close() // a collector may hang
	}
	h.session.Close()
	h.threads.Wait()
}

// hostError is an error at another host.
type hostError struct {
	host string
	err  error
}

func (e *hostError) Error() string { return "host " + e.host + ": " + e.err.Error() }
func (e *hostError) Unwrap() error { return e.err }

// notStarted says why hosts did not start.
type notStarted struct{ hosts []error }

func (e *notStarted) Error() string {
	var lines []string
	told := ""
	for _, err := range e.hosts {
		text := err.Error()
		advice := way.Advice(err)
		if a, ok := errors.AsType[*advisedError](err); ok {
			advice = a.advice
		}
		if advice != "" && advice != told { // many hosts may have the same
			text += "\n    " + advice
			told = advice
		}
		lines = append(lines, text)
	}
	if len(lines) == 1 {
		return lines[0]
	}
	return fmt.Sprintf("%d hosts did not start:\n  %s", len(lines), strings.Join(lines, "\n  "))
}

// Unwrap is the errors of the hosts.
func (e *notStarted) Unwrap() []error { return e.hosts }
