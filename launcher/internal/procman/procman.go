// Package procman is what the process managers have in common that programs with MPI find in gorun: MPI_Init asks one, by PMI or by PMIx, for
// the rank's place and for the addresses of the others. Each host serves the ranks that run there; at a fence the hosts exchange what their ranks have said.
package procman

import (
	"os"
	"slices"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/node"
)

// World is the ranks of a job that make one MPI_COMM_WORLD, as one host sees them. Ranks of the world are numbered from 0; those of the job may be more.
type World struct {
	Job       string   // the job's id; each attempt of a job that is restarted has another
	Ranks     []int    // rank in the job of each rank of the world, ascending
	HostOf    []int    // host of each rank of the world, as index in the job
	AppOf     []int    // which of the job's programs each rank of the world runs
	Host      int      // this host
	Hosts     []string // names of the job's hosts; two may have the same
	Universe  int      // how many ranks the job's hosts take in all (MPI_UNIVERSE_SIZE); not less than there are
	Addr      string   // IP address at which the other hosts reach this one; "" in a job on one host
	Interface string   // network interface that holds Addr; "": not known, or there is none

	// Exchange is node.Node's: done gets what each of the hosts has given, in order, and must not wait. A name is used once in a job.
	Exchange func(name string, hosts []int, data []byte, done func(all [][]byte, err error))
	// End asks for the end of the job, because of a rank of this world and host: once a rank at most. It does not wait.
	End func(rank int, why Departure)

	// Remove has a directory of this host removed if this process dies before it does so itself; nil: nobody does. It is for Serve alone.
	Remove func(path string)
	// Say shows lines as if a rank of this host had written them to its stderr; nil: they are dropped. It may wait for whoever reads them.
	Say func(rank int, text string)
}

// Local are the ranks of the world on this host, ascending.
func (w *World) Local() []int {
	var local []int
	for rank, host := range w.HostOf {
		if host == w.Host {
			local = append(local, rank)
		}
	}
	return local
}

// HostsOf are the hosts of some ranks of the world, ascending, each once; nil of nil: of all.
func (w *World) HostsOf(ranks []int) []int {
	var hosts []int
	if ranks == nil {
		hosts = slices.Clone(w.HostOf)
	}
	for _, rank := range ranks {
		hosts = append(hosts, w.HostOf[rank])
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}

// Departure says how a rank took leave of its process manager. The zero value is one that did so in order.
type Departure struct {
	Aborted    bool   `json:",omitempty"` // it called MPI_Abort
	Code       int    `json:",omitempty"` // with this code
	Text       string `json:",omitempty"` // and this reason, if it gave one
	Silent     bool   `json:",omitempty"` // it has never begun
	Unfinished bool   `json:",omitempty"` // it had begun (MPI_Init) and its process ended before MPI_Finalize
	Fault      string `json:",omitempty"` // what it said that a process manager does not understand; reads after "rank 3 "
}

// Server is the process manager of a host for the ranks of one world. Its methods may be called from several goroutines, for a rank of this host.
type Server interface {
	// Environ is what a rank's environment gets.
	Environ(rank int) []string
	// Files are open files that the rank's process gets as descriptors 3, 4, ...; the caller closes them when it was started. It is called once a rank, just before.
	Files(rank int) ([]*os.File, error)
	// Ended takes note that the process of a rank has ended, and says how it had left, when all that it had said is read, within a second.
	Ended(rank int) Departure
	// Standing says what a rank is in; of the fields State and Waits count. The numbers in it are those of the job.
	Standing(rank int) node.Standing
	// Close ends the server. No process of a rank runs any more.
	Close() error
}

// endBound bounds the wait for what a process had said when it ended.
const endBound = time.Second

// AwaitEnd waits until a server has read all that a process that has ended had said; a second at most.
func AwaitEnd(read <-chan struct{}) {
	bound := time.NewTimer(endBound)
	defer bound.Stop()
	select {
	case <-read:
	case <-bound.C:
	}
}
