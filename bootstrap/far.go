package bootstrap

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
)

// Far is what this rank knows of one account in the ledgers of ranks on other hosts. It is asked for, where somebody waits: what is known is as old as the last answer.
// Its methods may be called from several goroutines; none of them waits.
type Far struct {
	job   *Job
	id    uint64
	ranks []int // all members, in order
	query digest.Query
	news  func()
	of    map[int]*Account // by job rank

	floor time.Duration // between any two questions
	start time.Time
	next  atomic.Int64 // no question before, ns since start

	mu     sync.Mutex // guards the rest; the job is not called under it
	under  bool       // a question has no answer yet
	asked  time.Duration
	forSeq uint64 // what the last wait was for
	pause  time.Duration
	detail map[int]*detail

	lookSeq   uint64 // what the last look was for
	lookPause time.Duration
}

// farView is an account as a question found it. It does not change.
type farView struct {
	last, done, closed uint64
	gone               bool
	busy               string
	records            []ledgermem.Entry // ascending
}

// detail are single records of a rank that were asked for.
type detail struct {
	from, to uint64
	since    time.Time
	came     bool
}

const (
	// A wait asks at farFirst, or where there are very many ranks farRank for each, after the last question, and then less and less often, down to once in farPause.
	farFirst = 100 * time.Millisecond
	farRank  = time.Millisecond
	farPause = time.Second
	// Without a wait the others are looked at once in farFlow, or farFlowRank for each rank.
	farFlow     = 400 * time.Millisecond
	farFlowRank = 4 * time.Millisecond
	// farLookPause is between two looks where nothing changes.
	farLookPause = 4 * time.Second
	// farDetail bounds the wait for single records.
	farDetail = 2 * time.Second
)

// Far prepares to ask for account id of the members (job ranks) of whom some are on other hosts. news is called after each answer, on a goroutine that must not be held up.
func (j *Job) Far(id uint64, members []int, news func()) *Far {
	f := &Far{job: j, id: id, ranks: slices.Sorted(slices.Values(members)), news: news, of: map[int]*Account{}, detail: map[int]*detail{}, start: time.Now()}
	f.query = digest.Query{ID: id, Ranks: digest.RanksOf(f.ranks)}
	f.floor = max(farFirst, time.Duration(len(f.ranks))*farRank)
	for _, r := range f.ranks {
		if j.nodeOf[r] != j.node {
			f.of[r] = newFarAccount()
		}
	}
	return f
}

// Account is a member's, nil where it is on this host. It reads as the ledger's own would, but for records that were not asked for.
func (f *Far) Account(rank int) *Account { return f.of[rank] }

// Ask asks for the newest state of all, for a wait for record seq, unless that was done a moment ago.
func (f *Far) Ask(seq uint64) {
	f.ask(func(since time.Duration) bool {
		switch {
		case seq != f.forSeq:
			f.forSeq, f.pause = seq, f.floor
		case since < f.pause:
			return false
		default:
			f.pause = min(2*f.pause, max(farPause, 2*f.floor))
		}
		return true
	})
}

// Look is Ask where nobody waits, and record seq is the newest here: seldom.
func (f *Far) Look(seq uint64) {
	first := max(farFlow, time.Duration(len(f.ranks))*farFlowRank)
	f.ask(func(since time.Duration) bool {
		if seq != f.lookSeq {
			f.lookSeq, f.lookPause = seq, first
		}
		if since < f.lookPause {
			return false
		}
		f.lookPause = min(2*f.lookPause, max(farLookPause, first))
		return true
	})
}

func (f *Far) ask(due func(since time.Duration) bool) {
	now := time.Since(f.start)
	if int64(now) < f.next.Load() {
		return
	}
	f.mu.Lock()
	ask := !f.under && due(now-f.asked)
	if ask {
		f.under, f.asked = true, now
		f.next.Store(int64(now + f.floor))
	}
	f.mu.Unlock()
	if ask {
		f.job.ctl.far(f.query, f.answer)
	}
}

func (f *Far) answer(states []digest.State) {
	f.hear(states)
	f.mu.Lock()
	f.under = false
	f.mu.Unlock()
	f.news()
}

func (f *Far) hear(states []digest.State) {
	for i := range states {
		s := &states[i]
		v := &farView{last: s.Last, done: s.Done, closed: s.Closed, gone: s.Gone, busy: s.Busy, records: s.Records}
		for _, r := range s.Ranks {
			if a := f.of[r]; a != nil {
				a.far.hear(v)
			}
		}
	}
}

// Detail reports whether what can be known of a rank's records from one to another is known; if not it asks for them. At the end of a bounded time it reports so, too.
func (f *Far) Detail(rank int, from, to uint64) bool {
	a := f.of[rank]
	if a == nil {
		return true
	}
	f.mu.Lock()
	d := f.detail[rank]
	if d != nil && d.from <= from && d.to >= to {
		came := d.came || time.Since(d.since) > farDetail
		f.mu.Unlock()
		return came
	}
	if d != nil && !d.came && time.Since(d.since) <= farDetail {
		f.mu.Unlock()
		return false // one question at a time
	}
	d = &detail{from: from, to: to, since: time.Now()}
	f.detail[rank] = d
	f.mu.Unlock()
	q := digest.Query{ID: f.id, Ranks: digest.RanksOf([]int{rank}), From: from, To: to}
	f.job.ctl.far(q, func(states []digest.State) {
		for i := range states {
			a.far.single.Store(&states[i].Records)
		}
		f.mu.Lock()
		d.came = true
		f.mu.Unlock()
		f.news()
	})
	return false
}

// farAccount is an account of another host, as far as it is known here.
type farAccount struct {
	view   atomic.Pointer[farView]           // of the last answer
	single atomic.Pointer[[]ledgermem.Entry] // records that were asked for one by one
}

// unknown is the view before the first answer.
var unknown farView

func newFarAccount() *Account {
	a := &farAccount{}
	a.view.Store(&unknown)
	return &Account{far: a}
}

// hear takes an answer in, unless it is older than what is known.
func (a *farAccount) hear(v *farView) {
	old := a.view.Load()
	switch {
	case v.gone:
		kept := *old
		kept.gone, kept.busy = true, ""
		a.view.Store(&kept)
	case v.last >= old.last && !old.gone:
		a.view.Store(v)
	}
}

func (a *farAccount) closed() (uint64, bool) {
	v := a.view.Load()
	if v.closed > 0 {
		return v.closed - 1, true
	}
	return v.last, v.gone
}

// newest is the newest record that is known, of those up to one.
func (a *farAccount) newest(upTo uint64) (r Record, ok bool) {
	lists := [2][]ledgermem.Entry{a.view.Load().records}
	if single := a.single.Load(); single != nil {
		lists[1] = *single
	}
	for _, l := range lists {
		for _, e := range l {
			if e.Seq <= upTo && e.Seq > r.Seq {
				r, ok = recordOf(e), true
			}
		}
	}
	return r, ok
}

func (a *farAccount) at(seq uint64) (Record, bool) {
	r, ok := a.newest(seq)
	return r, ok && r.Seq == seq
}
