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

// firstValues are what a buffer of a rank begins with.
func firstValues(seed uint64, rank, buffer, n int) []int32 {
	rng := rand.New(rand.NewPCG(seed, uint64(1000*rank+buffer)))
	values := make([]int32, n)
	for i := range values {
		values[i] = int32(rng.Uint32())
	}
	return values
}

// contents are the values of a rank's buffers.
type contents [numBuffers][]int32

// reset gives all buffers their first values.
func (m *machine) reset(ctx context.Context, s *cuda.Stream, seed uint64) error {
	for i, b := range m.bufs {
		if err := put(ctx, s, b.All(), firstValues(seed, m.comms[0].Rank(), i, b.Len())); err != nil {
			return err
		}
	}
	return nil
}

func (m *machine) snapshot(ctx context.Context, s *cuda.Stream) (c contents, err error) {
	for i, b := range m.bufs {
		if c[i], err = get(ctx, s, b.All()); err != nil {
			return c, err
		}
	}
	return c, nil
}

// reference is what the program makes of the first values, by rank, computed in one place.
func (p program) reference(seed uint64, ranks int) []contents {
	all := make([]contents, ranks)
	for r := range all {
		for b := range all[r] {
			all[r][b] = firstValues(seed, r, b, p.n)
		}
	}
	world, halves := []int{}, [2][]int{}
	for r := range ranks {
		world = append(world, r)
		halves[r%2] = append(halves[r%2], r)
	}
	for _, st := range p.steps {
		if st.comm == 0 {
			st.apply(all, world)
			continue
		}
		for _, half := range halves {
			st.apply(all, half)
		}
	}
	return all
}

// apply carries a step out for the members of one communicator.
func (st step) apply(all []contents, members []int) {
	size := len(members)
	if size == 0 {
		return
	}
	root := members[int(st.root)%size]
	reduced := func(b int) []int32 {
		v := slices.Clone(all[members[0]][b][:st.n*size])
		for _, r := range members[1:] {
			for i, x := range all[r][b][:st.n*size] {
				switch st.red {
				case nccl.Sum:
					v[i] += x
				case nccl.Prod:
					v[i] *= x
				case nccl.Min:
					v[i] = min(v[i], x)
				case nccl.Max:
					v[i] = max(v[i], x)
				}
			}
		}
		return v
	}
	toAll := func(b int, v []int32) {
		for _, r := range members {
			copy(all[r][b], v)
		}
	}
	broadcast := func(from, to int) { toAll(to, slices.Clone(all[root][from][:st.n*size])) }
	ring := func() {
		sent := make([][]int32, size)
		for i, r := range members {
			sent[i] = slices.Clone(all[r][st.src][:st.n])
		}
		for i, r := range members {
			copy(all[r][(st.src+1)%numBuffers], sent[(i+size-1)%size])
		}
	}
	switch st.op {
	case opAllReduce:
		toAll(st.dst, reduced(st.src))
	case opReduce:
		copy(all[root][st.dst], reduced(st.src))
	case opBroadcast:
		broadcast(st.src, st.dst)
	case opAllGather:
		var v []int32
		for i, r := range members {
			v = append(v, all[r][st.src][st.n*i:st.n*(i+1)]...)
		}
		toAll(st.dst, v)
	case opReduceScatter:
		v := reduced(st.src)
		for i, r := range members {
			copy(all[r][st.dst][st.n*i:], v[st.n*i:st.n*(i+1)])
		}
	case opRing:
		ring()
	case opGroup:
		toAll(st.dst, reduced(st.src))
		broadcast(st.dst, st.src)
	case opMixed:
		ring()
		to := (st.src + 2) % numBuffers
		toAll(to, reduced(to))
	case opCopy:
		for _, r := range members {
			copy(all[r][st.dst], all[r][st.src][:st.n*size])
		}
	case opFill:
		for _, r := range members {
			for i := range st.n {
				all[r][st.dst][i] = int32(st.root)
			}
		}
	}
}

// TestRandomPrograms compares, for random programs, what a captured graph computes, and what the same calls compute without a graph, with what they should.
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
		// One of the buffers is private, on all ranks: calls with it are staged. On GPUs all of them: there both ends of a message have the same kind.
		kind := cuda.Shareable
		if seed%3 == 0 && (i == 1 || r.dev.Platform() != cuda.Host) {
			kind = cuda.Private
		}
		if m.bufs[i], err = cuda.AllocBuffer[int32](r.dev, p.n, kind); err != nil {
			return err
		}
	}
	want := p.reference(seed, r.comm.Size())[r.comm.Rank()]
	// All must have read their buffers before anyone changes them again.
	reset := func() error {
		return errors.Join(r.job.Barrier(ctx), m.reset(ctx, r.stream, seed), r.job.Barrier(ctx))
	}
	look := func(want contents) error {
		got, err := m.snapshot(ctx, r.stream)
		if err != nil {
			return err
		}
		if d := differences(got, want); d != "" {
			return errors.New(d)
		}
		return nil
	}
	if err := errors.Join(reset(), m.run(p, r.stream)); err != nil {
		return fmt.Errorf("eager: %w", err)
	}
	if err := look(want); err != nil {
		return fmt.Errorf("eager run of %+v: %w", p, err)
	}

	// The capture must not run anything.
	if err := reset(); err != nil {
		return err
	}
	first, err := m.snapshot(ctx, r.stream)
	if err != nil {
		return err
	}
	g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return m.run(p, s) }, graphs.Comms(m.comms[:]...))
	if err != nil {
		return err
	}
	if err := look(first); err != nil {
		return fmt.Errorf("the capture changed the buffers: %w", err)
	}
	for i := range 2 {
		if err := errors.Join(reset(), g.Launch(r.stream)); err != nil {
			return fmt.Errorf("replay %d: %w", i, err)
		}
		if err := look(want); err != nil {
			return fmt.Errorf("replay %d of %+v: %w", i, p, err)
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
func differences(got, want contents) string {
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
