package cuda

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Host memory is mapped for itself, never part of the Go heap (except under the race detector), so that the collector never
// sees it and using it after Free can be made to fault.
//
// What was freed stays mapped without access: its pages go back to the system at once, but its addresses are not used again, so that a
// late access faults, and becomes ErrIllegalAddress, rather than hitting somebody else's memory. That costs address
// space only, and is bounded: beyond the limits below the oldest are given up.
const (
	poisonBytes  = 1 << 36 // of the 2^47 that a process has
	poisonRanges = 1 << 12 // the kernel allows 65530 mappings a process

	hugeSize = 2 << 20 // allocations of at least this ask for huge pages
)

var pageSize = uint64(unix.Getpagesize())

type poisoned struct {
	addr unsafe.Pointer
	len  uintptr
	name string
}

// addressSpace is a device's account of its memory, for naming what a fault hit.
type addressSpace struct {
	mu    sync.Mutex // guards what follows
	live  map[*hostMemory]struct{}
	freed []poisoned // oldest first
	bytes uint64     // of freed
}

type hostMemory struct {
	space *addressSpace
	addr  unsafe.Pointer
	len   uintptr // mapped
	fd    int     // -1: private
	name  string
	heap  []byte // under the race detector: the memory
}

// roundUp makes a multiple of the page, at least one page so that memory of no bytes has an address of its own.
func roundUp(bytes uint64) (uint64, error) {
	n := (bytes + pageSize - 1) &^ (pageSize - 1)
	if n < bytes || n > 1<<46 {
		return 0, ErrOutOfMemory
	}
	return max(n, pageSize), nil
}

