package cuda

import (
	"math"
	"strconv"
)

// Float16 (IEEE 754 binary16), BFloat16, F8E4M3 and F8E5M2 (OCP 8-bit formats) are structs so that a+b on their
// bits does not compile. Converting to float32 is exact; converting from it rounds to nearest, ties to even,
// and keeps the sign, also of zero and NaN (which becomes a quiet one).
//
// The 8-bit formats saturate: what is beyond their range, infinity included, becomes the largest finite value
// (448 and 57344), as CUDA converts by default. E4M3 has no infinity; E5M2 has one, which only bits can make.
type (
	Float16  struct{ bits uint16 }
	BFloat16 struct{ bits uint16 }
	F8E4M3   struct{ bits uint8 }
	F8E5M2   struct{ bits uint8 }
)

const (
	signBit = 1 << 31
	infBits = 0x7f800000
)

// narrow rounds the finite magnitude a (float32 bits without sign) to a format with mant mantissa bits and an exponent of
// the given bias. The result may have overflowed into the exponent above: the caller has looked.
func narrow(a uint32, mant uint, bias uint32) uint32 {
	if a < (128-bias)<<23 { // below the smallest normal number, 2^(1-bias)
		// An addition at the right magnitude lets the float unit round to the last subnormal bit.
		magic := (128 - bias + 23 - uint32(mant)) << 23
		return math.Float32bits(math.Float32frombits(a)+math.Float32frombits(magic)) - magic
	}
	shift := 23 - mant
	a -= (127 - bias) << 23
	a += 1<<(shift-1) - 1 + a>>shift&1
	return a >> shift
}

// widen is the inverse for finite values: exact.
func widen(a uint32, mant uint, bias uint32) float32 {
	if a>>mant == 0 { // subnormal: a × 2^(1-bias-mant)
		return float32(a) * math.Float32frombits((128-bias-uint32(mant))<<23)
	}
	return math.Float32frombits(a<<(23-mant) + (127-bias)<<23)
}

func signed(f float32, negative bool) float32 {
	if negative {
		return math.Float32frombits(math.Float32bits(f) | signBit)
	}
	return f
}

// Float16FromFloat32 rounds; beyond ±65520 it is infinite.
func Float16FromFloat32(f float32) Float16 {
	u := math.Float32bits(f)
	sign, a := uint16(u>>16&0x8000), u&^uint32(signBit)
	switch {
	case a > infBits:
		return Float16{sign | 0x7e00 | uint16(a>>13&0x3ff)}
	case a >= 0x477ff000: // 65520, half way beyond the largest finite value
		return Float16{sign | 0x7c00}
	}
	return Float16{sign | uint16(narrow(a, 10, 15))}
}

// Float16FromBits makes one from its bits.
func Float16FromBits(b uint16) Float16 { return Float16{b} }

// Bits are sign, 5 bits of exponent, 10 of mantissa.
func (f Float16) Bits() uint16 { return f.bits }

// Float32 is the same value, exactly.
func (f Float16) Float32() float32 {
	a, neg := uint32(f.bits&0x7fff), f.bits&0x8000 != 0
	if a >= 0x7c00 {
		return signed(math.Float32frombits(infBits|a&0x3ff<<13), neg)
	}
	return signed(widen(a, 10, 15), neg)
}

// String is the shortest decimal that names the value.
func (f Float16) String() string { return formatFloat(f.Float32()) }

// BFloat16FromFloat32 rounds to 8 significant bits.
func BFloat16FromFloat32(f float32) BFloat16 {
	u := math.Float32bits(f)
	if u&^uint32(signBit) > infBits {
		return BFloat16{uint16(u>>16) | 0x40}
	}
	return BFloat16{uint16((u + 0x7fff + u>>16&1) >> 16)}
}

// BFloat16FromBits makes one from its bits.
func BFloat16FromBits(b uint16) BFloat16 { return BFloat16{b} }

// Bits are the upper half of a float32's.
func (f BFloat16) Bits() uint16 { return f.bits }

// Float32 is the same value, exactly.
func (f BFloat16) Float32() float32 { return math.Float32frombits(uint32(f.bits) << 16) }

// String is the shortest decimal that names the float32 value.
func (f BFloat16) String() string { return formatFloat(f.Float32()) }

// F8E4M3FromFloat32 rounds and saturates to ±448.
func F8E4M3FromFloat32(f float32) F8E4M3 {
	u := math.Float32bits(f)
	sign, a := uint8(u>>24&0x80), u&^uint32(signBit)
	switch {
	case a > infBits:
		return F8E4M3{sign | 0x7f}
	case a >= 0x43e00000: // 448
		return F8E4M3{sign | 0x7e}
	}
	return F8E4M3{sign | uint8(narrow(a, 3, 7))}
}

// F8E4M3FromBits makes one from its bits.
func F8E4M3FromBits(b uint8) F8E4M3 { return F8E4M3{b} }

// Bits are sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are NaN.
func (f F8E4M3) Bits() uint8 { return f.bits }

// Float32 is the same value, exactly.
func (f F8E4M3) Float32() float32 {
	a, neg := uint32(f.bits&0x7f), f.bits&0x80 != 0
	if a == 0x7f {
		return signed(math.Float32frombits(infBits|1<<22), neg)
	}
	return signed(widen(a, 3, 7), neg)
}

// String is the shortest decimal that names the float32 value.
func (f F8E4M3) String() string { return formatFloat(f.Float32()) }

// F8E5M2FromFloat32 rounds and saturates to ±57344.
func F8E5M2FromFloat32(f float32) F8E5M2 {
	u := math.Float32bits(f)
	sign, a := uint8(u>>24&0x80), u&^uint32(signBit)
	switch {
	case a > infBits:
		return F8E5M2{sign | 0x7e}
	case a >= 0x47600000: // 57344
		return F8E5M2{sign | 0x7b}
	}
	return F8E5M2{sign | uint8(narrow(a, 2, 15))}
}

// F8E5M2FromBits makes one from its bits.
func F8E5M2FromBits(b uint8) F8E5M2 { return F8E5M2{b} }

// Bits are sign, 5 bits of exponent, 2 of mantissa; the layout is the upper half of a Float16's.
func (f F8E5M2) Bits() uint8 { return f.bits }

// Float32 is the same value, exactly.
func (f F8E5M2) Float32() float32 { return Float16{uint16(f.bits) << 8}.Float32() }

// String is the shortest decimal that names the float32 value.
func (f F8E5M2) String() string { return formatFloat(f.Float32()) }

func formatFloat(f float32) string { return strconv.FormatFloat(float64(f), 'g', -1, 32) }
