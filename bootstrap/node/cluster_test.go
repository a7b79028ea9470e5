package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/internal/inproc"
	"github.com/gorun-dev/gorun/rankenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(patient{m}) }

// patient are the tests, and then a wait: memberlist waits for none of its last probes, which take some seconds where packets were lost.
type patient struct{ *testing.M }

func (p patient) Run() int {
	code := p.M.Run()
	for end := time.Now().Add(time.Minute); goleak.Find() != nil && time.Now().Before(end); {
	}
	return code
}

// network is what the members of a test have between them: memberlist's mock or loopback sockets, with
// faults.
type network struct {
	mock *memberlist.MockNetwork // nil: loopback sockets

	loss atomic.Int64 // of 1000 packets and streams

	sends  sync.WaitGroup
	mu     sync.Mutex // guards the rest
	over   bool       // nothing is sent any more
	cut    map[string]bool
	noUDP  map[string]bool // addresses whose packets are all lost
	noTCP  map[string]bool // addresses whose streams all fail
	closed chan struct{}
	pumps  sync.WaitGroup
}

func newNetwork(mock bool) *network {
	w := &network{cut: map[string]bool{}, noUDP: map[string]bool{}, noTCP: map[string]bool{}, closed: make(chan struct{})}
	if mock {
		w.mock = &memberlist.MockNetwork{}
	}
	return w
}

// faulty is the transport of one member.
type faulty struct {
	memberlist.NodeAwareTransport
	net  *network
	addr string

	packets chan *memberlist.Packet // of the mock
	streams chan net.Conn           // of the mock
	once    sync.Once
	down    chan struct{}
}

