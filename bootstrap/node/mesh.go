package node

import (
	"fmt"
	"hash/fnv"
	"log"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

const (
	// fanOut is how many members a member passes an id on to: 64 members are reached in two steps.
	fanOut = 8
	// joinWave hosts exchange state with a seed at once, then the next ones: a member takes 128.
	joinWave      = 64
	joinWavePause = 50 * time.Millisecond
	// joinAgain is when few hosts look again whether all are there: by then gossip has told most, and host 0 is known.
	joinAgain = 200 * time.Millisecond
	// leaveTimeout bounds the goodbye to the other members.
	leaveTimeout = 200 * time.Millisecond
)

// settings changes memberlist's configuration; tests have their own.
type settings func(*memberlist.Config)

// memberSettings are for a job: it lives minutes to days, on hosts near to each other, and wants to know
// soon. A member that is stopped for 3 s must not be lost: it is suspected after a probe (1 s) that was not
// answered, directly or through 3 others, and then has 5 s (SuspicionMult × ProbeInterval, more above 10
// hosts) to refute it.
func memberSettings(c *memberlist.Config) {
	// Shorter means smaller packets, and more of them: with 50 ms 64 hosts that meet spend a third more on it, and meet no sooner.
	c.GossipInterval = 150 * time.Millisecond
	c.ProbeInterval = time.Second
	c.ProbeTimeout = 500 * time.Millisecond
	c.SuspicionMult = 5
	c.PushPullInterval = 5 * time.Second
	c.TCPTimeout = 3 * time.Second
}

// Messages between members. The first byte says which.
const (
	msgData = iota + 1 // of a link
	msgAck             // of a link
	msgPush            // an id, to be passed on down the tree
	msgID              // an id, gossiped
)

// mesh is this host's membership.
type mesh struct {
	node  *Node
	list  *memberlist.Memberlist
	queue *memberlist.TransmitLimitedQueue
	links []*link // one a host; nil: this one
	quit  chan struct{}
	wg    sync.WaitGroup
	want  func()        // closes wants: the others are needed
	wants chan struct{} // on a lazy member

	mu       sync.Mutex // guards the rest
	closed   bool
	seeds    []string
	members  map[int]*memberlist.Node
	complete chan struct{} // closed when all have been members
	whole    bool
	wake     chan struct{} // a seed or a member came
	pushed   map[string]bool
}

func newMesh(n *Node, set settings) (*mesh, error) {
	m := &mesh{
		node: n, quit: make(chan struct{}), complete: make(chan struct{}), wake: make(chan struct{}, 1),
		seeds: n.cfg.Seeds, members: map[int]*memberlist.Node{}, pushed: map[string]bool{}, wants: make(chan struct{}),
	}
	m.want = sync.OnceFunc(func() { close(m.wants) })
	// Each member that hears of an id tells it to that many times log10 of all: with 8 one in 10,000 jobs has a member that gossip alone
	// would miss, with 3 one in 10. An id is small and comes once.
	m.queue = &memberlist.TransmitLimitedQueue{RetransmitMult: 8, NumNodes: func() int { return n.nodes }}
	m.links = make([]*link, n.nodes)
	for i := range m.links {
		if i != n.cfg.Node {
			m.links[i] = newLink(m, i)
		}
	}

	c := memberlist.DefaultLANConfig()
	set(c)
	c.Name = strconv.Itoa(n.cfg.Node)
	c.BindAddr, c.BindPort = "127.0.0.1", 0
	c.AdvertisePort = 0
	if b := n.cfg.Bind; b.IsValid() {
		c.BindAddr, c.BindPort, c.AdvertisePort = b.Addr().String(), int(b.Port()), int(b.Port())
	}
	if a := n.cfg.Advertise; a.IsValid() {
		c.AdvertiseAddr = a.String()
	}
	c.Logger = log.New(logWriter{n.cfg.Logf}, "", 0)
	if c.Transport == nil {
		var err error
		if c.Transport, err = listen(c, n.cfg.Probe); err != nil {
			return nil, err
		}
	}
	c.Label = label(n.cfg.Job)
	c.SecretKey = n.cfg.Key
	c.EnableCompression = false
	c.DNSConfigPath = ""
	c.Delegate, c.Events = delegate{m}, delegate{m}
	if n.nodes == 1 {
		// Nobody to talk to: no timers.
		c.GossipInterval, c.ProbeInterval, c.PushPullInterval = 0, 0, 0
	}
	list, err := memberlist.Create(c)
	if err != nil {
		c.Transport.Shutdown()
		return nil, err
	}
	m.list = list
	for _, l := range m.links {
		if l != nil {
			m.wg.Go(l.run)
		}
	}
	if n.nodes > 1 {
		m.wg.Go(m.join)
	}
	return m, nil
}

// label keeps the members of two jobs apart, on top of the key. It has at most 255 bytes.
func label(job string) string {
	if len(job) <= 64 {
		return job
	}
	h := fnv.New64a()
	h.Write([]byte(job))
	return fmt.Sprintf("%.40s-%x", job, h.Sum64())
}

func (m *mesh) addr() string { return m.list.LocalNode().Address() }

func (m *mesh) addSeeds(addrs []string) {
	m.mu.Lock()
	m.seeds = append(m.seeds[:len(m.seeds):len(m.seeds)], addrs...)
	m.mu.Unlock()
	m.nudge()
}

func (m *mesh) nudge() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// spawn runs f unless the mesh is closing, which waits for it.
func (m *mesh) spawn(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed {
		m.wg.Go(f)
	}
}

// join exchanges state with other members until the membership is what the launcher's list says. That
// memberlist's Join returned says nothing of it: gossip of joins gets lost when many come at once.
func (m *mesh) join() {
	if m.node.cfg.Lazy > 0 {
		timer := time.NewTimer(m.node.cfg.Lazy)
		defer timer.Stop()
		select {
		case <-m.wants:
		case <-timer.C:
		case <-m.quit:
			return
		}
	}
	few := m.node.nodes <= joinWave
	asked := false
	wave := time.Duration(m.node.cfg.Node/joinWave) * joinWavePause
	pause := wave + jitter(joinWavePause/4)
	if m.node.cfg.Node == 0 {
		pause = 0
	}
	for backoff := 50 * time.Millisecond; ; backoff = min(backoff*3/2, 2*time.Second) {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-m.complete:
			timer.Stop()
			return
		case <-m.quit:
			timer.Stop()
			return
		}
		if to := m.someMember(few && !asked); to == "" {
			// Nobody is known yet: wait for a seed, or for somebody to join here.
			select {
			case <-m.wake:
			case <-m.quit:
				return
			}
			pause = wave + jitter(joinWavePause/4)
			backoff = 50 * time.Millisecond
			continue
		} else {
			began := time.Now()
			if _, err := m.list.Join([]string{to}); err != nil {
				m.node.cfg.Logf("exchange state with %s: %v; again soon", to, err)
			} else if few && !asked {
				backoff = joinAgain
			}
			asked = true
			// Exchanges that take long are a sign that there are too many.
			pause = max(backoff/2+jitter(backoff), 2*time.Since(began)+jitter(backoff))
		}
	}
}

