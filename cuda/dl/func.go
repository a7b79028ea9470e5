package dl

import (
	"bytes"
	"math"
	"sync"
	"unsafe"
)

// Func is the address of a C function; 0 when the library does not have it.
type Func uintptr

// Call calls the function with integer and pointer arguments and returns its integer or pointer result; of an int
// result only the low 32 bits count. It costs about 0.15 µs and 8 bytes an argument. Calling a zero Func panics.
//
// A pointer to a Go variable goes in as uintptr(unsafe.Pointer(&x)), written in the argument list of this call and
// nowhere else; the variable then lives on the heap until the call returns.
//
//go:uintptrescapes
func (f Func) Call(args ...uintptr) uintptr {
	return callC(f, args)
}

// argPool keeps argument blocks: purego lets them escape, so a fresh one a call would be garbage.
var argPool = sync.Pool{New: func() any { return new([3]uintptr) }}

// Call3 is Call without allocation. A function with fewer arguments takes zeros for the rest, which C does not see.
//
//go:uintptrescapes
func (f Func) Call3(a1, a2, a3 uintptr) uintptr {
	b := argPool.Get().(*[3]uintptr)
	*b = [3]uintptr{a1, a2, a3}
	r := callC(f, b[:])
	argPool.Put(b)
	return r
}

// Bind makes fn, a pointer to a Go function variable, call the C function through reflection: for struct arguments
// and results by value, on cold paths only (0.6 µs and more, several allocations).
func (f Func) Bind(fn any) { bindC(f, fn) }

// NewCallback is the address of a C function that calls fn. A process has at most 2000 of them and none is given back.
func NewCallback(fn func(arg uintptr)) Func { return Func(newCallback(fn)) }

// Entry is a bound function: its address, the name that was found, and which alternative that was.
type Entry struct {
	Func
	Name  string // the first alternative's if the function is absent
	Shape int    // index of the alternative, -1 if the function is absent
	Since string // version that brought the function
}

// Absent is what the Result calls return for a function that the library does not have. No library returns it.
const Absent = math.MinInt32

// Result3, Result6, Result9 and Result12 call a function whose result is an int, without allocation.
//
//go:uintptrescapes
func (e *Entry) Result3(a1, a2, a3 uintptr) int32 {
	if e.Func == 0 {
		return Absent
	}
	return callInt(&frame{uintptr(e.Func), [12]uintptr{a1, a2, a3}})
}

//go:uintptrescapes
func (e *Entry) Result6(a1, a2, a3, a4, a5, a6 uintptr) int32 {
	if e.Func == 0 {
		return Absent
	}
	return callInt(&frame{uintptr(e.Func), [12]uintptr{a1, a2, a3, a4, a5, a6}})
}

//go:uintptrescapes
func (e *Entry) Result9(a1, a2, a3, a4, a5, a6, a7, a8, a9 uintptr) int32 {
	if e.Func == 0 {
		return Absent
	}
	return callInt(&frame{uintptr(e.Func), [12]uintptr{a1, a2, a3, a4, a5, a6, a7, a8, a9}})
}

//go:uintptrescapes
func (e *Entry) Result12(a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12 uintptr) int32 {
	if e.Func == 0 {
		return Absent
	}
	return callInt(&frame{uintptr(e.Func), [12]uintptr{a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12}})
}

// GoString copies the NUL-terminated C string at addr; "" at 0.
//
//go:uintptrescapes
func GoString(addr uintptr) string {
	if addr == 0 {
		return ""
	}
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr)) // addr is C's memory, which the collector does not move
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// CString is s with a NUL at its end. Pass uintptr(unsafe.Pointer(&b[0])).
func CString(s string) []byte { return append([]byte(s), 0) }

// Text is the text of a C buffer: up to its first NUL, without white space at the ends.
func Text(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(bytes.TrimSpace(b))
}
