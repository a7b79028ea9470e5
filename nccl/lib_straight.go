package nccl

import (
	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// An eager collective by itself is the commonest call, and of a small one the way to the library is a part of the time: library and driver have filled the
// caches behind the last call, so that each piece of code and memory on the way is fetched anew. So a call of which nothing is to be said, and for which
// nothing is to be done but what each call needs, goes straight. Everything else, every error too, is for the general way (enqueue.go, lib_call.go), in whose order this
// one does the same: the record, the look, the use, the call, the account.

// plain is what every call of this communicator may use, as typeOf finds it.
type plain struct {
	types uint32 // a bit for each type that may be sent and reduced
	reds  RedOp  // the first operation that may not
}

func (l *library) findPlain() (p plain) {
	for t := range libTypes {
		if t == 0 {
			continue // no type
		}
		if _, err := l.typeOf(&Call{Op: OpAllReduce, Type: cuda.DType(t)}); err == nil {
			p.types |= 1 << t
		}
	}
	p.reds = Avg
	if l.sys.Need(ncclsys.Average) == nil {
		p.reds++
	}
	return p
}

// straight reports whether a call may go straight.
func (l *library) straight(call *Call) bool {
	c, s, send, recv := l.c, call.Stream, call.Send.Mem, call.Recv.Mem
	switch { // which is shorter for the processor than one condition
	case c.grouping > 0, c.failed.Load() != nil, c.shut.Load(), c.leased.Load(), c.check == Strict, c.userRegs.Load() > 0, len(l.panes) > 0, len(c.windows) > 0:
	case call.Op > OpReduceScatter, call.Count == 0, call.Red >= l.plain.reds, l.plain.types>>call.Type&1 == 0, uint(call.Root) >= uint(len(c.ranks)):
	case s == nil, s.Device() != c.dev, s.Capture() != nil:
	case send != nil && send.Device() != c.dev, send != nil && send.Freed():
	case recv != nil && recv.Device() != c.dev, recv != nil && recv.Freed():
	default:
		return send != recv || overlap(call, c.rank) == ""
	}
	return false
}

// issueStraight makes such a call.
func (l *library) issueStraight(call *Call) error {
	c := l.c
	call.Seq = c.acct.Append(bootstrap.Enqueued, packCall(call))
	if c.lookDue() {
		if err := c.lookNow(); err != nil {
			return l.straightFailed(call, err, false)
		}
	}
	l.mu.Lock()
	u, err := l.last.Load(), error(nil)
	if u == nil || u.s != call.Stream {
		u, err = l.turnTo(call.Stream)
	}
	if err == nil {
		u.note(1, call.Op, call.Seq)
		if !l.watching.Load() {
			l.beWatched()
		}
		if l.peer.takes(call) {
			err = l.peerStraight(call)
		} else {
			err = l.callStraight(call)
		}
		if err == nil {
			u.cameBack()
		}
	}
	l.mu.Unlock()
	if l.waiting.Load() > 0 {
		l.flush()
	}
	if err != nil {
		return l.straightFailed(call, err, true)
	}
	c.calls.Add(1)
	c.staged.Add(call.Send.Len + call.Recv.Len)
	return nil
}

func (l *library) peerStraight(call *Call) error {
	if l.ending.Load() {
		return l.over()
	}
	return l.peer.enqueue(call)
}

// callStraight is the call itself.
func (l *library) callStraight(call *Call) error {
	b, err := l.c.dev.BindCall()
	if err != nil {
		return err
	}
	if l.ending.Load() { // the abort sees that mu is locked: it needs no enter
		err = l.over()
	} else if err = l.callAs(call, libTypes[call.Type], l.main); err != nil {
		err = l.finish(err, l.main)
	}
	b.Release()
	return err
}

// straightFailed is the error of a call, lost where the library has not got it.
func (l *library) straightFailed(call *Call, err error, lost bool) error {
	c := l.c
	c.one[0] = *call
	if lost {
		err = l.lost(c.one[:], 0, err)
	}
	return c.errorf(opName(c.one[:]), err)
}
