// Package pmix is the process manager's side of PMIx, which Open MPI speaks: a server on each host, at a TCP port of the loopback interface. A rank asks
// it for what there is to know of the job, publishes how others reach it, passes a fence, and asks for what those have published that it
// speaks to.
//
// Ranks speak one packing, that of PMIx 3, whatever release their library is: a client packs as the server announces. So what a rank publishes is passed on
// to ranks with other releases without being understood, and a server has no need of the packings of later releases. It keeps what is published as it came
// ("hash" in PMIx's words) and gives it when it is asked: it shares no memory with ranks.
package pmix
