package launcher

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/hostfacts"
	"github.com/gorun-dev/gorun/launcher/internal/push"
	"github.com/gorun-dev/gorun/launcher/internal/way"
)

const (
	// clockTries is how often each host is asked for its time: the quickest answer counts.
	clockTries = 3
	// wantSkew is how far clocks may differ before a warning: make, logs and certificates mind.
	wantSkew = time.Second
	// checkAnswer bounds each answer of an agent that looks at its host: a directory may be on a network's file system.
	checkAnswer = 30 * time.Second
	// maxReach bounds the hosts that each host is to reach: of more hosts each reaches the next ones.
	maxReach = 64
)

// HostCheck is what is found out about one host of several.
type HostCheck struct {
	Name   string      // as the user wrote it
	Local  bool        // gorun runs on it
	Facts  *HostFacts  // nil: it was not reached
	Agent  string      // gorun's file there, "" on the local host
	Sent   bool        // it was sent now
	Addr   string      // where other hosts reach it
	Chosen string      // the address that a job would choose, and why; "": none
	Moved  bool        // that is not the one at which ssh reaches it
	On     string      // the interface that holds it, "" if none does
	Skew   Skew        // of its clock
	Reach  []HostReach // of other hosts, by this one
	Faults []HostFault

	machine string
	at      agentwire.Address // where it answers probes first
}

// Skew is how much a host's clock is ahead of this host's, give or take Error.
type Skew struct{ Ahead, Error time.Duration }

// HostReach is one host's way to another.
type HostReach struct {
	Host string        `json:"host"`
	Took time.Duration `json:"took_ns,omitempty"` // to connect and hear it answer
	Err  string        `json:"error,omitempty"`
}

// skew is what an answer of a clock says that was asked for and came at two times of ours.
func skew(asked, its, came time.Time) Skew {
	trip := came.Sub(asked)
	return Skew{its.Sub(asked) - trip/2, (trip + 1) / 2}
}

// fault is what is wrong with the clock, "" if nothing is.
func (s Skew) fault() string {
	off, word := s.Ahead, "ahead of"
	if off < 0 {
		off, word = -off, "behind"
	}
	if off-s.Error <= wantSkew {
		return ""
	}
	return fmt.Sprintf("its clock is %v %s this host's", off.Round(100*time.Millisecond), word)
}

// CheckHosts looks at all hosts of a plan at once, which need not have a program: what would stop a job on them, and how they differ. What
// concerns several hosts is in the second result. Nothing stays on them but gorun in its cache. device is what ranks are told to use, "" for their
// own choice; progress gets what a person is told meanwhile. An error with hosts is that of ctx: what was found until then is there.
func CheckHosts(ctx context.Context, p *Plan, device string, progress func(line string)) ([]HostCheck, []HostFault, error) {
	w, err := p.Remote.way(false, nil)
	if err != nil {
		return nil, nil, err
	}
	return checkHosts(ctx, p, device, w, progress)
}

func checkHosts(ctx context.Context, p *Plan, device string, w way.Way, progress func(line string)) ([]HostCheck, []HostFault, error) {
	builds, err := ownBuilds()
	if err != nil {
		return nil, nil, err
	}
	c := &checker{plan: p, device: device, way: w, builds: builds, key: make([]byte, 32), hosts: make([]HostCheck, len(p.Hosts)),
		links: make([]*checkLink, len(p.Hosts))}
	if progress != nil {
		c.sending = tellSending(progress)
	}
	rand.Read(c.key)
	for _, prog := range p.Programs {
		var sum []byte
		if prog.GoDir == "" && prog.Path != "" && strings.Contains(prog.Name, "/") {
			_, _, sum, _ = fileSum(ctx, prog.Path, -1) // what cannot be read is a fault of its own
		}
		c.sums = append(c.sums, sum)
	}
	c.each(func(i int) { c.look(ctx, i) })
	c.local()
	defer func() {
		for _, l := range c.links {
			if l != nil {
				l.end()
			}
		}
		c.readers.Wait()
	}()
	c.reachAll(ctx)
	for i := range c.hosts {
		c.judge(i)
	}
	return c.hosts, c.compare(), ctx.Err()
}

