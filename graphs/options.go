package graphs

import "github.com/gorun-dev/gorun/nccl"

// Option changes a capture.
type Option func(*options)

type options struct {
	comms   []*nccl.Comm
	require nccl.Mode
	name    string
}

// Comms names the communicators that the function uses; a call on another one is refused. Equal, and in the same order, on all members.
func Comms(c ...*nccl.Comm) Option {
	return func(o *options) { o.comms = append(o.comms, c...) }
}

// Require demands that each call reaches mode or better (Plain < Graph, Local < Window); else every member's capture fails
// with ErrMode and says why. Equal on all members. Send and Recv have no windows: a demand for Window is one for Graph there.
//
// On the host platform Window costs nothing and is what calls get where it can be. On a GPU a capture uses windows that the program has made
// (Comm.Window), and makes them only on this demand: they stay with the communicator, and on NCCL 2.28 a replay with them that waits for a dead
// peer cannot be ended, so that the process gets its error but has lost the device.
func Require(m nccl.Mode) Option {
	return func(o *options) { o.require = m }
}

// Name is used in messages beside the place of the Capture call.
func Name(s string) Option {
	return func(o *options) { o.name = s }
}
