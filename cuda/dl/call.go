//go:build !nogpu

package dl

import "unsafe"

// This is the short way into C, for functions of integers and pointers whose result is an int, which nearly all of the vendors' are. purego's way is for any
// function: it moves 700 bytes a call and takes them from pools, which behind a library that has filled the caches costs 0.2 µs.
//
// A frame lies on the goroutine's stack, and that may move when C calls back into Go: so callFrame reads the frame before the call only, and the result comes back in
// a register.

// frame is a call: the function's address and its arguments.
type frame struct {
	fn   uintptr
	args [12]uintptr
}

// callFrame (call_*.s) is a C function that makes the call of a frame. This is its address.
var callFramePC uintptr

// cgocall runs a C function of one argument on the thread's own stack, as cgo does. Packages that do without cgo have it by this name.
//
//go:linkname cgocall runtime.cgocall
//go:noescape
func cgocall(fn uintptr, arg unsafe.Pointer) int32

// callFrames (call_*.s) is a C function that makes the calls of a Calls. This is its address.
var callFramesPC uintptr

func callAll(c *Calls) int32 { return cgocall(callFramesPC, unsafe.Pointer(c)) }

// callInt makes the call of a frame. Who fills it is marked, so that pointers in it stay valid.
func callInt(f *frame) int32 { return cgocall(callFramePC, unsafe.Pointer(f)) }
