package nccl

import (
	"context"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
)

// Comm is a communicator: a group of ranks, one device each. Its calls come from one goroutine at a time and in the same
// order on all members; Abort, Err and Stats from any goroutine. Close it after its graphs and before its device.
type Comm struct{ todo int }

// Config are the settings of Init; nil: all defaults.
type Config struct {
	Name    string        // for messages; default "world"; equal on all members
	Ranks   []int         // job ranks that are members, in order; nil: all. Only members call Init
	Timeout time.Duration // how long Init waits for the others; default 60 s
	Check   CheckMode     // default Watch; equal on all members
}

// CheckMode is how eager calls are compared between ranks.
type CheckMode uint8

const (
	Watch  CheckMode = iota // a contradiction is an error at once; lateness only at the caller's deadline
	Strict                  // each call waits for the others' description before it is issued
	Trust                   // nothing is compared
)

// Init makes a communicator of all ranks of the job. The unique id is made by its first rank and travels by
// the job's bootstrap. Collective.
func Init(ctx context.Context, job *bootstrap.Job, dev *cuda.Device) (*Comm, error) {
	return InitConfig(ctx, job, dev, nil)
}

// InitConfig is Init with settings.
func InitConfig(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, c *Config) (*Comm, error) {
	panic("stub")
}

func (c *Comm) Name() string         { panic("stub") }
func (c *Comm) Rank() int            { panic("stub") }
func (c *Comm) Size() int            { panic("stub") }
func (c *Comm) JobRank(rank int) int { panic("stub") }
func (c *Comm) Device() *cuda.Device { panic("stub") }
func (c *Comm) Job() *bootstrap.Job  { panic("stub") }
func (c *Comm) String() string       { panic("stub") } // "communicator world (rank 1 of 4)"

// Split makes communicators of the members with equal color, ordered by key, then rank. A negative color takes no part and gives nil. Collective.
func (c *Comm) Split(ctx context.Context, color, key int) (*Comm, error) { panic("stub") }

// Err is nil while the communicator works, else why it does not: every later call returns it.
func (c *Comm) Err() error { panic("stub") }

// Abort ends the communicator here and now, with the cause: enqueued operations fail, graphs that hold it break, the others learn of it
// and fail with an error that names this rank. From any goroutine, more than once.
func (c *Comm) Abort(cause error) error { panic("stub") }

// Drain gives back, without the other members, what closed graphs and registrations still hold here (mappings of peers' memory). Local.
func (c *Comm) Drain(ctx context.Context) error { panic("stub") }

// Close ends the communicator in good order where all members close it after the same call, waiting at most 2 s for them, else it aborts: a
// member that is past this rank's last call gets an error that names this rank. With live graphs it is an error that names them, and where they
// were captured, and nothing is closed. Put it in a defer. Twice is fine. A Close after failure or Abort releases everything and returns nil.
func (c *Comm) Close() error { panic("stub") }

// Stats are counters since Init.
type Stats struct {
	Calls          uint64 // collectives and point-to-point operations carried out
	BytesDirect    uint64 // payload moved straight between users' buffers (registered)
	BytesStaged    uint64 // payload moved through staging copies
	Registrations  int    // live: of the user and of graphs, each buffer counted once
	GraphHolds     int    // registrations held by graphs
	PendingRelease int    // registrations of closed graphs not given back yet
	PeerMappings   int    // mappings of peers' memory in this process
}

func (c *Comm) Stats() Stats { panic("stub") }
