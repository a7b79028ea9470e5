package ncclsys

import (
	"runtime"
	"sync/atomic"
)

// Handles of the library; all are C pointers.
type (
	Comm         uintptr
	Registration uintptr // of CommRegister; 0 after success says: not registered
	Window       uintptr // 0 after success says: not supported here
	Stream       uintptr // the driver's
	DevicePtr    uintptr // the driver's
)

// UniqueID makes one communicator. The process that made it must live until all its ranks are connected.
type UniqueID [128]byte

// DataType is an element type in the library's numbering, the same for all makers.
type DataType int32

const (
	Int8 DataType = iota
	Uint8
	Int32
	Uint32
	Int64
	Uint64
	Float16
	Float32
	Float64
	BFloat16Type
	Float8E4M3
	Float8E5M2
)

// RedOp is a reduction in the library's numbering; RedOpCreatePreMulSum makes further ones.
type RedOp int32

const (
	Sum RedOp = iota
	Prod
	Max
	Min
	Avg
)

// Residence says where the scalar of a pre-multiplied sum is.
type Residence int32

const (
	OnDevice Residence = iota // read when the operation runs: must stay
	OnHost                    // read at once
)

// Flags.
const (
	WindowCollective = 1  // all ranks use the same offset in each collective: a promise, not checked
	NoColor          = -1 // of CommSplit: takes no part
)

// Team is a group of ranks with equal distance (ncclTeam_t).
type Team struct {
	Size, Rank, Stride int32
}

// Pending is a handle that the library writes, maybe after the call that asked for it: at the end of the group, or when a
// non-blocking communicator is ready. It keeps what the library reads until then.
type Pending[T ~uintptr] struct {
	cell uintptr
	lib  *Library
	pin  runtime.Pinner
}

// Handle is the handle, 0 as long as there is none.
func (p *Pending[T]) Handle() T { return T(atomic.LoadUintptr(&p.cell)) }

// Done lets go of what the library read. Call it when the handle is ready or the call has failed.
func (p *Pending[T]) Done() {
	p.lib.mu.Lock()
	defer p.lib.mu.Unlock()
	delete(p.lib.pending, p)
	p.pin.Unpin()
}
