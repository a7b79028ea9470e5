package launcher

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// maxRestarts bounds Job.Restarts: a job that fails that often will not end well.
const maxRestarts = 1 << 20

// Run carries a plan out and returns when every rank has ended and all output has been written. Cancelling ctx
// interrupts the job as SIGTERM does. Nothing of the job is left then, on any path.
//
// A job that may be restarted is carried out again, as a whole and with the same ranks in the same places, when a rank failed or a host was lost: not
// when it could not be started, was interrupted, its time was over, or nobody takes its output. The account is that of the last attempt, and holds those before.
func Run(ctx context.Context, p *Plan, o Options) *Account {
	if o.Stdout == nil {
		o.Stdout = io.Discard
	}
	if o.Stderr == nil {
		o.Stderr = io.Discard
	}
	if o.start == nil {
		o.start = startNode
	}
	plan := *p
	plan.Programs = slices.Clone(p.Programs) // the build sets their paths, which are good for this run only
	s := &series{id: newID()}
	defer s.giveBack()
	var past attempts
	failed := failures{restarts: p.Restarts}
	quick := 0
	for k := 0; ; k++ {
		r := newRunner(plan.attempt(k, s.id), o, s)
		r.again = k > 0
		acct := r.carryOut(ctx)
		plan = *r.plan
		acct.Restarts = k
		past.tell(acct)
		fails := acct.Reason == ReasonFailed || acct.Reason == ReasonHostLost
		if fails {
			failed.add(acct.End)
		}
		acct.used = failed.used(k, fails)
		if !fails || r.asked || r.over || ctx.Err() != nil || !failed.mayRestart() {
			return acct
		}
		text := acct.attemptSummary() + fmt.Sprintf("gorun: restart %d\n", k+1)
		if p.Restarts.Window == 0 {
			text = strings.TrimSuffix(text, "\n") + fmt.Sprintf(" of %d\n", p.Restarts.N)
		}
		if !tell(ctx, o, text) || !rest(ctx, o, pauseBefore(&quick, acct.End.Sub(acct.Start))) {
			return acct
		}
		past.add(acct)
	}
}

// tell writes text to stderr. A reader that is slow is waited for, until a signal or ctx says that the job is to end: then it is false.
func tell(ctx context.Context, o Options, text string) bool {
	done := make(chan struct{})
	go func() {
		io.WriteString(o.Stderr, text)
		close(done)
	}()
	return await(ctx, o, done)
}

// await waits for something, until a signal or ctx says that the job is to end: then it is false.
func await[T any](ctx context.Context, o Options, done <-chan T) bool {
	for {
		select {
		case <-done:
			return true
		case <-ctx.Done():
			return false
		case s := <-o.Signals:
			if EndsJob(s) {
				return false
			}
		}
	}
}

const (
	// An attempt that fails sooner than steady was not of much use: after the first such the next waits for firstPause, then twice as long each time up to
	// lastPause. A program that cannot run does not keep the hosts busy, and what it lacked may come back.
	steady     = 10 * time.Second
	firstPause = 100 * time.Millisecond
	lastPause  = 10 * time.Second
)

// pauseBefore is how long to wait before the next attempt, after one that took that long. quick counts those that failed soon in a row; the first has no pause.
func pauseBefore(quick *int, took time.Duration) time.Duration {
	if took >= steady {
		*quick = 0
	}
	*quick++
	if *quick == 1 {
		return 0
	}
	return min(firstPause<<min(*quick-2, 20), lastPause)
}

// rest waits, unless a signal says that the job is to end: then it is false.
func rest(ctx context.Context, o Options, pause time.Duration) bool {
	return pause == 0 || await(ctx, o, time.After(pause))
}

// Restarts says how often a job is started again after a failure.
type Restarts struct {
	N      int           `json:"n"`
	Window time.Duration `json:"window_ns,omitempty"` // only failures of that much time count; 0: all
}

// series is what attempts of one job have in common.
type series struct {
	id        string     // the run's, which PyTorch's programs get: checkpoints and logs go by it
	deadline  time.Time  // when the job's time is over; zero: no rank has been started yet
	outputDir *outputDir // nil: none, or not yet
	midLine   bool       // stdout stands in the middle of a line that an attempt has left
	release   []func()   // what to give back after the last
}

func (s *series) giveBack() {
	for i := len(s.release) - 1; i >= 0; i-- {
		s.release[i]()
	}
}

// runIDVar is the id of a run, the same in all its attempts, where the user has not chosen one.
const runIDVar = "TORCHELASTIC_RUN_ID"

// attempt is the plan for the k-th restart of a run that has an id; 0 is the first attempt.
func (p *Plan) attempt(k int, id string) *Plan {
	q := *p
	q.Ranks = slices.Clone(p.Ranks)
	for i := range q.Ranks {
		env := slices.Clone(q.Ranks[i].Env)
		if _, there := lookup(env, runIDVar); !there {
			env = append(env, runIDVar+"="+id)
		}
		for n, kv := range env {
			for _, name := range []string{"GORUN_RESTART", "TORCHELASTIC_RESTART_COUNT"} {
				if isVar(kv, name) {
					env[n] = name + "=" + strconv.Itoa(k)
				}
			}
		}
		q.Ranks[i].Env = env
	}
	return &q
}

// newID is an id that no other run or job has.
func newID() string {
	var id [8]byte
	rand.Read(id[:])
	return hex.EncodeToString(id[:])
}

// newRunner makes the runner of an attempt. Its plan is its own.
func newRunner(p *Plan, o Options, s *series) *runner {
	r := &runner{plan: p, o: o, series: s, failed: -1, acct: &Account{Start: time.Now(), Cause: -1, Reason: ReasonDone, merged: p.Merge}}
	r.hosts, r.bringing, r.lost = make([]hostAgent, len(p.Hosts)), make([]bool, len(p.Hosts)), make([]bool, len(p.Hosts))
	r.places = make([]*HostPlace, len(p.Hosts))
	for _, pr := range p.Ranks {
		a := RankAccount{Rank: pr.Rank, Host: p.Hosts[pr.Host].Name}
		if len(p.Apps) > 1 {
			a.Program = p.program(&pr).Name
		}
		r.acct.Ranks = append(r.acct.Ranks, a)
	}
	return r
}

// carryOut is an attempt from beginning to end.
func (r *runner) carryOut(ctx context.Context) *Account {
	if r.o.OwnProcess && !signal.Ignored(syscall.SIGTSTP) {
		r.suspends = make(chan os.Signal, 1)
		signal.Notify(r.suspends, syscall.SIGTSTP)
		defer signal.Stop(r.suspends)
	}
	if r.o.OwnProcess {
		r.resumes = make(chan os.Signal, 1)
		signal.Notify(r.resumes, syscall.SIGCONT)
		defer signal.Stop(r.resumes)
	}
	if err := r.prepare(ctx); err != nil {
		r.internal(err)
		r.closeHosts()
		r.giveBack()
	} else {
		r.run(ctx)
		r.wind()
	}
	r.acct.End = time.Now()
	r.acct.settle(r.interrupt, r.cannotRun)
	r.acct.unstaged = r.unstaged()
	return r.acct
}
