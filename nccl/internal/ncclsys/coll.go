package ncclsys

import (
	"structs"
	"unsafe"
)

// The collectives are enqueued on a stream and allocate nothing. count is in elements: of the whole for AllReduce, Reduce,
// Broadcast, Send and Recv; of one rank's part for AllGather, ReduceScatter, AllToAll, Gather and Scatter.

func (l *Library) AllReduce(send, recv DevicePtr, count uint64, t DataType, op RedOp, comm Comm, s Stream) error {
	return l.check(&l.f.AllReduce, l.f.AllReduce.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(comm), uintptr(s), 0, 0))
}

func (l *Library) Reduce(send, recv DevicePtr, count uint64, t DataType, op RedOp, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Reduce, l.f.Reduce.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(root), uintptr(comm), uintptr(s), 0))
}

func (l *Library) Broadcast(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Broadcast, l.f.Broadcast.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), 0, 0))
}

// Bcast is Broadcast in place, under the library's old name.
func (l *Library) Bcast(buf DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Bcast, l.f.Bcast.Result6(uintptr(buf), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s)))
}

func (l *Library) AllGather(send, recv DevicePtr, count uint64, t DataType, comm Comm, s Stream) error {
	return l.check(&l.f.AllGather, l.f.AllGather.Result6(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(comm), uintptr(s)))
}

func (l *Library) ReduceScatter(send, recv DevicePtr, count uint64, t DataType, op RedOp, comm Comm, s Stream) error {
	return l.check(&l.f.ReduceScatter, l.f.ReduceScatter.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(comm), uintptr(s), 0, 0))
}

func (l *Library) Send(buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) error {
	return l.check(&l.f.Send, l.f.Send.Result6(uintptr(buf), uintptr(count), u32(t), uintptr(peer), uintptr(comm), uintptr(s)))
}

func (l *Library) Recv(buf DevicePtr, count uint64, t DataType, peer int, comm Comm, s Stream) error {
	return l.check(&l.f.Recv, l.f.Recv.Result6(uintptr(buf), uintptr(count), u32(t), uintptr(peer), uintptr(comm), uintptr(s)))
}

func (l *Library) AllToAll(send, recv DevicePtr, count uint64, t DataType, comm Comm, s Stream) error {
	return l.check(&l.f.AlltoAll, l.f.AlltoAll.Result6(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(comm), uintptr(s)))
}

func (l *Library) Gather(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Gather, l.f.Gather.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), 0, 0))
}

func (l *Library) Scatter(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Scatter, l.f.Scatter.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), 0, 0))
}

// GroupStart begins a group on the calling thread: the calls until GroupEnd become one. Groups nest.
func (l *Library) GroupStart() error {
	return l.check(&l.f.GroupStart, l.f.GroupStart.Result3(0, 0, 0))
}

// GroupEnd issues the group, on the thread that began it.
func (l *Library) GroupEnd() error { return l.check(&l.f.GroupEnd, l.f.GroupEnd.Result3(0, 0, 0)) }

// simInfo is ncclSimInfo_t.
type simInfo struct {
	_       structs.HostLayout
	size    uintptr
	magic   uint32
	version int32
	time    float32
	_       int32
}

// GroupSimulateEnd ends a group without issuing it and estimates its time in µs.
func (l *Library) GroupSimulateEnd() (float32, error) {
	info := simInfo{size: unsafe.Sizeof(simInfo{}), magic: 0x74685283, version: int32(l.version), time: -1}
	rc := l.f.GroupSimulateEnd.Result3(uintptr(unsafe.Pointer(&info)), 0, 0)
	return info.time, l.check(&l.f.GroupSimulateEnd, rc)
}

// RedOpCreatePreMulSum makes a sum of values times a scalar of type t. The operation belongs to the communicator. A
// scalar OnHost is read at once (scalar is its address, from unsafe.Pointer); OnDevice scalar must be a device address.
func (l *Library) RedOpCreatePreMulSum(scalar unsafe.Pointer, t DataType, r Residence, comm Comm) (RedOp, error) {
	var op RedOp
	rc := l.f.RedOpCreatePreMulSum.Result6(uintptr(unsafe.Pointer(&op)), uintptr(scalar), u32(t), u32(r), uintptr(comm), 0)
	return op, l.check(&l.f.RedOpCreatePreMulSum, rc)
}

func (l *Library) RedOpDestroy(op RedOp, comm Comm) error {
	return l.check(&l.f.RedOpDestroy, l.f.RedOpDestroy.Result3(u32(op), uintptr(comm), 0))
}

// The same with settings for one call, from NCCL 2.31.2 on.

func (l *Library) AllReduceConfig(send, recv DevicePtr, count uint64, t DataType, op RedOp, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.AllReduceConfig, l.f.AllReduceConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0))
}

func (l *Library) ReduceConfig(send, recv DevicePtr, count uint64, t DataType, op RedOp, root int, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.ReduceConfig, l.f.ReduceConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(root), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c))))
}

func (l *Library) BroadcastConfig(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.BroadcastConfig, l.f.BroadcastConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0))
}

func (l *Library) AllGatherConfig(send, recv DevicePtr, count uint64, t DataType, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.AllGatherConfig, l.f.AllGatherConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0, 0))
}

func (l *Library) ReduceScatterConfig(send, recv DevicePtr, count uint64, t DataType, op RedOp, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.ReduceScatterConfig, l.f.ReduceScatterConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0))
}

func (l *Library) AllToAllConfig(send, recv DevicePtr, count uint64, t DataType, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.AlltoAllConfig, l.f.AlltoAllConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0, 0))
}

func (l *Library) GatherConfig(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.GatherConfig, l.f.GatherConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0))
}

func (l *Library) ScatterConfig(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream, c *CollConfig) error {
	return l.check(&l.f.ScatterConfig, l.f.ScatterConfig.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), uintptr(unsafe.Pointer(c)), 0))
}

// PutSignal writes to a peer's window, off bytes into it, and signals the peer. Up to 2.30 index and context are 0.
func (l *Library) PutSignal(local DevicePtr, count uint64, t DataType, peer int, w Window, off uint64, index, context int, comm Comm, s Stream) error {
	return l.check(&l.f.PutSignal, l.f.PutSignal.Result12(uintptr(local), uintptr(count), u32(t), uintptr(peer), uintptr(w), uintptr(off),
		uintptr(index), uintptr(context), 0, uintptr(comm), uintptr(s), 0))
}

// Signal signals a peer.
func (l *Library) Signal(peer, index, context int, comm Comm, s Stream) error {
	return l.check(&l.f.Signal, l.f.Signal.Result6(uintptr(peer), uintptr(index), uintptr(context), 0, uintptr(comm), uintptr(s)))
}

// WaitSignal makes the stream wait for signals.
func (l *Library) WaitSignal(descs []WaitDesc, comm Comm, s Stream) error {
	return l.check(&l.f.WaitSignal, l.f.WaitSignal.Result6(uintptr(len(descs)), uintptr(unsafe.Pointer(unsafe.SliceData(descs))), uintptr(comm), uintptr(s), 0, 0))
}
