package launcher

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/push"
)

// meetingPlace has this host prepared, if it is one of the job's, and finds where the hosts meet.
func (r *runner) meetingPlace(ctx context.Context, key []byte) (meeting, error) {
	for i, h := range r.plan.Hosts {
		if h.Local {
			if err := r.prepareHere(ctx, i, key); err != nil {
				return meeting{}, err
			}
		}
	}
	r.tellNotes()
	err := r.interruptible(ctx, r.choosePlaces)
	if err != nil {
		return meeting{}, err
	}
	return r.meetAtPlaces(), nil
}

// nodePlace is where a host's node is, and at which of the host's addresses.
type nodePlace struct {
	agentwire.Node
	at agentwire.Address
}

// prepareHere prepares this host, which has an index in the plan.
func (r *runner) prepareHere(ctx context.Context, index int, key []byte) error {
	p := r.plan
	addrs := r.ownAddrs()
	bind, err := netip.ParseAddr(addrs[0].IP)
	var at netip.AddrPort
	if err == nil {
		at, err = freePort(bind, p.Remote.PortFrom, p.Remote.PortTo)
	}
	if err != nil {
		return &notStarted{[]error{&hostError{p.Hosts[index].Name, err}}}
	}
	if _, err := r.prepareLocal(ctx, index, key, at); err != nil {
		return err
	}
	r.acct.Hosts[index].Prepared = time.Since(r.acct.Start)
	h := r.hosts[index].(*localHost)
	h.reachable(addrs, nil)
	h.notes = interfaceNotes(p.environ(&p.Ranks[slices.IndexFunc(p.Ranks, func(pr PlanRank) bool { return pr.Host == index })], nil))
	return nil
}

// tellNotes tells what hosts have noticed, once for all that have noticed the same.
func (r *runner) tellNotes() {
	var hosts alike[string]
	for i, h := range r.hosts {
		var notes []string
		switch h := h.(type) {
		case *remoteHost:
			notes = h.prepared.Notes
		case *localHost:
			notes = h.notes
		}
		for _, text := range notes {
			hosts.add(text, r.plan.Hosts[i].Name)
		}
	}
	for _, text := range hosts.texts {
		r.say("host %s: %s", HostList(hosts.of[text]), text)
	}
}

// choosePlaces finds the address of each host at which the others reach it, and moves the nodes of those that are elsewhere.
func (r *runner) choosePlaces(ctx context.Context) error {
	r.nodes = make([]nodePlace, len(r.hosts))
	hosts := make([]addrHost, len(r.hosts))
	answers := make(chan addrAnswer)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := func(a addrAnswer) {
		select {
		case answers <- a:
		case <-ctx.Done(): // nobody asks any more
		}
	}
	for i, h := range r.hosts {
		switch h := h.(type) {
		case *remoteHost:
			r.nodes[i] = nodePlace{h.prepared.Node, h.prepared.At}
			h.answer.Store(&answer)
			defer h.answer.Store(nil)
			h.calm()
			h.listen()
			calm := tend(h.mux, &h.paused, h.lost)
			defer func() {
				cancel() // it may wait for us
				calm()
			}()
			hosts[i].send = h.mux.Send
		case *localHost:
			r.nodes[i] = nodePlace{h.where(), h.at}
			h.reach.say = func(m *agentwire.Message) { answer(addrAnswer{host: i, m: m}) }
			defer func() {
				cancel() // it may wait for us
				h.reach.close()
			}()
			hosts[i].send = func(m *agentwire.Message) { h.reach.handle(m) }
		}
		hosts[i].id, hosts[i].name, hosts[i].first = i, r.plan.Hosts[i].Name, r.nodes[i].at
	}
	if len(hosts) == 1 {
		r.toldPlace(0, addrText(hosts[0].first))
		return nil
	}
	c, err := findAddrs(ctx, hosts, answers, fullMesh, false)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return &notStarted{[]error{err}}
	}
	var failed []error
	chosen := make([]int, len(hosts))
	for i := range hosts {
		if chosen[i], _ = c.best(i); chosen[i] < 0 {
			failed = append(failed, &hostError{hosts[i].name, r.unreachable(i, c.none(i))})
		}
	}
	if len(failed) > 0 {
		return &notStarted{failed}
	}
	moving := map[int]bool{}
	var here sync.WaitGroup
	defer func() {
		cancel() // it may wait for us
		here.Wait()
	}()
	for i, k := range chosen {
		r.toldPlace(i, c.chosen(i, k))
		if k == 0 {
			continue
		}
		a := c.addrs[i][k]
		r.nodes[i].at = a
		to := &agentwire.Move{Bind: a.IP}
		if a.Bind != "" {
			to = &agentwire.Move{Bind: a.Bind, Advertise: a.IP}
		}
		moving[i] = true
		if h, ok := r.hosts[i].(*remoteHost); ok {
			h.mux.Send(&agentwire.Message{Move: to})
			continue
		}
		h := r.hosts[i].(*localHost)
		here.Go(func() {
			h.reach.close()
			where, err := h.move(ctx, to)
			answer(addrAnswer{i, &agentwire.Message{Moved: &agentwire.Moved{Node: where}}, err})
		})
	}
	return r.moved(ctx, answers, moving)
}

