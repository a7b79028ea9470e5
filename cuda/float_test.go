package cuda

import (
	"math"
	"math/big"
	"testing"
)

// format describes a small float for the reference, which knows only the definition: sign, exponent, mantissa.
type format struct {
	name      string
	bits      int
	mant      int
	bias      int
	hasInf    bool
	saturates bool
	from      func(float32) uint32
	to        func(uint32) float32
}

var formats = []format{
	{"float16", 16, 10, 15, true, false,
		func(f float32) uint32 { return uint32(Float16FromFloat32(f).Bits()) },
		func(b uint32) float32 { return Float16FromBits(uint16(b)).Float32() }},
	{"bfloat16", 16, 7, 127, true, false,
		func(f float32) uint32 { return uint32(BFloat16FromFloat32(f).Bits()) },
		func(b uint32) float32 { return BFloat16FromBits(uint16(b)).Float32() }},
	{"e4m3", 8, 3, 7, false, true,
		func(f float32) uint32 { return uint32(F8E4M3FromFloat32(f).Bits()) },
		func(b uint32) float32 { return F8E4M3FromBits(uint8(b)).Float32() }},
	{"e5m2", 8, 2, 15, true, true,
		func(f float32) uint32 { return uint32(F8E5M2FromFloat32(f).Bits()) },
		func(b uint32) float32 { return F8E5M2FromBits(uint8(b)).Float32() }},
}

// magnitude is the value of the bits without sign, by definition; nan and inf apart.
func (f format) magnitude(b uint32) (v float64, inf, nan bool) {
	exps := f.bits - 1 - f.mant
	exp, m := int(b>>f.mant), b&(1<<f.mant-1)
	top := exp == 1<<exps-1
	switch {
	case f.hasInf && top:
		return 0, m == 0, m != 0
	case !f.hasInf && top && m == 1<<f.mant-1:
		return 0, false, true
	case exp == 0:
		return math.Ldexp(float64(m), 1-f.bias-f.mant), false, false
	}
	return math.Ldexp(float64(m+1<<f.mant), exp-f.bias-f.mant), false, false
}

func (f format) maxFinite() uint32 {
	for b := uint32(1)<<(f.bits-1) - 1; ; b-- {
		if _, inf, nan := f.magnitude(b); !inf && !nan {
			return b
		}
	}
}

func TestFloatPatterns(t *testing.T) {
	for _, f := range formats {
		t.Run(f.name, func(t *testing.T) {
			sign := uint32(1) << (f.bits - 1)
			for b := range uint32(1) << f.bits {
				got := f.to(b)
				v, inf, nan := f.magnitude(b &^ sign)
				if b&sign != 0 {
					v = -v
				}
				switch {
				case nan:
					if back := f.from(got); got == got || f.to(back) == f.to(back) {
						t.Fatalf("%#x: got %v and back %#x, want NaN", b, got, back)
					} else if back&sign != b&sign {
						t.Fatalf("%#x: the sign of NaN is lost: %#x", b, back)
					}
					continue
				case inf:
					if s := 1 - 2*int(b>>(f.bits-1)); !math.IsInf(float64(got), s) {
						t.Fatalf("%#x: got %v, want infinity of sign %d", b, got, s)
					}
				case float64(got) != v || math.Signbit(float64(got)) != (b&sign != 0):
					t.Fatalf("%#x: got %v, want %v", b, got, v)
				}
				want := b
				if inf && f.saturates {
					want = b&sign | f.maxFinite()
				}
				if back := f.from(got); back != want {
					t.Fatalf("%#x as float32 is %v and back %#x, want %#x", b, got, back, want)
				}
			}
		})
	}
}

