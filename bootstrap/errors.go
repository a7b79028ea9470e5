package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// ErrClosed is the error of operations on a job that this rank has closed.
var ErrClosed = errors.New("the job is closed")

// ErrLost is the error of operations after the connection to the host's node broke.
var ErrLost = errors.New("the control connection is lost")

// RankError says that a rank of the job has ended.
type RankError struct {
	Rank  int    // -1: of the host itself, in an Event
	Host  string // where it ran, "" if unknown
	Cause string // "exited with code 3", "killed by SIGKILL", "left the job", "lost its control connection"
	Left  bool   // it had closed its job: an end in good order
}

// WaitError says that a wait ended before all came; errors.Is finds the context's error.
type WaitError struct {
	Op      string   // "barrier #3 of group world"
	Missing []int    // job ranks
	Hosts   []string // where those run, "" where it is not known; nil in a job of one host
	Seen    string   // where those of this host were last seen: "rank 3 was last seen in all-reduce #7 on communicator world"; "" if it is not known
	Err     error
}

// GaveUpError says that a meeting did not take place because another member's context ended.
type GaveUpError struct {
	Text string // "rank 1 gave up its wait for rank 2 in all-reduce #3 on comm world"
}

func (e *GaveUpError) Error() string { return e.Text }

// CycleError says that ranks wait for each other in a circle.
type CycleError struct {
	Waits []CycleWait // each waits for the next, the last for the first
}

// CycleWait is one link of a CycleError.
type CycleWait struct {
	Rank int    // job rank
	What string // the operation it is in
}

func (e *RankError) Error() string {
	if e.Rank < 0 {
		return fmt.Sprintf("host %s %s", e.Host, e.Cause)
	}
	if e.Host == "" {
		return fmt.Sprintf("rank %d %s", e.Rank, e.Cause)
	}
	return fmt.Sprintf("rank %d (host %s) %s", e.Rank, e.Host, e.Cause)
}

func (e *WaitError) Error() string {
	if len(e.Missing) == 0 {
		return fmt.Sprintf("%s: %v", e.Op, e.Err)
	}
	s := fmt.Sprintf("%s: %v, missing %s", e.Op, e.Err, store.NamedRanks(e.Missing, e.Hosts))
	if e.Seen != "" {
		s += ": " + e.Seen
	}
	return s
}

func (e *WaitError) Unwrap() error { return e.Err }

func (e *CycleError) Error() string {
	var b strings.Builder
	b.WriteString("ranks wait for each other: ")
	for i, w := range e.Waits {
		is := "rank %d is in %s and waits for "
		if i > 0 {
			is = "rank %d, which is in %s and waits for "
		}
		fmt.Fprintf(&b, is, w.Rank, w.What)
	}
	if len(e.Waits) > 0 {
		fmt.Fprintf(&b, "rank %d", e.Waits[0].Rank)
	}
	return b.String()
}

func rankError(end store.End) *RankError {
	return &RankError{Rank: end.Rank, Host: end.Host, Cause: end.Cause, Left: end.Left}
}

// opError gives an error of the store to the caller of op.
func opError(ctx context.Context, op string, e *store.Error) error {
	switch e.Kind {
	case store.Ended:
		return fmt.Errorf("%s: %w", op, rankError(e.End))
	case store.Cancelled:
		return &WaitError{Op: op, Missing: e.Missing, Hosts: e.Hosts, Seen: e.Text, Err: ctx.Err()}
	case store.Cycle:
		c := &CycleError{}
		for _, w := range e.Waits {
			c.Waits = append(c.Waits, CycleWait(w))
		}
		return c
	case store.GaveUp:
		return fmt.Errorf("%s: %w", op, &GaveUpError{e.Text})
	case store.Lost:
		return fmt.Errorf("%s: %w: %s", op, ErrLost, e.Text)
	}
	return fmt.Errorf("%s: %s", op, e.Text)
}
