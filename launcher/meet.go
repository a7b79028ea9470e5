package launcher

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// The addresses of hosts are proven before the ranks start: each host dials the first address of the others, at which ssh reached them as a
// rule; where that does not do, all of their addresses.
const (
	// firstWait is how long the first addresses are waited for before the others are tried beside them: an address that leads nowhere
	// gives no answer at all.
	firstWait = time.Second
	// betterWait is how long an address that is liked better is waited for once each host has one.
	betterWait = 300 * time.Millisecond
	// meetBound bounds all of it: the probes of the first addresses and of the others.
	meetBound = 2*probeWait + 9*time.Second
	// tellReached is how often a host tells what it has reached.
	tellReached = 100 * time.Millisecond
)

// addrHost is a host whose address is to be found.
type addrHost struct {
	id    int // in the job: what its proof is made with
	name  string
	first agentwire.Address
	send  func(*agentwire.Message) // Listen and Reach; must not wait
}

// addrAnswer is what a host says: Listening or Reached, or an error.
type addrAnswer struct {
	host int
	m    *agentwire.Message
	err  error
}

// findAddrs finds the address of each host at which the others reach it. It is there also with an error of no host. With patience the first
// addresses are waited for to the end, and all others too.
func findAddrs(ctx context.Context, hosts []addrHost, answers <-chan addrAnswer, full int, patience bool) (*chooser, error) {
	var ids []int
	var names []string
	var first []agentwire.Address
	for _, h := range hosts {
		ids, names, first = append(ids, h.id), append(names, h.name), append(first, h.first)
	}
	c := newChooser(ids, names, first, full)
	ask := func() {
		for i, peers := range c.dials() {
			if len(peers) > 0 {
				hosts[i].send(&agentwire.Message{Reach: &agentwire.Reach{Hosts: peers}})
			}
		}
	}
	ask()
	bound := time.NewTimer(meetBound)
	defer bound.Stop()
	impatient := time.NewTimer(firstWait)
	defer impatient.Stop()
	var better <-chan time.Time
	missing := -1 // hosts that have not said where else they listen; -1: nobody was asked
	listen := func() {
		if missing >= 0 {
			return
		}
		missing = len(hosts)
		for _, h := range hosts {
			h.send(&agentwire.Message{Listen: &agentwire.Empty{}})
		}
	}
	for {
		plain, found, final := true, true, true
		for i := range hosts {
			plain = plain && c.plain(i)
			k, sure := c.best(i)
			found, final = found && k >= 0, final && sure
		}
		switch {
		case plain && missing < 0:
			return c, nil
		case missing < 0 && !c.open():
			listen()
		case missing == 0 && (!c.open() || found && final && !patience):
			return c, nil
		case missing == 0 && found && better == nil && !patience:
			t := time.NewTimer(betterWait)
			defer t.Stop()
			better = t.C
		}
		select {
		case a := <-answers:
			if a.err == nil {
				a.err = c.take(a.host, a.m)
			}
			if a.err != nil {
				return c, &hostError{names[a.host], a.err}
			}
			if a.m.Listening == nil {
				break
			}
			if missing--; missing == 0 {
				for i := range hosts {
					c.all[i] = !c.plain(i)
				}
				ask()
			}
		case <-impatient.C:
			if !patience {
				listen()
			}
		case <-better:
			return c, nil
		case <-bound.C:
			return c, fmt.Errorf("%s: no word within %v of which hosts are reached", HostList(c.silent()), meetBound)
		case <-ctx.Done():
			return c, context.Cause(ctx)
		}
	}
}

// take takes what a host says.
func (c *chooser) take(host int, m *agentwire.Message) error {
	switch {
	case m.Reached != nil:
		for _, r := range m.Reached.Hosts {
			if err := c.note(host, r); err != nil {
				return err
			}
		}
	case m.Listening != nil:
		l := m.Listening.Addrs
		if len(c.addrs[host]) > 1 || len(l) == 0 || len(l) > maxAddrs || l[0].IP != c.addrs[host][0].IP || l[0].Port != c.addrs[host][0].Port {
			return errors.New("its agent says where it listens as it cannot be")
		}
		for _, a := range l {
			if ip, err := netip.ParseAddr(a.IP); err != nil || ip.Zone() != "" || a.Port < 0 || a.Port > 65535 {
				return fmt.Errorf("its agent listens on %q, port %d", a.IP, a.Port)
			}
		}
		c.addrs[host] = l
	default:
		return errors.New("its agent says what it was not asked for")
	}
	return nil
}

// reacher is what a host does for findAddrs.
type reacher struct {
	key      []byte
	host     int
	addrs    []agentwire.Address // of the host
	at       agentwire.Address   // where it answers already
	from, to int                 // ports; 0: any
	say      func(*agentwire.Message)

	mu      sync.Mutex // guards the rest
	closed  bool
	cancel  []context.CancelFunc
	probers []*prober
	wait    sync.WaitGroup
}

// handle does what gorun says, without waiting. It reports whether that is of its kind.
func (r *reacher) handle(m *agentwire.Message) bool {
	var do func(context.Context)
	switch {
	case m.Listen != nil:
		do = func(context.Context) { r.say(&agentwire.Message{Listening: &agentwire.Listening{Addrs: r.listen()}}) }
	case m.Reach != nil:
		do = func(ctx context.Context) {
			reach(ctx, r.key, m.Reach.Hosts, func(some []agentwire.ReachedHost) {
				r.say(&agentwire.Message{Reached: &agentwire.Reached{Hosts: some}})
			})
		}
	default:
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		ctx, cancel := context.WithCancel(context.Background())
		r.cancel = append(r.cancel, cancel)
		r.wait.Go(func() { do(ctx) })
	}
	return true
}

// listen answers at all addresses of the host, each with the port where it is answered or why it is not. The first one is answered already.
func (r *reacher) listen() []agentwire.Address {
	addrs := slices.DeleteFunc(slices.Clone(r.addrs), func(a agentwire.Address) bool { return a.IP == r.at.IP })
	addrs = slices.Insert(addrs, 0, r.at)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return addrs
	}
	for i := 1; i < len(addrs); i++ {
		a := &addrs[i]
		switch {
		case a.Port != 0:
		case a.Bind == "":
			r.probers = append(r.probers, answerAt(r.key, r.host, a, r.from, r.to))
		default: // what answers at the address behind it answers here, too
			for _, o := range addrs {
				if o.IP == a.Bind {
					a.Port, a.Err = o.Port, o.Err
				}
			}
		}
	}
	return addrs
}

// close ends all that handle has begun. It may be called again.
func (r *reacher) close() {
	r.mu.Lock()
	r.closed = true
	for _, cancel := range r.cancel {
		cancel()
	}
	r.mu.Unlock()
	r.wait.Wait()
	for _, p := range r.probers {
		p.close()
	}
	r.probers = nil
}
