package nccl

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// collTask is one collective. All members post what they call, and compare it before anything moves. Then it is direct, where all buffers are
// registered, or goes through staging.
//
//   - Direct: each member does its part straight from and to all members' buffers. Nobody is done before all are: a buffer is no peer's to
//     touch after the operation.
//   - Staged: the data goes in chunks through the members' staging halves, one barrier a chunk. The first chunk is there when the
//     call is posted. A half is written again two chunks later; the barrier between tells that all have read it. Nobody waits at the
//     end: peers only read staging, and the next call begins with a barrier.
type collTask struct {
	h          *host
	call       Call
	flags      uint64
	sub        uint64 // which of its group
	last       bool   // of its group
	group      uint64 // hash of the group's calls, 0 without one
	ticket     uint64 // 0: captured, the replay has it
	sreg, rreg *registered
	scalar     uint64 // of a pre-multiplied sum

	state   collState
	pos     int    // elements of the call (staged) or of this rank's part (direct) done
	mapped  bool   // works in peers' memory
	over    bool   // an eager run has ended
	seq     uint64 // ledger record of this run
	slotSub uint64
	key     uint64
	wait    waiting
}

type collState uint8

const (
	collTurn   collState = iota // waits for this rank's earlier calls
	collPosted                  // waits for the members' calls
	collMap                     // waits for peers' memory to be mapped
	collDirect                  // works
	collFinal                   // waits until all have worked
	collChunk                   // waits for all members' chunks
	collParts                   // waits for all members' parts of the chunk's result
)

const (
	// stepBytes is the most that one step moves, so that other streams go on and errors are seen.
	stepBytes = 1 << 20

	// partsBytes is from where on a staged all-reduce of three or more ranks has each reduce its part of a chunk: below it a second
	// barrier costs more than the work that it saves.
	partsBytes = 8 << 10
)

func (h *host) newColl(call *Call, mode Mode) *collTask {
	var t *collTask
	if mode == 0 {
		t = h.colls.get()
	} else { // it stays with its graph
		t = new(collTask)
	}
	*t = collTask{h: h, call: *call}
	if call.Red > Avg {
		t.scalar = h.c.madeOp(call.Red).scalar // validate has looked
	}
	if call.Send.Mem != nil {
		t.flags |= sendUsed
	}
	if call.Recv.Mem != nil {
		t.flags |= recvUsed
	}
	if mode != 0 {
		t.flags |= capturedCall
		if mode >= Local && h.links == nil {
			t.flags |= t.flags << 1 & (sendReg | recvReg)
		}
		return t
	}
	t.ticket = h.ticket()
	h.pending.Add(1)
	if t.sreg = h.c.userRegistered(call.Send); t.sreg != nil {
		t.sreg.enter(call.Op, call.Seq)
		if h.links == nil {
			t.flags |= sendReg
		}
	}
	if t.rreg = h.c.userRegistered(call.Recv); t.rreg != nil {
		if h.links == nil {
			t.flags |= recvReg
		}
		if t.rreg == t.sreg {
			t.rreg = nil // in place, or in one block: one operation
		} else {
			t.rreg.enter(call.Op, call.Seq)
		}
	}
	return t
}

// Start begins a run; a captured task has many.
func (t *collTask) Start() {
	t.state, t.pos, t.mapped = collTurn, 0, false
	t.wait.reset()
}

// Step goes on as far as the members allow.
func (t *collTask) Step() (done bool, err error) {
	h := t.h
	h.mu.Lock()
	returned := false
	defer func() {
		if !returned { // a fault in a user's buffer: the device makes it the sticky error
			h.c.fail(causef(ErrAborted, "rank %d faulted in %s", h.rank, t.name()), true, false)
		}
		h.mu.Unlock()
	}()
	if err = h.broken(); err == nil || t.arrived() {
		done, err = t.step()
		if err != nil {
			err = h.c.fail(err, true, false)
		}
	}
	if err != nil {
		err = h.c.errorf(t.name(), err)
		t.finish(false)
		done = true
	}
	returned = true
	return done, err
}

