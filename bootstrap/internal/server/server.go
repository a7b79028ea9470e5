// Package server serves the ranks of one host on an abstract unix socket: it takes their requests to the
// job's state, relays descriptors between them, keeps their ledgers, and notices when one ends. The
// host's node uses it, and rank 0 where another launcher started the job.
package server

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

const (
	// deathHold is how long a broken connection waits for the launcher's account of the process, which
	// says more than "lost its control connection".
	deathHold = 100 * time.Millisecond
	// helloTimeout bounds a connection that does not say who it is.
	helloTimeout = 10 * time.Second
	// maxRequest bounds what a rank may say at once: the largest value and a list of ranks.
	maxRequest = store.MaxValue + 1<<20
)

// State is the job's shared state, here or on another host. *store.Store is one.
type State interface {
	Start(rank int, id uint64, q *store.Request, done func(store.Reply))
	Cancel(rank int, id uint64)
	Join(rank int, host string) *store.Error
	Leave(rank int, host string)
	Die(rank int, host, cause string)
	Gone(rank int, host string)
	Events(from int) ([]store.Event, <-chan struct{})
}

// Config describes a server.
type Config struct {
	Name   string // of the socket, without the leading NUL
	Job    string
	Node   int
	NodeOf []int // host of each rank
	Host   string
	State  State
	Logf   func(format string, args ...any)
	Joined func() // called when the first rank has joined; may be nil

	Addr    func() string // what ranks are told as wire.WelcomeBody.Addr; nil: ""
	DataKey []byte
	Ports   [2]int // wire.WelcomeBody.Ports

	// Far asks the hosts of a query's ranks; done is called once. nil: there are no other hosts.
	Far func(q digest.Query, done func([]digest.State))

	// Suspect is called when a rank says that it fails because of another one, before its end is reported; may be nil.
	Suspect func(by, rank int)

	// Words says where a rank is, after "rank 3 "; nil: nothing is said of ranks that are missing.
	Words func(Standing) string

	DeathHold time.Duration // 0: deathHold
}

// Server is a running server.
type Server struct {
	Config
	listener *net.UnixListener
	quit     chan struct{}
	wg       sync.WaitGroup

	mu     sync.Mutex // guards the rest
	closed bool
	conns  map[*conn]bool
	ranks  map[int]*rank // of this host
	anyone bool          // somebody has joined
	events []store.Event // those that were passed on
	fetch  map[uint64]*fetch
	stacks map[uint64]*stackQuestion
	token  uint64
}

// rank is what is known of a rank of this host.
type rank struct {
	number int
	conn   *conn // nil before it joined
	joined bool
	left   bool
	end    *store.End // an event said so
	fault  string     // why its connection was given up
	gone   chan struct{}
	ended  bool  // gone is closed: its connection has been read to the end
	told   bool  // the job knows of the end
	exit   *exit // the launcher's account
	hold   *time.Timer
	ledger *os.File
	memory *ledgermem.Memory
	wants  []want // of its ledger
}

type exit struct {
	code  int
	cause string
}

// want is a question of a rank that waits for something of another one.
type want struct {
	from *conn
	id   uint64
}

// fetch is an Import under way.
type fetch struct {
	want
	token uint64
	owner *rank
	key   string
	sent  bool // to the owner
}

type conn struct {
	*wire.Conn
	rank       *rank // nil before the hello
	subscribed bool
	waits      waits
}

// Start opens the socket.
func Start(c Config) (*Server, error) {
	l, err := wire.Listen(c.Name)
	if err != nil {
		return nil, err
	}
	if c.Logf == nil {
		c.Logf = func(string, ...any) {}
	}
	if c.DeathHold == 0 {
		c.DeathHold = deathHold
	}
	s := &Server{
		Config: c, listener: l, quit: make(chan struct{}),
		conns: map[*conn]bool{}, ranks: map[int]*rank{}, fetch: map[uint64]*fetch{}, stacks: map[uint64]*stackQuestion{},
	}
	for r, n := range c.NodeOf {
		if n == c.Node {
			s.ranks[r] = &rank{number: r, gone: make(chan struct{})}
		}
	}
	s.wg.Go(s.accept)
	s.wg.Go(s.passEvents)
	return s, nil
}

