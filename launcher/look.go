package launcher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
	"github.com/gorun-dev/gorun/launcher/internal/stacks"
	"github.com/gorun-dev/gorun/rankenv"
)

const (
	// lookBound is how long a host takes to find out what its ranks do.
	lookBound = 2 * time.Second
	// answerBound is how much of that the ranks have to tell of themselves: those that do not are looked at from outside.
	answerBound = lookBound * 3 / 4
	// lookWait is how long all hosts are waited for.
	lookWait = lookBound + time.Second
	// lookTotal and lookRank bound what is told of all ranks and of one, in bytes.
	lookTotal = 32 << 20
	lookRank  = 256 << 10
	// lookStandings bounds what an agent tells of what its ranks wait in, in bytes: with lookTotal that is less than a message may have.
	lookStandings = 16 << 20
	// lookRanks is how long a list of ranks may be, in bytes.
	lookRanks = 120
	// lookProcesses is how many processes of a rank are looked at.
	lookProcesses = 16
)

// RankStacks is what a rank does: its goroutines where it joined the job and answers, else its processes.
type RankStacks = stacks.Rank

// Hang says what the ranks did when it was asked for, or when the job's time was over.
type Hang struct {
	After time.Duration `json:"after_ns"` // from Account.Start
	Lines []string      `json:"lines"`    // for a person
	Ranks []RankStacks  `json:"ranks"`    // those that ran and could be looked at
}

// hostLook is what the ranks of a host do.
type hostLook struct {
	standings []node.Standing
	ranks     []RankStacks
}

// look is at the ranks of this host that run.
func (h *localHost) look(ctx context.Context, size int) (*hostLook, error) {
	found := &hostLook{standings: h.node.Standings()}
	joined := map[int]bool{}
	for i := range found.standings {
		s := &found.standings[i]
		if joined[s.Rank] = s.State == ""; !joined[s.Rank] {
			h.standing(s)
		}
	}
	answers, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	dumps := h.node.Stacks(answers)
	// In a goroutine of its own: the kernel may hold up whoever reads of a process that hangs in it.
	seen := make(chan []RankStacks, 1)
	go func() { seen <- h.agent.look(ctx, dumps, joined, size) }()
	select {
	case found.ranks = <-seen:
		return found, nil
	case <-ctx.Done():
		select {
		case found.ranks = <-seen:
		case <-time.After(lookBound / 8): // it ends with ctx
			return found, errors.New("its processes cannot be looked at")
		}
		return found, nil
	}
}

// look makes of the dumps of some ranks, and of what is seen of the processes of the others, what they do. Ranks that have ended, or were not started, are left out.
func (a *agent) look(ctx context.Context, dumps map[int][]byte, joined map[int]bool, size int) []RankStacks {
	processes := map[int][]int{} // by session
	for _, p := range keeper.Processes() {
		if p.State != 'Z' && p.State != 'X' {
			processes[p.Session] = append(processes[p.Session], p.PID)
		}
	}
	var all []RankStacks
	for i := range a.cfg.ranks {
		if ctx.Err() != nil {
			break
		}
		pid, _ := a.started(i)
		own := processes[pid]
		slices.Sort(own)
		first := slices.Index(own, pid)
		if pid == 0 || first < 0 && len(processes) > 0 {
			continue
		}
		r := RankStacks{Rank: a.cfg.ranks[i].rank}
		if r.Go = stacks.ParseGo(dumps[r.Rank]); len(r.Go) == 0 {
			if len(own) > 0 {
				own[0], own[first] = own[first], own[0]
				slices.Sort(own[1:])
			}
			for _, pid := range own[:min(len(own), lookProcesses)] {
				if p, err := stacks.Look("/proc", pid); err == nil {
					r.Processes = append(r.Processes, p)
				}
			}
			switch {
			case joined[r.Rank]:
				r.Err = "does not answer the question for its goroutines"
			case len(r.Processes) == 0:
				r.Err = "its processes cannot be looked at"
			}
		}
		r.Fit(size)
		all = append(all, r)
	}
	return all
}

