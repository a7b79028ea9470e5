// Package store is the shared state of a job: keys, groups that meet, unique ids, and which ranks
// have joined and ended. It is one implementation for the host's node, for ranks of one process and
// for rank 0 under other launchers. It does no input or output and starts no goroutine; replies are
// given through callbacks, which must not block.
package store

import (
	"fmt"
	"strings"
	"sync"

	"github.com/gorun-dev/gorun/rankenv"
)

// MaxValue bounds a value, in bytes.
const MaxValue = 64 << 10

// MaxName bounds the name of a key, a group, an id, and what a rank says it is in.
const MaxName = 1024

// Kind says what a Request asks for.
type Kind uint8

const (
	Put Kind = iota + 1
	Get
	Gather     // give a value to a group's generation, get all values
	PublishID  // put an id
	WaitID     // get an id
	CloseGroup // the rank gives up its handle of a group; no reply
)

// Request is what a rank asks of the store.
type Request struct {
	Kind  Kind
	Name  string // of the key, the id or the group
	Value []byte

	// Of a group:
	Opening uint32 // how often this rank had opened a group of this name before
	Ranks   []int  // the group's job ranks in group order; nil: all ranks of the job
	Gen     uint64 // generation, from 1
	Barrier bool   // values are not asked for
	What    string // not empty: the rank blocks in this operation (Meet)

	Quiet bool // Get: it may never come, and who waits for it is not said to wait
}

// Reply answers a Request.
type Reply struct {
	Values [][]byte // of a Gather, in group order; the value of a Get or WaitID as the only one
	Err    *Error
	Coded  *Coded // the same for all to whom this reply is given; may be nil
}

// Coded keeps the encoding of a reply that many get.
type Coded struct {
	once sync.Once
	b    []byte
}

// Bytes returns what encode made for the first who asked.
func (c *Coded) Bytes(encode func() []byte) []byte {
	if c == nil {
		return encode()
	}
	c.once.Do(func() { c.b = encode() })
	return c.b
}

// ErrorKind tells the forms of an Error apart.
type ErrorKind uint8

const (
	Ended     ErrorKind = iota + 1 // a rank that was needed has ended
	Cancelled                      // the waiter gave up
	Cycle                          // ranks wait for each other
	Refused                        // wrong use, in words
	Lost                           // the control plane itself is gone, in words
	GaveUp                         // another member left the meeting, in words
)

// Error is why a request failed, in a form that travels.
type Error struct {
	Kind    ErrorKind
	End     End         // Ended
	Missing []int       // Cancelled: job ranks that had not come
	Hosts   []string    // Cancelled: where those run, "" where it is not known; nil in a job of one host
	Waits   []CycleWait // Cycle: each waits for the next, the last for the first
	Text    string      // Refused, Lost, GaveUp; Cancelled: what the node knows of the missing ranks of its host
}

func (e *Error) Error() string {
	switch e.Kind {
	case Ended:
		return fmt.Sprintf("rank %d (%s) %s", e.End.Rank, e.End.Host, e.End.Cause)
	case Cancelled:
		return "cancelled"
	case Cycle:
		return fmt.Sprintf("ranks wait in a circle: %v", e.Waits)
	}
	return e.Text
}

// End is how a rank ended.
type End struct {
	Rank  int
	Host  string
	Cause string
	Left  bool // said goodbye
}

// CycleWait is one link of a circle.
type CycleWait struct {
	Rank int
	What string
}

// EventKind is what happened to a rank or a host.
type EventKind uint8

const (
	Joined EventKind = iota + 1
	Left
	Died
	HostLost
)

// Event is one entry of the job's history.
type Event struct {
	Kind EventKind
	Node int
	End  End // Rank is -1 for a host; the rest is set for Left and Died
}

func refused(format string, args ...any) *Error {
	return &Error{Kind: Refused, Text: fmt.Sprintf(format, args...)}
}

// maxPlaces is how many hosts NamedRanks names.
const maxPlaces = 8

// NamedRanks is [rankenv.RankText] with the hosts of the ranks: "rank 2 (host a), ranks 5-7 (host b)". hosts may be nil.
func NamedRanks(ranks []int, hosts []string) string {
	if len(hosts) != len(ranks) || len(ranks) == 0 {
		return rankenv.RankText(ranks)
	}
	var parts []string
	for i := 0; i < len(ranks); {
		j := i + 1
		for j < len(ranks) && hosts[j] == hosts[i] {
			j++
		}
		if len(parts) == maxPlaces-1 && j < len(ranks) {
			return strings.Join(append(parts, rankenv.RankText(ranks[i:])), ", ")
		}
		part := rankenv.RankText(ranks[i:j])
		if hosts[i] != "" {
			part += " (host " + hosts[i] + ")"
		}
		parts = append(parts, part)
		i = j
	}
	return strings.Join(parts, ", ")
}
