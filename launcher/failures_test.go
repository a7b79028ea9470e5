package launcher

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

var long = flag.Bool("long", false, "run more of the random jobs")

// fakeHost is a host whose ranks end as drawn. Its clock is right; what it says and hears takes some time.
type fakeHost struct {
	index   int
	latency time.Duration
	ranks   []*fakeRank
	events  chan<- agentEvent
	began   time.Time
	mute    bool // does not answer questions
	hungry  func() bool
	found   hostLook
	got     []syscall.Signal
	mu      sync.Mutex // guards the ranks
	late    sync.WaitGroup
}

// fakeRank ends by itself after some time, or as it does on signals.
type fakeRank struct {
	rank   int
	after  time.Duration // 0: never
	status exitStatus
	deaf   bool          // ignores all but SIGKILL
	slow   time.Duration // what it takes to end on a signal
	code   int           // what it then exits with; 0: the signal ends it
	sent   syscall.Signal
	ended  bool
	endAt  time.Time
}

func (h *fakeHost) start() {
	h.began = time.Now()
	h.late.Go(func() {
		time.Sleep(h.latency)
		e := agentEvent{kind: forksDone, host: h.index}
		for _, r := range h.ranks {
			e.started = append(e.started, startedRank{r.rank, 100 + r.rank, time.Now()})
			if r.after > 0 {
				h.late.Go(func() {
					time.Sleep(r.after)
					h.end(r, r.status)
				})
			}
		}
		h.say(e)
	})
}

// say reports an event.
func (h *fakeHost) say(e agentEvent) {
	time.Sleep(h.latency)
	h.events <- e
}

func (h *fakeHost) end(r *fakeRank, s exitStatus) {
	h.mu.Lock()
	if r.ended {
		h.mu.Unlock()
		return
	}
	r.ended, r.endAt = true, time.Now()
	e := agentEvent{kind: rankExited, host: h.index, rank: r.rank, pid: 100 + r.rank, status: s, sent: r.sent, at: time.Now()}
	h.mu.Unlock()
	h.say(e)
}

func (h *fakeHost) signal(sig syscall.Signal, pick func(int) bool) {
	h.got = append(h.got, sig)
	h.late.Go(func() {
		time.Sleep(h.latency)
		for _, r := range h.ranks {
			if pick != nil && !pick(r.rank) {
				continue
			}
			h.mu.Lock()
			if r.ended {
				h.mu.Unlock()
				continue
			}
			if sig == syscall.SIGTERM || sig == syscall.SIGINT || sig == syscall.SIGKILL {
				r.sent = sig
			}
			h.mu.Unlock()
			switch {
			case sig == syscall.SIGKILL:
				h.late.Go(func() { h.end(r, exitStatus{Signal: sig}) })
			case r.deaf:
			case r.code != 0:
				h.late.Go(func() { time.Sleep(r.slow); h.end(r, exitStatus{Code: r.code}) })
			default:
				h.late.Go(func() { time.Sleep(r.slow); h.end(r, exitStatus{Signal: sig}) })
			}
		}
	})
}

func (h *fakeHost) look(ctx context.Context, _ int) (*hostLook, error) {
	if h.mute {
		<-ctx.Done()
		return nil, errors.New("does not answer")
	}
	return &h.found, nil
}

func (h *fakeHost) meet(meeting) error       { return nil }
func (h *fakeHost) stopForks()               {}
func (h *fakeHost) note(agentEvent)          {}
func (h *fakeHost) refresh()                 {}
func (h *fakeHost) starving() func() bool    { return h.hungry }
func (h *fakeHost) state() jobState          { return jobState{} }
func (h *fakeHost) joined(int) (bool, bool)  { return false, false }
func (h *fakeHost) lose(int, string, string) {}
func (h *fakeHost) adopted()                 {}
func (h *fakeHost) reap() int                { return 0 }
func (h *fakeHost) drained() <-chan struct{} { return closedChan }
func (h *fakeHost) over()                    {}
func (h *fakeHost) close()                   {}

// fakeJob is a job on fake hosts.
type fakeJob struct {
	plan    *Plan
	hosts   []*fakeHost
	signals chan os.Signal
	said    strings.Builder
	do      func() // after a time, if there is something
	at      time.Duration
}

