package nccl

import (
	"context"
	"fmt"
	"time"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

var libTypes = [...]ncclsys.DataType{
	cuda.Int8DType: ncclsys.Int8, cuda.Uint8DType: ncclsys.Uint8, cuda.Int32DType: ncclsys.Int32, cuda.Uint32DType: ncclsys.Uint32,
	cuda.Int64DType: ncclsys.Int64, cuda.Uint64DType: ncclsys.Uint64, cuda.Float16DType: ncclsys.Float16, cuda.BFloat16DType: ncclsys.BFloat16Type,
	cuda.Float32DType: ncclsys.Float32, cuda.Float64DType: ncclsys.Float64, cuda.F8E4M3DType: ncclsys.Float8E4M3, cuda.F8E5M2DType: ncclsys.Float8E5M2,
}

var libReds = [...]ncclsys.RedOp{Sum: ncclsys.Sum, Prod: ncclsys.Prod, Min: ncclsys.Min, Max: ncclsys.Max, Avg: ncclsys.Avg}

// typeOf is the library's type for a call. 8-bit floats that are only moved go as bytes where the version does not know them; they are added
// only where version and device can.
func (l *library) typeOf(call *Call) (ncclsys.DataType, error) {
	switch call.Type {
	case cuda.F8E4M3DType, cuda.F8E5M2DType:
		err := l.sys.Need(ncclsys.Float8)
		if !call.Op.reduces() {
			if err != nil {
				return ncclsys.Uint8, nil
			}
			break
		}
		if err != nil {
			return 0, err
		}
		if i := l.c.dev.Info(); i.Platform == cuda.CUDA && i.Major < 9 {
			return 0, fmt.Errorf("reductions of %v need compute capability 9.0, found %d.%d (%s)", call.Type, i.Major, i.Minor, i.Name)
		}
	case cuda.BFloat16DType:
		if err := l.sys.Need(ncclsys.BFloat16); err != nil {
			if call.Op.reduces() {
				return 0, err
			}
			return ncclsys.Float16, nil
		}
	}
	if call.Op.reduces() && call.Red == Avg {
		if err := l.sys.Need(ncclsys.Average); err != nil {
			return 0, err
		}
	}
	return libTypes[call.Type], nil
}

// issue hands the calls of one group to the library.
func (l *library) issue(calls []Call, mode Mode) error {
	if mode != 0 && l.graphErr != nil {
		return l.graphErr
	}
	for i := range calls {
		if t := calls[i].Type; t != cuda.BFloat16DType && t != cuda.F8E4M3DType && t != cuda.F8E5M2DType && calls[i].Red != Avg {
			continue // all versions have it
		}
		if _, err := l.typeOf(&calls[i]); err != nil {
			return err // on all members alike
		}
	}
	n := 0
	for n < len(calls) && !calls[n].Op.p2p() {
		n++
	}
	if mode == 0 && n < len(calls) {
		l.messages.note(calls[n:])
	}
	peer := mode == Peer || mode == 0 && l.peer.takesAll(calls[:n])
	var err error
	if peer {
		err = l.doPeer(calls[:n], mode)
	} else {
		err = l.do(calls[:n], l.main, mode)
	}
	if err == nil {
		err = l.do(calls[n:], l.p2p, mode)
	}
	if err != nil {
		return l.lost(calls, mode, err)
	}
	if mode == 0 {
		l.account(calls[:n], peer)
		l.account(calls[n:], false)
	}
	return nil
}

// lost is what an eager call that could not be issued means: the others wait for it. A captured one fails its capture, and all members of that learn it.
func (l *library) lost(calls []Call, mode Mode, err error) error {
	if mode != 0 || l.c.failed.Load() != nil {
		return err
	}
	// The library does not say so where the device is lost; the driver does when it is asked.
	calls[0].Stream.Query()
	if lost := l.deviceFailed(); lost != nil {
		l.c.fail(lost, true, false)
		return lost.err
	}
	l.awaitDeath(err)
	own := &cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: %s: %v", ErrAborted, l.c.rank, opName(calls), err)}
	if first := l.c.fail(own, true, false); first != error(own) {
		return first
	}
	return err
}

// deviceFailed is the failure that the loss of this rank's device is, nil while the device works.
func (l *library) deviceFailed() *cause {
	err := l.c.dev.Err()
	if err == nil {
		return nil
	}
	return &cause{kind: ErrAborted, err: err, text: fmt.Sprintf("%v by rank %d: its device has failed: %v", ErrAborted, l.c.rank, err)}
}

// do issues calls on one of the library's communicators: as one group where none of them needs another's result.
func (l *library) do(calls []Call, comm ncclsys.Comm, mode Mode) error {
	if len(calls) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.unlock()
	if mode == 0 {
		for i := range calls {
			if _, err := l.used(calls[i].Stream, calls[i].Op, calls[i].Seq); err != nil {
				return err
			}
		}
	}
	// A group belongs to a thread, and the library makes the thread's device current again behind a call, which without one would be the first: it
	// would make a context there. Relaxed, for in a capture the first call connects the members on this thread.
	b, err := l.c.dev.BindCall()
	if err != nil {
		return err
	}
	defer b.Release()
	err = l.doBound(calls, comm)
	if err == nil && mode == 0 {
		for i := range calls {
			l.cameBack(calls[i].Stream)
		}
	}
	return err
}

// doBound is the rest of do, apart so that do's returns are few enough for its defers to cost nothing.
func (l *library) doBound(calls []Call, comm ncclsys.Comm) error {
	if len(calls) == 1 || !calls[0].Op.p2p() && dependent(calls) {
		for i := range calls {
			if calls[i].Count == 0 {
				continue // all members drop it
			}
			if err := l.enter(); err != nil {
				return err
			}
			err := l.call(&calls[i], comm)
			l.leave()
			if err = l.finish(err, comm); err != nil {
				return err
			}
		}
		return nil
	}
	if err := l.enter(); err != nil {
		return err
	}
	err := l.group(calls, comm)
	l.leave()
	return l.finish(err, comm)
}

// group issues the calls together. The library counts groups by thread.
func (l *library) group(calls []Call, comm ncclsys.Comm) error {
	if len(calls) <= ncclsys.MostMessages && calls[0].Op.p2p() {
		return l.batched(calls)
	}
	if err := l.sys.GroupStart(); err != nil {
		return err
	}
	var first error
	for i := range calls {
		if calls[i].Count == 0 {
			continue
		}
		if err := l.call(&calls[i], comm); err != nil && err != error(ncclsys.ErrInProgress) {
			first = err
			break
		}
	}
	err := l.sys.GroupEnd()
	if first != nil {
		return first
	}
	return err
}

// batched is group for at most MostMessages messages.
func (l *library) batched(calls []Call) error {
	l.batch.Start()
	for i := range calls {
		c := &calls[i]
		if c.Count == 0 {
			continue
		}
		t, _ := l.typeOf(c)
		l.addMessage(c, t, ncclsys.Stream(c.Stream.Handle()))
	}
	return l.batch.End()
}

// connectPatience is how long a call on a non-blocking communicator waits for members that do not come to connect. The library connects them in the first
// call that needs it: a late member is no fault, one that is busy for longer than this is taken for one.
const connectPatience = 10 * time.Minute

// finish waits where the library goes on with a call by itself: its environment can make communicators non-blocking. As in a call that blocks, for a
// first connection, the members' ledgers are watched meanwhile: a contradiction, a death or a close ends it.
func (l *library) finish(err error, comm ncclsys.Comm) error {
	if err == error(ncclsys.ErrInProgress) {
		err = l.settle(context.Background(), comm, connectPatience)
	} else {
		err = result(err)
	}
	if f := l.c.failed.Load(); err != nil && f != nil {
		return f.err // what the abort made of the call says nothing
	}
	return err
}

// call is one call of the library. It allocates nothing of its own.
func (l *library) call(c *Call, comm ncclsys.Comm) error {
	t, _ := l.typeOf(c) // issue has asked
	return l.callAs(c, t, comm)
}

func (l *library) callAs(c *Call, t ncclsys.DataType, comm ncclsys.Comm) error {
	send, recv := ncclsys.DevicePtr(c.Send.Pointer()), ncclsys.DevicePtr(c.Recv.Pointer())
	s := ncclsys.Stream(c.Stream.Handle())
	// A rank that has one buffer only gives it for both: without an address the library would register nothing on that rank, and the others, which do, would hang.
	if send == 0 {
		send = recv
	}
	if recv == 0 {
		recv = send
	}
	switch c.Op {
	case OpAllReduce:
		return l.sys.AllReduce(send, recv, c.Count, t, l.redOf(c.Red), comm, s)
	case OpReduce:
		return l.sys.Reduce(send, recv, c.Count, t, l.redOf(c.Red), int(c.Root), comm, s)
	case OpBroadcast:
		return l.sys.Broadcast(send, recv, c.Count, t, int(c.Root), comm, s)
	case OpAllGather:
		return l.sys.AllGather(send, recv, c.Count, t, comm, s)
	case OpReduceScatter:
		return l.sys.ReduceScatter(send, recv, c.Count, t, l.redOf(c.Red), comm, s)
	case OpSend:
		return l.sys.Send(send, c.Count, t, int(c.Root), comm, s)
	case OpRecv:
		return l.sys.Recv(recv, c.Count, t, int(c.Root), comm, s)
	}
	return fmt.Errorf("%v is not in this package", c.Op)
}

// dependent reports whether a call of the group uses what an earlier one writes: the library runs a group's calls side by side.
func dependent(calls []Call) bool {
	for i := range calls {
		for j := range i {
			if meet(calls[i].Send, calls[j].Recv) || meet(calls[i].Recv, calls[j].Recv) || meet(calls[i].Recv, calls[j].Send) {
				return true
			}
		}
	}
	return false
}

// account counts eager calls when they are enqueued: the library does not tell when they are done.
func (l *library) account(calls []Call, peer bool) {
	l.c.calls.Add(uint64(len(calls)))
	for i := range calls {
		n := calls[i].Send.Len + calls[i].Recv.Len
		if n == 0 {
			continue
		}
		all, some := l.registration(&calls[i])
		if all && !peer {
			l.c.direct.Add(n)
		} else {
			l.c.staged.Add(n)
		}
		if some {
			l.mark(&calls[i])
		}
	}
}

// registration says whether all, and whether any of a call's buffers are registered by the user.
func (l *library) registration(c *Call) (all, some bool) {
	if l.c.userRegs.Load() == 0 {
		return false, false
	}
	all = true
	for _, r := range [...]cuda.Range{c.Send, c.Recv} {
		if r.Mem == nil {
			continue
		}
		if l.c.userRegistered(r) != nil {
			some = true
		} else {
			all = false
		}
	}
	return all && some, some
}

// These mark the record of a call whose buffers are registered, or in windows: where one rank has it and another has not, both would hang.
const (
	recRegistered = 1 << 24
	recWindow     = 1 << 25
)

// record is the ledger's record for eager calls. A call with one registered and one bare buffer is an error on this rank alone.
func (l *library) record(calls []Call) (desc [2]uint64, err error) {
	desc = packRecord(calls)
	n := 0
	for n < len(calls) && !calls[n].Op.p2p() {
		n++
	}
	if n == 1 {
		flags, place, err := l.recordBuffers(&calls[0])
		return [2]uint64{desc[0] | flags, desc[1] | place<<recPlaceShift}, err
	}
	mix := uint64(fnvOffset)
	for i := range calls[:n] {
		flags, place, err := l.recordBuffers(&calls[i])
		if err != nil {
			return desc, err
		}
		mix = fnv64(fnv64(mix, flags), place)
	}
	desc[1] = fnv64(desc[1], mix)
	return desc, nil
}

// recordBuffers is what a record says of the memory of a call: flags, and its place in windows.
func (l *library) recordBuffers(call *Call) (flags, place uint64, err error) {
	all, some := l.registration(call)
	if some && !all {
		return 0, 0, causef(ErrMixed, "rank %d, %v: %s, %s", l.c.rank, *call, l.bufferText("send", call.Send), l.bufferText("recv", call.Recv))
	}
	if all {
		flags |= recRegistered
	}
	if l.inWindows(call) {
		flags |= recWindow
		place = l.windowPlace(call)
	}
	return flags, place, nil
}

// recPlaceShift is where the record of a call in windows has a hash of where its buffers lie in them; the count is below.
const recPlaceShift = 48

// windowPlace is a hash of the windows of a call's buffers and of their offsets, which must be equal on all members: the library takes the others' addresses from
// its own.
func (l *library) windowPlace(c *Call) uint64 {
	send, recv := c.Send.Off, c.Recv.Off
	if c.Send.Mem == c.Recv.Mem {
		// In place the small buffer is this rank's part of the large one.
		part := uint64(l.c.rank) * c.Count * uint64(c.Type.Size())
		if c.Op == OpAllGather && send == recv+part {
			send = recv
		}
		if c.Op == OpReduceScatter && recv == send+part {
			recv = send
		}
	}
	h := fnv64(fnv64(fnvOffset, l.windowOf(c.Send)), l.windowOf(c.Recv))
	h = fnv64(fnv64(h, send), recv)
	return h >> recPlaceShift
}

// inWindows reports whether the library runs a call in windows: as its captured calls, the eager ones on the same memory do. Called by the goroutine that makes
// the calls, as everything that changes windows.
func (l *library) inWindows(c *Call) bool {
	if len(l.panes) == 0 && len(l.c.windows) == 0 || !symmetric(c.Op) || c.Count == 0 {
		return false
	}
	return l.hasWindow(c.Send) && l.hasWindow(c.Recv)
}

func (l *library) hasWindow(r cuda.Range) bool { return l.windowOf(r) != 0 }

// windowOf is the number of a window that a buffer lies in, 0 outside. Windows come and go in one order on all members: so the numbers are the same.
func (l *library) windowOf(r cuda.Range) uint64 {
	for i, p := range l.panes {
		if p.mem == r.Mem {
			return 2*uint64(i) + 1
		}
	}
	for i, w := range l.c.windows {
		if w.r.Mem == r.Mem && r.Off >= w.r.Off && r.Off+r.Len <= w.r.Off+w.r.Len {
			return 2*uint64(i) + 2
		}
	}
	return 0
}

// symmetric are the operations that the library can run in windows.
func symmetric(op Op) bool { return op == OpAllReduce || op == OpAllGather || op == OpReduceScatter }

func (l *library) bufferText(which string, r cuda.Range) string {
	return bufferText(which, true, l.c.userRegistered(r) != nil, r.Mem.ID(), r.Off)
}
