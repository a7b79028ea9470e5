// Package graphs captures the work of a stream, collectives above all, into a graph that is launched many times.
//
//	g, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
//		return nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Avg, s)
//	}, graphs.Comms(comm))
//	if err != nil {
//		return err
//	}
//	defer g.Close()
//	err = g.Launch(stream) // on every rank, as often as wanted
//	err = stream.Synchronize(ctx)
//
// Capture runs a function once. Every call of package nccl in it is compared between the members of its communicator before anything is
// recorded: all issue the same call, and its buffers are registered, or every member's Capture returns the error that names the first
// difference and the ranks. At the end all members have the graph, or none has. The buffers' registrations belong to the graph and go when it is
// destroyed and its last replay has ended.
//
// Ownership runs device, memory, communicator, graph; defers close them backwards. While a graph lives, freeing memory that its
// collectives use and closing its communicators are errors that name the graph and the place where it was captured. Memory that only captured
// kernels and copies use is not known to the graph: keep it until the graph is closed.
//
// On a GPU the driver tells a moment after Close that the graph is gone, and NCCL lets go of what it had registered when it is driven on.
// Comm.Drain waits for the one and does the other, without the other members; it is the same call on the host platform.
//
// On a GPU small collectives are a kernel of package nccl's, by memory that the ranks share, and need no registration (mode Peer; nccl.Config.NoPeer), unless a mode is demanded. Where there is
// no such memory, captured calls on small memory get NCCL's windows there without being asked, where those are faster: NoWindows says which and what that means. Replays and eager calls
// of one communicator come one after the other, on whichever streams they are: by events of this runtime where all ranks are on one host, for NCCL's own order takes a fifth
// of a small captured call's time (nccl.Explain, "graph mixing"; NCCL_GRAPH_MIXING_SUPPORT=1 brings NCCL's back), else by NCCL's.
//
// A communicator that fails (a member dies, calls something else, aborts) ends its graphs: what is enqueued fails with the cause, and later launches
// return it. Close them and it, and make a new one.
package graphs
