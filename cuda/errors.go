package cuda

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// Errors that callers tell apart with errors.Is. *Error carries the operation.
var (
	ErrCaptureUnsafe      = errors.New("operation not permitted while a stream is capturing")
	ErrCaptureInvalidated = errors.New("capture was invalidated")
	ErrCaptureUnjoined    = errors.New("a forked stream was not joined before the end of the capture")
	ErrClosed             = errors.New("already closed")
	ErrIllegalAddress     = errors.New("illegal address") // memory used after free: sticky
	ErrOutOfMemory        = errors.New("out of memory")
)

// Error is an operation that failed.
type Error struct {
	Op     string // "stream synchronize"
	Detail string // the subject: "stream 2 in kernel saxpy"
	Err    error
	Stack  string // of a panic in a kernel, host function or task; %+v prints it
}

// Error is "cuda: op: detail: cause".
func (e *Error) Error() string { return "cuda: " + e.text() }

func (e *Error) text() string {
	parts := make([]string, 0, 3)
	for _, p := range []string{e.Op, e.Detail} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	if inner, ok := e.Err.(*Error); ok {
		parts = append(parts, inner.text()) // one prefix is enough
	} else if e.Err != nil {
		parts = append(parts, e.Err.Error())
	}
	return strings.Join(parts, ": ")
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Format adds for %+v the stack of the panic that the error comes from, if it comes from one.
func (e *Error) Format(f fmt.State, verb rune) {
	switch {
	case verb == 'q':
		fmt.Fprintf(f, "%q", e.Error())
	default:
		io.WriteString(f, e.Error())
	}
	if verb != 'v' || !f.Flag('+') {
		return
	}
	for err := error(e); err != nil; err = errors.Unwrap(err) {
		if inner, ok := err.(*Error); ok && inner.Stack != "" {
			io.WriteString(f, "\n"+inner.Stack)
			return
		}
	}
}

// HeldError refuses to free memory that a live graph uses.
type HeldError struct {
	Memory  *Memory
	Holders []string
}

// Error names the memory and who holds it.
func (e *HeldError) Error() string {
	return fmt.Sprintf("cuda: free: %s: in use by %s", e.Memory, strings.Join(e.Holders, ", "))
}
