package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync/atomic"
	"testing"
	"unsafe"
)

// The kernel of package nccl's small collectives, as the library of testdata does it, and, where the package has it built for GPUs, as they do:
// both must give what this file reckons.

// peerArgs is gorun_peer_args of nccl/peer.cu.
type peerArgs struct {
	send, recv, bytes, counts, stop uint64
	bufs                            [8]uint64
	rank, ranks, root               int32
	op, red, typ                    int32
	per, capacity                   int32
}

const (
	peerAllReduce = 1 + iota
	peerReduce
	peerBroadcast
	peerAllGather
	peerReduceScatter
)

const (
	peerSum = iota
	peerProd
	peerMin
	peerMax
)

const (
	peerBlocks = 64
	peerLines  = 32 // of a block, and room for so many
	peerRoom   = 4096
)

func peerKernel(t testing.TB, d *Device) *Kernel[peerArgs] {
	t.Helper()
	ptx := "// .visible .entry gorun_peer"
	if !onFake() {
		text, err := os.ReadFile("../nccl/peer.ptx")
		if err != nil {
			t.Fatal(err)
		}
		if d.Platform() != CUDA {
			t.Skip("PTX is NVIDIA's")
		}
		ptx = string(text)
	}
	k, err := NewKernel(d, KernelSpec[peerArgs]{Name: "gorun_peer", PTX: ptx})
	check(t, err)
	return k
}

// peerRank is one of the ranks, all of this process.
type peerRank struct {
	d          *Device
	s          *Stream
	k          *Kernel[peerArgs]
	send, recv *Buffer[uint8]
	counts     *Buffer[uint32]
	stop       *Pinned
	args       peerArgs
}

// newPeers makes ranks that map each other's buffers, on all devices that there are.
func newPeers(t *testing.T, n int) []*peerRank {
	t.Helper()
	var peers []*peerRank
	var fds []int
	const bytes = peerBlocks * peerLines * 16
	for r := range n {
		p := &peerRank{}
		if r == 0 {
			p.d = openGPU(t)
		} else {
			var err error
			p.d, err = Open(otherDevice(peers[r-1].d))
			check(t, err)
			t.Cleanup(func() { check(t, p.d.Close()) })
		}
		p.s, p.k = newStream(t, p.d), peerKernel(t, p.d)
		p.send, p.recv = malloc[uint8](t, p.d, n*peerRoom+8), malloc[uint8](t, p.d, n*peerRoom+8)
		p.counts = malloc[uint32](t, p.d, peerBlocks+1)
		p.args = peerArgs{counts: uint64(p.counts.Memory().Pointer()), rank: int32(r), ranks: int32(n), per: peerLines, capacity: peerLines}
		var err error
		p.stop, err = p.d.AllocPinned(4)
		check(t, err)
		t.Cleanup(func() { check(t, p.stop.Close()) })
		p.args.stop = uint64(p.stop.Pointer())
		buf := shareable[uint8](t, p.d, 2*n*bytes)
		p.args.bufs[r] = uint64(buf.Memory().Pointer())
		// What a GPU loads at the first launch must not wait for kernels that wait for this one.
		first := p.args
		first.bytes, first.op, first.typ, first.red = 8, peerAllGather, int32(Uint8DType), peerSum
		first.send, first.recv = uint64(p.send.Memory().Pointer()), uint64(p.recv.Memory().Pointer())
		for i := range n {
			first.bufs[i] = uint64(shareable[uint8](t, p.d, 2*n*bytes).Memory().Pointer())
		}
		p.stop.Words()[0] = 1
		check(t, p.k.Launch(p.s, Grid{N: 32, Block: 32}, first))
		check(t, Fill(p.counts.All(), 0, p.s))
		check(t, p.s.Synchronize(testContext(t)))
		p.stop.Words()[0] = 0
		fd, err := buf.Memory().ExportFD()
		check(t, err)
		f := os.NewFile(uintptr(fd), "buffer")
		t.Cleanup(func() { f.Close() })
		fds, peers = append(fds, fd), append(peers, p)
	}
	for r, p := range peers {
		for other, fd := range fds {
			if other == r {
				continue
			}
			i, err := p.d.ImportFD(fd, uint64(2*n*bytes))
			check(t, err)
			t.Cleanup(func() { check(t, i.Close()) })
			p.args.bufs[other] = uint64(i.Pointer())
		}
	}
	// Whatever fails, no kernel goes on waiting.
	t.Cleanup(func() {
		for _, p := range peers {
			atomic.StoreUint32(&p.stop.Words()[0], 1)
		}
	})
	return peers
}

