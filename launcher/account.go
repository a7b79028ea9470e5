package launcher

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/launcher/internal/procman"
	"github.com/gorun-dev/gorun/rankenv"
)

// Exit codes of gorun. A failed rank's own code, or 128+n for the signal n that ended it, stands beside them.
const (
	ExitOK         = 0
	ExitUsage      = 2   // wrong command line or job file
	ExitNotStarted = 122 // a host never started
	ExitHostLost   = 123 // a host was lost
	ExitTimeout    = 124 // --timeout is over
	ExitInternal   = 125 // gorun itself failed
	ExitCannotRun  = 126 // the program can't be run
	ExitNotFound   = 127 // the program is missing
	exitSignalBase = 128
)

// exitStatus is how a process ended.
type exitStatus struct {
	Code   int
	Signal syscall.Signal // 0: it exited
	Core   bool
	OOM    bool // the kernel killed it, or a process of it, for lack of memory
	MPI    procman.Departure
}

func (s exitStatus) ok() bool {
	return s.Code == 0 && s.Signal == 0 && !s.MPI.Aborted && !s.MPI.Unfinished && s.MPI.Fault == ""
}

// onlyUnfinished reports whether nothing is wrong but that MPI_Finalize was left out.
func (s exitStatus) onlyUnfinished() bool {
	return s.Code == 0 && s.Signal == 0 && !s.MPI.Aborted && s.MPI.Unfinished && s.MPI.Fault == ""
}

// code is what a shell would make of the status.
func (s exitStatus) code() int {
	switch m := s.MPI; {
	case m.Aborted && m.Code != 0 && m.Code&0xff == 0:
		return 1 // no exit code can be so large
	case m.Aborted:
		return m.Code & 0xff
	case m.Fault != "" || s.onlyUnfinished():
		return 1
	}
	if s.Signal != 0 {
		return exitSignalBase + int(s.Signal)
	}
	return s.Code
}

// String reads after the name of a rank: "exited with code 3", "was killed by SIGSEGV (core dumped)".
func (s exitStatus) String() string {
	switch {
	case s.MPI.Aborted && s.MPI.Text != "":
		return fmt.Sprintf("called MPI_Abort with code %d (%s)", s.MPI.Code, s.MPI.Text)
	case s.MPI.Aborted:
		return fmt.Sprintf("called MPI_Abort with code %d", s.MPI.Code)
	case s.MPI.Fault != "":
		return s.MPI.Fault
	case s.onlyUnfinished():
		return "exited with code 0 before MPI_Finalize"
	}
	t := "exited with code " + strconv.Itoa(s.Code)
	if s.Signal != 0 {
		t = "was killed by " + signalName(s.Signal)
	}
	switch {
	case s.OOM && s.Signal == 0:
		t += " (a process of it was killed by the kernel: out of memory)"
	case s.OOM:
		t += " (by the kernel: out of memory)"
	case s.Core:
		t += " (core dumped)"
	}
	return t
}

// cause is String without "was", as package bootstrap has it.
func (s exitStatus) cause() string { return strings.TrimPrefix(s.String(), "was ") }

func signalName(sig syscall.Signal) string {
	if n := unix.SignalName(sig); n != "" {
		return n
	}
	return "signal " + strconv.Itoa(int(sig))
}

