package nccl_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// element is a type with what the scalar reference needs.
type element[T cuda.Element] struct {
	of   func(i int) T // small values, so that sums and products stay exact
	fold func(op nccl.RedOp, v []T) T
	sent [11]T // of 1 to 11, made once
}

func (e element[T]) made() element[T] {
	for i := range e.sent {
		e.sent[i] = e.of(i + 1)
	}
	return e
}

func numeric[T cuda.Numeric]() element[T] {
	e := element[T]{
		of: func(i int) T { return T(i) },
		fold: func(op nccl.RedOp, v []T) T {
			acc := v[0]
			for _, x := range v[1:] {
				switch op {
				case nccl.Sum, nccl.Avg:
					acc += x
				case nccl.Prod:
					acc *= x
				case nccl.Min:
					acc = min(acc, x)
				case nccl.Max:
					acc = max(acc, x)
				}
			}
			if op == nccl.Avg {
				acc /= T(len(v))
			}
			return acc
		},
	}
	return e.made()
}

func small[T cuda.Element](to func(float32) T, from func(T) float32) element[T] {
	reference := numeric[float32]()
	e := element[T]{
		of: func(i int) T { return to(float32(i) / 2) },
		fold: func(op nccl.RedOp, v []T) T {
			f := make([]float32, len(v))
			for i := range v {
				f[i] = from(v[i])
			}
			return to(reference.fold(op, f))
		},
	}
	return e.made()
}

// at is element i of what rank r sends in a call.
func (e *element[T]) at(r, salt, i int) T { return e.sent[(r*7+salt*3+i*5)%len(e.sent)] }

// spec is one collective of a test.
type spec struct {
	op      nccl.Op
	red     nccl.RedOp
	count   int
	root    int
	inPlace bool
	salt    int
}

func (s spec) String() string {
	return fmt.Sprintf("%v, %v, count %d, root %d, in place %v", s.op, s.red, s.count, s.root, s.inPlace)
}

// lengths are of send and recv, as parts of the call's count.
func (s spec) lengths(n int) (send, recv int) {
	send, recv = s.count, s.count
	switch s.op {
	case nccl.OpAllGather:
		recv *= n
	case nccl.OpReduceScatter:
		send *= n
	}
	return send, recv
}

// buffers are what a rank sends and receives in, of any type: twice size bytes.
type buffers struct{ send, recv *cuda.Memory }

// place gives a call's slices.
func place[T cuda.Element](b buffers, s spec, rank, n int) (send, recv cuda.Slice[T], err error) {
	sl, rl := s.lengths(n)
	send, err = cuda.SliceOf[T](b.send, 64, sl)
	if err != nil {
		return
	}
	recv, err = cuda.SliceOf[T](b.recv, 128, rl)
	if err != nil || !s.inPlace {
		return
	}
	switch s.op {
	case nccl.OpAllGather:
		send = recv.Slice(rank*s.count, (rank+1)*s.count)
	case nccl.OpReduceScatter:
		recv = send.Slice(rank*s.count, (rank+1)*s.count)
	default:
		recv = send
	}
	return
}

// call enqueues the collective after it has written what this rank sends.
func call[T cuda.Element](w *world, e element[T], b buffers, s spec, st *cuda.Stream) error {
	send, recv, err := place[T](b, s, w.comm.Rank(), w.comm.Size())
	if err != nil {
		return err
	}
	none, mine, zero := recv.Host(), send.Host(), e.of(0)
	for i := range none {
		none[i] = zero
	}
	for i := range mine {
		mine[i] = e.at(w.comm.Rank(), s.salt, i)
	}
	return enqueue(w.comm, s, send, recv, st)
}

func enqueue[T cuda.Element](c *nccl.Comm, s spec, send, recv cuda.Slice[T], st *cuda.Stream) error {
	switch s.op {
	case nccl.OpAllReduce:
		return nccl.AllReduce(c, send, recv, s.red, st)
	case nccl.OpReduce:
		return nccl.Reduce(c, send, recv, s.red, s.root, st)
	case nccl.OpBroadcast:
		return nccl.Broadcast(c, send, recv, s.root, st)
	case nccl.OpAllGather:
		return nccl.AllGather(c, send, recv, st)
	case nccl.OpReduceScatter:
		return nccl.ReduceScatter(c, send, recv, s.red, st)
	}
	return fmt.Errorf("no collective: %v", s.op)
}