func (s *Server) accept() {
	for {
		sock, err := s.listener.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			s.Logf("accept: %v", err) // out of descriptors, say: it may pass
			select {
			case <-time.After(10 * time.Millisecond):
			case <-s.quit:
				return
			}
			continue
		}
		wc, err := wire.NewConn(sock, maxRequest)
		if err != nil {
			s.Logf("refused a connection: %v", err)
			continue
		}
		c := &conn{Conn: wc}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			wc.Close()
			return
		}
		s.conns[c] = true
		s.wg.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.wg.Done()
			s.serve(c)
		}()
	}
}

// serve reads a connection to its end.
func (s *Server) serve(c *conn) {
	err := s.hello(c)
	for err == nil {
		var m wire.Message
		if m, err = c.Recv(); err == nil {
			err = s.handle(c, m)
			if m.File != nil {
				m.File.Close()
			}
		}
	}
	c.Close()
	s.lost(c, err)
}

func (s *Server) hello(c *conn) error {
	c.SetReadDeadline(time.Now().Add(helloTimeout))
	m, err := c.Recv()
	if err != nil {
		return err
	}
	c.SetReadDeadline(time.Time{})
	if m.File != nil {
		defer m.File.Close()
	}
	if m.Type != wire.Hello {
		return &wire.Error{Reason: fmt.Sprintf("message of type %d before the hello", m.Type)}
	}
	d := wire.Decoder{B: m.Payload}
	h := d.Hello()
	if d.Err != nil {
		return d.Err
	}

	r, refusal := s.admit(c, h, m.File)
	var e wire.Encoder
	if refusal != "" {
		e.Welcome(wire.WelcomeBody{Refused: refusal})
		c.Send(wire.Message{Type: wire.Welcome, ID: m.ID, Payload: e.B})
		c.Flush(time.Second)
		return errors.New("refused: " + refusal)
	}
	w := wire.WelcomeBody{Node: s.Node, NodeOf: s.NodeOf, DataKey: s.DataKey, Ports: s.Ports}
	if s.Addr != nil {
		w.Addr = s.Addr()
	}
	e.Welcome(w)
	if err := c.Send(wire.Message{Type: wire.Welcome, ID: m.ID, Payload: e.B}); err != nil {
		return err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if dead := deaths(s.events); len(dead) > 0 {
		c.Send(eventsMessage(wire.Deaths, dead))
	}
	c.rank = r // from here on events reach it
	for _, w := range r.wants {
		s.sendLedger(w, r)
	}
	r.wants = nil
	for _, f := range s.fetch {
		if f.owner == r {
			s.ask(f)
		}
	}
	return nil
}

// admit enters a rank that says hello, or says why not.
func (s *Server) admit(c *conn, h wire.HelloBody, ledger *os.File) (*rank, string) {
	if h.Version != wire.Version {
		return nil, fmt.Sprintf("the program speaks version %d of the control protocol, gorun version %d: build it with this release", h.Version, wire.Version)
	}
	if h.Job != s.Job {
		return nil, fmt.Sprintf("this is job %s, not %s", s.Job, h.Job)
	}
	if h.Size != len(s.NodeOf) {
		return nil, fmt.Sprintf("the job has %d ranks, not %d", len(s.NodeOf), h.Size)
	}
	s.mu.Lock()
	r := s.ranks[h.Rank]
	s.mu.Unlock()
	if r == nil {
		return nil, fmt.Sprintf("rank %d is not on host %s", h.Rank, s.Host)
	}
	if ledger == nil {
		return nil, fmt.Sprintf("rank %d brings no ledger", h.Rank)
	}
	memory, err := ledgermem.Map(ledger, h.Rank)
	if err != nil {
		return nil, err.Error()
	}
	own, err := dupFile(ledger)
	if err != nil {
		memory.Unmap()
		return nil, err.Error()
	}

	s.mu.Lock()
	refusal := ""
	switch {
	case s.closed:
		refusal = "the node is closing"
	case r.left:
		refusal = fmt.Sprintf("rank %d has left the job", h.Rank)
	case r.joined:
		refusal = fmt.Sprintf("rank %d has already joined", h.Rank)
	case r.exit != nil:
		refusal = fmt.Sprintf("rank %d has ended", h.Rank)
	}
	if refusal == "" {
		r.joined, r.conn, r.ledger, r.memory = true, c, own, memory
	}
	first := refusal == "" && !s.anyone
	s.anyone = s.anyone || refusal == ""
	s.mu.Unlock()

	if refusal == "" {
		if err := s.State.Join(h.Rank, s.Host); err != nil {
			s.mu.Lock()
			r.conn, r.ledger, r.memory, r.told = nil, nil, nil, true
			s.mu.Unlock()
			refusal = err.Error()
		}
	}
	if refusal != "" {
		own.Close()
		memory.Unmap()
		return nil, refusal
	}
	if first && s.Joined != nil {
		s.Joined()
	}
	return r, ""
}

func (s *Server) handle(c *conn, m wire.Message) error {
	d := wire.Decoder{B: m.Payload}
	r := c.rank
	switch m.Type {
	case wire.Request:
		q := d.Request()
		if err := d.End(); err != nil {
			return err
		}
		c.waits.begin(m.ID, q)
		s.State.Start(r.number, m.ID, q, func(reply store.Reply) {
			c.waits.end(m.ID)
			if e := reply.Err; e != nil && e.Kind == store.Cancelled {
				reply.Err = s.seen(e)
			}
			if q.Kind != store.CloseGroup {
				sendReply(c, m.ID, reply, nil)
			}
		})
	case wire.Cancel:
		if err := d.End(); err != nil {
			return err
		}
		s.State.Cancel(r.number, m.ID)
		s.cancelWant(want{c, m.ID})
	case wire.Subscribe:
		if err := d.End(); err != nil {
			return err
		}
		s.mu.Lock()
		if !c.subscribed {
			c.subscribed = true
			c.Send(eventsMessage(wire.Events, s.events))
		}
		s.mu.Unlock()
	case wire.Ledger:
		owner := d.Int()
		if err := d.End(); err != nil {
			return err
		}
		s.wantLedger(want{c, m.ID}, owner)
	case wire.Import:
		owner, key := d.Int(), d.String()
		if err := d.End(); err != nil {
			return err
		}
		s.wantExport(want{c, m.ID}, owner, key)
	case wire.Fetched:
		reply := d.Reply()
		if err := d.End(); err != nil {
			return err
		}
		s.mu.Lock()
		if f := s.fetch[m.ID]; f != nil && f.owner == r {
			delete(s.fetch, m.ID)
			sendReply(f.from, f.id, reply, m.File)
		}
		s.mu.Unlock()
	case wire.Far:
		q := digest.DecodeQuery(&d, len(s.NodeOf))
		if err := d.End(); err != nil {
			return err
		}
		if s.Far == nil {
			sendRefusal(want{c, m.ID}, "the job has one host")
			return nil
		}
		s.Far(q, func(states []digest.State) {
			var e wire.Encoder
			digest.EncodeStates(&e, states)
			sendReply(c, m.ID, store.Reply{Values: [][]byte{e.B}}, nil)
		})
	case wire.Stacked:
		s.stacked(r, m.ID, m.Payload)
	case wire.Suspect:
		suspect := d.Int()
		if err := d.End(); err != nil {
			return err
		}
		if suspect < 0 || suspect >= len(s.NodeOf) {
			return &wire.Error{Reason: fmt.Sprintf("suspects rank %d of %d", suspect, len(s.NodeOf))}
		}
		if s.Suspect != nil {
			s.Suspect(r.number, suspect)
		}
	case wire.Goodbye:
		if err := d.End(); err != nil {
			return err
		}
		s.mu.Lock()
		first := !r.left && !r.told
		r.left, r.told = true, true
		s.mu.Unlock()
		if first {
			s.State.Leave(r.number, s.Host)
		}
		return io.EOF // the rank waits for this end before it closes its own
	default:
		return &wire.Error{Reason: fmt.Sprintf("a rank sent a message of type %d", m.Type)}
	}
	return nil
}

func sendReply(c *conn, id uint64, r store.Reply, file *os.File) {
	payload := r.Coded.Bytes(func() []byte {
		var e wire.Encoder
		e.Reply(r)
		return e.B
	})
	c.Send(wire.Message{Type: wire.Reply, ID: id, Payload: payload, File: file})
}

func sendEnd(w want, end store.End) {
	sendReply(w.from, w.id, store.Reply{Err: &store.Error{Kind: store.Ended, End: end}}, nil)
}

func sendRefusal(w want, format string, args ...any) {
	sendReply(w.from, w.id, store.Reply{Err: &store.Error{Kind: store.Refused, Text: fmt.Sprintf(format, args...)}}, nil)
}

// wantLedger answers with the ledger of a rank, when it has joined. The ledger of one that has ended
// stays readable.
func (s *Server) wantLedger(w want, owner int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[owner]
	switch {
	case r == nil:
		sendRefusal(w, "rank %d is not on host %s", owner, s.Host)
	case r.ledger != nil:
		s.sendLedger(w, r)
	case r.end != nil:
		sendEnd(w, *r.end)
	default:
		r.wants = append(r.wants, w)
	}
}

func (s *Server) sendLedger(w want, r *rank) {
	sendReply(w.from, w.id, store.Reply{}, r.ledger)
}

// wantExport asks the owner for what it exports. The owner answers when it has it.
func (s *Server) wantExport(w want, owner int, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[owner]
	switch {
	case r == nil:
		sendRefusal(w, "rank %d is not on host %s", owner, s.Host)
		return
	case r.end != nil:
		sendEnd(w, *r.end)
		return
	}
	s.token++
	f := &fetch{want: w, token: s.token, owner: r, key: key}
	s.fetch[f.token] = f
	s.ask(f)
}

// ask sends a fetch to its owner once it has joined. mu is held.
func (s *Server) ask(f *fetch) {
	if f.sent || f.owner.conn == nil || f.owner.conn.rank == nil {
		return
	}
	f.sent = true
	var e wire.Encoder
	e.String(f.key)
	f.owner.conn.Send(wire.Message{Type: wire.Fetch, ID: f.token, Payload: e.B})
}

// cancelWant ends a wait for a ledger or an export, if w is one.
func (s *Server) cancelWant(w want) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cancelled := func(owner *rank) {
		sendReply(w.from, w.id, store.Reply{Err: &store.Error{Kind: store.Cancelled, Missing: []int{owner.number}}}, nil)
	}
	for token, f := range s.fetch {
		if f.want == w {
			s.dropFetch(token, f)
			cancelled(f.owner)
		}
	}
	for _, r := range s.ranks {
		for i, other := range r.wants {
			if other == w {
				r.wants = append(r.wants[:i], r.wants[i+1:]...)
				cancelled(r)
				break
			}
		}
	}
}