// run is the job's life; in a synctest bubble.
func (j *fakeJob) run(t *testing.T) *Account {
	signals := make(chan os.Signal, 16)
	r := newRunner(j.plan, Options{Signals: signals, Stderr: &j.said, Stdout: io.Discard}, &series{})
	r.events = make(chan agentEvent, eventRoom(len(j.plan.Ranks), len(j.hosts)))
	r.forking = len(j.hosts)
	for i, h := range j.hosts {
		h.events = r.events
		r.hosts[i], r.bringing[i] = h, true
	}
	j.signals = signals
	r.stdin = &stdin{fd: -1}
	// Ranks write nothing: there is nothing to collect.
	r.output = &outputs{cfg: outputConfig{stderr: &j.said}, tails: make([]*stream, len(j.plan.Ranks)), done: closedChan}
	r.acct.Hosts = make([]HostAccount, len(j.hosts))
	if j.do != nil {
		time.AfterFunc(j.at, j.do)
	}
	r.run(t.Context())
	r.acct.End = time.Now()
	r.acct.settle(r.interrupt, r.cannotRun)
	for _, h := range j.hosts {
		h.late.Wait()
	}
	return r.acct
}

func (j *fakeJob) rank(i int) *fakeRank {
	for _, h := range j.hosts {
		for _, r := range h.ranks {
			if r.rank == i {
				return r
			}
		}
	}
	return nil
}

// randomJob draws a job. Ranks end at times of their own, milliseconds apart, so that there is a first.
func randomJob(rnd *rand.Rand) *fakeJob {
	ms := func(n int) time.Duration { return time.Duration(rnd.IntN(n)) * time.Millisecond }
	j := &fakeJob{plan: &Plan{KillGrace: []time.Duration{0, 50 * time.Millisecond, 5 * time.Second}[rnd.IntN(3)]}}
	if rnd.IntN(2) == 0 {
		j.plan.OnFail = OnFailWait
	}
	for i := range 1 + rnd.IntN(4) {
		j.plan.Hosts = append(j.plan.Hosts, PlanHost{Name: fmt.Sprint("h", i)})
		j.hosts = append(j.hosts, &fakeHost{index: i, latency: ms(100)})
	}
	np := len(j.hosts) + rnd.IntN(12)
	// As if all hosts had started at once: the times are those after the slowest.
	slowest := time.Duration(0)
	for _, h := range j.hosts {
		slowest = max(slowest, h.latency)
	}
	when := rnd.Perm(3000)
	for i := range np {
		h := rnd.IntN(len(j.hosts))
		if i < len(j.hosts) {
			h = i
		}
		j.plan.Ranks = append(j.plan.Ranks, PlanRank{Rank: i, Host: h})
		r := &fakeRank{rank: i, after: slowest - j.hosts[h].latency + time.Duration(1+when[i])*time.Millisecond, deaf: rnd.IntN(4) == 0, slow: ms(200), code: rnd.IntN(2) * 77}
		switch rnd.IntN(5) {
		case 0:
			r.status = exitStatus{Code: 1 + rnd.IntN(255)}
		case 1:
			r.status = exitStatus{Signal: []syscall.Signal{syscall.SIGKILL, syscall.SIGSEGV, syscall.SIGABRT, syscall.SIGTERM}[rnd.IntN(4)]}
		}
		j.hosts[h].ranks = append(j.hosts[h].ranks, r)
	}
	return j
}

// What a job's account says depends on nothing but which rank failed first, however long messages take and whatever the ranks do when they are asked
// to end.
func TestRandomFailures(t *testing.T) {
	jobs := 1000
	if *long {
		jobs = 20_000
	}
	failed := 0
	for seed := range jobs {
		synctest.Test(t, func(t *testing.T) {
			j := randomJob(rand.New(rand.NewPCG(5, uint64(seed))))
			// The model: who is first to fail by itself, of all.
			cause, code, at := -1, 0, time.Duration(0)
			for _, h := range j.hosts {
				for _, r := range h.ranks {
					if end := h.latency + r.after; !r.status.ok() && (cause < 0 || end < at) {
						cause, code, at = r.rank, r.status.code(), end
					}
				}
			}
			reason := ReasonDone
			if cause >= 0 {
				failed++
				reason = ReasonFailed
			}
			a := j.run(t)
			if a.Cause != cause || a.Code != code || a.Reason != reason {
				t.Fatalf("seed %d: cause %d, code %d, reason %s; want %d, %d, %s\n%s", seed, a.Cause, a.Code, a.Reason, cause, code, reason, a.Summary())
			}
			for i, r := range a.Ranks {
				f := j.rank(i)
				if !r.done || !r.End.Equal(f.endAt) || (r.Stopped == "") != (f.sent == 0) {
					t.Errorf("seed %d: rank %d: %+v, want its end at %v, sent %v", seed, i, r, f.endAt, f.sent)
				}
				if j.plan.OnFail == OnFailWait && f.sent != 0 {
					t.Errorf("seed %d: rank %d was sent %v", seed, i, f.sent)
				}
			}
			text := a.Summary()
			if want := fmt.Sprintf("gorun: rank %d (host %s, pid %d) ", cause, a.Ranks[max(cause, 0)].Host, 100+cause); cause >= 0 && !strings.HasPrefix(text, want) || cause < 0 && text != "" {
				t.Errorf("seed %d: summary %q, want %q", seed, text, want)
			}
			if end := a.End.Sub(a.Start); cause >= 0 && j.plan.OnFail != OnFailWait && end > at+j.plan.KillGrace+lastWords+time.Second {
				t.Errorf("seed %d: it took %v, the first failure was after %v", seed, end, at)
			}
		})
	}
	if failed < jobs/2 {
		t.Errorf("%d of %d jobs were to fail", failed, jobs)
	}
}

