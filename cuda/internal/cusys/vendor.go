package cusys

import (
	"fmt"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// Vendor is a maker of GPUs: where its libraries are and what they do otherwise than CUDA.
type Vendor struct {
	Name     string // "CUDA"
	Driver   dl.Spec
	Compiler dl.Spec
	Handles  HandleType // the ways to share memory that its driver knows

	id             vendorID
	attributes     map[Attribute]int32 // its own numbers; nil: CUDA's. A missing one is a property that no device of it has
	noContexts     bool                // a thread has a current device instead of a context
	errorReturns   bool                // the error texts are results, not out arguments
	version        func(code int32) Version
	fdByPointer    func(Version) bool // an imported descriptor is passed by its address
	compilerPrefix string
	codeSize, code string // the compiler's functions for its result
}

type vendorID uint8

const (
	cudaID vendorID = iota
	musaID
	hipID
)

// Version of a driver, as the vendor counts.
type Version struct{ Major, Minor int }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// Less compares.
func (v Version) Less(w Version) bool {
	return v.Major < w.Major || v.Major == w.Major && v.Minor < w.Minor
}

func cudaVersion(code int32) Version { return Version{int(code) / 1000, int(code) % 1000 / 10} }
func hipVersion(code int32) Version {
	return Version{int(code) / 10_000_000, int(code) / 100_000 % 100}
}
func never(Version) bool { return false }

// CUDA is NVIDIA's.
var CUDA = &Vendor{
	Name: "CUDA",
	id:   cudaID,
	Driver: dl.Spec{
		Name: "the CUDA driver", Search: gpulib.CUDA,
		Symbol: "cuInit", Sole: "libcuda.so",
	},
	Compiler: dl.Spec{
		Name: "NVRTC", Search: gpulib.NVRTC,
		Symbol: "nvrtcVersion",
	},
	Handles:        HandleFD | HandleFabric,
	version:        cudaVersion,
	fdByPointer:    never,
	compilerPrefix: "nvrtc", codeSize: "GetPTXSize", code: "GetPTX",
}

// MUSA is Moore Threads'. Its driver mirrors CUDA 11's; the numbers of its attributes and errors are taken to be
// CUDA's, as all published ones are.
var MUSA = &Vendor{
	Name: "MUSA",
	id:   musaID,
	Driver: dl.Spec{
		Name: "the MUSA driver", Search: gpulib.MUSA,
		Symbol: "muInit", Sole: "libmusa.so",
	},
	Compiler: dl.Spec{
		Name: "MTRTC", Search: gpulib.MTRTC,
		Symbol: "mtrtcVersion",
	},
	Handles:        HandleFD | HandleFabric, // as its manual asks for; an allocator tries without, too
	version:        cudaVersion,
	fdByPointer:    never,
	compilerPrefix: "mtrtc", codeSize: "GetPTXSize", code: "GetPTX",
}

// HIP is AMD's: one library is driver and runtime.
var HIP = &Vendor{
	Name: "HIP",
	id:   hipID,
	Driver: dl.Spec{
		Name: "the HIP runtime", Search: gpulib.HIP,
		Symbol: "hipInit", Sole: "libamdhip64.so",
	},
	Compiler: dl.Spec{
		Name: "HIPRTC", Search: gpulib.HIPRTC,
		Symbol: "hiprtcVersion",
	},
	Handles: HandleFD,
	attributes: map[Attribute]int32{
		AttrMultiprocessors: 63, AttrCCMajor: 23, AttrCCMinor: 61, AttrVMM: 89,
		AttrFDHandles: 89, // no attribute of its own: what has virtual memory management exports descriptors
	},
	noContexts:     true,
	errorReturns:   true,
	version:        hipVersion,
	fdByPointer:    func(v Version) bool { return v.Less(Version{7, 1}) },
	compilerPrefix: "hiprtc", codeSize: "GetCodeSize", code: "GetCode",
}

// Vendors are all of them, in the order in which a machine is asked.
var Vendors = []*Vendor{CUDA, MUSA, HIP}

// Settings are environment variables of the driver that work against gorun.
func (v *Vendor) Settings() []gpulib.Setting {
	blocking := gpulib.Setting{Values: []string{"1"}, Effect: gpulib.BreaksGraphs,
		Why: "every launch waits for its end: collectives of captured graphs hang, all others lose their speed"}
	switch v.id {
	case musaID:
		blocking.Name = "MUSA_LAUNCH_BLOCKING"
		return []gpulib.Setting{blocking}
	case hipID:
		blocking.Name = "HIP_LAUNCH_BLOCKING"
		serial := blocking
		serial.Name, serial.Values = "AMD_SERIALIZE_KERNEL", []string{"1", "2", "3"}
		return []gpulib.Setting{blocking, serial}
	}
	blocking.Name = "CUDA_LAUNCH_BLOCKING"
	return []gpulib.Setting{blocking}
}
