package nccl

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
)

// accSize is the block that is reduced at once: with the sources' blocks it stays in the first-level cache.
const accSize = 8 << 10

// reduce combines srcs in their order and writes the result to every dst; all have the same length. The first dst may be one
// of srcs, exactly. acc is scratch of accSize bytes. n is the divisor of Avg. With scalars, elements in the low bytes, it is the sum of srcs, each times
// its scalar, whatever op is.
func reduce(t cuda.DType, op RedOp, n int, scalars []uint64, dsts, srcs [][]byte, acc []byte) {
	switch t {
	case cuda.Int8DType:
		numeric[int8](op, n, scalars, dsts, srcs, acc)
	case cuda.Uint8DType:
		numeric[uint8](op, n, scalars, dsts, srcs, acc)
	case cuda.Int32DType:
		numeric[int32](op, n, scalars, dsts, srcs, acc)
	case cuda.Uint32DType:
		numeric[uint32](op, n, scalars, dsts, srcs, acc)
	case cuda.Int64DType:
		numeric[int64](op, n, scalars, dsts, srcs, acc)
	case cuda.Uint64DType:
		numeric[uint64](op, n, scalars, dsts, srcs, acc)
	case cuda.Float32DType:
		numeric[float32](op, n, scalars, dsts, srcs, acc)
	case cuda.Float64DType:
		numeric[float64](op, n, scalars, dsts, srcs, acc)
	case cuda.Float16DType:
		small(op, n, scalars, dsts, srcs, acc, cuda.Float16.Float32, cuda.Float16FromFloat32)
	case cuda.BFloat16DType:
		small(op, n, scalars, dsts, srcs, acc, cuda.BFloat16.Float32, cuda.BFloat16FromFloat32)
	case cuda.F8E4M3DType:
		small(op, n, scalars, dsts, srcs, acc, cuda.F8E4M3.Float32, cuda.F8E4M3FromFloat32)
	case cuda.F8E5M2DType:
		small(op, n, scalars, dsts, srcs, acc, cuda.F8E5M2.Float32, cuda.F8E5M2FromFloat32)
	}
}

func numeric[T cuda.Numeric](op RedOp, n int, scalars []uint64, dsts, srcs [][]byte, acc []byte) {
	if scalars != nil {
		scaledNumeric[T](scalars, dsts, srcs, acc)
	} else {
		reduceNumeric[T](op, n, dsts, srcs, acc)
	}
}

func small[T any](op RedOp, n int, scalars []uint64, dsts, srcs [][]byte, acc []byte, decode func(T) float32, encode func(float32) T) {
	if scalars != nil {
		scaledSmall(scalars, dsts, srcs, acc, decode, encode)
	} else {
		reduceSmall(op, n, dsts, srcs, acc, decode, encode)
	}
}

// view is memory as elements. The memory is aligned for T: allocations are to the page, slices to their type.
func view[T any](b []byte) []T {
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

func reduceNumeric[T cuda.Numeric](op RedOp, n int, dsts, srcs [][]byte, acc []byte) {
	tmp := view[T](acc)
	total := len(view[T](srcs[0]))
	for lo := 0; lo < total; lo += len(tmp) {
		hi := min(total, lo+len(tmp))
		out := view[T](dsts[0])[lo:hi]
		last := len(srcs) - 1
		if last == 0 {
			copy(out, view[T](srcs[0])[lo:hi])
		}
		// All but the last are combined aside: out may be one of the sources.
		sum := view[T](srcs[0])[lo:hi]
		for i := 1; i <= last; i++ {
			dst := tmp[:hi-lo]
			if i == last {
				dst = out
			}
			combine(op, dst, sum, view[T](srcs[i])[lo:hi])
			sum = dst
		}
		if op == Avg {
			divide(out, n)
		}
		for _, d := range dsts[1:] {
			copy(view[T](d)[lo:hi], out)
		}
	}
}

// combine is dst = a op b; dst may be a or b.
func combine[T cuda.Numeric](op RedOp, dst, a, b []T) {
	a, b = a[:len(dst)], b[:len(dst)]
	switch op {
	case Sum, Avg:
		for len(dst) >= 8 {
			d, x, y := dst[:8:8], a[:8:8], b[:8:8]
			d[0] = x[0] + y[0]
			d[1] = x[1] + y[1]
			d[2] = x[2] + y[2]
			d[3] = x[3] + y[3]
			d[4] = x[4] + y[4]
			d[5] = x[5] + y[5]
			d[6] = x[6] + y[6]
			d[7] = x[7] + y[7]
			dst, a, b = dst[8:], a[8:], b[8:]
		}
		for i := range dst {
			dst[i] = a[i] + b[i]
		}
	case Prod:
		for i := range dst {
			dst[i] = a[i] * b[i]
		}
	case Min:
		for i := range dst {
			x, y := a[i], b[i]
			if y < x || x != x { // a number rather than a NaN
				x = y
			}
			dst[i] = x
		}
	case Max:
		for i := range dst {
			x, y := a[i], b[i]
			if y > x || x != x {
				x = y
			}
			dst[i] = x
		}
	}
}

// divide is Avg's end: of integers towards zero.
func divide[T cuda.Numeric](x []T, n int) {
	if unsafe.Sizeof(T(0)) == 1 { // n may not fit into T
		for i := range x {
			x[i] = T(int32(x[i]) / int32(n))
		}
		return
	}
	d := T(n)
	for i := range x {
		x[i] /= d
	}
}

// reduceSmall is reduceNumeric for floats that Go cannot calculate with: in float32, rounded once.
func reduceSmall[T any](op RedOp, n int, dsts, srcs [][]byte, acc []byte, decode func(T) float32, encode func(float32) T) {
	half := len(acc) / 8
	sum, next := view[float32](acc)[:half], view[float32](acc)[half:2*half]
	total := len(view[T](srcs[0]))
	for lo := 0; lo < total; lo += half {
		hi := min(total, lo+half)
		sum, next := sum[:hi-lo], next[:hi-lo]
		for i, v := range view[T](srcs[0])[lo:hi] {
			sum[i] = decode(v)
		}
		for _, s := range srcs[1:] {
			for i, v := range view[T](s)[lo:hi] {
				next[i] = decode(v)
			}
			combine(op, sum, sum, next)
		}
		if op == Avg {
			divide(sum, n)
		}
		out := view[T](dsts[0])[lo:hi]
		for i, v := range sum {
			out[i] = encode(v)
		}
		for _, d := range dsts[1:] {
			copy(view[T](d)[lo:hi], out)
		}
	}
}
