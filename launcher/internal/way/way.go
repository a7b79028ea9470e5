// Package way holds what the launcher knows of a way to a host: a command there, with stdin and stdout
// underneath. The built-in ssh client (package sshway) is one way, a command such as OpenSSH's ssh or docker
// exec (Command) the other; what runs over a session does not know which it is.
package way

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
)

// Target is a host as the user gave it. User "" and Port 0 are left to the way (for ssh, to its configuration).
type Target struct {
	Name string // as the user wrote it, for messages
	User string
	Addr string // a name, an alias of the ssh configuration or an address (IPv6 without brackets, with its zone)
	Port int
}

// Host is the address, or the name where there is no address.
func (t Target) Host() string {
	return cmp.Or(t.Addr, t.Name)
}

// A Way runs commands on hosts. It is safe for concurrent use.
type Way interface {
	// Open runs one shell line on the host. ctx bounds the opening only: once Open has returned, the session
	// lives until Close or until its command ends. An error is an *Error, or ctx's cause inside one.
	Open(ctx context.Context, t Target, line string) (Session, error)
}

// A Session is one command that runs on a host. One goroutine may read while another writes; the other methods
// are safe at any time. Who opened it closes it.
type Session interface {
	io.Reader // the command's stdout; io.EOF at its end
	io.Writer // the command's stdin

	// CloseWrite closes the command's stdin.
	CloseWrite() error
	// Stderr is what the command (and the way itself, if it is a command) last wrote to stderr, at most TailSize bytes.
	Stderr() []byte
	// Wait waits for the command's end. The error is nil for exit status 0, an *ExitError for any other end of the
	// command, and an *Error if the way broke before the command's end was known. It may be called more than once.
	Wait() error
	// Close ends the session, whatever it does; Read, Write and Wait then return. It may be called more than once.
	// Whether the remote command dies with it is the command's business: it sees the end of its stdin.
	Close() error
	// Addrs are the two ends of the connection, nil where the way does not know them.
	Addrs() (local, remote net.Addr)
}

// The phases of opening a session, in order.
const (
	PhaseConfigure    = "configure"
	PhaseResolve      = "resolve"
	PhaseConnect      = "connect"
	PhaseHostKey      = "host key"
	PhaseAuthenticate = "authenticate"
	PhaseSession      = "session"
)

// Error says at which phase the way to a host failed, and why.
type Error struct {
	Host   string // Target.Name
	Phase  string // one of the Phase constants
	Cause  error
	Advice string // one line on what to do about it, often a command that works as printed; "" if there is none
	// Temporary says that the same may work a little later: a server that sheds load, a host that is not up yet.
	Temporary bool
}

// Error is host, phase and cause. The advice is not in it: it is a line of its own.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s: %v", e.Host, e.Phase, e.Cause)
}

func (e *Error) Unwrap() error { return e.Cause }

// Advice is the advice in err, or "": that of an *Error, or of another one that has the method Hint.
func Advice(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Advice
	}
	var e interface {
		error
		Hint() string
	}
	if errors.As(err, &e) {
		return e.Hint()
	}
	return ""
}

// ExitError is the end of a command that is not exit status 0.
type ExitError struct {
	Code   int    // exit status; -1 if a signal ended it
	Signal string // name without SIG, such as "KILL"; "" if it exited
}

func (e *ExitError) Error() string {
	if e.Signal != "" {
		return "killed by SIG" + strings.TrimPrefix(e.Signal, "SIG")
	}
	return fmt.Sprintf("exit status %d", e.Code)
}
