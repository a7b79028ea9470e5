package nccl

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// closeWait is how long Close waits for the other members: long enough for ranks that end together, short enough for a defer.
const closeWait = 2 * time.Second

// Comm is a communicator: a group of ranks, one device each. Its calls come from one goroutine at a time and in the same
// order on all members; Abort, Err and Stats from any goroutine. Close it after its graphs and before its device.
type Comm struct {
	// What each call reads comes first, in as few lines of the cache as can be.
	lib       *library // be, where it is one
	dev       *cuda.Device
	acct      *bootstrap.Account
	failed    atomic.Pointer[failure]
	grouping  int                // depth of Group; the goroutine that makes the calls has it
	collected []Call             // by Group; the same
	windows   []*SymmetricWindow // in the order in which all members made them; changed under mu
	ranks     []int              // job ranks of the members
	rank      int
	userRegs  atomic.Int32 // allocations registered by the user: most calls need not look
	check     CheckMode
	shut      atomic.Bool // closing or closed; changed under mu
	leased    atomic.Bool // there is a gate; changed under mu
	calls     atomic.Uint64
	staged    atomic.Uint64 // bytes
	lookout   lookout

	direct atomic.Uint64 // bytes

	job     *bootstrap.Job
	name    string
	timeout time.Duration
	uid     bootstrap.UniqueID
	id      uint64 // first word of uid: names the accounts
	key     string // uid in hexadecimal: names groups and exports
	group   *bootstrap.Group
	peers   []peer         // by rank
	far     *bootstrap.Far // the accounts of members on other hosts; nil without such
	be      backend

	// Only the goroutine that makes the calls touches these.
	one       [1]Call // the call being enqueued: no allocation
	sorted    []Call  // a group that is being issued; backends keep no calls
	noPeer    bool
	origin    *origin // where a library makes it from another communicator
	splits    int
	shrinks   int
	made      []madeOp // by number; nil: none was made
	madeCount uint32   // where the next number is looked for
	madeEver  uint64
	watchFrom int // which peer is compared first, where not all are at each call

	mu        sync.Mutex // guards what follows; never held over a call that waits
	closing   bool
	over      chan struct{} // of the Close that is under way: closed at its end
	closed    bool
	gate      Gate
	gateSeq   uint64 // record of the lease
	holders   map[*holding]struct{}
	regs      map[uint64]*registered   // by memory id
	meetings  map[int]*bootstrap.Group // of the lease, by peer
	releasing int                      // registrations that are gone, and whose memory goes at the moment

	wg     sync.WaitGroup // goroutines that Close waits for
	ctx    context.Context
	cancel context.CancelCauseFunc // ends them
	unsee  func()                  // stops the watch of the job's events
}

// peer is another member as this one sees it.
type peer struct {
	acct *bootstrap.Account
	bell *cuda.Bell // nil: on another host
	far  bool       // on another host
}

type failure struct{ err error }

// backend carries calls out: the host's collectives, or a vendor's library.
type backend interface {
	// issue enqueues the calls of one group on their streams. mode is 0 for eager calls. p2p calls come last.
	issue(calls []Call, mode Mode) error
	before(r Replay, s *cuda.Stream) error
	after(r Replay, s *cuda.Stream) error
	// ticket takes this rank's next place in the order in which its tasks run.
	ticket() uint64

	// register is for the first registration of memory by the user, or by a graph; deregister for the end of the last one of that kind. hold keeps the memory, and
	// comes with the end of the last registration of all: the backend releases it when nothing below it uses the memory any more. after
	// follows with no lock held.
	register(m *cuda.Memory, user bool) error
	deregister(m *cuda.Memory, user bool, hold *cuda.Hold) (after func() error)
	prepare(ctx context.Context, group []Call, layouts [][]byte) error
	drain()

	outstanding() int     // eager calls and replays that are enqueued and not done
	tell(err error) error // tells the members of a failure; returns the first that was told
	told() error          // the failure that a member has told, else nil
	declareClosed(n uint64)
	peerClosed(rank int) (n uint64, closed bool)
	mappings() int
	explains() bool // whether it compares calls itself, and so says better than a ledger what differs in a group
	release()
}

