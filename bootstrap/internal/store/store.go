package store

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Store is the state of one job. Its methods may be called from several goroutines.
type Store struct {
	size   int
	nodeOf []int

	mu      sync.Mutex // guards all below
	pending map[waitID]*wait
	keys    map[string]*entry
	ids     map[string]*entry
	groups  map[groupKey]*group
	ranks   []rank
	ended   int // ranks that cannot be waited for any more
	died    int
	lost    []bool   // hosts
	names   []string // of hosts, "" until it is known
	broken  *Error   // the control plane is gone

	events  []Event
	changed chan struct{} // closed and replaced with each new event

	blocked    int // waits that name what they block in
	cycleTimer *time.Timer

	replies []func() // run after the lock is given up
}

type rank struct {
	joined, left bool
	end          *End // the reason for which a wait on it fails
	order        int  // of its end among the ends
}

type waitID struct {
	rank int
	id   uint64
}

// A wait is a request that has no reply yet.
type wait struct {
	waitID
	done  func(Reply)
	since time.Time

	// One of the two:
	entry *entry
	gen   *generation

	member int    // index in gen's group
	what   string // Meet
}

// An entry is a key or an id.
type entry struct {
	name  string
	set   bool
	value []byte
	by    int
	waits []*wait
}

// New makes the store of a job; nodeOf is the host index of each rank.
func New(nodeOf []int) *Store {
	nodes := 0
	for _, n := range nodeOf {
		nodes = max(nodes, n+1)
	}
	return &Store{
		size:    len(nodeOf),
		nodeOf:  nodeOf,
		pending: map[waitID]*wait{},
		keys:    map[string]*entry{},
		ids:     map[string]*entry{},
		groups:  map[groupKey]*group{},
		ranks:   make([]rank, len(nodeOf)),
		lost:    make([]bool, nodes),
		names:   make([]string, nodes),
		changed: make(chan struct{}),
	}
}

// unlock gives up the lock and then the replies that were found under it.
func (s *Store) unlock() {
	replies := s.replies
	s.replies = nil
	s.mu.Unlock()
	for _, f := range replies {
		f()
	}
}

func (s *Store) reply(done func(Reply), r Reply) {
	if done != nil {
		s.replies = append(s.replies, func() { done(r) })
	}
}

// settle ends a wait.
func (s *Store) settle(w *wait, r Reply) {
	if s.pending[w.waitID] != w {
		return
	}
	delete(s.pending, w.waitID)
	if w.what != "" {
		s.blocked--
	}
	s.reply(w.done, r)
}

// Start carries out a request of a rank; done is called once, with the reply, possibly before Start returns.
// id is unique among the rank's requests.
func (s *Store) Start(rank int, id uint64, q *Request, done func(Reply)) {
	s.mu.Lock()
	defer s.unlock()
	if err := s.check(rank, id, q); err != nil {
		s.reply(done, Reply{Err: err})
		return
	}
	switch q.Kind {
	case Put:
		s.reply(done, s.put(s.keys, "key", rank, q))
	case PublishID:
		s.reply(done, s.put(s.ids, "id", rank, q))
	case Get:
		s.get(s.keys, rank, id, q, done)
	case WaitID:
		s.get(s.ids, rank, id, q, done)
	case Gather:
		s.gather(rank, id, q, done)
	case CloseGroup:
		s.closeGroup(rank, q)
		s.reply(done, Reply{})
	}
}

func (s *Store) check(rank int, id uint64, q *Request) *Error {
	switch {
	case s.broken != nil:
		return s.broken
	case rank < 0 || rank >= s.size:
		return refused("rank %d of a job of %d", rank, s.size)
	case q.Kind < Put || q.Kind > CloseGroup:
		return refused("request of unknown kind %d", q.Kind)
	case len(q.Value) > MaxValue:
		return refused("value of %d bytes, at most %d are allowed", len(q.Value), MaxValue)
	case len(q.Name) > MaxName:
		return refused("name of %d bytes, at most %d are allowed", len(q.Name), MaxName)
	case s.pending[waitID{rank, id}] != nil:
		return refused("request %d of rank %d is already waiting", id, rank)
	}
	return nil
}

