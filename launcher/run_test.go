package launcher

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// planOf is the plan of a job that runs a shell script.
func planOf(t *testing.T, job Job, script string) *Plan {
	t.Helper()
	prog, err := FindProgram("sh", os.Getenv("PATH"))
	if err != nil {
		t.Fatal(err)
	}
	job.Args = []string{"-c", script}
	p, err := job.Plan(Facts{Programs: []Program{prog}, Host: "here", Dir: t.TempDir(), Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func openFDs(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// nothingLeft fails the test when a process carries the job's id, or is a child of this one.
func nothingLeft(t *testing.T, job string) {
	t.Helper()
	for _, p := range keeper.Processes() {
		if p.Parent == os.Getpid() {
			t.Errorf("pid %d (state %c) is still a child", p.PID, p.State)
		}
		env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID))
		if job != "" && bytes.Contains(env, []byte("GORUN_JOB_ID="+job+"\x00")) && p.State != 'Z' {
			t.Errorf("pid %d still carries the job's id", p.PID)
		}
	}
}

// Run in a program that has other things to do: no descriptor, goroutine (TestMain) or process is left.
func TestRunLeavesNothing(t *testing.T) {
	for _, c := range []struct {
		name   string
		job    Job
		script string
		code   int
		out    []string
	}{
		{"well", Job{NP: 3}, "echo $GORUN_RANK", 0, []string{"0", "1", "2"}},
		{"failure", Job{NP: 2}, "[ $GORUN_RANK = 1 ] && exit 9; sleep 1000", 9, nil},
		{"left over", Job{NP: 2}, "setsid sleep 1000 & sleep 1000 & exit 0", 0, nil},
		{"timeout", Job{NP: 2, Timeout: 50 * time.Millisecond}, "sleep 1000", ExitTimeout, nil},
		{"grace", Job{NP: 2, Timeout: 50 * time.Millisecond, KillGrace: 50 * time.Millisecond}, "trap '' TERM; sleep 1000; sleep 1000", ExitTimeout, nil},
		{"no directory", Job{NP: 2, Dir: "/nonexistent"}, "true", ExitCannotRun, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := openFDs(t)
			for range 3 {
				s := &sink{}
				acct := Run(t.Context(), planOf(t, c.job, c.script), Options{Stdout: s})
				if acct.Code != c.code {
					t.Errorf("code %d, want %d: %s", acct.Code, c.code, acct.Summary())
				}
				got := strings.Fields(s.text())
				slices.Sort(got)
				if !slices.Equal(got, c.out) {
					t.Errorf("output %q, want %q", got, c.out)
				}
				nothingLeft(t, acct.Job)
			}
			// The runtime may open its poller and the like, once.
			if after := openFDs(t); after > before+2 {
				t.Errorf("%d descriptors, %d before", after, before)
			}
		})
	}
}

func TestRunIsCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s := &sink{wrote: make(chan struct{}, 1)}
	go func() {
		<-s.wrote
		cancel()
	}()
	acct := Run(ctx, planOf(t, Job{NP: 2}, "echo up; sleep 1000"), Options{Stdout: s})
	if acct.Code != 143 || acct.Reason != ReasonSignal {
		t.Errorf("code %d, reason %s, want 143, %s", acct.Code, acct.Reason, ReasonSignal)
	}
	nothingLeft(t, acct.Job)
}

// A machine that is out of processes or descriptors is not the program's fault.
func TestStartFails(t *testing.T) {
	p := planOf(t, Job{NP: 3}, "sleep 1000")
	p.Programs[0].Path = filepath.Join(t.TempDir(), "gone")
	acct := Run(t.Context(), p, Options{})
	if acct.Code != ExitNotFound || !strings.HasPrefix(acct.Error, "run sh: ") {
		t.Errorf("code %d, %q, want %d", acct.Code, acct.Error, ExitNotFound)
	}
	nothingLeft(t, acct.Job)
	if err := execError(p.Programs[0], 2, syscall.EAGAIN); err == nil || !strings.HasPrefix(err.Error(), "start rank 2: resource temporarily unavailable") {
		t.Errorf("got %v", err)
	} else if _, ok := errors.AsType[*StartError](err); ok {
		t.Errorf("%v is a StartError, want none", err)
	}
}

