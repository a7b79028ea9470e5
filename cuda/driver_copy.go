package cuda

import (
	"errors"
	"sync"
	"time"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// Go memory is not the GPU's to read, and the driver's copies from and to such memory wait for the stream. So copies go through pinned memory:
//
//   - To the device: the Go slice is copied to pinned memory when the copy is enqueued.
//   - From the device: the GPU writes to pinned memory, and the bytes are landed in the Go slice by whoever finds out that the copy is done: Synchronize
//     and Query of the stream, of an event recorded after it, of a stream that waits for such an event, and a host function enqueued after it.
//   - In a capture: a host function copies between Go and pinned memory at every launch, so a captured copy means on a GPU what it
//     means on the host. The pinned memory belongs to the graph.
//
// Pinned memory is kept until the device is closed (giving it back would wait for the GPU), so a device keeps as much as was ever in use at
// once. Beyond pinnedLimit an enqueue waits a little for pieces to come back before it takes more.
const (
	pinnedSlab  = 1 << 20
	pinnedLimit = 256 << 20
	pinnedWait  = 20 * time.Millisecond
)

// pinnedSizes are those of the pieces. Larger copies are made piece by piece.
var pinnedSizes = [...]uintptr{4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20}

const pinnedLargest = 4 << 20

type pinnedPiece struct {
	p    unsafe.Pointer
	size int // index in pinnedSizes
}

// pinnedPool keeps the pieces.
type pinnedPool struct {
	g *driverDevice

	mu     sync.Mutex // guards what follows
	free   [len(pinnedSizes)][]unsafe.Pointer
	slabs  []unsafe.Pointer
	total  uintptr
	limit  uintptr
	events []cusys.Event
}

// get takes a piece of at least n bytes. The device is bound.
func (p *pinnedPool) get(n uintptr) (pinnedPiece, error) {
	size := 0
	for pinnedSizes[size] < n {
		size++
	}
	if piece, ok := p.take(size); ok {
		return piece, nil
	}
	p.g.quietly(p.g.landMarked)
	for start := time.Now(); ; time.Sleep(shortestNap) {
		if piece, ok := p.take(size); ok {
			return piece, nil
		}
		p.mu.Lock()
		full := p.total >= p.limit
		p.mu.Unlock()
		if !full || time.Since(start) > pinnedWait {
			break
		}
		p.g.quietly(p.g.landMarked)
	}
	return p.grow(size)
}

func (p *pinnedPool) take(size int) (pinnedPiece, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.free[size]
	if len(list) == 0 {
		return pinnedPiece{}, false
	}
	p.free[size] = list[:len(list)-1]
	return pinnedPiece{list[len(list)-1], size}, true
}

// grow takes a slab from the driver and gives its first piece.
func (p *pinnedPool) grow(size int) (pinnedPiece, error) {
	piece := pinnedSizes[size]
	slab := max(piece, pinnedSlab)
	var base unsafe.Pointer
	var err error
	p.g.quietly(func() { base, err = p.g.drv.MemAllocHost(uint64(slab)) })
	if err != nil {
		return pinnedPiece{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.slabs = append(p.slabs, base)
	p.total += slab
	for off := piece; off < slab; off += piece {
		p.free[size] = append(p.free[size], unsafe.Add(base, off))
	}
	return pinnedPiece{base, size}, nil
}

func (p *pinnedPool) put(piece pinnedPiece, mark cusys.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free[piece.size] = append(p.free[piece.size], piece.p)
	if mark != 0 {
		p.events = append(p.events, mark)
	}
}

// mark records an event behind a copy, so that it can be found done while the stream goes on. The device is bound.
func (p *pinnedPool) mark(h cusys.Stream) (cusys.Event, error) {
	p.mu.Lock()
	var e cusys.Event
	if n := len(p.events); n > 0 {
		e = p.events[n-1]
		p.events = p.events[:n-1]
	}
	p.mu.Unlock()
	if e == 0 {
		var err error
		if e, err = p.g.drv.EventCreate(cusys.EventDisableTiming); err != nil {
			return 0, err
		}
	}
	if err := p.g.drv.EventRecord(e, h); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.events = append(p.events, e)
		return 0, err // never recorded, it would be found done
	}
	return e, nil
}

// close gives all back. The device is bound and nothing is under way.
func (p *pinnedPool) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, e := range p.events {
		errs = append(errs, p.g.drv.EventDestroy(e))
	}
	for _, s := range p.slabs {
		errs = append(errs, p.g.drv.MemFreeHost(s))
	}
	p.events, p.slabs = nil, nil
	p.free = [len(pinnedSizes)][]unsafe.Pointer{}
	return errors.Join(errs...)
}

// quietly makes calls that a capture of this thread would forbid: nothing of what is captured depends on them. The device is bound.
func (g *driverDevice) quietly(calls func()) {
	if !g.captures.any() {
		calls()
		return
	}
	old, err := g.drv.ExchangeCaptureMode(cusys.CaptureRelaxed)
	calls()
	if err == nil {
		g.drv.ExchangeCaptureMode(old)
	}
}

// transfer is a copy that holds a pinned piece.
type transfer struct {
	position uint64
	dst      unsafe.Pointer // Go memory to land in; nil to the device
	n        uintptr
	piece    pinnedPiece
	mark     cusys.Event
}

func (s *driverStream) copyIn(dst, src unsafe.Pointer, n uint64) error {
	return s.enqueueNode("copy to device", func() error {
		for off := uintptr(0); off < uintptr(n); off += pinnedLargest {
			if err := s.bring(unsafe.Add(dst, off), unsafe.Add(src, off), min(uintptr(n)-off, pinnedLargest)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *driverStream) copyOut(dst, src unsafe.Pointer, n uint64) error {
	return s.enqueueNode("copy to host", func() error {
		for off := uintptr(0); off < uintptr(n); off += pinnedLargest {
			if err := s.fetch(unsafe.Add(dst, off), unsafe.Add(src, off), min(uintptr(n)-off, pinnedLargest)); err != nil {
				return err
			}
		}
		return nil
	})
}

func copyBytes(dst, src unsafe.Pointer, n uintptr) {
	copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
}

// bring enqueues a copy of at most pinnedLargest bytes from Go memory. mu is held and the device bound.
func (s *driverStream) bring(dst, src unsafe.Pointer, n uintptr) error {
	piece, err := s.g.pinned.get(n)
	if err != nil {
		return err
	}
	if c := s.cap.Load(); c != nil {
		c.own(piece)
		if err := s.callCopy(piece.p, src, n); err != nil {
			return err
		}
		return s.g.drv.CopyToDevice(devicePtr(dst), piece.p, uint64(n), s.h)
	}
	copyBytes(piece.p, src, n)
	if err := s.g.drv.CopyToDevice(devicePtr(dst), piece.p, uint64(n), s.h); err != nil {
		s.g.pinned.put(piece, 0)
		return err
	}
	return s.begun(transfer{piece: piece, n: n})
}

// fetch is bring for a copy to Go memory.
func (s *driverStream) fetch(dst, src unsafe.Pointer, n uintptr) error {
	piece, err := s.g.pinned.get(n)
	if err != nil {
		return err
	}
	c := s.cap.Load()
	if c != nil {
		c.own(piece)
	}
	err = s.g.drv.CopyToHost(piece.p, devicePtr(src), uint64(n), s.h)
	switch {
	case err == nil && c != nil:
		return s.callCopy(dst, piece.p, n)
	case err == nil:
		return s.begun(transfer{dst: dst, piece: piece, n: n})
	case c == nil:
		s.g.pinned.put(piece, 0)
	}
	return err
}

// callCopy has a host function copy at every launch of a graph.
func (s *driverStream) callCopy(dst, src unsafe.Pointer, n uintptr) error {
	return s.callHost(func() { copyBytes(dst, src, n) })
}

// begun keeps account of a copy that was enqueued. mu is held and the device bound.
func (s *driverStream) begun(t transfer) error {
	var err error
	t.mark, err = s.g.pinned.mark(s.h)
	t.position = s.position.Add(1)
	s.tmu.Lock()
	defer s.tmu.Unlock()
	s.transfers = append(s.transfers, t)
	return err
}

// land ends the copies up to a position that the stream has come to, and those of the streams that it had waited for before.
func (s *driverStream) land(position uint64) {
	s.tmu.Lock()
	n := 0
	for n < len(s.transfers) && s.transfers[n].position <= position {
		n++
	}
	s.landFirst(n)
	var up []upstream
	kept := s.upstream[:0]
	for _, u := range s.upstream {
		if u.at <= position {
			up = append(up, u)
		} else {
			kept = append(kept, u)
		}
	}
	s.upstream = kept
	if position == s.position.Load() {
		s.sources = nil // all waits are over
	}
	s.tmu.Unlock()
	for _, u := range up {
		u.s.land(u.position)
	}
}

// landFirst ends the first n copies, which are done. tmu is held: who comes second finds the bytes there.
func (s *driverStream) landFirst(n int) {
	for i := range n {
		t := &s.transfers[i]
		if t.dst != nil {
			copyBytes(t.dst, t.piece.p, t.n)
		}
		s.g.pinned.put(t.piece, t.mark)
	}
	if n == 0 {
		return
	}
	left := copy(s.transfers, s.transfers[n:])
	clear(s.transfers[left:])
	s.transfers = s.transfers[:left]
}

// landMarked ends the copies of all streams that are done. The device is bound.
func (g *driverDevice) landMarked() {
	g.smu.Lock()
	streams := make([]*driverStream, 0, len(g.streams))
	for s := range g.streams {
		streams = append(streams, s)
	}
	g.smu.Unlock()
	for _, s := range streams {
		s.tmu.Lock()
		n := 0
		for n < len(s.transfers) && s.transfers[n].mark != 0 {
			if done, err := g.drv.EventQuery(s.transfers[n].mark); err != nil || !done {
				break
			}
			n++
		}
		s.landFirst(n)
		s.tmu.Unlock()
	}
}

// abandon forgets the copies of a stream that is closed with a failure. Its pieces are not used again, the GPU may still write to them.
func (s *driverStream) abandon() {
	s.tmu.Lock()
	s.transfers, s.upstream, s.sources = nil, nil, nil
	s.tmu.Unlock()
	s.watches.change(func([]*driverWatch) []*driverWatch { return nil })
}