// Config are the settings of Init; nil: all defaults.
type Config struct {
	Name    string        // for messages; default "world"; equal on all members
	Ranks   []int         // job ranks that are members, in order; nil: all. Only members call Init
	Timeout time.Duration // how long Init and Shrink, and with Strict each collective, wait for the others; default 60 s
	Check   CheckMode     // default Watch; equal on all members
	NoPeer  bool          // small collectives on GPUs go by the library, too, never by peer memory; where one member says so none has it
}

// CheckMode is how eager calls are compared between ranks.
type CheckMode uint8

const (
	Watch  CheckMode = iota // a contradiction is an error at once, on a GPU before a wait says that the calls are done; lateness only at the caller's deadline
	Strict                  // each collective waits for the others' description before it is issued
	Trust                   // the ledgers are not compared; a backend may still see a contradiction
)

// Init makes a communicator of all ranks of the job. The unique id is made by its first rank and travels by
// the job's bootstrap. Collective.
func Init(ctx context.Context, job *bootstrap.Job, dev *cuda.Device) (*Comm, error) {
	return InitConfig(ctx, job, dev, nil)
}

// InitConfig is Init with settings. It fails on all members if it fails on one, and leaves nothing behind.
func InitConfig(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, cfg *Config) (*Comm, error) {
	var set Config
	if cfg != nil {
		set = *cfg
	}
	if set.Name == "" {
		set.Name = "world"
	}
	if set.Ranks == nil {
		for r := range job.Size() {
			set.Ranks = append(set.Ranks, r)
		}
	}
	if set.Timeout == 0 {
		set.Timeout = 60 * time.Second
	}
	ranks := fmt.Sprint(set.Ranks)
	return initComm(ctx, job, dev, set, fmt.Sprintf("%s%s#%d", set.Name, ranks, nextInit(job, set.Name+ranks)), nil)
}

// initComm makes a communicator; meeting is a name for it that its members share and no other communicator of the job has. from is where a library may make it from,
// nil if nowhere.
func initComm(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, set Config, meeting string, from *origin) (comm *Comm, err error) {
	c := &Comm{noPeer: set.NoPeer, origin: from, job: job, dev: dev, name: set.Name, ranks: slices.Clone(set.Ranks), check: set.Check, timeout: set.Timeout,
		holders: map[*holding]struct{}{}, regs: map[uint64]*registered{}, meetings: map[int]*bootstrap.Group{}}
	c.rank = slices.Index(c.ranks, job.Rank())
	fail := func(err error) (*Comm, error) { return nil, c.errorf("init", err) }
	switch {
	case dev == nil:
		return fail(causef(ErrArgument, "no device"))
	case c.rank < 0:
		return fail(causef(ErrArgument, "rank %d of the job is no member of %v", job.Rank(), c.ranks))
	case set.Check > Trust:
		return fail(causef(ErrArgument, "unknown check mode %d", set.Check))
	}
	for i, r := range c.ranks {
		if r < 0 || r >= job.Size() || slices.Contains(c.ranks[:i], r) {
			return fail(causef(ErrArgument, "members %v: rank %d is twice in it, or not in the job of %d", c.ranks, r, job.Size()))
		}
	}
	waitCtx, done := context.WithTimeout(ctx, set.Timeout)
	defer done()
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	defer func() {
		if err != nil {
			c.releaseAll(err)
		}
	}()

	if c.uid, err = c.meetID(waitCtx, "nccl "+meeting); err != nil {
		return fail(err)
	}
	c.key = hex.EncodeToString(c.uid[:16])
	for i := range 8 {
		c.id |= uint64(c.uid[i]) << (8 * i)
	}
	if c.group, err = job.GroupOnce("nccl "+c.key, c.ranks); err != nil {
		return fail(err)
	}
	// Each step ends with a meeting: what fails on one member fails on all, and none waits for what will not come.
	offers, err := c.commit(waitCtx, c.open(), c.offer)
	if err == nil {
		err = c.agree(offers)
	}
	if err != nil {
		return fail(err)
	}
	if err := c.connect(waitCtx, offers); err != nil {
		return fail(err)
	}
	switch be := c.be.(type) {
	case *host:
		be.withdrawSegment()
	case *library:
		if err := be.openPeer(waitCtx); err != nil {
			return fail(err)
		}
		be.start()
	}
	c.unsee = job.Watch(c.event)
	c.origin = nil // of use only here
	return c, nil
}

