package nccl

import (
	"context"

	"github.com/gorun-dev/gorun/cuda"
)

// What follows is for libraries above, package graphs first of all.

// Op is a kind of call.
type Op uint8

const (
	OpAllReduce Op = iota + 1
	OpReduce
	OpBroadcast
	OpAllGather
	OpReduceScatter
	OpSend
	OpRecv
)

func (o Op) String() string { panic("stub") } // "all-reduce", "send"

// Call is one operation as a rank asks for it.
type Call struct {
	Op     Op
	Type   cuda.DType
	Red    RedOp
	Root   int32  // root, or the peer of Send and Recv
	Count  uint64 // elements, as NCCL counts them for the op
	Seq    uint64 // of an eager call: its place on the communicator
	Send   cuda.Range
	Recv   cuda.Range
	Stream *cuda.Stream
}

// String is "all-reduce of 1024 float32, sum".
func (c Call) String() string { panic("stub") }

// Mode is how a call reaches the users' buffers.
type Mode uint8

const (
	Plain  Mode = iota + 1 // through staging
	Local                  // straight, by Comm.Register
	Graph                  // straight, registered by the capture
	Window                 // straight, and at the same offsets on every rank
)

func (m Mode) String() string { panic("stub") }

// Gate decides about each captured call of a communicator that it leases. A Group is one slice. It may wait for the other members. It
// registers what the mode needs before it returns.
type Gate interface {
	Admit(c *Comm, group []Call) (Mode, error)
}

// SetGate leases the communicator for a capture: captured calls go through g, eager ones are refused with an error that names where (g's String, if it
// has one). It takes a sequence number of kind Capture in the ledger. restore ends the lease.
func (c *Comm) SetGate(g Gate) (restore func(), err error) { panic("stub") }

// Holder is what keeps the communicator in use: a graph. Break is called from Abort, on its goroutine, when the communicator fails: the holder must
// give up its executable graphs.
type Holder interface {
	Break(cause error)
	String() string
}

// Attach makes h hold the communicator until detach is called.
func (c *Comm) Attach(h Holder) (detach func(), err error) { panic("stub") }

// Meet is an all-gather among the members at a point that all reach in the same order (bootstrap.Group.Meet), which also ends, with the error
// that tells it, when a member's ledger shows that it does something else (an eager call or replay where this rank captures), or the communicator fails.
func (c *Comm) Meet(ctx context.Context, value []byte, what string) ([][]byte, error) { panic("stub") }

// MeetPair is the same between this rank and one peer, for Send and Recv in a capture.
func (c *Comm) MeetPair(ctx context.Context, peer int, value []byte, what string) (theirs []byte, err error) {
	panic("stub")
}

// Describe says what must agree about the calls of a group, in a form that can be compared and, by Explain, be told as a difference.
func Describe(group []Call) []byte { panic("stub") }

// ExplainDifference says how rank b's description differs from rank a's ("rank 1: all-reduce of 2048 float32, sum; rank 0: all-reduce of 1024 float32, sum"), "" if it does not.
func ExplainDifference(a int, descA []byte, b int, descB []byte) string { panic("stub") }

// Layout describes where the buffers of a group lie: for each, allocation kind, whether registered by the user, head offset, and what a peer on this host
// needs to reach it. All members' layouts go to Prepare.
func (c *Comm) Layout(group []Call) ([]byte, error) { panic("stub") }

// LayoutInfo is one buffer of a decoded layout.
type LayoutInfo struct {
	Send       bool // else the recv buffer
	Kind       cuda.AllocKind
	Registered bool   // by Comm.Register
	Offset     uint64 // from the head of the allocation
	Memory     string // for messages: "[0,4096) of 8192-byte allocation 7"
}

// DecodeLayout reads a member's layout: for each call of the group its buffers.
func DecodeLayout(b []byte) ([][]LayoutInfo, error) { panic("stub") }

// Prepare does the real registration of a captured group: peers' memory is mapped here now, not at the first replay. The mappings live as
// long as the registrations of this rank's buffers in the group (which must exist).
func (c *Comm) Prepare(ctx context.Context, group []Call, layouts [][]byte) error { panic("stub") }

// Replay is one launch of a captured graph that uses the communicator.
type Replay struct{ todo int }

// BeginReplay takes the communicator's next place for a launch of the graph (key: equal on all members for the same graph) and writes it
// to the ledger. It fails at once if a member is known to do something else there.
func (c *Comm) BeginReplay(key uint64, who string) (Replay, error) { panic("stub") }

// Before and After are enqueued on the stream around the launch: replays and eager calls of one communicator do not overlap.
func (r Replay) Before(s *cuda.Stream) error { panic("stub") }
func (r Replay) After(s *cuda.Stream) error  { panic("stub") }
