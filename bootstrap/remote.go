package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// maxReply bounds an answer: the values of a gather of very many ranks.
const maxReply = 1 << 30

// remote is the control of a rank that a node serves.
type remote struct {
	conn *wire.Conn
	size int
	node int
	done chan struct{} // the reader has ended

	mu         sync.Mutex // guards the rest
	pending    map[uint64]func(store.Reply, *os.File)
	questions  uint64 // ids of this type's own requests count down from the top
	lost       *store.Error
	closed     bool
	ends       map[int]store.End
	hosts      map[int]string // names, by host
	log        []store.Event
	changed    chan struct{}
	subscribed chan struct{} // closed with the first events; nil before Subscribe
	exports    map[string]*os.File
	fetches    map[uint64]string // what the node asks for and is not there yet
	ledgers    map[int]*Ledger
}

// dial joins the job that is served on a socket.
func dial(ctx context.Context, socket, jobID string, rank, size int) (*remote, wire.WelcomeBody, error) {
	none := wire.WelcomeBody{}
	memory, file, err := ledgermem.Create(rank)
	if err != nil {
		return nil, none, err
	}
	defer file.Close()
	c, err := wire.Dial(ctx, socket, maxReply)
	if err != nil {
		memory.Unmap()
		if e := ended(ctx); e != nil {
			err = e
		}
		return nil, none, err
	}
	welcome, err := greet(ctx, c, file, wire.HelloBody{Version: wire.Version, Job: jobID, Rank: rank, Size: size})
	if err != nil {
		c.Close()
		memory.Unmap()
		return nil, none, err
	}
	r := &remote{
		conn: c, size: size, node: welcome.Node, done: make(chan struct{}),
		pending: map[uint64]func(store.Reply, *os.File){}, ends: map[int]store.End{}, hosts: map[int]string{}, changed: make(chan struct{}),
		exports: map[string]*os.File{}, fetches: map[uint64]string{},
		ledgers: map[int]*Ledger{rank: {rank: rank, own: true, mem: memory}},
	}
	go r.read()
	return r, welcome, nil
}

// ended is ctx.Err, also in the moment after its deadline in which package net has seen that and the context has not.
func ended(ctx context.Context) error {
	if d, ok := ctx.Deadline(); ok && ctx.Err() == nil && !time.Now().Before(d) {
		return context.DeadlineExceeded
	}
	return ctx.Err()
}

// greet says hello and waits for the welcome.
func greet(ctx context.Context, c *wire.Conn, ledger *os.File, h wire.HelloBody) (wire.WelcomeBody, error) {
	stop := context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	none := wire.WelcomeBody{}
	var e wire.Encoder
	e.Hello(h)
	if err := c.Send(wire.Message{Type: wire.Hello, Payload: e.B, File: ledger}); err != nil {
		return none, fmt.Errorf("say hello: %w", err)
	}
	m, err := c.Recv()
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return none, fmt.Errorf("wait for the welcome: %w", err)
	}
	if m.File != nil {
		m.File.Close()
	}
	d := wire.Decoder{B: m.Payload}
	w := d.Welcome()
	switch err := d.End(); {
	case m.Type != wire.Welcome:
		return none, fmt.Errorf("wait for the welcome: message of type %d", m.Type)
	case err != nil:
		return none, fmt.Errorf("welcome: %w", err)
	case w.Refused != "":
		return none, errors.New("refused: " + w.Refused)
	case len(w.NodeOf) != h.Size || w.NodeOf[h.Rank] != w.Node:
		return none, fmt.Errorf("welcome to a job of %d ranks on host %d, want %d", len(w.NodeOf), w.Node, h.Size)
	}
	for _, n := range w.NodeOf {
		if n < 0 || n >= h.Size {
			return none, fmt.Errorf("welcome: host %d in a job of %d ranks", n, h.Size)
		}
	}
	if !stop() { // the deadline is set
		return none, fmt.Errorf("wait for the welcome: %w", ctx.Err())
	}
	return w, nil
}

// read takes messages until the connection ends.
func (r *remote) read() {
	defer close(r.done)
	var err error
	for err == nil {
		var m wire.Message
		if m, err = r.conn.Recv(); err == nil {
			err = r.handle(m)
		}
	}
	r.conn.Close()

	r.mu.Lock()
	defer r.mu.Unlock()
	reason := "the node has ended"
	if !wire.Clean(err) {
		reason = err.Error()
	}
	r.lost = &store.Error{Kind: store.Lost, Text: reason}
	for id, done := range r.pending {
		delete(r.pending, id)
		done(store.Reply{Err: r.lost}, nil)
	}
	if !r.closed {
		r.log = append(r.log, store.Event{
			Kind: store.HostLost, Node: r.node,
			End: store.End{Rank: -1, Host: fmt.Sprint(r.node), Cause: "lost its control connection: " + reason},
		})
	}
	if r.subscribed == nil {
		r.subscribed = make(chan struct{})
		close(r.subscribed)
	}
	r.wake()
}

