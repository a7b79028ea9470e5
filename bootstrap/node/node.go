// Package node is the host's side of the control plane: it serves the ranks of its host on an abstract
// unix socket and is one member of the job's memberlist. The launcher runs one a host.
//
// The node of host 0 holds the job's state (keys, groups, who has ended); the other nodes pass their
// ranks' requests on to it and keep a copy of its events. Unique ids go another way: each node has them
// all, pushed down a tree of members, gossiped as repair, and handed over when a member joins.
//
//	n, err := node.Start(ctx, node.Config{Job: id, NodeOf: make([]int, 4), Host: "a"})
//	if err != nil {
//		return err
//	}
//	defer n.Close()
//	env.Control = n.Control() // of each rank's rankenv.Env
package node

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// Config describes a node.
type Config struct {
	Job    string
	Node   int            // this host's index
	NodeOf []int          // host index of each rank of the job; len is the job's size
	Host   string         // this host's name, for errors
	Key    []byte         // gossip key, 32 bytes, random per job; needed where the job has several hosts
	Bind   netip.AddrPort // where memberlist listens; zero: loopback, any port
	// Advertise is where the other hosts reach Bind, if that is another address: behind address translation, on the same port.
	Advertise netip.Addr
	// Probe answers the probes of other hosts (ProbeMark); nil: they get no answer.
	Probe func(nonce []byte) []byte

	Ports [2]int                           // those on which ranks listen for other hosts, both inclusive; zero: any
	Seeds []string                         // addresses of other members to join; of few hosts the first is asked first: best host 0
	Lazy  time.Duration                    // join them when a rank of this host joins or another host does so, and after this time at the latest
	Logf  func(format string, args ...any) // nil: discard

	// Confirm is asked, again and again while gossip holds a host for dead, whether it is given up: the launcher has its own
	// heartbeat. nil: gossip alone decides.
	Confirm func(node int) bool
}

// Node is a running node.
type Node struct {
	cfg     Config
	nodes   int
	control string
	store   *store.Store // of the job on host 0, else a copy of what it tells
	server  *server.Server
	quit    chan struct{}
	wg      sync.WaitGroup

	over     atomic.Bool // the whole job is
	meshOnce sync.Once
	meshed   chan struct{} // closed when mesh is set
	mesh     *mesh         // nil: no memberlist could be started on a job of one host

	mu        sync.Mutex // guards the rest
	closed    bool
	published map[string]bool // ids of this host's ranks
	waiting   map[call]func(store.Reply)
	lost      *store.Error // host 0 is gone
	doubted   map[int]bool // hosts that gossip holds for dead
	suspicion []Suspicion  // on host 0
	far       far

	exchanges exchanges
}

// call is a request that is with host 0.
type call struct {
	rank int
	id   uint64
}

// Start opens the control socket. The memberlist member is started with the first rank that joins on a job of one host, at once else.
// ctx bounds the start only.
func Start(ctx context.Context, c Config) (*Node, error) { return start(ctx, c, memberSettings) }