// arrived reports whether what the call waits for is there: a failure that a member told, or died of, after it had done its part
// is not this call's. Only those waits count behind which nothing of the members' memory is touched.
func (t *collTask) arrived() bool {
	h := t.h
	if h.gone {
		return false
	}
	switch t.state {
	case collPosted:
		return t.flags&(sendReg|recvReg) == 0 && h.all()
	case collFinal, collChunk, collParts:
		return h.all()
	}
	return false
}

func (t *collTask) name() string {
	if t.seq == 0 && t.ticket != 0 {
		return fmt.Sprintf("%v #%d", t.call.Op, t.call.Seq)
	}
	return fmt.Sprintf("%v #%d", t.call.Op, t.seq)
}

func (t *collTask) step() (bool, error) {
	h := t.h
	for {
		switch t.state {
		case collTurn:
			if t.ticket != 0 && h.turn != t.ticket {
				return false, nil
			}
			t.post()
			t.state = collPosted

		case collPosted:
			if !h.all() {
				return false, t.late()
			}
			direct, dry, err := t.compare()
			if err != nil {
				return false, err
			}
			if dry {
				t.complete(&h.c.direct)
				return true, nil
			}
			t.wait.reset()
			if direct {
				t.state = collMap
				h.peers.enter()
				t.mapped = true
			} else {
				t.state = collChunk
			}

		case collMap:
			ready, err := t.resolve()
			if !ready || err != nil {
				return false, err
			}
			t.state = collDirect

		case collDirect:
			if !t.work() {
				h.c.dev.Ring() // more to do: the device must not sleep
				return false, nil
			}
			h.arrive()
			t.state = collFinal

		case collFinal:
			if !h.all() {
				return false, t.late()
			}
			t.complete(&h.c.direct)
			return true, nil

		case collChunk:
			if !h.all() {
				return false, t.late()
			}
			t.wait.reset()
			if t.inParts() {
				t.reducePart()
				h.arrive()
				t.state = collParts
				continue
			}
			t.readChunk()
			if t.nextChunk() {
				t.complete(&h.c.staged)
				return true, nil
			}

		case collParts:
			if !h.all() {
				return false, t.late()
			}
			t.wait.reset()
			t.readParts()
			if t.nextChunk() {
				t.complete(&h.c.staged)
				return true, nil
			}
			t.state = collChunk
		}
	}
}

// post publishes the call, with the first chunk where it will be staged.
func (t *collTask) post() {
	h := t.h
	if t.ticket != 0 {
		t.seq, t.slotSub, t.key = t.call.Seq, t.sub, 0
	} else {
		t.seq, t.slotSub, t.key = h.now.seq, h.now.sub, h.now.key
		h.now.sub++
	}
	h.ops++
	s := h.seg.slot(h.rank, h.ops)
	w := packCall(&t.call)
	s[slotCall] = w[0] | t.flags<<24
	s[slotCount] = w[1]
	s[slotSeq], s[slotSub], s[slotKey], s[slotGroup] = t.seq, t.slotSub, t.key, t.group
	s[slotSendMem], s[slotSendOff], s[slotRecvMem], s[slotRecvOff] = 0, t.call.Send.Off, 0, t.call.Recv.Off
	s[slotScalar] = t.scalar
	if t.call.Send.Mem != nil {
		s[slotSendMem] = t.call.Send.Mem.ID()
	}
	if t.call.Recv.Mem != nil {
		s[slotRecvMem] = t.call.Recv.Mem.ID()
	}
	h.touched(unsafe.Slice((*byte)(unsafe.Pointer(s)), 8*slotWords))
	if t.flags&(sendReg|recvReg) == 0 {
		t.writeChunk()
	}
	h.arrive()
}

const slotFlags = 0xff << 24