func (w *network) transport(t testing.TB, name string) *faulty {
	if w.mock != nil {
		tr := w.mock.NewTransport(name)
		ip, port, err := tr.FinalAdvertiseAddr("", 0)
		if err != nil {
			t.Fatal(err)
		}
		f := &faulty{
			NodeAwareTransport: tr, net: w, addr: fmt.Sprintf("%v:%d", ip, port), down: make(chan struct{}),
			packets: make(chan *memberlist.Packet, 4096), streams: make(chan net.Conn, 1024),
		}
		w.pumps.Go(f.pump)
		return f
	}
	tr, err := memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{"127.0.0.1"}, Logger: log.New(quiet{}, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	return &faulty{NodeAwareTransport: tr, net: w, addr: fmt.Sprintf("127.0.0.1:%d", tr.GetAutoBindPort()), down: make(chan struct{})}
}

type quiet struct{}

func (quiet) Write(p []byte) (int, error) { return len(p), nil }

// lost says whether a send is lost; if not, the caller reports its end to sends.
func (w *network) lost(udp bool, ends ...string) bool {
	if rand.Int64N(1000) < w.loss.Load() {
		return true
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range ends {
		if w.cut[a] || udp && w.noUDP[a] || !udp && w.noTCP[a] {
			return true
		}
	}
	if !w.over {
		w.sends.Add(1)
	}
	return w.over
}

// close waits until the mock's senders, who block until somebody takes what they send, are through.
func (w *network) close() {
	w.mu.Lock()
	w.over = true
	w.mu.Unlock()
	w.sends.Wait()
	close(w.closed)
	w.pumps.Wait()
}

// setCut takes members off the network, or puts them back.
func (w *network) setCut(cut bool, addrs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, a := range addrs {
		w.cut[a] = cut
	}
}

func (w *network) isCut(addr string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cut[addr]
}

func (f *faulty) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	if f.net.mock != nil {
		return f.NodeAwareTransport.FinalAdvertiseAddr(ip, port)
	}
	a, err := net.ResolveTCPAddr("tcp", f.addr)
	if err != nil {
		return nil, 0, err
	}
	return a.IP, a.Port, nil
}

func (f *faulty) WriteToAddress(b []byte, a memberlist.Address) (time.Time, error) {
	if f.net.lost(true, f.addr, a.Addr) {
		return time.Now(), nil
	}
	defer f.net.sends.Done()
	if f.net.mock != nil {
		b = bytes.Clone(b) // the mock hands the sender's buffer over
	}
	return f.NodeAwareTransport.WriteToAddress(b, a)
}

func (f *faulty) WriteTo(b []byte, addr string) (time.Time, error) {
	return f.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (f *faulty) DialAddressTimeout(a memberlist.Address, d time.Duration) (net.Conn, error) {
	if f.net.lost(false, f.addr, a.Addr) {
		return nil, errors.New("the test's network lost it")
	}
	defer f.net.sends.Done()
	return f.NodeAwareTransport.DialAddressTimeout(a, d)
}

func (f *faulty) DialTimeout(addr string, d time.Duration) (net.Conn, error) {
	return f.DialAddressTimeout(memberlist.Address{Addr: addr}, d)
}

// pump takes what the mock brings as soon as it comes: the mock's senders block until somebody does, and
// two members that answer each other would block for ever. As on a real network packets are dropped when
// the queue is full, and a member that has ended takes nothing.
func (f *faulty) pump() {
	for {
		select {
		case p := <-f.NodeAwareTransport.PacketCh():
			select {
			case f.packets <- p:
			default:
			}
		case c := <-f.NodeAwareTransport.StreamCh():
			select {
			case <-f.down:
				c.Close()
				continue
			default:
			}
			select {
			case f.streams <- c:
			default:
				c.Close()
			}
		case <-f.net.closed:
			return
		}
	}
}

func (f *faulty) PacketCh() <-chan *memberlist.Packet {
	if f.net.mock != nil {
		return f.packets
	}
	return f.NodeAwareTransport.PacketCh()
}

func (f *faulty) StreamCh() <-chan net.Conn {
	if f.net.mock != nil {
		return f.streams
	}
	return f.NodeAwareTransport.StreamCh()
}

func (f *faulty) Shutdown() error {
	f.once.Do(func() {
		close(f.down)
		if f.net.mock == nil {
			return
		}
		f.net.pumps.Go(func() {
			for {
				select {
				case c := <-f.streams:
					c.Close()
				case <-f.net.closed:
					return
				}
			}
		})
	})
	return f.NodeAwareTransport.Shutdown()
}

// cluster is a job on several nodes, all in this process.
type cluster struct {
	t      testing.TB
	net    *network
	nodeOf []int
	nodes  []*Node
	addrs  []string
	jobs   []*bootstrap.Job // by rank
	config []Config
	trans  []*faulty
}

const testKey = "0123456789abcdef0123456789abcdef"

// newCluster prepares a job of perNode ranks on each of some nodes; nothing is started.
func newCluster(t testing.TB, mock bool, nodes, perNode int) *cluster {
	t.Helper()
	c := &cluster{t: t, net: newNetwork(mock), nodes: make([]*Node, nodes)}
	for r := range nodes * perNode {
		c.nodeOf = append(c.nodeOf, r/perNode)
	}
	c.jobs = make([]*bootstrap.Job, len(c.nodeOf))
	for i := range nodes {
		c.trans = append(c.trans, c.net.transport(t, fmt.Sprint(i)))
		c.addrs = append(c.addrs, c.trans[i].addr)
		c.config = append(c.config, Config{
			Job: "job", Node: i, NodeOf: c.nodeOf, Host: fmt.Sprintf("h%d", i), Key: []byte(testKey),
			Seeds: c.addrs[:1:1],
			// The launcher's heartbeat: what the test cut off is really gone.
			Confirm: func(node int) bool { return c.net.isCut(c.addrs[node]) },
		})
	}
	t.Cleanup(c.close)
	return c
}

func (c *cluster) start(i int, also ...settings) {
	c.t.Helper()
	n, err := start(context.Background(), c.config[i], func(m *memberlist.Config) {
		memberSettings(m)
		m.Transport = c.trans[i]
		for _, set := range also {
			set(m)
		}
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes[i] = n
}

// startAll starts all nodes at once.
func (c *cluster) startAll(also ...settings) {
	c.t.Helper()
	var wg sync.WaitGroup
	for i := range c.nodes {
		wg.Go(func() { c.start(i, also...) })
	}
	wg.Wait()
	if c.t.Failed() {
		c.t.FailNow()
	}
}

func (c *cluster) ready() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 150*time.Second)
	defer cancel()
	for i, n := range c.nodes {
		if err := n.Ready(ctx); err != nil {
			c.t.Fatalf("node %d: %v", i, err)
		}
	}
}

// join joins the ranks of the nodes.
func (c *cluster) join(nodes ...int) {
	c.t.Helper()
	for r, node := range c.nodeOf {
		if slices.Contains(nodes, node) {
			j, err := inproc.Join(c.t.Context(), rankenv.Env{
				Launcher: "gorun", Job: "job", Rank: r, Size: len(c.nodeOf), Control: c.nodes[node].Control(),
			})
			if err != nil {
				c.t.Fatal(err)
			}
			c.jobs[r] = j.(*bootstrap.Job)
		}
	}
}

func (c *cluster) joinAll() {
	c.t.Helper()
	all := make([]int, len(c.nodes))
	for i := range all {
		all[i] = i
	}
	c.join(all...)
}

// each runs f for the ranks of the nodes that have joined, at once, and returns their errors by rank.
func (c *cluster) each(f func(ctx context.Context, j *bootstrap.Job) error) []error {
	ctx, cancel := context.WithTimeout(c.t.Context(), 150*time.Second)
	defer cancel()
	errs := make([]error, len(c.jobs))
	var wg sync.WaitGroup
	for r, j := range c.jobs {
		if j != nil {
			wg.Go(func() { errs[r] = f(ctx, j) })
		}
	}
	wg.Wait()
	return errs
}

func (c *cluster) want(errs []error) {
	c.t.Helper()
	for r, err := range errs {
		if err != nil {
			c.t.Fatalf("rank %d: %v", r, err)
		}
	}
}

// kill ends a host without a word to the others.
func (c *cluster) kill(node int) {
	c.net.setCut(true, c.addrs[node])
	if err := c.nodes[node].Close(); err != nil {
		c.t.Errorf("close node %d: %v", node, err)
	}
}

func (c *cluster) close() {
	var wg sync.WaitGroup
	for _, j := range c.jobs {
		if j != nil {
			wg.Go(func() { j.Close() })
		}
	}
	wg.Wait()
	// Together: each says goodbye to the others.
	for i, n := range c.nodes {
		if n != nil {
			wg.Go(func() {
				if err := n.Close(); err != nil {
					c.t.Errorf("close node %d: %v", i, err)
				}
			})
		}
	}
	wg.Wait()
	for i, n := range c.nodes {
		if n == nil {
			c.trans[i].Shutdown()
		}
	}
	c.net.close()
}

// until waits, bounded, for a state that others bring about.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in 60 s: %s", what)
		}
	}
}
