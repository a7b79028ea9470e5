package cusys

import (
	"errors"
	"fmt"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Result is a driver's result code. errors.Is(err, cusys.ErrOutOfMemory) works on every error of this package. The codes
// below are the same for all vendors; of others only the name that the library gives says what they mean.
type Result int32

const (
	Success               Result = 0
	ErrInvalidValue       Result = 1
	ErrOutOfMemory        Result = 2
	ErrNotInitialized     Result = 3
	ErrDeinitialized      Result = 4
	ErrStubLibrary        Result = 34
	ErrNoDevice           Result = 100
	ErrInvalidDevice      Result = 101
	ErrInvalidContext     Result = 201
	ErrNotFound           Result = 500
	ErrNotReady           Result = 600
	ErrIllegalAddress     Result = 700
	ErrLaunchTimeout      Result = 702
	ErrHardwareStackError Result = 714
	ErrLaunchFailed       Result = 719
	ErrNotPermitted       Result = 800
	ErrNotSupported       Result = 801
	ErrSystemNotReady     Result = 802
	ErrDriverMismatch     Result = 803
	ErrCaptureUnsupported Result = 900
	ErrCaptureInvalidated Result = 901
	ErrCaptureMerge       Result = 902
	ErrCaptureUnmatched   Result = 903
	ErrCaptureUnjoined    Result = 904
	ErrCaptureIsolation   Result = 905
	ErrCaptureImplicit    Result = 906
	ErrCapturedEvent      Result = 907
	ErrCaptureWrongThread Result = 908
	absent                Result = dl.Absent
)

func (r Result) Error() string { return fmt.Sprintf("driver result %d", int32(r)) }

// Sticky reports whether the context, and in practice the process's use of the device, is lost with this result.
func (r Result) Sticky() bool {
	switch r {
	case ErrIllegalAddress, ErrLaunchTimeout, ErrLaunchFailed, ErrHardwareStackError,
		710, 715, 716, 717, 718: // assert, illegal instruction, misaligned address, address space, program counter
		return true
	}
	return false
}

// Error is a call that the driver refused, or the failure of earlier work that the call reports.
type Error struct {
	Op   string // the C function: "cuMemCreate"
	Code Result
	Name string // the vendor's: "CUDA_ERROR_OUT_OF_MEMORY"; "" if the library does not know the code
	Text string // the library's own
}

func (e *Error) Error() string {
	text, name := e.Text, e.Name
	if text == "" {
		text = "unknown error"
	}
	if name != "" {
		name += " "
	}
	s := fmt.Sprintf("%s: %s (%s%d)", e.Op, text, name, int32(e.Code))
	if hint := hints[e.Code]; hint != "" {
		s += ": " + hint
	}
	return s
}

func (e *Error) Unwrap() error { return e.Code }

// hints say what the driver's own text does not.
var hints = map[Result]string{
	ErrStubLibrary:    "this is the toolkit's stub, the driver's library is not installed or comes later in the search path",
	ErrSystemNotReady: "the fabric manager is not running",
	ErrDriverMismatch: "the library does not fit the kernel driver",
}

// check makes a result an error.
func (d *Driver) check(e *dl.Entry, rc int32) error {
	if rc == 0 {
		return nil
	}
	return d.fail(e, Result(rc))
}

func (d *Driver) fail(e *dl.Entry, r Result) error {
	if r == absent {
		return d.lacks(e.Name, e.Since)
	}
	return &Error{Op: e.Name, Code: r, Name: d.errorName(r), Text: d.errorText(r)}
}

// lacks says that the library does not have something.
func (d *Driver) lacks(what, since string) error {
	found := d.vendor.Name
	if d.version != (Version{}) {
		found += " " + d.version.String()
	}
	return &dl.NeedError{What: what, Needs: since, Found: found, Path: d.lib.Path()}
}

// IsMissing reports whether err says that the library lacks a function.
func IsMissing(err error) bool {
	var n *dl.NeedError
	return errors.As(err, &n)
}
