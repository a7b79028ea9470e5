package graphs

import (
	"context"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// Option changes a capture.
type Option func(*options)

type options struct{ todo int }

// Comms names the communicators that the function uses; a call on another one is refused. Equal on all members.
func Comms(c ...*nccl.Comm) Option { panic("stub") }

// Require demands that each call reaches mode or better (Plain < Graph, Local < Window); else every member's capture fails and says why.
func Require(m nccl.Mode) Option { panic("stub") }

// Name is used in messages beside the place of the Capture call.
func Name(s string) Option { panic("stub") }

// Capture runs fn once while s captures and makes a graph of what it enqueued. Collective on the communicators named by Comms. All members get a graph, or all get
// the error that names the first difference and the ranks; the buffers are then as before. fn runs on a thread of its own.
func Capture(ctx context.Context, s *cuda.Stream, fn func(*cuda.Stream) error, o ...Option) (*Graph, error) {
	panic("stub")
}

// Graph is an executable graph with the registrations of its buffers.
type Graph struct{ todo int }

// Launch enqueues a replay. Collective: all members replay the same graphs of a communicator in the same order.
func (g *Graph) Launch(s *cuda.Stream) error { panic("stub") }

// Close destroys the graph; its registrations go with it when the last replay in flight has ended. Local. Twice is fine.
func (g *Graph) Close() error { panic("stub") }

// Calls tells how each captured call runs and why.
func (g *Graph) Calls() []CallInfo { panic("stub") }

// String is "graph captured at train.go:41".
func (g *Graph) String() string { panic("stub") }

// CallInfo is one captured call.
type CallInfo struct {
	Call   string
	Mode   nccl.Mode
	Reason string
}

// MismatchError is what every member's Capture returns where they disagree.
type MismatchError struct {
	Where string // "call 3 of the capture at train.go:41 on communicator world"
	Text  string // what differs, with ranks
	Err   error  // sentinel: nccl.ErrMismatch, nccl.ErrMixed, ...
}

func (e *MismatchError) Error() string { panic("stub") }
func (e *MismatchError) Unwrap() error { return e.Err }