func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }

// someMember is the address of a seed or another member: the first seed, or any by chance.
func (m *mesh) someMember(first bool) string {
	own := m.addr()
	m.mu.Lock()
	defer m.mu.Unlock()
	if first && len(m.seeds) > 0 && m.seeds[0] != own {
		return m.seeds[0]
	}
	var all []string
	for _, s := range m.seeds {
		if s != own {
			all = append(all, s)
		}
	}
	for i, member := range m.members {
		if i != m.node.cfg.Node {
			all = append(all, member.Address())
		}
	}
	if len(all) == 0 {
		return ""
	}
	return all[rand.IntN(len(all))]
}

// missing are the hosts that are no members.
func (m *mesh) missing() []int {
	m.mu.Lock()
	defer m.mu.Unlock()
	var hosts []int
	for i := range m.links {
		if m.members[i] == nil {
			hosts = append(hosts, i)
		}
	}
	return hosts
}

func (m *mesh) member(host int) *memberlist.Node {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.members[host]
}

// publish gives an id to all members, beginning with this one: each passes it on.
func (m *mesh) publish(name string, id []byte) {
	msg := idMessage(msgPush, m.node.cfg.Node, name, id)
	if err := m.list.SendReliable(m.list.LocalNode(), msg); err != nil {
		m.node.cfg.Logf("send id %q to the own member: %v", name, err)
		m.receivePush(msg[1:])
	}
}

func idMessage(kind byte, root int, name string, id []byte) []byte {
	e := wire.Encoder{B: []byte{kind}}
	e.Int(root)
	e.String(name)
	e.Bytes(id)
	return e.B
}

func parseID(b []byte) (root int, name string, id []byte, err error) {
	d := wire.Decoder{B: b}
	root, name, id = d.Int(), d.String(), d.Bytes()
	return root, name, id, d.End()
}

// receivePush enters an id and passes it on, once.
func (m *mesh) receivePush(b []byte) {
	root, name, id, err := parseID(b)
	if err != nil || root < 0 || root >= m.node.nodes {
		m.node.cfg.Logf("push of an id: root %d: %v", root, err)
		return
	}
	m.mu.Lock()
	again := m.pushed[name]
	m.pushed[name] = true
	m.mu.Unlock()
	if again {
		return
	}
	if m.node.learn(name, id) {
		m.gossip(name, id)
	}
	n := m.node.nodes
	m.pass(root, (m.node.cfg.Node-root+n)%n, idMessage(msgPush, root, name, id))
}

// pass sends a push to the children of a position in the tree whose root is position 0. The children of a
// member that cannot be reached are ours.
func (m *mesh) pass(root, position int, msg []byte) {
	n := m.node.nodes
	for child := position*fanOut + 1; child <= position*fanOut+fanOut && child < n; child++ {
		m.spawn(func() {
			to := m.member((root + child) % n)
			if to != nil {
				if err := m.list.SendReliable(to, msg); err == nil {
					return
				}
			}
			m.pass(root, child, msg)
		})
	}
}

