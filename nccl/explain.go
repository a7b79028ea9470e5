package nccl

import (
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// Explain tells, one line a subject, how the communicator can reach users' buffers, and if not why not. What was never seen to work on
// hardware is called unproven.
func Explain(c *Comm) string {
	if c == nil {
		return errNoComm.text + "\n"
	}
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-28s %s\n", what+":", fmt.Sprintf(format, args...))
	}
	line("communicator", "%s, rank %d of %d, %v", c.name, c.rank, len(c.ranks), c.dev)
	switch be := c.be.(type) {
	case *library:
		be.explain(line)
	case *host:
		line("registration (local, graph)", "yes: members map each other's memory")
		line("windows", "yes, with addresses of all members' memory")
		line("NVLS, MTLS, IB SHARP", "no: the host platform has no such hardware")
	default:
		line("registration", "a communicator of one copies; it needs none")
	}
	return b.String()
}

func (l *library) explain(line func(what, format string, args ...any)) {
	v := l.sys.Vendor()
	line("library", "%s", l.sys)
	able := "yes: "
	if v != ncclsys.NCCL {
		able = "unproven: " // nothing of it has run on hardware
	}
	yes := func(f ncclsys.Feature, then string) string {
		if err := l.sys.Need(f); err != nil {
			return "no: " + err.Error()
		}
		for _, s := range l.warned {
			name := strings.TrimPrefix(s.Name, v.Prefix())
			off := name == "CUMEM_ENABLE" || name == "GRAPH_REGISTER" && f == ncclsys.GraphRegister || name == "LOCAL_REGISTER" && f == ncclsys.Register ||
				name == "P2P_USE_CUDA_MEMCPY" && f == ncclsys.IPCRegister
			if off {
				return "no: " + s.String()
			}
		}
		return able + then
	}
	line("registration, local", "%s", yes(ncclsys.Register, "memory of nccl.Alloc, by Comm.Register"))
	line("registration, graph", "%s", yes(ncclsys.GraphRegister, "memory of nccl.Alloc, by graphs.Capture; small calls (protocol LL), in-place ring all-reduce, reduce and reduce-scatter use no registration"))
	line("within a host (P2P)", "%s", yes(ncclsys.IPCRegister, "where all devices of the host reach each other directly"))
	line("between hosts (network)", "%s", yes(ncclsys.NetRegister, "needs GPUDirect RDMA on all ranks and no PXN; unproven"))
	line("NVLS / MTLS", "%s", l.nvls())
	line("IB SHARP", "%s", l.sharp())
	if why := l.unableWhy(); why != "" {
		line("windows", "no: %s", why)
	} else {
		line("windows", "%sfor captured all-reduce, all-gather and reduce-scatter, %s", able, unaskedText(len(l.c.ranks)))
	}
	if err := l.sys.Need(ncclsys.WindowPointers); err != nil {
		line("addresses of windows", "no: %v", err)
	} else {
		line("addresses of windows", "yes; unproven")
	}
	line("small collectives by peers", "%v", &l.peer)
	line("graph mixing", "%v", l.mixing)
	if l.graphErr != nil {
		line("captured calls", "no: %v", l.graphErr)
	}
	for _, f := range l.sys.Faults() {
		line("known fault", "%s; here: %s", f.What, f.Guard)
	}
	for _, f := range l.warned {
		line("setting", "%s", f)
	}
}

// nvls says what registration for NVLS asks for: multicast hardware, memory with handles, equal head offsets.
func (l *library) nvls() string {
	look := l.sys.Vendor().Lookup()
	p := l.sys.Vendor().Prefix()
	if v, from := look(p + "NVLS_ENABLE"); from != "" && v == "0" {
		return fmt.Sprintf("no: %sNVLS_ENABLE=0 (%s)", p, from)
	}
	switch i := l.c.dev.Info(); i.Platform {
	case cuda.CUDA:
		if i.Major < 9 {
			return fmt.Sprintf("no: needs compute capability 9.0 and NVSwitch, found %d.%d", i.Major, i.Minor)
		}
	case cuda.HIP:
		return "no: AMD has no such hardware"
	}
	return "unproven: where switches can multicast, with memory of nccl.Alloc at the same offset on all ranks of a host (an Arena carved in one order has it)"
}

// sharp says what registration for IB SHARP asks for.
func (l *library) sharp() string {
	if err := l.sys.Need(ncclsys.Sharp); err != nil {
		return "no: " + err.Error()
	}
	p := l.sys.Vendor().Prefix()
	if v, from := l.sys.Vendor().Lookup()(p + "COLLNET_ENABLE"); from == "" || v != "1" {
		return fmt.Sprintf("no: needs %sCOLLNET_ENABLE=1 and the SHARP plugin", p)
	}
	perHost := map[int]int{}
	for _, r := range l.c.ranks {
		perHost[l.c.job.NodeOf(r)]++
	}
	if len(perHost) == 1 {
		return "no: it works between hosts, all ranks are on one"
	}
	for _, r := range l.c.ranks {
		if h := l.c.job.NodeOf(r); perHost[h] > 1 {
			return fmt.Sprintf("unproven: registered buffers want one rank a host, host %d has %d", h, perHost[h])
		}
	}
	return "unproven: one rank a host; by capture any memory of the device, by Comm.Register that of nccl.Alloc"
}
