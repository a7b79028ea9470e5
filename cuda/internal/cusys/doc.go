// Package cusys binds the driver library of a GPU vendor: CUDA's libcuda, Moore Threads' libmusa, AMD's libamdhip64.
// It adds nothing to the C interface but Go types, errors and one set of names, CUDA's; what the vendors do otherwise
// stands in the tables of vendor.go and symbols.go, and in the few adapters that look at them.
//
// The current context belongs to an OS thread. A goroutine that makes calls locks its thread
// (runtime.LockOSThread) and sets the context first: CtxSetCurrent. These calls need no context: Init, the
// versions, and all that take a Device. Capture modes and the begin and end of a thread-local capture are
// a thread's, too.
//
// Pointers to Go memory are passed for the length of a call only. What C keeps (an argument of a callback) is a
// number, never a Go pointer.
package cusys
