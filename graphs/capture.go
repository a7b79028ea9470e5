package graphs

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// farewell is how long a capture whose context has ended still goes on to tell the others so.
const farewell = time.Second

// captures counts the captures of this process.
var captures atomic.Uint64

// Capture runs fn once while s captures, and makes a graph of what it enqueued. It is collective on the communicators named by Comms: each
// nccl call in fn waits for the other members' same call, and either all members get a graph, or each gets an error that names the first
// difference and the ranks (*MismatchError), and the buffers are as before.
//
// fn runs on a goroutine of its own, locked to its thread; work that it enqueues on other streams is captured where they are joined by
// events. If fn returns an error, panics (*PanicError) or ends its goroutine, the capture fails on all members, and the communicators
// stay usable; Capture waits for the members to tell them so. The same when ctx ends: calls in fn return then, and Capture within a second
// after fn has returned.
//
// With several communicators, all members name them in the same order. Members that share one always agree on the result;
// so do those that are one or two communicators apart.
func Capture(ctx context.Context, s *cuda.Stream, fn func(*cuda.Stream) error, o ...Option) (*Graph, error) {
	cp := &capture{ctx: ctx, s: s, place: callerPlace()}
	for _, opt := range o {
		opt(&cp.opts)
	}
	releaseLost(s.Device())
	cp.ordinal = captures.Add(1)
	cp.st = newState(s.Device(), cp.opts.name, cp.place)
	return cp.do(fn)
}

// capture is a capture in progress: the gate of its communicators.
type capture struct {
	ctx     context.Context
	ending  context.Context // of the last meetings: ctx and the farewell
	s       *cuda.Stream
	opts    options
	place   string // of the Capture call
	ordinal uint64
	st      *state // what becomes the graph

	mu      sync.Mutex // one call at a time; guards all below, which the goroutine of Capture uses when fn is done
	members []*membership
	cap     *cuda.Capture
	over    bool // fn has returned
	err     error
	fate    fate // of err
}

// membership is the capture's part in one communicator.
type membership struct {
	c       *nccl.Comm
	restore func()
	calls   uint64 // by this rank
	hash    uint64 // of the descriptions that all agreed on
	settled bool   // the members agree that the capture is over on this communicator: no more meetings
	mapping []mapping
}

// mapping is the memory of other members that a call uses.
type mapping struct {
	place   string
	calls   []nccl.Call
	layouts [][]byte
}

// String is what the communicators call their lease.
func (cp *capture) String() string { return "capture" + cp.st.label() + " at " + cp.place }

func (cp *capture) do(fn func(*cuda.Stream) error) (*Graph, error) {
	stop := cp.delay()
	defer stop()
	defer func() {
		for _, m := range cp.members {
			m.restore()
		}
	}()
	cp.lease()
	if err := cp.opts.environment(); err != nil {
		cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
	}
	var tmpl *cuda.Graph
	if cp.err == nil {
		tmpl = cp.run(fn)
	}
	cp.mu.Lock() // a goroutine that fn left behind may still come to Admit
	cp.over = true
	cp.mu.Unlock()
	if cp.err == nil {
		cp.seal(tmpl)
	}
	cp.commit()
	if cp.err != nil {
		cp.st.abandon(tmpl)
		return nil, cp.err
	}
	return cp.st.open(), nil
}

// delay makes the context of the last meetings, which outlives the user's by the farewell.
func (cp *capture) delay() (stop func()) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(cp.ctx))
	cp.ending = ctx
	unhook := context.AfterFunc(cp.ctx, func() {
		t := time.NewTimer(farewell)
		defer t.Stop()
		select {
		case <-t.C:
			cancel(context.Cause(cp.ctx))
		case <-ctx.Done():
		}
	})
	return func() {
		unhook()
		cancel(nil)
	}
}

// lease takes the communicators. What fails here is told to the others at the end.
func (cp *capture) lease() {
	for _, c := range cp.opts.comms {
		if c == nil {
			cp.fail(fateFailed, fmt.Errorf("%v: a communicator named by Comms is nil", cp))
			continue
		}
		if c.Device() != cp.s.Device() {
			cp.fail(fateFailed, fmt.Errorf("%v: stream and %v are of different devices", cp, c))
		}
		restore, err := c.SetGate(cp)
		if err != nil {
			cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
			continue
		}
		cp.members = append(cp.members, &membership{c: c, restore: restore})
	}
	if cp.ctx.Err() != nil {
		cp.cancelled()
	}
}

