package server

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// Standing is what a rank is in, as far as its host knows: from its requests and its ledger, without asking it.
type Standing struct {
	Rank  int
	State string `json:",omitempty"` // "has not joined", "left the job", "ended"; "" while it lives
	Waits []Wait `json:",omitempty"` // what it waits in, the oldest first; at most maxWaits
	Seen  []Seen `json:",omitempty"` // its communicators; at most maxSeen
}

// Wait is an operation that a rank waits in.
type Wait struct {
	What string        // "barrier #3 of group world", "all-reduce #1042 on communicator world"
	For  time.Duration // how long so far

	// One of the three, or none: what tells a meeting from others; a wait in a communicator; the ranks that it is for.
	Group string `json:",omitempty"`
	Comm  uint64 `json:",omitempty"`
	Seq   uint64 `json:",omitempty"` // its record

	Members []Run `json:",omitempty"` // who takes part in the meeting; nil: all ranks

	Other int  `json:",omitempty"` // of a message: the other end's rank, plus 1; 0: not known
	Recv  bool `json:",omitempty"` // of a message: a Recv, else a Send
}

// Run is a range of ranks: the first, and how many.
type Run [2]int

// Seen is what a rank's ledger says of a communicator.
type Seen struct {
	Comm uint64
	Name string
	Last uint64 // newest record; 0: none
	Op   string `json:",omitempty"` // what that was: "broadcast #1041"
	Done uint64 // how many are known to be carried out
	Busy string `json:",omitempty"` // what it is in: "capture at train.go:41"
}

const (
	maxWaits = 4
	maxSeen  = 8
)

// waits are the requests of a rank that have no answer yet.
type waits struct {
	mu  sync.Mutex // innermost
	now map[uint64]Wait
	at  map[uint64]time.Time
}

// begin notes a request that may have to wait.
func (w *waits) begin(id uint64, q *store.Request) {
	var wait Wait
	switch q.Kind {
	case store.Get:
		if q.Quiet {
			return
		}
		wait.What = fmt.Sprintf("get %q", q.Name)
	case store.WaitID:
		wait.What = fmt.Sprintf("wait for id %q", q.Name)
	case store.Gather:
		wait.What = q.What
		if wait.What == "" {
			word := "all-gather"
			if q.Barrier {
				word = "barrier"
			}
			wait.What = fmt.Sprintf("%s #%d of group %s", word, q.Gen, q.Name)
		}
		wait.Group = fmt.Sprintf("%s %d %d", q.Name, q.Opening, q.Gen)
		wait.Members = RunsOf(q.Ranks)
	default:
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.now == nil {
		w.now, w.at = map[uint64]Wait{}, map[uint64]time.Time{}
	}
	w.now[id], w.at[id] = wait, time.Now()
}

func (w *waits) end(id uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.now, id)
	delete(w.at, id)
}

func (w *waits) list() []Wait {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []Wait
	for id, wait := range w.now {
		wait.For = time.Since(w.at[id])
		all = append(all, wait)
	}
	return all
}

// RunsOf writes ranks as runs; nil of nil.
func RunsOf(ranks []int) []Run {
	var runs []Run
	for _, r := range ranks {
		if n := len(runs); n > 0 && runs[n-1][0]+runs[n-1][1] == r {
			runs[n-1][1]++
			continue
		}
		runs = append(runs, Run{r, 1})
	}
	return runs
}

// Standings tells of each rank of this host, in order.
func (s *Server) Standings() []Standing {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []Standing
	for _, r := range s.ranks {
		all = append(all, s.standing(r))
	}
	slices.SortFunc(all, func(a, b Standing) int { return a.Rank - b.Rank })
	return all
}

// maxMissing is how many missing ranks of this host the error of a wait that was given up tells one by one.
const maxMissing = 4

// seen is the error of a wait that was given up, with what is known of the missing ranks of this host.
func (s *Server) seen(e *store.Error) *store.Error {
	if s.Words == nil {
		return e
	}
	var each []string
	s.mu.Lock()
	for _, number := range e.Missing {
		r := s.ranks[number]
		if r == nil {
			continue
		}
		if len(each) == maxMissing {
			each = append(each, "...")
			break
		}
		each = append(each, fmt.Sprintf("rank %d %s", number, s.Words(s.standing(r))))
	}
	s.mu.Unlock()
	told := *e
	told.Text = strings.Join(each, ", ")
	return &told
}

// standing needs mu.
func (s *Server) standing(r *rank) Standing {
	st := Standing{Rank: r.number}
	switch {
	case r.left:
		st.State = "left the job"
	case r.ended || r.exit != nil || r.end != nil:
		st.State = "ended"
	case !r.joined:
		st.State = "has not joined"
	}
	if r.memory != nil && !s.closed {
		st.read(r.memory)
	}
	if r.conn != nil && st.State == "" {
		st.Waits = append(st.Waits, r.conn.waits.list()...)
	}
	if st.State != "" {
		st.Waits = nil
	}
	slices.SortFunc(st.Waits, func(a, b Wait) int { return int(b.For - a.For) })
	st.Waits = st.Waits[:min(len(st.Waits), maxWaits)]
	return st
}

// read takes what the rank's ledger says.
func (st *Standing) read(m *ledgermem.Memory) {
	now := ledgermem.Now()
	for i := range ledgermem.Slots {
		if m.Page.Used[i/64].Load()&(1<<(i%64)) == 0 {
			continue
		}
		slot := m.Slot(i)
		c := Seen{Comm: m.Page.ID[i].Load(), Name: slot.NameText(), Last: slot.Last.Load(), Done: slot.Done.Load(), Busy: slot.BusyText()}
		if c.Name == "" {
			continue // of another kind
		}
		c.Op = opText(slot, c.Last)
		if len(st.Seen) < maxSeen {
			st.Seen = append(st.Seen, c)
		}
		seq, from := slot.WaitSeq.Load(), slot.WaitFrom.Load()
		peer, recv, message := ledgermem.MessageOfWait(seq)
		if message && c.Busy != "" && from < now && slot.ClosedAt.Load() == 0 {
			st.Waits = append(st.Waits, Wait{What: fmt.Sprintf("%s on communicator %s", c.Busy, c.Name), For: time.Duration(now - from), Other: peer + 1, Recv: recv})
		}
		if !message && seq > c.Done && seq <= c.Last && from < now && slot.ClosedAt.Load() == 0 {
			st.Waits = append(st.Waits, Wait{What: fmt.Sprintf("%s on communicator %s", opText(slot, seq), c.Name),
				For: time.Duration(now - from), Comm: c.Comm, Seq: seq})
		}
	}
}

// opText is a record in short: "all-reduce #1042"; "" where there is none.
func opText(slot *ledgermem.Slot, seq uint64) string {
	if seq == 0 {
		return ""
	}
	e, ok := slot.Entry(seq)
	switch op := int(e.Desc[0] & 0xff); {
	case !ok:
		return fmt.Sprintf("call #%d", seq)
	case e.Kind == 2:
		return fmt.Sprintf("capture #%d", seq)
	case e.Kind == 3:
		return fmt.Sprintf("replay #%d", seq)
	case op > 0 && op < len(ledgermem.OpNames):
		return fmt.Sprintf("%s #%d", ledgermem.OpNames[op], seq)
	}
	return fmt.Sprintf("group of calls #%d", seq)
}