// receiveID enters an id that was gossiped.
func (m *mesh) receiveID(b []byte) {
	_, name, id, err := parseID(b)
	if err != nil {
		m.node.cfg.Logf("gossip of an id: %v", err)
		return
	}
	if m.node.learn(name, id) {
		m.gossip(name, id)
	}
}

func (m *mesh) gossip(name string, id []byte) {
	if m.node.nodes > 1 {
		m.queue.QueueBroadcast(broadcast(idMessage(msgID, 0, name, id)))
	}
}

// broadcast is a message in the gossip queue. Ids never replace each other.
type broadcast []byte

func (b broadcast) Invalidates(memberlist.Broadcast) bool { return false }
func (b broadcast) Message() []byte                       { return b }
func (b broadcast) Finished()                             {}
func (b broadcast) UniqueBroadcast()                      {}

func (m *mesh) close() {
	m.mu.Lock()
	m.closed = true
	// When the whole job is over nobody cares.
	alone := len(m.members) <= 1 || m.node.over.Load() || m.node.store.Over()
	m.mu.Unlock()
	close(m.quit)
	for _, l := range m.links {
		if l != nil {
			l.close()
		}
	}
	if !alone {
		if err := m.list.Leave(leaveTimeout); err != nil {
			m.node.cfg.Logf("leave the members: %v", err)
		}
	}
	if err := m.list.Shutdown(); err != nil {
		m.node.cfg.Logf("end memberlist: %v", err)
	}
	m.wg.Wait()
}

// delegate is what memberlist calls. Its methods must not block.
type delegate struct{ m *mesh }

func (d delegate) NodeMeta(limit int) []byte {
	host := d.m.node.cfg.Host
	return []byte(host[:min(len(host), limit)])
}

func (d delegate) NotifyMsg(b []byte) {
	<-d.m.node.meshed // what follows uses the mesh
	if len(b) == 0 || d.m.node.mesh == nil {
		return
	}
	// The bytes are memberlist's again afterwards.
	body := append([]byte{}, b[1:]...)
	switch b[0] {
	case msgData, msgAck:
		d.m.receiveLink(b[0], body)
	case msgPush:
		d.m.receivePush(body)
	case msgID:
		d.m.receiveID(body)
	default:
		d.m.node.cfg.Logf("message of unknown kind %d from a member", b[0])
	}
}

func (d delegate) GetBroadcasts(overhead, limit int) [][]byte {
	return d.m.queue.GetBroadcasts(overhead, limit)
}

// LocalState is all ids: a host that joins has them when its state exchange is done.
func (d delegate) LocalState(bool) []byte {
	var e wire.Encoder
	d.m.node.store.IDs(func(name string, id []byte) {
		e.String(name)
		e.Bytes(id)
	})
	return e.B
}

func (d delegate) MergeRemoteState(b []byte, _ bool) {
	dec := wire.Decoder{B: b}
	for len(dec.B) > 0 {
		name, id := dec.String(), dec.Bytes()
		if dec.Err != nil {
			d.m.node.cfg.Logf("state of a member: %v", dec.Err)
			return
		}
		d.m.node.learn(name, append([]byte{}, id...))
	}
}

func (d delegate) NotifyJoin(member *memberlist.Node)   { d.update(member) }
func (d delegate) NotifyUpdate(member *memberlist.Node) { d.update(member) }

func (d delegate) update(member *memberlist.Node) {
	m := d.m
	host, ok := m.hostOf(member)
	if !ok {
		return
	}
	m.node.store.NameHost(host, string(member.Meta))
	copied := *member
	m.mu.Lock()
	m.members[host] = &copied
	if len(m.members) == m.node.nodes && !m.whole {
		m.whole = true
		close(m.complete)
	}
	m.mu.Unlock()
	if host != m.node.cfg.Node {
		m.want()
	}
	m.nudge()
	m.node.memberBack(host)
	if l := m.links[host]; l != nil {
		l.nudge()
	}
}

func (d delegate) NotifyLeave(member *memberlist.Node) {
	m := d.m
	host, ok := m.hostOf(member)
	if !ok || host == m.node.cfg.Node {
		return
	}
	m.mu.Lock()
	delete(m.members, host)
	closed := m.closed
	m.mu.Unlock()
	if !closed {
		m.node.memberGone(host, string(member.Meta), member.State == memberlist.StateLeft)
	}
}

func (m *mesh) hostOf(member *memberlist.Node) (int, bool) {
	host, err := strconv.Atoi(member.Name)
	if err != nil || host < 0 || host >= m.node.nodes {
		m.node.cfg.Logf("member %q is none of the job's %d hosts", member.Name, m.node.nodes)
		return 0, false
	}
	return host, true
}

// logWriter passes memberlist's log on. What it says of its own working is left out.
type logWriter struct {
	logf func(format string, args ...any)
}

func (w logWriter) Write(p []byte) (int, error) {
	if line := strings.TrimSpace(string(p)); !strings.HasPrefix(line, "[DEBUG]") {
		w.logf("%s", line)
	}
	return len(p), nil
}