// loseB loses host b, of which nothing is heard any more.
func loseB(j *fakeJob, e chan<- agentEvent) {
	h := j.hosts[1]
	h.mu.Lock()
	h.ranks[0].ended = true
	h.mu.Unlock()
	e <- agentEvent{kind: hostLost, host: 1, err: io.ErrUnexpectedEOF}
}

// Whatever ends a job whose ranks were to go on after a failure: the failure stays the cause.
func TestFailureThenTheRest(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(j *fakeJob, r chan<- agentEvent)
		code int
		rest string
		at   time.Duration // when do is done; the timeout is twice that
	}{
		{"ctrl-c", func(j *fakeJob, _ chan<- agentEvent) { j.signals <- syscall.SIGINT }, 7, "then: interrupted by SIGINT; rank 1 ended by gorun (SIGINT)\n", 5 * time.Second},
		{"timeout", nil, 7, "then: the job has run for 10s; rank 1 ended by gorun (SIGTERM)\n", 5 * time.Second},
		{"reader gone", func(j *fakeJob, e chan<- agentEvent) { e <- agentEvent{kind: sinkFailed, err: syscall.EPIPE} }, 7, "then: nobody reads stdout any more; rank 1 ended by gorun (SIGTERM)\n", 5 * time.Second},
		{"agent gone", func(j *fakeJob, e chan<- agentEvent) { e <- agentEvent{kind: agentFailed, err: io.ErrUnexpectedEOF} }, 7, "then: unexpected EOF; rank 1 ended by gorun (SIGKILL)\n", 5 * time.Second},
		// What failed shortly before may have followed from the loss.
		{"host lost soon", loseB, ExitHostLost,
			"gorun: host b is lost: unexpected EOF\n  then: rank 0 exited with code 7; rank 1 ended by gorun (SIGTERM); rank 2 lost with host b\n", 5 * time.Second},
		{"host lost much later", loseB, 7,
			"then: host b is lost: unexpected EOF; rank 1 ended by gorun (SIGTERM); rank 2 lost with host b\n", time.Minute},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := &fakeJob{plan: &Plan{OnFail: OnFailWait, KillGrace: time.Second, Timeout: 2 * c.at, Hosts: []PlanHost{{Name: "a", Local: true}}, Ranks: []PlanRank{{Rank: 0}, {Rank: 1}}}}
				h := &fakeHost{ranks: []*fakeRank{{rank: 0, after: time.Millisecond, status: exitStatus{Code: 7}}, {rank: 1}}}
				j.hosts = []*fakeHost{h}
				if strings.HasPrefix(c.name, "host lost") {
					j.plan.Hosts, j.plan.Ranks = append(j.plan.Hosts, PlanHost{Name: "b"}), append(j.plan.Ranks, PlanRank{Rank: 2, Host: 1})
					j.hosts = append(j.hosts, &fakeHost{index: 1, ranks: []*fakeRank{{rank: 2}}})
				}
				if c.do != nil {
					j.do, j.at = func() { c.do(j, h.events) }, c.at
				}
				a := j.run(t)
				if a.Code != c.code || c.code == 7 && (a.Cause != 0 || a.Reason != ReasonFailed) || !strings.HasSuffix(a.Summary(), c.rest) {
					t.Errorf("code %d, cause %d, reason %s: %q, want %q", a.Code, a.Cause, a.Reason, a.Summary(), c.rest)
				}
				if want := "gorun: rank 0 exited with code 7; the others go on (--on-fail wait)\n"; !strings.HasPrefix(j.said.String(), want) || c.do != nil && j.said.String() != want {
					t.Errorf("said %q, want %q", j.said.String(), want)
				}
			})
		})
	}
}

