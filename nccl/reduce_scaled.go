package nccl

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
)

// reduceScaled writes the sum of srcs, each times its scalar, to every dst; otherwise as reduce. scalars are elements in the low bytes.
func reduceScaled(t cuda.DType, scalars []uint64, dsts, srcs [][]byte, acc []byte) {
	switch t {
	case cuda.Int8DType:
		scaledNumeric[int8](scalars, dsts, srcs, acc)
	case cuda.Uint8DType:
		scaledNumeric[uint8](scalars, dsts, srcs, acc)
	case cuda.Int32DType:
		scaledNumeric[int32](scalars, dsts, srcs, acc)
	case cuda.Uint32DType:
		scaledNumeric[uint32](scalars, dsts, srcs, acc)
	case cuda.Int64DType:
		scaledNumeric[int64](scalars, dsts, srcs, acc)
	case cuda.Uint64DType:
		scaledNumeric[uint64](scalars, dsts, srcs, acc)
	case cuda.Float32DType:
		scaledNumeric[float32](scalars, dsts, srcs, acc)
	case cuda.Float64DType:
		scaledNumeric[float64](scalars, dsts, srcs, acc)
	case cuda.Float16DType:
		scaledSmall(scalars, dsts, srcs, acc, cuda.Float16.Float32, cuda.Float16FromFloat32)
	case cuda.BFloat16DType:
		scaledSmall(scalars, dsts, srcs, acc, cuda.BFloat16.Float32, cuda.BFloat16FromFloat32)
	case cuda.F8E4M3DType:
		scaledSmall(scalars, dsts, srcs, acc, cuda.F8E4M3.Float32, cuda.F8E4M3FromFloat32)
	case cuda.F8E5M2DType:
		scaledSmall(scalars, dsts, srcs, acc, cuda.F8E5M2.Float32, cuda.F8E5M2FromFloat32)
	}
}

func scalarOf[T any](bits uint64) T { return *(*T)(unsafe.Pointer(&bits)) }

func scaledNumeric[T cuda.Numeric](scalars []uint64, dsts, srcs [][]byte, acc []byte) {
	tmp := view[T](acc)
	total := len(view[T](srcs[0]))
	for lo := 0; lo < total; lo += len(tmp) {
		hi := min(total, lo+len(tmp))
		sum := tmp[:hi-lo]
		for i, src := range srcs {
			k, x := scalarOf[T](scalars[i]), view[T](src)[lo:hi]
			if i == 0 {
				for j, v := range x {
					sum[j] = v * k
				}
				continue
			}
			for j, v := range x {
				sum[j] += T(v * k) // rounded before it is added, on every machine
			}
		}
		for _, d := range dsts {
			copy(view[T](d)[lo:hi], sum)
		}
	}
}

func scaledSmall[T any](scalars []uint64, dsts, srcs [][]byte, acc []byte, decode func(T) float32, encode func(float32) T) {
	sum := view[float32](acc)
	total := len(view[T](srcs[0]))
	for lo := 0; lo < total; lo += len(sum) {
		hi := min(total, lo+len(sum))
		sum := sum[:hi-lo]
		for i, src := range srcs {
			k, x := decode(scalarOf[T](scalars[i])), view[T](src)[lo:hi]
			if i == 0 {
				for j, v := range x {
					sum[j] = decode(v) * k
				}
				continue
			}
			for j, v := range x {
				sum[j] += float32(decode(v) * k)
			}
		}
		out := view[T](dsts[0])[lo:hi]
		for j, v := range sum {
			out[j] = encode(v)
		}
		for _, d := range dsts[1:] {
			copy(view[T](d)[lo:hi], out)
		}
	}
}
