package ncclsys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// GetUniqueID makes an id, and a thread in this process that waits for its ranks.
func (l *Library) GetUniqueID() (UniqueID, error) {
	var id UniqueID
	rc := l.f.GetUniqueId.Result3(uintptr(unsafe.Pointer(&id)), 0, 0)
	return id, l.check(&l.f.GetUniqueId, rc)
}

// CommInitRank makes this rank's communicator of size ranks, by the thread's current device. Without a config, or a
// blocking one, it waits for all ranks for ever. With ErrInProgress, and in a group, the handle comes later.
func (l *Library) CommInitRank(size int, id UniqueID, rank int, c *Config) (*Pending[Comm], error) {
	if c == nil {
		p := newPending[Comm](l, nil)
		rc := l.initRank(&p.cell, int32(size), idByValue{id}, int32(rank))
		return pendingResult(p, l.check(&l.f.CommInitRank, rc))
	}
	if l.initRankConfig == nil {
		return nil, l.fail(&l.f.CommInitRankConfig, dl.Absent)
	}
	layout := c.layout()
	p := newPending[Comm](l, layout)
	rc := l.initRankConfig(&p.cell, int32(size), idByValue{id}, int32(rank), unsafe.Pointer(layout))
	return pendingResult(p, l.check(&l.f.CommInitRankConfig, rc))
}

// CommInitRankScalable is CommInitRank with several ids, whose makers share the work of meeting.
func (l *Library) CommInitRankScalable(size, rank int, ids []UniqueID, c *Config) (*Pending[Comm], error) {
	layout := c.layout()
	ids = append([]UniqueID(nil), ids...)
	p := newPending[Comm](l, layout, unsafe.SliceData(ids))
	rc := l.f.CommInitRankScalable.Result6(uintptr(unsafe.Pointer(&p.cell)), uintptr(size), uintptr(rank), uintptr(len(ids)),
		uintptr(unsafe.Pointer(unsafe.SliceData(ids))), uintptr(unsafe.Pointer(layout)))
	return pendingResult(p, l.check(&l.f.CommInitRankScalable, rc))
}

// CommSplit makes communicators of the ranks with equal color; with NoColor the handle stays 0. Collective. A nil config
// takes the parent's settings.
func (l *Library) CommSplit(comm Comm, color, key int, c *Config) (*Pending[Comm], error) {
	layout := c.layout()
	p := newPending[Comm](l, layout)
	rc := l.f.CommSplit.Result6(uintptr(comm), u32(int32(color)), u32(int32(key)), uintptr(unsafe.Pointer(&p.cell)), uintptr(unsafe.Pointer(layout)), 0)
	return pendingResult(p, l.check(&l.f.CommSplit, rc))
}

// CommShrink makes a communicator without some ranks, which do not call it. flags: 0 or ShrinkAbort.
func (l *Library) CommShrink(comm Comm, exclude []int32, c *Config, flags int32) (*Pending[Comm], error) {
	layout := c.layout()
	p := newPending[Comm](l, layout)
	rc := l.f.CommShrink.Result6(uintptr(comm), uintptr(unsafe.Pointer(unsafe.SliceData(exclude))), uintptr(len(exclude)),
		uintptr(unsafe.Pointer(&p.cell)), uintptr(unsafe.Pointer(layout)), u32(flags))
	return pendingResult(p, l.check(&l.f.CommShrink, rc))
}

// CommFinalize lets enqueued work end and gives back what destroyed graphs held. A blocking one waits for ever while a
// graph of the communicator lives.
func (l *Library) CommFinalize(comm Comm) error {
	return l.check(&l.f.CommFinalize, l.f.CommFinalize.Result3(uintptr(comm), 0, 0))
}

// CommDestroy frees the communicator; it takes half a second, and for ever while a graph of any member lives.
func (l *Library) CommDestroy(comm Comm) error {
	return l.check(&l.f.CommDestroy, l.f.CommDestroy.Result3(uintptr(comm), 0, 0))
}

// CommAbort ends what runs and frees the communicator. It, too, returns only when its graphs are destroyed, which may be
// done by another thread meanwhile. The streams report success afterwards: what was running must be counted as failed.
func (l *Library) CommAbort(comm Comm) error {
	return l.check(&l.f.CommAbort, l.f.CommAbort.Result3(uintptr(comm), 0, 0))
}

// CommAsyncError is the communicator's state: Success, ErrInProgress, or why it failed. A dead peer or a mismatch does
// not show in it.
func (l *Library) CommAsyncError(comm Comm) (Result, error) {
	out := cells.Get().(*[2]uint64)
	defer cells.Put(out)
	out[0] = 0
	rc := l.f.CommGetAsyncError.Result3(uintptr(comm), uintptr(unsafe.Pointer(&out[0])), 0)
	return Result(int32(out[0])), l.check(&l.f.CommGetAsyncError, rc)
}