// open makes what this rank has for itself, and what the others will map.
func (c *Comm) open() error {
	if err := c.dev.Err(); err != nil {
		return err
	}
	own, err := c.job.Ledger(c.job.Rank())
	if err != nil {
		return err
	}
	if err := c.dev.SetBell(cuda.BellAt(own.Bell())); err != nil {
		return err
	}
	if c.acct, err = own.OpenAccount(c.id); err != nil {
		return err
	}
	c.acct.SetName(c.name)
	if len(c.ranks) == 1 {
		c.be = &alone{c: c}
		return nil
	}
	if c.dev.Platform() != cuda.Host {
		l, err := newLibrary(c)
		c.be, c.lib = l, l
		return errors.Join(err, l.messages.open(c, own))
	}
	h := newHost(c)
	c.be = h
	if c.spansHosts() {
		if h.links, err = newHostLinks(h); err != nil {
			return err
		}
	}
	if c.rank != h.first() {
		return nil
	}
	if err := h.makeSegment(); err != nil {
		return err
	}
	if h.links != nil {
		h.links.listen()
	}
	return nil
}

// connect finds what the others have opened, and makes what is made together.
func (c *Comm) connect(ctx context.Context, offers [][]byte) error {
	err := c.findPeers()
	if l, ok := c.be.(*library); ok {
		return l.connect(ctx, err)
	}
	if h, ok := c.be.(*host); ok && err == nil {
		err = h.connect(ctx, offers)
	}
	_, err = c.commit(ctx, err, nil)
	return err
}

// findPeers finds the other members' accounts.
func (c *Comm) findPeers() error {
	peers := make([]peer, len(c.ranks))
	c.far = c.openFar()
	for i, r := range c.ranks {
		if !c.near(i) {
			peers[i] = peer{acct: c.far.Account(r), far: true}
			continue
		}
		l, err := c.job.Ledger(r)
		if err != nil {
			return err
		}
		peers[i] = peer{acct: l.FindAccount(c.id), bell: cuda.BellAt(l.Bell())}
		if peers[i].acct == nil {
			return fmt.Errorf("rank %d has no account in its ledger", i)
		}
	}
	c.peers = peers
	return nil
}

// commit tells the members whether this one is ready, and fails with the first member's error if one is not. Members that are ready
// say what offer gives; offers are by rank.
func (c *Comm) commit(ctx context.Context, own error, offer func() []byte) (offers [][]byte, err error) {
	v := []byte{byte(c.check), 0}
	switch {
	case own != nil:
		v[1] = 1
		if isConsequence(own) {
			v[1] = 2
		}
		v = append(v, own.Error()...)
	case offer != nil:
		v = append(v, offer()...)
	}
	all, err := c.group.Meet(ctx, v, "init of communicator "+c.name)
	if err != nil {
		return nil, errors.Join(own, err)
	}
	for r, v := range all {
		if len(v) < 2 {
			return nil, fmt.Errorf("rank %d sent a message of %d bytes", r, len(v))
		}
	}
	for kind := byte(1); kind <= 2; kind++ { // causes before consequences
		for r, v := range all {
			switch {
			case v[1] != kind:
			case r == c.rank:
				return nil, own
			default:
				return nil, fmt.Errorf("rank %d: %s", r, v[2:])
			}
		}
	}
	for r, v := range all {
		switch {
		case v[0] != all[0][0]:
			return nil, causef(ErrMismatch, "rank %d: check mode %d; rank 0: %d", r, v[0], all[0][0])
		}
		offers = append(offers, v[2:])
	}
	return offers, nil
}

