package launcher

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Signals are those that a process which runs a job should be told of, as Options.Signals: what ends a job, what ranks get as it came, and SIGIO, which asks what they do. Others
// mean gorun's own process (SIGABRT), come from the kernel for it (SIGPROF, SIGVTALRM, SIGCHLD, SIGPIPE, SIGURG, SIGXFSZ), or are about a
// terminal that ranks do not have (SIGWINCH, SIGTTIN, SIGTTOU).
func Signals() []os.Signal {
	all := []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGIO, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGXCPU, syscall.SIGPWR}
	// Those below belong to the C libraries' threads.
	for sig := syscall.Signal(35); sig <= 64; sig++ {
		all = append(all, sig)
	}
	return all
}

// EndsJob reports whether a signal to gorun ends the job.
func EndsJob(s os.Signal) bool {
	return s == syscall.SIGINT || s == syscall.SIGTERM || s == syscall.SIGHUP
}

// isForwarded reports whether ranks get a signal as it came.
func isForwarded(s os.Signal) bool {
	return !EndsJob(s) && s != syscall.SIGIO && slices.Contains(Signals(), s)
}

// TimedSignal is a signal that the ranks get some time before the job's timeout.
type TimedSignal struct {
	Signal syscall.Signal
	Before time.Duration
}

// ParseTimedSignal reads "USR1@30s": SIGUSR1, 30 s before the timeout. A signal may also have its full name or its number.
func ParseTimedSignal(s string) (TimedSignal, error) {
	name, before, ok := strings.Cut(s, "@")
	if !ok {
		return TimedSignal{}, fmt.Errorf("%q is no signal and time before the timeout, such as USR1@30s", s)
	}
	sig, err := parseSignal(name)
	if err != nil {
		return TimedSignal{}, err
	}
	d, err := parseDuration(before)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q is no time before the timeout", before)
	}
	return TimedSignal{sig, d}, err
}

func parseSignal(name string) (syscall.Signal, error) {
	sig, err := strconv.Atoi(name)
	if err != nil {
		upper := strings.ToUpper(name)
		if !strings.HasPrefix(upper, "SIG") {
			upper = "SIG" + upper
		}
		sig = int(unix.SignalNum(upper))
	}
	switch {
	case sig < 1 || sig > 64:
		return 0, fmt.Errorf("%q is no signal such as USR1 or TERM", name)
	case sig == int(syscall.SIGKILL) || sig == int(syscall.SIGSTOP):
		return 0, fmt.Errorf("%s can't be seen by a program", signalName(syscall.Signal(sig)))
	}
	return syscall.Signal(sig), nil
}

// String is the form that ParseTimedSignal reads.
func (t TimedSignal) String() string {
	name := strconv.Itoa(int(t.Signal))
	if n := unix.SignalName(t.Signal); n != "" {
		name = strings.TrimPrefix(n, "SIG")
	}
	return name + "@" + t.Before.String()
}

// MarshalText is String.
func (t TimedSignal) MarshalText() ([]byte, error) { return []byte(t.String()), nil }