// peerCall is a collective.
type peerCall struct {
	op, red, root int32
	typ           DType
	n             int // elements of a part
	off           int // where messages begin in their buffers: on a GPU it is a matter of alignment
	inPlace       bool
}

func (c peerCall) String() string {
	names := [...]string{peerAllReduce: "all-reduce", peerReduce: "reduce", peerBroadcast: "broadcast", peerAllGather: "all-gather", peerReduceScatter: "reduce-scatter"}
	return fmt.Sprintf("%s of %d x %s, reduction %d, root %d, at %d, in place %t", names[c.op], c.n, c.typ, c.red, c.root, c.off, c.inPlace)
}

func (c peerCall) bytes() int { return c.n * int(c.typ.Size()) }

// launch enqueues a rank's part.
func (p *peerRank) launch(c peerCall) error {
	a := p.args
	a.op, a.red, a.typ, a.root, a.bytes = c.op, c.red, int32(c.typ), c.root, uint64(c.bytes())
	a.send = uint64(p.send.Memory().Pointer()) + uint64(c.off)
	a.recv = uint64(p.recv.Memory().Pointer()) + uint64(c.off)
	if c.inPlace {
		a.recv = a.send
	}
	lines := (c.bytes() + 7) / 8
	const threads = 32 // fewer than lines, and as many
	return p.k.Launch(p.s, Grid{N: (lines + peerLines - 1) / peerLines * threads, Block: threads}, a)
}

// want is what a rank must have in its receive buffer, which held old.
func (c peerCall) want(rank int, sent [][]byte, old []byte) []byte {
	out := bytes.Clone(old)
	part := func(r, i int) []byte { return sent[r][c.off+i*c.bytes():][:c.bytes()] }
	to := out[c.off:]
	parts := func(i int) (all [][]byte) {
		for r := range sent {
			all = append(all, part(r, i))
		}
		return all
	}
	switch c.op {
	case peerBroadcast:
		copy(to, part(int(c.root), 0))
	case peerAllGather:
		for r := range sent {
			copy(to[r*c.bytes():], part(r, 0))
		}
	case peerReduceScatter:
		copy(to, fold(c.typ, c.red, parts(rank)))
	default:
		if c.op == peerAllReduce || rank == int(c.root) {
			copy(to, fold(c.typ, c.red, parts(0)))
		}
	}
	return out
}

type number interface {
	~int8 | ~uint8 | ~int32 | ~uint32 | ~int64 | ~uint64 | ~float32 | ~float64
}

func numbers[T any](b []byte) []T {
	out := make([]T, len(b)/int(unsafe.Sizeof(*new(T))))
	copy(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(out))), len(b)), b)
	return out
}

func bytesOf[T any](v []T) []byte {
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(v[0]))))
}

func foldNumbers[T number](red int32, parts [][]T) []T {
	out := parts[0]
	for _, part := range parts[1:] {
		for i, y := range part {
			x := out[i]
			switch {
			case red == peerSum:
				x += y
			case red == peerProd:
				x *= y
			case x != x:
				x = y
			case y != y: // of a number and a NaN the number
			case red == peerMin:
				x = min(x, y)
			default:
				x = max(x, y)
			}
			out[i] = x
		}
	}
	return out
}

func foldBytes[T number](red int32, parts [][]byte) []byte {
	var all [][]T
	for _, b := range parts {
		all = append(all, numbers[T](b))
	}
	return bytesOf(foldNumbers(red, all))
}