// event is called for what happens to the job's ranks.
func (c *Comm) event(e bootstrap.Event) {
	if e.Kind != bootstrap.RankDied && e.Kind != bootstrap.RankLeft {
		return
	}
	r := slices.Index(c.ranks, e.Rank)
	if r < 0 || r == c.rank {
		return
	}
	end := func() {
		if err := c.ended(r, e.Err); err != nil {
			c.fail(err, true, false)
		}
	}
	h, isHost := c.be.(*host)
	l, isLibrary := c.be.(*library)
	switch {
	case isHost && h.links != nil && !c.near(r):
		h.links.afterLastWords(end)
	case isLibrary && e.Kind == bootstrap.RankLeft:
		l.afterLastWords(end)
	default:
		end()
	}
}

// afterwards calls f after a while, on a goroutine of g's, unless the communicator is over by then.
func (c *Comm) afterwards(g *sync.WaitGroup, wait time.Duration, f func()) {
	g.Go(func() {
		select {
		case <-time.After(wait):
			f()
		case <-c.ctx.Done():
		}
	})
}

// ended is the failure that the end of a member is: none if it had closed the communicator.
func (c *Comm) ended(r int, e *bootstrap.RankError) error {
	if _, closed := c.be.peerClosed(r); closed || e == nil {
		return nil
	}
	text := e.Error()
	if e.Left {
		text = fmt.Sprintf("rank %d left the job without closing communicator %s", r, c.name)
	}
	return &cause{kind: ErrRank, text: text, err: e}
}

// fail ends the communicator with a cause: the first one wins, among all members. tell: the others do not know yet. wait: break the
// graphs on this goroutine, before fail returns. It returns the cause that won.
func (c *Comm) fail(err error, tell, wait bool) error {
	err, first := c.failOnce(err, tell)
	if first {
		c.breakHolders(err, wait)
	}
	return err
}

// failOnce is fail but for the graphs, which are to be broken after the first failure. It takes no lock that a caller of package cuda may hold.
func (c *Comm) failOnce(err error, tell bool) (won error, first bool) {
	if f := c.failed.Load(); f != nil {
		return f.err, false
	}
	if tell && c.be != nil {
		err = c.be.tell(err)
	}
	f := &failure{err}
	if !c.failed.CompareAndSwap(nil, f) {
		return c.failed.Load().err, false
	}
	// Before anything that lets this rank's program go on, and end.
	c.job.Suspect(originOf(err))
	if c.cancel != nil {
		c.cancel(err)
	}
	c.dev.Ring()
	if l, ok := c.be.(*library); ok {
		l.failing() // before mu: who holds it may wait for the library
	}
	return err, true
}

func (c *Comm) breakHolders(err error, wait bool) {
	c.mu.Lock()
	var broken []Holder
	if !c.closed {
		for h := range c.holders {
			broken = append(broken, h.Holder)
		}
	}
	if len(broken) > 0 && !wait {
		c.wg.Add(1) // under mu: Close has not begun to wait
		go func() {
			defer c.wg.Done()
			breakAll(broken, err)
		}()
	}
	c.mu.Unlock()
	if wait {
		breakAll(broken, err)
	}
}

func breakAll(hs []Holder, cause error) {
	for _, h := range hs {
		h.Break(cause)
	}
}

