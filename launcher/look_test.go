package launcher

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

// lookJob is one of two hosts with a rank each that end on signals only.
func lookJob() *fakeJob {
	j := &fakeJob{plan: &Plan{KillGrace: time.Minute, Timeout: 10 * time.Second, Hosts: []PlanHost{{Name: "a"}, {Name: "b"}}, Ranks: []PlanRank{{Rank: 0}, {Rank: 1, Host: 1}}}}
	j.hosts = []*fakeHost{{ranks: []*fakeRank{{rank: 0}}}, {index: 1, ranks: []*fakeRank{{rank: 1}}}}
	j.hosts[0].found = hostLook{
		standings: []node.Standing{{Rank: 0, Waits: []node.Wait{{What: "barrier #2 of group world", For: 4 * time.Second, Group: "g"}}}},
		ranks:     []RankStacks{{Rank: 0, Go: []stacks.Goroutine{{ID: 1, State: "select", Frames: []stacks.Frame{{Func: "main.wait", Line: "m/main.go:3"}}}}}},
	}
	j.hosts[1].found = hostLook{standings: []node.Standing{{Rank: 1}}, ranks: []RankStacks{{Rank: 1, Processes: []stacks.Process{{PID: 4, Command: "p", Threads: []stacks.Thread{{State: "running"}}}}}}}
	return j
}

// At the timeout people hear what the ranks do before these hear of it; a host that does not answer holds nothing up for long.
func TestLookAtTimeout(t *testing.T) {
	const all = `gorun: what the ranks do after 10s:
  rank 1 of 2 (host b) has not entered barrier #2 of group world: it waits in nothing of gorun; rank 0 waits for it since 4.0 s
  rank 0 (host a): main goroutine, select
    main.wait (m/main.go:3)
  rank 1 (host b): p, running
`
	for _, c := range []struct {
		name string
		mute bool
		sig  syscall.Signal // to gorun, one second after the timeout
		end  time.Duration
		said string
	}{
		{"all answer", false, 0, 10 * time.Second, all},
		{"one does not", true, 0, 13 * time.Second, `gorun: what the ranks do after 10s:
  rank 1 of 2 (host b) has not entered barrier #2 of group world: it has sent no word; rank 0 waits for it since 4.0 s
  host b does not answer
  rank 0 (host a): main goroutine, select
    main.wait (m/main.go:3)
`},
		{"ctrl-c", true, syscall.SIGINT, 11 * time.Second, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := lookJob()
				j.hosts[1].mute = c.mute
				if c.sig != 0 {
					j.do, j.at = func() { j.signals <- c.sig }, 11*time.Second
				}
				a := j.run(t)
				if end := a.End.Sub(a.Start); a.Code != ExitTimeout || end != c.end {
					t.Errorf("code %d after %v, want %v", a.Code, end, c.end)
				}
				if d := cmp.Diff(j.said.String(), c.said); d != "" {
					t.Error(d)
				}
				if c.said == "" {
					return
				}
				var back struct {
					Hang struct {
						After time.Duration `json:"after_ns"`
						Lines []string
						Ranks []struct{ Rank int }
					}
				}
				text, err := json.Marshal(a)
				if err == nil {
					err = json.Unmarshal(text, &back)
				}
				lines := strings.Split(strings.TrimSuffix(c.said, "\n"), "\n  ")[1:]
				if d := cmp.Diff(back.Hang.Lines, lines); err != nil || d != "" || back.Hang.After != 10*time.Second || len(back.Hang.Ranks) == 0 {
					t.Errorf("in the report: %+v, %v, %s", back, err, d)
				}
			})
		})
	}
}

// A timeout that comes before all ranks are started says so.
func TestLookBeforeRanksAreStarted(t *testing.T) {
	slow, quick := 20*time.Second, time.Duration(0)
	for _, c := range []struct {
		name    string
		latency [2]time.Duration // of the hosts
		found   [2]bool          // a rank is found there
		said    string
	}{
		{"none", [2]time.Duration{slow, slow}, [2]bool{}, "  no rank has been started yet\n"},
		{"one host's", [2]time.Duration{slow, quick}, [2]bool{false, true}, "  1 of 2 ranks have been started so far\n  rank 1 (host b): p, running\n"},
		{"one host's, which has ended", [2]time.Duration{slow, quick}, [2]bool{}, "  1 of 2 ranks have been started so far\n"},
		{"one whose host has not said so", [2]time.Duration{slow, slow}, [2]bool{false, true}, "  1 of 2 ranks have been started so far\n  rank 1 (host b): p, running\n"},
		{"all, of which nobody has said so", [2]time.Duration{slow, slow}, [2]bool{true, true}, "  rank 0 (host a): main goroutine, select\n    main.wait (m/main.go:3)\n  rank 1 (host b): p, running\n"},
		{"all, and all have ended", [2]time.Duration{quick, quick}, [2]bool{}, "  no rank runs any more\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := lookJob()
				for i, h := range j.hosts {
					h.latency = c.latency[i]
					if h.found.standings = nil; !c.found[i] {
						h.found.ranks = nil
					}
				}
				if a := j.run(t); a.Code != ExitTimeout {
					t.Errorf("code %d", a.Code)
				}
				if c.latency[0] > 0 { // the grace has begun, and host a has not said yet which ranks it started
					c.said += "gorun: the job has run for 10s; waiting up to 1m0s (--kill-grace) for ranks that are being started to end\n"
				}
				if d := cmp.Diff(j.said.String(), "gorun: what the ranks do after 10s:\n"+c.said); d != "" {
					t.Errorf("-got +want:\n%s", d)
				}
			})
		})
	}
}

