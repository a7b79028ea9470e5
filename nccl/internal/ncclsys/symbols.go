package ncclsys

import (
	"strings"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// functions are the library's, by NCCL's names without prefix.
type functions struct {
	GetVersion, GetUniqueId, GetErrorString, GetLastError, ResetDebugInit dl.Entry

	CommInitRank, CommInitRankConfig, CommInitRankScalable, CommInitAll, CommSplit, CommShrink, CommGetUniqueId, CommGrow dl.Entry
	CommRevoke, CommFinalize, CommDestroy, CommAbort, CommGetAsyncError, CommCount, CommCuDevice, CommUserRank            dl.Entry
	CommSuspend, CommResume, CommMemStats, CommQueryProperties                                                            dl.Entry

	MemAlloc, MemFree, CommRegister, CommDeregister, CommWindowRegister, CommWindowDeregister, WinGetUserPtr dl.Entry
	GetLsaMultimemDevicePointer, GetMultimemDevicePointer, GetLsaDevicePointer, GetPeerDevicePointer         dl.Entry
	TeamWorld, TeamLsa, TeamRail, TeamRankToWorld, TeamRankToLsa                                             dl.Entry

	AllReduce, Reduce, Broadcast, Bcast, AllGather, ReduceScatter, Send, Recv, AlltoAll, Gather, Scatter dl.Entry
	GroupStart, GroupEnd, GroupSimulateEnd, RedOpCreatePreMulSum, RedOpDestroy                           dl.Entry

	AllReduceConfig, ReduceConfig, BroadcastConfig, AllGatherConfig, ReduceScatterConfig, AlltoAllConfig, GatherConfig, ScatterConfig dl.Entry

	PutSignal, Signal, WaitSignal dl.Entry

	ParamBind, ParamGetI8, ParamGetI16, ParamGetI32, ParamGetI64, ParamGetU8, ParamGetU16, ParamGetU32, ParamGetU64 dl.Entry
	ParamGetStr, ParamGet, ParamGetParameter, ParamGetAllParameterKeys, ParamDumpAll                                dl.Entry
}

// row is one function of the library.
type row struct {
	entry *dl.Entry
	name  string  // alternatives, best first, without prefix
	since Version // NCCL's version that brought it
	need  string  // the makers whose library must have it: N, M, R
}

func (f *functions) rows() []row {
	return []row{
		{&f.GetVersion, "GetVersion", 20300, "NMR"},
		{&f.GetUniqueId, "GetUniqueId", 20300, "NMR"},
		{&f.GetErrorString, "GetErrorString", 20300, "NMR"},
		{&f.GetLastError, "GetLastError", 21304, ""},
		{&f.ResetDebugInit, "ResetDebugInit", 22403, ""},

		{&f.CommInitRank, "CommInitRank", 20300, "NMR"},
		{&f.CommInitRankConfig, "CommInitRankConfig", 21403, ""},
		{&f.CommInitRankScalable, "CommInitRankScalable", 22304, ""},
		{&f.CommInitAll, "CommInitAll", 20300, "NMR"},
		{&f.CommSplit, "CommSplit", 21801, ""},
		{&f.CommShrink, "CommShrink", 22703, ""},
		{&f.CommGetUniqueId, "CommGetUniqueId", 22902, ""},
		{&f.CommGrow, "CommGrow", 22902, ""},
		{&f.CommRevoke, "CommRevoke", 22807, ""},
		{&f.CommFinalize, "CommFinalize", 21403, ""},
		{&f.CommDestroy, "CommDestroy", 20300, "NMR"},
		{&f.CommAbort, "CommAbort", 20402, "NMR"},
		{&f.CommGetAsyncError, "CommGetAsyncError", 20402, "NMR"},
		{&f.CommCount, "CommCount", 20300, "NMR"},
		{&f.CommCuDevice, "CommCuDevice", 20300, "NMR"}, // CommMuDevice at Moore Threads
		{&f.CommUserRank, "CommUserRank", 20300, "NMR"},
		{&f.CommSuspend, "CommSuspend", 22907, ""},
		{&f.CommResume, "CommResume", 22907, ""},
		{&f.CommMemStats, "CommMemStats", 22907, ""},
		{&f.CommQueryProperties, "CommQueryProperties", 22902, ""},

		{&f.MemAlloc, "MemAlloc", 21901, ""},
		{&f.MemFree, "MemFree", 21901, ""},
		{&f.CommRegister, "CommRegister", 21901, ""},
		{&f.CommDeregister, "CommDeregister", 21901, ""},
		{&f.CommWindowRegister, "CommWindowRegister", 22703, ""},
		{&f.CommWindowDeregister, "CommWindowDeregister", 22703, ""},
		{&f.WinGetUserPtr, "WinGetUserPtr", 22902, ""},
		{&f.GetLsaMultimemDevicePointer, "GetLsaMultimemDevicePointer", 22902, ""},
		{&f.GetMultimemDevicePointer, "GetMultimemDevicePointer", 22902, ""},
		{&f.GetLsaDevicePointer, "GetLsaDevicePointer", 22902, ""},
		{&f.GetPeerDevicePointer, "GetPeerDevicePointer", 22902, ""},
		{&f.TeamWorld, "TeamWorld", 22803, ""},
		{&f.TeamLsa, "TeamLsa", 22803, ""},
		{&f.TeamRail, "TeamRail", 22803, ""},
		{&f.TeamRankToWorld, "TeamRankToWorld", 22803, ""},
		{&f.TeamRankToLsa, "TeamRankToLsa", 22803, ""},

		{&f.AllReduce, "AllReduce", 20300, "NMR"},
		{&f.Reduce, "Reduce", 20300, "NMR"},
		{&f.Broadcast, "Broadcast", 20300, "NMR"},
		{&f.Bcast, "Bcast", 20300, ""},
		{&f.AllGather, "AllGather", 20300, "NMR"},
		{&f.ReduceScatter, "ReduceScatter", 20300, "NMR"},
		{&f.Send, "Send", 20703, "NMR"},
		{&f.Recv, "Recv", 20703, "NMR"},
		{&f.AlltoAll, "AlltoAll AllToAll", 22803, ""}, // the second is older RCCLs'
		{&f.Gather, "Gather", 22803, ""},
		{&f.Scatter, "Scatter", 22803, ""},
		{&f.GroupStart, "GroupStart", 20300, "NMR"},
		{&f.GroupEnd, "GroupEnd", 20300, "NMR"},
		{&f.GroupSimulateEnd, "GroupSimulateEnd", 22203, ""},
		{&f.RedOpCreatePreMulSum, "RedOpCreatePreMulSum", 21104, ""},
		{&f.RedOpDestroy, "RedOpDestroy", 21104, ""},

		{&f.AllReduceConfig, "AllReduceConfig", 23102, ""},
		{&f.ReduceConfig, "ReduceConfig", 23102, ""},
		{&f.BroadcastConfig, "BroadcastConfig", 23102, ""},
		{&f.AllGatherConfig, "AllGatherConfig", 23102, ""},
		{&f.ReduceScatterConfig, "ReduceScatterConfig", 23102, ""},
		{&f.AlltoAllConfig, "AlltoAllConfig", 23102, ""},
		{&f.GatherConfig, "GatherConfig", 23102, ""},
		{&f.ScatterConfig, "ScatterConfig", 23102, ""},

		{&f.PutSignal, "PutSignal", 22902, ""},
		{&f.Signal, "Signal", 22902, ""},
		{&f.WaitSignal, "WaitSignal", 22902, ""},

		// 2.30.4 had the functions with other handles: since the version, not the symbol, decides, see Open.
		{&f.ParamBind, "ParamBind", paramsSince, ""},
		{&f.ParamGetI8, "ParamGetI8", paramsSince, ""},
		{&f.ParamGetI16, "ParamGetI16", paramsSince, ""},
		{&f.ParamGetI32, "ParamGetI32", paramsSince, ""},
		{&f.ParamGetI64, "ParamGetI64", paramsSince, ""},
		{&f.ParamGetU8, "ParamGetU8", paramsSince, ""},
		{&f.ParamGetU16, "ParamGetU16", paramsSince, ""},
		{&f.ParamGetU32, "ParamGetU32", paramsSince, ""},
		{&f.ParamGetU64, "ParamGetU64", paramsSince, ""},
		{&f.ParamGetStr, "ParamGetStr", paramsSince, ""},
		{&f.ParamGet, "ParamGet", paramsSince, ""},
		{&f.ParamGetParameter, "ParamGetParameter", paramsSince, ""},
		{&f.ParamGetAllParameterKeys, "ParamGetAllParameterKeys", paramsSince, ""},
		{&f.ParamDumpAll, "ParamDumpAll", paramsSince, ""},
	}
}

const paramsSince Version = 23007

// symbols is the table for a maker.
func (f *functions) symbols(v *Vendor) []dl.Symbol {
	letter := [...]string{"N", "M", "R"}[v.id]
	var out []dl.Symbol
	for _, r := range f.rows() {
		s := dl.Symbol{Entry: r.entry, Since: v.Name + " " + r.since.String(), Required: strings.Contains(r.need, letter)}
		for _, n := range strings.Fields(r.name) {
			if v.id == mcclID && n == "CommCuDevice" {
				n = "CommMuDevice"
			}
			s.Names = append(s.Names, v.prefix+n)
		}
		out = append(out, s)
	}
	return out
}