// usable is why the communicator does not work, nil while it does: its failure, with a look at what other members tell, and ErrClosed after Close.
func (c *Comm) usable() error {
	if c == nil {
		return errNoComm
	}
	if f := c.failed.Load(); f != nil {
		return f.err
	}
	if c.shut.Load() {
		return ErrClosed
	}
	if err := c.be.told(); err != nil {
		return c.fail(err, false, false)
	}
	return nil
}

func (c *Comm) errorf(op string, err error) error {
	if c == nil {
		return &Error{Op: op, Rank: -1, Err: err}
	}
	return &Error{Op: op, Comm: c.name, Rank: c.rank, Err: err}
}

// Name is the communicator's name, for messages.
func (c *Comm) Name() string {
	if c == nil {
		return "nil"
	}
	return c.name
}

// Rank is this rank's number in the communicator, -1 of a nil *Comm.
func (c *Comm) Rank() int {
	if c == nil {
		return -1
	}
	return c.rank
}

// Size is the number of members, 0 of a nil *Comm.
func (c *Comm) Size() int {
	if c == nil {
		return 0
	}
	return len(c.ranks)
}

// JobRank is a member's rank in the job. It panics, like an index, where no member has that rank.
func (c *Comm) JobRank(rank int) int {
	if c == nil {
		panic("nccl: JobRank of a nil communicator, which has no members")
	}
	return c.ranks[rank]
}

// Device is this rank's device, nil of a nil *Comm.
func (c *Comm) Device() *cuda.Device {
	if c == nil {
		return nil
	}
	return c.dev
}

// Job is the job that the communicator is part of, nil of a nil *Comm.
func (c *Comm) Job() *bootstrap.Job {
	if c == nil {
		return nil
	}
	return c.job
}

// String is "communicator world (rank 1 of 4)".
func (c *Comm) String() string {
	if c == nil {
		return "no communicator"
	}
	return fmt.Sprintf("communicator %s (rank %d of %d)", c.name, c.rank, len(c.ranks))
}

// Err is nil while the communicator works, else why it does not: every later call returns it.
func (c *Comm) Err() error {
	if c == nil {
		return c.errorf("use", errNoComm)
	}
	if f := c.failed.Load(); f != nil {
		return c.errorf("use", f.err)
	}
	if c.shut.Load() && c.isClosed() {
		return c.errorf("use", ErrClosed)
	}
	if err := c.be.told(); err != nil {
		return c.errorf("use", c.fail(err, false, false))
	}
	return nil
}

func (c *Comm) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// Abort ends the communicator here and now, with the cause: enqueued operations fail, graphs that hold it break, the others learn of it
// and fail with an error that names this rank, and where the cause is the end of a context also the ranks that have not come. It waits, half a
// second at most, until what is enqueued here has ended. From any goroutine, more than once: the first cause stays. The members that are left go on with Shrink.
//
// A library's communicator is aborted, never revoked (ncclCommRevoke): from NCCL 2.28.7 on, up to 2.28.9 at least, an abort after a revoke crashes where buffers are registered,
// and a replay loses the device. What a revoke is for, the end of a replay that hangs, comes from breaking the graphs beside the abort.
func (c *Comm) Abort(err error) error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return nil
	}
	text := fmt.Sprintf("%v by rank %d", ErrAborted, c.rank)
	if err != nil {
		text += ": " + err.Error()
	}
	if isCtx(err) {
		text += c.missing()
	}
	c.fail(&cause{kind: ErrAborted, text: text, err: err}, true, true)
	c.waitEnded()
	return nil
}

// missing names the members that have not enqueued this rank's last collective, or the other end of its messages; "" if all have.
func (c *Comm) missing() string {
	if c.acct == nil || c.peers == nil {
		return ""
	}
	last := c.acct.Last()
	text := ""
	for r := range c.peers {
		if c.behind(r, last) {
			text += ", " + c.member(r)
		}
	}
	rec, ok := c.acct.At(last)
	if text == "" || !ok {
		if l, is := c.be.(*library); is {
			if waits := l.messages.waiting(); waits != "" {
				return "; " + waits
			}
		}
		return ""
	}
	return fmt.Sprintf("; #%d, %s, waits for %s", last, recordText(rec), text[len(", "):])
}

