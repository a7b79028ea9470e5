// Package ncclsys binds a collective library: NVIDIA's libnccl, Moore Threads' libmccl, AMD's librccl. It adds nothing
// to the C interface but Go types, errors and one set of names, NCCL's; what the makers do otherwise stands in the
// tables of vendor.go and symbols.go, and what a version has in version.go.
//
// The library takes the current device, and the depth of a group, from the OS thread. A goroutine locks its thread
// (runtime.LockOSThread), sets the device's primary context, and then makes the calls; a group begins and ends on one
// thread. CommDeregister and CommDestroy may leave another device current: set the context again after them.
// Registrations and launches of one communicator must not run at the same time.
//
// On a non-blocking communicator (Config.Blocking = 0) every call may return ErrInProgress, which is no failure: ask
// CommAsyncError until it says otherwise.
package ncclsys