// Account says how a job ended. It is complete when Run returns.
type Account struct {
	Job      string        `json:"job"`
	Code     int           `json:"code"`             // gorun's exit code
	Reason   Reason        `json:"reason"`           // why the job ended
	Cause    int           `json:"cause"`            // the rank that failed first, -1 for none
	Signal   string        `json:"signal,omitempty"` // the signal that interrupted the job
	Error    string        `json:"error,omitempty"`  // what went wrong in gorun, or with the program
	Later    string        `json:"later,omitempty"`  // what ended the job, where ranks were to go on after the first failure
	Start    time.Time     `json:"start"`
	End      time.Time     `json:"end"`
	Prepared time.Duration `json:"prepared_ns"`      // from Start until the first rank was to be started: the build, the node
	Started  time.Duration `json:"started_ns"`       // from Start until the last rank was started
	Met      time.Duration `json:"met_ns,omitempty"` // from Start until the hosts had met each other
	Ended    time.Duration `json:"ended_ns"`         // from Start until the last rank had ended
	LeftOver int           `json:"left_over"`        // processes that ranks left behind and that were killed
	Cut      bool          `json:"output_cut"`       // gorun was ended before all output had been read from it
	Hosts    []HostAccount `json:"hosts,omitempty"`  // of a job with ranks elsewhere
	Ranks    []RankAccount `json:"ranks"`
	Hang     *Hang         `json:"hang,omitempty"`              // what the ranks did at the timeout, or at the last signal that asked for it
	Restarts int           `json:"restarts"`                    // how often the job had been started again when this attempt began
	Attempts []*Account    `json:"attempts,omitempty"`          // those before this one: the first, and the last nine
	LeftOut  int           `json:"attempts_left_out,omitempty"` // how many between them are not kept

	used       string           // how the restarts were used, for Summary
	advice     string           // what would mend the first failure, for Summary
	unstaged   string           // what the rank that failed first lacked of gorun's host, for Summary
	suspicions []node.Suspicion // what ranks said of others, in order

	midLine bool // stderr stands in the middle of a line
	merged  bool // the ranks' stderr is their stdout
}

// HostAccount says how a host came to the job, and left it. Times are from Account.Start.
type HostAccount struct {
	Host      string        `json:"host"`
	Addr      string        `json:"addr,omitempty"`         // of its bootstrap node
	Interface string        `json:"interface,omitempty"`    // that holds this address
	Chosen    string        `json:"chosen,omitempty"`       // the address, and why it is that one
	Agent     string        `json:"agent,omitempty"`        // the agent's file there
	Sent      bool          `json:"sent,omitempty"`         // that file was sent for this job
	Dir       string        `json:"dir,omitempty"`          // where its ranks run, if that is the job's own directory
	Staged    int64         `json:"staged_bytes,omitempty"` // of the program and files, sent for this job
	Opened    time.Duration `json:"opened_ns,omitempty"`    // until its agent spoke
	Prepared  time.Duration `json:"prepared_ns,omitempty"`  // until it had prepared
	Met       time.Duration `json:"met_ns,omitempty"`       // until its node had met all others
	Error     string        `json:"error,omitempty"`        // why it did not start, or was given up
}

// RankAccount says how a rank ended.
type RankAccount struct {
	Rank    int       `json:"rank"`
	Host    string    `json:"host"`
	Program string    `json:"program,omitempty"` // of a job with several
	PID     int       `json:"pid"`               // 0: never started
	Code    int       `json:"code"`              // as a shell has it: 128+n for a signal
	Signal  string    `json:"signal,omitempty"`
	Core    bool      `json:"core_dumped,omitempty"`
	OOM     bool      `json:"out_of_memory,omitempty"` // the kernel killed it, or a process of it, for lack of memory
	Cause   string    `json:"cause"`                   // how it ended, in words
	Stderr  []string  `json:"stderr,omitempty"`        // its last lines there; of the rank that failed first
	Start   time.Time `json:"start,omitzero"`
	End     time.Time `json:"end,omitzero"`
	Joined  bool      `json:"joined"`            // it was a member of the job (bootstrap.Join)
	Left    bool      `json:"left"`              // and said goodbye
	Lost    bool      `json:"lost,omitempty"`    // it was on a host that was lost
	Stopped string    `json:"stopped,omitempty"` // the last signal that gorun sent it to end it, before it ended

	Place *RankPlace `json:"place,omitempty"` // the CPUs that it was bound to, its GPU

	status exitStatus
	fell   time.Time // when it asked for the end of the job; zero: it did not
	done   bool
	order  int // 1 for the process that ended first
	heard  int // 1 for the rank whose end the job heard of first; 0: it did not
	tail   []byte
	shown  bool
}

