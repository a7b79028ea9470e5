package nccl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// library carries calls out by the vendor's collective library.
//
// The library notices neither a dead peer nor a mismatch: the stream just never gets ready, and after an abort it says success. So the ledgers
// are compared and watched (lib_watch.go), the communicator's failure is what the streams' waits return (use.check), and a failure starts the
// abort at once (lib_end.go).
//
// Locks: mu is held over calls of the library that work on the communicators; rmu guards what is to be given back, and is innermost. Comm.mu may be held
// when mu is taken, never the reverse. A goroutine that is in the library while the communicator fails is let out by the abort.
type library struct {
	// What each call reads comes first.
	c        *Comm
	sys      *ncclsys.Library
	main     ncclsys.Comm
	last     atomic.Pointer[use]
	panes    []*pane // windows that captured calls have got; changed by the goroutine that makes the calls, under Comm.mu
	plain    plain
	mu       sync.Mutex
	watching atomic.Bool
	ending   atomic.Bool  // no call may enter any more
	waiting  atomic.Int32 // len(freeing)
	inflight atomic.Int32 // goroutines inside the library with a communicator

	// p2p is for Send and Recv: main, or one of its own on versions with the fault "p2p-then-collective". The user's registrations are with main.
	p2p      ncclsys.Comm
	batch    *ncclsys.Batch // guarded by mu
	messages messages

	strays []*pane // windows of captures that ended while they were made; guarded by Comm.mu

	unable   atomic.Pointer[string] // why there are no windows, nil if there may be
	graphErr error                  // settings under which captured calls hang
	warned   []gpulib.Finding       // settings that the user should know of

	aborting  sync.Once
	aborted   chan struct{} // the communicators are gone
	abandoned chan struct{} // they are left as they are, with what is enqueued: an abort would lose the process
	stuck     atomic.Bool   // they do not go
	together  bool          // all members have closed after the same call

	peer peerWay

	mixing mixing
	order  order

	umu  sync.Mutex // guards uses and registered.marks
	uses map[*cuda.Stream]*use

	forgot atomic.Bool // something of uses, with operations that are not known to be done

	rmu         sync.Mutex
	handles     map[uint64]ncclsys.Registration // of the user's registrations, by memory id
	freeing     []freeing                       // waits for mu
	giving      int                             // how many lists of memory are being given back at the moment
	dead        []*cuda.Hold                    // memory that closed graphs had registered
	undone      int                             // registrations of closed graphs that the library still has
	draining    bool                            // a drain is under way, in drains
	undrainable bool                            // the communicators are about to go: no drain begins
	ended       bool                            // the communicators are gone: nothing is registered any more
	closing     bool

	// Where members are on other hosts, whose ledgers cannot be read.
	closings *bootstrap.Group // meets once, at Close; nil on one host
	closedAt atomic.Pointer[[]uint64]

	drainStream *cuda.Stream // guarded by mu
	drainBuf    *cuda.Memory

	wake    chan struct{}
	tellers sync.WaitGroup
	telling atomic.Pointer[chan struct{}] // of the first failure that this rank tells, closed when it has
	drains  sync.WaitGroup
}

// vendorOf is the library for a platform.
func vendorOf(p cuda.Platform) *ncclsys.Vendor {
	switch p {
	case cuda.MUSA:
		return ncclsys.MCCL
	case cuda.HIP:
		return ncclsys.RCCL
	}
	return ncclsys.NCCL
}

// libraries are the open ones. They stay open for the life of the process.
var libraries struct {
	sync.Mutex
	open map[*ncclsys.Vendor]*ncclsys.Library
}

func openLibrary(v *ncclsys.Vendor) (*ncclsys.Library, error) {
	libraries.Lock()
	defer libraries.Unlock()
	if l := libraries.open[v]; l != nil {
		return l, nil
	}
	l, err := ncclsys.Open(v)
	if err != nil {
		return nil, err
	}
	if libraries.open == nil {
		libraries.open = map[*ncclsys.Vendor]*ncclsys.Library{}
	}
	libraries.open[v] = l
	return l, nil
}

// newLibrary opens the library and refuses settings that break programs. It calls nothing of the library but its version.
func newLibrary(c *Comm) (*library, error) {
	l := &library{c: c, aborted: make(chan struct{}), abandoned: make(chan struct{}), uses: map[*cuda.Stream]*use{}, handles: map[uint64]ncclsys.Registration{},
		wake: make(chan struct{}, 1)}
	c.lookout.due.Store(true)
	v := vendorOf(c.dev.Platform())
	if err := occupied.check(c); err != nil {
		return l, err
	}
	sys, err := openLibrary(v)
	if err != nil {
		return l, err
	}
	l.sys, l.batch = sys, ncclsys.NewBatch(sys)
	found, err := gpulib.CheckSettings(v.Settings(), v.Lookup(), false)
	if err != nil {
		return l, err
	}
	l.warned = found
	var breaks []gpulib.Finding
	for _, f := range found {
		if f.Effect == gpulib.BreaksGraphs {
			breaks = append(breaks, f)
		}
	}
	if breaks != nil {
		l.graphErr = &gpulib.SettingError{Findings: breaks}
	}
	l.mixing = l.decideMixing()
	l.plain = l.findPlain()
	if err := l.beginPeer(c.noPeer); err != nil {
		return l, err
	}
	return l, nil
}