// compare wants the same call on all members, and all buffers registered or none. dry: the call is the same, but a later one of its group
// is not; nothing moves until that one has told the difference.
func (t *collTask) compare() (direct, dry bool, err error) {
	h := t.h
	own := h.seg.slot(h.rank, h.ops)
	flags := uint64(0)
	bare := false
	same := true
	for r := range h.n {
		s := h.seg.slot(r, h.ops)
		f := s[slotCall] >> 24 & 0xff
		flags |= f
		bare = bare || f&sendUsed != 0 && f&sendReg == 0 || f&recvUsed != 0 && f&recvReg == 0
		same = same && (s[slotCall]^own[slotCall])&^slotFlags == 0 && s[slotCount] == own[slotCount] && s[slotSeq] == own[slotSeq] &&
			s[slotSub] == own[slotSub] && s[slotKey] == own[slotKey]
		dry = dry || s[slotGroup] != own[slotGroup]
	}
	if !same || dry && t.last {
		return false, false, t.mismatch()
	}
	direct = flags&(sendReg|recvReg) != 0
	if direct && bare {
		return false, false, t.mixed()
	}
	return direct, dry, nil
}

// mismatch names the first member that differs from rank 0, so that all give the same text.
func (t *collTask) mismatch() error {
	h := t.h
	a := h.seg.slot(0, h.ops)
	for r := 1; r < h.n; r++ {
		b := h.seg.slot(r, h.ops)
		if (a[slotCall]^b[slotCall])&^slotFlags == 0 && a[slotCount] == b[slotCount] && a[slotSeq] == b[slotSeq] && a[slotSub] == b[slotSub] && a[slotKey] == b[slotKey] {
			continue
		}
		if a[slotSeq] == b[slotSeq] {
			return causef(ErrMismatch, "call #%d: rank %d: %s; rank 0: %s", a[slotSeq], r, slotText(b), slotText(a))
		}
		return causef(ErrMismatch, "rank %d: call #%d, %s; rank 0: call #%d, %s", r, b[slotSeq], slotText(b), a[slotSeq], slotText(a))
	}
	return causef(ErrMismatch, "call #%d: groups of %d and more calls", t.seq, t.slotSub+1)
}

func slotText(s *[slotWords]uint64) string {
	text := unpackCall([2]uint64{s[slotCall] &^ slotFlags, s[slotCount]}).String()
	if s[slotKey] != 0 {
		text += fmt.Sprintf(", call %d in a replay of graph %x", s[slotSub]+1, s[slotKey])
	} else if s[slotSub] != 0 {
		text += fmt.Sprintf(", call %d of its group", s[slotSub]+1)
	}
	return text
}

// mixed names each member's buffers.
func (t *collTask) mixed() error {
	h := t.h
	text := ""
	for r := range h.n {
		s := h.seg.slot(r, h.ops)
		f := s[slotCall] >> 24 & 0xff
		if r > 0 {
			text += "; "
		}
		text += fmt.Sprintf("rank %d: ", r)
		text += bufferText("send", f&sendUsed != 0, f&sendReg != 0, s[slotSendMem], s[slotSendOff])
		if f&sendUsed != 0 && f&recvUsed != 0 {
			text += ", "
		}
		text += bufferText("recv", f&recvUsed != 0, f&recvReg != 0, s[slotRecvMem], s[slotRecvOff])
	}
	return causef(ErrMixed, "call #%d, %v: %s", t.seq, t.call, text)
}

func bufferText(which string, used, registered bool, mem, off uint64) string {
	if !used {
		return ""
	}
	not := "not registered"
	if registered {
		not = "registered"
	}
	return fmt.Sprintf("%s allocation %d at %d %s", which, mem, off, not)
}

// late is called while members are missing: now and then it looks whether they will come.
func (t *collTask) late() error {
	h := t.h
	if !t.wait.look() {
		return nil
	}
	own := t.record()
	if d := t.wait.long(); d > 0 && own.Seq > 0 {
		h.c.acct.SetWait(own.Seq, d)
		h.c.askFar(own.Seq, d)
	}
	for r := range h.n {
		if r == h.rank || h.seg.phase(r).Load() >= h.phase {
			continue
		}
		if err := h.absent(r, own); err != nil {
			return err
		}
	}
	return nil
}