// TestFloatRounding looks at each pair of neighbours: their midpoint goes to the even one, and the float32 next to the midpoint
// to the nearer.
func TestFloatRounding(t *testing.T) {
	for _, f := range formats {
		t.Run(f.name, func(t *testing.T) {
			limit := f.maxFinite()
			for b := range limit {
				lo, _, _ := f.magnitude(b)
				hi, _, _ := f.magnitude(b + 1)
				mid := float32((lo + hi) / 2) // exact: one more bit, and float32 has many
				if x, _ := new(big.Float).Quo(new(big.Float).Add(big.NewFloat(lo), big.NewFloat(hi)), big.NewFloat(2)).Float64(); float64(mid) != x {
					t.Fatalf("the midpoint %v of %v and %v is no float32", x, lo, hi)
				}
				even := b
				if b&1 == 1 {
					even = b + 1
				}
				sign := uint32(1) << (f.bits - 1)
				for _, c := range []struct {
					in   float32
					want uint32
				}{
					{mid, even},
					{math.Nextafter32(mid, 0), b},
					{math.Nextafter32(mid, float32(math.Inf(1))), b + 1},
					{-mid, sign | even},
				} {
					if got := f.from(c.in); got != c.want {
						t.Fatalf("%v between %#x and %#x: got %#x, want %#x", c.in, b, b+1, got, c.want)
					}
				}
			}
		})
	}
}

func TestFloatOverflow(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct {
		format string
		in     float32
		want   uint32
	}{
		{"float16", 65504, 0x7bff},
		{"float16", 65519.996, 0x7bff},
		{"float16", 65520, 0x7c00},
		{"float16", math.MaxFloat32, 0x7c00},
		{"float16", -inf, 0xfc00},
		{"float16", math.SmallestNonzeroFloat32, 0},
		{"bfloat16", math.MaxFloat32, 0x7f80},
		{"bfloat16", inf, 0x7f80},
		{"e4m3", 448, 0x7e},
		{"e4m3", 464, 0x7e},
		{"e4m3", math.MaxFloat32, 0x7e},
		{"e4m3", inf, 0x7e},
		{"e4m3", -inf, 0xfe},
		{"e4m3", -500, 0xfe},
		{"e5m2", 57344, 0x7b},
		{"e5m2", 61440, 0x7b},
		{"e5m2", inf, 0x7b},
		{"e5m2", -math.MaxFloat32, 0xfb},
	} {
		for _, f := range formats {
			if f.name != c.format {
				continue
			}
			if got := f.from(c.in); got != c.want {
				t.Errorf("%s of %v: got %#x, want %#x", c.format, c.in, got, c.want)
			}
		}
	}
}

func FuzzFloatNearest(f *testing.F) {
	f.Add(uint32(0x3f800001))
	f.Add(uint32(0x387fffff))
	f.Fuzz(func(t *testing.T, u uint32) {
		x := math.Float32frombits(u)
		if x != x {
			return
		}
		for _, f := range formats {
			got := f.from(x) &^ (1 << (f.bits - 1))
			limit := f.maxFinite()
			if got > limit {
				continue // infinite: TestFloatOverflow
			}
			a := math.Abs(float64(x))
			v, _, _ := f.magnitude(got)
			for _, other := range []uint32{got - 1, got + 1} {
				if other > limit {
					continue
				}
				if w, _, _ := f.magnitude(other); math.Abs(w-a) < math.Abs(v-a) {
					t.Errorf("%s of %v: got %#x (%v), but %#x (%v) is nearer", f.name, x, got, v, other, w)
				}
			}
		}
	})
}

func TestFloatString(t *testing.T) {
	for _, c := range []struct {
		got  interface{ String() string }
		want string
	}{
		{Float16FromFloat32(1.5), "1.5"},
		{BFloat16FromFloat32(-2), "-2"},
		{F8E4M3FromFloat32(1000), "448"},
		{F8E5M2FromFloat32(0.25), "0.25"},
	} {
		if got := c.got.String(); got != c.want {
			t.Errorf("%T: got %q, want %q", c.got, got, c.want)
		}
	}
}

func BenchmarkFloat16(b *testing.B) {
	var sum float32
	for b.Loop() {
		for i := range 1000 {
			sum += Float16FromFloat32(float32(i)).Float32()
		}
	}
	if sum == 0 {
		b.Fatal("nothing was added")
	}
}
