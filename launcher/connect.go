package launcher

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/push"
	"github.com/gorun-dev/gorun/launcher/internal/sshway"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

const (
	// missingFirst and missingNext are when a person is told how many hosts are still missing.
	missingFirst = 2 * time.Second
	missingNext  = 5 * time.Second
	// othersGrace is how long the other hosts are waited for once one has failed: for their reasons.
	othersGrace = 2 * time.Second
	// maxHandshakes bounds the connections that are made at once.
	maxHandshakes = 128
	// allSeeds is the number of hosts up to which each node is told of all others; the nodes of more meet by asking some.
	allSeeds = 64
)

// buildName names this program for the agents that it starts: both are of one build.
func buildName() string {
	version, revision, modified := "devel", "", ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if info.Main.Version != "" {
			version = info.Main.Version
		}
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				revision = " " + s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				modified = " modified"
			}
		}
	}
	return version + revision + modified
}

// connector prepares the hosts of a job that are not this one.
type connector struct {
	r        *runner
	outer    context.Context // of the job
	ctx      context.Context // ends all of it; within outer
	dial     context.Context // bounds what hosts need to answer, not what sending them files takes
	way      way.Way
	builds   *push.Builds
	key      []byte
	files    *staging
	progress func(host string, sent, size int) // of gorun's own program

	missing map[int]bool     // hosts that are not prepared
	failed  map[int]error    // of hosts
	giveUp  <-chan time.Time // on those that are missing, when one host has failed
}

// connect prepares the hosts of a job on several, all at once.
func (r *runner) connect(ctx context.Context) (meeting, error) {
	p := r.plan
	for _, h := range p.Hosts {
		r.acct.Hosts = append(r.acct.Hosts, HostAccount{Host: h.Name})
	}
	w, err := r.wayTo()
	if err != nil {
		return meeting{}, err
	}
	builds, err := ownBuilds()
	if err != nil {
		return meeting{}, err
	}
	key := make([]byte, 32)
	rand.Read(key)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	files, err := newStaging(inner, p, r.o.Stderr)
	if err != nil {
		return meeting{}, err
	}
	r.later(files.end)
	bound, dial, over := newRunBound(inner, p.Remote.timeout())
	defer over()
	r.dialing = bound
	c := &connector{r: r, outer: ctx, ctx: inner, dial: dial, way: w, builds: builds, key: key, files: files, progress: tellSending(func(line string) { r.say("%s", line) }), missing: map[int]bool{}, failed: map[int]error{}}
	if c.gather(cancel) {
		return meeting{}, errInterrupted
	}
	if err := c.failure(); err != nil {
		return meeting{}, err
	}
	if err := r.sameMachine(); err != nil {
		return meeting{}, err
	}
	return r.meetingPlace(inner, key)
}

// gather waits until each host is prepared, or has failed, and reports whether it was interrupted. cancel ends ctx.
func (c *connector) gather(cancel func()) (interrupted bool) {
	r := c.r
	results, lost := c.begin()
	tell := time.After(missingFirst)
	sending := time.NewTicker(tellFirst)
	defer sending.Stop()
	for len(c.missing) > 0 {
		select {
		case res := <-results:
			c.take(res)
		case res := <-lost:
			c.fail(res.index, res.err)
		case <-c.giveUp:
			cancel()
		case <-tell:
			if waiting := c.files.others(c.missing); len(waiting) > 0 {
				r.say("waiting for %s", r.missingText(waiting))
			}
			tell = time.After(missingNext)
		case <-sending.C:
			if line := c.files.progress(); line != "" {
				r.say("%s", line)
				sending.Reset(tellNext)
			}
		case <-c.ctx.Done():
			if !interrupted && c.outer.Err() != nil && len(c.failed) == 0 {
				interrupted, r.interrupt = true, syscall.SIGTERM
			}
			for len(c.missing) > 0 {
				c.take(<-results)
			}
		case <-r.suspends:
			r.suspend()
		case s := <-r.o.Signals:
			if EndsJob(s) {
				interrupted, r.interrupt = true, s.(syscall.Signal)
				cancel()
			}
		}
	}
	return interrupted
}

