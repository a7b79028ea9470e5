package nccl

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// Small collectives by peer memory.
//
// The library's way to enqueue a call costs more than a small call itself, captured or not. So between ranks whose devices reach each other's memory directly, small collectives
// are one kernel of this package (peer.cu): each rank stores its message in the others' memory, and reads what they have stored in its own. 2 ranks on H200 joined by NVLink,
// all-reduce, µs a call, this and nccl-tests with NCCL 2.28.3: 8 bytes 5.4 and 10.4, captured 2.7 and 5.9; 32 KiB 5.5 and 10.8, captured 3.5 and 6.9; 256 KiB 6.1 and 11.7, captured
// 5.0 and 8.3.
//
// Which calls take it depends on what is equal on all members: the operation, type, reduction and count, never on memory or streams. So they agree without a word. What
// the ledgers compare, watch and tell is the same for both ways.
//
// A communicator's kernels run one after the other, in one order on all members: lib_order.go orders the streams from the start, and a capture's are ordered here.

//go:embed peer.ptx
var peerPTX string

const (
	peerVar    = "GORUN_PEER"
	peerBlocks = 64 // of a launch at most, as in peer.cu
	peerRanks  = 8  // of a communicator at most, as in peer.cu
	peerLine   = 8  // bytes of data in a line of 16
	peerTry    = 16 // the word in the pinned memory from which on the first call has its data
	// peerMost is how many bytes a rank sends to all others together at most: up to there the kernel was faster between 2 ranks, at every size. More ranks share it.
	peerMost = 512 << 10
	// peerBreak is for a word that is written on the device.
	peerBreak = 50 * time.Millisecond
)

// peerSwap is for what the members do with each other at the same time: getting their buffers, which are there, and the first call.
var peerSwap = 10 * time.Second // but for a test

// peerArgs is gorun_peer_args of peer.cu.
type peerArgs struct {
	send, recv        uint64
	bytes             uint64
	counts            uint64
	stop              uint64
	bufs              [peerRanks]uint64
	rank, ranks, root int32
	op, red, typ      int32
	per, capacity     int32
}

// peerWay is a communicator's buffers for it. It is guarded by library.mu from the start on.
type peerWay struct {
	l     *library
	why   string        // why there is none, "" where there is
	limit atomic.Uint64 // bytes of a part, up to which calls take it; 0: none do

	loaded   chan struct{} // closed when kernel and loadErr are there; nil where nothing is loaded
	kernel   *cuda.RawKernel
	loadErr  error
	own      *cuda.Memory // what the others write into
	withdraw func()       // of own, until the others have it
	theirs   []*cuda.Imported
	args     peerArgs // of the next call
	items    int64    // an argument that the kernel does not read
	params   [2]unsafe.Pointer
	calls    uint64 // enqueued or captured

	hmu  sync.Mutex   // innermost; guards stop, which who fails the communicator sets
	stop *cuda.Pinned // its first word; not 0: kernels that wait give up

	// The stream of the last call in a capture.
	capture *cuda.Capture
	at      *cuda.Stream
	event   *cuda.Event

	aside *cuda.Stream // for breakOff
}

// peerOffer is what the members tell each other.
type peerOffer struct {
	Why    string `json:",omitempty"`
	Device string `json:",omitempty"` // its UUID
	Lost   bool   `json:",omitempty"` // with Why: the rank has lost its device
	Led    bool   `json:",omitempty"` // with Why: another rank has the better one
}

// peerLimit is the greatest part, in bytes, that a rank of so many sends to each other one.
func peerLimit(ranks int) uint64 {
	limit := uint64(peerMost)
	for limit*uint64(ranks-1) > peerMost {
		limit /= 2
	}
	return limit
}

// peerShape is how a part is laid out: lines a block, blocks, and threads of each.
func peerShape(bytes uint64) (per, blocks, threads int) {
	lines := int((bytes + peerLine - 1) / peerLine)
	per = max(128, (lines+peerBlocks-1)/peerBlocks)
	blocks = (lines + per - 1) / per
	threads = (min(per, lines, 512) + 31) / 32 * 32
	return per, blocks, threads
}

// beginPeer loads the kernel meanwhile: the driver makes code of it, 0.07 s on the first time of a machine.
func (l *library) beginPeer(off bool) error {
	p := &l.peer
	p.l = l
	if set := os.Getenv(peerVar); set != "" && set != "auto" && set != "off" {
		return fmt.Errorf("%s=%q: want auto or off", peerVar, set)
	}
	if p.why = l.noPeer(off); p.why != "" {
		return nil
	}
	p.loaded = make(chan struct{})
	go func() {
		defer close(p.loaded)
		p.kernel, p.loadErr = l.c.dev.LoadPTX("gorun_peer", peerPTX)
	}()
	return nil
}