func (s *Store) put(table map[string]*entry, word string, rank int, q *Request) Reply {
	e := lookup(table, q.Name)
	if e.set {
		return Reply{Err: refused("%s %q was already written by rank %d", word, q.Name, e.by)}
	}
	e.set, e.by, e.value = true, rank, append([]byte{}, q.Value...)
	for _, w := range e.waits {
		s.settle(w, Reply{Values: [][]byte{e.value}})
	}
	e.waits = nil
	return Reply{}
}

func (s *Store) get(table map[string]*entry, rank int, id uint64, q *Request, done func(Reply)) {
	e := lookup(table, q.Name)
	if e.set {
		s.reply(done, Reply{Values: [][]byte{e.value}})
		return
	}
	w := &wait{waitID: waitID{rank, id}, done: done, entry: e}
	e.waits = append(e.waits, w)
	s.pending[w.waitID] = w
	s.failOrphans(e)
}

func lookup(table map[string]*entry, name string) *entry {
	e := table[name]
	if e == nil {
		e = &entry{name: name}
		table[name] = e
	}
	return e
}

// failOrphans ends the waits for a value that nobody is left to put: a rank has died, and all that
// live wait for the same value.
func (s *Store) failOrphans(e *entry) {
	if s.died == 0 || len(e.waits) == 0 {
		return
	}
	living := make(map[int]bool)
	for _, w := range e.waits {
		if s.ranks[w.rank].end == nil {
			living[w.rank] = true
		}
	}
	if len(living)+s.ended < s.size {
		return
	}
	all := make([]int, s.size)
	for i := range all {
		all[i] = i
	}
	err := &Error{Kind: Ended, End: *s.firstEnd(all)}
	for _, w := range e.waits {
		s.settle(w, Reply{Err: err})
	}
	e.waits = nil
}

// Cancel ends a wait; its reply says who was missing. A request that was answered before is left alone. A Meet ends
// for all its members.
func (s *Store) Cancel(rank int, id uint64) {
	s.mu.Lock()
	defer s.unlock()
	w := s.pending[waitID{rank, id}]
	if w == nil {
		return
	}
	err := &Error{Kind: Cancelled}
	if w.gen != nil {
		err.Missing = w.gen.missing()
		err.Hosts = s.hostsOf(err.Missing)
	}
	s.drop(w)
	s.settle(w, Reply{Err: err})
	if w.gen != nil && w.what != "" {
		// A meeting takes place for all or for none: else its members would not know what the others do next.
		s.fail(w.gen, &Error{Kind: GaveUp, Text: fmt.Sprintf("rank %d gave up its wait for %s in %s", rank, NamedRanks(err.Missing, err.Hosts), w.what)})
	}
}

// drop takes a wait out of the list that would wake it. Of a value that nobody has put, and nobody waits for any more, nothing is kept.
func (s *Store) drop(w *wait) {
	if w.gen != nil {
		w.gen.waits[w.member] = nil
		return
	}
	e := w.entry
	e.waits = slices.DeleteFunc(e.waits, func(other *wait) bool { return other == w })
	if e.set || len(e.waits) > 0 {
		return
	}
	for _, table := range []map[string]*entry{s.keys, s.ids} {
		if table[e.name] == e {
			delete(table, e.name)
		}
	}
}

// LearnID enters an id that came from elsewhere. It reports whether it was new; ok is false when another
// id stands under the name.
func (s *Store) LearnID(name string, id []byte) (fresh, ok bool) {
	s.mu.Lock()
	defer s.unlock()
	if e := lookup(s.ids, name); e.set {
		return false, string(e.value) == string(id)
	}
	r := s.put(s.ids, "id", -1, &Request{Name: name, Value: id})
	return r.Err == nil, true
}

// HasID reports whether an id is known.
func (s *Store) HasID(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.ids[name]
	return e != nil && e.set
}

// IDs calls fn for each id that is known.
func (s *Store) IDs(fn func(name string, id []byte)) {
	s.mu.Lock()
	defer s.unlock()
	for name, e := range s.ids {
		if e.set {
			fn(name, e.value)
		}
	}
}

// Break ends all waits and all later requests: the control plane is gone.
func (s *Store) Break(reason string) {
	s.mu.Lock()
	defer s.unlock()
	if s.broken != nil {
		return
	}
	s.broken = &Error{Kind: Lost, Text: reason}
	for _, w := range s.pending {
		s.settle(w, Reply{Err: s.broken})
	}
	s.stopCycleTimer()
}

// Close ends all waits and the store's timer.
func (s *Store) Close() { s.Break("the job is closed") }