func (a *addressSpace) alloc(bytes uint64, kind AllocKind, name string) (*hostMemory, error) {
	n, err := roundUp(bytes)
	if err != nil {
		return nil, err
	}
	if err := enoughMemory(n); err != nil {
		return nil, err
	}
	m := &hostMemory{space: a, len: uintptr(n), fd: -1, name: name}
	switch {
	case raceEnabled && !ownProcess():
		raw := make([]byte, n+pageSize)
		skip := -uintptr(unsafe.Pointer(&raw[0])) & uintptr(pageSize-1)
		m.heap = raw[skip:][:n:n]
		m.addr = unsafe.Pointer(&m.heap[0])
	case kind == Shareable:
		if m.fd, err = newMemfd(n); err != nil {
			return nil, err
		}
		m.addr, err = unix.MmapPtr(m.fd, 0, nil, m.len, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	default:
		m.addr, err = unix.MmapPtr(-1, 0, nil, m.len, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	}
	if err != nil {
		if m.fd >= 0 {
			unix.Close(m.fd)
		}
		return nil, outOfMemory(err)
	}
	if m.heap == nil {
		adviseHuge(m.addr, m.len)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.live == nil {
		a.live = make(map[*hostMemory]struct{})
	}
	a.live[m] = struct{}{}
	return m, nil
}

// ownProcess reports whether a node started this rank, as a process of its own: then ranks share memory by descriptors also under
// the race detector, which could not see the other process anyway.
func ownProcess() bool { return os.Getenv("GORUN_CONTROL") != "" }

// enoughMemory refuses what the machine can never hold: the kernel would promise it, and kill the rank when it is touched.
func enoughMemory(bytes uint64) error {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return nil // then the kernel's own answer must do
	}
	if total := (uint64(info.Totalram) + uint64(info.Totalswap)) * uint64(info.Unit); bytes > total {
		return fmt.Errorf("%w: the machine has %d bytes", ErrOutOfMemory, total)
	}
	return nil
}

// newMemfd makes the memory behind Shareable. Its size is sealed, so that a process that maps it cannot be killed by
// another that cuts it short.
func newMemfd(bytes uint64) (int, error) {
	fd, err := unix.MemfdCreate("gorun", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	if err = unix.Ftruncate(fd, int64(bytes)); err != nil {
		err = fmt.Errorf("size of the memfd: %w", err)
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		err = fmt.Errorf("seal the memfd: %w", err)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func outOfMemory(err error) error {
	if errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("%w (%w)", ErrOutOfMemory, err)
	}
	return err
}

// adviseHuge is advice: that it is not taken is no error.
func adviseHuge(addr unsafe.Pointer, n uintptr) {
	if n >= hugeSize {
		unix.Madvise(unsafe.Slice((*byte)(addr), n), unix.MADV_HUGEPAGE)
	}
}

func (m *hostMemory) pointer() unsafe.Pointer { return m.addr }

func (m *hostMemory) share() (SharedMemory, error) {
	if m.heap != nil {
		return SharedMemory{FD: -1, Heap: m.heap}, nil
	}
	return SharedMemory{FD: m.fd}, nil
}

// free takes the pages away and leaves the addresses without access.
func (m *hostMemory) free() error {
	a := m.space
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.live, m)
	if m.heap != nil {
		// A write that the race detector sees: whoever still uses the memory is reported. The slice stays for stale pointers.
		for i := range m.heap {
			m.heap[i] = 0xdb
		}
		return nil
	}
	_, err := unix.MmapPtr(-1, 0, m.addr, m.len, unix.PROT_NONE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE|unix.MAP_FIXED)
	if err != nil {
		err = fmt.Errorf("take access away: %w", err)
	} else {
		a.poison(poisoned{addr: m.addr, len: m.len, name: m.name})
	}
	if m.fd >= 0 {
		err = errors.Join(err, unix.Close(m.fd))
	}
	return err
}

// poison keeps a freed range, and gives up the oldest beyond the limits. a.mu is held.
func (a *addressSpace) poison(p poisoned) {
	a.freed = append(a.freed, p)
	a.bytes += uint64(p.len)
	for len(a.freed) > 1 && (len(a.freed) > poisonRanges || a.bytes > poisonBytes) {
		a.drop()
	}
}

func (a *addressSpace) drop() error {
	p := a.freed[0]
	a.freed = a.freed[1:]
	a.bytes -= uint64(p.len)
	return unix.MunmapPtr(p.addr, p.len)
}

// close gives up the reserved addresses.
func (a *addressSpace) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for len(a.freed) > 0 {
		errs = append(errs, a.drop())
	}
	return errors.Join(errs...)
}

// find names what is, or was, at an address.
func (a *addressSpace) find(addr uintptr) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	within := func(p unsafe.Pointer, n uintptr) bool { return addr-uintptr(p) < n }
	for i := len(a.freed) - 1; i >= 0; i-- {
		if p := a.freed[i]; within(p.addr, p.len) {
			return fmt.Sprintf("%#x is in %s, which was freed", addr, p.name)
		}
	}
	for m := range a.live {
		if within(m.addr, m.len) {
			return fmt.Sprintf("%#x is in %s", addr, m.name)
		}
	}
	return fmt.Sprintf("%#x is in no allocation", addr)
}

// qualifies says whether an address range is inside one live shareable allocation.
func (a *addressSpace) qualifies(addr uintptr, n uint64) error {
	a.mu.Lock()
	for m := range a.live {
		if off := addr - uintptr(m.addr); off < m.len {
			a.mu.Unlock()
			switch {
			case m.fd < 0 && m.heap == nil:
				return fmt.Errorf("%#x is in %s: it is private memory", addr, m.name)
			case n > uint64(m.len-off):
				return fmt.Errorf("%d bytes at %#x reach beyond %s", n, addr, m.name)
			}
			return nil
		}
	}
	a.mu.Unlock()
	return errors.New(a.find(addr))
}

// hostPeer is another rank's memory.
type hostPeer struct {
	mapped unsafe.Pointer // nil: heap, or nothing
	len    uintptr
	data   []byte
}

func mapPeer(s SharedMemory) (*hostPeer, error) {
	if s.FD < 0 {
		if uint64(len(s.Heap)) < s.Size {
			return nil, fmt.Errorf("the slice has %d bytes", len(s.Heap))
		}
		return &hostPeer{data: s.Heap[:s.Size:s.Size]}, nil
	}
	n, err := roundUp(s.Size)
	if err != nil {
		return nil, err
	}
	seals, err := unix.FcntlInt(uintptr(s.FD), unix.F_GET_SEALS, 0)
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is no memfd: %w", s.FD, err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("descriptor %d can shrink: it lacks F_SEAL_SHRINK", s.FD)
	}
	var st unix.Stat_t
	if err := unix.Fstat(s.FD, &st); err != nil {
		return nil, fmt.Errorf("descriptor %d: %w", s.FD, err)
	}
	if uint64(st.Size) < s.Size { // its last page is there as a whole
		return nil, fmt.Errorf("descriptor %d has %d bytes", s.FD, st.Size)
	}
	addr, err := unix.MmapPtr(s.FD, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, outOfMemory(err)
	}
	adviseHuge(addr, uintptr(n))
	return &hostPeer{mapped: addr, len: uintptr(n), data: unsafe.Slice((*byte)(addr), s.Size)}, nil
}

func (p *hostPeer) bytes() []byte { return p.data }

func (p *hostPeer) close() error {
	p.data = nil
	if p.mapped == nil {
		return nil
	}
	return unix.MunmapPtr(p.mapped, p.len)
}