// Drain gives back, without the other members, what closed graphs and registrations still hold here (mappings of peers' memory, the library's registrations).
// What a replay in flight still uses stays until a Drain after it, or Close. Local.
func (c *Comm) Drain(ctx context.Context) error {
	if c == nil {
		return nil
	}
	c.drainHolders()
	if err := ctx.Err(); err != nil {
		return c.errorf("drain", err)
	}
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.awaitReleases(ctx)
	c.be.drain()
	return nil
}

// releaseWait bounds the wait for the device to tell that closed graphs are gone, which it does on a thread of its own, mostly within 0.2 ms, and for memory that goes.
const releaseWait = time.Second

// awaitReleases waits until closed graphs without a replay in flight have given up their registrations.
func (c *Comm) awaitReleases(ctx context.Context) {
	for start := time.Now(); c.awaited() && c.be.outstanding() == 0 && ctx.Err() == nil && time.Since(start) < releaseWait; {
		time.Sleep(20 * time.Microsecond)
	}
}

// awaited reports whether closed graphs still hold registrations, or their memory is just being given back.
func (c *Comm) awaited() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.releasing > 0 {
		return true
	}
	for _, r := range c.regs {
		if r.pending > 0 {
			return true
		}
	}
	return false
}

// drainHolders lets holders release what the collector found unreachable; they may detach themselves in it.
func (c *Comm) drainHolders() {
	c.mu.Lock()
	var hs []interface{ Drain() }
	for h := range c.holders {
		if d, ok := h.Holder.(interface{ Drain() }); ok {
			hs = append(hs, d)
		}
	}
	c.mu.Unlock()
	for _, d := range hs {
		d.Drain()
	}
}

// Close ends the communicator in good order where all members close it after the same call, waiting at most 2 s for them, else it aborts: a
// member that is past this rank's last call gets an error that names this rank. With live graphs it is an error that names them, and where they
// were captured, and nothing is closed. Put it in a defer. Twice is fine, the second one waits for the first; in what is called when memory goes (cuda.Memory.OnFree), too, but
// then who lets the memory go has waited for it for a second. A Close after failure or Abort releases everything and returns nil.
// Operations that are still enqueued when the wait ends fail, and Close returns an error that says so: synchronize the streams first.
func (c *Comm) Close() error {
	if c == nil {
		return nil
	}
	c.drainHolders()
	c.mu.Lock()
	if c.closing {
		over := c.over
		c.mu.Unlock()
		<-over // who closes what the communicator uses next finds it closed
		return nil
	}
	if c.failed.Load() == nil {
		var err error
		if c.gate != nil {
			err = fmt.Errorf("%w: %s", ErrInUse, whoText(c.gate))
		} else if len(c.holders) > 0 {
			err = fmt.Errorf("in use by %s; close it first", c.holderNames())
		}
		if err != nil {
			c.mu.Unlock()
			return c.errorf("close", err)
		}
	}
	c.closing, c.over = true, make(chan struct{})
	defer close(c.over)
	c.shut.Store(true)
	c.mu.Unlock()

	n := c.acct.Last()
	if l, ok := c.be.(*library); ok && c.failed.Load() != nil {
		l.awaitTold() // or the others would take this Close for the cause
	} else {
		c.acct.SetClosed(n)
		c.be.declareClosed(n)
	}
	together := c.waitClosed(n)
	if l, ok := c.be.(*library); ok {
		l.together = together
	}
	var err error
	if left := c.be.outstanding(); left > 0 && c.failed.Load() == nil {
		err = c.errorf("close", causef(ErrAborted, "%d enqueued operations were not done %v after rank %d closed", left, closeWait, c.rank))
		c.fail(err.(*Error).Err, true, true)
	}
	if c.failed.Load() != nil {
		c.waitEnded()
	}
	c.releaseAll(ErrClosed)
	return err
}

