package nccl

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// peerMappings are this rank's exports and its mappings of peers' registered memory. A mapping is made when the memory is first used and
// is held by the registrations of this rank through which it was used: it goes when the last of these goes, and at the next sweep
// when its owner has deregistered it.
type peerMappings struct {
	mu      sync.Mutex // innermost: nothing else is taken under it
	of      map[mapKey]*mapping
	exports map[uint64]func() // by memory id: withdraw
	users   int               // operations that work in mappings now: nothing is unmapped meanwhile
	dirty   bool              // a sweep is due when they are done
	closed  bool
	wg      sync.WaitGroup // imports
	count   atomic.Int64
}

type mapKey struct {
	rank int
	mem  uint64 // the owner's memory id
}

type mapping struct {
	pm      *cuda.PeerMemory // nil: not there yet
	b       []byte
	err     error
	holders []uint64 // this rank's memory ids, few
}

func (m *mapping) hold(mem uint64) {
	if !slices.Contains(m.holders, mem) {
		m.holders = append(m.holders, mem)
	}
}

func (c *Comm) memoryKey(mem uint64) string { return fmt.Sprintf("nccl %s memory %d", c.key, mem) }

// register exports memory, once for the user and graphs.
func (h *host) register(m *cuda.Memory, _ bool) error {
	p := &h.peers
	p.mu.Lock()
	exported := p.exports[m.ID()] != nil
	p.mu.Unlock()
	if exported {
		return nil
	}
	sh, err := m.Share()
	if err != nil {
		return err
	}
	withdraw, err := h.c.job.Export(h.c.memoryKey(m.ID()), bootstrap.Handle{FD: sh.FD, Local: sh})
	if err != nil {
		return err
	}
	p.mu.Lock()
	p.exports[m.ID()] = withdraw
	p.mu.Unlock()
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	if !h.gone {
		h.seg.list(h.rank, m.ID())
	}
	return nil
}

func (h *host) deregister(m *cuda.Memory, _ bool, hold *cuda.Hold) (after func() error) {
	if hold == nil {
		return func() error { return nil } // the other kind stays
	}
	p := &h.peers
	p.mu.Lock()
	withdraw := p.exports[m.ID()]
	delete(p.exports, m.ID())
	for _, mp := range p.of {
		mp.holders = slices.DeleteFunc(mp.holders, func(id uint64) bool { return id == m.ID() })
	}
	p.mu.Unlock()
	if withdraw != nil {
		withdraw()
	}
	h.segMu.RLock()
	if !h.gone {
		h.seg.unlist(h.rank, m.ID())
	}
	h.segMu.RUnlock()
	h.sweep(false)
	return func() error {
		releaseHolds(hold)
		return nil
	}
}

// drain unmaps what this rank's registrations hold no more, and what its owners have deregistered.
func (h *host) drain() { h.sweep(true) }

// sweep unmaps what nobody holds; with owners also what its owner has deregistered. While operations work in mappings it is put off.
func (h *host) sweep(owners bool) {
	h.segMu.RLock()
	defer h.segMu.RUnlock()
	p := &h.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users > 0 {
		p.dirty = true
		return
	}
	p.dirty = false
	for k, m := range p.of {
		if m.pm == nil && m.err == nil {
			continue // its import ends first
		}
		if len(m.holders) == 0 || owners && !h.gone && !h.seg.live(k.rank, k.mem) {
			p.drop(k, m)
		}
	}
}

// drop needs mu.
func (p *peerMappings) drop(k mapKey, m *mapping) {
	if m.pm != nil {
		m.pm.Close()
		p.count.Add(-1)
	}
	delete(p.of, k)
}

// enter marks that an operation works in mappings, leave that it does no more.
func (p *peerMappings) enter() {
	p.mu.Lock()
	p.users++
	p.mu.Unlock()
}

func (h *host) leaveMappings() {
	p := &h.peers
	p.mu.Lock()
	p.users--
	due := p.users == 0 && p.dirty
	p.mu.Unlock()
	if due {
		h.sweep(true)
	}
}

// find is a peer's memory, nil while it is being mapped: the first call for it starts that, and the device is rung when it is there. holders are this
// rank's memory ids through which it is used. Call it between enter and leave.
func (h *host) find(rank int, mem uint64, holders ...uint64) ([]byte, error) {
	p := &h.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	k := mapKey{rank, mem}
	m := p.of[k]
	if m == nil {
		if p.closed {
			return nil, ErrClosed
		}
		m = &mapping{}
		p.of[k] = m
		p.dirty = true // a peer with new memory may have given up old
		p.wg.Add(1)
		go func() {
			defer p.wg.Done()
			h.mapPeer(h.c.ctx, k, m)
		}()
	}
	if m.err != nil {
		delete(p.of, k) // a later use tries again
		return nil, m.err
	}
	for _, id := range holders {
		m.hold(id)
	}
	return m.b, nil
}

