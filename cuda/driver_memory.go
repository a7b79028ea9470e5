package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// Memory that can be registered is made with the driver's virtual memory calls, as NCCL's own allocator makes it: a handle that other
// processes can import, a size that is a multiple of the recommended granularity, addresses aligned to it. Private memory is the driver's plain kind.
//
// The addresses of freed shareable memory stay reserved without memory behind them, so that a late access is an error and does not hit
// other memory (a graph or a peer would read the old pages and nobody would notice). That costs address space, of which
// there are 128 TiB; the oldest are given up beyond these limits.
const (
	driverPoisonBytes  = 1 << 40
	driverPoisonRanges = 1 << 12
)

// vmm is the allocator of shareable memory.
type vmm struct {
	g      *driverDevice
	off    error // why there is none
	grain  uint64
	prop   cusys.MemProp
	access []cusys.MemAccess

	mu    sync.Mutex // guards what follows
	freed []driverRange
	bytes uint64
}

type driverRange struct {
	base  cusys.DevicePtr
	bytes uint64
}

// init finds what the device can. A device without virtual memory management has private memory only.
func (v *vmm) init(g *driverDevice) error {
	v.g = g
	d := g.drv
	has := func(a cusys.Attribute) (bool, error) {
		n, err := d.DeviceAttribute(g.id, a)
		return n != 0, err
	}
	for _, a := range []struct {
		attribute cusys.Attribute
		what      string
	}{{cusys.AttrVMM, "virtual memory management"}, {cusys.AttrFDHandles, "memory that can be shared by file descriptors"}} {
		ok, err := has(a.attribute)
		if err != nil {
			return err
		}
		if !ok {
			v.off = fmt.Errorf("the device or its driver has no %s", a.what)
			return nil
		}
	}
	v.prop = cusys.PinnedProp(g.id, cusys.HandleFD)
	if ok, err := has(cusys.AttrFabricHandles); err == nil && ok {
		v.prop.Handles |= cusys.HandleFabric
	}
	if ok, err := has(cusys.AttrRDMAWithVMM); err == nil && ok {
		v.prop.RDMA = 1
	}
	if err := v.probe(); err != nil {
		v.off = err
		return nil
	}
	v.access = []cusys.MemAccess{accessFor(g.id)}
	n, err := d.DeviceCount()
	if err != nil {
		return err
	}
	for i := range n {
		peer, err := d.Device(i)
		if err != nil {
			return err
		}
		if peer == g.id {
			continue
		}
		if ok, err := d.CanAccessPeer(peer, g.id); err == nil && ok {
			v.access = append(v.access, accessFor(peer))
		}
	}
	return nil
}

// probe makes a piece of memory to see which handles work: many drivers say that they can make fabric handles and then refuse.
func (v *vmm) probe() error {
	for {
		grain, err := v.g.drv.MemGranularity(&v.prop, cusys.GranularityRecommended)
		if err == nil {
			var h cusys.AllocHandle
			if h, err = v.g.drv.MemCreate(grain, &v.prop); err == nil {
				v.grain = grain
				return v.g.drv.MemRelease(h)
			}
		}
		switch {
		case v.prop.Handles&cusys.HandleFabric != 0:
			v.prop.Handles &^= cusys.HandleFabric
		case v.prop.RDMA != 0:
			v.prop.RDMA = 0
		case errors.Is(err, cusys.ErrOutOfMemory) && grain > 0:
			v.grain = grain // no memory left now; that says nothing about the handles
			return nil
		default:
			return err
		}
	}
}

func accessFor(d cusys.Device) cusys.MemAccess {
	return cusys.MemAccess{Location: cusys.MemLocation{Type: cusys.LocationDevice, ID: int32(d)}, Flags: cusys.AccessBoth}
}

// driverMemory is one allocation.
type driverMemory struct {
	g    *driverDevice
	kind AllocKind
	base cusys.DevicePtr
	len  uint64 // of the mapping
}

func (g *driverDevice) alloc(bytes uint64, kind AllocKind, _ string) (platformMemory, error) {
	if bytes > g.about.Memory {
		return nil, fmt.Errorf("%w: the device has %d bytes", ErrOutOfMemory, g.about.Memory)
	}
	in, err := g.enter(true)
	if err != nil {
		return nil, err
	}
	defer in.leave()
	m := &driverMemory{g: g, kind: kind}
	if kind == Private {
		m.len = max(bytes, 1)
		m.base, err = g.drv.MemAlloc(m.len)
	} else {
		m.base, m.len, err = g.vmm.alloc(bytes)
	}
	if err != nil {
		return nil, g.full(g.cause(err))
	}
	if err := g.zero(m.base, m.len); err != nil {
		return nil, errors.Join(g.cause(err), g.cause(m.release()))
	}
	return m, nil
}

// full says of a lack of memory how much there is. It is bound.
func (g *driverDevice) full(err error) error {
	if !errors.Is(err, ErrOutOfMemory) {
		return err
	}
	free, total, infoErr := g.drv.MemInfo()
	if infoErr != nil {
		return err
	}
	return fmt.Errorf("%d of the device's %d bytes are free: %w", free, total, err)
}