// Reason is why a job ended.
type Reason string

const (
	ReasonDone      Reason = "done"      // every rank ended by itself, with code 0
	ReasonFailed    Reason = "failed"    // a rank failed
	ReasonTimeout   Reason = "timeout"   // --timeout is over
	ReasonSignal    Reason = "signal"    // gorun was interrupted
	ReasonCannotRun Reason = "cannotrun" // the program could not be started
	ReasonReader    Reason = "reader"    // nobody reads gorun's stdout any more
	ReasonInternal  Reason = "internal"  // gorun itself failed

	ReasonNotStarted Reason = "notstarted" // a host never started
	ReasonHostLost   Reason = "hostlost"   // a host was lost
)

// lostSilently reports whether the rank was a death to the others although it exited with code 0: it had
// joined the job and did not say goodbye.
func (r *RankAccount) lostSilently() bool { return r.done && r.status.ok() && r.Joined && !r.Left }

// fallen is when the rank ended, or had asked for the end of the job.
func (r *RankAccount) fallen() time.Time {
	if !r.fell.IsZero() && r.fell.Before(r.End) {
		return r.fell
	}
	return r.End
}

// before reports whether r ended before o did. A rank can see the end of another before that one's process is gone (the
// goodbye of a rank that then exits with an error, a GPU that is slow to let go), fail, and be gone first: so what counts for ranks that had joined is
// the order in which the job heard of it.
func (r *RankAccount) before(o *RankAccount) bool {
	if r.heard > 0 && o.heard > 0 && (r.heard < o.heard) != r.fallen().Before(o.fallen()) {
		// The end of one that had not joined is all that there was to hear of it, and word from another host takes its time.
		first, last := r, o
		if o.heard < r.heard {
			first, last = o, r
		}
		if first.Joined && first.fallen().Sub(last.fallen()) < originSpan {
			return first == r
		}
	}
	if at, other := r.fallen(), o.fallen(); !at.Equal(other) {
		return at.Before(other)
	}
	return r.order < o.order
}

// failedItself reports whether the rank ended badly, and not because gorun had asked it to.
func (r *RankAccount) failedItself() bool {
	return r.done && !r.status.ok() && (r.Stopped == "" || r.status.MPI.Aborted || r.status.MPI.Fault != "")
}

// originSpan is how long after a failure the rank that it follows from may end at the latest: lastRites, on a busy machine. Where ranks go on after a failure,
// others may fail much later, for reasons of their own.
const originSpan = 5 * lastRites

// origin is the failed rank behind the failure that was heard of first, by what the ranks say of each other.
func (a *Account) origin(first *RankAccount) *RankAccount {
	end := first.End
	blamed := func(by int) *RankAccount { // by one rank; -1: by any
		for _, s := range a.suspicions {
			if r := &a.Ranks[s.Rank]; (by < 0 || s.By == by) && r.failedItself() && r.End.Sub(end) < originSpan {
				return r
			}
		}
		return nil
	}
	concerned := false
	for _, s := range a.suspicions {
		concerned = concerned || s.By == first.Rank || s.Rank == first.Rank
	}
	if !concerned {
		// It may have heard of the others' failure without a word of whose it was.
		if r := blamed(-1); r != nil {
			first = r
		}
	}
	// Who is blamed may blame another in turn.
	seen := map[*RankAccount]bool{}
	for r := first; r != nil && !seen[r]; r = blamed(r.Rank) {
		seen[r] = true
		first = r
	}
	return first
}