// releaseHolds gives holds back. With the last one of freed memory come the program's functions (cuda.Memory.OnFree), which may close the communicator, and so wait
// for who gives the holds back: they run on a goroutine of their own, which is waited for at most releaseWait.
func releaseHolds(holds ...*cuda.Hold) {
	if len(holds) == 0 {
		return
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, h := range holds {
			h.Release()
		}
	}()
	select {
	case <-done:
	case <-time.After(releaseWait):
	}
}

// closing is what a wait of Close is for, in place of a record.
const closing = 1 << 63

// waitClosed waits until the members have closed after the same record and nothing is enqueued here, or until it is clear that this will not
// come, at most closeWait.
func (c *Comm) waitClosed(n uint64) (together bool) {
	deadline := time.Now().Add(closeWait)
	pause := 20 * time.Microsecond
	for c.failed.Load() == nil {
		if err := c.be.told(); err != nil {
			c.fail(err, false, true)
			return false
		}
		together, apart := true, false
		for r := range c.ranks {
			if r == c.rank {
				continue
			}
			m, closed := c.be.peerClosed(r)
			together = together && closed && m == n
			apart = apart || closed && m != n
		}
		busy := c.be.outstanding() > 0
		c.askFar(closing, closeWait-time.Until(deadline))
		if !busy && (together || apart) || time.Now().After(deadline) {
			return together && !busy
		}
		time.Sleep(pause)
		pause = min(2*pause, 2*time.Millisecond)
	}
	return false
}

// endWait is how long the streams get to end the tasks of a failed communicator. They do so at their next step, unless something else holds them up.
const endWait = 500 * time.Millisecond

// waitEnded follows a failure: what is enqueued ends with it, so that streams can be closed.
func (c *Comm) waitEnded() {
	if l, ok := c.be.(*library); ok {
		l.waitEnded()
		return
	}
	deadline := time.Now().Add(endWait)
	for c.be.outstanding() > 0 && time.Now().Before(deadline) {
		c.dev.Ring()
		time.Sleep(50 * time.Microsecond)
	}
}

// releaseAll gives everything back; why is what pending waits are told.
func (c *Comm) releaseAll(why error) {
	if c.unsee != nil {
		c.unsee()
	}
	c.mu.Lock()
	c.closed = true
	c.shut.Store(true)
	regs := c.regs
	c.regs = nil
	meetings := c.meetings
	c.meetings = map[int]*bootstrap.Group{}
	c.mu.Unlock()
	c.cancel(why)
	c.wg.Wait()
	c.closeWindows()
	for _, r := range regs {
		hold := r.hold // goes with the last
		if r.user > 0 && r.graph > 0 {
			c.be.deregister(r.mem, true, nil)()
		}
		c.be.deregister(r.mem, r.graph == 0, hold)()
	}
	if c.be != nil {
		c.be.release()
	}
	if c.acct != nil {
		c.acct.Release()
	}
	for _, g := range meetings {
		g.Close()
	}
	if c.group != nil {
		c.group.Close()
	}
}

