package ncclsys

import (
	"math"
	"structs"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Undef is the value of a setting that is left to the library.
const Undef = math.MinInt32

// Config are the settings of a communicator. Make it with NewConfig, where all are undefined, and set fields. The library
// ignores what its version does not know.
type Config struct {
	configLayout
	CommName string // for the library's messages
}

// configLayout is ncclConfig_t of the newest known version. Every older one is a prefix of it, and a library reads only
// its own prefix, so this one is right for all since 2.14 (older ones take none).
type configLayout struct {
	_                   structs.HostLayout
	size                uintptr
	magic               int32
	version             int32
	Blocking            int32 // 0: calls return ErrInProgress, and can be given up by an abort
	CGAClusterSize      int32 // 0 to 8
	MinCTAs             int32
	MaxCTAs             int32
	netName             unsafe.Pointer
	SplitShare          int32 // 1: split communicators share the parent's resources
	TrafficClass        int32
	commName            unsafe.Pointer
	CollnetEnable       int32
	CTAPolicy           int32
	ShrinkShare         int32
	NVLSCTAs            int32
	ChannelsPerNetPeer  int32
	NVLinkCentricSched  int32
	GraphUsageMode      int32 // 0 no graphs, 1 one graph or eager calls at a time, 2 (default) any mix
	NumRMAContexts      int32
	MaxP2PPeers         int32
	GraphStreamOrdering int32 // 0 needs GraphUsageMode other than 2
	LaunchOrderImplicit int32
	NumRMASignals       int32
	RMAEagerInit        int32
	HostCFTMode         int32
	NVLSHostMode        int32
	_                   int32
}

const (
	configMagic     = 0xcafebeef
	configMagicBits = configMagic - 1<<32 // the same bits in an int32
)

// NewConfig leaves all to the library.
func NewConfig() *Config {
	return &Config{configLayout: configLayout{
		size: unsafe.Sizeof(configLayout{}), magic: configMagicBits, version: int32(Newest),
		Blocking: Undef, CGAClusterSize: Undef, MinCTAs: Undef, MaxCTAs: Undef, SplitShare: Undef, TrafficClass: Undef,
		CollnetEnable: Undef, CTAPolicy: Undef, ShrinkShare: Undef, NVLSCTAs: Undef, ChannelsPerNetPeer: Undef, NVLinkCentricSched: Undef,
		GraphUsageMode: Undef, NumRMAContexts: Undef, MaxP2PPeers: Undef, GraphStreamOrdering: Undef, LaunchOrderImplicit: Undef,
		NumRMASignals: Undef, RMAEagerInit: Undef, HostCFTMode: Undef, NVLSHostMode: Undef,
	}}
}

// layout is the C struct, on the heap and with the name in it, for the library to read while the result is kept. A nil
// Config gives nil: the library's defaults, or the parent's settings.
func (c *Config) layout() *configLayout {
	if c == nil {
		return nil
	}
	l := c.configLayout
	if c.CommName != "" {
		l.commName = unsafe.Pointer(&dl.CString(c.CommName)[0])
	}
	return &l
}