// opened is what became of a host.
type opened struct {
	index int
	host  *remoteHost
	err   error
}

// begin begins to prepare all hosts, and tells of each how that went, and of those that are prepared if they are lost from then on.
func (c *connector) begin() (results, lost <-chan opened) {
	all := c.r.plan.Hosts
	done, gone := make(chan opened, len(all)), make(chan opened, len(all))
	slots := make(chan struct{}, maxHandshakes)
	for i, h := range all {
		if h.Local {
			continue
		}
		c.missing[i] = true
		go func() {
			slots <- struct{}{}
			free := sync.OnceFunc(func() { <-slots })
			defer free()
			host, err := c.open(i, free)
			if err == nil {
				host.calm = host.await(func(err error) { gone <- opened{i, host, err} })
			}
			done <- opened{i, host, err}
		}()
	}
	return done, gone
}

// take takes note of what became of a host.
func (c *connector) take(res opened) {
	delete(c.missing, res.index)
	a := &c.r.acct.Hosts[res.index]
	switch {
	case res.err != nil && c.ctx.Err() != nil && c.outer.Err() == nil && len(c.failed) > 0:
		a.Error = "not waited for: another host had failed" // for othersGrace: it was ended by us
	case res.err != nil:
		c.fail(res.index, res.err)
	default:
		c.r.hosts[res.index] = res.host
		c.r.placed(res.index, &res.host.prepared.Place.Host, res.host.prepared.Place.Ranks)
		c.r.tellHost(res.host, a)
	}
}

// fail takes note that a host has failed.
func (c *connector) fail(index int, err error) {
	c.failed[index] = &hostError{c.r.plan.Hosts[index].Name, err}
	if c.r.acct.Hosts[index].Error = err.Error(); c.giveUp == nil {
		c.giveUp = time.After(othersGrace)
	}
}

// failure is the error of all hosts that have failed, nil if none has.
func (c *connector) failure() error {
	var failed []error
	for i := range c.r.plan.Hosts {
		if err := c.failed[i]; err != nil {
			failed = append(failed, err)
		}
	}
	if len(failed) == 0 {
		return nil
	}
	for _, err := range failed {
		// What is wrong with the program is told as such.
		if s, ok := errors.AsType[*StartError](err); ok {
			return &StartError{Code: s.Code, Msg: (&notStarted{failed}).Error()}
		}
	}
	return &notStarted{failed}
}

// tellHost takes note of a host that is prepared.
func (r *runner) tellHost(h *remoteHost, a *HostAccount) {
	a.Agent, a.Sent, a.Staged = h.session.File, h.session.Pushed, h.staged
	a.Opened, a.Prepared = h.opened.Sub(r.acct.Start), h.ready.Sub(r.acct.Start)
	if h.prepared.OwnDir {
		a.Dir = string(h.prepared.Dir)
	}
	sent := ""
	if a.Sent {
		sent = ", which was sent,"
	}
	r.verbose("host %s: agent %s%s speaks after %v, is prepared after %v", h.name, a.Agent, sent,
		a.Opened.Round(time.Millisecond), a.Prepared.Round(time.Millisecond))
	if a.Staged > 0 {
		r.verbose("host %s: %d KiB of files were sent", h.name, (a.Staged+1023)>>10)
	}
	if strings.TrimSpace(h.session.Noise) != "" {
		r.verbose("host %s: its shell's start-up files say %q", h.name, h.session.Noise)
	}
}