// handle takes one message. The file is passed on or closed.
func (r *remote) handle(m wire.Message) error {
	file := m.File
	defer func() {
		if file != nil {
			file.Close()
		}
	}()
	d := wire.Decoder{B: m.Payload}
	switch m.Type {
	case wire.Reply:
		reply := d.Reply()
		if err := d.End(); err != nil {
			return err
		}
		r.mu.Lock()
		done := r.pending[m.ID]
		delete(r.pending, m.ID)
		if reply.Err != nil && reply.Err.Kind == store.Ended {
			r.note(reply.Err.End) // it may come before the event
		}
		r.mu.Unlock()
		if done != nil {
			done(reply, file)
			file = nil
		}
	case wire.Events, wire.Deaths:
		events := d.Events()
		if err := d.End(); err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if m.Type == wire.Events && r.subscribed == nil {
			return &wire.Error{Reason: "a node sent events that nobody has asked for"}
		}
		for _, e := range events {
			if e.Kind == store.Left || e.Kind == store.Died {
				r.note(e.End)
			}
			if e.End.Host != "" {
				r.hosts[e.Node] = e.End.Host
			}
		}
		if m.Type == wire.Events {
			r.log = append(r.log, events...)
			select {
			case <-r.subscribed:
			default:
				close(r.subscribed)
			}
			r.wake()
		}
	case wire.Fetch:
		key := d.String()
		if err := d.End(); err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if f, ok := r.exports[key]; ok {
			r.answer(m.ID, f)
		} else {
			r.fetches[m.ID] = key
		}
	case wire.FetchCancel:
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.fetches, m.ID)
	case wire.Stacks:
		if err := d.End(); err != nil {
			return err
		}
		go func(id uint64) { // not here: it takes a moment, in which events would wait
			r.conn.Send(wire.Message{Type: wire.Stacked, ID: id, Payload: stacks()})
		}(m.ID)
	default:
		return &wire.Error{Reason: fmt.Sprintf("a node sent a message of type %d", m.Type)}
	}
	return nil
}

// note keeps how a rank ended; a death after a goodbye replaces it. mu is held.
func (r *remote) note(end store.End) {
	if old, ok := r.ends[end.Rank]; !ok || old.Left && !end.Left {
		r.ends[end.Rank] = end
	}
}

// wake is called with mu held.
func (r *remote) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// ask sends a question under an id; done is called once and owns the file.
func (r *remote) ask(t wire.Type, id uint64, payload []byte, done func(store.Reply, *os.File)) {
	r.mu.Lock()
	if r.lost != nil || r.closed {
		err := r.lost
		if err == nil {
			err = &store.Error{Kind: store.Lost, Text: ErrClosed.Error()}
		}
		r.mu.Unlock()
		done(store.Reply{Err: err}, nil)
		return
	}
	r.pending[id] = done
	r.mu.Unlock()
	// An error here ends the connection, and the reader answers.
	if err := r.conn.Send(wire.Message{Type: t, ID: id, Payload: payload}); err != nil {
		r.conn.Close()
	}
}

func (r *remote) start(id uint64, q *store.Request, done func(store.Reply)) {
	var e wire.Encoder
	e.Request(q)
	if q.Kind == store.CloseGroup { // has no answer
		r.conn.Send(wire.Message{Type: wire.Request, ID: id, Payload: e.B})
		done(store.Reply{})
		return
	}
	r.ask(wire.Request, id, e.B, func(reply store.Reply, file *os.File) {
		if file != nil {
			file.Close()
		}
		done(reply)
	})
}

func (r *remote) cancel(id uint64) {
	r.conn.Send(wire.Message{Type: wire.Cancel, ID: id})
}

func (r *remote) subscribe() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.subscribed == nil {
		r.subscribed = make(chan struct{})
		r.conn.Send(wire.Message{Type: wire.Subscribe})
	}
	return r.subscribed
}

func (r *remote) events(from int) ([]store.Event, <-chan struct{}) {
	r.subscribe()
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log[min(from, len(r.log)):len(r.log):len(r.log)], r.changed
}

// statusWait bounds the wait for the first events.
const statusWait = time.Second

