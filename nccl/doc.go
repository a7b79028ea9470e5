// Package nccl holds communicators: collectives, point to point, memory that can be registered, registration.
//
//	dev, err := cuda.Open(job.Device())
//	grad, err := nccl.Alloc[float32](dev, 1<<20)
//	comm, err := nccl.Init(ctx, job, dev)
//	reg, err := comm.Register(grad.Memory())
//	err = nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Sum, stream)
//	err = stream.Synchronize(ctx)
//
// Ownership runs device, memory, communicator, graph; defers close them backwards.
//
// # Calls
//
// A communicator's members call the same operations in the same order. Each call is enqueued on a stream and returns; its buffers belong to the
// stream until it is done. Where a member does something else, ends, or leaves, the others get an error that names it, from the call or from the
// stream, instead of a hang. The first failure is the communicator's end: every later call returns it. A new one can be made afterwards
// (Comm.Shrink: of the members that are left).
//
// A barrier is bootstrap.Job.Barrier, for the ranks, or an AllReduce of one element, for their streams.
//
// # Memory
//
// Memory from Alloc (or an Arena) can be registered, by Comm.Register or by capturing into a graph (package graphs): the ranks
// then read and write each other's buffers directly, without staging copies. Use it for communication buffers; it is dearer to make than
// cuda.Malloc's. If one member passes registered memory to a call all must.
//
// # GPUs
//
// On the host platform collectives are pure Go over shared memory; on GPUs they are the vendor's library. Small ones between up to 8 ranks of a host
// whose NVIDIA devices are joined by NVLink are a kernel of this package, which stores straight in the other ranks' memory: no registration, window
// or setting is needed for that. Which calls those are, by operation, type, reduction and count, is the same on all ranks. Explain tells whether a
// communicator has this way, and what it can register, and why not; Config.NoPeer and GORUN_PEER=off are without it.
//
// Neither notices a peer's end or calls that differ: the stream just never gets ready. So every rank's calls stand in a ledger that its
// peers read: at some calls of a run, before a wait says that all is done, and while anything is enqueued. A contradiction, a death or an early Close
// aborts the communicator on all its members, at most a second later, and every wait for a stream that has its operations returns the cause. A Send and
// its Recv are compared when both are there. One whose other end does not come may only be late: waits for it end by their contexts, or when the peer
// closes or ends.
//
// # For libraries
//
// Package graphs is made of what says so below, and of Call, Gate, Holder, LayoutInfo and Replay with their functions: programs do not need them.
package nccl
