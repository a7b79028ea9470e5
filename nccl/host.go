package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// host carries calls out on the host platform: tasks on the device's streams that meet the other members in shared memory.
//
// This rank's tasks run one after the other whatever their streams: each has a ticket, taken when it was enqueued, and
// waits for its turn. A replay has one ticket for all that its graph does. Barriers are phases: a rank stores the number of
// the phase that it has reached in its own word and waits until no member's word is lower.
type host struct {
	c    *Comm
	n    int
	rank int
	seg  segment

	segMem   *cuda.PeerMemory // the segment's mapping; nil in process, where it is Go memory
	withdraw func()           // the first member's export of it

	tickets atomic.Uint64 // taken so far
	pending atomic.Int64  // eager tasks and replays that are enqueued and not done

	// segMu lets goroutines that are in no task use the segment: held shared meanwhile, and alone to give it up. Taken after mu.
	segMu sync.RWMutex

	mu    sync.Mutex // held during a task's step
	gone  bool       // released; also guarded by segMu
	turn  uint64     // ticket that runs now
	phase uint64     // this rank's
	scan  int        // members below it have been seen in the phase
	ops   uint64     // collectives begun: the parity of the call slot
	chunk uint64     // staged chunks begun: the parity of the staging half
	now   struct {   // the replay that runs
		seq, key, sub uint64
	}
	sent, received []uint64 // messages begun with each peer
	given, taken   []uint64 // messages ended
	tails          []int32  // scratch of p2pTask.line; -1 everywhere between its uses
	srcs, dsts     [][]byte // of the collective that runs
	part, out      [][]byte // scratch
	acc            []byte   // see reduce
	scalars        []uint64 // of the members, where the collective is a pre-multiplied sum

	// What was carried out is used again.
	colls taskPool[collTask]
	p2ps  taskPool[p2pTask]
	marks taskPool[markTask]

	peers peerMappings
	links *hostLinks // nil where all members are on one host
}

func newHost(c *Comm) *host {
	n := len(c.ranks)
	h := &host{c: c, n: n, rank: c.rank, seg: newSegment(n), turn: 1,
		sent: make([]uint64, n), received: make([]uint64, n), given: make([]uint64, n), taken: make([]uint64, n),
		srcs: make([][]byte, n), dsts: make([][]byte, n), part: make([][]byte, n), out: make([][]byte, n), acc: make([]byte, accSize), scalars: make([]uint64, n)}
	h.tails = slices.Repeat([]int32{-1}, 2*n)
	h.peers.of = map[mapKey]*mapping{}
	h.peers.exports = map[uint64]func(){}
	return h
}

func (h *host) segmentKey() string { return "nccl " + h.c.key + " control" }

// makeSegment makes the control segment, on the first member of each host. Ranks of one process share Go memory: so the race detector
// sees what they do, and none can unmap it under another.
func (h *host) makeSegment() error {
	if h.c.job.InProcess() {
		local := make([]uint64, h.seg.size()/8)
		return h.exportSegment(-1, local, wordBytes(local))
	}
	fd, err := memfd(h.seg.size())
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if h.segMem, err = h.c.dev.MapShared(cuda.SharedMemory{FD: fd, Size: uint64(h.seg.size())}); err != nil {
		return err
	}
	return h.exportSegment(fd, nil, h.segMem.Bytes())
}

func (h *host) exportSegment(fd int, local []uint64, b []byte) (err error) {
	if err := h.seg.adopt(b, true); err != nil {
		return err
	}
	h.withdraw, err = h.c.job.Export(h.segmentKey(), bootstrap.Handle{FD: fd, Local: local})
	return err
}

// mapSegment maps it on the others.
func (h *host) mapSegment(ctx context.Context) error {
	hd, err := h.c.job.Import(ctx, h.c.ranks[h.first()], h.segmentKey())
	if err != nil {
		return err
	}
	if hd.FD >= 0 {
		defer unix.Close(hd.FD)
	}
	if local, _ := hd.Local.([]uint64); local != nil {
		return h.seg.adopt(wordBytes(local), false)
	}
	if h.segMem, err = h.c.dev.MapShared(cuda.SharedMemory{FD: hd.FD, Size: uint64(h.seg.size())}); err != nil {
		return err
	}
	return h.seg.adopt(h.segMem.Bytes(), false)
}

// connect finds what the others have opened.
func (h *host) connect(ctx context.Context, offers [][]byte) error {
	if h.rank != h.first() {
		if err := h.mapSegment(ctx); err != nil {
			return err
		}
	}
	if h.links != nil {
		return h.links.connect(ctx, offers)
	}
	return nil
}

// first is the member that makes the segment of this host: the lowest on it.
func (h *host) first() int {
	return slices.IndexFunc(h.c.ranks, func(r int) bool { return h.c.job.NodeOf(r) == h.c.job.Node() })
}