// look asks the agent.
func (h *remoteHost) look(ctx context.Context, size int) (*hostLook, error) {
	answer := make(chan *agentwire.Looked, 1)
	h.mu.Lock()
	h.looks++
	h.looked = answer
	ask := &agentwire.Look{ID: h.looks, Within: lookBound, Size: size}
	h.mu.Unlock()
	h.mux.Send(&agentwire.Message{Look: ask})
	var m *agentwire.Looked
	select {
	case m = <-answer:
	case <-h.gone:
		return nil, errors.New("is lost")
	case <-ctx.Done():
		return nil, errors.New("does not answer")
	}
	return fromAgent(m, h.ranks, h.size)
}

// fromAgent reads an answer, and leaves out what there cannot be. ranks are those of its host, in order, size is that of the job.
func fromAgent(m *agentwire.Looked, ranks []int, size int) (*hostLook, error) {
	var standings []node.Standing
	if err := json.Unmarshal(m.Standings, &standings); err != nil {
		return nil, fmt.Errorf("does not say what its ranks wait in: %w", err)
	}
	found := &hostLook{}
	told := map[int]bool{}
	for _, s := range standings {
		if _, its := slices.BinarySearch(ranks, s.Rank); !its || told[s.Rank] {
			continue
		}
		told[s.Rank] = true
		s.Waits = slices.DeleteFunc(s.Waits, func(w node.Wait) bool {
			for _, run := range w.Members {
				if run[0] < 0 || run[0] >= size || run[1] < 1 || run[1] > size {
					return true
				}
			}
			return false
		})
		found.standings = append(found.standings, s)
	}
	clear(told)
	for _, r := range m.Ranks {
		if _, its := slices.BinarySearch(ranks, r.Rank); !its || told[r.Rank] {
			continue
		}
		told[r.Rank] = true
		r.Processes = slices.DeleteFunc(r.Processes, func(p stacks.Process) bool { return len(p.Threads) == 0 })
		found.ranks = append(found.ranks, r)
	}
	return found, nil
}

// look answers gorun, and does not wait for it.
func (s *agentServer) look(m *agentwire.Look) {
	ctx, cancel := context.WithTimeout(s.looking, min(m.Within, lookBound))
	s.looks.Go(func() {
		defer cancel()
		found, err := s.host.look(ctx, m.Size)
		if err != nil {
			s.mux.Send(&agentwire.Message{Log: &agentwire.Text{Text: err.Error()}})
		}
		standings := []byte{'['}
		for i, st := range found.standings {
			text, err := json.Marshal(st)
			if err != nil || len(standings)+len(text) > lookStandings {
				break
			}
			if i > 0 {
				standings = append(standings, ',')
			}
			standings = append(standings, text...)
		}
		standings = append(standings, ']')
		s.mux.Send(&agentwire.Message{Looked: &agentwire.Looked{ID: m.ID, Standings: standings, Ranks: found.ranks}})
	})
}

// looking is a look at the ranks of all hosts that is on its way.
type looking struct {
	cancel context.CancelFunc
	found  chan *looked // has room for it
	then   []func()     // what waits for it
}

// looked is what came of it, by host.
type looked struct {
	after time.Duration
	hosts []*hostLook
	errs  []error
}

// look tells people what the ranks do, without holding the job up, and then does something else.
func (r *runner) look(then func()) {
	if r.looking != nil {
		r.looking.then = append(r.looking.then, then)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookWait)
	l := &looking{cancel: cancel, found: make(chan *looked, 1), then: []func(){then}}
	r.looking, r.found = l, l.found
	all := &looked{after: time.Since(r.acct.Start), hosts: make([]*hostLook, len(r.hosts)), errs: make([]error, len(r.hosts))}
	size := min(lookRank, lookTotal/len(r.plan.Ranks))
	lost := slices.Clone(r.lost)
	go func() {
		r.eachHost(func(i int, h hostAgent) {
			if !lost[i] {
				all.hosts[i], all.errs[i] = h.look(ctx, size)
			}
		})
		l.found <- all
	}()
}

