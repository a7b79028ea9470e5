package launcher

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Job is what a user asks for. The zero value of each field is its default.
type Job struct {
	NP              int           // number of ranks; 0: every slot of the hosts; without hosts one a GPU, at least one
	Program         string        // a name that is looked up in PATH, a path, or a directory with a Go main package
	Args            []string      // the program's arguments
	Dir             string        // working directory of the ranks; "": the current one
	Env             []Setting     // variables for the ranks, beside the inherited ones
	EnvLike         string        // the launcher whose variables ranks get, too: rankenv.LikeOpenMPI, rankenv.LikeSlurm; "": none
	MPI             string        // the process manager that MPI_Init finds: MPIPMI, MPIPMIx, MPIOff; "" and MPIAuto: the one that the program's MPI library asks for
	Device          string        // device token of the ranks ("host"); "": each rank's own choice
	Timeout         time.Duration // end the job after this time; 0 and NoTimeout: never
	KillGrace       time.Duration // time between asking ranks to end and killing them; 0: DefaultKillGrace, NoGrace: none
	OnFail          string        // what becomes of the other ranks when one has failed: OnFailKill or OnFailWait; "": OnFailKill
	TimeoutSignal   TimedSignal   // a signal to the ranks before Timeout; zero: none
	Restarts        *int          // how often the job is started again after a failure; nil: never
	RestartWindow   time.Duration // only failures of that much time count; 0: all
	TagOutput       *bool         // "[3] " before each line; nil: no
	Timestamp       *bool         // the time before each line; nil: no
	Merge           *bool         // the ranks' stderr goes where their stdout goes; nil: no
	OutputDir       string        // directory for a file of each rank and stream; "": none
	FilesOnly       *bool         // what goes to these files is shown nowhere else; nil: no
	Stdin           string        // who reads gorun's stdin: a rank's number, StdinAll or StdinNone; "": rank 0
	KeepLauncherEnv *bool         // let the ranks inherit the variables that another launcher left over; nil: no
	Report          string        // file for the account in JSON; "": none
	Apps            []App         // several programs, instead of NP, Program and Args

	Hosts         []Host // where the ranks run; none: this host
	Hostfile      string // file with the hosts; "": none
	MapBy         *MapBy // how ranks are placed on hosts; nil: by slot
	Oversubscribe *bool  // a host may get more ranks than it has slots; nil: no
	BindTo        Bind   // what ranks are bound to; zero: each host's choice
	GPUBind       string // which GPUs a rank sees: GPUBindNone, GPUBindHide or GPUBindShare; "": GPUBindNone
	RM            string // whose allocation gives the hosts where neither Hosts nor Hostfile does; "": the one that is there

	RSH               string        // command that reaches a host; "": the built-in ssh client
	SSHConfig         string        // ssh configuration; "": the user's and the system's
	AcceptNewHostKeys *bool         // take the key of a host that is not known yet; nil: no
	ConnectTimeout    time.Duration // for reaching all hosts; 0: DefaultConnectTimeout
	Ports             PortRange     // for gorun's own connections between hosts; zero: any
	Stage             []string      // files that are sent to the hosts beside the program; StageNone alone: not even that
}

// PortRange is a range of ports, both ends belong to it.
type PortRange struct{ From, To int }

// StageNone as the only element of Job.Stage says that the program is on every host.
const StageNone = "none"

// Setting is a variable for the ranks. Without a value it names one that they inherit although it would be scrubbed.
type Setting struct {
	Name, Value string
	Inherit     bool
}

// Values of Job.Stdin.
const (
	StdinRank0 = "0"
	StdinAll   = "all"
	StdinNone  = "none"
)

// Values of Job.OnFail.
const (
	OnFailKill = "kill" // they are ended
	OnFailWait = "wait" // they go on until they end by themselves
)

const (
	// DefaultConnectTimeout is what a host may take that boots its containers, or whose sshd refuses a few connections first.
	DefaultConnectTimeout = 30 * time.Second
	// DefaultKillGrace is long enough for a handler that closes files, and short enough to wait for.
	DefaultKillGrace = 5 * time.Second
	// NoGrace kills at once.
	NoGrace time.Duration = -1
	// NoTimeout says that a job may take any time.
	NoTimeout time.Duration = -1
	// MaxNP bounds the number of ranks: more is a slip of the finger. The kernel's own default limit of processes is
	// 32768.
	MaxNP = 16384
)

// Merge combines what was asked for in several places, the strongest first: flags, environment, job file. Variables of all places
// are kept; of two for one name that of the stronger place comes last, and wins. The hosts are those of one place.
func Merge(jobs ...Job) Job {
	var j Job
	for _, weaker := range jobs {
		for _, o := range JobOptions {
			o.merge(&j, &weaker)
		}
	}
	return j
}