// settle finds the first failure and the exit code. interrupt is the signal behind ReasonSignal, cannotRun the code for ReasonCannotRun.
func (a *Account) settle(interrupt syscall.Signal, cannotRun int) {
	a.Cause = -1
	a.forgiveUnfinished()
	var first *RankAccount
	code := 0
	for i := range a.Ranks {
		r := &a.Ranks[i]
		if !r.failedItself() {
			continue
		}
		if first == nil || r.before(first) {
			first, code = r, r.status.code()
		}
	}
	if first != nil && a.Reason == ReasonFailed {
		r := a.origin(first)
		if r == first {
			r = a.wordsOrigin(first)
		}
		if r == first {
			r = a.abortOrigin(first)
		}
		if r != first {
			first, code = r, r.status.code()
		}
		// A rank that ended before, with code 0 but without goodbye, is what the first failure saw.
		for i := range a.Ranks {
			if r := &a.Ranks[i]; r.lostSilently() && r.before(first) {
				first = r
			}
		}
	}
	if first != nil {
		a.Cause = first.Rank
	}
	for i := range a.Ranks {
		a.Ranks[i].Cause = a.Ranks[i].fate()
	}
	switch a.Reason {
	case ReasonDone:
		a.Code, a.Cause = ExitOK, -1
	case ReasonFailed:
		a.Code = code
	case ReasonTimeout:
		a.Code, a.Cause = ExitTimeout, -1
	case ReasonSignal:
		a.Code, a.Cause = exitSignalBase+int(interrupt), -1
		a.Signal = signalName(interrupt)
	case ReasonCannotRun:
		a.Code, a.Cause = cannotRun, -1
	case ReasonNotStarted:
		a.Code, a.Cause = ExitNotStarted, -1
	case ReasonHostLost:
		a.Code, a.Cause = ExitHostLost, -1
	case ReasonReader:
		a.Code, a.Cause = exitSignalBase+int(syscall.SIGPIPE), -1
	default:
		a.Code, a.Cause = ExitInternal, -1
	}
	if a.Cause >= 0 {
		r := &a.Ranks[a.Cause]
		r.Stderr = lastLines(r.tail, 5)
		a.advice = adviceFor(r.tail)
	}
	a.suspicions = nil
	for i := range a.Ranks {
		a.Ranks[i].tail = nil // accounts of attempts are kept
	}
}

// forgiveUnfinished takes a job for done whose ranks have all ended by themselves with code 0, though some without MPI_Finalize: programs leave it out, and nobody
// waited for them.
func (a *Account) forgiveUnfinished() {
	if a.Reason != ReasonFailed {
		return
	}
	for i := range a.Ranks {
		if r := &a.Ranks[i]; !r.done || r.Stopped != "" || !r.status.ok() && !r.status.onlyUnfinished() {
			return
		}
	}
	a.Reason = ReasonDone
	for i := range a.Ranks {
		a.Ranks[i].Code = 0
	}
}

// fate says how a rank ended.
func (r *RankAccount) fate() string {
	switch {
	case r.Lost:
		return "lost with host " + r.Host
	case r.PID == 0:
		return "not started"
	case !r.done:
		return "did not end (pid " + strconv.Itoa(r.PID) + ")"
	case r.status.MPI.Aborted || r.status.MPI.Fault != "":
		return r.status.String()
	case r.Stopped != "" && (r.status.Signal != 0 || r.status.ok() || r.status.onlyUnfinished()):
		return "ended by gorun (" + r.Stopped + ")"
	}
	return r.status.String()
}

// Summary is the text for a person at the end of a job that did not end well, "" for one that did: the first
// failure, its last lines, and what followed from it.
func (a *Account) Summary() string {
	text := a.attemptSummary()
	if text != "" && a.used != "" {
		text += "  " + a.used + "\n"
	}
	return text
}

