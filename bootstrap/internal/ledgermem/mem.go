// Package ledgermem is the memory of a rank's ledger: its layout, and the memfd that carries it to the
// node and the other ranks of the host.
package ledgermem

import (
	"fmt"
	"os"
	"structs"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Slots is the number of accounts a ledger has room for, Records how many entries each keeps,
// BusyWords and NameWords how many words of text.
const (
	Slots     = 256
	Records   = 256
	BusyWords = 15
	NameWords = 6

	magic   = 0x7265676465_6c7267 // "grledger", little endian
	version = 3

	pageSize = 4096
	// Size of the whole memory, in bytes. Pages that were never touched cost nothing.
	Size = int(pageSize + Slots*unsafe.Sizeof(Slot{}))
)

// A wait for a Send or Recv, which has no record, has this bit in WaitSeq: Busy says which. The other bits are the other end's rank in the job, plus 1 (0: not known), and
// whether it is a Recv.
const (
	MessageWait = 1 << 63
	messageRecv = 1 << 62
)

// WaitOfMessage is WaitSeq of such a wait.
func WaitOfMessage(peer int, recv bool) uint64 {
	seq := MessageWait | uint64(peer+1)
	if recv {
		seq |= messageRecv
	}
	return seq
}

// MessageOfWait is what WaitOfMessage was given: ok is false of a record, peer -1 where it is not known.
func MessageOfWait(seq uint64) (peer int, recv, ok bool) {
	return int(seq&^(MessageWait|messageRecv)) - 1, seq&messageRecv != 0, seq&MessageWait != 0
}

// Page is the first page.
type Page struct {
	_       structs.HostLayout
	magic   uint64
	version uint64
	rank    uint64
	_       [5]uint64
	Bell    Bell // on a cache line of its own
	_       [7]uint64
	Used    [Slots / 64]atomic.Uint64 // bit i: slot i has an account
	_       [236]uint64
	ID      [Slots]atomic.Uint64 // of the account in each slot
}

// Slot is one account. Opening counts up with each account that takes the slot: who holds an older
// number reads somebody else's entries.
type Slot struct {
	_        structs.HostLayout
	Opening  atomic.Uint64
	Last     atomic.Uint64
	Done     atomic.Uint64
	ClosedAt atomic.Uint64 // n+1; 0: not closed
	WaitSeq  atomic.Uint64 // the record that the owner has waited for, for long, since WaitFrom
	WaitFrom atomic.Uint64 // ns of CLOCK_MONOTONIC
	_        [2]uint64
	BusySeq  atomic.Uint64 // odd while Busy is written
	BusyLen  atomic.Uint64
	Busy     [BusyWords]atomic.Uint64
	NameLen  atomic.Uint64
	Name     [NameWords]atomic.Uint64 // written once in an opening, before NameLen
	Record   [Records]Record
	_        [480]uint64 // to whole pages
}

// Record is one entry. Stamp is seq<<8 | kind, 0 while it is written. Sum is over this entry and all before it.
type Record struct {
	_     structs.HostLayout
	Stamp atomic.Uint64
	Desc  [2]atomic.Uint64
	Sum   atomic.Uint64
}

// The layout is a protocol between processes.
var (
	_ [0]struct{} = [unsafe.Sizeof(Page{}) - pageSize]struct{}{}
	_ [0]struct{} = [unsafe.Offsetof(Page{}.Bell) - 64]struct{}{}
	_ [0]struct{} = [unsafe.Sizeof(Slot{}) - 3*pageSize]struct{}{}
)

// Memory is a ledger that is mapped, or made of heap memory.
type Memory struct {
	Page *Page
	base unsafe.Pointer // of the mapping; nil on the heap
	heap [Slots]atomic.Pointer[Slot]
}

// Heap makes a ledger for ranks of one process. Its slots are allocated when they are used.
func Heap(rank int) *Memory { return &Memory{Page: &Page{rank: uint64(rank)}} }

// Slot returns the memory of an account.
func (m *Memory) Slot(i int) *Slot {
	if m.base != nil {
		return (*Slot)(unsafe.Add(m.base, pageSize+uintptr(i)*unsafe.Sizeof(Slot{})))
	}
	if s := m.heap[i].Load(); s != nil {
		return s
	}
	m.heap[i].CompareAndSwap(nil, new(Slot))
	return m.heap[i].Load()
}

// Create makes a ledger in a new memfd. The caller owns the file.
func Create(rank int) (*Memory, *os.File, error) {
	fail := func(what string, err error) (*Memory, *os.File, error) {
		return nil, nil, fmt.Errorf("make ledger: %s: %w", what, err)
	}
	fd, err := unix.MemfdCreate("gorun-ledger", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return fail("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "gorun-ledger")
	if err := unix.Ftruncate(fd, int64(Size)); err != nil {
		file.Close()
		return fail("ftruncate", err)
	}
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		file.Close()
		return fail("seal", err)
	}
	m, err := mapFile(fd)
	if err != nil {
		file.Close()
		return fail("mmap", err)
	}
	m.Page.rank, m.Page.version, m.Page.magic = uint64(rank), version, magic
	return m, file, nil
}

// Map maps the ledger of a rank from its file. The caller keeps the file.
func Map(file *os.File, rank int) (*Memory, error) {
	fail := func(format string, args ...any) (*Memory, error) {
		return nil, fmt.Errorf("map ledger of rank %d: %w", rank, fmt.Errorf(format, args...))
	}
	fd := int(file.Fd())
	// Not sealed, its owner could shrink it and every access here would be a SIGBUS.
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fail("not a memfd: %w", err)
	}
	if seals&unix.F_SEAL_SHRINK == 0 {
		return fail("not sealed against shrinking")
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fail("fstat: %w", err)
	}
	if st.Size != int64(Size) {
		return fail("%d bytes, want %d", st.Size, Size)
	}
	mem, err := mapFile(fd)
	if err != nil {
		return fail("mmap: %w", err)
	}
	if p := mem.Page; p.magic != magic || p.version != version || p.rank != uint64(rank) {
		defer mem.Unmap() // after the message has been made of it
		return fail("magic %#x, version %d, rank %d: not a ledger of this version and rank", p.magic, p.version, p.rank)
	}
	return mem, nil
}

func mapFile(fd int) (*Memory, error) {
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return &Memory{Page: (*Page)(p), base: p}, nil
}

// Retire gives the shared memory back and puts empty memory in its place: whoever still holds an
// address reads zeros instead of faulting.
func (m *Memory) Retire() {
	if m.base != nil {
		unix.MmapPtr(-1, 0, m.base, uintptr(Size), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE|unix.MAP_FIXED)
	}
}

// Unmap ends the mapping. No address of it may be used any more.
func (m *Memory) Unmap() {
	if m.base != nil {
		unix.MunmapPtr(m.base, uintptr(Size))
		m.base, m.Page = nil, nil
	}
}
