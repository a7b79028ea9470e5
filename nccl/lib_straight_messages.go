package nccl

import (
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// A group of a few Sends and Recvs goes straight as a collective does (lib_straight.go), and so does one by itself.

// straightMessages reports whether all calls of a group are messages that may go straight.
func (l *library) straightMessages(calls []Call) bool {
	c := l.c
	switch {
	case len(calls) == 0, len(calls) > ncclsys.MostMessages, c.failed.Load() != nil, c.shut.Load(), c.leased.Load(), c.userRegs.Load() > 0:
		return false
	}
	s := calls[0].Stream
	switch {
	case s == nil, s.Device() != c.dev, s.Capture() != nil:
		return false
	}
	for i := range calls {
		call := &calls[i]
		mem := call.Recv.Mem
		if call.Op == OpSend {
			mem = call.Send.Mem
		}
		switch {
		case call.Op < OpSend, call.Stream != s, call.Count == 0, l.plain.types>>call.Type&1 == 0, uint(call.Root) >= uint(len(c.ranks)), int(call.Root) == c.rank,
			mem == nil, mem.Device() != c.dev, mem.Freed():
			return false
		}
	}
	return true
}

// issueMessages makes such calls: the notes, the use, the call, the account.
func (l *library) issueMessages(calls []Call) error {
	c := l.c
	l.messages.note(calls)
	last := &calls[len(calls)-1]
	l.mu.Lock()
	u, err := l.last.Load(), error(nil)
	if u == nil || u.s != last.Stream {
		u, err = l.turnTo(last.Stream)
	}
	if err == nil {
		u.note(len(calls), last.Op, 0)
		if !l.watching.Load() {
			l.beWatched()
		}
		if err = l.callMessages(calls); err == nil {
			u.cameBack()
		}
	}
	l.mu.Unlock()
	if l.waiting.Load() > 0 {
		l.flush()
	}
	if err != nil {
		return c.errorf(opName(calls), l.lost(calls, 0, err))
	}
	bytes := uint64(0)
	for i := range calls {
		bytes += calls[i].Send.Len + calls[i].Recv.Len
	}
	c.calls.Add(uint64(len(calls)))
	c.staged.Add(bytes)
	return nil
}

// callMessages are the calls themselves.
func (l *library) callMessages(calls []Call) error {
	b, err := l.c.dev.BindCall()
	if err != nil {
		return err
	}
	switch {
	case l.ending.Load(): // the abort sees that mu is locked: it needs no enter
		b.Release()
		return l.over()
	case len(calls) > 1:
		l.batch.Start()
		s := ncclsys.Stream(calls[0].Stream.Handle())
		for i := range calls {
			l.addMessage(&calls[i], libTypes[calls[i].Type], s)
		}
		err = l.batch.End()
	default:
		err = l.callAs(&calls[0], libTypes[calls[0].Type], l.p2p)
	}
	if err != nil {
		err = l.finish(err, l.p2p)
	}
	b.Release()
	return err
}

// addMessage adds one to the batch.
func (l *library) addMessage(call *Call, t ncclsys.DataType, s ncclsys.Stream) {
	if call.Op == OpSend {
		l.batch.Send(ncclsys.DevicePtr(call.Send.Pointer()), call.Count, t, int(call.Root), l.p2p, s)
	} else {
		l.batch.Recv(ncclsys.DevicePtr(call.Recv.Pointer()), call.Count, t, int(call.Root), l.p2p, s)
	}
}