func (r *remote) status(rank int) *store.End {
	first := r.subscribe()
	select {
	case <-first: // as ever but the first time
	default:
		grace := time.NewTimer(statusWait)
		defer grace.Stop()
		select {
		case <-first:
		case <-r.done: // they will not come any more
		case <-grace.C:
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if end, ok := r.ends[rank]; ok {
		return &end
	}
	return nil
}

// question asks something about a rank of the host and waits for the descriptor.
func (r *remote) question(ctx context.Context, t wire.Type, rank int, payload []byte) (*os.File, error) {
	type answer struct {
		err  *store.Error
		file *os.File
	}
	r.mu.Lock()
	r.questions++
	id := -r.questions
	r.mu.Unlock()
	answers := make(chan answer, 1)
	r.ask(t, id, payload, func(reply store.Reply, file *os.File) { answers <- answer{reply.Err, file} })
	var a answer
	select {
	case a = <-answers:
	case <-ctx.Done():
		r.cancel(id)
		grace := time.NewTimer(cancelGrace)
		defer grace.Stop()
		select {
		case a = <-answers:
		case <-grace.C:
			r.mu.Lock()
			delete(r.pending, id)
			r.mu.Unlock()
			a.err = &store.Error{Kind: store.Cancelled, Missing: []int{rank}}
		}
	}
	if a.err != nil {
		if a.file != nil {
			a.file.Close()
		}
		return nil, a.err
	}
	return a.file, nil
}

func (r *remote) export(key string, h Handle) (func(), error) {
	var f *os.File // nil: exported without a descriptor
	if h.FD >= 0 {
		fd, err := dupFD(h.FD)
		if err != nil {
			return nil, err
		}
		f = os.NewFile(uintptr(fd), key)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, twice := r.exports[key]; twice || r.closed {
		if f != nil {
			f.Close()
		}
		if twice {
			return nil, errors.New("the key is already exported")
		}
		return nil, ErrClosed
	}
	r.exports[key] = f
	for id, wanted := range r.fetches {
		if wanted == key {
			delete(r.fetches, id)
			r.answer(id, f)
		}
	}
	return sync.OnceFunc(func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.exports[key] == f {
			if f != nil {
				f.Close()
			}
			delete(r.exports, key)
		}
	}), nil
}

// answer gives the node an exported descriptor. mu is held.
func (r *remote) answer(id uint64, f *os.File) {
	var e wire.Encoder
	e.Reply(store.Reply{})
	r.conn.Send(wire.Message{Type: wire.Fetched, ID: id, Payload: e.B, File: f})
}

func (r *remote) fetch(ctx context.Context, rank int, key string) (Handle, error) {
	var e wire.Encoder
	e.Int(rank)
	e.String(key)
	file, err := r.question(ctx, wire.Import, rank, e.B)
	if err != nil {
		return Handle{}, err
	}
	if file == nil {
		return Handle{FD: -1}, nil
	}
	defer file.Close()
	fd, err := dupFD(int(file.Fd()))
	return Handle{FD: fd}, err
}

func (r *remote) ledger(ctx context.Context, rank int) (*Ledger, error) {
	r.mu.Lock()
	l := r.ledgers[rank]
	r.mu.Unlock()
	if l != nil {
		return l, nil
	}
	var e wire.Encoder
	e.Int(rank)
	file, err := r.question(ctx, wire.Ledger, rank, e.B)
	if err != nil {
		return nil, err
	}
	if file == nil {
		return nil, fmt.Errorf("%w: answer without a descriptor", ErrLost)
	}
	defer file.Close()
	memory, err := ledgermem.Map(file, rank)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if l := r.ledgers[rank]; l != nil || r.closed {
		memory.Unmap()
		if l == nil {
			return nil, ErrClosed
		}
		return l, nil
	}
	l = &Ledger{rank: rank, mem: memory}
	r.ledgers[rank] = l
	return l, nil
}

func (r *remote) inProcess() bool { return false }

func (r *remote) hostName(node int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hosts[node]
}

func (r *remote) far(q digest.Query, done func([]digest.State)) {
	r.mu.Lock()
	r.questions++
	id := -r.questions
	r.mu.Unlock()
	var e wire.Encoder
	q.Encode(&e)
	r.ask(wire.Far, id, e.B, func(reply store.Reply, file *os.File) {
		if file != nil {
			file.Close()
		}
		if reply.Err != nil || len(reply.Values) != 1 {
			done(nil)
			return
		}
		d := wire.Decoder{B: reply.Values[0]}
		states := digest.DecodeStates(&d, r.size)
		if d.End() != nil {
			states = nil
		}
		done(states)
	})
}

func (r *remote) suspect(rank int) {
	var e wire.Encoder
	e.Int(rank)
	r.conn.Send(wire.Message{Type: wire.Suspect, Payload: e.B}) // a hint: an error here is the reader's to see
}

// die breaks the connection, as the end of the process would.
func (r *remote) die(string) { r.end(nil) }

func (r *remote) close() error {
	r.end(func() {
		r.conn.Send(wire.Message{Type: wire.Goodbye})
		r.conn.Flush(goodbyeWait)
		// The node ends the connection when it has read the goodbye. To close before would lose it where the node's last messages are still
		// unread here: the kernel then tells the node of a reset and not of what was sent.
		select {
		case <-r.done:
		case <-time.After(goodbyeWait):
		}
	})
	return nil
}

// goodbyeWait bounds the two waits of a goodbye: a node that does not read must not keep a rank.
const goodbyeWait = time.Second

func (r *remote) end(farewell func()) {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	r.closed = true
	r.mu.Unlock()
	if farewell != nil {
		farewell()
	}
	r.conn.Close()
	<-r.done

	r.mu.Lock()
	defer r.mu.Unlock()
	for key, f := range r.exports {
		if f != nil {
			f.Close()
		}
		delete(r.exports, key)
	}
	for _, l := range r.ledgers {
		l.mem.Retire()
	}
}
