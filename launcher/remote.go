package launcher

import (
	"context"
	"errors"
)

// hostError is an error at another host.
type hostError struct {
	host string
	err  error
}

func (e *hostError) Error() string { return "host " + e.host + ": " + e.err.Error() }
func (e *hostError) Unwrap() error { return e.err }

type notStarted struct{ error }

func (r *runner) connect(ctx context.Context) (meeting, error) { return meeting{}, errors.New("x") }
func (r *runner) confirm(node int) bool                        { return true }