// sameMachine refuses two names of one machine: each agent would take all of its devices for its own ranks. A way that the user
// gave may have reasons for it.
func (r *runner) sameMachine() error {
	if r.plan.Remote.RSH != "" || r.o.way != nil {
		return nil
	}
	ids := make([]string, len(r.hosts))
	for i, h := range r.plan.Hosts {
		if rh := r.remote(i); rh != nil {
			ids[i] = rh.prepared.Machine
		} else if h.Local {
			ids[i] = machine()
		}
	}
	if faults := sameMachines(r.plan.hostNames(), ids); len(faults) > 0 {
		return &UsageError{Msg: faults[0].What, Hint: faults[0].Advice}
	}
	return nil
}

// sameMachines finds hosts that are one machine: each further name of it is a fault. An id is that of machine, "" where it is not known.
func sameMachines(names, ids []string) (faults []HostFault) {
	seen := map[string]string{}
	for i, id := range ids {
		if other, ok := seen[id]; ok && id != "" {
			faults = append(faults, HostFault{Stops: true, What: fmt.Sprintf("hosts %s and %s are the same machine", other, names[i]), Advice: "give one of the names, with the slots of both"})
			continue
		}
		seen[id] = names[i]
	}
	return faults
}

// missingText counts the hosts that are missing and names some.
func (r *runner) missingText(missing map[int]bool) string {
	var names []string
	for i, h := range r.plan.Hosts {
		if missing[i] {
			names = append(names, h.Name)
		}
	}
	n := len(names)
	if why := r.retries.reason(names[0]); why != nil {
		names[0] += fmt.Sprintf(" (%v)", why)
	}
	if n > 4 {
		names = append(names[:4], "...")
	}
	return fmt.Sprintf("%d of %d hosts: %s", n, len(r.plan.Hosts), strings.Join(names, ", "))
}

// wayTo is the way to the hosts that the plan asks for.
func (r *runner) wayTo() (way.Way, error) {
	if r.o.way != nil {
		return r.o.way, nil
	}
	return r.plan.Remote.way(true, func(t way.Target, err error) {
		r.retries.note(t.Name, bare(err))
		r.verbose("%v; trying again", err)
	})
}

// target is where the way to the host leads.
func (h *PlanHost) target() way.Target {
	return way.Target{Name: h.Name, User: h.User, Addr: h.Addr, Port: h.Port}
}

// ownBuilds are this program's, for other hosts.
func ownBuilds() (*push.Builds, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find gorun's own program: %w", err)
	}
	return push.NewBuilds(exe)
}

// withSaid is an error of a session, with what the other side has written to stderr.
func withSaid(err error, s *push.Started) error {
	if said := lastLines(s.Stderr(), 3); len(said) > 0 {
		return fmt.Errorf("%w; it said: %s", err, strings.Join(said, " / "))
	}
	return err
}

// timeout is for reaching all hosts.
func (p *Remote) timeout() time.Duration {
	return cmp.Or(max(p.ConnectTimeout, 0), DefaultConnectTimeout)
}

// way is the way to hosts. A patient one tries those again that are not up yet.
func (p *Remote) way(patient bool, onRetry func(way.Target, error)) (way.Way, error) {
	if p.RSH != "" {
		return way.NewCommand(p.RSH)
	}
	return sshway.New(sshway.Config{File: p.SSHConfig, AcceptNewHostKeys: p.AcceptNewHostKeys, Patient: patient, OnRetry: onRetry}), nil
}

// retries keeps why hosts are tried again.
type retries struct {
	mu  sync.Mutex
	why map[string]error
}

func (r *retries) note(host string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == nil {
		r.why = map[string]error{}
	}
	r.why[host] = err
}

func (r *retries) reason(host string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.why[host]
}