// noPeer is why this rank, for itself, has no such way.
func (l *library) noPeer(off bool) string {
	c := l.c
	switch {
	case off:
		return "the program wants none (Config.NoPeer)"
	case os.Getenv(peerVar) == "off":
		return peerVar + "=off"
	case c.dev.Platform() != cuda.CUDA:
		return fmt.Sprintf("written for CUDA, this is a %s device", c.dev.Platform())
	case len(c.ranks) > peerRanks:
		return fmt.Sprintf("there are %d ranks, more than %d", len(c.ranks), peerRanks)
	case c.job.InProcess():
		return "its ranks are in one process"
	case c.spansHosts():
		return "its ranks are on several hosts"
	}
	return ""
}

// openPeer meets the others when all have the communicator. What this rank lacks is no error: then nobody has it. A device that is lost is one on all ranks.
func (l *library) openPeer(ctx context.Context) error {
	p := &l.peer
	own := peerOffer{Why: p.why, Device: l.c.dev.Info().UUID}
	if own.Why == "" {
		if err := p.make(); err != nil {
			own.Why = err.Error()
		}
	}
	offers, err := p.meet(ctx, own)
	if err != nil {
		return err
	}
	for _, step := range []func(context.Context, []peerOffer) error{p.swap, p.try} {
		if p.why != "" {
			break
		}
		var done peerOffer
		if err := step(ctx, offers); err != nil {
			done.Why, done.Led = err.Error(), isConsequence(err)
		}
		_, err := p.meet(ctx, done)
		l.c.acct.SetBusy("")
		if err != nil {
			return err
		}
	}
	if p.why != "" {
		p.release()
		l.leaveHome() // where only another rank has failed
		return nil
	}
	p.limit.Store(peerLimit(len(l.c.ranks)))
	p.withdrawn()
	return nil
}

// meet tells the others, and takes the first member's reason as everybody's.
func (p *peerWay) meet(ctx context.Context, own peerOffer) ([]peerOffer, error) {
	c := p.l.c
	lost := c.dev.Err()
	if lost != nil {
		own = peerOffer{Why: lost.Error(), Lost: true}
	}
	b, err := json.Marshal(own)
	if err != nil {
		panic(err) // strings
	}
	all, err := c.group.Meet(ctx, b, "init of communicator "+c.name)
	if err != nil {
		return nil, errors.Join(lost, err)
	}
	offers := make([]peerOffer, len(all))
	for r, b := range all {
		if err := json.Unmarshal(b, &offers[r]); err != nil {
			return nil, fmt.Errorf("rank %d: what it says about its memory: %w", r, err)
		}
	}
	if lost != nil {
		return nil, lost
	}
	if r := slices.IndexFunc(offers, func(o peerOffer) bool { return o.Lost }); r >= 0 {
		return nil, fmt.Errorf("rank %d: %s", r, offers[r].Why)
	}
	for _, led := range []bool{false, true} { // causes first
		if r := slices.IndexFunc(offers, func(o peerOffer) bool { return o.Why != "" && o.Led == led }); r >= 0 && p.why == "" {
			p.why = fmt.Sprintf("rank %d: %s", r, offers[r].Why)
		}
	}
	return offers, nil
}

// joined is an error if this rank's device is not known to be joined to those of all others: without NVLink it was not measured.
func (p *peerWay) joined(offers []peerOffer) error {
	for r, o := range offers {
		linked, err := p.l.c.dev.LinkedTo(o.Device)
		if err != nil {
			return fmt.Errorf("whether its device is joined by NVLink to that of rank %d is not known: %w", r, err)
		}
		if !linked {
			return fmt.Errorf("its device is not joined by NVLink to that of rank %d, and without it was not measured", r)
		}
	}
	return nil
}