// record is the ledger's record of this run; Seq 0 without one.
func (t *collTask) record() bootstrap.Record {
	if t.seq == 0 {
		return bootstrap.Record{}
	}
	r, ok := t.h.c.acct.At(t.seq)
	if !ok {
		return bootstrap.Record{}
	}
	return r
}

// resolve finds all members' buffers; false while one is being mapped.
func (t *collTask) resolve() (bool, error) {
	h := t.h
	size := uint64(t.call.Type.Size())
	count := t.call.Count * size
	sendLen, recvLen := count, count
	switch t.call.Op {
	case OpAllGather:
		recvLen *= uint64(h.n)
	case OpReduceScatter:
		sendLen *= uint64(h.n)
	}
	ready := true
	for r := range h.n {
		h.srcs[r], h.dsts[r] = nil, nil
		if r == h.rank {
			if t.call.Send.Mem != nil {
				h.srcs[r] = t.call.Send.Bytes()
			}
			if t.call.Recv.Mem != nil {
				h.dsts[r] = t.call.Recv.Bytes()
			}
			continue
		}
		s := h.seg.slot(r, h.ops)
		f := s[slotCall] >> 24 & 0xff
		if f&sendUsed != 0 {
			b, err := t.peer(r, s[slotSendMem], s[slotSendOff], sendLen)
			if err != nil {
				return false, err
			}
			h.srcs[r] = b
			ready = ready && b != nil
		}
		// Only all-reduce and reduce write to others' memory.
		if f&recvUsed != 0 && (t.call.Op == OpAllReduce || t.call.Op == OpReduce) {
			b, err := t.peer(r, s[slotRecvMem], s[slotRecvOff], recvLen)
			if err != nil {
				return false, err
			}
			h.dsts[r] = b
			ready = ready && b != nil
		}
	}
	return ready, nil
}

// peer is a part of a peer's memory, nil while it is being mapped.
func (t *collTask) peer(r int, mem, off, n uint64) ([]byte, error) {
	h := t.h
	var b []byte
	var err error
	sm, rm := t.call.Send.Mem, t.call.Recv.Mem
	switch {
	case sm != nil && rm != nil && sm != rm:
		b, err = h.find(r, mem, sm.ID(), rm.ID())
	case sm != nil:
		b, err = h.find(r, mem, sm.ID())
	default:
		b, err = h.find(r, mem, rm.ID())
	}
	if err != nil || b == nil {
		return nil, err
	}
	if off > uint64(len(b)) || n > uint64(len(b))-off {
		return nil, fmt.Errorf("rank %d: %d bytes at %d of allocation %d, which has %d", r, n, off, mem, len(b))
	}
	return b[off : off+n : off+n], nil
}

// share is rank r's part of count elements: whole cache lines, so that ranks do not write to one line.
func (t *collTask) share(count, r int) (lo, hi int) {
	n, line := t.h.n, max(1, 64/t.call.Type.Size())
	per := (count + n - 1) / n
	per = (per + line - 1) / line * line
	return min(count, r*per), min(count, (r+1)*per)
}

// work does the next piece of this rank's part of a direct call; true when all is done.
func (t *collTask) work() bool {
	h := t.h
	size, count := t.call.Type.Size(), int(t.call.Count)
	step := max(1, stepBytes/size)
	switch t.call.Op {
	case OpAllReduce, OpReduce:
		lo, hi := t.share(count, h.rank)
		lo += t.pos
		end := min(hi, lo+step)
		if lo < end {
			t.reduce(lo*size, end*size)
		}
		t.pos += end - lo
		return end >= hi
	case OpReduceScatter:
		end := min(count, t.pos+step)
		srcs := h.part[:0]
		for r := range h.n {
			at := h.rank*count + t.pos
			srcs = append(srcs, h.srcs[r][at*size:(at+end-t.pos)*size])
		}
		dst := [1][]byte{h.dsts[h.rank][t.pos*size : end*size]}
		t.fold(dst[:], srcs)
		t.pos = end
		return end >= count
	case OpBroadcast:
		end := min(count, t.pos+step)
		t.copy(h.dsts[h.rank][t.pos*size:end*size], h.srcs[t.call.Root][t.pos*size:end*size])
		t.pos = end
		return end >= count
	case OpAllGather:
		// Positions run over all ranks' parts, this rank's neighbour first: not all read from one.
		end := min(count*h.n, t.pos+step)
		for t.pos < end {
			r := (t.pos/count + h.rank + 1) % h.n
			at := t.pos % count
			k := min(count-at, end-t.pos)
			to := (r*count + at) * size
			t.copy(h.dsts[h.rank][to:to+k*size], h.srcs[r][at*size:(at+k)*size])
			t.pos += k
		}
		return end >= count*h.n
	}
	return true
}