// verify compares what this rank has received with the scalar reference.
func verify[T cuda.Element](w *world, e element[T], b buffers, s spec) error {
	n, rank := w.comm.Size(), w.comm.Rank()
	_, recv, err := place[T](b, s, rank, n)
	if err != nil {
		return err
	}
	if s.op == nccl.OpReduce && rank != s.root {
		return nil
	}
	return e.check(s, n, rank, recv.Host())
}

// check compares what a rank of n has received with the scalar reference.
func (e *element[T]) check(s spec, n, rank int, all []T) error {
	v := make([]T, n)
	step := 1
	if raceEnabled {
		step += len(all) / 5000 // the reference is slow there
	}
	for i := 0; i < len(all); i += step {
		got := all[i]
		var want T
		switch s.op {
		case nccl.OpBroadcast:
			want = e.at(s.root, s.salt, i)
		case nccl.OpAllGather:
			want = e.at(i/s.count, s.salt, i%s.count)
		default:
			at := i
			if s.op == nccl.OpReduceScatter {
				at += rank * s.count
			}
			for r := range v {
				v[r] = e.at(r, s.salt, at)
			}
			want = e.fold(s.red, v)
		}
		if got != want {
			return fmt.Errorf("%v of %v: element %d is %v, want %v", s, cuda.DTypeOf[T](), i, got, want)
		}
	}
	return nil
}

// typed is the above for one type, without its name.
type typed struct {
	size   int
	call   func(*world, buffers, spec, *cuda.Stream) error
	verify func(*world, buffers, spec) error
}

func typedOf[T cuda.Element](e element[T]) typed {
	var zero T
	return typed{int(unsafe.Sizeof(zero)),
		func(w *world, b buffers, s spec, st *cuda.Stream) error { return call(w, e, b, s, st) },
		func(w *world, b buffers, s spec) error { return verify(w, e, b, s) }}
}

var types = []typed{
	typedOf(numeric[int8]()), typedOf(numeric[uint8]()), typedOf(numeric[int32]()), typedOf(numeric[uint32]()),
	typedOf(numeric[int64]()), typedOf(numeric[uint64]()), typedOf(numeric[float32]()), typedOf(numeric[float64]()),
	typedOf(small(cuda.Float16FromFloat32, cuda.Float16.Float32)), typedOf(small(cuda.BFloat16FromFloat32, cuda.BFloat16.Float32)),
	typedOf(small(cuda.F8E4M3FromFloat32, cuda.F8E4M3.Float32)), typedOf(small(cuda.F8E5M2FromFloat32, cuda.F8E5M2.Float32)),
}

var collectives = []nccl.Op{nccl.OpAllReduce, nccl.OpReduce, nccl.OpBroadcast, nccl.OpAllGather, nccl.OpReduceScatter}

// openBuffers makes buffers of size bytes, registered or not.
func openBuffers(w *world, size int, registered bool) (b buffers, done func(), err error) {
	var undo []func()
	done = func() {
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i]()
		}
	}
	for _, m := range []**cuda.Memory{&b.send, &b.recv} {
		if *m, err = w.dev.Alloc(uint64(size), cuda.Shareable); err != nil {
			return b, done, err
		}
		undo = append(undo, func() { (*m).Free() })
		if registered {
			r, err := w.comm.Register(*m)
			if err != nil {
				return b, done, err
			}
			undo = append(undo, func() { r.Close() })
		}
	}
	return b, done, nil
}

func rankCounts(t *testing.T) []int {
	if testing.Short() || raceEnabled {
		return []int{1, 2, 3}
	}
	return []int{1, 2, 3, 4, 7}
}