// checker looks at hosts.
type checker struct {
	plan    *Plan
	device  string
	way     way.Way
	builds  *push.Builds
	key     []byte
	sums    [][]byte // of the programs
	hosts   []HostCheck
	links   []*checkLink                      // by host; nil: not reached
	sending func(host string, sent, size int) // tells how far the sending of gorun is

	readers sync.WaitGroup // of sessions
}

// checkLink is the session with an agent; without one it is this host.
type checkLink struct {
	session *push.Started
	mux     *agentwire.Mux
	calm    func()   // ends its heartbeat; nil without mux
	prober  *prober  // of this host
	reach   *reacher // of this host
}

func (l *checkLink) end() {
	if l.reach != nil {
		l.reach.close()
		l.prober.close()
	}
	if l.mux != nil {
		l.calm()
		sayBye(context.Background(), l.mux)
	}
	if l.session != nil {
		l.session.Close()
	}
}

// ask says something and waits for the answer; ctx and a bound end the session.
func (l *checkLink) ask(ctx context.Context, m *agentwire.Message) (*agentwire.Message, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, checkAnswer, fmt.Errorf("its agent does not answer within %v", checkAnswer))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.session.Close() })
	defer stop()
	l.mux.Send(m)
	for {
		got, err := l.mux.Receive()
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case err != nil:
			return nil, fmt.Errorf("its agent has ended: %w", err)
		case got.Ping == nil && got.Log == nil:
			return got, nil
		}
	}
}

// each does something for all hosts that are not this one, all at once.
func (c *checker) each(do func(i int)) {
	var wait sync.WaitGroup
	turns := make(chan struct{}, maxHandshakes)
	for i, h := range c.plan.Hosts {
		if h.Local {
			continue
		}
		wait.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			do(i)
		})
	}
	wait.Wait()
}

func (c *checker) fault(i int, stops bool, advice, format string, args ...any) {
	h := &c.hosts[i]
	h.Faults = append(h.Faults, HostFault{Stops: stops, What: fmt.Sprintf(format, args...), Advice: advice})
}

// look reaches a host and asks what it is like.
func (c *checker) look(ctx context.Context, i int) {
	ph, h := &c.plan.Hosts[i], &c.hosts[i]
	h.Name = ph.Name
	l, err := c.open(ctx, i)
	if err == nil {
		if err = c.ask(ctx, i, l); err != nil {
			err = withSaid(err, l.session)
		}
	}
	if err == nil {
		c.links[i] = l
		return
	}
	if l != nil {
		l.end()
	}
	h.Facts = nil
	advice := way.Advice(err)
	if advice == "" {
		advice = "gorun -v "
		if r := c.plan.Remote; r.RSH != "" {
			advice += "--rsh " + ShellQuote(r.RSH) + " "
		} else if r.SSHConfig != "" {
			advice += "--ssh-config " + ShellQuote(r.SSHConfig) + " "
		}
		advice += "-H " + ShellQuote(ph.Name) + " true shows more"
	}
	c.fault(i, true, advice, "%v", err)
}

func (c *checker) open(ctx context.Context, i int) (*checkLink, error) {
	ph := &c.plan.Hosts[i]
	timeout := c.plan.Remote.timeout()
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer within %v (--connect-timeout)", timeout))
	defer cancel()
	s, err := push.Open(ctx, c.way, ph.target(), push.Options{Builds: c.builds, Progress: c.sending})
	if err != nil {
		return nil, bare(err)
	}
	l := &checkLink{session: s}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err = agentwire.ReadPreface(s, buildName()); err == nil {
		l.mux, err = agentwire.Dial(&sessionConn{s})
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return l, err
	}
	l.calm = tend(l.mux, nil, nil) // what is asked of it has bounds of its own
	return l, nil
}