// mapPeer imports and maps a peer's memory for m.
func (h *host) mapPeer(ctx context.Context, k mapKey, m *mapping) {
	pm, err := importMemory(ctx, h.c, k.rank, h.c.memoryKey(k.mem))
	p := &h.peers
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case m.pm != nil: // prepare was faster
		if err == nil {
			pm.Close()
		}
	case err != nil:
		m.err = fmt.Errorf("map allocation %d of rank %d: %w", k.mem, k.rank, err)
	default:
		m.pm, m.b = pm, pm.Bytes()
		p.count.Add(1)
	}
	h.c.dev.Ring()
}

// prepare maps the memory of the peers' buffers in a captured group now.
func (h *host) prepare(ctx context.Context, group []Call, layouts [][]byte) error {
	var holders []uint64
	for i := range group {
		for _, r := range [...]cuda.Range{group[i].Send, group[i].Recv} {
			if h.c.isRegistered(r) && !slices.Contains(holders, r.Mem.ID()) {
				holders = append(holders, r.Mem.ID())
			}
		}
	}
	if len(holders) == 0 {
		return nil
	}
	h.peers.enter()
	defer h.leaveMappings()
	var wanted []mapKey
	for r, b := range layouts {
		if r == h.rank || b == nil {
			continue
		}
		calls, err := decodeLayout(b)
		if err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
		for _, call := range calls {
			if call.op.p2p() && (call.op != OpSend || int(call.root) != h.rank) {
				continue // messages are read from the sender's memory
			}
			for _, buf := range call.buffers {
				k := mapKey{r, buf.memory}
				if buf.kind == cuda.Shareable && !slices.Contains(wanted, k) {
					wanted = append(wanted, k)
				}
			}
		}
	}
	for _, k := range wanted {
		if err := h.prepareOne(ctx, k, holders); err != nil {
			return err
		}
	}
	return nil
}

func (h *host) prepareOne(ctx context.Context, k mapKey, holders []uint64) error {
	p := &h.peers
	p.mu.Lock()
	if m := p.of[k]; m != nil && m.pm != nil {
		for _, id := range holders {
			m.hold(id)
		}
		p.mu.Unlock()
		return nil
	}
	p.mu.Unlock()
	pm, err := importMemory(ctx, h.c, k.rank, h.c.memoryKey(k.mem))
	if err != nil {
		return fmt.Errorf("map allocation %d of rank %d: %w", k.mem, k.rank, err)
	}
	p.mu.Lock()
	m := p.of[k]
	switch {
	case p.closed:
		p.mu.Unlock()
		pm.Close()
		return ErrClosed
	case m == nil || m.pm == nil && m.err != nil:
		m = &mapping{pm: pm, b: pm.Bytes()}
		p.of[k] = m
		p.count.Add(1)
		pm = nil
	case m.pm == nil:
		// A task's import is on its way: this one serves both, the other finds it done.
		m.pm, m.b = pm, pm.Bytes()
		p.count.Add(1)
		pm = nil
	}
	for _, id := range holders {
		m.hold(id)
	}
	p.mu.Unlock()
	if pm != nil {
		return pm.Close()
	}
	return nil
}

func (h *host) mappings() int { return int(h.peers.count.Load()) }

// close ends the imports and withdraws the exports.
func (p *peerMappings) close() {
	p.mu.Lock()
	p.closed = true
	exports := p.exports
	p.exports = map[uint64]func(){}
	p.mu.Unlock()
	for _, withdraw := range exports {
		withdraw()
	}
	p.wg.Wait()
}

// unmapAll follows close, when no task works any more.
func (p *peerMappings) unmapAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, m := range p.of {
		p.drop(k, m)
	}
}

// importMemory maps what a member exports under a key. The wait for it ends with the communicator: a member on which that has failed exports nothing any more.
func importMemory(ctx context.Context, c *Comm, rank int, key string) (*cuda.PeerMemory, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.ctx, func() { cancel(context.Cause(c.ctx)) })
	defer stop()
	hd, err := c.job.Import(ctx, c.ranks[rank], key)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil && !isCtx(cause) {
			err = cause
		}
		return nil, err
	}
	if hd.FD >= 0 {
		defer unix.Close(hd.FD)
	}
	if sh, ok := hd.Local.(cuda.SharedMemory); ok {
		return c.dev.MapShared(sh)
	}
	if hd.FD < 0 {
		return nil, fmt.Errorf("rank %d's memory is Go memory of its process: a build with the race detector", rank)
	}
	var st unix.Stat_t
	if err := unix.Fstat(hd.FD, &st); err != nil {
		return nil, fmt.Errorf("size of rank %d's memory: %w", rank, err)
	}
	return c.dev.MapShared(cuda.SharedMemory{FD: hd.FD, Size: uint64(st.Size)})
}
