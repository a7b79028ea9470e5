package cuda

import (
	"math"
	"testing"
	"unsafe"
)

func typeCase[T Element](t *testing.T, v T, want DType, name string, pattern uint64) {
	t.Helper()
	got := DTypeOf[T]()
	if got != want || got.String() != name || got.Size() != int(unsafe.Sizeof(v)) || !got.Valid() {
		t.Errorf("%T: got type %d %q of %d bytes, want %d %q of %d", v, got, got, got.Size(), want, name, unsafe.Sizeof(v))
	}
	if p := patternOf(v); p != pattern {
		t.Errorf("%T: got pattern %#x, want %#x", v, p, pattern)
	}
	if n := testing.AllocsPerRun(100, func() { got = DTypeOf[T]() }); n != 0 {
		t.Errorf("DTypeOf[%T] allocates %v times", v, n)
	}
}

func TestTypes(t *testing.T) {
	typeCase(t, int8(-2), Int8DType, "int8", 0xfe)
	typeCase(t, uint8(7), Uint8DType, "uint8", 7)
	typeCase(t, int32(-1), Int32DType, "int32", 0xffffffff)
	typeCase(t, uint32(9), Uint32DType, "uint32", 9)
	typeCase(t, int64(-1), Int64DType, "int64", math.MaxUint64)
	typeCase(t, uint64(1<<63), Uint64DType, "uint64", 1<<63)
	typeCase(t, float32(1), Float32DType, "float32", 0x3f800000)
	typeCase(t, float64(1), Float64DType, "float64", 0x3ff0000000000000)
	typeCase(t, Float16FromFloat32(1), Float16DType, "float16", 0x3c00)
	typeCase(t, BFloat16FromFloat32(1), BFloat16DType, "bfloat16", 0x3f80)
	typeCase(t, F8E4M3FromFloat32(1), F8E4M3DType, "float8_e4m3", 0x38)
	typeCase(t, F8E5M2FromFloat32(1), F8E5M2DType, "float8_e5m2", 0x3c)
	for _, bad := range []DType{0, F8E5M2DType + 1, 255} {
		if bad.Valid() || bad.Size() != 0 {
			t.Errorf("%s: valid %v, %d bytes", bad, bad.Valid(), bad.Size())
		}
	}
}