// fold16 adds 16-bit floats as float, and rounds once.
func fold16[T any](red int32, parts [][]byte, widen func(T) float32, narrow func(float32) T) []byte {
	var all [][]float32
	for _, b := range parts {
		var wide []float32
		for _, v := range numbers[T](b) {
			wide = append(wide, widen(v))
		}
		all = append(all, wide)
	}
	var out []T
	for _, f := range foldNumbers(red, all) {
		out = append(out, narrow(f))
	}
	return bytesOf(out)
}

func fold(typ DType, red int32, parts [][]byte) []byte {
	switch typ {
	case Int8DType:
		return foldBytes[int8](red, parts)
	case Uint8DType:
		return foldBytes[uint8](red, parts)
	case Int32DType:
		return foldBytes[int32](red, parts)
	case Uint32DType:
		return foldBytes[uint32](red, parts)
	case Int64DType:
		return foldBytes[int64](red, parts)
	case Uint64DType:
		return foldBytes[uint64](red, parts)
	case Float16DType:
		return fold16(red, parts, Float16.Float32, Float16FromFloat32)
	case BFloat16DType:
		return fold16(red, parts, BFloat16.Float32, BFloat16FromFloat32)
	case Float32DType:
		return foldBytes[float32](red, parts)
	default:
		return foldBytes[float64](red, parts)
	}
}

// isNaN tells of the element with number i in the message.
func isNaN(typ DType, b []byte, i int) bool {
	at := b[i*int(typ.Size()):][:typ.Size()]
	var f float32
	switch typ {
	case Float16DType:
		f = numbers[Float16](at)[0].Float32()
	case BFloat16DType:
		f = numbers[BFloat16](at)[0].Float32()
	case Float32DType:
		f = numbers[float32](at)[0]
	case Float64DType:
		return math.IsNaN(numbers[float64](at)[0])
	}
	return f != f
}

// differ finds the first element that is not the same; -1: none. NaNs are the same.
func (c peerCall) differ(got, want []byte) int {
	size := int(c.typ.Size())
	got, want = got[c.off:], want[c.off:]
	for i := 0; (i+1)*size <= len(got); i++ {
		if !bytes.Equal(got[i*size:][:size], want[i*size:][:size]) && !(isNaN(c.typ, got, i) && isNaN(c.typ, want, i)) {
			return i
		}
	}
	return -1
}

// fillSend gives half of the elements any bits, and half small numbers.
func (c peerCall) fillSend(rng *rand.Rand, b []byte) {
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	size := int(c.typ.Size())
	for at := c.off; at+size <= len(b); at += 2 * size {
		f := float32(rng.IntN(64)-32) / 8
		if rng.IntN(4) == 0 { // zeros of both signs, and what adds up to the first number that 16 bits have no place for
			f = []float32{0, float32(math.Copysign(0, -1)), 65504, 16}[rng.IntN(4)]
		}
		var v []byte
		switch c.typ {
		case Float16DType:
			v = bytesOf([]Float16{Float16FromFloat32(f)})
		case BFloat16DType:
			v = bytesOf([]BFloat16{BFloat16FromFloat32(f)})
		case Float32DType:
			v = bytesOf([]float32{f})
		case Float64DType:
			v = bytesOf([]float64{float64(f)})
		}
		copy(b[at:], v)
	}
}

// run does a call on all ranks, by what launch enqueues on each rank's stream, and compares.
func runPeers(t *testing.T, peers []*peerRank, rng *rand.Rand, c peerCall, launch func(*peerRank) error) {
	t.Helper()
	ctx := testContext(t)
	sent := make([][]byte, len(peers))
	old := bytes.Repeat([]byte{0xcc}, peers[0].recv.Len())
	for r, p := range peers {
		sent[r] = make([]byte, p.send.Len())
		c.fillSend(rng, sent[r])
		check(t, errors.Join(CopyToDevice(p.send.All(), sent[r], p.s), CopyToDevice(p.recv.All(), old, p.s), p.s.Synchronize(ctx)))
	}
	for _, p := range peers {
		check(t, launch(p))
	}
	for r, p := range peers {
		if err := p.s.Synchronize(ctx); err != nil {
			t.Fatalf("%s: rank %d: %v", c, r, err)
		}
	}
	for r, p := range peers {
		got, want := fetch(t, p.s, p.recv.All()), c.want(r, sent, old)
		if c.inPlace {
			got, want = fetch(t, p.s, p.send.All()), c.want(r, sent, sent[r])
		}
		if i := c.differ(got, want); i >= 0 {
			size := int(c.typ.Size())
			at := c.off + i*size
			t.Fatalf("%s: rank %d: element %d is %x, want %x", c, r, i, got[at:][:size], want[at:][:size])
		}
	}
}