// fail notes the first failure and spoils nothing else: later calls return it, and the end tells the others.
func (cp *capture) fail(f fate, err error) {
	if cp.err == nil {
		cp.fate, cp.err = f, err
	}
}

func (cp *capture) cancelled() {
	cp.fail(fateCancelled, fmt.Errorf("%v: %w", cp, context.Cause(cp.ctx)))
}

var errGoexit = errors.New("the function ended its goroutine (runtime.Goexit)")

// run captures fn on a thread of its own and returns the template, nil after a failure.
func (cp *capture) run(fn func(*cuda.Stream) error) (tmpl *cuda.Graph) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		err := cp.s.BeginCapture(cuda.CaptureThreadLocal)
		if err != nil {
			runtime.UnlockOSThread()
			cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
			return
		}
		cp.cap = cp.s.Capture()
		returned := false
		// Deferred, so that it also runs when fn panics or ends the goroutine.
		defer func() {
			value := recover()
			cp.mu.Lock() // a goroutine that fn left behind may still be in a call
			defer cp.mu.Unlock()
			cp.over = true
			switch {
			case returned:
			case value != nil:
				cp.fail(fatePanicked, &PanicError{Where: cp.String(), Value: value, Place: cuda.PanicPlace(), Stack: debug.Stack()})
			default:
				cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, errGoexit))
			}
			g, err := cp.s.EndCapture()
			if err != nil {
				// The thread may still be marked as capturing below us: it ends with this goroutine.
				cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
				return
			}
			tmpl = g
			runtime.UnlockOSThread()
		}()
		err = fn(cp.s)
		returned = true
		cp.mu.Lock()
		defer cp.mu.Unlock()
		if err != nil {
			cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
		}
		if cp.ctx.Err() != nil {
			cp.cancelled()
		}
	}()
	<-done
	return tmpl
}

// seal makes the executable graph. The release is attached first, so that it covers every replay.
func (cp *capture) seal(tmpl *cuda.Graph) {
	for _, m := range cp.members {
		detach, err := m.c.Attach(cp.st)
		if err != nil {
			cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
			return
		}
		cp.st.detach = append(cp.st.detach, detach)
	}
	if err := cp.st.seal(tmpl); err != nil {
		cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
		return
	}
	for _, m := range cp.members {
		if m.calls == 0 {
			continue
		}
		if err := m.c.Captured(); err != nil {
			cp.fail(fateFailed, fmt.Errorf("%v: %w", cp, err))
			return
		}
	}
}

// commit ends the capture on all members alike. In the first round of meetings they learn that each has its graph. Then, not before, the
// buffers of the others are mapped: a member that had given up would have let go of them. The second round, which goes backwards so that it
// carries what was learned on one communicator to the members of the others, makes it final.
func (cp *capture) commit() {
	if cp.err != nil {
		cp.bail()
		return
	}
	for _, m := range cp.members {
		cp.end(m)
	}
	if cp.err == nil {
		cp.mapPeers()
	}
	for i := len(cp.members) - 1; i >= 0; i-- {
		if m := cp.members[i]; !m.settled {
			cp.confirm(m)
		}
	}
}

// bail tells a failure on all communicators at once: members of a later one may be waiting for this rank there, and not come to the first.
func (cp *capture) bail() {
	var wg sync.WaitGroup
	for _, m := range cp.members {
		if !m.settled {
			msg, what := cp.parting(m)
			wg.Go(func() { cp.meet(cp.ending, m, msg, what) }) // nothing that comes back changes this rank's error
		}
	}
	wg.Wait()
}

// parting is what a member tells at the end of its function, and how its wait there is called.
func (cp *capture) parting(m *membership) (msg *message, what string) {
	what = cp.where(m)
	if cp.err != nil {
		what += failedBy + cut(cp.reason())
	}
	return &message{kind: kindEnd, calls: m.calls, require: cp.opts.require, place: cp.place, text: cp.reason(), fate: cp.fate,
		ordinal: cp.ordinal, hash: m.hash}, what
}

// A wait of where's form with both of these is that of a member whose function has failed.
const (
	itsEnd   = ", its end "
	failedBy = ": "
)

// endedBadly reports whether what is how a member with a failure calls its wait at the end of its function.
func endedBadly(what, comm string) bool {
	_, at, ok := strings.Cut(what, itsEnd)
	return ok && strings.Contains(at, " on communicator "+comm+failedBy)
}

