// Package pmix is the server side of PMIx: what Open MPI finds its peers through. A [Server] serves the ranks of a job on one host, over TCP on
// the loopback interface; the servers of several hosts exchange what their ranks publish at a fence, by a function that the caller gives.
//
// Ranks find the server by the variables of [Server.Env]. They speak one packing, that of PMIx 3, whatever their own release is: a client
// packs as the server announces, so that what ranks publish can be passed on to ranks with other releases without being understood. Data of
// ranks is kept as it came ("hash" in PMIx's words: no shared memory), and a rank asks for that of a peer when it needs it.
//
//	s, err := pmix.Listen(pmix.Config{Job: pmix.Job{Namespace: pmix.NewNamespace(), Hosts: []pmix.Host{{Name: "a", Ranks: []int{0, 1}}}}})
//	...
//	defer s.Close()
//	cmd.Env = append(cmd.Env, s.Env(0)...)
package pmix