func start(ctx context.Context, c Config, settings settings) (*Node, error) {
	n := &Node{
		cfg: c, quit: make(chan struct{}), meshed: make(chan struct{}),
		published: map[string]bool{}, waiting: map[call]func(store.Reply){}, doubted: map[int]bool{},
	}
	if err := n.check(); err != nil {
		return nil, fmt.Errorf("start node %d: %w", c.Node, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("start node %d: %w", c.Node, err)
	}
	if n.cfg.Logf == nil {
		n.cfg.Logf = func(string, ...any) {}
	}
	n.cfg.NodeOf = slices.Clone(c.NodeOf)
	n.store = store.New(n.cfg.NodeOf)
	n.store.NameHost(c.Node, c.Host)
	n.far.init()
	n.exchanges.init()
	if len(c.Key) == 0 {
		n.cfg.Key = make([]byte, 32) // one host: nobody else needs it
		rand.Read(n.cfg.Key)
	}

	lazily := func() { n.mesh.want() }
	if n.nodes == 1 {
		lazily = func() { n.spawn(func() { n.startMesh(settings) }) }
	} else if err := n.startMesh(settings); err != nil {
		n.store.Close()
		return nil, fmt.Errorf("start node %d: memberlist: %w", c.Node, err)
	}

	n.control = "gorun-" + rand.Text()
	var err error
	n.server, err = server.Start(server.Config{
		Name: n.control, Job: c.Job, Node: c.Node, NodeOf: n.cfg.NodeOf, Host: c.Host,
		State: state{n}, Logf: n.cfg.Logf, Joined: lazily, Suspect: n.suspect, Far: n.askFar(), Addr: n.dataAddr, DataKey: n.dataKey(), Ports: c.Ports, Words: words,
	})
	if err != nil {
		n.stop()
		return nil, fmt.Errorf("start node %d: control socket: %w", c.Node, err)
	}
	n.far.server.Store(n.server)
	if n.nodes > 1 && c.Node == 0 {
		n.spawn(n.shipEvents)
	}
	return n, nil
}

func (n *Node) check() error {
	c := &n.cfg
	if len(c.NodeOf) == 0 {
		return errors.New("the job has no ranks")
	}
	if strings.ContainsRune(c.Job, 0) || c.Job == "" {
		return fmt.Errorf("job id %q", c.Job)
	}
	for r, node := range c.NodeOf {
		if node < 0 || node >= len(c.NodeOf) {
			return fmt.Errorf("rank %d is on host %d of a job of %d ranks", r, node, len(c.NodeOf))
		}
		n.nodes = max(n.nodes, node+1)
	}
	for node := range n.nodes {
		if !slices.Contains(c.NodeOf, node) {
			return fmt.Errorf("host %d has no ranks", node)
		}
	}
	if c.Node < 0 || c.Node >= n.nodes {
		return fmt.Errorf("the job has %d hosts", n.nodes)
	}
	if n.nodes > 1 && len(c.Key) != 32 {
		return fmt.Errorf("the gossip key has %d bytes, want 32", len(c.Key))
	}
	return nil
}

// spawn runs f unless the node is closing, which waits for it.
func (n *Node) spawn(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		n.wg.Go(f)
	}
}

// Control is the name of the control socket, for rankenv.Env.Control.
func (n *Node) Control() string { return n.control }

// Addr is the address of this host's memberlist member, for the Seeds of others; "" before it has started.
func (n *Node) Addr() string {
	select {
	case <-n.meshed:
	default:
		return ""
	}
	if n.mesh == nil {
		return ""
	}
	return n.mesh.addr()
}

// named is a host in an error: "host node7", or "host 3" while its name is not known.
func (n *Node) named(host int) string {
	if name := n.store.HostName(host); name != "" {
		return "host " + name
	}
	return fmt.Sprintf("host %d", host)
}

// namedAll are hosts in an error.
func (n *Node) namedAll(hosts []int) string {
	names := make([]string, len(hosts))
	for i, h := range hosts {
		names[i] = n.named(h)
	}
	return strings.Join(names, ", ")
}

// dataAddr is the address at which ranks of this host take data from those of others: the member's, which the others reach.
func (n *Node) dataAddr() string {
	if n.nodes == 1 {
		return ""
	}
	addr, err := netip.ParseAddrPort(n.Addr())
	if err != nil {
		return ""
	}
	return addr.Addr().String()
}

// dataKey is what ranks get for their connections to other hosts. It is not the gossip key itself: who has it can't speak as a host.
func (n *Node) dataKey() []byte {
	if n.nodes == 1 {
		return nil
	}
	h := hmac.New(sha256.New, n.cfg.Key)
	h.Write([]byte("gorun data between hosts of job " + n.cfg.Job))
	return h.Sum(nil)
}