// start follows when all members have the communicator.
func (l *library) start() {
	l.c.wg.Go(l.listen)
	l.c.wg.Go(l.watch)
}

// comms are the library's communicators.
func (l *library) comms() []ncclsys.Comm {
	switch {
	case l.main == 0:
		return nil
	case l.p2p == l.main || l.p2p == 0:
		return []ncclsys.Comm{l.main}
	}
	return []ncclsys.Comm{l.main, l.p2p}
}

// enter is called before a call of the library that takes a communicator, leave after it: the abort waits for those inside that come out by themselves.
func (l *library) enter() error {
	l.inflight.Add(1)
	if l.ending.Load() {
		l.inflight.Add(-1)
		return l.over()
	}
	return nil
}

func (l *library) leave() { l.inflight.Add(-1) }

// over is why no call may enter.
func (l *library) over() error {
	if f := l.c.failed.Load(); f != nil {
		return f.err
	}
	return ErrClosed
}

// inside reports whether a call may be in the library: who went straight has locked mu only.
func (l *library) inside() bool {
	if l.inflight.Load() > 0 || !l.mu.TryLock() {
		return true
	}
	l.mu.Unlock()
	return false
}

// LibraryError is a call of the collective library that failed. %+v adds the library's last warnings.
type LibraryError struct {
	Op   string // the library's function: "ncclAllReduce"
	Code int    // ncclResult_t
	Name string // "ncclInvalidUsage"
	Text string
	Last string   // the library's last warning, maybe of an earlier call
	Warn []string // warnings seen before, oldest first
	err  error
}

func (e *LibraryError) Error() string { return e.err.Error() }
func (e *LibraryError) Unwrap() error { return e.err }

// Format adds for %+v the warnings.
func (e *LibraryError) Format(f fmt.State, verb rune) {
	fmt.Fprint(f, e.Error())
	if verb == 'v' && f.Flag('+') {
		for _, w := range e.Warn {
			fmt.Fprintf(f, "\n\t%s", w)
		}
	}
}

// keptWarnings is how many of the library's warnings an error shows.
const keptWarnings = 8

var warnings struct {
	sync.Mutex
	lines []string
}

// result makes an error of the library one of this package; nil and progress are none.
func result(err error) error {
	if err == nil || err == error(ncclsys.ErrInProgress) {
		return nil
	}
	return explained(err) // apart, so that success allocates nothing
}

// explained adds the library's last warnings to its error.
func explained(err error) error {
	var e *ncclsys.Error
	if !errors.As(err, &e) {
		return err
	}
	warnings.Lock()
	defer warnings.Unlock()
	if n := len(warnings.lines); e.Detail != "" && (n == 0 || warnings.lines[n-1] != e.Detail) {
		if warnings.lines = append(warnings.lines, e.Detail); n >= keptWarnings {
			warnings.lines = warnings.lines[1:]
		}
	}
	return &LibraryError{Op: e.Op, Code: int(e.Code), Name: e.Name, Text: e.Text, Last: e.Detail, Warn: append([]string(nil), warnings.lines...), err: e}
}

// settle waits until a non-blocking communicator has done what it was asked for. It ends with the communicator's failure, ctx, and after patience, which is an error.
func (l *library) settle(ctx context.Context, comm ncclsys.Comm, patience time.Duration) error {
	start := time.Now()
	for n := 0; ; n++ {
		if err := l.enter(); err != nil {
			return err
		}
		state, err := l.sys.CommAsyncError(comm)
		l.leave()
		switch {
		case err != nil:
			return result(err)
		case state != ncclsys.ErrInProgress:
			return result(l.sys.AsyncError(state))
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case time.Since(start) > patience:
			return fmt.Errorf("the library is not done with it after %v", patience)
		}
		if n >= 100 {
			time.Sleep(min(time.Since(start)/16, time.Millisecond))
		}
	}
}

func (l *library) ticket() uint64 { return 0 }

// before and after need no work on the device on one stream; between streams the library orders its operations, or order does. The launch order of a rank is the one under
// graphs' lock.
func (l *library) before(r Replay, s *cuda.Stream) error {
	_, err := l.used(s, opReplay, r.seq)
	return err
}

func (l *library) after(_ Replay, s *cuda.Stream) error {
	l.cameBack(s)
	return nil
}

func (l *library) prepare(context.Context, []Call, [][]byte) error { return nil }

// RegistersByKind reports whether captured messages are registered by each end alone, by the kind of its memory, so that both ends must have the same kind.
// For libraries.
func (c *Comm) RegistersByKind() bool {
	l, ok := c.be.(*library)
	return ok && l.fault("message-registered-alone")
}

func (l *library) explains() bool { return false }
func (l *library) mappings() int  { return 0 }