func wordBytes(w []uint64) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), 8*len(w)) }

// memfd makes shared memory that cannot shrink under those who map it.
func memfd(size int) (int, error) {
	fd, err := unix.MemfdCreate("nccl-control", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("control segment: memfd_create: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("control segment of %d bytes: %w", size, err)
	}
	return fd, nil
}

// withdrawSegment ends the export, when all have the segment.
func (h *host) withdrawSegment() {
	if h.withdraw != nil {
		h.withdraw()
		h.withdraw = nil
	}
}

// ring wakes a member that may wait for what this rank has just published.
func (h *host) ring(r int) { h.c.peers[r].bell.Ring() }

func (h *host) ringAll() {
	for r, p := range h.c.peers {
		if r != h.rank && p.bell != nil {
			h.ring(r)
		}
	}
}

// arrive enters the next phase.
func (h *host) arrive() {
	h.phase++
	h.scan = 0
	h.seg.phase(h.rank).Store(h.phase)
	h.publishAll(h.seg.phase(h.rank), h.phase)
	h.ringAll()
}

// all reports whether every member has arrived.
func (h *host) all() bool {
	for h.scan < h.n {
		if h.scan != h.rank && h.seg.phase(h.scan).Load() < h.phase {
			return false
		}
		h.scan++
	}
	return true
}

func (h *host) ticket() uint64 { return h.tickets.Add(1) }

// issue enqueues the calls of one group.
func (h *host) issue(calls []Call, mode Mode) error {
	n := 0
	for n < len(calls) && !calls[n].Op.p2p() {
		n++
	}
	group := uint64(0)
	if n > 1 && mode == 0 {
		group = packRecord(calls[:n])[1]
	}
	for i := range n {
		t := h.newColl(&calls[i], mode)
		t.sub, t.last, t.group = uint64(i), i == n-1, group
		if err := h.submit(calls[i].Stream, t, mode != 0); err != nil {
			return err
		}
	}
	if n < len(calls) {
		return h.submit(calls[n].Stream, h.newP2P(calls[n:], mode), mode != 0)
	}
	return nil
}

// submit enqueues an eager task, or records a captured one behind the communicator's last.
func (h *host) submit(s *cuda.Stream, t cuda.Task, captured bool) error {
	if captured {
		capture := s.Capture()
		if capture == nil {
			return errors.New("the stream's capture has ended")
		}
		capture.After(s, h.c)
		if err := s.Submit(t); err != nil {
			return err
		}
		capture.Mark(s, h.c)
		return nil
	}
	if err := s.Submit(t); err != nil {
		// The others wait for what cannot come any more.
		t.(cuda.Canceler).Cancel(err)
		return err
	}
	return nil
}

// waiting is a task's account of a wait.
type waiting struct {
	idle  int       // steps without progress
	began time.Time // zero until the wait has lasted lookSteps
	seen  time.Time // when the peers were looked at last
}

const (
	// A wait that takes this many steps looks at the clock, and after lookAfter of it at the peers' ledgers: a wait that is short is not made longer.
	lookSteps = 4
	lookAfter = time.Millisecond

	// longWait is from where on a wait is one that others are told of.
	longWait = 100 * time.Millisecond
)

func (w *waiting) reset() { w.idle, w.seen = 0, time.Time{} }

// long is how long the wait has lasted, at its last look; 0 while it is short.
func (w *waiting) long() time.Duration {
	if d := w.seen.Sub(w.began); d > longWait {
		return d
	}
	return 0
}

// look reports whether it is time to look at the peers.
func (w *waiting) look() bool {
	if w.idle++; w.idle < lookSteps {
		return false
	}
	now := time.Now()
	if w.seen.IsZero() {
		w.began, w.seen = now, now
		return false
	}
	if now.Sub(w.seen) < lookAfter {
		return false
	}
	w.seen = now
	return true
}

// broken is the communicator's failure, own or told; nil while it works. Needs mu.
func (h *host) broken() error {
	if f := h.c.failed.Load(); f != nil {
		return f.err
	}
	if h.gone {
		return ErrClosed
	}
	if h.seg.isTold() {
		return h.c.fail(h.toldError(), false, false)
	}
	return nil
}

// notice sees a failure that a member has told, after the step that is under way: none writes to members' memory any more.
func (h *host) notice() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.broken()
}

func (h *host) toldError() error {
	code, rank, text := h.seg.told()
	if code == 0 {
		return nil
	}
	var re *bootstrap.RankError
	if code == codeRank {
		re = h.c.job.RankErr(rank)
	}
	return told(code, rank, text, re)
}

