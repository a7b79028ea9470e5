package graphs

import (
	"fmt"
	"os"

	"github.com/gorun-dev/gorun/nccl"
)

// Option changes a capture.
type Option func(*options)

type options struct {
	comms   []*nccl.Comm
	require nccl.Mode
	never   string // why no windows are made unasked, "" where they may
	name    string
}

// Comms names the communicators that the function uses; a call on another one is refused. Equal, and in the same order, on all members.
func Comms(c ...*nccl.Comm) Option {
	return func(o *options) { o.comms = append(o.comms, c...) }
}

// Require demands that each call reaches mode or better (Plain < Graph, Local < Window); else every member's capture fails
// with ErrMode and says why; of a Send or Recv so do its two ends, and the others' errors name these (ErrPeer, or nccl.ErrMismatch where they wait for one
// of them). Equal on all members. What is demanded goes by the library on a GPU, small collectives too, which otherwise go by peer memory. Send and Recv have no windows: a demand for Window is one for Graph there.
//
// On the host platform Window costs nothing and is what calls get where it can be. On a GPU a capture uses windows that the program has made (Comm.Window), makes
// small ones by itself (NoWindows), and makes the others only on this demand: for the life of the graph, and until a later demand finds no member using them.
func Require(m nccl.Mode) Option {
	return func(o *options) { o.require = m }
}

// NoWindows has the capture make no windows, which on a GPU it otherwise does without being asked, where that is faster as far as it was measured (2 to 4 ranks, NVIDIA
// H200): all-reduce, all-gather and reduce-scatter whose buffers both lie in memory of nccl.Alloc of at most 32 KiB each, at the same offset on all ranks. An
// all-reduce of 8 bytes takes 0.6 x the time then. It is for calls that do not go by peer memory, which is faster still (nccl.Config.NoPeer). The environment variable GORUN_WINDOWS=off does so for all captures. Where one member has
// it none gets such windows. What speaks for it:
//   - the windows belong to the memory until it is freed, for eager calls and other graphs, too, and they may be used at equal offsets on all ranks only: another use is an
//     error that says so;
//   - with NCCL before 2.30.7 replays in windows do not end when a member dies: all members get the error in time, but the process cannot make a new communicator on its
//     device.
func NoWindows() Option {
	return func(o *options) { o.never = "option NoWindows" }
}

// windowsVar is a setting for all captures of the process: auto (or nothing), or off.
const windowsVar = "GORUN_WINDOWS"

// environment adds what the process's environment says.
func (o *options) environment() error {
	switch v := os.Getenv(windowsVar); v {
	case "", "auto":
	case "off":
		if o.never == "" {
			o.never = windowsVar + "=off"
		}
	default:
		return fmt.Errorf("%s=%q: want auto or off", windowsVar, v)
	}
	return nil
}

// Name is used in messages beside the place of the Capture call.
func Name(s string) Option {
	return func(o *options) { o.name = s }
}
