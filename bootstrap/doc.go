// Package bootstrap is a rank's side of the control plane: join the job, exchange
// small values, meet in barriers, receive unique ids, hand over file descriptors
// and learn that another rank has died. Bulk data never passes here.
//
// A rank calls [Join] and is served by its host's node (package bootstrap/node) on a
// local socket; without a launcher it is a job of one. [InProcess] puts several ranks
// in one process, for tests. Every wait takes a context, and its error names the ranks
// that are missing ([WaitError]), that have ended ([RankError]) or that wait for each
// other ([CycleError]). A program:
//
//	job, err := bootstrap.Join(ctx)
//	if err != nil {
//		return err
//	}
//	defer job.Close()
//	names, err := job.AllGather(ctx, []byte(name))
//
// Account, Far, Handle and Ledger with their functions are what package nccl is made of: programs do not need them.
package bootstrap
