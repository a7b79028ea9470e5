package graphs

import (
	"errors"
	"fmt"
	"io"
)

var (
	// ErrPeer is the sentinel where the capture failed on another member, which the error names.
	ErrPeer = errors.New("the capture failed on another rank")
	// ErrMode is the sentinel where a call does not reach the mode that Require demands.
	ErrMode = errors.New("a call does not reach the required mode")
	// ErrClosed is the error of a launch after Close.
	ErrClosed = errors.New("graph is closed")
)

// MismatchError is what every member's Capture returns where they disagree.
type MismatchError struct {
	Where string // "capture at train.go:41, call 3 on communicator world"
	Text  string // what differs, with ranks
	Err   error  // sentinel: nccl.ErrMismatch, nccl.ErrMixed, ErrPeer, ErrMode
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("%s: %v: %s", e.Where, e.Err, e.Text)
}

func (e *MismatchError) Unwrap() error { return e.Err }

// PanicError is what Capture returns on the rank whose function panicked; the other members' errors carry the panic's text.
// Printed with %+v it shows the stack.
type PanicError struct {
	Where string // "capture at train.go:41"
	Value any
	Place string // of the panic: "train.go:43"; "" if it is not known
	Stack []byte // of the panicking goroutine
}

func (e *PanicError) Error() string {
	at := ""
	if e.Place != "" {
		at = " at " + e.Place
	}
	return fmt.Sprintf("%s: the function panicked%s: %v", e.Where, at, e.Value)
}

// Unwrap is the panic's value if that was an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Format prints the stack for %+v.
func (e *PanicError) Format(f fmt.State, verb rune) {
	io.WriteString(f, e.Error())
	if verb == 'v' && f.Flag('+') {
		fmt.Fprintf(f, "\n\n%s", e.Stack)
	}
}