// UsageError is a mistake in what the user asked for, as opposed to something that went wrong: exit code 2.
type UsageError struct {
	Flag string // of the setting that is wrong, which stands before Msg; "": none, or several
	Msg  string
	Hint string // a next step, "" for none
}

func (e *UsageError) Error() string {
	text := e.Msg
	if e.Flag != "" {
		text = e.Flag + " " + text
	}
	if e.Hint != "" {
		text += "; " + e.Hint
	}
	return text
}

func usagef(format string, args ...any) error { return &UsageError{Msg: fmt.Sprintf(format, args...)} }

// flagf is usagef for what is wrong with the setting of a flag.
func flagf(flag, format string, args ...any) error {
	return &UsageError{Flag: flag, Msg: fmt.Sprintf(format, args...)}
}

// parseDuration reads a duration of a flag or job file: as Go writes them ("90s", "1h30m"), or a number of seconds.
func parseDuration(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		var err2 error
		if d, err2 = time.ParseDuration(s + "s"); err2 != nil {
			if n, err := strconv.ParseFloat(strings.TrimRight(s, "hmsnuµ"), 64); err == nil && n > 1e6 {
				return 0, fmt.Errorf("%q is longer than gorun can count (292 years)", s)
			}
			return 0, fmt.Errorf("%q is no duration such as 30s, 5m, 1h30m or a number of seconds", s)
		}
	}
	if d < 0 {
		return 0, fmt.Errorf("%q is negative", s)
	}
	return d, nil
}

// parseTimeout reads a time for a job: a duration, 0 for none.
func parseTimeout(s string) (time.Duration, error) {
	d, err := parseDuration(s)
	if err == nil && d == 0 {
		return NoTimeout, nil
	}
	return d, err
}

// parseStdin reads who gets gorun's stdin: a rank's number, all or none.
func parseStdin(s string) (string, error) {
	if s == StdinAll || s == StdinNone {
		return s, nil
	}
	if n, err := strconv.Atoi(s); err == nil && n >= 0 && n < MaxNP {
		return strconv.Itoa(n), nil
	}
	return "", &valueError{s, "a rank's number, all or none"}
}

// parseGrace reads a kill grace: a duration, 0 for none.
func parseGrace(s string) (time.Duration, error) {
	d, err := parseDuration(s)
	if err == nil && d == 0 {
		return NoGrace, nil
	}
	return d, err
}

// parsePositive reads a duration that is not zero.
func parsePositive(s string) (time.Duration, error) {
	d, err := parseDuration(s)
	if err == nil && d == 0 {
		return 0, fmt.Errorf("%q is no time at all", s)
	}
	return d, err
}

// ParsePorts reads a range of ports: 40000-40100, or one port.
func ParsePorts(s string) (PortRange, error) {
	from, to, isRange := strings.Cut(s, "-")
	if !isRange {
		to = from
	}
	var r PortRange
	var err error
	if r.From, err = parsePort(from); err == nil {
		r.To, err = parsePort(to)
	}
	if err != nil || r.To < r.From {
		return PortRange{}, fmt.Errorf("%q is no range of ports such as 40000-40100", s)
	}
	return r, nil
}

func (r PortRange) String() string {
	if r.From == r.To {
		return strconv.Itoa(r.From)
	}
	return strconv.Itoa(r.From) + "-" + strconv.Itoa(r.To)
}

// CommandLine is the gorun command line that asks for the same job. Only a job file can give the argument ":"
// to one of several programs that is not the last.
func (j Job) CommandLine() string {
	words := []string{"gorun"}
	for _, o := range JobOptions {
		words = append(words, o.words(&j)...)
	}
	if j.Program != "" {
		// Not a flag, not a command of gorun's own, and no further program.
		if strings.HasPrefix(j.Program, "-") || len(words) == 1 && !strings.Contains(j.Program, "/") || slices.Contains(j.Args, ":") {
			words = append(words, "--")
		}
		words = append(words, j.Program)
	}
	words = append(words, j.Args...)
	for i, a := range j.Apps {
		words = append(words, ":") // the first one, too: what stands before it is the job's
		of := a.job()
		for _, o := range JobOptions {
			words = append(words, o.words(&of)...)
		}
		if last := i == len(j.Apps)-1; strings.HasPrefix(a.Program, "-") || last && slices.Contains(a.Args, ":") {
			words = append(words, "--")
		}
		words = append(append(words, a.Program), a.Args...)
	}
	for i, w := range words {
		words[i] = ShellQuote(w)
	}
	return strings.Join(words, " ")
}
