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

// CommInitAll makes the communicators of a process that has all devices.
func (l *Library) CommInitAll(devices []int32) ([]Comm, error) {
	comms := make([]Comm, len(devices))
	rc := l.f.CommInitAll.Result3(uintptr(unsafe.Pointer(unsafe.SliceData(comms))), uintptr(len(devices)), uintptr(unsafe.Pointer(unsafe.SliceData(devices))))
	return comms, l.check(&l.f.CommInitAll, rc)
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

// CommUniqueID makes an id to grow the communicator by; on one member only.
func (l *Library) CommUniqueID(comm Comm) (UniqueID, error) {
	var id UniqueID
	rc := l.f.CommGetUniqueId.Result3(uintptr(comm), uintptr(unsafe.Pointer(&id)), 0)
	return id, l.check(&l.f.CommGetUniqueId, rc)
}

// CommGrow makes a larger communicator. Members give theirs and rank -1, and an id only if they made it; new ranks give 0,
// the id and their rank.
func (l *Library) CommGrow(comm Comm, size int, id *UniqueID, rank int, c *Config) (*Pending[Comm], error) {
	layout := c.layout()
	p := newPending[Comm](l, layout)
	rc := l.f.CommGrow.Result6(uintptr(comm), uintptr(size), uintptr(unsafe.Pointer(id)), u32(int32(rank)),
		uintptr(unsafe.Pointer(&p.cell)), uintptr(unsafe.Pointer(layout)))
	return pendingResult(p, l.check(&l.f.CommGrow, rc))
}

// CommRevoke ends what runs on the communicator. See the fault "revoke" before use.
func (l *Library) CommRevoke(comm Comm) error {
	return l.check(&l.f.CommRevoke, l.f.CommRevoke.Result3(uintptr(comm), 0, 0))
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

// CommCount is the number of ranks.
func (l *Library) CommCount(comm Comm) (int, error) { return l.commInt(&l.f.CommCount, comm) }

// CommDevice is the device's ordinal.
func (l *Library) CommDevice(comm Comm) (int, error) { return l.commInt(&l.f.CommCuDevice, comm) }

// CommUserRank is this rank.
func (l *Library) CommUserRank(comm Comm) (int, error) { return l.commInt(&l.f.CommUserRank, comm) }

func (l *Library) commInt(e *dl.Entry, comm Comm) (int, error) {
	var v int32
	rc := e.Result3(uintptr(comm), uintptr(unsafe.Pointer(&v)), 0)
	return int(v), l.check(e, rc)
}

// CommSuspend gives the communicator's device memory back until CommResume.
func (l *Library) CommSuspend(comm Comm) error {
	return l.check(&l.f.CommSuspend, l.f.CommSuspend.Result3(uintptr(comm), suspendMemory, 0))
}

func (l *Library) CommResume(comm Comm) error {
	return l.check(&l.f.CommResume, l.f.CommResume.Result3(uintptr(comm), 0, 0))
}

// CommMemStat tells about the communicator's device memory.
func (l *Library) CommMemStat(comm Comm, s MemStat) (uint64, error) {
	var v uint64
	rc := l.f.CommMemStats.Result3(uintptr(comm), u32(s), uintptr(unsafe.Pointer(&v)))
	return v, l.check(&l.f.CommMemStats, rc)
}

// CommProperties tells what the communicator can do.
func (l *Library) CommProperties(comm Comm) (Properties, error) {
	const before2297, since2297 = 40, 56
	var b [8]uint64 // larger than any version's struct
	at := func(off int) unsafe.Pointer { return unsafe.Add(unsafe.Pointer(&b), off) }
	b[0] = since2297
	if l.version < 22907 {
		b[0] = before2297
	}
	*(*uint32)(at(8)) = configMagic
	*(*int32)(at(12)) = int32(l.version) // unlike Config's: a newer one than the library's is refused
	rc := l.f.CommQueryProperties.Result3(uintptr(comm), uintptr(unsafe.Pointer(&b)), 0)
	if err := l.check(&l.f.CommQueryProperties, rc); err != nil {
		return Properties{}, err
	}
	i32 := func(off int) int { return int(*(*int32)(at(off))) }
	u8 := func(off int) uint8 { return *(*uint8)(at(off)) }
	p := Properties{Rank: i32(16), Size: i32(20), Device: i32(24), NVMLDevice: i32(28), DeviceAPI: u8(32) != 0, Multimem: u8(33) != 0}
	if l.version < 22907 {
		p.GINType = int(u8(34))
	} else {
		p.GINType, p.LSATeams, p.HostRMA = i32(36), i32(40), u8(44) != 0
	}
	return p, nil
}

// ResetDebugInit makes the library read its NCCL_DEBUG settings again; for tests. Without the function it does nothing.
func (l *Library) ResetDebugInit() {
	if l.f.ResetDebugInit.Func != 0 {
		l.f.ResetDebugInit.Call3(0, 0, 0)
	}
}
