package bootstrap

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
)

// Ledger is a rank's shared account of what it has done, one memfd (heap memory in-process), made at Join
// and handed to the host's node and to the ranks of the host. Its owner writes it, everybody reads it:
// no call, no lock. The first page holds the rank's doorbell and state; then come 256 slots, one for each
// live communicator (sparse: an unused slot costs no memory).
type Ledger struct {
	rank int
	own  bool
	mem  *ledgermem.Memory

	mu   sync.Mutex // guards next and the taking of slots
	next int        // slots are taken in turn, so that a closed account stays readable as long as possible
}

// Ledger returns the ledger of a rank on this host (own: writable). It waits, bounded by the join timeout (60 s), for the
// rank to join. Mapped once and kept until Job.Close; after that it reads as empty.
func (j *Job) Ledger(rank int) (*Ledger, error) {
	if rank < 0 || rank >= j.size {
		return nil, fmt.Errorf("ledger of rank %d: the job has %d ranks", rank, j.size)
	}
	if j.nodeOf[rank] != j.node {
		return nil, fmt.Errorf("ledger of rank %d: it runs on %s, this is %s", rank, j.named(j.nodeOf[rank]), j.named(j.node))
	}
	ctx, cancel := context.WithTimeout(context.Background(), joinTimeout)
	defer cancel()
	l, err := j.ctl.ledger(ctx, rank)
	if err != nil {
		return nil, j.opError(ctx, fmt.Sprintf("ledger of rank %d", rank), err)
	}
	return l, nil
}

// Bell is the address of the rank's doorbell, 8 bytes that package cuda (cuda.Bell) gives a meaning;
// any rank of the host may ring it, and the node rings it when a rank has died.
func (l *Ledger) Bell() unsafe.Pointer { return unsafe.Pointer(&l.mem.Page.Bell) }

// Account is one communicator's part of a ledger; of a rank on another host, what Far knows of it.
type Account struct {
	far     *farAccount // nil: the rest is what is read
	ledger  *Ledger
	slot    *ledgermem.Slot
	index   int
	opening uint64 // other than slot.Opening: somebody else has the slot now

	seq, sum uint64        // owner: the newest record's
	released atomic.Bool   // owner
	busy     sync.Mutex    // owner: one writer of the text
	message  string        // owner: what SetMessage said; guarded by busy
	told     atomic.Bool   // owner: that was something
	seen     atomic.Uint64 // reader: newest record that it has seen
}

// Record is one entry. Seq counts from 1 without gaps in an account.
type Record struct {
	Seq  uint64
	Kind RecordKind
	Desc [2]uint64 // what package nccl says about the call: equal on all members of a right program
	Sum  uint64    // over this record and all before it: where two accounts have the same at one Seq, they have had the same records so far
}

// RecordKind is what a record tells of.
type RecordKind uint8

const (
	Enqueued RecordKind = iota + 1 // an eager call
	Capture                        // a capture on the communicator began
	Replay                         // a graph was launched
)

// OpNames are the operations of records of kind Enqueued, by the low byte of Desc[0]: the launcher, which does not link package nccl, tells them, too.
var OpNames = ledgermem.OpNames

