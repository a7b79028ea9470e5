package ncclsys

import (
	"fmt"
	"math"
	"structs"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Undef is the value of a setting that is left to the library.
const Undef = math.MinInt32

// Config are the settings of a communicator. Make it with NewConfig, where all are undefined, and set fields. A field that
// the library's version does not know is ignored by it: see Ignored.
type Config struct {
	configLayout
	NetName  string // the network plugin
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
	CTAPolicy           int32 // PolicyEfficiency, PolicyZero, as bits
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

// configField is a setting, for tables.
type configField struct {
	name  string
	since Version
	set   func(*Config) bool
}

func intField(name string, since Version, at func(*Config) int32) configField {
	return configField{name, since, func(c *Config) bool { return at(c) != Undef }}
}

var configFields = []configField{
	intField("Blocking", 21403, func(c *Config) int32 { return c.Blocking }),
	intField("CGAClusterSize", 21700, func(c *Config) int32 { return c.CGAClusterSize }),
	intField("MinCTAs", 21700, func(c *Config) int32 { return c.MinCTAs }),
	intField("MaxCTAs", 21700, func(c *Config) int32 { return c.MaxCTAs }),
	{"NetName", 21700, func(c *Config) bool { return c.NetName != "" }},
	intField("SplitShare", 21800, func(c *Config) int32 { return c.SplitShare }),
	intField("TrafficClass", 22600, func(c *Config) int32 { return c.TrafficClass }),
	{"CommName", 22700, func(c *Config) bool { return c.CommName != "" }},
	intField("CollnetEnable", 22700, func(c *Config) int32 { return c.CollnetEnable }),
	intField("CTAPolicy", 22700, func(c *Config) int32 { return c.CTAPolicy }),
	intField("ShrinkShare", 22700, func(c *Config) int32 { return c.ShrinkShare }),
	intField("NVLSCTAs", 22700, func(c *Config) int32 { return c.NVLSCTAs }),
	intField("ChannelsPerNetPeer", 22800, func(c *Config) int32 { return c.ChannelsPerNetPeer }),
	intField("NVLinkCentricSched", 22800, func(c *Config) int32 { return c.NVLinkCentricSched }),
	intField("GraphUsageMode", 22902, func(c *Config) int32 { return c.GraphUsageMode }),
	intField("NumRMAContexts", 22902, func(c *Config) int32 { return c.NumRMAContexts }),
	intField("MaxP2PPeers", 23003, func(c *Config) int32 { return c.MaxP2PPeers }),
	intField("GraphStreamOrdering", 23005, func(c *Config) int32 { return c.GraphStreamOrdering }),
	intField("LaunchOrderImplicit", 23100, func(c *Config) int32 { return c.LaunchOrderImplicit }),
	intField("NumRMASignals", 23100, func(c *Config) int32 { return c.NumRMASignals }),
	intField("RMAEagerInit", 23100, func(c *Config) int32 { return c.RMAEagerInit }),
	intField("HostCFTMode", 23100, func(c *Config) int32 { return c.HostCFTMode }),
	intField("NVLSHostMode", 23200, func(c *Config) int32 { return c.NVLSHostMode }),
}

// Ignored says which of the settings the library does not know: "GraphUsageMode needs NCCL 2.29.2, found NCCL 2.28.3".
func (l *Library) Ignored(c *Config) []string {
	var out []string
	for _, f := range configFields {
		if c != nil && f.set(c) && l.version < f.since {
			out = append(out, fmt.Sprintf("%s needs %s %s, found %s", f.name, l.vendor.Name, f.since, l.found()))
		}
	}
	return out
}

// layout is the C struct, on the heap and with the names in it, for the library to read while the result is kept. A nil
// Config gives nil: the library's defaults, or the parent's settings.
func (c *Config) layout() *configLayout {
	if c == nil {
		return nil
	}
	l := c.configLayout
	if c.NetName != "" {
		l.netName = unsafe.Pointer(&dl.CString(c.NetName)[0])
	}
	if c.CommName != "" {
		l.commName = unsafe.Pointer(&dl.CString(c.CommName)[0])
	}
	return &l
}

// CollConfig are the settings of one collective (ncclCollConfig_t), from NCCL 2.31.2 on. Make it with NewCollConfig. Its
// layout is known from other bindings only.
type CollConfig struct {
	_               structs.HostLayout
	size            uintptr
	magic           int32
	version         int32
	ext             unsafe.Pointer
	MinCTAs         int32
	MaxCTAs         int32
	NVLSCTAs        int32
	CGAClusterSize  int32
	algorithms      unsafe.Pointer
	ForceAlgorithms int32
	CTAPolicy       int32
	ProfilerTag     uint64
	LaunchEvent     uintptr // recorded when the launch is complete; from 2.32 on
	keep            []byte
}

const (
	collConfigSize231 = 64
	collConfigSize232 = 72
)

// NewCollConfig leaves all to the library. algorithms is "" or a selection in the syntax of NCCL_ALGO.
func (l *Library) NewCollConfig(algorithms string) *CollConfig {
	c := &CollConfig{size: collConfigSize232, magic: configMagicBits, version: int32(min(l.version, Newest)),
		MinCTAs: Undef, MaxCTAs: Undef, NVLSCTAs: Undef, CGAClusterSize: Undef, ForceAlgorithms: 1, CTAPolicy: Undef}
	if l.version < 23200 {
		c.size = collConfigSize231
	}
	if algorithms != "" {
		c.keep = dl.CString(algorithms)
		c.algorithms = unsafe.Pointer(&c.keep[0])
	}
	return c
}