// absent is what is known about a member that a call waits for: an error if it will never come. own is this rank's record of the call, Seq 0 if it has none.
func (h *host) absent(r int, own bootstrap.Record) error {
	if own.Seq > 0 {
		if err := h.c.contradiction(own, r); err != nil {
			return err
		}
	}
	if re := h.c.job.RankErr(h.c.ranks[r]); re != nil && (h.links == nil || h.links.silent(r)) {
		return h.c.ended(r, re)
	}
	return nil
}

func (h *host) tell(err error) error {
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	if h.gone || h.seg.b == nil {
		return err
	}
	if !h.seg.tell(codeOf(err), h.c.jobRankOf(err), err.Error()) {
		// Another member was first; its text is there in a moment, if it is not yet.
		for range 1000 {
			if h.seg.isTold() {
				return h.toldError()
			}
			time.Sleep(time.Microsecond)
		}
		return err
	}
	if h.c.peers != nil {
		h.ringAll()
	}
	h.links.tell(codeOf(err), h.c.jobRankOf(err), err.Error())
	return err
}

func (h *host) told() error {
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	if h.gone || h.seg.b == nil || !h.seg.isTold() {
		return nil
	}
	return h.toldError()
}

func (h *host) declareClosed(n uint64) {
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	h.seg.closed(h.rank).Store(n + 1)
	if h.links != nil {
		// Who hears of this end must know its cause, which may come later from where it was told first.
		if h.seg.isTold() {
			h.links.tell(h.seg.told())
		}
		for _, o := range h.links.out {
			o.publish(nil, h.seg.b, h.seg.offset(unsafe.Pointer(h.seg.closed(h.rank))), n+1)
		}
	}
	h.ringAll()
}

func (h *host) peerClosed(r int) (uint64, bool) {
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	if h.gone {
		return 0, false
	}
	n := h.seg.closed(r).Load()
	return n - 1, n != 0
}

func (h *host) explains() bool { return true }

func (h *host) outstanding() int { return int(h.pending.Load()) }

// release gives the segment and all mappings up. Tasks that are left find the communicator closed.
func (h *host) release() {
	h.peers.close()
	if h.links != nil {
		h.links.close()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.segMu.Lock()
	defer h.segMu.Unlock()
	h.gone = true
	h.withdrawSegment()
	h.peers.unmapAll()
	if h.segMem != nil {
		h.segMem.Close()
	}
	h.seg.b = nil
}

// before and after bracket a replay: between them the graph's tasks have the communicator's turn.
func (h *host) before(r Replay, s *cuda.Stream) error { return h.submit(s, h.newMark(r, false), false) }
func (h *host) after(r Replay, s *cuda.Stream) error  { return h.submit(s, h.newMark(r, true), false) }

type markTask struct {
	h    *host
	r    Replay
	end  bool
	over bool
}

func (h *host) newMark(r Replay, end bool) *markTask {
	t := h.marks.get()
	*t = markTask{h: h, r: r, end: end}
	h.pending.Add(1)
	return t
}

func (t *markTask) Start() {}

func (t *markTask) Step() (bool, error) {
	h := t.h
	h.mu.Lock()
	defer h.mu.Unlock()
	ends := t.end && !h.gone && h.turn == t.r.ticket // all that the graph did is done
	if err := h.broken(); err != nil && !ends {
		return true, t.finish(h.c.errorf(t.name(), err))
	}
	if h.turn != t.r.ticket {
		return false, nil
	}
	if t.end {
		h.now.seq, h.now.key, h.now.sub = 0, 0, 0
		h.turn++
		h.c.acct.SetDone(t.r.seq)
		h.c.dev.Ring()
	} else {
		h.now.seq, h.now.key, h.now.sub = t.r.seq, t.r.key, 0
	}
	return true, t.finish(nil)
}

func (t *markTask) name() string { return fmt.Sprintf("replay #%d of graph %x", t.r.seq, t.r.key) }

func (t *markTask) finish(err error) error {
	h := t.h
	if t.over {
		return err
	}
	t.over = true
	h.pending.Add(-1)
	if err == nil {
		h.marks.put(t)
	}
	return err
}

// Cancel comes where the stream failed before: the members wait for a replay that will not come.
func (t *markTask) Cancel(cause error) {
	t.h.canceled(t.name(), cause)
	t.finish(cause)
}

func (t *markTask) Waiting() string {
	return t.name() + fmt.Sprintf(" on communicator %s: waits for the calls before it", t.h.c.name)
}

// canceled ends the communicator because an enqueued operation will not be carried out.
func (h *host) canceled(what string, err error) {
	if h.c.failed.Load() != nil {
		return
	}
	h.c.fail(&cause{kind: ErrAborted, err: err,
		text: fmt.Sprintf("%v by rank %d: its stream failed before %s: %v", ErrAborted, h.rank, what, err)}, true, false)
}
