package ncclsys

import (
	"fmt"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Result is a result code; errors.Is(err, ncclsys.ErrRemote) works on every error of this package.
type Result int32

const (
	Success            Result = 0
	ErrUnhandledDevice Result = 1 // a call of the driver failed
	ErrSystem          Result = 2
	ErrInternal        Result = 3
	ErrInvalidArgument Result = 4
	ErrInvalidUsage    Result = 5
	ErrRemote          Result = 6 // a peer or the network failed
	ErrInProgress      Result = 7 // no failure: a non-blocking call is not done
	ErrTimeout         Result = 8
)

var resultNames = [...]string{"Success", "UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument", "InvalidUsage",
	"RemoteError", "InProgress", "Timeout"}

var resultTexts = [...]string{"success", "a call of the device's driver failed", "a system call failed", "internal error",
	"invalid argument", "invalid usage", "a peer or the network failed", "in progress", "timeout"}

func (r Result) Error() string {
	if r >= 0 && int(r) < len(resultTexts) {
		return resultTexts[r]
	}
	return fmt.Sprintf("result %d", int32(r))
}

// Error is a call that failed.
type Error struct {
	Op     string // the C function: "ncclCommInitRank"
	Code   Result
	Name   string // the maker's: "ncclSystemError"
	Text   string // the library's
	Detail string // its last warning, which may be of an earlier call or another thread
}

func (e *Error) Error() string {
	s := fmt.Sprintf("%s: %s (%s %d)", e.Op, e.Text, e.Name, int32(e.Code))
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

func (e *Error) Unwrap() error { return e.Code }

// check makes a result an error. ErrInProgress is returned as it is.
func (l *Library) check(e *dl.Entry, rc int32) error {
	if rc == 0 {
		return nil
	}
	return l.fail(e, Result(rc))
}

func (l *Library) fail(e *dl.Entry, r Result) error {
	switch r {
	case ErrInProgress:
		return ErrInProgress
	case dl.Absent:
		return &dl.NeedError{What: e.Name, Needs: e.Since, Found: l.found(), Path: l.lib.Path()}
	}
	return l.newError(e.Name, r)
}

// newError reads the library's texts at once: the last warning is one buffer for all threads.
func (l *Library) newError(op string, r Result) *Error {
	err := &Error{Op: op, Code: r, Detail: l.LastError()}
	err.Text = dl.GoString(l.f.GetErrorString.Call3(uintptr(uint32(r)), 0, 0))
	if err.Text == "" {
		err.Text = r.Error()
	}
	err.Name = l.resultName(r)
	return err
}

func (l *Library) resultName(r Result) string {
	switch {
	case r == ErrUnhandledDevice:
		return l.vendor.prefix + "Unhandled" + l.vendor.cudaName + "Error"
	case r >= 0 && int(r) < len(resultNames):
		return l.vendor.prefix + resultNames[r]
	}
	return l.vendor.prefix + "Result_t"
}

// AsyncError makes the state that CommAsyncError gave an error.
func (l *Library) AsyncError(r Result) error {
	if r == Success {
		return nil
	}
	if r == ErrInProgress {
		return ErrInProgress
	}
	return l.newError("asynchronous error", r)
}

// LastError is the text of the library's last warning, "" if it has none or does not tell. Any thread replaces it.
func (l *Library) LastError() string {
	if l.f.GetLastError.Func == 0 {
		return ""
	}
	return dl.GoString(l.f.GetLastError.Call3(0, 0, 0))
}