// make makes what this rank has for itself.
func (p *peerWay) make() error {
	<-p.loaded
	if p.loadErr != nil {
		return p.loadErr
	}
	c := p.l.c
	n, most := len(c.ranks), peerLimit(len(c.ranks))
	per, _, _ := peerShape(most)
	own, err := c.dev.Alloc(uint64(2*n*peerBlocks*per)*16, cuda.Shareable)
	if err != nil {
		return err
	}
	p.own = own
	fd, err := own.ExportFD()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if p.withdraw, err = c.job.Export(p.key(), bootstrap.Handle{FD: fd}); err != nil {
		return err
	}
	stop, err := c.dev.AllocPinned(4*peerTry + peerLine*(n+1))
	if err != nil {
		return err
	}
	p.hmu.Lock()
	p.stop = stop
	p.hmu.Unlock()
	if p.event, err = c.dev.NewEvent(); err != nil {
		return err
	}
	if p.aside, err = c.dev.NewStream(); err != nil {
		return err
	}
	p.args = peerArgs{stop: uint64(stop.Pointer()), rank: int32(c.rank), ranks: int32(n), capacity: int32(per)}
	p.args.bufs[c.rank] = uint64(uintptr(own.Pointer()))
	p.params = [2]unsafe.Pointer{unsafe.Pointer(&p.args), unsafe.Pointer(&p.items)}
	// Nobody writes where a rank would for itself: its counts are there.
	half := own.Size() / 2 // for each parity
	p.args.counts = p.args.bufs[c.rank] + half + uint64(c.rank*peerBlocks*per)*16
	// A line that was never written must not look like one of a call: flags of the first half are even, so there it gets an odd one.
	ctx, done := context.WithTimeout(context.Background(), peerSwap)
	defer done()
	return errors.Join(p.aside.Memset(cuda.Range{Mem: own, Len: half}, 0xff), p.aside.Synchronize(ctx))
}

// swap maps the others' buffers.
func (p *peerWay) swap(ctx context.Context, offers []peerOffer) error {
	c := p.l.c
	if err := p.joined(offers); err != nil {
		return err
	}
	ctx, done := context.WithTimeout(ctx, peerSwap)
	defer done()
	for r, j := range c.ranks {
		if r == c.rank {
			continue
		}
		h, err := c.job.Import(ctx, j, p.key())
		if err != nil {
			return err
		}
		m, err := c.dev.ImportFD(h.FD, p.own.Size())
		unix.Close(h.FD)
		if err != nil {
			return fmt.Errorf("map the memory of rank %d: %w", r, err)
		}
		p.theirs = append(p.theirs, m)
		p.args.bufs[r] = uint64(m.Pointer())
	}
	_, err := p.home()
	return err
}

// try makes the first call, of this package: each rank sends its number to all. What a driver maps it need not reach, where it does not show the other device above all.
func (p *peerWay) try(ctx context.Context, _ []peerOffer) error {
	c := p.l.c
	ctx, done := context.WithTimeout(ctx, peerSwap)
	defer done()
	ctx, stop := p.l.untilGone(ctx)
	defer stop()
	// What this rank sends, and what it gets, lies behind the stop word.
	words := p.stop.Words()[peerTry:]
	words[0] = uint32(c.rank + 1)
	a := &p.args
	a.send = uint64(p.stop.Pointer()) + 4*peerTry
	a.recv, a.bytes, a.op = a.send+peerLine, peerLine, int32(OpAllGather)
	per, blocks, threads := peerShape(a.bytes)
	a.per, p.items = int32(per), int64(blocks*threads)
	err := p.kernel.Launch(p.aside, blocks, threads, p.params[:])
	launched := err == nil
	if launched {
		err = p.aside.Synchronize(ctx)
	}
	if err != nil {
		switch {
		case ctx.Err() == nil:
			c.acct.SetBusy(initFailed) // or the others would wait for this rank's call
		case launched:
			err = context.Cause(ctx)
		}
		if launched {
			p.letGo() // then it ends
			end, done := context.WithTimeout(context.Background(), peerSwap)
			defer done()
			err = errors.Join(err, p.aside.Synchronize(end))
		}
		return fmt.Errorf("the first call: %w", err)
	}
	for r := range c.ranks {
		if got := words[peerLine/4*(r+1)]; got != uint32(r+1) {
			return fmt.Errorf("the first call: rank %d has sent its number, and %#x has come", r, got)
		}
	}
	return nil
}

// home has all calls in one order from now on, whatever their streams.
func (p *peerWay) home() (*cuda.Stream, error) {
	l := p.l
	l.mu.Lock()
	defer l.mu.Unlock()
	_, s, err := l.ownStream()
	if err == nil {
		err = l.comeHome(s)
	}
	return s, err
}

// takes reports whether a call goes this way.
func (p *peerWay) takes(call *Call) bool {
	limit := p.limit.Load()
	if limit == 0 || call.Op > OpReduceScatter || call.Op.reduces() && (call.Red > Max || call.Type > cuda.Float64DType) {
		return false
	}
	return call.Count*uint64(call.Type.Size()) <= limit
}

// takesAll reports whether all collectives of a call or group do: only then they do.
func (p *peerWay) takesAll(calls []Call) bool {
	if p.limit.Load() == 0 {
		return false
	}
	for i := range calls {
		if calls[i].Op.p2p() || !p.takes(&calls[i]) {
			return false
		}
	}
	return true
}

