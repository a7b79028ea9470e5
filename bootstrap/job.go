package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// joinTimeout bounds the wait for another rank of the host to join, where no context does.
const joinTimeout = 60 * time.Second

// Job is this rank's membership in the job. Its methods may be called from several goroutines.
type Job struct {
	id     string
	rank   int
	size   int
	node   int
	nodes  int
	nodeOf []int // host of each rank
	local  []int // the ranks of this host, in order
	device string

	hostAddr  string
	dataKey   []byte
	dataPorts [2]int

	ctl   control
	world *Group
	next  atomic.Uint64 // request ids

	mu        sync.Mutex // guards the rest
	closed    bool
	groups    map[string]*Group // open ones
	openings  map[string]uint32 // how often a name was opened
	watches   map[int]func()
	nextWatch int
	suspected map[int]bool // ranks that Suspect has told of
}

// control is the way to the job's store and to the other ranks of the host.
type control interface {
	// start sends a request; done is called once, from any goroutine.
	start(id uint64, q *store.Request, done func(store.Reply))
	// cancel makes the answer to a request come soon.
	cancel(id uint64)
	// events is the history from an index on, and a channel that closes when there is more.
	events(from int) ([]store.Event, <-chan struct{})
	// status is how a rank ended; nil while it lives.
	status(rank int) *store.End
	export(key string, h Handle) (withdraw func(), err error)
	fetch(ctx context.Context, rank int, key string) (Handle, error)
	ledger(ctx context.Context, rank int) (*Ledger, error)
	inProcess() bool
	hostName(node int) string
	// far asks for an account in the ledgers of ranks on other hosts; done is called once, from any goroutine, with nil where nothing is known.
	far(q digest.Query, done func([]digest.State))
	// suspect tells the launcher's node that this rank fails because of that one. It does not block.
	suspect(rank int)
	// die ends the membership as a death, for tests.
	die(cause string)
	// close says goodbye.
	close() error
}

func newJob(id string, rank, node int, nodeOf []int, device string, ctl control) *Job {
	j := &Job{
		id: id, rank: rank, size: len(nodeOf), node: node, nodeOf: nodeOf, device: device, ctl: ctl,
		groups: map[string]*Group{}, openings: map[string]uint32{}, watches: map[int]func(){},
	}
	for r, n := range nodeOf {
		j.nodes = max(j.nodes, n+1)
		if n == node {
			j.local = append(j.local, r)
		}
	}
	j.world = &Group{job: j, name: worldName, index: rank, size: j.size}
	j.groups[worldName] = j.world
	return j
}

// ID is the job's id, another one for each launch and restart.
func (j *Job) ID() string { return j.id }

// Rank is this rank's number in the job, from 0.
func (j *Job) Rank() int { return j.rank }

// Size is the number of ranks in the job.
func (j *Job) Size() int { return j.size }

// LocalRank is this rank's index among the ranks of its host, from 0.
func (j *Job) LocalRank() int { return slices.Index(j.local, j.rank) }

// LocalSize is the number of ranks on this rank's host.
func (j *Job) LocalSize() int { return len(j.local) }

// Node is the index of this rank's host among the job's hosts, from 0.
func (j *Job) Node() int { return j.node }

// Nodes is the number of hosts.
func (j *Job) Nodes() int { return j.nodes }

// NodeOf is the index of the host that a rank runs on. It panics, like an index, where the job has no such rank.
func (j *Job) NodeOf(rank int) int { return j.nodeOf[rank] }

// HostName is the name of the host that a rank runs on, "" in a job of one host and while it is not known: Watch makes it so.
func (j *Job) HostName(rank int) string {
	if j.nodes == 1 {
		return ""
	}
	return j.ctl.hostName(j.nodeOf[rank])
}

// named is a host in an error: "host node7", or "host 3" while its name is not known.
func (j *Job) named(node int) string {
	if name := j.ctl.hostName(node); name != "" {
		return "host " + name
	}
	return fmt.Sprintf("host %d", node)
}

// Device is the token of this rank's device, for cuda.Open.
func (j *Job) Device() string { return j.device }

// HostAddr is the IP address of this rank's host at which ranks of other hosts reach it, "" in a job of one host. For libraries.
func (j *Job) HostAddr() string { return j.hostAddr }

// DataKey is the secret that every connection between ranks of different hosts proves to know; nil in a job of one host. Not to be changed, or
// told to anybody. For libraries.
func (j *Job) DataKey() []byte { return j.dataKey }

// DataPorts are the ports on which ranks of this host may listen for those of other hosts, both inclusive; 0, 0: any. For libraries.
func (j *Job) DataPorts() (from, to int) { return j.dataPorts[0], j.dataPorts[1] }

// InProcess reports whether all ranks of the job live in this process.
func (j *Job) InProcess() bool { return j.ctl.inProcess() }

// Put stores a small value (at most 64 KiB) under a key, visible to all ranks. A key is written once: a second Put is an error.
func (j *Job) Put(ctx context.Context, key string, value []byte) error {
	_, err := j.call(ctx, fmt.Sprintf("put %q", key), &store.Request{Kind: store.Put, Name: key, Value: value})
	return err
}

// Get waits until the key is there, and gives its value, which is the caller's.
func (j *Job) Get(ctx context.Context, key string) ([]byte, error) {
	return one(j.call(ctx, fmt.Sprintf("get %q", key), &store.Request{Kind: store.Get, Name: key}))
}

// Listen is Get for a value that may never come, such as the word of a failure: who listens is not said to wait for it (gorun tells what ranks wait
// in when a job hangs).
func (j *Job) Listen(ctx context.Context, key string) ([]byte, error) {
	return one(j.call(ctx, fmt.Sprintf("get %q", key), &store.Request{Kind: store.Get, Name: key, Quiet: true}))
}