// Split makes communicators of the members with equal color, ordered by key, then rank. A negative color takes no part and gives
// nil: calls on that are errors, its Close, Abort and Drain do nothing. Collective. With color Job().Node() the parts are the members of each host.
//
// A library that can (NCCL 2.18.1) makes the parts from this communicator, without sharing anything with it. If it fails in that, this communicator has failed, too.
func (c *Comm) Split(ctx context.Context, color, key int) (*Comm, error) {
	if err := c.usable(); err != nil {
		return nil, c.errorf("split", err)
	}
	if gate := c.lease(); gate != nil {
		return nil, c.errorf("split", fmt.Errorf("%w: %s", ErrInUse, whoText(gate)))
	}
	c.splits++
	type member struct{ color, key, rank int }
	all, err := c.meetInOrder(ctx, fmt.Appendf(nil, "%d %d", color, key), fmt.Sprintf("split #%d", c.splits))
	if err != nil {
		return nil, err
	}
	var mine []member
	colors := make([]int, len(all))
	for r, v := range all {
		m := member{rank: r}
		if _, err := fmt.Sscanf(string(v), "%d %d", &m.color, &m.key); err != nil {
			return nil, c.errorf("split", fmt.Errorf("rank %d sent %q: %w", r, v, err))
		}
		colors[r] = m.color
		if m.color == color && color >= 0 {
			mine = append(mine, m)
		}
	}
	ctx, done := context.WithTimeout(ctx, c.timeout)
	defer done()
	from := c.splitOrigin(colors)
	if color < 0 {
		return nil, from.rest(ctx, nil)
	}
	slices.SortStableFunc(mine, func(a, b member) int { return cmp.Compare(a.key, b.key) })
	set := Config{Name: fmt.Sprintf("%s/%d", c.name, color), Timeout: c.timeout, Check: c.check, NoPeer: c.noPeer}
	for _, m := range mine {
		set.Ranks = append(set.Ranks, c.ranks[m.rank])
	}
	if from != nil {
		from.key = slices.IndexFunc(mine, func(m member) bool { return m.rank == c.rank })
	}
	part, err := initComm(ctx, c.job, c.dev, set, fmt.Sprintf("%s split %d color %d", c.key, c.splits, color), from)
	if other := from.rest(ctx, err); err == nil && other != nil {
		part.Abort(other)
		return nil, errors.Join(other, part.Close())
	}
	return part, err
}

// Stats are counters since Init. On a GPU a call counts when it is enqueued, captured calls do not, and a registered buffer counts as direct: the library
// does not tell what it did.
type Stats struct {
	Calls          uint64 // collectives and point-to-point operations carried out
	BytesDirect    uint64 // payload moved straight between users' buffers (registered)
	BytesStaged    uint64 // payload moved through staging copies, or by peer memory
	Registrations  int    // live: of the user and of graphs, each buffer counted once
	GraphHolds     int    // registrations held by graphs
	PendingRelease int    // registrations of closed graphs not given back yet
	PeerMappings   int    // mappings of peers' buffers in this process, on the host platform
	Windows        int    // windows that captured calls have got, on a GPU
	PendingWindows int    // of them those of memory that the program has freed: given back, with it, at the next captured call or at Close
}

// Stats reads the counters. The payload of a call is what it sends and what it receives on this rank.
func (c *Comm) Stats() Stats {
	if c == nil {
		return Stats{}
	}
	s := Stats{Calls: c.calls.Load(), BytesDirect: c.direct.Load(), BytesStaged: c.staged.Load()}
	c.mu.Lock()
	s.Registrations = len(c.regs)
	for _, r := range c.regs {
		s.GraphHolds += r.graph
		s.PendingRelease += r.pending
	}
	closed := c.closed
	l, isLibrary := c.be.(*library)
	if isLibrary {
		s.Windows, s.PendingWindows = l.windowStats()
	}
	c.mu.Unlock()
	if isLibrary {
		s.PendingRelease += l.pendingRelease()
	}
	if !closed {
		s.PeerMappings = c.be.mappings()
	}
	return s
}

// holderNames needs mu.
func (c *Comm) holderNames() string {
	var names []string
	for h := range c.holders {
		names = append(names, h.String())
	}
	slices.Sort(names)
	return joinNames(names)
}

func whoText(g Gate) string {
	if s, ok := g.(fmt.Stringer); ok {
		return s.String()
	}
	return "a capture"
}

// isCtx reports whether err is the end of a context.
func isCtx(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
