package cuda

import (
	"fmt"
	"math"
	"unsafe"
)

// Buffer is a typed allocation.
type Buffer[T Element] struct {
	mem *Memory
	n   int
}

// AllocBuffer makes a zeroed buffer of n elements. The caller frees it.
func AllocBuffer[T Element](d *Device, n int, kind AllocKind) (*Buffer[T], error) {
	size := sizeOf[T]()
	if n < 0 || uint64(n) > math.MaxInt64/size {
		return nil, &Error{Op: "allocate", Err: fmt.Errorf("a buffer of %d elements of %s", n, DTypeOf[T]())}
	}
	m, err := d.Alloc(uint64(n)*size, kind)
	if err != nil {
		return nil, err
	}
	return &Buffer[T]{mem: m, n: n}, nil
}

// Malloc makes a zeroed buffer of n elements in private memory, for everything that is not communicated. The caller frees it.
func Malloc[T Element](d *Device, n int) (*Buffer[T], error) { return AllocBuffer[T](d, n, Private) }

// Len is the number of elements.
func (b *Buffer[T]) Len() int { return b.n }

// Memory is the allocation.
func (b *Buffer[T]) Memory() *Memory { return b.mem }

// All is the whole buffer.
func (b *Buffer[T]) All() Slice[T] { return Slice[T]{mem: b.mem, n: b.n} }

// Slice is elements i to j-1; it panics like a Go slice.
func (b *Buffer[T]) Slice(i, j int) Slice[T] { return b.All().Slice(i, j) }

// Free gives the memory back: see Memory.Free.
func (b *Buffer[T]) Free() error { return b.mem.Free() }

// Slice is a part of device memory as elements; a value, copied freely, that keeps nothing alive. The zero Slice is empty.
type Slice[T Element] struct {
	mem *Memory
	off uint64 // bytes
	n   int
}

// SliceOf makes a slice of any memory: n elements from byte offset off (aligned to T).
func SliceOf[T Element](m *Memory, off uint64, n int) (Slice[T], error) {
	size := sizeOf[T]()
	var err error
	switch {
	case m == nil:
		err = fmt.Errorf("no memory")
	case n < 0:
		err = fmt.Errorf("%d elements", n)
	case off%size != 0:
		err = fmt.Errorf("offset %d in %s is no multiple of the %d bytes of a %s", off, m, size, DTypeOf[T]())
	case off > m.size || uint64(n) > (m.size-off)/size:
		err = fmt.Errorf("%d elements of %s from offset %d are outside the %s", n, DTypeOf[T](), off, m)
	default:
		return Slice[T]{mem: m, off: off, n: n}, nil
	}
	return Slice[T]{}, &Error{Op: "slice", Err: err}
}

func sizeOf[T Element]() uint64 {
	var z T
	return uint64(unsafe.Sizeof(z))
}

// element is the type of the elements, for who knows the Slice by reflection only.
func (s Slice[T]) element() DType { return DTypeOf[T]() }

// Len is the number of elements.
func (s Slice[T]) Len() int { return s.n }

// Memory is the allocation that it is a part of, nil for the zero Slice.
func (s Slice[T]) Memory() *Memory { return s.mem }

// Slice is elements i to j-1; it panics like a Go slice.
func (s Slice[T]) Slice(i, j int) Slice[T] {
	if i < 0 || j < i || j > s.n {
		panic(fmt.Sprintf("cuda: slice bounds out of range [%d:%d] with length %d", i, j, s.n))
	}
	return Slice[T]{mem: s.mem, off: s.off + uint64(i)*sizeOf[T](), n: j - i}
}

// Range is the same part in bytes.
func (s Slice[T]) Range() Range { return Range{Mem: s.mem, Off: s.off, Len: uint64(s.n) * sizeOf[T]()} }

// Host is the memory itself as Go slice; host platform only (it panics on a GPU: use CopyToHost). Touch it only
// when no stream works on it, or inside a kernel's Host function. Memory that was given back panics with ErrIllegalAddress.
// It allocates nothing.
func (s Slice[T]) Host() []T {
	if s.mem == nil {
		return nil
	}
	s.mem.mustBeHost("slice host")
	return unsafe.Slice((*T)(unsafe.Add(s.mem.ptr, s.off)), s.n)
}
