package cusys

import (
	"strings"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// functions are the driver's, by CUDA's names without prefix and suffix.
type functions struct {
	Init, DriverGetVersion dl.Entry

	DeviceGetCount, DeviceGet, DeviceGetAttribute, DeviceGetUuid, DeviceGetName, DeviceTotalMem, DeviceGetPCIBusId, DeviceCanAccessPeer, DeviceGetP2PAttribute dl.Entry

	PrimaryCtxRetain, PrimaryCtxRelease, CtxSetCurrent, CtxGetCurrent dl.Entry

	MemAlloc, MemFree, MemGetInfo, MemAllocHost, MemFreeHost                         dl.Entry
	MemcpyHtoDAsync, MemcpyDtoHAsync, MemcpyDtoDAsync, MemsetD8Async, MemsetD32Async dl.Entry
	PointerGetAttributes                                                             dl.Entry

	MemGetAllocationGranularity, MemCreate, MemRelease, MemAddressReserve, MemAddressFree, MemMap, MemUnmap, MemSetAccess dl.Entry
	MemRetainAllocationHandle, MemExportToShareableHandle, MemImportFromShareableHandle                                   dl.Entry

	StreamCreate, StreamDestroy, StreamQuery, StreamWaitEvent                                dl.Entry
	EventCreate, EventDestroy, EventRecord, EventQuery                                       dl.Entry
	StreamBeginCapture, StreamEndCapture, StreamIsCapturing, ThreadExchangeStreamCaptureMode dl.Entry
	GraphInstantiate, GraphLaunch, GraphExecDestroy, GraphDestroy, GraphGetNodes             dl.Entry
	UserObjectCreate, UserObjectRelease, GraphRetainUserObject, LaunchHostFunc               dl.Entry

	ModuleLoadDataEx, ModuleUnload, ModuleGetFunction, LaunchKernel dl.Entry

	GetErrorName, GetErrorString dl.Entry
}

// row is one function in each vendor's library.
type row struct {
	entry *dl.Entry
	cuda  string // alternatives, best first, without "cu"
	musa  string // the same without "mu"; "": CUDA's, each with and without its _v2
	hip   string // the same without "hip"; "-": it has no such function
	need  string // the vendors that must have it: C, M, H
	since string // CUDA's version that brought it, if the function is optional there
}

func (f *functions) rows() []row {
	return []row{
		{&f.Init, "Init", "", "Init", "CMH", ""},
		{&f.DriverGetVersion, "DriverGetVersion", "", "DriverGetVersion", "CMH", ""},
		{&f.GetErrorName, "GetErrorName", "", "GetErrorName", "", ""},
		{&f.GetErrorString, "GetErrorString", "", "GetErrorString", "", ""},

		{&f.DeviceGetCount, "DeviceGetCount", "", "GetDeviceCount", "CMH", ""},
		{&f.DeviceGet, "DeviceGet", "", "DeviceGet", "CMH", ""},
		{&f.DeviceGetAttribute, "DeviceGetAttribute", "", "DeviceGetAttribute", "CMH", ""},
		{&f.DeviceGetUuid, "DeviceGetUuid_v2 DeviceGetUuid", "", "DeviceGetUuid", "CH", ""}, // v2 knows MIG instances
		{&f.DeviceGetName, "DeviceGetName", "", "DeviceGetName", "CMH", ""},
		{&f.DeviceTotalMem, "DeviceTotalMem_v2", "", "DeviceTotalMem", "CMH", ""},
		{&f.DeviceGetPCIBusId, "DeviceGetPCIBusId", "", "DeviceGetPCIBusId", "CMH", ""},
		{&f.DeviceCanAccessPeer, "DeviceCanAccessPeer", "", "DeviceCanAccessPeer", "CMH", ""},
		{&f.DeviceGetP2PAttribute, "DeviceGetP2PAttribute", "", "-", "", ""}, // AMD's attributes have other numbers

		{&f.PrimaryCtxRetain, "DevicePrimaryCtxRetain", "", "-", "CM", ""},
		{&f.PrimaryCtxRelease, "DevicePrimaryCtxRelease_v2", "", "-", "CM", ""},
		{&f.CtxSetCurrent, "CtxSetCurrent", "", "SetDevice", "CMH", ""},
		{&f.CtxGetCurrent, "CtxGetCurrent", "", "GetDevice", "", ""},

		{&f.MemAlloc, "MemAlloc_v2", "", "Malloc", "CMH", ""},
		{&f.MemFree, "MemFree_v2", "", "Free", "CMH", ""},
		{&f.MemGetInfo, "MemGetInfo_v2", "", "MemGetInfo", "CMH", ""},
		{&f.MemAllocHost, "MemAllocHost_v2", "", "HostMalloc", "CMH", ""}, // HIP's third argument is flags: 0
		{&f.MemFreeHost, "MemFreeHost", "", "HostFree", "CMH", ""},
		{&f.MemcpyHtoDAsync, "MemcpyHtoDAsync_v2", "", "MemcpyHtoDAsync", "CMH", ""},
		{&f.MemcpyDtoHAsync, "MemcpyDtoHAsync_v2", "", "MemcpyDtoHAsync", "CMH", ""},
		{&f.MemcpyDtoDAsync, "MemcpyDtoDAsync_v2", "", "MemcpyDtoDAsync", "CMH", ""},
		{&f.MemsetD8Async, "MemsetD8Async", "", "MemsetD8Async", "CMH", ""},
		{&f.MemsetD32Async, "MemsetD32Async", "", "MemsetD32Async", "CMH", ""},
		{&f.PointerGetAttributes, "PointerGetAttributes", "", "DrvPointerGetAttributes", "C", ""},

		{&f.MemGetAllocationGranularity, "MemGetAllocationGranularity", "", "MemGetAllocationGranularity", "", "CUDA 10.2"},
		{&f.MemCreate, "MemCreate", "", "MemCreate", "", "CUDA 10.2"},
		{&f.MemRelease, "MemRelease", "", "MemRelease", "", "CUDA 10.2"},
		{&f.MemAddressReserve, "MemAddressReserve", "", "MemAddressReserve", "", "CUDA 10.2"},
		{&f.MemAddressFree, "MemAddressFree", "", "MemAddressFree", "", "CUDA 10.2"},
		{&f.MemMap, "MemMap", "", "MemMap", "", "CUDA 10.2"},
		{&f.MemUnmap, "MemUnmap", "", "MemUnmap", "", "CUDA 10.2"},
		{&f.MemSetAccess, "MemSetAccess", "", "MemSetAccess", "", "CUDA 10.2"},
		{&f.MemRetainAllocationHandle, "MemRetainAllocationHandle", "", "MemRetainAllocationHandle", "", "CUDA 11.0"},
		{&f.MemExportToShareableHandle, "MemExportToShareableHandle", "", "MemExportToShareableHandle", "", "CUDA 10.2"},
		{&f.MemImportFromShareableHandle, "MemImportFromShareableHandle", "", "MemImportFromShareableHandle", "", "CUDA 10.2"},

		{&f.StreamCreate, "StreamCreate", "", "StreamCreateWithFlags", "CMH", ""},
		{&f.StreamDestroy, "StreamDestroy_v2", "", "StreamDestroy", "CMH", ""},
		{&f.StreamQuery, "StreamQuery", "", "StreamQuery", "CMH", ""},
		{&f.StreamWaitEvent, "StreamWaitEvent", "", "StreamWaitEvent", "CMH", ""},
		{&f.EventCreate, "EventCreate", "", "EventCreateWithFlags", "CMH", ""},
		{&f.EventDestroy, "EventDestroy_v2", "", "EventDestroy", "CMH", ""},
		{&f.EventRecord, "EventRecord", "", "EventRecord", "CMH", ""},
		{&f.EventQuery, "EventQuery", "", "EventQuery", "CMH", ""},

		// The unsuffixed name is CUDA 10.0's form without a mode; MUSA has only that name in some versions, with one.
		{&f.StreamBeginCapture, "StreamBeginCapture_v2", "StreamBeginCapture_v2 StreamBeginCapture", "StreamBeginCapture", "CMH", ""},
		{&f.StreamEndCapture, "StreamEndCapture", "", "StreamEndCapture", "CMH", ""},
		{&f.StreamIsCapturing, "StreamIsCapturing", "", "StreamIsCapturing", "CMH", ""},
		{&f.ThreadExchangeStreamCaptureMode, "ThreadExchangeStreamCaptureMode", "", "ThreadExchangeStreamCaptureMode", "C", "CUDA 10.1"},
		{&f.GraphInstantiate, "GraphInstantiateWithFlags GraphInstantiate_v2", "GraphInstantiateWithFlags GraphInstantiate_v2 GraphInstantiate", "GraphInstantiateWithFlags", "CMH", ""},
		{&f.GraphLaunch, "GraphLaunch", "", "GraphLaunch", "CMH", ""},
		{&f.GraphExecDestroy, "GraphExecDestroy", "", "GraphExecDestroy", "CMH", ""},
		{&f.GraphDestroy, "GraphDestroy", "", "GraphDestroy", "CMH", ""},
		{&f.GraphGetNodes, "GraphGetNodes", "", "GraphGetNodes", "CMH", ""},
		{&f.UserObjectCreate, "UserObjectCreate", "", "UserObjectCreate", "", "CUDA 11.3"},
		{&f.UserObjectRelease, "UserObjectRelease", "", "UserObjectRelease", "", "CUDA 11.3"},
		{&f.GraphRetainUserObject, "GraphRetainUserObject", "", "GraphRetainUserObject", "", "CUDA 11.3"},
		{&f.LaunchHostFunc, "LaunchHostFunc", "", "LaunchHostFunc", "", "CUDA 10.0"},

		{&f.ModuleLoadDataEx, "ModuleLoadDataEx", "", "ModuleLoadDataEx", "CMH", ""},
		{&f.ModuleUnload, "ModuleUnload", "", "ModuleUnload", "CMH", ""},
		{&f.ModuleGetFunction, "ModuleGetFunction", "", "ModuleGetFunction", "CMH", ""},
		{&f.LaunchKernel, "LaunchKernel", "", "ModuleLaunchKernel", "CMH", ""},
	}
}

// symbols is the table for a vendor.
func (f *functions) symbols(v *Vendor) []dl.Symbol {
	var out []dl.Symbol
	for _, r := range f.rows() {
		s := dl.Symbol{Entry: r.entry}
		var letter string
		switch v.id {
		case cudaID:
			s.Names, letter, s.Since = prefixed("cu", r.cuda), "C", r.since
		case musaID:
			names := r.musa
			if names == "" {
				names = unsuffixed(r.cuda)
			}
			s.Names, letter = prefixed("mu", names), "M"
		case hipID:
			if r.hip != "-" {
				s.Names = prefixed("hip", r.hip)
			}
			letter = "H"
		}
		s.Required = strings.Contains(r.need, letter)
		out = append(out, s)
	}
	return out
}

func prefixed(prefix, names string) []string {
	var out []string
	for _, n := range strings.Fields(names) {
		out = append(out, prefix+n)
	}
	return out
}

// unsuffixed adds to each name with _v2 the one without it, unless that is there.
func unsuffixed(names string) string {
	out := strings.Fields(names)
	for _, n := range out {
		if short, ok := strings.CutSuffix(n, "_v2"); ok && !strings.Contains(" "+names+" ", " "+short+" ") {
			out = append(out, short)
		}
	}
	return strings.Join(out, " ")
}