// fold combines all members' parts, srcs by rank, into every dst.
func (t *collTask) fold(dsts, srcs [][]byte) {
	h := t.h
	var scalars []uint64
	if t.call.Red > Avg {
		scalars = h.scalars
		for r := range scalars {
			scalars[r] = h.seg.slot(r, h.ops)[slotScalar]
		}
	}
	reduce(t.call.Type, t.call.Red, h.n, scalars, dsts, srcs, h.acc)
}

// reduce combines bytes [lo,hi) of all sends into those recvs that the call has: in all-reduce everybody's, in reduce root's.
func (t *collTask) reduce(lo, hi int) {
	h := t.h
	srcs := h.part[:0]
	for r := range h.n {
		srcs = append(srcs, h.srcs[r][lo:hi])
	}
	out := h.out[:0]
	for r := range h.n {
		if h.dsts[r] != nil {
			out = append(out, h.dsts[r][lo:hi])
		}
	}
	t.fold(out, srcs)
}

// copy leaves out what is in place.
func (t *collTask) copy(dst, src []byte) {
	if len(dst) > 0 && &dst[0] != &src[0] {
		copy(dst, src)
	}
}

// chunkLen is how many elements of the call the next chunk has; of each rank's part for reduce-scatter.
func (t *collTask) chunkLen() int {
	per := stagingHalf
	if t.call.Op == OpReduceScatter {
		per = stagingHalf / t.h.n &^ 63
	}
	return min(int(t.call.Count)-t.pos, per/t.call.Type.Size())
}

// writeChunk puts this rank's share of the next chunk into its staging half.
func (t *collTask) writeChunk() {
	h := t.h
	size, count, n := t.call.Type.Size(), int(t.call.Count), t.chunkLen()
	if n == 0 || t.call.Send.Mem == nil {
		return
	}
	send, half := t.call.Send.Bytes(), h.seg.half(h.rank, h.chunk)
	if t.call.Op != OpReduceScatter {
		copy(half, send[t.pos*size:(t.pos+n)*size])
		h.touched(half[:n*size])
		return
	}
	for r := range h.n {
		at := (r*count + t.pos) * size
		copy(half[r*n*size:(r+1)*n*size], send[at:at+n*size])
	}
	h.touched(half[:h.n*n*size])
}

// readChunk takes what this rank gets out of the members' halves.
func (t *collTask) readChunk() {
	h := t.h
	size, count, n := t.call.Type.Size(), int(t.call.Count), t.chunkLen()
	if n == 0 || t.call.Recv.Mem == nil {
		return
	}
	recv := t.call.Recv.Bytes()
	switch t.call.Op {
	case OpAllReduce, OpReduce:
		srcs := h.part[:0]
		for r := range h.n {
			srcs = append(srcs, h.seg.half(r, h.chunk)[:n*size])
		}
		dst := [1][]byte{recv[t.pos*size : (t.pos+n)*size]}
		t.fold(dst[:], srcs)
	case OpReduceScatter:
		srcs := h.part[:0]
		for r := range h.n {
			srcs = append(srcs, h.seg.half(r, h.chunk)[h.rank*n*size:(h.rank+1)*n*size])
		}
		dst := [1][]byte{recv[t.pos*size : (t.pos+n)*size]}
		t.fold(dst[:], srcs)
	case OpBroadcast:
		copy(recv[t.pos*size:], h.seg.half(int(t.call.Root), h.chunk)[:n*size])
	case OpAllGather:
		for r := range h.n {
			copy(recv[(r*count+t.pos)*size:], h.seg.half(r, h.chunk)[:n*size])
		}
	}
}

