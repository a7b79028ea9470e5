package launcher

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/keeper"
)

// nodeLazy is how long the hosts' nodes leave each other alone if no rank joins the job: many programs need none of it, and 64 hosts spend
// more time on gossip than on such a program. Then they meet in any case: gossip also finds out about hosts that are lost.
const nodeLazy = time.Second

// hostAgent runs the ranks of one host, in this process or by an agent over there. Its methods don't block for long, but where
// it is said.
type hostAgent interface {
	// meet gives what is known when all hosts are prepared.
	meet(m meeting) error
	// start begins to start the ranks. What becomes of them is reported as events.
	start()
	// stopForks keeps ranks that have not been started from being started.
	stopForks()
	// signal sends a signal to the ranks that pick picks; nil picks all.
	signal(sig syscall.Signal, pick func(rank int) bool)
	// note tells the host's bootstrap node what an event of this host means for the job.
	note(e agentEvent)
	// look tells what the ranks do, within some seconds, and with what is known when ctx is done. size is about how many bytes may be told of each.
	look(ctx context.Context, size int) (*hostLook, error)
	// starving gives a function that tells whether ranks that run don't get a CPU, since its last call; nil where they do, or that is not known.
	starving() func() bool
	// refresh has the state of the job fetched, where it is elsewhere.
	refresh()
	// state is what the bootstrap node of host 0 knows of the job, as far as it is known here.
	state() jobState
	// joined reports whether a rank of the host joined the job, and whether it said goodbye.
	joined(rank int) (joined, left bool)
	// lose gives another host up.
	lose(host int, name, cause string)
	// adopted reaps what ranks left behind and has ended since.
	adopted()
	// reap ends what is left of the ranks, all of which have ended, and returns how many processes it killed. It may take some
	// seconds.
	reap() int
	// drained is closed when the output of all ranks has been handed to the collectors. After reap.
	drained() <-chan struct{}
	// over says that the whole job has ended, on all hosts.
	over()
	// close ends the agent, within some seconds.
	close()
}

// jobState is what the bootstrap node of host 0 tells of the job.
type jobState struct {
	ended      []int            // ranks, in the order in which the job heard of their ends
	suspicions []node.Suspicion // in the order in which they were said
}

// meeting is what is known when all hosts are prepared.
type meeting struct {
	addr  string // MASTER_ADDR
	port  int    // MASTER_PORT
	seeds []string
	mpi   *agentwire.MPI // nil: no rank finds a process manager
	iface string         // that holds the address at which the others reach the host; "": not known, or there are none
}

// hostConfig is what a host needs to run its ranks there.
type hostConfig struct {
	agentConfig             // the host owns its keeper, and starts one if it is nil; job, host and spare follow from the rest
	nodes       node.Config // without Lazy and Probe, which are the same on all hosts
	start       func(context.Context, node.Config) (control, error)
	masterPort  bool // reserve a port for the job's meeting point; with several hosts it is one that they can reach
	environ     func(rank int, control string, m meeting) []string
	ways        bool           // children of this process may be ways to other hosts
	unreached   func(host int) // the host's node does not reach another one; with several hosts
}

// localHost is a hostAgent whose ranks are children of this process.
type localHost struct {
	cfg        hostConfig
	node       control
	masterPort int
	masterFD   int               // that keeps it; -1: none
	at         agentwire.Address // where the node is until the hosts' addresses are found; with several hosts
	reach      *reacher          // until then; nil: there is one host
	notes      []string          // for people
	agent      *agent
	release    []func() // what to give back at the end, in reverse order
}

