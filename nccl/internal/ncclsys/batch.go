package ncclsys

import "github.com/gorun-dev/gorun/cuda/dl"

// MostMessages is how many messages a Batch takes.
const MostMessages = dl.MostCalls - 2

// Batch makes a short group of Sends and Recvs in one way to the library and back: all four calls of a message each way cost what one does. It is used again and again, by
// one goroutine at a time. A GroupStart that fails, which is for a library that does not work at all, does not keep the messages from it.
type Batch struct {
	calls           *dl.Calls // the first is always GroupStart
	send, recv, end dl.Func   // which every library has
	l               *Library
}

func NewBatch(l *Library) *Batch {
	b := &Batch{calls: dl.NewCalls(), send: l.f.Send.Func, recv: l.f.Recv.Func, end: l.f.GroupEnd.Func, l: l}
	b.calls.Add(l.f.GroupStart.Func, 0, 0, 0, 0, 0, 0)
	return b
}

// Start begins a group.
func (b *Batch) Start() { b.calls.Keep(1) }

// Send and Recv add one of at most MostMessages messages. Nothing is called yet.
func (b *Batch) Send(buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) {
	b.calls.Add(b.send, uintptr(buf), uintptr(count), u32(t), uintptr(peer), uintptr(comm), uintptr(s))
}

func (b *Batch) Recv(buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) {
	b.calls.Add(b.recv, uintptr(buf), uintptr(count), u32(t), uintptr(peer), uintptr(comm), uintptr(s))
}

// End makes the group's calls. Its error is that of the first message that has one, else the group's.
func (b *Batch) End() error {
	b.calls.Add(b.end, 0, 0, 0, 0, 0, 0)
	if b.calls.Run() == 0 {
		return nil
	}
	return b.failed()
}

func (b *Batch) failed() error {
	if rc := b.calls.Result(0); rc != 0 {
		return b.l.check(&b.l.f.GroupStart, rc)
	}
	last := b.calls.Len() - 1
	for i := 1; i < last; i++ {
		e := &b.l.f.Send
		if b.calls.Func(i) == b.recv {
			e = &b.l.f.Recv
		}
		if rc := b.calls.Result(i); rc != 0 && Result(rc) != ErrInProgress {
			return b.l.check(e, rc)
		}
	}
	return b.l.check(&b.l.f.GroupEnd, b.calls.Result(last))
}