// open opens a session on a host and has its agent prepare, for which it sends files. connected is called when the connection is there.
func (c *connector) open(index int, connected func()) (*remoteHost, error) {
	r := c.r
	ph := &r.plan.Hosts[index]
	h := &remoteHost{index: index, stdin: r.stdin, size: len(r.plan.Ranks), name: ph.Name, events: r.events, output: r.output, alone: len(r.plan.Hosts) == 1, met: r.met.Load, doubt: r.doubt, unreached: r.unreached, log: func(line string) { r.verbose("%s", line) },
		calm: func() {}, gone: make(chan struct{}), wasReaped: make(chan struct{}), carried: make(chan struct{})}
	s, err := push.Open(c.dial, c.way, ph.target(), push.Options{Builds: c.builds, Progress: c.progress})
	if err != nil {
		return nil, bare(err)
	}
	h.session = s
	connected()
	limit := newLimit(c.dial, func() { s.Close() })
	defer limit.end()
	fail := func(err error) (*remoteHost, error) {
		if own, ok := errors.AsType[*refused](err); ok {
			err = own.error
		} else if why := limit.passed(); why != nil {
			err = why
		} else {
			err = withSaid(err, s)
		}
		if h.mux != nil {
			h.mux.Close()
		}
		s.Close()
		return nil, err
	}
	if err := agentwire.ReadPreface(s, buildName()); err != nil {
		return fail(err)
	}
	if h.mux, err = agentwire.Dial(&sessionConn{s}); err != nil {
		return fail(err)
	}
	h.opened = time.Now()
	r.speaking.add(h)
	if err := c.prepare(h, limit); err != nil {
		return fail(err)
	}
	return h, nil
}

// part is a host's part of the job, and the programs that its ranks run, by index in the plan.
func (c *connector) part(h *remoteHost) (*agentwire.Prepare, []int) {
	r, p, key, index, s := c.r, c.r.plan, c.key, h.index, h.session
	ph := &p.Hosts[index]
	prep := &agentwire.Prepare{
		Job: r.acct.Job, Key: key, Node: index, Placement: agentwire.Compress(p.nodeOf()), Host: ph.Name, PortFrom: p.Remote.PortFrom, PortTo: p.Remote.PortTo,
		MasterPort: p.Ranks[0].Host == index, Dir: []byte(p.Dir), DirGiven: p.DirGiven,
		Forward: agentwire.Pack(p.Remote.Forward), KillGrace: p.KillGrace,
		Merge: p.Merge, Timestamp: p.Timestamp, BindTo: p.BindTo.String(), HideGPUs: p.GPUBind == GPUBindHide, ShareGPUs: p.GPUBind == GPUBindShare,
	}
	if r.o.bind.IsValid() {
		prep.Bind = r.o.bind.String()
	}
	prep.Reached = reachedAt(s)
	programs := p.programsOn(index)
	for _, k := range programs {
		prep.Programs = append(prep.Programs, agentwire.Program{Name: []byte(p.Programs[k].Name), Path: []byte(p.Programs[k].Path)})
	}
	var argv []string // of the rank before
	for i := range p.Ranks {
		pr := &p.Ranks[i]
		if pr.Host != index {
			continue
		}
		h.ranks = append(h.ranks, pr.Rank)
		app := &p.Apps[pr.App]
		one := agentwire.Rank{Rank: pr.Rank, Program: slices.Index(programs, app.Program), Dir: []byte(app.Dir), Env: agentwire.Pack(pr.Env)}
		if !slices.Equal(pr.Argv, argv) { // ranks of one program have the same: a message has no room for each to have as many as a program may
			argv = pr.Argv
			one.Argv = agentwire.Pack(argv)
		}
		prep.Ranks = append(prep.Ranks, one)
		if r.stdin.sink(pr.Rank) != nil {
			prep.Stdin = append(prep.Stdin, pr.Rank)
		}
	}
	return prep, programs
}