func (c *checker) ask(ctx context.Context, i int, l *checkLink) error {
	p, h := c.plan, &c.hosts[i]
	q := &agentwire.Check{Key: c.key, Host: i, Reached: reachedAt(l.session), PortFrom: p.Remote.PortFrom, PortTo: p.Remote.PortTo, Device: c.device}
	if p.DirGiven {
		q.Dir = []byte(p.Dir)
	}
	var asked []int // programs; a Go package is built and sent
	for k, prog := range p.Programs {
		if prog.GoDir == "" {
			asked = append(asked, k)
			q.Programs = append(q.Programs, agentwire.CheckProgram{Name: []byte(prog.Name), Path: []byte(prog.Path), Sum: c.sums[k]})
		}
	}
	m, err := l.ask(ctx, &agentwire.Message{Check: q})
	if err != nil {
		return err
	}
	if m.Checked == nil || len(m.Checked.Programs) != len(asked) {
		return errors.New("its agent does not say what it has found")
	}
	h.Agent, h.Sent, h.at, h.machine = l.session.File, l.session.Pushed, m.Checked.At, m.Checked.Machine
	if err := json.Unmarshal(m.Checked.Facts, &h.Facts); err != nil {
		return fmt.Errorf("what its agent has found cannot be read: %w", err)
	}
	if why := m.Checked.At.Err; why != "" {
		c.fault(i, true, "free ports of it, or give another range", "%s", why)
	}
	for k := range p.Programs {
		var v agentwire.Verdict
		if at := slices.Index(asked, k); at >= 0 {
			v = m.Checked.Programs[at]
		}
		c.program(i, k, &v)
	}
	for n := range clockTries {
		asked := time.Now()
		m, err := l.ask(ctx, &agentwire.Message{Clock: &agentwire.Clock{}})
		if err != nil {
			return err
		}
		if m.Clock == nil {
			return errors.New("its agent does not tell its time")
		}
		// By the wall clock, as the other one is; the round trip by the monotonic one.
		if s := skew(asked, m.Clock.Now, time.Now()); n == 0 || s.Error < h.Skew.Error {
			h.Skew = s
		}
	}
	return nil
}

// program judges whether a program is on a host, or would be sent.
func (c *checker) program(i, k int, v *agentwire.Verdict) {
	p, h := &c.plan.Programs[k], &c.hosts[i]
	name := p.Name
	h.Facts.Programs = append(h.Facts.Programs, hostfacts.Program{Name: name, Path: v.Path, Same: v.Same, Err: v.Err})
	f := &h.Facts.Programs[len(h.Facts.Programs)-1]
	bySlash := strings.Contains(name, "/")
	staged := !c.plan.Remote.NoStage && (bySlash || p.GoDir != "")
	switch {
	case p.GoDir != "":
		f.Path, f.Sent, f.Err = p.GoDir, true, ""
		if !staged {
			c.fault(i, true, "without --stage none it is built and sent", "program %s is a Go package", name)
		}
	case v.Same:
	case staged && c.sums[k] != nil:
		f.Sent, f.Err = true, ""
	case v.Err != "" && bySlash:
		c.fault(i, true, "copy it there, or leave --stage none out: then it is sent", "%s", v.Err)
	case v.Err != "":
		c.fault(i, true, "install it there, or give it by its path: then it is sent", "%s", v.Err)
	case v.Other:
		c.fault(i, false, "leave --stage none out: then the one of this host is sent", "program %s is another one than on this host", f.Path)
	}
}

