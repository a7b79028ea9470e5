package nccl

import "errors"

var (
	ErrClosed   = errors.New("communicator is closed")
	ErrInUse    = errors.New("communicator is leased by a capture")
	ErrAborted  = errors.New("communicator was aborted")
	ErrMismatch = errors.New("ranks disagree")
	ErrMixed    = errors.New("registered and unregistered buffers in one call")
	ErrRank     = errors.New("a rank has ended") // wraps *bootstrap.RankError
	ErrArgument = errors.New("invalid argument")
)

// Error is an operation on a communicator that failed.
type Error struct {
	Op   string // "all-reduce #7"
	Comm string
	Rank int
	Err  error // errors.Is finds the sentinel
}

func (e *Error) Error() string { panic("stub") }
func (e *Error) Unwrap() error { return e.Err }
