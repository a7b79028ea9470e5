package nccl

import (
	"fmt"
	"math"

	"github.com/gorun-dev/gorun/cuda"
)

// RedOp is a reduction; PreMulSum makes further ones. All members get results that are equal to the bit. Integers wrap around. On the host platform, and by
// peer memory, values are combined in rank order, 16-bit and 8-bit floats in float32 and rounded once at the end, and Min and Max of floats prefer a
// number to a NaN; a library has an order and a precision of its own.
type RedOp uint32

const (
	Sum RedOp = iota
	Prod
	Min
	Max
	Avg // the sum divided by the number of ranks; of integers towards zero
)

// AllReduce reduces send over all ranks into recv on each. All lengths are equal; recv may be send itself, but must not overlap it otherwise.
func AllReduce[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, s *cuda.Stream) error {
	if send.Len() != recv.Len() {
		return c.badCall(OpAllReduce, "send has %d elements, recv %d", send.Len(), recv.Len())
	}
	return c.enqueue(Call{Op: OpAllReduce, Type: cuda.DTypeOf[T](), Red: op, Count: uint64(send.Len()), Send: send.Range(), Recv: recv.Range(), Stream: s})
}

// Reduce leaves the result on root only; recv is ignored elsewhere (may be empty).
func Reduce[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, root int, s *cuda.Stream) error {
	call := Call{Op: OpReduce, Type: cuda.DTypeOf[T](), Red: op, Root: rank32(root), Count: uint64(send.Len()), Send: send.Range(), Stream: s}
	if root == c.Rank() {
		if send.Len() != recv.Len() {
			return c.badCall(OpReduce, "send has %d elements, recv %d", send.Len(), recv.Len())
		}
		call.Recv = recv.Range()
	}
	return c.enqueue(call)
}

// Broadcast copies root's send to recv on every rank; send is ignored elsewhere (may be empty). In place: send is recv on root.
func Broadcast[T cuda.Element](c *Comm, send, recv cuda.Slice[T], root int, s *cuda.Stream) error {
	call := Call{Op: OpBroadcast, Type: cuda.DTypeOf[T](), Root: rank32(root), Count: uint64(recv.Len()), Recv: recv.Range(), Stream: s}
	if root == c.Rank() {
		if send.Len() != recv.Len() {
			return c.badCall(OpBroadcast, "send has %d elements, recv %d", send.Len(), recv.Len())
		}
		call.Send = send.Range()
	}
	return c.enqueue(call)
}

// AllGather puts send of rank i at recv[i*len(send):]. len(recv) = size*len(send). In place: send is that part of recv.
func AllGather[T cuda.Element](c *Comm, send, recv cuda.Slice[T], s *cuda.Stream) error {
	if recv.Len() != c.Size()*send.Len() {
		return c.badCall(OpAllGather, "recv has %d elements, not %d ranks x %d", recv.Len(), c.Size(), send.Len())
	}
	return c.enqueue(Call{Op: OpAllGather, Type: cuda.DTypeOf[T](), Count: uint64(send.Len()), Send: send.Range(), Recv: recv.Range(), Stream: s})
}

// ReduceScatter reduces part i of send over all ranks into recv of rank i. len(send) = size*len(recv). In place: recv is that part of send.
func ReduceScatter[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, s *cuda.Stream) error {
	if send.Len() != c.Size()*recv.Len() {
		return c.badCall(OpReduceScatter, "send has %d elements, not %d ranks x %d", send.Len(), c.Size(), recv.Len())
	}
	return c.enqueue(Call{Op: OpReduceScatter, Type: cuda.DTypeOf[T](), Red: op, Count: uint64(recv.Len()), Send: send.Range(), Recv: recv.Range(), Stream: s})
}

// Send gives data to another rank; the nth Send from a to b meets the nth Recv on b from a. It is done when the data has been received.
// A rank that both sends and receives does so in one Group, else two ranks may wait for each other.
func Send[T cuda.Element](c *Comm, send cuda.Slice[T], peer int, s *cuda.Stream) error {
	r := send.Range()
	return c.message(OpSend, cuda.DTypeOf[T](), rank32(peer), uint64(send.Len()), r.Mem, r.Off, r.Len, s)
}

// Recv takes data from another rank, see Send.
func Recv[T cuda.Element](c *Comm, recv cuda.Slice[T], peer int, s *cuda.Stream) error {
	r := recv.Range()
	return c.message(OpRecv, cuda.DTypeOf[T](), rank32(peer), uint64(recv.Len()), r.Mem, r.Off, r.Len, s)
}

// rank32 is a rank as a Call has it. One that does not fit becomes one that no communicator has, not another one's.
func rank32(r int) int32 { return int32(min(max(r, math.MinInt32), math.MaxInt32)) }

func (c *Comm) badCall(op Op, format string, args ...any) error {
	return c.refuse(op.String(), format, args...)
}

// validate looks at what this rank alone can see.
func (c *Comm) validate(call *Call) error {
	bad := func(format string, args ...any) error { return c.badCall(call.Op, format, args...) }
	if call.Stream == nil {
		return bad("no stream")
	}
	if call.Stream.Device() != c.dev {
		return bad("the stream is of another device than the communicator")
	}
	if call.place() && (call.Root < 0 || int(call.Root) >= len(c.ranks)) {
		what := "root"
		if call.Op.p2p() {
			what = "peer"
		}
		return bad("%s %d is no rank of a communicator of %d", what, call.Root, len(c.ranks))
	}
	if call.Red > Avg {
		if wrong := c.checkRed(call); wrong != "" {
			return bad("%s", wrong)
		}
	}
	if call.Count == 0 {
		call.Send, call.Recv = cuda.Range{}, cuda.Range{}
		return nil
	}
	for _, r := range [...]cuda.Range{call.Send, call.Recv} {
		switch {
		case r.Mem == nil:
		case r.Mem.Device() != c.dev:
			return bad("%v is of another device than the communicator", r)
		case r.Mem.Freed():
			return bad("%v: the memory was freed", r)
		}
	}
	if lap := overlap(call, c.rank); lap != "" {
		return bad("send %v and recv %v overlap; %s", call.Send, call.Recv, lap)
	}
	return nil
}

// overlap is "" where send and recv are apart or exactly in place, else what in place would be.
func overlap(call *Call, rank int) string {
	s, r := call.Send, call.Recv
	if !meet(s, r) {
		return ""
	}
	switch call.Op {
	case OpAllGather:
		if s.Off == r.Off+uint64(rank)*s.Len {
			return ""
		}
		return fmt.Sprintf("in place send is part %d of recv", rank)
	case OpReduceScatter:
		if r.Off == s.Off+uint64(rank)*r.Len {
			return ""
		}
		return fmt.Sprintf("in place recv is part %d of send", rank)
	}
	if s.Off == r.Off {
		return ""
	}
	return "in place they are equal"
}