// enqueue launches the kernel of a call. The turn of its stream has come.
func (p *peerWay) enqueue(call *Call) error {
	if call.Count == 0 {
		return nil // all members drop it
	}
	p.calls++
	a := &p.args
	a.send, a.recv = uint64(uintptr(call.Send.Pointer())), uint64(uintptr(call.Recv.Pointer()))
	if a.send == 0 {
		a.send = a.recv
	}
	a.bytes = call.Count * uint64(call.Type.Size())
	a.root, a.op, a.red, a.typ = call.Root, int32(call.Op), int32(call.Red), int32(call.Type)
	per, blocks, threads := peerShape(a.bytes)
	a.per = int32(per)
	p.items = int64(blocks * threads)
	return p.kernel.Launch(call.Stream, blocks, threads, p.params[:])
}

// doPeer issues the calls of a group, one after the other.
func (l *library) doPeer(calls []Call, mode Mode) error {
	if len(calls) == 0 {
		return nil
	}
	l.mu.Lock()
	defer l.unlock()
	for i := range calls {
		call := &calls[i]
		var u *use
		var err error
		if mode == 0 {
			u, err = l.used(call.Stream, call.Op, call.Seq)
		} else {
			err = l.peer.turn(call.Stream)
		}
		if err == nil && l.ending.Load() {
			err = l.over()
		}
		if err == nil {
			err = l.peer.enqueue(call)
		}
		if err != nil {
			return err
		}
		if u != nil {
			u.cameBack()
		}
	}
	return nil
}

// turn orders the streams of one capture.
func (p *peerWay) turn(s *cuda.Stream) error {
	c := s.Capture()
	if p.capture == c && p.at != s {
		if err := errors.Join(p.at.Record(p.event), s.Wait(p.event)); err != nil {
			return fmt.Errorf("order it behind the capture's last operation: %w", err)
		}
	}
	p.capture, p.at = c, s
	return nil
}

// letGo ends kernels that wait for other members.
func (p *peerWay) letGo() {
	p.hmu.Lock()
	defer p.hmu.Unlock()
	if p.stop != nil {
		atomic.StoreUint32(&p.stop.Words()[0], 1)
	}
}

// breakOff has kernels that have not begun do nothing any more: one that finds all lines there would not look at stop, and use memory that the program has freed.
func (p *peerWay) breakOff() {
	if p.limit.Load() == 0 || p.l.quiet() {
		return
	}
	s, word := p.aside, cuda.Range{Mem: p.own, Off: p.args.counts - p.args.bufs[p.args.rank] + 4*peerBlocks, Len: 4}
	ctx, cancel := context.WithTimeout(context.Background(), peerBreak)
	over := make(chan struct{})
	go func() { // the driver may keep the call until the library's kernels have ended, too, which the abort sees to
		defer close(over)
		defer cancel()
		if s.Memset(word, 1) == nil { // else the device is lost
			s.Synchronize(ctx)
		}
	}()
	select {
	case <-over:
	case <-ctx.Done():
	}
}

func (p *peerWay) withdrawn() {
	if p.withdraw != nil {
		p.withdraw()
		p.withdraw = nil
	}
}

// key is the name by which the others get this communicator's buffers.
func (p *peerWay) key() string { return "nccl peer memory of " + p.l.c.key }

// release gives back what was made. The others may still have this rank's buffer mapped: the driver keeps its memory as long.
func (p *peerWay) release() {
	if p.loaded != nil {
		<-p.loaded
	}
	p.limit.Store(0)
	for _, m := range p.theirs {
		m.Close()
	}
	p.theirs = nil
	p.withdrawn()
	if p.own != nil {
		p.own.Free()
		p.own = nil
	}
	if p.event != nil {
		p.event.Close()
		p.event = nil
	}
	if p.aside != nil {
		p.aside.Close()
		p.aside = nil
	}
	p.hmu.Lock()
	defer p.hmu.Unlock()
	if p.stop != nil {
		p.stop.Close()
		p.stop = nil
	}
}

func (p *peerWay) String() string {
	if p.why != "" {
		return "no: " + p.why
	}
	return fmt.Sprintf("yes: collectives of up to %s a rank, of sum, product, least and greatest, by a kernel of this package (%s=off, Config.NoPeer: none)", bytesText(p.limit.Load()), peerVar)
}

// ByPeer reports whether the collectives of a captured call, or group, go by peer memory if the capture demands no mode. Equal on all members. For libraries.
func (c *Comm) ByPeer(calls []Call) bool {
	l, ok := c.be.(*library)
	return ok && l.peer.takesAll(calls)
}
