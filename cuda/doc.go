// Package cuda gives a rank its device: memory, streams, events, kernels and graphs, for one device a rank. Where
// the machine has no GPU the device is the host platform, pure Go with the same semantics, so that one program runs on both.
//
//	dev, err := cuda.Open("")                // the machine's GPU, or the host platform where it has none
//	x, err := cuda.Malloc[float32](dev, 1<<20)
//	s, err := dev.NewStream()
//	err = cuda.Fill(x.All(), 1, s)           // enqueued
//	err = s.Synchronize(ctx)                 // done
//
// # Asynchronous work
//
// What is enqueued on a stream is carried out in order, after the call has returned; enqueueing never waits for a peer. Different
// streams are independent unless events order them. Synchronize waits. The Go slices of CopyToDevice and CopyToHost, and whatever the
// arguments of a kernel point to, belong to the stream until it is done with them.
//
// On the host platform no operation blocks a thread: each is a Task that does what it can and is asked again. Who waits drives all
// streams of the device, otherwise a goroutine of the device does. So an operation that waits for a peer lets the others go on,
// and it does not matter in which order two ranks wait for their streams.
//
// # Goroutines and threads
//
// All methods may be called from any goroutine, at the same time, with two exceptions. A goroutine that captures is locked to its
// thread (runtime.LockOSThread) from BeginCapture to EndCapture, because what a capture forbids, it forbids to the thread. And nothing
// that runs on a stream, a Task, a kernel or a host function, may wait for a stream.
//
// # Ownership
//
// Ownership runs device, memory, what uses memory (communicators, registrations, graphs); close in the opposite order, which defers
// do by themselves. Device.Close refuses while something of it is open, and names it. Memory has one owner, who frees it,
// and holders: freeing what a live graph uses is refused, freeing what a registration or a dead graph has not yet let go of
// is carried out when it does. A Graph owns no memory; its release callbacks say when it is really gone.
//
// # Errors stick
//
// A stream's first failure stays: what was enqueued behind it is cancelled, and every later operation on the stream returns
// it. Closing the stream is the way on. A fault (memory used after it was freed: ErrIllegalAddress), a panic in a kernel or host function, and Device.Fail
// are failures of the device: every operation of it returns the error from then on, as after CUDA's error 700; only closing and freeing still work.
// A capture is spoilt by a forbidden call (ErrCaptureUnsafe at the call), and EndCapture says so (ErrCaptureInvalidated).
//
// # The host platform
//
// GORUN_DEVICE=host chooses it on a machine with a GPU. It computes on the cores that the process may use, divided by the ranks on the
// host (GORUN_LOCAL_SIZE). Freed memory keeps its addresses reserved without access, up to 64 GiB of address space, no memory.
// Under the race detector memory comes from the Go heap, so that the detector sees what kernels and copies touch; there a late
// access is a reported race, or a silent one, but no fault.
package cuda