// A rank failed before Ctrl-C, which gorun sees first.
func TestFailureBeforeCtrlC(t *testing.T) {
	for _, c := range []struct {
		name   string
		local  bool
		before time.Duration // how long before it ended
		code   int
		rest   string
	}{
		{"elsewhere", false, 10 * time.Millisecond, 7, "then: interrupted by SIGINT; rank 1 ended by gorun (SIGINT)\n"},
		{"elsewhere, after", false, -10 * time.Millisecond, 130, "then: rank 0 exited with code 7; rank 1 ended by gorun (SIGINT)\n"},
		{"here", true, 10 * time.Millisecond, 7, "then: interrupted by SIGINT; rank 1 ended by gorun (SIGINT)\n"},
		{"here, after, and before the signal was sent", true, -10 * time.Millisecond, 130, "then: rank 0 exited with code 7; rank 1 ended by gorun (SIGINT)\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const at = time.Second
				j := &fakeJob{plan: &Plan{KillGrace: time.Second, Hosts: []PlanHost{{Name: "a", Local: c.local}}, Ranks: []PlanRank{{Rank: 0}, {Rank: 1}}}, at: at}
				h := &fakeHost{latency: 100 * time.Millisecond}
				h.ranks = []*fakeRank{{rank: 0, after: at - h.latency - c.before, status: exitStatus{Code: 7}}, {rank: 1}}
				j.hosts = []*fakeHost{h}
				j.do = func() { j.signals <- syscall.SIGINT }
				if a := j.run(t); a.Code != c.code || !strings.HasSuffix(a.Summary(), c.rest) {
					t.Errorf("code %d: %q, want %d, %q", a.Code, a.Summary(), c.code, c.rest)
				}
			})
		})
	}
}

// The warning comes in time before the timeout, once.
func TestTimeoutSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &fakeJob{plan: &Plan{KillGrace: time.Second, Timeout: time.Minute, TimeoutSignal: TimedSignal{syscall.SIGUSR1, 20 * time.Second},
			Hosts: []PlanHost{{Name: "a"}}, Ranks: []PlanRank{{Rank: 0}}}}
		h := &fakeHost{ranks: []*fakeRank{{rank: 0, slow: 5 * time.Second, code: 1}}}
		j.hosts = []*fakeHost{h}
		begin := time.Now()
		a := j.run(t)
		// The fake ends five seconds after any signal.
		if took := h.ranks[0].endAt.Sub(begin); took != 45*time.Second || a.Code != 1 {
			t.Errorf("ended after %v, code %d, want 45s, 1", took, a.Code)
		}
		if want := "gorun: timeout in 20s: SIGUSR1 to the ranks\n"; j.said.String() != want {
			t.Errorf("said %q, want %q", j.said.String(), want)
		}
	})
}

func TestParseTimedSignal(t *testing.T) {
	for _, c := range []struct {
		in   string
		want TimedSignal
		out  string
		err  string
	}{
		{"USR1@30s", TimedSignal{syscall.SIGUSR1, 30 * time.Second}, "USR1@30s", ""},
		{"sigterm@1m", TimedSignal{syscall.SIGTERM, time.Minute}, "TERM@1m0s", ""},
		{"40@5", TimedSignal{40, 5 * time.Second}, "40@5s", ""},
		{"USR1", TimedSignal{}, "", "no signal and time"},
		{"USR3@1s", TimedSignal{}, "", `"USR3" is no signal such as USR1 or TERM`},
		{"0@1s", TimedSignal{}, "", `"0" is no signal`},
		{"65@1s", TimedSignal{}, "", `"65" is no signal`},
		{"KILL@1s", TimedSignal{}, "", "SIGKILL can't be seen by a program"},
		{"USR1@", TimedSignal{}, "", "no duration"},
		{"USR1@0", TimedSignal{}, "", "no time before"},
		{"USR1@-1s", TimedSignal{}, "", "negative"},
	} {
		got, err := ParseTimedSignal(c.in)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want %q", c.in, err, c.err)
			}
			continue
		}
		if err != nil || got != c.want || got.String() != c.out {
			t.Errorf("%s: %v, %v, want %v", c.in, got, err, c.want)
		}
	}
}

func FuzzParseTimedSignal(f *testing.F) {
	f.Add("USR1@30s")
	f.Add("40@5")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseTimedSignal(s)
		if err != nil {
			return
		}
		if again, err := ParseTimedSignal(got.String()); err != nil || again != got {
			t.Errorf("%q is read as %v, and that as %v, %v", s, got, again, err)
		}
	})
}

