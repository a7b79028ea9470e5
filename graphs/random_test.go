package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// program is a random sequence of operations on two communicators and two streams, the same on all ranks. Values are int32, whose sums wrap around and
// do not depend on their order.
type program struct {
	steps []step
	n     int // elements of a buffer
}

type step struct {
	op       int
	comm     int  // 0: all ranks, 1: this rank's half
	fork     bool // on the second stream, joined afterwards
	src, dst int
	red      nccl.RedOp
	root     uint32
	n        int
}

const (
	opAllReduce = iota
	opReduce
	opBroadcast
	opAllGather
	opReduceScatter
	opRing  // a group of send and recv
	opGroup // two collectives as one call
	opMixed // a collective, a send and a recv as one call
	opCopy  // on this rank alone
	opFill
	numOps
)

const numBuffers = 4

func randomProgramOf(seed uint64, ranks int) program {
	return randomProgram(rand.New(rand.NewPCG(seed, uint64(ranks))), ranks)
}

func randomProgram(rng *rand.Rand, ranks int) program {
	p := program{n: ranks * (1 + rng.IntN(40))}
	if rng.IntN(8) == 0 {
		p.n = ranks * (20_000 + rng.IntN(1000)) // more than a staging chunk
	}
	for range 2 + rng.IntN(14) {
		s := step{op: rng.IntN(numOps), comm: rng.IntN(2), fork: rng.IntN(3) == 0, src: rng.IntN(numBuffers), dst: rng.IntN(numBuffers),
			red: nccl.RedOp(rng.IntN(4)), root: rng.Uint32(), n: rng.IntN(p.n/ranks + 1)}
		p.steps = append(p.steps, s)
	}
	return p
}

// machine is a rank of the test.
type machine struct {
	comms [2]*nccl.Comm
	side  *cuda.Stream
	begin *cuda.Event
	end   *cuda.Event
	bufs  [numBuffers]*cuda.Buffer[int32]
}

