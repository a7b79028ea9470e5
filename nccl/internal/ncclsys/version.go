package ncclsys

import (
	"fmt"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Version is a library's version as major*10000 + minor*100 + patch. RCCL and MCCL tell the NCCL version that they
// follow.
type Version int

// DecodeVersion reads what ncclGetVersion gives, which was major*1000 + minor*100 + patch up to 2.8.
func DecodeVersion(code int32) Version {
	if code > 0 && code < 10000 {
		return Version(code/1000*10000 + code%1000)
	}
	return Version(code)
}

func (v Version) String() string {
	return fmt.Sprintf("%d.%d.%d", int(v)/10000, int(v)/100%100, int(v)%100)
}

// Newest is the newest version whose structs this package knows.
const Newest Version = 23206

// Feature is an ability of the library that came with a version.
type Feature string

const (
	Average        Feature = "average"
	BFloat16       Feature = "bfloat16"
	PreMulSum      Feature = "pre-multiplied sum"
	NonBlocking    Feature = "non-blocking communicators"
	Split          Feature = "split"
	Register       Feature = "registration"
	GraphRegister  Feature = "registration by graph capture"
	Sharp          Feature = "registered buffers with IB SHARP"
	Scalable       Feature = "several unique ids"
	IPCRegister    Feature = "registered buffers within a host"
	NetRegister    Feature = "registered collectives between hosts"
	Float8         Feature = "8-bit floats"
	Windows        Feature = "windows"
	Shrink         Feature = "shrink"
	WindowPointers Feature = "window pointers"
)

// gate is a feature's version, and a function that must be there for it ("" if none tells).
type gate struct {
	since Version
	entry func(*functions) *dl.Entry
}

var gates = map[Feature]gate{
	Average:        {21000, nil},
	BFloat16:       {21000, nil},
	PreMulSum:      {21104, func(f *functions) *dl.Entry { return &f.RedOpCreatePreMulSum }},
	NonBlocking:    {21403, func(f *functions) *dl.Entry { return &f.CommInitRankConfig }},
	Split:          {21801, func(f *functions) *dl.Entry { return &f.CommSplit }},
	Register:       {21901, func(f *functions) *dl.Entry { return &f.CommRegister }},
	GraphRegister:  {21901, nil},
	Sharp:          {22100, nil},
	Scalable:       {22304, func(f *functions) *dl.Entry { return &f.CommInitRankScalable }},
	IPCRegister:    {22300, nil},
	NetRegister:    {22400, nil},
	Float8:         {22400, nil},
	Windows:        {22703, func(f *functions) *dl.Entry { return &f.CommWindowRegister }},
	Shrink:         {22703, func(f *functions) *dl.Entry { return &f.CommShrink }},
	WindowPointers: {22902, func(f *functions) *dl.Entry { return &f.WinGetUserPtr }},
}

// Need is nil if the library has the feature, else "FEATURE needs NCCL X, found NCCL Y" (*dl.NeedError).
func (l *Library) Need(f Feature) error {
	g, ok := gates[f]
	if !ok {
		panic("ncclsys: unknown feature " + string(f))
	}
	ne := &dl.NeedError{What: string(f), Found: l.found(), Path: l.lib.Path()}
	if l.vendor.lacks[f] {
		return ne
	}
	if l.version < g.since {
		ne.Needs = l.vendor.Name + " " + g.since.String()
		return ne
	}
	if g.entry != nil && g.entry(&l.f).Func == 0 {
		return ne
	}
	return nil
}

func (l *Library) found() string { return l.vendor.Name + " " + l.version.String() }

// Fault is a defect of some versions, with what to do instead.
type Fault struct {
	ID           string
	From, Before Version // has it from From, no more from Before
	What, Guard  string
}

// faults are NCCL's; the other makers' libraries have those of the version that they follow.
var faults = []Fault{
	{ID: "p2p-then-collective", From: 22300, Before: 22902,
		What:  "a buffer whose first registered use was point to point (send, receive, all-to-all, gather, scatter) makes a later collective on it hang (nccl#1859)",
		Guard: "a communicator of its own for point to point"},
	{ID: "message-registered-alone", From: 22300, Before: 1 << 30,
		What:  "where the library registers one end of a message only, the message is lost without an error (seen with 2.28.3; no version is known to compare the ends)",
		Guard: "a communicator of its own for point to point, without the user's registrations; captured messages between private and other memory are refused"},
	{ID: "revoke", From: 22807, Before: 22902,
		What:  "after revoke a replayed graph loses the context, and abort or destroy crash where registrations exist",
		Guard: "destroy the graphs, then abort"},
	{ID: "window-abort", From: 22703, Before: 23007,
		What:  "the kernels that use windows do not look at the abort: when a member dies in one, the communicator does not end, nor is the device free (read in 2.28's source; where it was mended is not known)",
		Guard: "GORUN_WINDOWS=off or graphs.NoWindows: captured calls make no windows unasked; Close gives up the wait"},
	{ID: "abort-with-registrations", From: 21901, Before: 1 << 30,
		What:  "abort frees the proxy's state before the registrations, which it then gives back by it; and a registration with several peers that an abort interrupts is freed twice: with more than two ranks the process can crash",
		Guard: "the first call on registered buffers is compared between the ranks before the library sees it; with more than two ranks a communicator with registered buffers that were used is left as it is, and where something is enqueued on it the device is given up"},
	{ID: "graph-reclaim-interval", From: 22703, Before: 1 << 30,
		What:  "what a destroyed graph registered is given back only at every 11th launch or at finalize",
		Guard: "11 groups of in-place send and receive to oneself"},
	{ID: "first-one-sided", From: 22902, Before: 23007,
		What:  "the first one-sided operation of a communicator must not be captured",
		Guard: "run one eagerly first"},
}

// Faults are the known defects of the library's version.
func (l *Library) Faults() []Fault { return FaultsOf(l.version) }

// FaultsOf are the known defects of a version.
func FaultsOf(v Version) []Fault {
	var out []Fault
	for _, f := range faults {
		if f.From <= v && v < f.Before {
			out = append(out, f)
		}
	}
	return out
}
