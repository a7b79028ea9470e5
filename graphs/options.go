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
func Require(m nccl.Mode) Option {
	return func(o *options) { o.require = m }
}

// Name is used in messages beside the place of the Capture call.
func Name(s string) Option {
	return func(o *options) { o.name = s }
}