// fakeNode counts what the launcher tells it.
type fakeNode struct {
	exits  []string
	joined map[int][2]bool
	ended  []int
	said   []node.Suspicion
	closed bool
}

func (n *fakeNode) Exchange(name string, hosts []int, data []byte, done func(all [][]byte, err error)) {
	done([][]byte{data}, nil)
}
func (n *fakeNode) Control() string { return "socket" }
func (n *fakeNode) RankExited(rank, code int, cause string) {
	n.exits = append(n.exits, fmt.Sprintf("%d: %d %s", rank, code, cause))
}
func (n *fakeNode) Joined(rank int) (bool, bool)          { j := n.joined[rank]; return j[0], j[1] }
func (n *fakeNode) Ended() []int                          { return n.ended }
func (n *fakeNode) Suspicions() []node.Suspicion          { return n.said }
func (n *fakeNode) Close() error                          { n.closed = true; return nil }
func (n *fakeNode) Addr() string                          { return "" }
func (n *fakeNode) AddSeeds(...string)                    {}
func (n *fakeNode) Ready(context.Context) error           { return nil }
func (n *fakeNode) LoseHost(int, string, string)          {}
func (n *fakeNode) Standings() []node.Standing            { return nil }
func (n *fakeNode) Stacks(context.Context) map[int][]byte { return nil }
func (n *fakeNode) Over()                                 {}
func (n *fakeNode) Unreached(time.Duration) []int         { return nil }

// startedTogether is the begin of a script of three ranks: none goes on before all are there, as the files pid0 to pid2 say.
const startedTogether = `echo $$ >tmp$GORUN_RANK; mv tmp$GORUN_RANK pid$GORUN_RANK; until [ -e pid0 -a -e pid1 -a -e pid2 ]; do sleep 0.01; done; `

func TestNodeHearsOfExits(t *testing.T) {
	n := &fakeNode{joined: map[int][2]bool{0: {true, false}}}
	var cfg node.Config
	p := planOf(t, Job{NP: 3}, startedTogether+`case $GORUN_RANK in 0) echo $GORUN_CONTROL; exit 0;; 1) until grep -q '^State:.Z' /proc/$(cat pid0)/status; do sleep 0.01; done; sleep 0.3; exit 4;; 2) sleep 1000;; esac`)
	s := &sink{}
	acct := Run(t.Context(), p, Options{Stdout: s, start: func(_ context.Context, c node.Config) (control, error) { cfg = c; return n, nil }})
	want := []string{"0: 0 exited with code 0", "1: 4 exited with code 4", "2: 143 killed by SIGTERM"}
	if !slices.Equal(n.exits, want) {
		t.Errorf("told %q, want %q", n.exits, want)
	}
	if !n.closed {
		t.Error("the node was not closed")
	}
	if cfg.Job != acct.Job || !slices.Equal(cfg.NodeOf, []int{0, 0, 0}) || cfg.Host != "here" {
		t.Errorf("node started with %+v", cfg)
	}
	if got := s.text(); got != "socket\n" {
		t.Errorf("GORUN_CONTROL %q", got)
	}
	// Rank 0 had joined and did not say goodbye: it is the cause, the code is that of the rank that failed.
	if acct.Code != 4 || acct.Cause != 0 {
		t.Errorf("code %d, cause %d, want 4, 0", acct.Code, acct.Cause)
	}
}

// Ranks that were not started any more, since another had failed, are told, too: those that run may wait for them.
func TestNodeHearsOfRanksNotStarted(t *testing.T) {
	const np = 200
	n := &fakeNode{}
	p := planOf(t, Job{NP: np}, `exit 3`)
	Run(t.Context(), p, Options{start: func(context.Context, node.Config) (control, error) { return n, nil }})
	told := map[int]bool{}
	for _, e := range n.exits {
		var rank int
		fmt.Sscanf(e, "%d:", &rank)
		if told[rank] {
			t.Errorf("rank %d was told twice", rank)
		}
		told[rank] = true
	}
	if len(told) != np || !slices.ContainsFunc(n.exits, func(e string) bool { return strings.HasSuffix(e, "was not started") }) {
		t.Errorf("%d of %d ranks were told, the last %q", len(told), np, n.exits[len(n.exits)-1])
	}
}