// Every operation with every type and reduction, in and out of place, with small counts; and with counts that take several chunks and shares.
func TestCollectives(t *testing.T) {
	const large = 530 << 10 // three chunks
	for _, n := range rankCounts(t) {
		for _, registered := range []bool{false, true} {
			t.Run(fmt.Sprintf("ranks=%d/registered=%v", n, registered), func(t *testing.T) {
				ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						// The calls of one operation go out together, each in buffers of its own.
						counts := []int{0, 1, 17, 333}
						var sets []buffers
						for range 2 * len(counts) {
							b, done, err := openBuffers(w, 8*333*n+4096, registered)
							defer done()
							if err != nil {
								return err
							}
							sets = append(sets, b)
						}
						big, done, err := openBuffers(w, (large+64)*n+4096, registered)
						defer done()
						if err != nil {
							return err
						}
						salt := 0
						run := func(ty typed, sets []buffers, specs ...spec) error {
							for i := range specs {
								salt++
								specs[i].salt, specs[i].root = salt, salt%n
								if err := ty.call(w, sets[i], specs[i], w.stream); err != nil {
									return fmt.Errorf("%v: %w", specs[i], err)
								}
							}
							if err := w.stream.Synchronize(ctx); err != nil {
								return err
							}
							for i, s := range specs {
								if err := ty.verify(w, sets[i], s); err != nil {
									return err
								}
							}
							return nil
						}
						for i, ty := range types {
							if raceEnabled && i != 2 && i != 8 {
								continue // races do not depend on the type
							}
							for _, op := range collectives {
								for red := nccl.Sum; red <= nccl.Avg; red++ {
									if red > nccl.Sum && (op == nccl.OpBroadcast || op == nccl.OpAllGather) {
										continue
									}
									var specs []spec
									for _, count := range counts {
										specs = append(specs, spec{op: op, red: red, count: count}, spec{op: op, red: red, count: count, inPlace: true})
									}
									if err := run(ty, sets, specs...); err != nil {
										return err
									}
									// Chunks depend on the size of the type only.
									if red > nccl.Sum || i != 2 && i != 7 && i != 8 {
										continue
									}
									for _, inPlace := range []bool{false, true} {
										if err := run(ty, []buffers{big}, spec{op: op, red: red, count: large/ty.size + 3, inPlace: inPlace}); err != nil {
											return err
										}
									}
								}
							}
						}
						st := w.comm.Stats()
						if registered && st.BytesStaged != 0 || !registered && n > 1 && st.BytesDirect != 0 {
							return fmt.Errorf("staged %d bytes and direct %d", st.BytesStaged, st.BytesDirect)
						}
						if st.Calls != uint64(salt) {
							return fmt.Errorf("%d calls counted, want %d", st.Calls, salt)
						}
						return nil
					})
				})
			})
		}
	}
}

// Random sequences on two streams, staged and registered mixed from call to call, synchronized now and then.
func TestRandomSequences(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	ranks := []int{2, 3, 5}
	if raceEnabled {
		ranks = ranks[1:2]
	}
	for _, n := range ranks {
		ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) error { return randomSequences(ctx, job, seed) })
	}
}

// randomSequences is the part of one rank; the seed is the same on all.
func randomSequences(ctx context.Context, job *bootstrap.Job, seed uint64) error {
	const size = 300 << 10
	n := job.Size()
	return with(ctx, job, nil, func(w *world) error {
		rng := rand.New(rand.NewPCG(seed, uint64(n))) // the same on all ranks
		other, err := w.dev.NewStream()
		if err != nil {
			return err
		}
		defer other.Close()
		streams := []*cuda.Stream{w.stream, other}
		var sets []buffers
		for i := range 6 {
			b, done, err := openBuffers(w, size*n+4096, i%2 == 0)
			defer done()
			if err != nil {
				return err
			}
			sets = append(sets, b)
		}
		type pending struct {
			ty typed
			b  buffers
			s  spec
		}
		var all []pending
		calls := 300
		if raceEnabled {
			calls = 120
		}
		for i := range calls {
			ty := types[rng.IntN(len(types))]
			s := spec{op: collectives[rng.IntN(len(collectives))], red: nccl.RedOp(rng.IntN(5)), root: rng.IntN(n), inPlace: rng.IntN(2) == 0, salt: i}
			s.count = rng.IntN(1<<rng.IntN(18)/ty.size*2 + 1)
			if s.count*ty.size > size {
				s.count = size / ty.size
			}
			b := sets[len(all)]
			if err := ty.call(w, b, s, streams[rng.IntN(2)]); err != nil {
				return fmt.Errorf("seed %#x: %v: %w", seed, s, err)
			}
			all = append(all, pending{ty, b, s})
			if len(all) < len(sets) && rng.IntN(4) > 0 {
				continue
			}
			for _, st := range streams {
				if err := st.Synchronize(ctx); err != nil {
					return fmt.Errorf("seed %#x: %w", seed, err)
				}
			}
			for _, p := range all {
				if err := p.ty.verify(w, p.b, p.s); err != nil {
					return fmt.Errorf("seed %#x: %w", seed, err)
				}
			}
			all = all[:0]
		}
		for _, st := range streams {
			if err := st.Synchronize(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}