// dropFetch forgets a fetch that nobody waits for. mu is held.
func (s *Server) dropFetch(token uint64, f *fetch) {
	delete(s.fetch, token)
	if f.sent {
		f.owner.conn.Send(wire.Message{Type: wire.FetchCancel, ID: token})
	}
}

// lost is called when a connection has been read to its end.
func (s *Server) lost(c *conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
	var r *rank
	for _, other := range s.ranks {
		if other.conn == c {
			r = other
		}
	}
	if r == nil {
		if !s.closed && !wire.Clean(err) {
			s.Logf("closed a connection that has not joined: %v", err)
		}
		return
	}
	for token, f := range s.fetch {
		if f.from == c {
			s.dropFetch(token, f)
		}
	}
	for _, other := range s.ranks {
		for i := 0; i < len(other.wants); i++ {
			if other.wants[i].from == c {
				other.wants = append(other.wants[:i], other.wants[i+1:]...)
				i--
			}
		}
	}
	r.fault = "lost its control connection"
	if bad := new(wire.Error); errors.As(err, &bad) {
		r.fault = "sent a " + bad.Error()
	}
	if !wire.Clean(err) && !s.closed {
		s.Logf("closed the connection of rank %d: %v", r.number, err)
	}
	r.ended = true
	close(r.gone)
	if s.closed || r.told {
		return
	}
	if r.exit != nil {
		s.tell(r)
		return
	}
	r.hold = time.AfterFunc(s.DeathHold, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.tell(r)
	})
}

