package nccl

import (
	"errors"
	"fmt"

	"github.com/gorun-dev/gorun/bootstrap"
)

// Errors that callers tell apart; *Error carries the operation, the communicator and the rank.
var (
	ErrClosed   = errors.New("communicator is closed")
	ErrInUse    = errors.New("communicator is leased by a capture")
	ErrAborted  = errors.New("communicator was aborted")
	ErrMismatch = errors.New("ranks disagree")
	ErrMixed    = errors.New("registered and unregistered buffers in one call")
	ErrRank     = errors.New("a rank has ended") // wraps *bootstrap.RankError
	ErrArgument = errors.New("invalid argument")
	// ErrUnsupported is what the library's version, or the platform, cannot do.
	ErrUnsupported = errors.New("not supported here")
)

// Error is an operation on a communicator that failed.
type Error struct {
	Op   string // "all-reduce #7"
	Comm string // "": there is none
	Rank int    // this rank, in the communicator
	Err  error  // errors.Is finds the sentinel
}

func (e *Error) Error() string {
	if e.Comm == "" {
		return fmt.Sprintf("nccl: %s: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("nccl: %s on communicator %s, rank %d: %v", e.Op, e.Comm, e.Rank, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// errNoComm is what every operation on a nil *Comm gives.
var errNoComm = causef(ErrArgument, "the communicator is nil: this rank has none (Split with a negative color gives nil)")

// FullError is a Carve that does not fit into its arena.
type FullError struct {
	Need, Used, Size uint64 // bytes; Need includes the padding for alignment
}

func (e *FullError) Error() string {
	return fmt.Sprintf("carve %d bytes: %d of the arena's %d bytes are in use", e.Need, e.Used, e.Size)
}

// cause is why something failed: a sentinel, what happened, and the error behind it if there is one.
type cause struct {
	kind error
	text string // the whole message
	err  error
	by   int // 1 + job rank of the member that it comes from; 0: of none, or of the one that err names
}

func (c *cause) Error() string { return c.text }

func (c *cause) Unwrap() []error {
	if c.err == nil {
		return []error{c.kind}
	}
	return []error{c.kind, c.err}
}

// causef makes a cause whose text is "kind: detail".
func causef(kind error, format string, args ...any) *cause {
	return &cause{kind: kind, text: kind.Error() + ": " + fmt.Sprintf(format, args...)}
}

// A communicator's failure travels to the other members as a code, a rank and a text.
const (
	codeAborted uint32 = iota + 1
	codeMismatch
	codeMixed
	codeRank
	codeClosed
)

func codeOf(err error) uint32 {
	switch {
	case errors.Is(err, ErrMismatch):
		return codeMismatch
	case errors.Is(err, ErrMixed):
		return codeMixed
	case errors.Is(err, ErrRank):
		return codeRank
	case errors.Is(err, ErrClosed):
		return codeClosed
	}
	return codeAborted
}

// originOf is the job rank that a failure comes from: the member that ended, closed or aborted; -1 where it is no single one's.
func originOf(err error) int {
	if c, ok := errors.AsType[*cause](err); ok && c.by > 0 {
		return c.by - 1
	}
	if re, ok := errors.AsType[*bootstrap.RankError](err); ok {
		return re.Rank
	}
	return -1
}

// told makes the error of a failure that another member has told. jobRank is the rank that it comes from, for a mismatch the one that told it.
func told(code uint32, jobRank int, text string, rankErr *bootstrap.RankError) error {
	switch code {
	case codeMismatch:
		return &cause{kind: ErrMismatch, text: text}
	case codeMixed:
		return &cause{kind: ErrMixed, text: text}
	case codeClosed:
		return &cause{kind: ErrClosed, text: text, by: jobRank + 1}
	case codeRank:
		if rankErr == nil {
			rankErr = &bootstrap.RankError{Rank: jobRank, Cause: "another member of the communicator saw its end"}
		}
		return &cause{kind: ErrRank, text: text, err: rankErr}
	}
	return &cause{kind: ErrAborted, text: text, by: jobRank + 1}
}
