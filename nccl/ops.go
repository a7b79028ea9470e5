package nccl

import "github.com/gorun-dev/gorun/cuda"

// RedOp is a reduction.
type RedOp uint8

const (
	Sum RedOp = iota
	Prod
	Min
	Max
	Avg
)

func (o RedOp) String() string { panic("stub") }

// AllReduce reduces send over all ranks into recv on each. Equal lengths; recv may be send itself, but must not overlap it otherwise.
func AllReduce[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, s *cuda.Stream) error {
	panic("stub")
}

// Reduce leaves the result on root only; recv is ignored elsewhere (may be empty).
func Reduce[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, root int, s *cuda.Stream) error {
	panic("stub")
}

// Broadcast copies root's send to recv on every rank; send is ignored elsewhere (may be empty). In place: send is recv on root.
func Broadcast[T cuda.Element](c *Comm, send, recv cuda.Slice[T], root int, s *cuda.Stream) error {
	panic("stub")
}

// AllGather puts send of rank i at recv[i*len(send):]. len(recv) = size*len(send). In place: send is that part of recv.
func AllGather[T cuda.Element](c *Comm, send, recv cuda.Slice[T], s *cuda.Stream) error {
	panic("stub")
}

// ReduceScatter reduces part i of send over all ranks into recv of rank i. len(send) = size*len(recv). In place: recv is that part of send.
func ReduceScatter[T cuda.Element](c *Comm, send, recv cuda.Slice[T], op RedOp, s *cuda.Stream) error {
	panic("stub")
}

// Send and Recv move data between two ranks; the nth Send from a to b meets the nth Recv on b from a.
// A rank that both sends and receives does so in one Group, else two ranks may wait for each other.
func Send[T cuda.Element](c *Comm, send cuda.Slice[T], peer int, s *cuda.Stream) error { panic("stub") }
func Recv[T cuda.Element](c *Comm, recv cuda.Slice[T], peer int, s *cuda.Stream) error { panic("stub") }

// Group makes the calls of fn on the given communicators one call: its Sends and Recvs go on together. Nothing is issued if fn fails.
func Group(fn func() error, comms ...*Comm) error { panic("stub") }