// tell reports the end of a rank to the job, once. mu is held: the state's replies only send.
func (s *Server) tell(r *rank) {
	if s.closed {
		return
	}
	if r.hold != nil {
		r.hold.Stop()
		r.hold = nil
	}
	if r.told {
		if r.left && r.exit != nil && r.exit.code != 0 {
			s.state(func() { s.State.Die(r.number, s.Host, r.exit.cause) })
		}
		return
	}
	r.told = true
	switch {
	case r.exit == nil:
		cause := r.fault
		s.state(func() { s.State.Die(r.number, s.Host, cause) })
	case !r.joined && r.exit.code == 0:
		s.state(func() { s.State.Gone(r.number, s.Host) })
		// No event tells of it.
		s.endOf(r, store.End{Rank: r.number, Host: s.Host, Cause: store.GoneCause})
	default:
		cause := r.exit.cause
		if r.exit.code == 0 {
			cause += " without closing its job"
		}
		s.state(func() { s.State.Die(r.number, s.Host, cause) })
	}
}

// state calls the job's state without the lock: its replies to fetches take it.
func (s *Server) state(f func()) {
	s.mu.Unlock()
	defer s.mu.Lock()
	f()
}

// RankExited enters the launcher's account of a local rank's process. It returns when what the rank had
// said before its end has been read, in deathHold at most.
func (s *Server) RankExited(number, code int, cause string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.ranks[number]
	if r == nil || r.exit != nil {
		return
	}
	r.exit = &exit{code, cause}
	if r.joined && !r.ended {
		s.mu.Unlock()
		timer := time.NewTimer(deathHold)
		select {
		case <-r.gone:
		case <-timer.C: // a child of the rank holds its socket
			s.Logf("the process of rank %d has ended, its connection has not", number)
		case <-s.quit:
		}
		timer.Stop()
		s.mu.Lock()
	}
	s.tell(r)
}