// Each SIGQUIT reaches the ranks, after what they do was told; SIGIO does not.
func TestLookOnSignal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := lookJob()
		for _, h := range j.hosts {
			h.mute = true
			h.ranks[0].deaf = true
		}
		j.plan.Timeout, j.plan.KillGrace = time.Minute, time.Second
		j.at, j.do = time.Second, func() {
			j.signals <- syscall.SIGIO
			time.AfterFunc(4*time.Second, func() {
				for _, sig := range []os.Signal{syscall.SIGQUIT, syscall.SIGIO, syscall.SIGQUIT} {
					j.signals <- sig
				}
			})
			time.AfterFunc(6*time.Second, func() { j.signals <- syscall.SIGUSR1 })
		}
		a := j.run(t)
		if a.Code != ExitTimeout {
			t.Errorf("code %d", a.Code)
		}
		for _, h := range j.hosts {
			if want := []syscall.Signal{syscall.SIGUSR1, syscall.SIGQUIT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGKILL}; !slices.Equal(h.got, want) {
				t.Errorf("the ranks got %v, want %v", h.got, want)
			}
		}
		for _, after := range []string{"1s", "5s", "1m0s"} {
			if n := strings.Count(j.said.String(), fmt.Sprintf("what the ranks do after %s:\n", after)); n != 1 {
				t.Errorf("what they do after %s was told %d times:\n%s", after, n, j.said.String())
			}
		}
	})
}

// What is odd about many ranks is told in short lines.
func TestLookNamesManyRanks(t *testing.T) {
	r := &runner{plan: &Plan{Hosts: []PlanHost{{Name: "a"}}}, acct: &Account{}}
	found := &hostLook{}
	for i := range 4096 {
		r.plan.Ranks = append(r.plan.Ranks, PlanRank{Rank: i})
		found.ranks = append(found.ranks, RankStacks{Rank: i, Processes: []stacks.Process{{Command: "p", Threads: []stacks.Thread{{State: []string{"running", "stopped"}[i%2]}}}}})
	}
	h, whole := r.hang(&looked{hosts: []*hostLook{found}, errs: make([]error, 1)})
	if len(h.Lines) != 2 || len(whole) != 2 || !strings.HasPrefix(h.Lines[0], "2048 ranks 0,2,4,6,") || !strings.HasSuffix(h.Lines[1], ",...: p, stopped") || len(h.Lines[0]) > 200 {
		t.Errorf("%q", h.Lines)
	}
}

// Whatever an agent says of its ranks, gorun does not fall over, nor tell it of others.
func FuzzLooked(f *testing.F) {
	j := lookJob()
	for _, standings := range []string{
		`[{"Rank":1,"Waits":[{"What":"x","For":5,"Group":"g","Members":[[0,2]]}],"Seen":[{"Comm":7,"Name":"w","Last":3}]},{"Rank":1},{"Rank":-1}]`,
		`[{"Rank":1,"Waits":[{"What":"x","Members":[[-5,9223372036854775807]]},{"Comm":7,"Seq":1,"What":""}]}]`,
		`[{"Rank":0,"State":"ended"}]`, `{}`,
	} {
		for _, ranks := range []string{`[{"rank":1,"processes":[{"pid":1,"threads":[]},{"threads":[{}]}],"goroutines":[{}]},{"rank":1},{"rank":7}]`, `null`} {
			f.Add([]byte(standings), []byte(ranks))
		}
	}
	f.Fuzz(func(t *testing.T, standings, ranks []byte) {
		m := &agentwire.Looked{Standings: standings}
		if json.Unmarshal(ranks, &m.Ranks) != nil {
			return
		}
		found, err := fromAgent(m, []int{1}, 2)
		if err != nil {
			return
		}
		if len(found.ranks) > 1 || len(found.standings) > 1 {
			t.Errorf("of one rank: %+v", found)
		}
		r := &runner{plan: j.plan, acct: &Account{}}
		r.hang(&looked{hosts: []*hostLook{{}, found}, errs: make([]error, 2)})
	})
}