// run enqueues the program.
func (m *machine) run(p program, s *cuda.Stream) error {
	for i, st := range p.steps {
		on := s
		if st.fork {
			if err := errors.Join(s.Record(m.begin), m.side.Wait(m.begin)); err != nil {
				return err
			}
			on = m.side
		}
		if err := m.step(p, st, on); err != nil {
			return fmt.Errorf("step %d, %+v: %w", i, st, err)
		}
		if st.fork {
			if err := errors.Join(m.side.Record(m.end), s.Wait(m.end)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *machine) step(p program, st step, s *cuda.Stream) error {
	c := m.comms[st.comm]
	size := c.Size()
	root := int(st.root) % size
	src, dst := m.bufs[st.src], m.bufs[st.dst]
	// A part of n elements for each rank of the communicator, at the same place in both buffers.
	all := func(b *cuda.Buffer[int32]) cuda.Slice[int32] { return b.Slice(0, st.n*size) }
	part := func(b *cuda.Buffer[int32], i int) cuda.Slice[int32] { return b.Slice(st.n*i, st.n*(i+1)) }
	ring := func() error {
		// What is received must not be what is sent.
		to := m.bufs[(st.src+1)%numBuffers]
		me := c.Rank()
		return errors.Join(nccl.Send(c, part(src, 0), (me+1)%size, s), nccl.Recv(c, part(to, 0), (me+size-1)%size, s))
	}
	switch st.op {
	case opAllReduce:
		return nccl.AllReduce(c, all(src), all(dst), st.red, s)
	case opReduce:
		return nccl.Reduce(c, all(src), all(dst), st.red, root, s)
	case opBroadcast:
		return nccl.Broadcast(c, all(src), all(dst), root, s)
	case opAllGather:
		return nccl.AllGather(c, part(src, c.Rank()), all(dst), s) // in place where src is dst
	case opReduceScatter:
		return nccl.ReduceScatter(c, all(src), part(dst, c.Rank()), st.red, s)
	case opRing:
		return nccl.Group(ring, c)
	case opGroup:
		return nccl.Group(func() error {
			return errors.Join(nccl.AllReduce(c, all(src), all(dst), st.red, s), nccl.Broadcast(c, all(dst), all(src), root, s))
		}, c)
	case opMixed:
		return nccl.Group(func() error {
			to := m.bufs[(st.src+2)%numBuffers]
			return errors.Join(ring(), nccl.AllReduce(c, all(to), all(to), st.red, s))
		}, c)
	case opCopy:
		if st.src == st.dst {
			return nil
		}
		return cuda.Copy(all(dst), all(src), s)
	default:
		return cuda.Fill(part(dst, 0), int32(st.root), s)
	}
}

// reset gives all buffers their first values.
func (m *machine) reset(seed uint64) {
	for i, b := range m.bufs {
		rng := rand.New(rand.NewPCG(seed, uint64(1000*m.comms[0].Rank()+i)))
		for j := range b.All().Host() {
			b.All().Host()[j] = int32(rng.Uint32())
		}
	}
}

func (m *machine) snapshot() [numBuffers][]int32 {
	var s [numBuffers][]int32
	for i, b := range m.bufs {
		s[i] = slices.Clone(b.All().Host())
	}
	return s
}

// TestRandomPrograms compares, for random programs, what a captured graph computes with what the same calls compute without a graph.
func TestRandomPrograms(t *testing.T) {
	seeds := 40
	if testing.Short() {
		seeds = 5
	}
	for _, ranks := range []int{2, 3, 4} {
		for seed := range uint64(seeds) {
			t.Run(fmt.Sprintf("%d ranks, seed %d", ranks, seed), func(t *testing.T) {
				p := randomProgramOf(seed, ranks)
				onRanks(t, ranks, func(ctx context.Context, r *rank) error { return runBoth(ctx, r, p, seed) })
			})
		}
	}
}

func runBoth(ctx context.Context, r *rank, p program, seed uint64) error {
	m := &machine{}
	half, err := r.comm.Split(ctx, r.comm.Rank()%2, r.comm.Rank())
	if err != nil {
		return err
	}
	r.others = append(r.others, half)
	m.comms = [2]*nccl.Comm{r.comm, half}
	if m.side, err = r.dev.NewStream(); err != nil {
		return err
	}
	if m.begin, err = r.dev.NewEvent(); err != nil {
		return err
	}
	if m.end, err = r.dev.NewEvent(); err != nil {
		return err
	}
	for i := range m.bufs {
		// One of the buffers is private, on all ranks: calls with it are staged.
		kind := cuda.Shareable
		if seed%3 == 0 && i == 1 {
			kind = cuda.Private
		}
		if m.bufs[i], err = cuda.AllocBuffer[int32](r.dev, p.n, kind); err != nil {
			return err
		}
	}
	m.reset(seed)
	if err := m.run(p, r.stream); err != nil {
		return fmt.Errorf("eager: %w", err)
	}
	if err := r.stream.Synchronize(ctx); err != nil {
		return fmt.Errorf("eager: %w", err)
	}
	want := m.snapshot()

	// The capture must not run anything.
	m.reset(seed)
	first := m.snapshot()
	g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return m.run(p, s) }, graphs.Comms(m.comms[:]...))
	if err != nil {
		return err
	}
	if d := differences(m.snapshot(), first); d != "" {
		return fmt.Errorf("the capture changed the buffers:\n%s", d)
	}
	for i := range 2 {
		// All must have read their buffers before anyone changes them again.
		if err := r.job.Barrier(ctx); err != nil {
			return err
		}
		m.reset(seed)
		if err := r.job.Barrier(ctx); err != nil {
			return err
		}
		if err := errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
			return fmt.Errorf("replay %d: %w", i, err)
		}
		if d := differences(m.snapshot(), want); d != "" {
			return fmt.Errorf("replay %d of %+v differs from the eager run:\n%s", i, p, d)
		}
	}
	errs := []error{g.Close(), m.side.Close(), m.begin.Close(), m.end.Close()}
	for _, b := range m.bufs {
		errs = append(errs, b.Free())
	}
	for _, c := range m.comms {
		errs = append(errs, c.Drain(ctx), empty(c))
	}
	return errors.Join(errs...)
}

// differences names the first one of each buffer.
func differences(got, want [numBuffers][]int32) string {
	s := ""
	for b := range got {
		for i := range got[b] {
			if got[b][i] != want[b][i] {
				s += fmt.Sprintf("buffer %d, element %d: %d, want %d\n", b, i, got[b][i], want[b][i])
				break
			}
		}
	}
	return s
}
