package cuda

import "strconv"

// DType is an element type as NCCL counts them.
type DType uint8

const (
	Int8DType DType = iota + 1
	Uint8DType
	Int32DType
	Uint32DType
	Int64DType
	Uint64DType
	Float16DType
	BFloat16DType
	Float32DType
	Float64DType
	F8E4M3DType
	F8E5M2DType
)

var dtypes = [...]struct {
	name string
	size int
}{
	Int8DType:     {"int8", 1},
	Uint8DType:    {"uint8", 1},
	Int32DType:    {"int32", 4},
	Uint32DType:   {"uint32", 4},
	Int64DType:    {"int64", 8},
	Uint64DType:   {"uint64", 8},
	Float16DType:  {"float16", 2},
	BFloat16DType: {"bfloat16", 2},
	Float32DType:  {"float32", 4},
	Float64DType:  {"float64", 8},
	F8E4M3DType:   {"float8_e4m3", 1},
	F8E5M2DType:   {"float8_e5m2", 1},
}

// Valid reports whether t is one of the constants above.
func (t DType) Valid() bool { return t != 0 && int(t) < len(dtypes) }

// Size is the size of an element in bytes, 0 for an invalid type.
func (t DType) Size() int {
	if !t.Valid() {
		return 0
	}
	return dtypes[t].size
}

// String is the name as programs write it: "float32", "bfloat16", "float8_e4m3".
func (t DType) String() string {
	if !t.Valid() {
		return "dtype(" + strconv.Itoa(int(t)) + ")"
	}
	return dtypes[t].name
}

// Numeric are the element types that Go can calculate with.
type Numeric interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

// Element are all element types.
type Element interface {
	Numeric | Float16 | BFloat16 | F8E4M3 | F8E5M2
}

// DTypeOf is the DType of T. It allocates nothing.
func DTypeOf[T Element]() DType {
	if _, is := any((*T)(nil)).(*float32); is {
		return Float32DType // without the switch's table, which small collectives would wait for
	}
	switch any((*T)(nil)).(type) {
	case *int8:
		return Int8DType
	case *uint8:
		return Uint8DType
	case *int32:
		return Int32DType
	case *uint32:
		return Uint32DType
	case *int64:
		return Int64DType
	case *uint64:
		return Uint64DType
	case *Float16:
		return Float16DType
	case *BFloat16:
		return BFloat16DType
	case *float32:
		return Float32DType
	case *float64:
		return Float64DType
	case *F8E4M3:
		return F8E4M3DType
	default:
		return F8E5M2DType
	}
}
