package sshway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/gorun-dev/gorun/launcher/internal/way"
	"golang.org/x/crypto/ssh"
)

func failure(h hop, phase string, cause error, advice string) *way.Error {
	return &way.Error{Host: h.t.Name, Phase: phase, Cause: cause, Advice: advice}
}

// errDropped marks a connection that the server ended before it authenticated anyone, as sshd does above MaxStartups.
var errDropped = errors.New("the server closed the connection before authentication")

// via says that it was not the host itself but the one it is reached through.
func via(h, jump hop, err error) error {
	e, ok := errors.AsType[*way.Error](err)
	if !ok || e.Host == h.t.Name {
		return err
	}
	cp := *e
	cp.Host, cp.Cause = h.t.Name, fmt.Errorf("jump host %s: %w", jump.t.Name, e.Cause)
	return &cp
}

// unknownName says that the name service answered, and knows no such name.
type unknownName struct{ text string }

func (e *unknownName) Error() string { return e.text }

func isTimeout(err error) bool {
	var ne net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &ne) && ne.Timeout()
}

// timedOut reports whether a context has ended because its time is over, by a deadline or by whoever has cancelled it for that.
func timedOut(ctx context.Context) bool { return isTimeout(ctx.Err()) || isTimeout(context.Cause(ctx)) }

// dialFailure is the error of a connection that was not made.
func dialFailure(ctx context.Context, h hop, err error) *way.Error {
	e := failure(h, way.PhaseConnect, err, "")
	if de, ok := errors.AsType[*net.DNSError](err); ok && ctx.Err() == nil {
		e.Phase = way.PhaseResolve
		e.Cause = fmt.Errorf("name %s: %s", de.Name, de.Err)
		if de.IsNotFound {
			e.Cause = &unknownName{e.Cause.Error()}
		}
		e.Temporary = true
		e.Advice = fmt.Sprintf("check the name, or give its address by HostName in the ssh configuration (Host %s)", h.o.original)
		return e
	}
	what := "dial " + h.address()
	switch {
	case ctx.Err() != nil:
		e.Cause = fmt.Errorf("%s: %w", what, context.Cause(ctx))
		e.Advice = fmt.Sprintf("nothing answered: is the host up, and port %d open in its firewall?", h.o.port)
		e.Temporary = timedOut(ctx)
	case errors.Is(err, syscall.ECONNRESET): // accepted by the kernel, and dropped
		e.Cause = fmt.Errorf("%s: %w (%w)", what, errDropped, syscall.ECONNRESET)
		e.Temporary = true
	case errors.Is(err, syscall.ECONNREFUSED):
		e.Cause = fmt.Errorf("%s: %w", what, syscall.ECONNREFUSED)
		e.Advice = fmt.Sprintf("is sshd running there, on port %d?", h.o.port)
		e.Temporary = true
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		e.Advice = "check the address and this machine's routes"
		e.Temporary = true
	case isTimeout(err), errors.Is(err, syscall.ETIMEDOUT):
		e.Advice = fmt.Sprintf("nothing answered: is the host up, and port %d open in its firewall?", h.o.port)
		e.Temporary = true
	}
	return e
}

// isEnd says whether err is an end of the connection by the other side.
func isEnd(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// handshakeFailure is the error of a connection that was made and led to no authenticated session. l is nil if the
// server got no request to authenticate.
func handshakeFailure(ctx context.Context, h hop, conn *watchedConn, check *hostKeyCheck, l *login, err error) *way.Error {
	cause := err
	if inner := errors.Unwrap(err); inner != nil {
		cause = inner // without "ssh: handshake failed"
	}
	if he, ok := errors.AsType[*hostKeyError](err); ok {
		return failure(h, way.PhaseHostKey, he, he.advice)
	}
	if ae, ok := errors.AsType[*ssh.AlgorithmNegotiationError](err); ok {
		if strings.Contains(ae.Error(), "host key") {
			e := failure(h, way.PhaseHostKey, fmt.Errorf("the server has none of the key types known for it: %w", ae), "")
			e.Advice = "compare the fingerprint, then: " + check.learn()
			return e
		}
		return failure(h, way.PhaseConnect, ae, "take OpenSSH's client by --rsh ssh")
	}
	if first := conn.firstError(); first != nil && isEnd(first) {
		err, cause = first, first
	}
	phase := way.PhaseConnect
	switch {
	case l != nil:
		phase = way.PhaseAuthenticate
	case check.ok:
		phase = way.PhaseHostKey
	}
	switch {
	case ctx.Err() != nil:
		what := "connected to " + h.address() + ", but no ssh server spoke"
		switch {
		case l != nil:
			what = "authentication did not end"
		case check.ok:
			what = "the key exchange did not end"
		}
		e := failure(h, phase, fmt.Errorf("%s: %w", what, context.Cause(ctx)), "")
		e.Temporary = timedOut(ctx)
		if phase == way.PhaseConnect {
			e.Advice = fmt.Sprintf("is it sshd that listens on port %d there? it may be stopped or overloaded", h.o.port)
		}
		return e
	case l == nil && isEnd(err):
		e := failure(h, phase, fmt.Errorf("%w (%w)", errDropped, cause), "raise MaxStartups in the host's sshd_config if it is overloaded; /etc/hosts.deny or a firewall may refuse too")
		e.Temporary = true
		return e
	case l != nil && isEnd(err):
		e := failure(h, phase, fmt.Errorf("the server closed the connection during authentication: %w", cause), "sshd's log on the host says why")
		e.Temporary = true
		return e
	case l != nil:
		advice, reason := l.explain()
		if !strings.Contains(cause.Error(), "unable to authenticate") {
			reason = fmt.Errorf("%w (%w)", reason, cause)
		}
		if strings.Contains(cause.Error(), "Too many authentication failures") {
			advice = "name the right key by IdentityFile, with IdentitiesOnly yes"
		}
		return failure(h, phase, reason, advice)
	}
	return failure(h, phase, cause, "")
}