// attemptSummary is Summary without what concerns attempts before.
func (a *Account) attemptSummary() string {
	var b strings.Builder
	if a.midLine {
		b.WriteByte('\n')
	}
	switch a.Reason {
	case ReasonDone, ReasonReader:
		return ""
	case ReasonFailed:
		r := &a.Ranks[a.Cause]
		of := ""
		if r.Program != "" {
			of = r.Program + ", "
		}
		fmt.Fprintf(&b, "gorun: rank %d (%shost %s, pid %d) %v after %v", r.Rank, of, r.Host, r.PID, r.status, shortTime(r.End.Sub(r.Start)))
		if r.lostSilently() {
			b.WriteString(" without leaving the job (Job.Close), which is a death to the other ranks")
		}
		b.WriteByte('\n')
		if lines := r.Stderr; !r.shown && len(lines) > 0 {
			what := "its last lines"
			if isPanic(lines[0]) {
				what = "its panic"
			}
			if !a.merged {
				what += " on stderr"
			}
			b.WriteString("  " + what + ":\n")
			for _, l := range lines {
				b.WriteString("    " + l + "\n")
			}
		}
		if a.unstaged != "" {
			b.WriteString("  " + a.unstaged + "\n")
		}
		if a.advice != "" {
			b.WriteString("  " + a.advice + "\n")
		}
	case ReasonTimeout:
		fmt.Fprintf(&b, "gorun: timeout: %s\n", a.Error)
	case ReasonSignal:
		fmt.Fprintf(&b, "gorun: interrupted by %s\n", a.Signal)
	default:
		fmt.Fprintf(&b, "gorun: %s\n", a.Error)
	}
	if t := a.consequences(); t != "" {
		b.WriteString("  " + t + "\n")
	}
	return b.String()
}

// shortTime is a duration as a person wants to read it.
func shortTime(d time.Duration) time.Duration {
	if d < time.Millisecond {
		return d.Round(time.Microsecond)
	}
	return d.Round(time.Millisecond)
}

// consequences names what became of the other ranks, in one line.
func (a *Account) consequences() string {
	var fates alike[int]
	for i := range a.Ranks {
		r := &a.Ranks[i]
		if r.Rank == a.Cause {
			continue
		}
		if r.done && r.status.ok() && r.Stopped == "" && a.Reason != ReasonFailed && a.Reason != ReasonHostLost {
			continue
		}
		fates.add(r.fate(), r.Rank)
	}
	if len(fates.of["not started"]) == len(a.Ranks) {
		return "" // nothing followed: the job never began
	}
	var parts []string
	if a.Later != "" {
		parts = append(parts, a.Later)
	}
	for _, what := range fates.texts {
		ranks := fates.of[what]
		if len(ranks) > 1 {
			what = strings.Replace(what, "was ", "were ", 1)
		}
		parts = append(parts, rankenv.RankText(ranks)+" "+what)
	}
	if len(parts) == 0 {
		return ""
	}
	return "then: " + strings.Join(parts, "; ")
}

// isPanic tells the line with which a Go program says why it dies, also behind a time.
func isPanic(line string) bool {
	line = unstamped(line)
	return strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ")
}

func unstamped(line string) string {
	if n := len(stampLayout); len(line) > n {
		if _, err := time.Parse(stampLayout, line[:n]); err == nil {
			return line[n:]
		}
	}
	return line
}

// lastLines are the last n lines of text, cut to a readable length; of a program that panicked or threw those from there on.
func lastLines(text []byte, n int) []string {
	s := strings.TrimRight(string(text), "\r\n")
	if s == "" {
		return nil
	}
	lines := slices.DeleteFunc(strings.Split(s, "\n"), isMark)
	if len(lines) > n {
		from := len(lines) - n
		for i, l := range lines[:from] {
			// What a program dies of stands above its stacks.
			if isPanic(l) || isThrow(l) {
				from = i
			}
		}
		if e := exceptionLine(lines); e >= 0 && e < from {
			from = max(0, e-n/2)
		}
		lines = lines[from : from+n]
	}
	for i, l := range lines {
		l = strings.TrimRight(l, "\r")
		if at := strings.LastIndexByte(l, '\r'); at >= 0 {
			l = l[at+1:]
		}
		lines[i] = shorten(l, 400)
	}
	return lines
}

// shorten leaves of a line about so many bytes.
func shorten(line string, most int) string {
	if len(line) > most {
		line = line[:wholeRunes([]byte(line[:most]))] + "..."
	}
	return line
}