// local looks at this host, if it is one of them.
func (c *checker) local() {
	for i, ph := range c.plan.Hosts {
		if !ph.Local {
			continue
		}
		h := &c.hosts[i]
		job := Job{Device: c.device}
		for _, p := range c.plan.Programs {
			job.Apps = append(job.Apps, App{Program: p.Name})
		}
		if c.plan.DirGiven {
			job.Dir = c.plan.Dir
		}
		h.Name, h.Local, h.Facts, h.machine = ph.Name, true, CheckHost(job, os.Environ()), machine()
		var sessions []*push.Started
		for _, l := range c.links {
			if l != nil {
				sessions = append(sessions, l.session)
			}
		}
		addrs := addrsToward(sessions)
		from, to := c.plan.Remote.PortFrom, c.plan.Remote.PortTo
		h.at = addrs[0]
		p := answerAt(c.key, i, &h.at, from, to)
		if h.at.Err != "" {
			c.fault(i, true, "free ports of it, or give another range", "%s", h.at.Err)
			continue
		}
		c.links[i] = &checkLink{prober: p, reach: &reacher{key: c.key, host: i, addrs: addrs, at: h.at, from: from, to: to}}
	}
}

// reachAll finds the addresses at which the hosts reach each other, as a job does.
func (c *checker) reachAll(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan addrAnswer)
	var hosts []addrHost
	var index []int // of each of hosts
	for i, l := range c.links {
		h := &c.hosts[i]
		if l == nil || h.at.Port == 0 {
			continue
		}
		n := len(hosts)
		answer := func(m *agentwire.Message, err error) {
			select {
			case answers <- addrAnswer{n, m, err}:
			case <-ctx.Done():
			}
		}
		one := addrHost{id: i, name: h.Name, first: h.at}
		if l.mux == nil {
			l.reach.say = func(m *agentwire.Message) { answer(m, nil) }
			one.send = func(m *agentwire.Message) { l.reach.handle(m) }
		} else {
			one.send = l.mux.Send
			c.readers.Go(func() { // until the end of the session
				for {
					m, err := l.mux.Receive()
					if err != nil {
						answer(nil, fmt.Errorf("its agent has ended: %w", err))
						return
					}
					if m.Ping == nil && m.Log == nil {
						answer(m, nil)
					}
				}
			})
		}
		hosts, index = append(hosts, one), append(index, i)
	}
	if len(hosts) == 0 {
		return
	}
	found, err := findAddrs(ctx, hosts, answers, maxReach+1, true)
	if e, ok := errors.AsType[*hostError](err); ok {
		i := slices.IndexFunc(c.hosts, func(h HostCheck) bool { return h.Name == e.host })
		c.fault(i, true, "try again", "%v", e.err)
	} else if err != nil {
		c.fault(index[0], true, "try again", "%v", err)
	}
	c.noteReach(found, index)
}

// noteReach takes note of the addresses that were found, and of who reaches whom; index has the hosts of those in found.
func (c *checker) noteReach(found *chooser, index []int) {
	for n, i := range index {
		h := &c.hosts[i]
		k, _ := found.best(n)
		tried := found.addrs[n] // all of them if none will do
		if k >= 0 {
			h.Chosen, h.Moved, h.On = found.chosen(n, k), k > 0, tried[k].Interface
			tried = tried[k : k+1]
		}
		h.Addr = hostPort(tried[0])
		missed := false
		for _, by := range found.by[n] {
			r := HostReach{Host: h.Name, Took: found.got[dial{by, n, h.Addr}].Took}
			for _, a := range tried {
				text := found.missed(by, n, a)
				if text == "" {
					r.Err = ""
					break // this host reaches it; another does not
				}
				if r.Err != "" {
					text = r.Err + "; at " + a.IP + ": " + text
				}
				r.Err = text
			}
			c.hosts[index[by]].Reach = append(c.hosts[index[by]].Reach, r)
			missed = missed || r.Err != ""
		}
		if k < 0 && !missed && len(found.by[n]) > 0 {
			c.fault(i, true, c.letThrough(), "%v", found.none(n))
		}
	}
}

