package ncclsys

import "unsafe"

// The collectives are enqueued on a stream and allocate nothing. count is in elements: of the whole for AllReduce, Reduce,
// Broadcast, Send and Recv; of one rank's part for AllGather and ReduceScatter.

func (l *Library) AllReduce(send, recv DevicePtr, count uint64, t DataType, op RedOp, comm Comm, s Stream) error {
	return l.check(&l.f.AllReduce, l.f.AllReduce.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(comm), uintptr(s), 0, 0))
}

func (l *Library) Reduce(send, recv DevicePtr, count uint64, t DataType, op RedOp, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Reduce, l.f.Reduce.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), u32(op), uintptr(root), uintptr(comm), uintptr(s), 0))
}

func (l *Library) Broadcast(send, recv DevicePtr, count uint64, t DataType, root int, comm Comm, s Stream) error {
	return l.check(&l.f.Broadcast, l.f.Broadcast.Result9(uintptr(send), uintptr(recv), uintptr(count), u32(t), uintptr(root), uintptr(comm), uintptr(s), 0, 0))
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

// GroupStart begins a group on the calling thread: the calls until GroupEnd become one. Groups nest.
func (l *Library) GroupStart() error {
	return l.check(&l.f.GroupStart, l.f.GroupStart.Result3(0, 0, 0))
}

// GroupEnd issues the group, on the thread that began it.
func (l *Library) GroupEnd() error { return l.check(&l.f.GroupEnd, l.f.GroupEnd.Result3(0, 0, 0)) }

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