func (cp *capture) end(m *membership) {
	msg, what := cp.parting(m)
	msgs, err := cp.meet(cp.ending, m, msg, what)
	if err != nil {
		cp.meetFailed(m, err, what)
		return
	}
	if d := compareCalls(msgs); d != nil {
		cp.differ(m, d)
		return
	}
	ordinal := uint64(0)
	for r, other := range msgs {
		if other.hash != m.hash {
			cp.differ(m, &difference{fmt.Sprintf("rank %d captured other calls than rank %d", r, m.c.Rank()), nccl.ErrMismatch})
			return
		}
		ordinal = max(ordinal, other.ordinal)
	}
	cp.st.uses = append(cp.st.uses, use{m.c, graphKey(m.hash, ordinal)})
}

// mapWait bounds the mapping. All that is mapped is there when it begins, unless its owner's context has ended meanwhile.
const mapWait = 10 * time.Second

func (cp *capture) mapPeers() {
	ctx, cancel := context.WithTimeout(cp.ending, mapWait)
	defer cancel()
	for _, m := range cp.members {
		for _, p := range m.mapping {
			if err := m.c.Prepare(ctx, p.calls, p.layouts); err != nil {
				cp.fail(fateFailed, fmt.Errorf("%s: %s (%s): %w", cp.where(m), callsText(p.calls), p.place, err))
				return
			}
		}
	}
}

func (cp *capture) confirm(m *membership) {
	what := cp.where(m)
	msgs, err := cp.meet(cp.ending, m, &message{kind: kindConfirm, calls: m.calls, place: cp.place, text: cp.reason(), fate: cp.fate}, what)
	if err != nil {
		cp.meetFailed(m, err, what)
		return
	}
	if d := compareCalls(msgs); d != nil {
		cp.differ(m, d)
	}
}

// reason is the failure as the others are told it.
func (cp *capture) reason() string {
	if cp.err == nil {
		return ""
	}
	if p, ok := errors.AsType[*PanicError](cp.err); ok {
		return strings.TrimPrefix(fmt.Sprintf("%s: %v", p.Place, p.Value), ": ")
	}
	// The others' error has its own words for where.
	return strings.TrimPrefix(cp.err.Error(), cp.String()+": ")
}

// meet exchanges messages with all members.
func (cp *capture) meet(ctx context.Context, m *membership, msg *message, what string) ([]*message, error) {
	mine := msg.encode()
	if len(mine) > maxMessage {
		return nil, errTooLarge
	}
	all, err := gather(mine, func(b []byte) ([][]byte, error) { return m.c.Meet(ctx, b, what) })
	if err != nil {
		return nil, err
	}
	msgs := make([]*message, len(all))
	for r, b := range all {
		if msgs[r], err = decodeMessage(b); err != nil {
			return nil, fmt.Errorf("rank %d: %w", r, err)
		}
	}
	if cp.err == nil {
		suspect(m.c, msgs)
	}
	return msgs, nil
}

// suspect tells gorun whose failure ends this rank's capture: that of the member which compareEnds names.
func suspect(c *nccl.Comm, msgs []*message) {
	for r, m := range msgs {
		if m.kind < kindEnd || m.fate == fateOK {
			continue
		}
		if r != c.Rank() && m.fate != fateCancelled {
			c.Job().Suspect(c.JobRank(r))
		}
		return
	}
}

// differ notes a disagreement that all members have seen.
func (cp *capture) differ(m *membership, d *difference) {
	m.settled = true
	cp.fail(fateFailed, &MismatchError{Where: cp.where(m), Text: d.text, Err: d.err})
}

// where says how far the capture is: "capture at train.go:41, call 3 on communicator world".
func (cp *capture) where(m *membership) string {
	at := fmt.Sprintf(", call %d", m.calls)
	if cp.over {
		at = itsEnd + after(m.calls)
	}
	return fmt.Sprintf("%v%s on communicator %s", cp, at, m.c.Name())
}

// callerPlace is the file and line of the program's call into this package or package nccl.
func callerPlace() string {
	var pcs [24]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for {
		f, more := frames.Next()
		ours := strings.HasPrefix(f.Function, modulePath+"graphs.") || strings.HasPrefix(f.Function, modulePath+"nccl.")
		if !ours || strings.HasSuffix(f.File, "_test.go") {
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
		if !more {
			return "an unknown place"
		}
	}
}

const modulePath = "github.com/gorun-dev/gorun/"