// letThrough is what helps hosts that do not reach each other.
func (c *checker) letThrough() string {
	if p := c.plan.Remote; p.PortFrom != 0 {
		return fmt.Sprintf("let a firewall between them pass TCP and UDP on the ports %d to %d", p.PortFrom, p.PortTo)
	}
	return "let a firewall between them pass TCP and UDP; --port-range FROM-TO keeps gorun to some ports"
}

// judge looks for faults of a host that was reached.
func (c *checker) judge(i int) {
	h := &c.hosts[i]
	if h.Facts == nil {
		return
	}
	facts := *h.Facts
	if !h.Local {
		facts.Programs = nil // they were judged: they may be sent
	}
	h.Faults = append(h.Faults, facts.Faults()...)
	if text := h.Skew.fault(); text != "" {
		c.fault(i, false, "synchronize the clocks (chrony or ntpd)", "%s", text)
	}
	// One line for each reason, with the hosts to which it applies.
	var unreached alike[string]
	for _, r := range h.Reach {
		if r.Err != "" {
			unreached.add(r.Err, r.Host)
		}
	}
	for _, why := range unreached.texts {
		to := unreached.of[why]
		at := ""
		if len(to) == 1 {
			k := slices.IndexFunc(c.hosts, func(o HostCheck) bool { return o.Name == to[0] })
			at = " at " + c.hosts[k].Addr
		}
		c.fault(i, true, c.letThrough(), "it does not reach %s%s: %s", strings.Join(to, " "), at, why)
	}
	slices.SortStableFunc(h.Faults, func(a, b HostFault) int { return order(b.Stops) - order(a.Stops) })
}

func order(b bool) int {
	if b {
		return 1
	}
	return 0
}

// compare finds what is wrong between hosts.
func (c *checker) compare() []HostFault {
	var faults []HostFault
	if c.plan.Remote.RSH == "" { // which may have reasons for it
		var ids []string
		for _, h := range c.hosts {
			ids = append(ids, h.machine)
		}
		faults = sameMachines(c.plan.hostNames(), ids)
	}
	differ := func(what, advice string, of func(*HostFacts) string) {
		var hosts alike[string]
		for _, h := range c.hosts {
			if h.Facts != nil {
				hosts.add(cmp.Or(of(h.Facts), "none"), h.Name)
			}
		}
		if len(hosts.texts) < 2 {
			return
		}
		var parts []string
		for _, v := range hosts.texts {
			parts = append(parts, v+" on "+HostList(hosts.of[v]))
		}
		faults = append(faults, HostFault{What: what + " differ: " + strings.Join(parts, ", "), Advice: advice})
	}
	if c.device != "host" {
		differ("numbers of visible GPUs", "ranks are placed by the hosts' slots: give each as many as it has GPUs", func(f *HostFacts) string { return fmt.Sprint(f.VisibleGPU) })
		differ("versions of the GPU driver", "install the same on all hosts", func(f *HostFacts) string { return f.Driver.Version })
		for _, name := range c.libraries() {
			differ("versions of "+name, "install the same on all hosts; a collective library of two versions may hang", func(f *HostFacts) string {
				for _, l := range f.Libraries {
					if l.Name == name {
						return l.Version
					}
				}
				return ""
			})
		}
	}
	return faults
}

// libraries are the names of those that any host has.
func (c *checker) libraries() []string {
	var names []string
	for _, h := range c.hosts {
		if h.Facts == nil {
			continue
		}
		for _, l := range h.Facts.Libraries {
			if l.Version != "" && !slices.Contains(names, l.Name) {
				names = append(names, l.Name)
			}
		}
	}
	return names
}

// HostList names hosts, some of them where they are many.
func HostList(names []string) string {
	if n := len(names); n > 8 {
		return strings.Join(names[:6], " ") + fmt.Sprintf(" and %d more", n-6)
	}
	return strings.Join(names, " ")
}
