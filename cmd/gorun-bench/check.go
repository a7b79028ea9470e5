package main

import (
	"context"

	"github.com/gorun-dev/gorun/cuda"
)

// pattern is the value of a rank's element i, from 0 to m-1: another for each rank and place.
func pattern(rank, i, m int) int {
	h := uint32(i+1)*2654435761 ^ uint32(rank+1)*2246822519
	h ^= h >> 15
	h *= 2246822519
	return int(h>>8) % m
}

// modulus keeps sums over all ranks exact in every type: int8 goes to 127, bfloat16 counts to 256.
func modulus(ranks int) int {
	if ranks <= 25 {
		return 6
	}
	return 2
}

// partOf is how many elements an operation has of each rank, which is NCCL's count, where so many are sent and received.
func partOf(op string, send, recv, ranks int) int {
	if op == "all-to-all" {
		return send / ranks
	}
	return min(send, recv)
}

// hasResult reports whether a rank has a result.
func hasResult(op string, rank, root int) bool {
	return rank == root || op != "reduce" && op != "gather"
}

// want is element i of a rank's result.
func want(op, red string, rank, root, ranks, part, i int) int {
	m := modulus(ranks)
	switch op {
	case "all-gather", "gather":
		return pattern(i/part, i%part, m)
	case "broadcast":
		return pattern(root, i, m)
	case "sendrecv":
		return pattern((rank+ranks-1)%ranks, i, m)
	case "scatter":
		return pattern(root, rank*part+i, m)
	case "all-to-all":
		return pattern(i/part, rank*part+i%part, m)
	case "reduce-scatter":
		i += rank * part
	}
	v := pattern(0, i, m)
	for r := 1; r < ranks; r++ {
		x := pattern(r, i, m)
		switch red {
		case "sum":
			v += x
		case "min":
			v = min(v, x)
		case "max":
			v = max(v, x)
		}
	}
	return v
}

// values are the numbers 0 to n as elements.
func values[T cuda.Element](n int) []T {
	v := make([]T, n+1)
	switch v := any(v).(type) {
	case []int8:
		fill(v)
	case []uint8:
		fill(v)
	case []int32:
		fill(v)
	case []uint32:
		fill(v)
	case []int64:
		fill(v)
	case []uint64:
		fill(v)
	case []float32:
		fill(v)
	case []float64:
		fill(v)
	case []cuda.Float16:
		for i := range v {
			v[i] = cuda.Float16FromFloat32(float32(i))
		}
	case []cuda.BFloat16:
		for i := range v {
			v[i] = cuda.BFloat16FromFloat32(float32(i))
		}
	}
	return v
}

func fill[T cuda.Numeric](v []T) {
	for i := range v {
		v[i] = T(i)
	}
}

// checkCall runs the call on known data and returns how many elements are wrong on all ranks. Calls in a graph out of place come to the
// same however often they run; in place, the check is a single call.
func checkCall[T cuda.Element](ctx context.Context, c *call[T], enqueue func() error) (int, error) {
	b, s, send, recv := c.b, c.s, c.m.send[0], c.m.recv[0]
	rank, ranks := b.comm.Rank(), b.comm.Size()
	m := modulus(ranks)
	number := values[T]((m - 1) * ranks)
	if s.inPlace && s.captured && b.perGraph > 1 {
		g, err := c.capture(ctx, 1)
		if err != nil {
			return 0, err
		}
		defer g.Close()
		enqueue = func() error { return g.Launch(b.stream) }
	}
	data := make([]T, send.Len())
	for i := range data {
		data[i] = number[pattern(rank, i, m)]
	}
	got := make([]T, recv.Len())
	if err := b.stream.Memset(recv.Range(), 0x55); err != nil { // what a call leaves out is seen
		return 0, err
	}
	if err := cuda.CopyToDevice(send, data, b.stream); err != nil {
		return 0, err
	}
	if err := enqueue(); err != nil {
		return 0, err
	}
	if err := cuda.CopyToHost(got, recv, b.stream); err != nil {
		return 0, err
	}
	if err := b.stream.Synchronize(ctx); err != nil {
		return 0, err
	}
	part := partOf(s.op, send.Len(), recv.Len(), ranks)
	wrong := 0
	if hasResult(s.op, rank, b.root) {
		wrong = countWrong(got, func(i int) T { return number[want(s.op, b.red, rank, b.root, ranks, part, i)] })
	}
	all, err := b.gather(ctx, []float64{float64(wrong)})
	if err != nil {
		return 0, err
	}
	sum := 0.0
	for _, w := range all[0] {
		sum += w
	}
	return int(sum), nil
}

func countWrong[T cuda.Element](got []T, want func(i int) T) int {
	wrong := 0
	for i := range got {
		if got[i] != want(i) {
			wrong++
		}
	}
	return wrong
}