// prepare has a host's agent prepare. limit ends the session when that takes too long.
func (c *connector) prepare(h *remoteHost, limit *limit) error {
	r := c.r
	prep, programs := c.part(h)
	calm := tend(h.mux, &h.paused, limit.pass)
	defer calm()
	if !c.files.quick(h.session.Arch, programs) {
		limit.move(c.ctx)
	}
	items, at, err := c.offer(h, limit, programs)
	if err != nil {
		return err
	}
	prep.Items = wireItems(items)
	for i, item := range at {
		prep.Programs[i].Item = item
	}
	h.mux.Send(&agentwire.Message{Prepare: prep})
	m, err := h.supply(c.ctx, limit, c.files, items)
	switch {
	case err != nil:
		return err
	case m.Failed != nil:
		return &refused{failure(m.Failed)}
	case m.Prepared == nil:
		return errors.New("the agent does not say that it is prepared")
	}
	calm()
	if err := limit.end(); err != nil {
		return err
	}
	h.prepared = m.Prepared
	h.ready = time.Now()
	if m.Prepared.OwnDir {
		why := ""
		if len(r.plan.Remote.Stage) > 0 {
			why = ", or not the same files in it"
		}
		r.verbose("host %s: there is no directory %s%s: the ranks run in %s", h.name, r.plan.Dir, why, m.Prepared.Dir)
	}
	return nil
}

// offer is what a host must have (staging.offer), unless its agent ends meanwhile.
func (c *connector) offer(h *remoteHost, limit *limit, programs []int) (items []*item, at []int, err error) {
	ctx, stop := context.WithCancelCause(c.ctx)
	var watch sync.WaitGroup
	var ended error
	watch.Go(func() {
		select {
		case <-ctx.Done():
		case <-h.mux.Done():
			if ended = limit.passed(); ended == nil { // else it was ended by us
				ended = &refused{h.lastWord()}
			}
			stop(ended)
		}
	})
	items, at, err = c.files.offer(ctx, h.session.Arch, programs)
	stop(nil)
	watch.Wait()
	if err == nil {
		err = ended // its last word is read: nobody hears it again
	}
	return items, at, err
}

// refused is what an agent itself says of why it does not take part.
type refused struct{ error }

// sessionConn is a session below streams. Its end is told when it is known how it ended: what follows closes it.
type sessionConn struct{ *push.Started }

func (c *sessionConn) Read(p []byte) (int, error) {
	n, err := c.Started.Read(p)
	if err == io.EOF {
		ended := make(chan struct{})
		go func() {
			c.Wait()
			close(ended)
		}()
		select {
		case <-ended:
		case <-time.After(time.Second):
			// What is closed next ends the wait.
		}
	}
	return n, err
}

// bare is an error of a way, or of a push, without the host's name in front, which comes from elsewhere; its advice is kept.
func bare(err error) error {
	if e, ok := errors.AsType[*way.Error](err); ok && error(e) == err {
		return &bareError{e.Phase + ": " + e.Cause.Error(), e}
	}
	if e, ok := errors.AsType[*push.Error](err); ok && error(e) == err {
		return &bareError{strings.TrimPrefix(e.Error(), e.Host+": "), e}
	}
	return err
}

type bareError struct {
	text string
	err  error
}

func (e *bareError) Error() string { return e.text }
func (e *bareError) Unwrap() error { return e.err }

// tellSending tells how far the sending of gorun to all hosts is, once a second at most. The function that it returns may be called at once for several.
func tellSending(say func(line string)) func(host string, sent, size int) {
	begin := time.Now()
	told := begin
	var mu sync.Mutex
	left := map[string]int{} // bytes, of hosts that lack some
	return func(host string, sent, size int) {
		mu.Lock()
		defer mu.Unlock()
		if left[host] = size - sent; sent == size {
			delete(left, host)
		}
		now := time.Now()
		if len(left) == 0 || now.Sub(begin) < missingFirst || now.Sub(told) < time.Second {
			return
		}
		told = now
		sum := 0
		for _, n := range left {
			sum += n
		}
		where := host
		if len(left) > 1 || left[host] == 0 {
			where = count(len(left), "host")
		}
		say(fmt.Sprintf("sending gorun to %s: %d MiB are left", where, (sum+1<<20-1)>>20))
	}
}