// Signals that mean gorun's own process, or a terminal, never reach the ranks.
func TestForwardedSignals(t *testing.T) {
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		want := slices.Contains([]syscall.Signal{syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGXCPU, syscall.SIGPWR}, sig) || sig >= 35
		if got := isForwarded(sig); got != want {
			t.Errorf("%v is forwarded: %v, want %v", sig, got, want)
		}
		if EndsJob(sig) && !slices.Contains(Signals(), os.Signal(sig)) {
			t.Errorf("%v is not listened to", sig)
		}
	}
}

// What one place asks for can be turned off in another, and what makes no sense is told.
func TestPlanPolicy(t *testing.T) {
	n := func(n int) *int { return &n }
	warn := TimedSignal{syscall.SIGUSR1, 30 * time.Second}
	for _, c := range []struct {
		name string
		job  Job
		want Plan
		err  string
	}{
		{"nothing", Job{}, Plan{}, ""},
		{"all", Job{Timeout: time.Minute, TimeoutSignal: warn, OnFail: OnFailWait, Restarts: n(2), RestartWindow: time.Hour}, Plan{TimeoutSignal: warn, OnFail: OnFailWait, Restarts: Restarts{2, time.Hour}}, ""},
		{"kill", Job{OnFail: OnFailKill}, Plan{}, ""},
		{"timeout turned off", Job{Timeout: NoTimeout, TimeoutSignal: warn}, Plan{}, ""},
		{"restarts turned off", Job{Restarts: n(0), RestartWindow: time.Hour}, Plan{}, ""},
		{"signal without timeout", Job{TimeoutSignal: warn}, Plan{}, "--timeout-signal USR1@30s: a signal before the timeout needs one: --timeout"},
		{"signal before the start", Job{Timeout: 30 * time.Second, TimeoutSignal: warn}, Plan{}, "--timeout-signal USR1@30s: the timeout is 30s"},
		{"window without restarts", Job{RestartWindow: time.Hour}, Plan{}, "--restart-window 1h0m0s: without restarts; give --restarts N"},
	} {
		var p Plan
		err := c.job.planPolicy(&p)
		if got := fmt.Sprint(err); got != c.err && (err != nil || c.err != "") {
			t.Errorf("%s: error %q, want %q", c.name, got, c.err)
		}
		if c.err == "" && (p.OnFail != c.want.OnFail || p.TimeoutSignal != c.want.TimeoutSignal || p.Restarts != c.want.Restarts) {
			t.Errorf("%s: %+v, want %+v", c.name, p, c.want)
		}
	}
}

// A program that fails at once is started less and less often; after an attempt that went on for a while the count begins anew.
func TestPauseBefore(t *testing.T) {
	quick := 0
	for i, c := range []struct{ took, want time.Duration }{
		{time.Second, 0}, {0, 100 * time.Millisecond}, {9 * time.Second, 200 * time.Millisecond}, {10 * time.Second, 0}, {time.Second, 100 * time.Millisecond}, {0, 200 * time.Millisecond},
		{0, 400 * time.Millisecond}, {0, 800 * time.Millisecond}, {0, 1600 * time.Millisecond}, {0, 3200 * time.Millisecond}, {0, 6400 * time.Millisecond}, {0, 10 * time.Second}, {0, 10 * time.Second},
	} {
		if got := pauseBefore(&quick, c.took); got != c.want {
			t.Errorf("attempt %d, which took %v: pause of %v, want %v", i, c.took, got, c.want)
		}
	}
	quick = 1 << 30
	if got := pauseBefore(&quick, 0); got != lastPause {
		t.Errorf("pause of %v, want %v", got, lastPause)
	}
}

// A signal that ends the job, and the caller's context, end the pause.
func TestRest(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	signals := make(chan os.Signal, 2)
	if !rest(ctx, Options{}, 0) || !rest(ctx, Options{}, time.Nanosecond) {
		t.Error("a pause that is over")
	}
	signals <- syscall.SIGUSR1
	signals <- syscall.SIGTERM
	if rest(ctx, Options{Signals: signals}, time.Hour) {
		t.Error("SIGTERM does not end a pause of an hour, or says to go on")
	}
	cancel()
	if rest(ctx, Options{}, time.Hour) {
		t.Error("after the context's end it says to go on")
	}
}

// The caller's context ends a restart's message that nobody reads, too.
func TestTellEndsWithContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	defer r.Close()
	cancel()
	told := make(chan bool, 1)
	go func() { told <- tell(ctx, Options{Stderr: w}, "text") }()
	select {
	case yes := <-told:
		if yes {
			t.Error("what nobody has read was told")
		}
	case <-time.After(20 * time.Second):
		t.Error("it is waited for a reader after the context's end")
	}
}