// zero clears memory and waits for that. It is bound.
func (g *driverDevice) zero(p cusys.DevicePtr, n uint64) error {
	g.auxMu.Lock()
	defer g.auxMu.Unlock()
	if err := g.drv.Set8(p, 0, n, g.aux); err != nil {
		return err
	}
	var w driverWait
	for {
		done, err := g.drv.StreamQuery(g.aux)
		if err != nil || done {
			return err
		}
		w.pause()
	}
}

func (v *vmm) alloc(bytes uint64) (cusys.DevicePtr, uint64, error) {
	if v.off != nil {
		return 0, 0, v.off
	}
	h, err := v.g.drv.MemCreate(v.round(bytes), &v.prop)
	if err != nil {
		return 0, 0, err
	}
	return v.mapping(h, bytes, v.access)
}

// round is how long the mapping of a number of bytes is.
func (v *vmm) round(bytes uint64) uint64 { return (max(bytes, 1) + v.grain - 1) / v.grain * v.grain }

// mapping maps a handle's memory for devices, the first of which must have it, and gives the handle back: the mapping keeps the memory.
func (v *vmm) mapping(h cusys.AllocHandle, bytes uint64, access []cusys.MemAccess) (cusys.DevicePtr, uint64, error) {
	d := v.g.drv
	n := v.round(bytes)
	base, err := d.MemReserve(n, v.grain)
	if err != nil {
		return 0, 0, errors.Join(err, d.MemRelease(h))
	}
	err = d.MemMap(base, n, h)
	if releaseErr := d.MemRelease(h); err != nil || releaseErr != nil {
		if err == nil {
			releaseErr = errors.Join(releaseErr, d.MemUnmap(base, n))
		}
		return 0, 0, errors.Join(err, releaseErr, d.MemUnreserve(base, n))
	}
	if err = d.MemSetAccess(base, n, access); err != nil && len(access) > 1 {
		err = d.MemSetAccess(base, n, access[:1]) // without the peers
	}
	if err != nil {
		return 0, 0, errors.Join(err, d.MemUnmap(base, n), d.MemUnreserve(base, n))
	}
	return base, n, nil
}

func (v *vmm) free(base cusys.DevicePtr, n uint64) error {
	if err := v.g.drv.MemUnmap(base, n); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.freed = append(v.freed, driverRange{base, n})
	v.bytes += n
	var errs []error
	for len(v.freed) > 1 && (len(v.freed) > driverPoisonRanges || v.bytes > driverPoisonBytes) {
		errs = append(errs, v.drop())
	}
	return errors.Join(errs...)
}

// drop gives the oldest reserved addresses up. mu is held.
func (v *vmm) drop() error {
	r := v.freed[0]
	v.freed = v.freed[1:]
	v.bytes -= r.bytes
	return v.g.drv.MemUnreserve(r.base, r.bytes)
}

func (v *vmm) close() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	var errs []error
	for len(v.freed) > 0 {
		errs = append(errs, v.drop())
	}
	return errors.Join(errs...)
}

func (m *driverMemory) pointer() unsafe.Pointer { return address(m.base) }

func (m *driverMemory) share() (SharedMemory, error) {
	return SharedMemory{}, fmt.Errorf("memory of a %s device is shared by its communication library", m.g.platform)
}

// free may wait for work in progress, as the driver decides.
func (m *driverMemory) free() error {
	in, err := m.g.enter(true)
	if err != nil {
		return m.g.lost(err)
	}
	defer in.leave()
	return m.g.lost(m.g.cause(m.release()))
}

func (m *driverMemory) release() error {
	if m.kind == Private {
		return m.g.drv.MemFree(m.base)
	}
	return m.g.vmm.free(m.base, m.len)
}

func (g *driverDevice) qualifies(addr uintptr, n uint64) error {
	in, err := g.enter(true)
	if err != nil {
		return err
	}
	defer in.leave()
	p := cusys.DevicePtr(addr)
	info, err := g.drv.PointerInfo(p)
	if err != nil {
		return g.cause(err)
	}
	switch {
	case info.Type == cusys.MemoryUnknown:
		return fmt.Errorf("%#x is no memory of the driver: it was freed, or belongs to Go or C", addr)
	case info.Type == cusys.MemoryHost:
		return fmt.Errorf("%#x is host memory", addr)
	case info.Device != g.id:
		return fmt.Errorf("%#x is memory of device %d, this is device %d", addr, info.Device, g.id)
	case n > info.Size || uint64(p-info.Base) > info.Size-n:
		return fmt.Errorf("%d bytes at %#x reach beyond their allocation of %d bytes at %#x", n, addr, info.Size, uintptr(info.Base))
	case info.LegacyIPC:
		return fmt.Errorf("%#x was made by the plain allocator (private memory): processes on this host cannot map it by handle", addr)
	case info.Handles&(cusys.HandleFD|cusys.HandleFabric) == 0:
		return fmt.Errorf("%#x was made without a handle type that can be shared (NONE): a window on it hangs all ranks", addr)
	case g.vmm.grain > 0 && info.Size%g.vmm.grain != 0:
		return fmt.Errorf("%#x: the size of its allocation, %d bytes, is no multiple of the recommended granularity %d", addr, info.Size, g.vmm.grain)
	case g.vmm.grain > 0 && uint64(info.Base)%g.vmm.grain != 0:
		return fmt.Errorf("%#x: its allocation at %#x is not aligned to the recommended granularity %d", addr, uintptr(info.Base), g.vmm.grain)
	}
	return nil
}