// tellLook shows what was found, and goes on with what waits for it.
func (r *runner) tellLook(all *looked) {
	l := r.looking
	r.looking, r.found = nil, nil
	l.cancel()
	hang, whole := r.hang(all)
	r.acct.Hang = hang
	age := shortTime(hang.After - r.acct.Prepared)
	if age > time.Second {
		age = age.Round(100 * time.Millisecond)
	}
	title := fmt.Sprintf("what the ranks do after %v:", age)
	lines := hang.Lines
	if d := r.series.outputDir; d != nil {
		file, err := d.writeStacks(title, whole)
		lines = append(slices.Clone(lines), "whole stacks: "+file)
		if err != nil {
			lines[len(lines)-1] = err.Error()
		}
	}
	r.say("%s\n  %s", title, strings.Join(lines, "\n  "))
	for _, then := range l.then {
		then()
	}
}

// dropLook waits for the end of a look that nobody needs any more.
func (r *runner) dropLook() {
	if r.looking != nil {
		r.looking.cancel()
		<-r.found
		r.looking, r.found = nil, nil
	}
}

// hang merges what the hosts found. whole are lines with all of it.
func (r *runner) hang(all *looked) (h *Hang, whole []string) {
	h = &Hang{After: all.after}
	var standings []node.Standing
	var missing []string
	var names []string
	for i, host := range r.plan.Hosts {
		names = append(names, host.Name)
		if err := all.errs[i]; err != nil {
			missing = append(missing, fmt.Sprintf("host %s %v", host.Name, err))
		}
		if found := all.hosts[i]; found != nil {
			standings = append(standings, found.standings...)
			h.Ranks = append(h.Ranks, found.ranks...)
		}
	}
	if len(r.plan.Hosts) == 1 {
		names = nil
	}
	slices.SortFunc(h.Ranks, func(a, b RankStacks) int { return a.Rank - b.Rank })
	waits := node.Report(standings, r.plan.nodeOf(), names)
	name := func(ranks []int) string {
		text := rankenv.RankText(ranks)
		switch {
		case names != nil && len(ranks) == 1:
			text += fmt.Sprintf(" (host %s)", names[r.plan.Ranks[ranks[0]].Host])
		case len(text) > lookRanks:
			text = fmt.Sprintf("%d %s,...", len(ranks), text[:strings.LastIndexByte(text[:lookRanks], ',')])
		}
		return text
	}
	started := r.startedText(h.Ranks)
	missing = append(missing, r.raisedTexts(h.Ranks)...)
	h.Lines = slices.Concat(started, waits, missing, stacks.Tell(h.Ranks, name, r.o.Verbose), tracebackHint(h.Ranks))
	whole = slices.Concat(started, waits, missing, stacks.Tell(h.Ranks, name, true))
	if len(h.Lines) == 0 {
		h.Lines = []string{"no rank runs any more"}
		whole = h.Lines
	}
	return h, whole
}

// startedText says how many ranks were started, as long as that is not all of them. seen are ranks that run: a host says only at the end which it has started.
func (r *runner) startedText(seen []RankStacks) []string {
	if r.forking == 0 {
		return nil
	}
	started := map[int]bool{}
	for _, s := range seen {
		started[s.Rank] = true
	}
	for i := range r.acct.Ranks {
		if a := &r.acct.Ranks[i]; a.PID != 0 || a.Lost {
			started[a.Rank] = true
		}
	}
	switch n := len(started); n {
	case len(r.acct.Ranks):
		return nil
	case 0:
		return []string{"no rank has been started yet"}
	default:
		return []string{fmt.Sprintf("%d of %d ranks have been started so far", n, len(r.acct.Ranks))}
	}
}

// writeStacks adds lines to a file of the output directory.
func (d *outputDir) writeStacks(title string, lines []string) (file string, err error) {
	if file, err = d.stacks(); err != nil {
		return file, err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o666)
	if err == nil {
		_, err = fmt.Fprintf(f, "%s %s\n  %s\n", time.Now().Format(time.RFC3339), title, strings.Join(lines, "\n  "))
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		err = outputFileError(err)
	}
	return file, err
}

// stacksFile is in Plan.OutputDir, if the ranks were looked at.
const stacksFile = "stacks.txt"
