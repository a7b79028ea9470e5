package nccl

import (
	"context"
	"sync/atomic"

	"github.com/gorun-dev/gorun/cuda"
)

// alone is the backend of a communicator of one: calls are copies on the stream.
type alone struct {
	c       *Comm
	tickets atomic.Uint64
	lib     *library // for reductions on a GPU that are no copy; nil: none was made
}

func (a *alone) issue(calls []Call, _ Mode) error {
	var sends, recvs []Call
	for _, call := range calls {
		switch call.Op {
		case OpSend:
			sends = append(sends, call)
			continue
		case OpRecv:
			recvs = append(recvs, call)
			continue
		}
		if err := a.copy(call, call.Send, call.Recv); err != nil {
			return err
		}
	}
	for i, call := range sends {
		if err := a.copy(call, call.Send, recvs[i].Recv); err != nil {
			return err
		}
	}
	return nil
}

func (a *alone) copy(call Call, src, dst cuda.Range) error {
	a.c.calls.Add(1)
	if call.Seq > 0 {
		a.c.acct.SetDone(call.Seq)
	}
	if src.Mem != nil && call.Red > Avg {
		a.c.direct.Add(src.Len + dst.Len)
		return a.scale(&call)
	}
	if src.Mem == nil || src == dst {
		return nil
	}
	a.c.direct.Add(src.Len + dst.Len)
	s, err := cuda.SliceOf[uint8](src.Mem, src.Off, int(src.Len))
	if err != nil {
		return err
	}
	d, err := cuda.SliceOf[uint8](dst.Mem, dst.Off, int(dst.Len))
	if err != nil {
		return err
	}
	return cuda.Copy(d, s, call.Stream)
}

func (a *alone) ticket() uint64                                  { return a.tickets.Add(1) }
func (a *alone) before(Replay, *cuda.Stream) error               { return nil }
func (a *alone) after(Replay, *cuda.Stream) error                { return nil }
func (a *alone) register(*cuda.Memory, bool) error               { return nil }
func (a *alone) prepare(context.Context, []Call, [][]byte) error { return nil }
func (a *alone) drain()                                          {}
func (a *alone) outstanding() int                                { return 0 }
func (a *alone) tell(err error) error                            { return err }
func (a *alone) told() error                                     { return nil }
func (a *alone) declareClosed(uint64)                            {}
func (a *alone) peerClosed(int) (uint64, bool)                   { return 0, false }
func (a *alone) mappings() int                                   { return 0 }
func (a *alone) release()                                        { a.closeLibrary() }
func (a *alone) explains() bool                                  { return false }

func (a *alone) deregister(_ *cuda.Memory, _ bool, hold *cuda.Hold) (after func() error) {
	return func() error {
		if hold != nil {
			releaseHolds(hold)
		}
		return nil
	}
}