// newLocalHost prepares the host: keeper, bootstrap node, reserved port.
func newLocalHost(ctx context.Context, cfg hostConfig) (*localHost, error) {
	n := &cfg.nodes
	cfg.job, cfg.host = keeper.Job{ID: n.Job, Node: n.Node}, n.Node
	key, host := n.Key, n.Node
	n.Lazy, n.Probe = nodeLazy, func(nonce []byte) []byte { return proof(key, host, nonce) }
	h := &localHost{cfg: cfg, masterFD: -1}
	if err := h.prepare(ctx); err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

func (h *localHost) later(f func()) { h.release = append(h.release, f) }

func (h *localHost) prepare(ctx context.Context) error {
	if h.cfg.keeper == nil {
		k, err := keeper.Start(h.cfg.job)
		if err != nil {
			return err
		}
		h.cfg.keeper = k
	}
	h.later(h.cfg.keeper.Stop)
	h.later(h.leave)
	return h.settle(ctx)
}

// reachable prepares the host for being reached at addresses, of which its node has the first. What it has to say of them goes to say.
func (h *localHost) reachable(addrs []agentwire.Address, say func(*agentwire.Message)) {
	h.at = addrs[0]
	if a, err := netip.ParseAddrPort(h.node.Addr()); err == nil {
		h.at.Port = int(a.Port())
	}
	n := &h.cfg.nodes
	h.reach = &reacher{key: n.Key, host: n.Node, addrs: addrs, at: h.at, from: n.Ports[0], to: n.Ports[1], say: say}
}

// settle starts the node and reserves the port, at the address of the configuration.
func (h *localHost) settle(ctx context.Context) error {
	if err := h.startNode(ctx); err != nil {
		return err
	}
	if h.cfg.masterPort {
		on := netip.IPv4Unspecified()
		if h.cfg.nodes.Bind.IsValid() {
			on = h.cfg.nodes.Bind.Addr()
		} else if !manyHosts(h.cfg.nodes.NodeOf) {
			on = loopback
		}
		fd, port, err := reservePort(on)
		if err != nil {
			return fmt.Errorf("reserve a port on %v for MASTER_PORT: %w", on, err)
		}
		h.masterPort, h.masterFD = port, fd
	}
	return nil
}

// portTries is how often a node is tried at another port of the range: each time another job has taken the one that was free.
const portTries = 20

// startNode starts the node. A port of a range that is taken between freePort and here is replaced by another one.
func (h *localHost) startNode(ctx context.Context) error {
	c := &h.cfg.nodes
	h.node = nil
	for try := 1; ; try++ {
		n, err := h.cfg.start(ctx, *c)
		if err == nil {
			h.node = n
			return nil
		}
		// memberlist keeps nothing of an error but its text.
		if c.Ports[0] == 0 || c.Bind.Port() == 0 || try == portTries || !strings.Contains(err.Error(), syscall.EADDRINUSE.Error()) {
			return fmt.Errorf("start the bootstrap node: %w", err)
		}
		if c.Bind, err = freePort(c.Bind.Addr(), c.Ports[0], c.Ports[1]); err != nil {
			return err
		}
	}
}

// leave gives back what settle took.
func (h *localHost) leave() {
	if h.node != nil {
		h.node.Close()
		h.node = nil
	}
	if h.masterFD >= 0 {
		unix.Close(h.masterFD)
		h.masterFD = -1
	}
}

// move has the node at another address, of which the others are told another one if advertise is one. No rank runs yet.
func (h *localHost) move(ctx context.Context, to *agentwire.Move) (agentwire.Node, error) {
	on, err := netip.ParseAddr(to.Bind)
	if err != nil {
		return agentwire.Node{}, err
	}
	advertise, _ := netip.ParseAddr(to.Advertise)
	h.node.Over() // there is nobody to take leave of
	h.leave()
	c := &h.cfg.nodes
	if c.Bind, err = freePort(on, c.Ports[0], c.Ports[1]); err != nil {
		return agentwire.Node{}, err
	}
	c.Advertise = advertise
	if err := h.settle(ctx); err != nil {
		return agentwire.Node{}, err
	}
	return h.where(), nil
}

// where is where the node is.
func (h *localHost) where() agentwire.Node {
	return agentwire.Node{Addr: h.node.Addr(), MasterPort: h.masterPort}
}

func manyHosts(nodeOf []int) bool {
	for _, n := range nodeOf {
		if n != nodeOf[0] {
			return true
		}
	}
	return false
}

func (h *localHost) meet(m meeting) error {
	if len(m.seeds) > 0 {
		h.node.AddSeeds(m.seeds...)
	}
	for i := range h.cfg.ranks {
		r := &h.cfg.ranks[i]
		r.env = h.cfg.environ(r.rank, h.node.Control(), m)
	}
	if err := h.serveMPI(m); err != nil {
		return err
	}
	c := h.cfg.agentConfig
	if c.files {
		c.spare = map[int]bool{c.keeper.PID(): true}
	}
	if c.ownChild && h.cfg.ways {
		c.spare = map[int]bool{}
		for _, p := range keeper.Processes() {
			if p.Parent == os.Getpid() && p.PID != c.keeper.PID() {
				c.spare[p.PID] = true
			}
		}
	}
	var err error
	h.agent, err = newAgent(c)
	return err
}

func (h *localHost) start() {
	h.agent.start()
	if !manyHosts(h.cfg.nodes.NodeOf) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), meetTimeout)
	var wait sync.WaitGroup
	a, quit := h.agent, make(chan struct{})
	wait.Go(func() {
		err := h.node.Ready(ctx)
		if apart, ok := errors.AsType[*node.ApartError](err); ok && ctx.Err() == context.DeadlineExceeded {
			a.report(agentEvent{kind: hostApart, hosts: apart.Missing})
		} else if err == nil {
			a.report(agentEvent{kind: hostMet})
		}
		tick := time.NewTicker(beat)
		defer tick.Stop()
		stops := stops{time.Now()}
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			if stops.passed(time.Now()) {
				continue // the answers are still to be read
			}
			for _, host := range h.node.Unreached(silentAgreed) {
				h.cfg.unreached(host)
			}
		}
	})
	h.later(func() {
		cancel()
		close(quit)
		wait.Wait()
	})
}

func (h *localHost) stopForks() { h.agent.stopForks() }

func (h *localHost) signal(sig syscall.Signal, pick func(rank int) bool) { h.agent.signal(sig, pick) }

func (h *localHost) note(e agentEvent) {
	switch e.kind {
	case rankExited:
		h.node.RankExited(e.rank, e.status.code(), e.status.cause())
	case forksDone:
		for _, s := range e.started {
			if s.pid == 0 {
				// The others may wait for it, and must end too.
				h.node.RankExited(s.rank, ExitInternal, "was not started")
			}
		}
	}
}

func (h *localHost) refresh() {}

func (h *localHost) state() jobState {
	return jobState{ended: h.node.Ended(), suspicions: h.node.Suspicions()}
}

func (h *localHost) joined(rank int) (joined, left bool) { return h.node.Joined(rank) }

func (h *localHost) lose(host int, name, cause string) { h.node.LoseHost(host, name, cause) }

func (h *localHost) adopted() { h.agent.adopted() }

func (h *localHost) reap() int { return h.agent.reap() }

func (h *localHost) over() {
	if h.node != nil { // it could not be moved
		h.node.Over()
	}
}

func (h *localHost) drained() <-chan struct{} { return closedChan }

var closedChan = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

func (h *localHost) close() {
	if h.agent != nil {
		h.agent.close()
		h.agent = nil
	}
	for i := len(h.release) - 1; i >= 0; i-- {
		h.release[i]()
	}
	h.release = nil
}