func TestGPUPeerKernel(t *testing.T) {
	for _, n := range []int{2, 3, 8} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			peers := newPeers(t, n)
			rng := rand.New(rand.NewPCG(1, uint64(n)))
			do := func(c peerCall) {
				t.Helper()
				runPeers(t, peers, rng, c, func(p *peerRank) error { return p.launch(c) })
			}
			k := 0
			for typ := Int8DType; typ <= Float64DType; typ++ {
				size := int(typ.Size())
				next := func(op, red int32) {
					t.Helper()
					if k++; n == 8 && k%4 != 1 {
						return // many ranks take their time on few cores
					}
					do(peerCall{op: op, red: red, root: int32(k % n), typ: typ, n: []int{1, 3, 37, 300, 501}[k%5], off: k % 2 * size,
						inPlace: k%3 == 0 && op != peerAllGather && op != peerReduceScatter})
				}
				for red := int32(peerSum); red <= peerMax; red++ {
					for _, op := range []int32{peerAllReduce, peerReduce, peerReduceScatter} {
						next(op, red)
					}
				}
				next(peerBroadcast, peerSum)
				next(peerAllGather, peerSum)
			}
			do(peerCall{op: peerAllGather, typ: Uint8DType, n: peerRoom - 1})

			// Ranks do not wait for each other more than they must.
			for op := int32(peerAllReduce); op <= peerReduceScatter; op++ {
				c := peerCall{op: op, typ: Int32DType, n: 300}
				runPeers(t, peers, rng, c, func(p *peerRank) (err error) {
					for range 20 {
						err = errors.Join(err, p.launch(c))
					}
					return err
				})
			}

			// In graphs, and beside ordinary calls.
			c := peerCall{op: peerAllReduce, red: peerSum, typ: Float32DType, n: 300}
			var execs []*GraphExec
			for _, p := range peers {
				g, err := captured(t, p.s, func() { check(t, p.launch(c)) })
				check(t, err)
				e := must(g.Instantiate())
				t.Cleanup(func() { check(t, errors.Join(e.Destroy(), g.Destroy())) })
				execs = append(execs, e)
			}
			for range 3 {
				runPeers(t, peers, rng, c, func(p *peerRank) error { return execs[p.args.rank].Launch(p.s) })
				do(c)
			}
		})
	}
}

// TestGPUPeerKernelStop has a rank wait for one that does not come.
func TestGPUPeerKernelStop(t *testing.T) {
	peers := newPeers(t, 2)
	p := peers[0]
	c := peerCall{op: peerAllReduce, typ: Int32DType, n: 100}
	check(t, p.launch(c))
	if done, err := p.s.Query(); done || err != nil {
		t.Errorf("done %t, %v: it did not wait for its peer", done, err)
	}
	atomic.StoreUint32(&p.stop.Words()[0], 1)
	check(t, p.s.Synchronize(testContext(t)))
	for _, v := range fetch(t, p.s, p.recv.Slice(0, 400)) {
		if v != 0 {
			t.Fatal("it has written a result")
		}
	}
	if onFake() { // a GPU has no arguments that are wrong
		for _, c := range []peerCall{{op: 6, typ: Int32DType, n: 1}, {op: peerReduce, red: 4, typ: Int32DType, n: 1}} {
			wantText(t, p.launch(c), "LaunchKernel")
		}
	}
}