// moved waits until nodes have moved.
func (r *runner) moved(ctx context.Context, answers <-chan addrAnswer, moving map[int]bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, checkAnswer, fmt.Errorf("the host does not take another of its addresses within %v", checkAnswer))
	defer cancel()
	for len(moving) > 0 {
		select {
		case a := <-answers:
			switch {
			case a.err != nil:
			case a.m.Moved != nil && moving[a.host]:
				r.nodes[a.host].Node = a.m.Moved.Node
				delete(moving, a.host)
			case a.m.Failed != nil:
				a.err = failure(a.m.Failed)
			}
			if a.err != nil {
				return &notStarted{[]error{&hostError{r.plan.Hosts[a.host].Name, a.err}}}
			}
		case <-ctx.Done():
			for i := range moving {
				return &notStarted{[]error{&hostError{r.plan.Hosts[i].Name, context.Cause(ctx)}}}
			}
		}
	}
	return nil
}

// unreachable adds what can be done about a host that others do not reach.
func (r *runner) unreachable(host int, err error) error {
	ports := "of TCP and UDP (--port-range FROM-TO keeps gorun to some ports)"
	if p := r.plan.Remote; p.PortFrom != 0 {
		ports = fmt.Sprintf("%d to %d of TCP and UDP", p.PortFrom, p.PortTo)
	}
	advice := "let the other hosts connect to it, on the ports " + ports
	if r.plan.Hosts[host].Local {
		advice += ", or leave it out: gorun itself needs no way back from the hosts, its ranks here do"
	}
	return &advisedError{err, advice}
}

// toldPlace takes note of a host's address and why it is that one.
func (r *runner) toldPlace(host int, why string) {
	r.acct.Hosts[host].Chosen = why
	r.verbose("host %s: %s", r.plan.Hosts[host].Name, why)
}

// meetAtPlaces says where the hosts meet, when all nodes are where they are to be.
func (r *runner) meetAtPlaces() meeting {
	head := r.plan.Ranks[0].Host
	m := meeting{addr: r.nodes[head].at.IP, port: r.nodes[head].MasterPort}
	var addrs []string
	for i, p := range r.nodes {
		r.acct.Hosts[i].Addr, r.acct.Hosts[i].Interface = p.Addr, p.at.Interface
		if addrs = append(addrs, p.Addr); i == head { // the first is asked first
			addrs[0], addrs[i] = addrs[i], addrs[0]
		}
	}
	m.seeds = addrs
	if len(addrs) > allSeeds {
		m.seeds = nil
		for i := range allSeeds {
			m.seeds = append(m.seeds, addrs[i*len(addrs)/allSeeds])
		}
	}
	return m
}

// interruptible does something that a signal may end, before the ranks are started.
func (r *runner) interruptible(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	for {
		select {
		case err := <-done:
			if err != nil && ctx.Err() != nil {
				r.interrupt = syscall.SIGTERM
				err = errInterrupted
			}
			return err
		case <-r.suspends:
			r.suspend()
		case s := <-r.o.Signals:
			if EndsJob(s) {
				cancel()
				<-done
				r.interrupt = s.(syscall.Signal)
				return errInterrupted
			}
		}
	}
}

// reachedAt is the address at which ssh reached the host of a session, "" if it is not known.
func reachedAt(s *push.Started) string {
	if _, remote := s.Addrs(); remote != nil {
		if a, ok := addrOf(remote); ok && a.Zone() == "" {
			return a.String()
		}
	}
	return ""
}

// ownAddrs are the addresses of this host at which the others may reach it: first those from which it reached them.
func (r *runner) ownAddrs() []agentwire.Address {
	if r.o.bind.IsValid() {
		return hostAddrs(r.o.bind.String(), "")
	}
	var sessions []*push.Started
	for _, h := range r.hosts {
		if h, ok := h.(*remoteHost); ok {
			sessions = append(sessions, h.session)
		}
	}
	return addrsToward(sessions)
}

// addrsToward are the addresses of this host: the one from which most of the sessions go out first.
func addrsToward(sessions []*push.Started) []agentwire.Address {
	uses := map[netip.Addr]int{}
	var first netip.Addr
	for _, s := range sessions {
		if local, _ := s.Addrs(); local != nil {
			if a, ok := addrOf(local); ok && !a.IsLoopback() {
				if uses[a]++; uses[a] > uses[first] {
					first = a
				}
			}
		}
	}
	return orderAddrs(interfaceAddrs(), first, netip.Addr{}, outwardAddr)
}

// advisedError is an error with what can be done about it.
type advisedError struct {
	err    error
	advice string
}

func (e *advisedError) Error() string { return e.err.Error() }
func (e *advisedError) Unwrap() error { return e.err }
