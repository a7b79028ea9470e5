// Package cuda gives a rank its device: memory, streams, events, kernels and graphs, for one device a rank. The device is a GPU by
// its vendor's driver library (CUDA, MUSA or HIP), opened at run time without cgo. Where the machine has no GPU the device is the host
// platform, pure Go with the same semantics, so that one program runs on both.
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
// # GPUs
//
// Calls may come from any goroutine here too: each makes the device's primary context current on its thread first. A library that calls the driver, or
// something above it, itself uses Device.Bind. No wait blocks in the driver: it asks, and so ends with its context, with the failure of a
// communicator (Stream.Watch), or with the device's. Only Memory.Free may wait in the driver for work under way.
//
// Copies to and from Go slices go through pinned memory. CopyToDevice has taken the slice's contents when it returns. What CopyToHost brings is in the slice after the
// wait that finds the copy done: Synchronize or a Query that is true, of the stream, of an event recorded behind the copy, or of a stream that waited for that event; and in a
// host function enqueued behind it. In a capture both read and write the Go slice at every launch, as on the host. Pinned memory stays with the device until
// Close, as much as was ever in use at once.
//
// Host functions of a device run one after the other, on a thread of the driver's; a slow one holds the others up. Release callbacks run on a goroutine of
// the device, mostly within a millisecond after the last Destroy. Shareable memory has the size, alignment and handle types that communication libraries ask for
// (Range.Qualifies), other memory is the driver's plain kind.
//
// A context that is lost (error 700 and its like) is lost for the process: end it. The addresses of freed shareable memory stay reserved, up to 1 TiB.
//
// The driver library is looked for where the system has it, and in the places of GORUN_CUDA_LIB, GORUN_MUSA_LIB or GORUN_HIP_LIB if that is set; kernels need the
// run-time compiler (NVRTC, MTRTC, HIPRTC) beside it. Of the vendors only CUDA has been run on hardware. The build tag nogpu leaves all of it out.
//
// # The host platform
//
// GORUN_DEVICE=host chooses it on a machine with a GPU. It computes on the cores that the process may use, divided by the ranks on the
// host (GORUN_LOCAL_SIZE), or by those that have the same ones where ranks are bound (GORUN_CPU_SHARE). Freed memory keeps its addresses reserved without access, up to 64 GiB of address space, no memory.
// Under the race detector memory comes from the Go heap, so that the detector sees what kernels and copies touch; there a late
// access is a reported race, or a silent one, but no fault.
package cuda
