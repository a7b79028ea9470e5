package launcher

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// holdFork holds the forking thread between the fork of rank 1 and its watch, until there is a file "release" in dir.
func holdFork(dir string) func(rank int) {
	if dir == "" {
		return nil
	}
	return func(rank int) {
		if rank != 1 {
			return
		}
		for end := time.Now().Add(time.Minute); !hasFile(dir, "release") && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
	}
}

func hasFile(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

// heldJob is a job of two ranks that end when they are told to, rank R with code 3+R. Rank 1 is not watched until release.
type heldJob struct {
	t       *testing.T
	dir     string
	said    *sink
	signals chan os.Signal
	done    chan *Account
}

func newHeldJob(t *testing.T, remote bool) *heldJob {
	j := &heldJob{t: t, dir: t.TempDir(), said: &sink{}, signals: make(chan os.Signal, 1), done: make(chan *Account, 1)}
	script := strings.ReplaceAll(`R=$GORUN_RANK; trap ': >DIR/term.$R' TERM; echo $$ >DIR/tmp.$R; mv DIR/tmp.$R DIR/pid.$R
until [ -e DIR/end.$R ]; do sleep 0.01; done; exit $((3 + R))`, "DIR", j.dir)
	job := Job{OnFail: OnFailWait, KillGrace: time.Minute}
	o := Options{Stderr: j.said, Signals: j.signals, onFork: holdFork(j.dir)}
	host := "here:2"
	if remote {
		host, o = "a:2", remoteOptions(t, o)
		t.Setenv("GORUN_TEST_HOLD", j.dir)
	}
	p := planOn(t, job, script, host)
	go func() { j.done <- Run(t.Context(), p, o) }()
	late := time.After(time.Minute) // gorun may have to be sent first
	for tick := time.NewTicker(time.Millisecond); !hasFile(j.dir, "pid.0") || !hasFile(j.dir, "pid.1"); {
		select {
		case a := <-j.done:
			t.Fatalf("code %d: %s%s", a.Code, a.Summary(), j.said.text())
		case <-late:
			t.Fatalf("the ranks do not run within a minute: %s", j.said.text())
		case <-tick.C:
		}
	}
	return j
}

func (j *heldJob) tell(file string) {
	j.t.Helper()
	if err := os.WriteFile(filepath.Join(j.dir, file), nil, 0o600); err != nil {
		j.t.Fatal(err)
	}
}

// end ends a rank, and returns when its process has ended.
func (j *heldJob) end(rank int) {
	j.t.Helper()
	text, err := os.ReadFile(filepath.Join(j.dir, fmt.Sprint("pid.", rank)))
	if err != nil {
		j.t.Fatal(err)
	}
	j.tell(fmt.Sprint("end.", rank))
	eventually(j.t, fmt.Sprintf("rank %d ends", rank), func() bool {
		stat, err := os.ReadFile("/proc/" + strings.TrimSpace(string(text)) + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
}

// endWatched ends rank 0, and returns when the job knows.
func (j *heldJob) endWatched() {
	j.t.Helper()
	j.end(0)
	eventually(j.t, "gorun says that rank 0 has ended", func() bool { return strings.Contains(j.said.text(), "rank 0 exited with code 3; the others go on") })
}

// interrupt sends gorun a signal, and returns when rank 0 has got it.
func (j *heldJob) interrupt() {
	j.t.Helper()
	j.signals <- syscall.SIGTERM
	eventually(j.t, "rank 0 gets the signal", func() bool { return hasFile(j.dir, "term.0") })
}

// A rank ends before it is watched: it is the cause if it ended before another one, or before a signal to gorun, and is not if it ended after.
func TestEndBeforeWatch(t *testing.T) {
	for _, c := range []struct {
		name        string
		do          func(j *heldJob)
		code, cause int
		reason      Reason
		hosts       bool // also with an agent
	}{
		{"then another", func(j *heldJob) { j.end(1); j.endWatched() }, 4, 1, ReasonFailed, true},
		{"after another", func(j *heldJob) { j.endWatched(); j.end(1) }, 3, 0, ReasonFailed, true},
		{"then a signal", func(j *heldJob) { j.end(1); j.interrupt() }, 4, 1, ReasonFailed, false},
		{"after a signal", func(j *heldJob) { j.interrupt(); j.end(1) }, 143, -1, ReasonSignal, false},
	} {
		for _, remote := range []bool{false, true} {
			if remote && !c.hosts {
				continue
			}
			name, times := c.name, 5
			if remote {
				name, times = name+", on a host", 1
			}
			if *long {
				times = 100
			}
			t.Run(name, func(t *testing.T) {
				for i := range times {
					j := newHeldJob(t, remote)
					c.do(j)
					j.tell("release")
					j.tell("end.0")
					a := <-j.done
					if a.Code != c.code || a.Cause != c.cause || a.Reason != c.reason {
						t.Errorf("run %d of %d: code %d, cause %d, reason %s; want %d, %d, %s: %s", i, times, a.Code, a.Cause, a.Reason, c.code, c.cause, c.reason, a.Summary())
					}
					nothingLeft(t, a.Job)
				}
			})
		}
	}
}

// heldAgent is an agent of two ranks that end when they are told to.
func heldAgent(t *testing.T, dir string, onFork func(rank int)) (a *agent, events chan agentEvent, end func()) {
	cfg := agentConfig{job: keeper.Job{ID: "end-before-watch"}, onFork: onFork}
	for rank := range 2 {
		script := fmt.Sprintf("echo $$ >tmp.%d; mv tmp.%[1]d pid.%[1]d; until [ -e end.%[1]d ]; do sleep 0.01; done", rank)
		cfg.ranks = append(cfg.ranks, agentRank{rank: rank, path: "/bin/sh", argv: []string{"sh", "-c", script}, dir: dir, env: os.Environ()})
	}
	return testAgent(t, cfg)
}

// testAgent is an agent of ranks without input, whose output goes nowhere. end is for when they have ended.
func testAgent(t *testing.T, cfg agentConfig) (a *agent, events chan agentEvent, end func()) {
	t.Helper()
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { null.Close() })
	for i := range cfg.ranks {
		cfg.ranks[i].stdin = int(null.Fd())
	}
	output, err := newOutputs(outputConfig{stdout: &sink{}, stderr: &sink{}}, len(cfg.ranks), nil)
	if err != nil {
		t.Fatal(err)
	}
	events = make(chan agentEvent, eventRoom(len(cfg.ranks), 1))
	cfg.events, cfg.output = events, output
	if a, err = newAgent(cfg); err != nil {
		t.Fatal(err)
	}
	return a, events, func() {
		a.stopForks() // where a test has failed
		a.reap()
		<-output.finish()
		a.close()
		nothingLeft(t, "")
	}
}

// sawEnd is when rank 1 was first seen to have ended; zero: it was not.
func (a *agent) sawEnd() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.gone[1]
}

// endAt is when a rank ended, as is reported.
func endAt(t *testing.T, events <-chan agentEvent, rank int) time.Time {
	t.Helper()
	for {
		select {
		case e := <-events:
			if e.kind == rankExited && e.rank == rank {
				return e.at
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("rank %d does not end", rank)
		}
	}
}

// Nobody has a reason to look, and the end of a rank that is not watched yet is seen all the same.
func TestEndIsSeenBeforeWatch(t *testing.T) {
	j := &heldJob{t: t, dir: t.TempDir()}
	a, events, end := heldAgent(t, j.dir, holdFork(j.dir))
	a.start()
	eventually(t, "rank 1 runs", func() bool { return hasFile(j.dir, "pid.1") })
	before := time.Now()
	j.end(1)
	eventually(t, "the end is seen", func() bool { return !a.sawEnd().IsZero() })
	seen := a.sawEnd()
	if seen.Before(before) {
		t.Errorf("the end is of %v, the rank was told to end at %v", seen, before)
	}
	j.tell("release")
	if at := endAt(t, events, 1); !at.Equal(seen) {
		t.Errorf("rank 1 ended at %v, want %v, when that was seen", at, seen)
	}
	j.tell("end.0")
	endAt(t, events, 0)
	end()
}

// Another child of the forking thread ends while a rank is not watched yet: that is not the rank's end.
func TestAnotherEndBeforeWatch(t *testing.T) {
	j := &heldJob{t: t, dir: t.TempDir()}
	var a *agent
	var other atomic.Int64
	a, events, end := heldAgent(t, j.dir, func(rank int) {
		if rank != 1 {
			return
		}
		pid, err := syscall.ForkExec("/bin/true", []string{"true"}, nil)
		if err != nil {
			t.Error(err)
			return
		}
		other.Store(int64(pid))
		for end := time.Now().Add(20 * time.Second); a.sawEnd().IsZero(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Error("the end of another child was not seen within 20 s")
				return
			}
		}
	})
	a.start()
	eventually(t, "all ranks are watched", a.forked.Load)
	if seen := a.sawEnd(); !seen.IsZero() {
		t.Errorf("rank 1 was seen to end at %v; it runs", seen)
	}
	before := time.Now()
	j.tell("end.1")
	if at := endAt(t, events, 1); at.Before(before) {
		t.Errorf("rank 1 ended at %v, want a time after %v", at, before)
	}
	syscall.Wait4(int(other.Load()), nil, 0, nil)
	j.tell("end.0")
	endAt(t, events, 0)
	end()
}
