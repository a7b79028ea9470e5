package ncclsys

import "github.com/gorun-dev/gorun/cuda/dl"

// functions are the library's, by NCCL's names without prefix.
type functions struct {
	GetVersion, GetUniqueId, GetErrorString, GetLastError dl.Entry

	CommInitRank, CommInitRankConfig, CommInitRankScalable, CommSplit, CommShrink dl.Entry
	CommFinalize, CommDestroy, CommAbort, CommGetAsyncError                       dl.Entry

	MemAlloc, MemFree, CommRegister, CommDeregister                                       dl.Entry
	CommWindowRegister, CommWindowDeregister, WinGetUserPtr, GetLsaDevicePointer, TeamLsa dl.Entry

	AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Send, Recv dl.Entry
	GroupStart, GroupEnd, RedOpCreatePreMulSum, RedOpDestroy           dl.Entry
}

// row is one function of the library.
type row struct {
	entry    *dl.Entry
	name     string  // without prefix
	since    Version // NCCL's version that brought it
	required bool    // of every maker's library
}

func (f *functions) rows() []row {
	return []row{
		{&f.GetVersion, "GetVersion", 20300, true},
		{&f.GetUniqueId, "GetUniqueId", 20300, true},
		{&f.GetErrorString, "GetErrorString", 20300, true},
		{&f.GetLastError, "GetLastError", 21304, false},

		{&f.CommInitRank, "CommInitRank", 20300, true},
		{&f.CommInitRankConfig, "CommInitRankConfig", 21403, false},
		{&f.CommInitRankScalable, "CommInitRankScalable", 22304, false},
		{&f.CommSplit, "CommSplit", 21801, false},
		{&f.CommShrink, "CommShrink", 22703, false},
		{&f.CommFinalize, "CommFinalize", 21403, false},
		{&f.CommDestroy, "CommDestroy", 20300, true},
		{&f.CommAbort, "CommAbort", 20402, true},
		{&f.CommGetAsyncError, "CommGetAsyncError", 20402, true},

		{&f.MemAlloc, "MemAlloc", 21901, false},
		{&f.MemFree, "MemFree", 21901, false},
		{&f.CommRegister, "CommRegister", 21901, false},
		{&f.CommDeregister, "CommDeregister", 21901, false},
		{&f.CommWindowRegister, "CommWindowRegister", 22703, false},
		{&f.CommWindowDeregister, "CommWindowDeregister", 22703, false},
		{&f.WinGetUserPtr, "WinGetUserPtr", 22902, false},
		{&f.GetLsaDevicePointer, "GetLsaDevicePointer", 22902, false},
		{&f.TeamLsa, "TeamLsa", 22803, false},

		{&f.AllReduce, "AllReduce", 20300, true},
		{&f.Reduce, "Reduce", 20300, true},
		{&f.Broadcast, "Broadcast", 20300, true},
		{&f.AllGather, "AllGather", 20300, true},
		{&f.ReduceScatter, "ReduceScatter", 20300, true},
		{&f.Send, "Send", 20703, true},
		{&f.Recv, "Recv", 20703, true},
		{&f.GroupStart, "GroupStart", 20300, true},
		{&f.GroupEnd, "GroupEnd", 20300, true},
		{&f.RedOpCreatePreMulSum, "RedOpCreatePreMulSum", 21104, false},
		{&f.RedOpDestroy, "RedOpDestroy", 21104, false},
	}
}

// symbols is the table for a maker.
func (f *functions) symbols(v *Vendor) []dl.Symbol {
	var out []dl.Symbol
	for _, r := range f.rows() {
		out = append(out, dl.Symbol{Entry: r.entry, Names: []string{v.prefix + r.name}, Since: v.Name + " " + r.since.String(), Required: r.required})
	}
	return out
}
