package ncclsys

import "github.com/gorun-dev/gorun/cuda/dl"

// MostMessages is how many messages a Batch takes.
const MostMessages = dl.MostCalls - 2

// Batch makes a short group of Sends and Recvs in one way to the library and back: all four calls of a message each way cost what one does. It is used again and again, by
// one goroutine at a time. A GroupStart that fails, which is for a library that does not work at all, does not keep the messages from it.
type Batch struct {
	calls   *dl.Calls
	entries [MostMessages]*dl.Entry
	n       int
}

func NewBatch() *Batch { return &Batch{calls: dl.NewCalls()} }

// Start begins a group; false where the library has none.
func (b *Batch) Start(l *Library) bool {
	b.n = 0
	b.calls.Reset()
	return b.calls.Add(&l.f.GroupStart, [6]uintptr{})
}

// Send and Recv add a message; false without room or the function. Nothing has been called then.
func (b *Batch) Send(l *Library, buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) bool {
	return b.add(&l.f.Send, buf, count, t, peer, comm, s)
}

func (b *Batch) Recv(l *Library, buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) bool {
	return b.add(&l.f.Recv, buf, count, t, peer, comm, s)
}

func (b *Batch) add(e *dl.Entry, buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) bool {
	if b.n == MostMessages || !b.calls.Add(e, [6]uintptr{uintptr(buf), uintptr(count), u32(t), uintptr(peer), uintptr(comm), uintptr(s)}) {
		return false
	}
	b.entries[b.n] = e
	b.n++
	return true
}

// End makes the group's calls. Its error is that of the first message that has one, else the group's.
func (b *Batch) End(l *Library) error {
	if !b.calls.Add(&l.f.GroupEnd, [6]uintptr{}) {
		return l.check(&l.f.GroupEnd, dl.Absent)
	}
	b.calls.Run()
	if rc := b.calls.Result(0); rc != 0 {
		return l.check(&l.f.GroupStart, rc)
	}
	for i, e := range b.entries[:b.n] {
		if rc := b.calls.Result(i + 1); rc != 0 && Result(rc) != ErrInProgress {
			return l.check(e, rc)
		}
	}
	return l.check(&l.f.GroupEnd, b.calls.Result(b.n+1))
}
