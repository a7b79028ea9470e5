package cusys

import "structs"

// Handles of the driver. All are C pointers, except Device (an ordinal) and AllocHandle (a number).
type (
	Device      int32
	Context     uintptr
	Stream      uintptr
	Event       uintptr
	Graph       uintptr
	GraphExec   uintptr
	UserObject  uintptr
	Module      uintptr
	Function    uintptr
	DevicePtr   uintptr
	AllocHandle uint64
)

// HostFn is the address of a C function void f(void *arg), for LaunchHostFunc and UserObjectCreate. See Callback.
type HostFn uintptr

// CaptureMode is how strict a capture is about unsafe calls.
type CaptureMode int32

const (
	CaptureGlobal CaptureMode = iota
	CaptureThreadLocal
	CaptureRelaxed
)

// CaptureStatus is that of a stream.
type CaptureStatus int32

const (
	CaptureNone CaptureStatus = iota
	CaptureActive
	CaptureInvalidated
)

// Flags.
const (
	StreamNonBlocking = 1 // no order with the legacy default stream, whose use breaks captures

	EventDisableTiming = 2
)

// HandleType are the ways in which memory can be shared with other processes, as bits.
type HandleType int32

const (
	HandleNone   HandleType = 0
	HandleFD     HandleType = 1
	HandleFabric HandleType = 8
)

// Granularity is what MemGranularity tells.
type Granularity int32

const (
	GranularityMinimum Granularity = iota
	GranularityRecommended
)

// Kinds of memory, places and access.
const (
	AllocPinned    = 1
	LocationDevice = 1
	AccessBoth     = 3
)

// MemLocation is a place of memory (CUmemLocation).
type MemLocation struct {
	_    structs.HostLayout
	Type int32
	ID   int32
}

// MemProp says what memory MemCreate makes (CUmemAllocationProp; HIP has the same up to Reserved).
type MemProp struct {
	_           structs.HostLayout
	Type        int32
	Handles     HandleType
	Location    MemLocation
	Win32       uintptr
	Compression uint8
	RDMA        uint8 // 1: a NIC can reach it (only where the device can)
	Usage       uint16
	Reserved    [4]uint8
}

// PinnedProp describes memory of a device that can be shared by handles.
func PinnedProp(d Device, handles HandleType) MemProp {
	return MemProp{Type: AllocPinned, Handles: handles, Location: MemLocation{Type: LocationDevice, ID: int32(d)}}
}

// MemAccess is who may use a range and how (CUmemAccessDesc).
type MemAccess struct {
	_        structs.HostLayout
	Location MemLocation
	Flags    int32
}

// UUID of a device; of the instance on a MIG slice.
type UUID [16]byte

// Attribute is a property of a device, in CUDA's numbering.
type Attribute int32

const (
	AttrMultiprocessors Attribute = 16
	AttrCCMajor         Attribute = 75
	AttrCCMinor         Attribute = 76
	AttrVMM             Attribute = 102
	AttrFDHandles       Attribute = 103
	AttrRDMAWithVMM     Attribute = 110
	AttrFabricHandles   Attribute = 128
)

// pointerAttribute is a property of an address.
type pointerAttribute int32

const (
	ptrMemoryType    pointerAttribute = 2
	ptrDevice        pointerAttribute = 9
	ptrLegacyIPC     pointerAttribute = 10
	ptrRangeStart    pointerAttribute = 11
	ptrRangeSize     pointerAttribute = 12
	ptrAllowedHandle pointerAttribute = 14
)

// MemoryType is where an address points.
type MemoryType uint8

const (
	MemoryUnknown MemoryType = iota // not the driver's memory
	MemoryHost
	MemoryDevice
)

// PointerInfo is what the driver knows about an address. An address that is not the driver's gives the zero value.
type PointerInfo struct {
	Type      MemoryType
	Device    Device
	Base      DevicePtr // of the mapping or allocation that holds the address
	Size      uint64    // bytes
	Handles   HandleType
	LegacyIPC bool // cuMemAlloc memory: can be shared by the old IPC calls only
}