// A rank that the job had lost before it lost the one that failed first is left alone, to end by itself: its end is the
// cause. It is not waited for longer than the kill grace.
func TestSuspectIsLeftAlone(t *testing.T) {
	for _, c := range []struct {
		name   string
		grace  time.Duration
		script string
		code   int
		cause  int
		sub    string
	}{
		{"fails", 0, `case $GORUN_RANK in 0) exit 1;; 1) trap 'echo term >&2; exit 3' TERM; until grep -q '^State:.Z' /proc/$(cat pid0)/status; do sleep 0.01; done; sleep 0.4; exit 7;; 2) sleep 1000;; esac`,
			7, 1, "then: rank 0 exited with code 1; rank 2 ended by gorun (SIGTERM)"},
		{"goes on", 100 * time.Millisecond, `case $GORUN_RANK in 0) exit 1;; *) exec sleep 1000;; esac`, 1, 0, " ended by gorun (SIG"},
		{"no grace", NoGrace, `case $GORUN_RANK in 0) exit 1;; *) sleep 1000;; esac`, 1, 0, "then: ranks 1,2 ended by gorun (SIGKILL)"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := &fakeNode{ended: []int{1, 0}, joined: map[int][2]bool{1: {true, true}}}
			p := planOf(t, Job{NP: 3, KillGrace: c.grace}, startedTogether+c.script)
			acct := Run(t.Context(), p, Options{start: func(context.Context, node.Config) (control, error) { return n, nil }})
			if acct.Code != c.code || acct.Cause != c.cause || !strings.Contains(acct.Summary(), c.sub) {
				t.Errorf("code %d, cause %d, %q; want %d, %d, %q", acct.Code, acct.Cause, acct.Summary(), c.code, c.cause, c.sub)
			}
			nothingLeft(t, acct.Job)
		})
	}
}

// A rank that others blame is left alone, too, although the job has not lost it.
func TestBlamedIsLeftAlone(t *testing.T) {
	n := &fakeNode{said: []node.Suspicion{{By: 0, Rank: 1}}}
	p := planOf(t, Job{NP: 3}, startedTogether+`case $GORUN_RANK in 0) sleep 0.2; exit 1;; 1) trap 'exit 3' TERM; until grep -q '^State:.Z' /proc/$(cat pid0)/status; do sleep 0.01; done; sleep 0.6; exit 7;; 2) exec sleep 1000;; esac`)
	acct := Run(t.Context(), p, Options{start: func(context.Context, node.Config) (control, error) { return n, nil }})
	if want := "then: rank 0 exited with code 1; rank 2 ended by gorun (SIGTERM)\n"; acct.Code != 7 || acct.Cause != 1 || !strings.Contains(acct.Summary(), want) {
		t.Errorf("code %d, cause %d, %q; want 7, 1, %q", acct.Code, acct.Cause, acct.Summary(), want)
	}
	nothingLeft(t, acct.Job)
}

// A signal to gorun ends the wait for last words, and nobody is left alone any more: rank 1 would take for ever.
func TestSignalEndsLastWords(t *testing.T) {
	n := &fakeNode{said: []node.Suspicion{{By: 0, Rank: 1}}}
	signals := make(chan os.Signal, 1)
	r := &runner{plan: &Plan{KillGrace: time.Hour}, o: Options{Signals: signals}, acct: &Account{Ranks: make([]RankAccount, 2)}, failed: 0,
		hosts: []hostAgent{&localHost{node: n, agent: &agent{starting: -1}}}}
	r.end(ReasonFailed, syscall.SIGTERM, syscall.SIGKILL)
	if r.lastSig != 0 || r.next == nil {
		t.Fatalf("sent %v at once, want a wait", r.lastSig)
	}
	r.signal(syscall.SIGINT)
	if r.lastSig != syscall.SIGTERM || r.suspects != nil {
		t.Errorf("sent %v, spared %v; want SIGTERM to all", r.lastSig, r.suspects)
	}
	r.signal(syscall.SIGINT) // the same key press
	if r.lastSig != syscall.SIGTERM {
		t.Errorf("sent %v after the second SIGINT of one key press", r.lastSig)
	}
}