// OpenAccount takes a slot of the own ledger for a communicator; id is the same on all its members.
func (l *Ledger) OpenAccount(id uint64) (*Account, error) {
	if !l.own {
		return nil, fmt.Errorf("open account %#x: the ledger belongs to rank %d", id, l.rank)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := l.find(id); i >= 0 {
		return nil, fmt.Errorf("open account %#x: it is already open", id)
	}
	page := l.mem.Page
	for range ledgermem.Slots {
		i := l.next
		l.next = (l.next + 1) % ledgermem.Slots
		if page.Used[i/64].Load()&(1<<(i%64)) != 0 {
			continue
		}
		s := l.mem.Slot(i)
		opening := s.Opening.Add(1) // first: readers of the last account stop believing the slot
		s.Last.Store(0)
		s.Done.Store(0)
		s.ClosedAt.Store(0)
		s.BusyLen.Store(0)
		s.NameLen.Store(0)
		s.WaitSeq.Store(0)
		for r := range s.Record {
			s.Record[r].Stamp.Store(0)
		}
		page.ID[i].Store(id)
		page.Used[i/64].Or(1 << (i % 64))
		return &Account{ledger: l, slot: s, index: i, opening: opening}, nil
	}
	return nil, fmt.Errorf("open account %#x: all %d accounts of rank %d are in use: close communicators", id, ledgermem.Slots, l.rank)
}

// FindAccount is a peer's account; nil until it has opened it.
func (l *Ledger) FindAccount(id uint64) *Account {
	i := l.find(id)
	if i < 0 {
		return nil
	}
	s := l.mem.Slot(i)
	opening := s.Opening.Load()
	if l.find(id) != i { // released, and perhaps taken again, in between
		return nil
	}
	return &Account{ledger: l, slot: s, index: i, opening: opening}
}

func (l *Ledger) find(id uint64) int { return l.mem.Page.Find(id) }

// Append writes the next record (own account only, one goroutine at a time). At most 50 ns, no system call.
func (a *Account) Append(k RecordKind, desc [2]uint64) (seq uint64) {
	a.seq++
	if a.released.Load() {
		return a.seq
	}
	a.sum = mix(mix(a.sum^uint64(k)<<56^desc[0]) ^ desc[1])
	a.slot.Write(a.seq, uint8(k), desc[0], desc[1], a.sum)
	return a.seq
}

// mix spreads the bits of a word over all of it: one word gives one other.
func mix(w uint64) uint64 {
	w = (w ^ w>>32) * 0xd6e8feb86659fd93
	return w ^ w>>32
}

// current reports whether the slot still is this account's.
func (a *Account) current() bool { return a.slot.Opening.Load() == a.opening }

// Last is the sequence number of the newest record, 0 before the first. After the account's slot went to another it stays
// at the newest that was seen here.
func (a *Account) Last() uint64 {
	if a.far != nil {
		return a.far.view.Load().last
	}
	n := a.slot.Last.Load()
	if !a.current() {
		return a.seen.Load()
	}
	a.seen.Store(n)
	return n
}

// At reads a record; false when it is not there yet or is older than the 256 that are kept.
func (a *Account) At(seq uint64) (Record, bool) {
	if a.far != nil {
		return a.far.at(seq)
	}
	e, ok := a.slot.Entry(seq)
	if !ok || !a.current() {
		return Record{}, false
	}
	return recordOf(e), true
}

func recordOf(e ledgermem.Entry) Record {
	return Record{Seq: e.Seq, Kind: RecordKind(e.Kind), Desc: e.Desc, Sum: e.Sum}
}

// Known is false while nothing is known of the account: it is one of another host, which has not been asked yet.
func (a *Account) Known() bool { return a.far == nil || a.far.view.Load() != &unknown }

// Newest is the newest record that is there, of those up to one.
func (a *Account) Newest(upTo uint64) (Record, bool) {
	if a.far != nil {
		return a.far.newest(upTo)
	}
	return a.At(min(upTo, a.Last()))
}

// SetDone says how many of the records have been carried out (own account only). It never goes back: who comes late with less says nothing.
func (a *Account) SetDone(seq uint64) {
	if a.released.Load() {
		return
	}
	for old := a.slot.Done.Load(); seq > old && !a.slot.Done.CompareAndSwap(old, seq); {
		old = a.slot.Done.Load()
	}
}

// Done is the most that SetDone has said; 0 after the account's slot went to another.
func (a *Account) Done() uint64 {
	if a.far != nil {
		return a.far.view.Load().done
	}
	n := a.slot.Done.Load()
	if !a.current() {
		return 0
	}
	return n
}

// SetClosed declares that the owner closed the communicator after record n (own account only).
func (a *Account) SetClosed(n uint64) {
	if !a.released.Load() {
		a.slot.ClosedAt.Store(n + 1)
	}
}

// Closed reads what SetClosed declared. After the account's slot went to another it is closed after the newest record that was
// seen here.
func (a *Account) Closed() (n uint64, closed bool) {
	if a.far != nil {
		return a.far.closed()
	}
	at := a.slot.ClosedAt.Load()
	if !a.current() {
		return a.seen.Load(), true
	}
	if at == 0 {
		return 0, false
	}
	return at - 1, true
}

// SetBusy says in one line what the owner is in ("capture train.go:41, all-reduce #3"), "" for nothing. At most 120 bytes are kept.
func (a *Account) SetBusy(what string) {
	a.busy.Lock()
	defer a.busy.Unlock()
	if a.released.Load() {
		return
	}
	a.slot.SetBusy(what)
}

// Busy is what SetBusy said last; "" when nothing, or when it is being written all the time.
func (a *Account) Busy() string {
	if a.far != nil {
		return a.far.view.Load().busy
	}
	text := a.slot.BusyText()
	if !a.current() {
		return ""
	}
	return text
}

// SetName says whose account it is, for the launcher: a communicator's name (own account only, once). At most 48 bytes are kept.
func (a *Account) SetName(name string) { a.slot.SetName(name) }

// SetWait says that the owner has been waiting, for d so far, for record seq to be carried out (own account only). It is over when Done
// has reached seq.
func (a *Account) SetWait(seq uint64, d time.Duration) {
	if a.released.Load() || a.slot.WaitSeq.Load() == seq {
		return
	}
	a.ClearMessage()
	a.slot.SetWait(seq, d)
}

// SetMessage says that the owner has been waiting, for d so far, for the other end of a message, "send of 8 float32, to rank 1" (own account only), which is with
// the job's rank peer. ClearMessage: it does no longer. What SetBusy has said comes first.
func (a *Account) SetMessage(what string, peer int, recv bool, d time.Duration) {
	a.setMessage(what, ledgermem.WaitOfMessage(peer, recv), d)
}

// ClearMessage is the end of SetMessage.
func (a *Account) ClearMessage() { a.setMessage("", 0, 0) }

func (a *Account) setMessage(what string, seq uint64, d time.Duration) {
	if what == "" && !a.told.Load() {
		return
	}
	a.busy.Lock()
	defer a.busy.Unlock()
	if a.released.Load() {
		return
	}
	what = what[:min(len(what), 8*ledgermem.BusyWords)]
	if text := a.slot.BusyText(); text != what && (text == "" || text == a.message) {
		a.slot.SetBusy(what)
	}
	old := a.slot.WaitSeq.Load()
	switch {
	case what == "" && old&ledgermem.MessageWait != 0:
		a.slot.WaitSeq.CompareAndSwap(old, 0)
	case what != "" && old != seq:
		a.slot.SetWait(seq, d)
	}
	a.message = what
	a.told.Store(what != "")
}

// Release gives the slot back (own account only).
func (a *Account) Release() {
	if a.released.Swap(true) {
		return
	}
	l := a.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mem.Page.Used[a.index/64].And(^uint64(1 << (a.index % 64)))
}
