// Package dl opens vendor libraries (CUDA, NCCL and their kin) at run time, without cgo, and calls their functions.
// It is for gorun's own packages cuda and nccl.
//
// A [Spec] says where a library may be; [Open] tries the places in order, says which file was opened, and lists
// every place and its cause when none worked. A [Func] is the raw address of a C function. Pointers to Go
// variables have one safe form, uintptr(unsafe.Pointer(&x)) in the argument list of [Func.Call] itself: a helper
// that returns the number, or a variable that holds it, lets the stack move under C. A test of this package walks
// the module and finds the unsafe forms.
//
// Opening libraries makes a program need the system's C library. The build tag nogpu leaves it out: the program is
// static, and Open says why there is no library.
package dl