// A rank that could not be forked is not on its way any more: signals wait for nobody, and what other processes left behind is reaped.
func TestRankThatCannotBeForked(t *testing.T) {
	events := make(chan agentEvent, eventRoom(1, 1))
	a, err := newAgent(agentConfig{events: events, ranks: []agentRank{{path: "/nonexistent", argv: []string{"x"}, dir: "/"}}, job: keeper.Job{ID: "cannot-be-forked"}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	a.start()
	for _, want := range []eventKind{rankFailed, forksDone} {
		select {
		case e := <-events:
			if e.kind != want {
				t.Fatalf("event %+v, want kind %d", e, want)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("no event within 20 s")
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.forking >= 0 || a.starting >= 0 {
		t.Errorf("rank %d is being forked, %d started", a.forking, a.starting)
	}
}

// A rank that can't be watched is ended at once, and the job with it.
func TestRankCannotBeWatched(t *testing.T) {
	before := openFDs(t)
	s := &sink{}
	output, err := newOutputs(outputConfig{stdout: s, stderr: s}, 3, nil)
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan agentEvent, eventRoom(3, 1))
	cfg := agentConfig{events: events, output: output, job: keeper.Job{ID: "cannot-be-watched"}}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for i := range 3 {
		cfg.ranks = append(cfg.ranks, agentRank{rank: i, path: "/bin/sh", argv: []string{"sh", "-c", "sleep 1000"}, dir: "/", stdin: int(null.Fd()), env: os.Environ()})
	}
	a, err := newAgent(cfg)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	a.register = func(ep, op, fd int, e *unix.EpollEvent) error {
		if n++; n == 2 {
			return unix.ENOSPC
		}
		return unix.EpollCtl(ep, op, fd, e)
	}
	a.start()
	next := func() agentEvent {
		select {
		case e := <-events:
			return e
		case <-time.After(30 * time.Second):
			t.Fatal("no event")
			return agentEvent{}
		}
	}
	if e := next(); e.kind != rankFailed || e.rank != 1 || !errors.Is(e.err, unix.ENOSPC) {
		t.Errorf("got %+v, want the failure of rank 1", e)
	}
	if e := next(); e.kind != forksDone {
		t.Errorf("got %+v, want the end of the forks", e)
	}
	for i, want := range []bool{true, false, false} {
		if pid, _ := a.started(i); (pid != 0) != want {
			t.Errorf("rank %d: pid %d, started %v is wanted", i, pid, want)
		}
	}
	a.signal(syscall.SIGKILL, nil)
	if e := next(); e.kind != rankExited || e.rank != 0 {
		t.Errorf("got %+v, want the end of rank 0", e)
	}
	a.reap()
	<-output.finish()
	a.close()
	nothingLeft(t, "")
	if after := openFDs(t); after > before+1 {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// A rank runs before the agent knows its number: a signal that comes between is for it, too.
func TestSignalWhileForking(t *testing.T) {
	a, events, end := testAgent(t, agentConfig{job: keeper.Job{ID: "signal-while-forking"}, ranks: []agentRank{{path: "/bin/sleep", argv: []string{"sleep", "1000"}, dir: "/"}}})
	defer end()
	a.forking = 0
	a.signal(syscall.SIGUSR1, nil)
	a.start()
	for ended := false; !ended; {
		select {
		case e := <-events:
			if ended = e.kind == rankExited; ended && e.status.Signal != syscall.SIGUSR1 {
				t.Errorf("the rank %v, want its end by SIGUSR1", e.status)
			}
		case <-time.After(20 * time.Second):
			t.Error("the rank did not get the signal")
			a.signal(syscall.SIGKILL, nil)
		}
	}
}

// A rank that is being started when the ranks stop stops with them, and none is started before they go on.
func TestStopWhileForking(t *testing.T) {
	forked, goOn := make(chan int, 2), make(chan struct{})
	cfg := agentConfig{job: keeper.Job{ID: "stop-while-forking"}, onFork: func(rank int) {
		forked <- rank
		<-goOn
	}}
	for rank := range 2 {
		cfg.ranks = append(cfg.ranks, agentRank{rank: rank, path: "/bin/sleep", argv: []string{"sleep", "1000"}, dir: "/"})
	}
	a, events, end := testAgent(t, cfg)
	defer end()
	a.start()
	<-forked // and is not known yet
	a.signal(syscall.SIGSTOP, nil)
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		a.settled(20 * time.Second)
	}()
	select {
	case <-settled:
		t.Error("settled while a rank is being started")
	case <-time.After(20 * time.Millisecond):
	}
	close(goOn)
	<-settled
	pid := a.pidOf(0)
	if pid == 0 {
		t.Fatal("rank 0 is not known")
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), ") T ") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("rank 0 runs: %s", text)
		}
	}
	select {
	case <-forked:
		t.Error("rank 1 is started while the ranks are stopped")
	case <-time.After(20 * time.Millisecond):
	}
	a.signal(syscall.SIGCONT, nil)
	select {
	case <-forked:
	case <-time.After(20 * time.Second):
		t.Error("rank 1 is not started when the ranks go on")
	}
	a.settled(20 * time.Second)
	a.signal(syscall.SIGKILL, nil)
	for ended := 0; ended < 2; {
		select {
		case e := <-events:
			if e.kind == rankExited {
				ended++
			}
		case <-time.After(20 * time.Second):
			t.Fatal("ranks do not end")
		}
	}
}

// Ranks that are stopped before all are started can be ended.
func TestEndWhileStopped(t *testing.T) {
	a, events, end := testAgent(t, agentConfig{job: keeper.Job{ID: "end-while-stopped"}, ranks: []agentRank{{path: "/bin/true", argv: []string{"true"}, dir: "/"}}})
	defer end()
	a.signal(syscall.SIGSTOP, nil)
	a.start()
	a.stopForks()
	select {
	case e := <-events:
		if e.kind != forksDone || e.started[0].pid != 0 {
			t.Errorf("got %+v, want the end of forks without a rank", e)
		}
	case <-time.After(20 * time.Second):
		t.Error("the forking thread waits")
	}
}

// The two SIGINTs of a wrapper that signals gorun and its process group are one Ctrl-C.
func TestTwoInterruptsAtOnceAreOne(t *testing.T) {
	signals := make(chan os.Signal, 2)
	s := &sink{wrote: make(chan struct{}, 1)}
	go func() {
		<-s.wrote
		signals <- syscall.SIGINT
		signals <- syscall.SIGINT
	}()
	p := planOf(t, Job{}, "trap 'echo end; exit 0' INT; echo up; while :; do sleep 0.01; done")
	acct := Run(t.Context(), p, Options{Stdout: s, Signals: signals})
	if got := s.text(); acct.Code != 130 || got != "up\nend\n" {
		t.Errorf("code %d, output %q, want 130 and the rank's own end", acct.Code, got)
	}
}

// gateWriter is a reader that takes nothing while the gate is shut.
type gateWriter struct {
	sink
	open func() bool
}

func (w *gateWriter) Write(p []byte) (int, error) {
	for end := time.Now().Add(20 * time.Second); !w.open() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	return w.sink.Write(p)
}

// A signal comes when all ranks have ended, perhaps from one of them: a reader that goes on reading gets all output, one that does not is given up.
func TestSignalWhileDraining(t *testing.T) {
	for _, c := range []struct {
		name  string
		reads bool
	}{{"reader", true}, {"no reader", false}} {
		t.Run(c.name, func(t *testing.T) {
			signals := make(chan os.Signal, 1)
			signals <- syscall.SIGTERM
			var over atomic.Bool
			w := &gateWriter{open: func() bool { return over.Load() || c.reads && len(signals) == 0 }}
			output, err := newOutputs(outputConfig{stdout: w, stderr: &sink{}}, 1, nil)
			if err != nil {
				t.Fatal(err)
			}
			r := &runner{plan: &Plan{}, o: Options{Signals: signals}, acct: &Account{Reason: ReasonFailed}, ending: true, hosts: []hostAgent{&fakeHost{}}, output: output}
			from, to, err := pipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := output.add(0, false, from); err != nil {
				t.Fatal(err)
			}
			unix.Write(to, []byte("all of it\n"))
			unix.Close(to)
			if got := r.drain(); got != c.reads {
				t.Errorf("all output was read: %v, want %v", got, c.reads)
			}
			if got := w.text(); c.reads && got != "all of it\n" {
				t.Errorf("read %q", got)
			}
			over.Store(true)
			<-output.finish()
		})
	}
}

func TestNodeDoesNotStart(t *testing.T) {
	before := openFDs(t)
	acct := Run(t.Context(), planOf(t, Job{}, "true"), Options{start: func(context.Context, node.Config) (control, error) { return nil, errors.New("no socket") }})
	if want := "gorun: start the bootstrap node: no socket\n"; acct.Code != ExitInternal || !strings.HasPrefix(acct.Summary(), want) {
		t.Errorf("code %d, %q, want %d, %q", acct.Code, acct.Summary(), ExitInternal, want)
	}
	nothingLeft(t, "")
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func TestReservedPort(t *testing.T) {
	seen := map[int]bool{}
	for range 200 {
		fd, port, err := reservePort(loopback)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(fd)
		if seen[port] {
			t.Fatalf("port %d was given twice", port)
		}
		seen[port] = true
	}
}

// What help environment says of MASTER_PORT: a server with SO_REUSEADDR gets it, one without does not.
func TestReservedPortIsForReuse(t *testing.T) {
	held, port, err := reservePort(loopback)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(held)
	for reuse, want := range []error{syscall.EADDRINUSE, nil} {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(fd)
		if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, reuse); err != nil {
			t.Fatal(err)
		}
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: loopback.As4()})
		if err == nil {
			err = syscall.Listen(fd, 1)
		}
		if err != want {
			t.Errorf("SO_REUSEADDR %d: got %v, want %v", reuse, err, want)
		}
	}
}