// Digest is what the ledgers of this host's ranks say to a query.
func (s *Server) Digest(q digest.Query) []digest.State {
	ranks, err := q.Wants(len(s.NodeOf))
	if err != nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var states []digest.State
	for _, number := range ranks {
		if r := s.ranks[number]; r != nil && r.memory != nil && !s.closed {
			st := digest.Read(r.memory, q)
			st.Ranks = []int{number}
			states = append(states, st)
		}
	}
	return digest.Merge(states)
}

// Rank reports whether a local rank joined, and whether it said goodbye.
func (s *Server) Rank(number int) (joined, left bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.ranks[number]; r != nil {
		return r.joined, r.left
	}
	return false, false
}

// passEvents gives the job's events to the ranks, and rings their bells when a rank has ended.
func (s *Server) passEvents() {
	for from := 0; ; {
		events, more := s.State.Events(from)
		if len(events) == 0 {
			select {
			case <-more:
			case <-s.quit:
				return
			}
			continue
		}
		from += len(events)
		s.pass(events)
	}
}

func (s *Server) pass(events []store.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.events = append(s.events, events...)
	dead := deaths(events)
	all, some := eventsMessage(wire.Events, events), eventsMessage(wire.Deaths, dead)
	for c := range s.conns {
		switch {
		case c.rank == nil || c.rank.left:
		case c.subscribed:
			c.Send(all)
		case len(dead) > 0:
			c.Send(some)
		}
	}
	ring := false
	for _, e := range events {
		if e.Kind == store.Joined {
			continue
		}
		ring = true
		if r := s.ranks[e.End.Rank]; r != nil && e.Kind != store.HostLost {
			s.endOf(r, e.End)
		}
	}
	if ring {
		for _, r := range s.ranks {
			if r.memory != nil {
				r.memory.Page.Bell.Ring()
			}
		}
	}
}

// endOf ends what waits for a local rank that has ended. mu is held.
func (s *Server) endOf(r *rank, end store.End) {
	r.end = &end
	for token, f := range s.fetch {
		if f.owner == r {
			delete(s.fetch, token)
			sendEnd(f.want, end)
		}
	}
	if r.ledger == nil {
		for _, w := range r.wants {
			sendEnd(w, end)
		}
		r.wants = nil
	}
}

func deaths(events []store.Event) []store.Event {
	var dead []store.Event
	for _, e := range events {
		if e.Kind == store.Died || e.Kind == store.HostLost {
			dead = append(dead, e)
		}
	}
	return dead
}

func eventsMessage(t wire.Type, events []store.Event) wire.Message {
	var e wire.Encoder
	e.Events(events)
	return wire.Message{Type: t, Payload: e.B}
}

// Close ends the server: the ranks that are still connected see their connection end.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.wg.Wait()
		return nil
	}
	s.closed = true
	close(s.quit)
	for _, r := range s.ranks {
		if r.hold != nil {
			r.hold.Stop()
		}
	}
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()

	err := s.listener.Close()
	for _, c := range conns {
		c.Close()
	}
	s.wg.Wait()
	for _, r := range s.ranks {
		if r.memory != nil {
			r.memory.Unmap()
			r.ledger.Close()
		}
	}
	return err
}

func dupFile(f *os.File) (*os.File, error) {
	fd, err := dupFD(int(f.Fd()))
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