// inParts reports whether each member reduces its part of the chunk, for the others to copy.
func (t *collTask) inParts() bool {
	return t.call.Op == OpAllReduce && t.h.n > 2 && t.chunkLen()*t.call.Type.Size() >= partsBytes
}

// reducePart leaves the result of this rank's part in its own half, where nobody else reads that part before it is there.
func (t *collTask) reducePart() {
	h := t.h
	size := t.call.Type.Size()
	lo, hi := t.share(t.chunkLen(), h.rank)
	if lo == hi {
		return
	}
	srcs := h.part[:0]
	for r := range h.n {
		srcs = append(srcs, h.seg.half(r, h.chunk)[lo*size:hi*size])
	}
	dst := [1][]byte{srcs[h.rank]}
	t.fold(dst[:], srcs)
	h.touched(dst[0])
}

func (t *collTask) readParts() {
	h := t.h
	size, n := t.call.Type.Size(), t.chunkLen()
	recv := t.call.Recv.Bytes()
	for r := range h.n {
		lo, hi := t.share(n, r)
		copy(recv[(t.pos+lo)*size:(t.pos+hi)*size], h.seg.half(r, h.chunk)[lo*size:hi*size])
	}
}

// nextChunk publishes the next chunk, or reports that there is none. All members count the same chunks.
func (t *collTask) nextChunk() (done bool) {
	h := t.h
	t.pos += t.chunkLen()
	h.chunk++
	if t.pos >= int(t.call.Count) {
		return true
	}
	t.writeChunk()
	h.arrive()
	return false
}

// complete counts the call and gives the turn on.
func (t *collTask) complete(bytes *atomic.Uint64) {
	h := t.h
	h.c.calls.Add(1)
	bytes.Add(t.call.Send.Len + t.call.Recv.Len)
	if t.ticket != 0 {
		h.turn++
		if t.last {
			h.c.acct.SetDone(t.seq)
		}
	}
	t.finish(true)
	if h.pending.Load() > 0 {
		h.c.dev.Ring() // another stream's task may have the turn now
	}
}

// finish lets go of everything, however the run ended. An eager task that was carried out is another call's after it.
func (t *collTask) finish(reuse bool) {
	h := t.h
	if t.mapped {
		t.mapped = false
		h.leaveMappings()
	}
	if t.ticket == 0 || t.over {
		return
	}
	t.over = true
	if t.sreg != nil {
		t.sreg.leave()
	}
	if t.rreg != nil {
		t.rreg.leave()
	}
	h.pending.Add(-1)
	if reuse {
		h.colls.put(t)
	}
}

// Cancel comes where the stream failed before: the members wait for what will not come. The end of a captured task is told by its replay.
func (t *collTask) Cancel(cause error) {
	if t.ticket != 0 {
		t.h.canceled(t.name(), cause)
	}
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	t.finish(false)
}

// Waiting says what the call waits for.
func (t *collTask) Waiting() string {
	h := t.h
	h.mu.Lock()
	defer h.mu.Unlock()
	text := fmt.Sprintf("%s of %d %v on communicator %s: ", t.name(), t.call.Count, t.call.Type, h.c.name)
	if h.gone {
		return text + "the communicator is closed"
	}
	switch t.state {
	case collTurn:
		return text + "waits for the calls before it"
	case collMap:
		return text + "maps the members' memory"
	case collDirect:
		return text + "works"
	}
	who := ""
	for r := range h.n {
		if r != h.rank && h.seg.phase(r).Load() < h.phase {
			if who != "" {
				who += ", "
			}
			who += h.c.member(r)
		}
	}
	if who == "" {
		return text + "all have come"
	}
	return text + "waits for " + who
}

var (
	_ cuda.Task     = (*collTask)(nil)
	_ cuda.Waiter   = (*collTask)(nil)
	_ cuda.Canceler = (*collTask)(nil)
)