// AddSeeds names more members to join.
func (n *Node) AddSeeds(addrs ...string) {
	if n.nodes > 1 {
		n.mesh.addSeeds(addrs)
	}
}

// ApartError says that hosts of the job were no members when a wait for all of them was given up.
type ApartError struct {
	Missing []int // hosts, ascending
	Err     error // of the wait's context

	names string
}

func (e *ApartError) Error() string {
	return fmt.Sprintf("wait for the hosts of the job: %v, missing %s", e.Err, e.names)
}

func (e *ApartError) Unwrap() error { return e.Err }

// Ready waits until every host of the job is a member, as the placement says. The error of a deadline is an *ApartError.
func (n *Node) Ready(ctx context.Context) error {
	if n.nodes == 1 {
		return nil
	}
	select {
	case <-n.mesh.complete:
		return nil
	case <-ctx.Done():
		select {
		case <-n.mesh.complete: // in the same moment
			return nil
		default:
		}
		missing := n.mesh.missing()
		return &ApartError{Missing: missing, Err: ctx.Err(), names: n.namedAll(missing)}
	case <-n.quit:
		return errors.New("wait for the hosts: the node is closed")
	}
}

// RankExited tells the job that the process of a local rank has ended ("exited with code 3", "killed by SIGSEGV").
// A rank that never joined, or said goodbye, and exited with code 0 is no death (but the waits of others for one that never
// joined end with an error). It returns when all that the rank had said before has been read, after 100 ms at most.
func (n *Node) RankExited(rank int, code int, cause string) { n.server.RankExited(rank, code, cause) }

// Joined reports whether the local rank joined, and whether it said goodbye.
func (n *Node) Joined(rank int) (joined, left bool) { return n.server.Rank(rank) }

// Ended lists the ranks that have ended, in the order in which the job heard of it: by a goodbye, by a broken connection, or
// by RankExited with a code that is not 0.
func (n *Node) Ended() []int {
	var ranks []int
	events, _ := n.store.Events(0)
	for _, e := range events {
		if (e.Kind == store.Left || e.Kind == store.Died) && !slices.Contains(ranks, e.End.Rank) {
			ranks = append(ranks, e.End.Rank)
		}
	}
	return ranks
}

// Suspicion is what a rank says of another: it fails because of that one.
type Suspicion struct{ By, Rank int }

// Suspicions lists what ranks have said (bootstrap.Job.Suspect), in the order in which host 0 heard of it; elsewhere it is empty.
// What a rank of host 0 said is there when RankExited for it has returned.
func (n *Node) Suspicions() []Suspicion {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.suspicion)
}

// suspect notes what a rank of this host says.
func (n *Node) suspect(by, rank int) {
	if n.cfg.Node != 0 {
		n.tellHead(opSuspect, func(e *wire.Encoder) { e.Int(by); e.Int(rank) })
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.suspicion = append(n.suspicion, Suspicion{by, rank})
}

// Over says that the whole job is over: Close takes no leave of the other hosts then.
func (n *Node) Over() { n.over.Store(true) }

// Close ends the node; ranks that are still connected see their control connection end. Other hosts take a host that closes
// with ranks that have not ended for lost.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		n.wg.Wait()
		return nil
	}
	n.closed = true
	n.mu.Unlock()
	err := n.server.Close()
	n.stop()
	return err
}

// stop ends everything but the server.
func (n *Node) stop() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	close(n.quit)
	n.endFar()
	n.endExchanges(errNodeClosed)
	n.store.Close()
	n.meshOnce.Do(func() { close(n.meshed) }) // it never started
	<-n.meshed
	if n.mesh != nil {
		n.mesh.close()
	}
	n.wg.Wait()
}

func (n *Node) startMesh(settings settings) error {
	var err error
	n.meshOnce.Do(func() {
		defer close(n.meshed)
		n.mesh, err = newMesh(n, settings)
	})
	if err != nil {
		n.cfg.Logf("memberlist: %v", err)
	}
	return err
}