// Barrier and AllGather are those of the group of all ranks.
func (j *Job) Barrier(ctx context.Context) error { return j.world.Barrier(ctx) }

// AllGather gives every rank the values of all, in rank order.
func (j *Job) AllGather(ctx context.Context, value []byte) ([][]byte, error) {
	return j.world.AllGather(ctx, value)
}

// UniqueID is an NCCL unique id: 128 bytes, used for one communicator.
type UniqueID [128]byte

// PublishID gives every rank of the job the id under a name: pushed down the tree of hosts, gossiped as
// repair, and part of the state that a late host receives when it joins. A name is published once.
func (j *Job) PublishID(ctx context.Context, name string, id UniqueID) error {
	_, err := j.call(ctx, fmt.Sprintf("publish id %q", name), &store.Request{Kind: store.PublishID, Name: name, Value: id[:]})
	return err
}

// UniqueID waits for the id of that name.
func (j *Job) UniqueID(ctx context.Context, name string) (UniqueID, error) {
	op := fmt.Sprintf("wait for id %q", name)
	v, err := one(j.call(ctx, op, &store.Request{Kind: store.WaitID, Name: name}))
	if err != nil {
		return UniqueID{}, err
	}
	if len(v) != len(UniqueID{}) {
		return UniqueID{}, fmt.Errorf("%s: %d bytes", op, len(v))
	}
	return UniqueID(v), nil
}

func one(r store.Reply, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	if len(r.Values) != 1 {
		return nil, fmt.Errorf("%w: answer with %d values", ErrLost, len(r.Values))
	}
	return slices.Clone(r.Values[0]), nil
}

// cancelGrace bounds the wait for the answer to a cancelled request, which names who is missing.
const cancelGrace = time.Second

// call sends a request and waits for its answer. op names it in errors.
func (j *Job) call(ctx context.Context, op string, q *store.Request) (store.Reply, error) {
	if err := checkSize(op, q); err != nil {
		return store.Reply{}, err
	}
	q.What = q.What[:min(len(q.What), store.MaxName)]
	// A value for the others is given even by a rank that will not wait for theirs.
	if err := ctx.Err(); err != nil && q.Kind != store.Gather {
		return store.Reply{}, &WaitError{Op: op, Err: err}
	}
	if j.isClosed() {
		return store.Reply{}, fmt.Errorf("%s: %w", op, ErrClosed)
	}
	id := j.next.Add(1)
	answer := make(chan store.Reply, 1)
	j.ctl.start(id, q, func(r store.Reply) { answer <- r })
	var r store.Reply
	select {
	case r = <-answer:
	case <-ctx.Done():
		j.ctl.cancel(id)
		grace := time.NewTimer(cancelGrace)
		defer grace.Stop()
		select {
		case r = <-answer:
		case <-grace.C:
			r.Err = &store.Error{Kind: store.Cancelled}
		}
	}
	if r.Err == nil {
		return r, nil
	}
	return store.Reply{}, j.opError(ctx, op, r.Err)
}

func checkSize(op string, q *store.Request) error {
	if len(q.Value) > store.MaxValue {
		return fmt.Errorf("%s: value of %d bytes, at most %d are allowed", op, len(q.Value), store.MaxValue)
	}
	if len(q.Name) > store.MaxName {
		return fmt.Errorf("%s: name of %d bytes, at most %d are allowed", op, len(q.Name), store.MaxName)
	}
	return nil
}

// opError gives an error to the caller of op. What Close did to it is called by its name.
func (j *Job) opError(ctx context.Context, op string, err error) error {
	e, ok := err.(*store.Error)
	if !ok {
		return fmt.Errorf("%s: %w", op, err)
	}
	if j.isClosed() && (e.Kind == store.Lost || e.Kind == store.Ended && e.End.Rank == j.rank) {
		return fmt.Errorf("%s: %w", op, ErrClosed)
	}
	if e.Kind == store.Ended {
		j.Suspect(e.End.Rank)
	}
	return opError(ctx, op, e)
}

// maxSuspects bounds what a rank says: the first reasons count, and when a large job ends all see all others leave.
const maxSuspects = 8

// Suspect tells gorun that this rank fails because of what another one did: closed what both share, say. If that one ends badly, too,
// it is named as the cause of the job's failure, even where this one has ended first. A hint: nothing is waited for, and it does nothing without gorun.
// What the operations of the job return because of a rank's end is told already.
func (j *Job) Suspect(rank int) {
	if rank < 0 || rank >= j.size || rank == j.rank {
		return
	}
	j.mu.Lock()
	known := j.suspected[rank] || j.closed || len(j.suspected) == maxSuspects
	if !known {
		if j.suspected == nil {
			j.suspected = map[int]bool{}
		}
		j.suspected[rank] = true
	}
	j.mu.Unlock()
	if !known {
		j.ctl.suspect(rank)
	}
}

func (j *Job) isClosed() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.closed
}

// Close says goodbye: the other ranks learn that this rank left in good order. It may be called twice.
// A control connection that ends without it is a death to the others, whatever the exit code.
// Operations that wait end with ErrClosed, watches end, the ledgers read as empty.
//
// Where another launcher started the job, rank 0 serves it: its Close waits for the others, at most 30 s.
func (j *Job) Close() error {
	stops, first := j.shut()
	if !first {
		return nil
	}
	err := j.ctl.close()
	for _, stop := range stops {
		stop()
	}
	return err
}

// shut marks the job closed and returns what ends its watches.
func (j *Job) shut() (stops []func(), first bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.closed {
		return nil, false
	}
	j.closed = true
	for _, stop := range j.watches {
		stops = append(stops, stop)
	}
	return stops, true
}