func TestLimitsAreNamed(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{syscall.EMFILE, "raise it with ulimit -n"},
		{syscall.EAGAIN, "see ulimit -u"},
		{syscall.ENOMEM, "see ulimit -a"},
	} {
		err := limitHint(fmt.Errorf("pipe: %w", c.err))
		if !errors.Is(err, c.err) || !strings.HasSuffix(err.Error(), c.want) && !strings.Contains(err.Error(), c.want+",") {
			t.Errorf("got %v, want it to end in %q", err, c.want)
		}
	}
	if err := limitHint(syscall.ENOENT); err != syscall.ENOENT {
		t.Errorf("got %v, want it as it was", err)
	}
}

func TestBuildIsInterrupted(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module example.com/m\n\ngo 1.26\n", "main.go": "package main\n\nfunc main() {}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// A go command that never ends, and has a child.
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "go"), []byte("#!/bin/sh\necho building >&2\nsleep 1000\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	prog, err := FindProgram(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	p, err := Job{NP: 2}.Plan(Facts{Programs: []Program{prog}, Host: "here", Dir: dir, Environ: os.Environ()})
	if err != nil {
		t.Fatal(err)
	}
	signals := make(chan os.Signal, 1)
	s := &sink{wrote: make(chan struct{}, 1)}
	go func() {
		<-s.wrote
		signals <- syscall.SIGINT
	}()
	acct := Run(t.Context(), p, Options{Stderr: s, Signals: signals})
	if acct.Code != 130 || acct.Reason != ReasonSignal {
		t.Errorf("code %d, reason %s, want 130, %s: %s", acct.Code, acct.Reason, ReasonSignal, acct.Summary())
	}
	nothingLeft(t, "")
}

// A build that waits for the same build of another launch is interrupted as well.
func TestWaitForABuildIsInterrupted(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	prog, err := FindProgram(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	in, _, err := buildDir(prog.GoDir)
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.Create(filepath.Join(in, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	built := make(chan error, 1)
	go func() { built <- prog.Build(ctx, io.Discard) }()
	select {
	case err := <-built:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the build ends with %v, want %v", err, context.Canceled)
		}
	case <-time.After(20 * time.Second):
		t.Error("the build waits for the other one, interrupted or not")
		other.Close()
		<-built
	}
}
