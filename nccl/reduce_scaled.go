package nccl

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
)

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
