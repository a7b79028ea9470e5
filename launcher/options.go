package launcher

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher/internal/placement"
	"github.com/gorun-dev/gorun/rankenv"
)

// Option is a setting of a job in all the places where it may be given: a flag, a variable of gorun's environment, a key of a
// job file. The command line, the help texts, the job file and the precedence among them are made of JobOptions: a new setting
// is a field of Job and an element of JobOptions.
type Option struct {
	Flags   []string // its names with their dashes; help shows the first two; none: there is no flag
	Arg     string   // name of the flag's value, "" for a switch
	Env     string   // variable of gorun's environment, "" for none
	Key     string   // table and key in a job file, "launch.timeout"; "" for none
	Also    string   // another key for the same, which earlier versions had
	Help    string   // what it does, for gorun help and the schema
	Example string   // a value as TOML, for gorun help job-file
	Note    string   // more about the key, for gorun help job-file
	Values  []string // words that it may be, for completion
	Default string   // what it is where it is not set, as a value of a flag; "": help tells
	App     bool     // each of several programs may have its own: a field of App
	field
}

// field is how an option is kept in a job.
type field struct {
	kind     kind
	min, max int                              // bounds of a number
	choices  []string                         // all that it may be; none: that cannot be listed
	set      func(j *Job, value string) error // reads one value; that of a list is added
	values   func(j *Job) []string            // as set reads them; none where nothing was set
	merge    func(j, weaker *Job)             // takes the weaker job's value where j has none
}

// kind is what stands for an option in a job file.
type kind int

const (
	kindText   kind = iota // a string that is not empty
	kindNumber             // an integer
	kindSwitch             // true or false
	kindWord               // a string, a number, true or false
	kindList               // an array of strings
	kindWords              // a string, or an array of strings
)

// JobOptions are all settings of a job, in the order in which help shows them.
var JobOptions = []Option{
	{Flags: []string{"-np", "-n", "--np"}, Arg: "N", Key: "job.np", Example: "4", App: true,
		Help:  "number of ranks (default: every slot of the hosts; without hosts one a GPU, at least one)",
		field: number(func(j *Job) *int { return &j.NP }, 1, MaxNP)},
	{Key: "job.program", Example: `"./examples/train"`, Note: "a name, a path, or a Go package directory", Help: "what the ranks run: a name that is looked up in PATH, a path, or a Go package directory",
		App: true, field: program()},
	{Key: "job.args", Example: `["-epochs", "3"]`, Help: "the program's arguments",
		App: true, field: arguments()},
	{Flags: []string{"-H", "--host"}, Arg: "LIST", Help: "hosts: [user@]host[:slots],...; one slot without a number; may be repeated", field: hostList()},
	{Flags: []string{"--hostfile"}, Arg: "FILE", Env: "GORUN_HOSTFILE", Key: "launch.hostfile", Example: `"hosts"`, Note: "instead of [[host]]",
		Help: "file with hosts, one a line: host slots=4, or host:4", field: hostfile()},
	{Flags: []string{"--map-by"}, Arg: "HOW", Default: "slot", Key: "launch.map_by", Example: `"slot"`, Values: []string{"slot", "node", "ppr:1:node"},
		Help:  "place ranks by slot (default), node (in turn), or ppr:N:node (N on each host)",
		field: optional(kindWord, func(j *Job) **MapBy { return &j.MapBy }, ParseMapBy, MapBy.String)},
	{Flags: []string{"--oversubscribe"}, Env: "GORUN_OVERSUBSCRIBE", Key: "launch.oversubscribe", Example: "false", Help: "a host may get more ranks than it has slots",
		field: toggle(func(j *Job) **bool { return &j.Oversubscribe })},
	{Flags: []string{"--bind-to"}, Arg: "WHAT", Env: "GORUN_BIND_TO", Default: "none", Key: "launch.bind_to", Example: `"core"`, Values: []string{"none", "core", "core:1", "numa"},
		Help:  "bind ranks to core (an equal share each), core:N, numa, or none; see help placement",
		field: scalar(kindWord, func(j *Job) *Bind { return &j.BindTo }, placement.ParseBind, Bind.String)},
	{Flags: []string{"--gpu-bind"}, Arg: "WHAT", Env: "GORUN_GPU_BIND", Default: "none", Key: "launch.gpu_bind", Example: `"hide"`, Values: []string{GPUBindNone, GPUBindHide, GPUBindShare},
		Help: "none (default): a rank sees all GPUs; hide: its own alone; share: ranks share GPUs", field: word(func(j *Job) *string { return &j.GPUBind }, GPUBindNone, GPUBindHide, GPUBindShare)},
	{Flags: []string{"-x"}, Arg: "NAME[=VALUE]", Help: "set a variable for the ranks, or keep one that would be removed; may be repeated", App: true, field: settings()},
	{Flags: []string{"--wdir"}, Arg: "DIR", Key: "job.wdir", Example: `"/tmp"`, Help: "working directory of the ranks", App: true,
		field: text(func(j *Job) *string { return &j.Dir })},
	{Flags: []string{"--device"}, Arg: "TOKEN", Env: "GORUN_DEVICE", Key: "job.device", Example: `"host"`,
		Help: "device of the ranks: host, an index, a UUID (default: each rank chooses)", App: true, field: word(func(j *Job) *string { return &j.Device })},
	{Flags: []string{"--env-like"}, Arg: "LAUNCHER", Env: "GORUN_ENV_LIKE", Key: "job.env_like", Example: `"ompi"`, Values: []string{rankenv.LikeOpenMPI, rankenv.LikeSlurm},
		Help:  "give ranks also the variables of ompi (OMPI_COMM_WORLD_RANK, ...; for JAX, too) or slurm (SLURM_PROCID, ...)",
		field: word(func(j *Job) *string { return &j.EnvLike }, rankenv.LikeOpenMPI, rankenv.LikeSlurm)},
	{Flags: []string{"--mpi"}, Arg: "HOW", Env: "GORUN_MPI", Default: MPIAuto, Key: "job.mpi", Example: `"pmi"`, Values: []string{MPIAuto, MPIPMI, MPIPMIx, MPIOff}, App: true,
		Help:  "how MPI_Init finds the other ranks: pmi, pmix, off, or auto (default), as the program's library asks for; see help mpi",
		field: word(func(j *Job) *string { return &j.MPI }, MPIAuto, MPIPMI, MPIPMIx, MPIOff)},
	{Flags: []string{"--stdin"}, Arg: "RANK", Default: "0", Key: "launch.stdin", Example: `"none"`, Values: []string{StdinRank0, StdinAll, StdinNone},
		Help:  "who reads gorun's stdin: a rank's number (default 0), all or none",
		field: scalar(kindWord, func(j *Job) *string { return &j.Stdin }, parseStdin, func(s string) string { return s })},
	{Flags: []string{"--tag-output"}, Env: "GORUN_TAG_OUTPUT", Key: "output.tag", Also: "launch.tag_output", Example: "true", Help: "put [RANK] before each line",
		field: toggle(func(j *Job) **bool { return &j.TagOutput })},
	{Flags: []string{"--timestamp"}, Env: "GORUN_TIMESTAMP", Key: "output.timestamp", Example: "false", Help: "put the time (UTC) at which it was written before each line",
		field: toggle(func(j *Job) **bool { return &j.Timestamp })},
	{Flags: []string{"--merge"}, Env: "GORUN_MERGE", Key: "output.merge", Example: "false", Help: "the ranks' stderr goes where their stdout goes, in the order of writing",
		field: toggle(func(j *Job) **bool { return &j.Merge })},
	{Flags: []string{"--output-dir"}, Arg: "DIR", Key: "output.dir", Example: `"logs"`, Help: "write the output also to files, DIR/rank.N/stdout and DIR/rank.N/stderr",
		field: text(func(j *Job) *string { return &j.OutputDir })},
	{Flags: []string{"--files-only"}, Key: "output.files_only", Example: "false", Help: "with --output-dir: write the output to these files alone",
		field: toggle(func(j *Job) **bool { return &j.FilesOnly })},
	{Flags: []string{"--timeout"}, Arg: "TIME", Env: "GORUN_TIMEOUT", Default: "0", Key: "launch.timeout", Example: `"10m"`, Help: "end the job after this time (30s, 5m, 1h)",
		field: duration(func(j *Job) *time.Duration { return &j.Timeout }, parseTimeout)},
	{Flags: []string{"--kill-grace"}, Arg: "TIME", Env: "GORUN_KILL_GRACE", Default: "5s", Key: "launch.kill_grace", Example: `"30s"`,
		Help:  "time between asking ranks to end and killing them (default 5s)",
		field: duration(func(j *Job) *time.Duration { return &j.KillGrace }, parseGrace)},
	{Flags: []string{"--timeout-signal"}, Arg: "SIG@TIME", Env: "GORUN_TIMEOUT_SIGNAL", Key: "launch.timeout_signal", Example: `"USR1@30s"`,
		Help:  "send the ranks a signal so long before the timeout (USR1@30s)",
		field: scalar(kindWord, func(j *Job) *TimedSignal { return &j.TimeoutSignal }, ParseTimedSignal, TimedSignal.String)},
	{Flags: []string{"--on-fail"}, Arg: "HOW", Env: "GORUN_ON_FAIL", Default: "kill", Key: "launch.on_fail", Example: `"wait"`, Values: []string{OnFailKill, OnFailWait},
		Help: "when a rank fails, kill the others (default) or wait for them", field: word(func(j *Job) *string { return &j.OnFail }, OnFailKill, OnFailWait)},
	{Flags: []string{"--restarts"}, Arg: "N", Env: "GORUN_RESTARTS", Default: "0", Key: "launch.restarts", Example: "3",
		Help: "start the job again when a rank fails or a host is lost, N times at most (default 0)", field: restarts()},
	{Flags: []string{"--restart-window"}, Arg: "TIME", Env: "GORUN_RESTART_WINDOW", Key: "launch.window", Example: `"1h"`,
		Help: "give up only after more than N failures within this time (default: ever)", field: duration(func(j *Job) *time.Duration { return &j.RestartWindow }, parsePositive)},
	{Flags: []string{"--report"}, Arg: "FILE", Key: "launch.report", Example: `"report.json"`, Help: "write how each rank ended to a file, in JSON",
		field: text(func(j *Job) *string { return &j.Report })},
	{Flags: []string{"--keep-launcher-env"}, Key: "launch.keep_launcher_env", Example: "false", Help: "let the ranks inherit variables that another launcher left over",
		field: toggle(func(j *Job) **bool { return &j.KeepLauncherEnv })},
	{Flags: []string{"--rm"}, Arg: "NAME", Env: "GORUN_RM", Key: "launch.rm", Example: `"none"`, Values: []string{RMNone, RMSlurm, RMPBS},
		Help:  "take the hosts of an allocation of slurm or pbs, or none (default: the one that is there)",
		field: word(func(j *Job) *string { return &j.RM }, RMNone, RMSlurm, RMPBS)},
	{Flags: []string{"--ssh-config"}, Arg: "FILE", Env: "GORUN_SSH_CONFIG", Key: "launch.ssh_config", Example: `"ssh_config"`,
		Help: "ssh configuration, instead of the user's and the system's", field: text(func(j *Job) *string { return &j.SSHConfig })},
	{Flags: []string{"--accept-new-host-keys"}, Key: "launch.accept_new_host_keys", Example: "false", Help: "take the key of a host that is not known yet, and remember it",
		field: toggle(func(j *Job) **bool { return &j.AcceptNewHostKeys })},
	{Flags: []string{"--rsh"}, Arg: "CMD", Env: "GORUN_RSH", Key: "launch.rsh", Example: `"ssh -q"`, Note: "instead of the built-in ssh client",
		Help: "command that reaches the hosts, instead of the built-in ssh client", field: text(func(j *Job) *string { return &j.RSH })},
	{Flags: []string{"--connect-timeout"}, Arg: "TIME", Env: "GORUN_CONNECT_TIMEOUT", Default: "30s", Key: "launch.connect_timeout", Example: `"1m"`,
		Help: "time for reaching all hosts (default 30s)", field: duration(func(j *Job) *time.Duration { return &j.ConnectTimeout }, parsePositive)},
	{Flags: []string{"--port-range"}, Arg: "FROM-TO", Env: "GORUN_PORT_RANGE", Key: "launch.port_range", Example: `"40000-40100"`,
		Help:  "ports for the connections between hosts (default: any)",
		field: scalar(kindWord, func(j *Job) *PortRange { return &j.Ports }, ParsePorts, PortRange.String)},
	{Flags: []string{"--stage"}, Arg: "FILE", Key: "launch.stage", Example: `["data.bin"]`, Note: `"none": send not even the program`,
		Help:  "send a file or directory to the hosts, beside the program; may be repeated; none: send not even that",
		field: list(kindWords, func(j *Job) *[]string { return &j.Stage })},
}

// Set reads a value of a flag or variable, which as names in an error: a *UsageError.
func (o *Option) Set(j *Job, as, value string) error {
	err := o.set(j, value)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errEmpty):
		return usagef("%s: its value is empty (an unset variable?)", as)
	case o.Arg == "":
		return usagef("%s=%v", as, err)
	}
	return usagef("%s %v", as, err)
}

// words are the words of a command line that set the option as j has it.
func (o *Option) words(j *Job) []string {
	if len(o.Flags) == 0 {
		return nil
	}
	var out []string
	for _, v := range o.values(j) {
		switch {
		case o.Arg != "":
			out = append(out, o.Flags[0], v)
		case v == "true":
			out = append(out, o.Flags[0])
		default:
			out = append(out, o.Flags[0]+"="+v)
		}
	}
	return out
}

// errEmpty is the error of set for a value that must not be empty.
var errEmpty = errors.New("is empty")

// valueError is the error of set for a value that is not what it must be.
type valueError struct{ value, must string }

func (e *valueError) Error() string { return e.value + ": must be " + e.must }

// scalar is an option whose zero value means that it was not set.
func scalar[T comparable](k kind, at func(*Job) *T, parse func(string) (T, error), text func(T) string) field {
	var zero T
	return field{kind: k,
		set: func(j *Job, s string) error {
			v, err := parse(s)
			if err == nil {
				*at(j) = v
			}
			return err
		},
		values: func(j *Job) []string {
			if *at(j) == zero {
				return nil
			}
			return []string{text(*at(j))}
		},
		merge: func(j, weaker *Job) {
			if *at(j) == zero {
				*at(j) = *at(weaker)
			}
		}}
}

// optional is an option whose zero value is one that may be set: nil says that it was not.
func optional[T any](k kind, at func(*Job) **T, parse func(string) (T, error), text func(T) string) field {
	return scalar(k, at, func(s string) (*T, error) {
		v, err := parse(s)
		return &v, err
	}, func(p *T) string { return text(*p) })
}

func toggle(at func(*Job) **bool) field {
	return optional(kindSwitch, at, func(s string) (bool, error) {
		on, err := strconv.ParseBool(s)
		if err != nil {
			return false, &valueError{s, "true or false"}
		}
		return on, nil
	}, strconv.FormatBool)
}

func number(at func(*Job) *int, least, most int) field {
	f := scalar(kindNumber, at, func(s string) (int, error) {
		n, err := strconv.Atoi(s)
		if err != nil || n < least || n > most {
			return 0, &valueError{s, fmt.Sprintf("a number from %d to %d", least, most)}
		}
		return n, nil
	}, strconv.Itoa)
	f.min, f.max = least, most
	return f
}

// restarts is Job.Restarts, which may be 0.
func restarts() field {
	f := optional(kindNumber, func(j *Job) **int { return &j.Restarts }, func(s string) (int, error) {
		var j Job
		err := number(func(j *Job) *int { return &j.NP }, 0, maxRestarts).set(&j, s)
		return j.NP, err
	}, strconv.Itoa)
	f.min, f.max = 0, maxRestarts
	return f
}

// text is a name or the like, which is not empty.
func text(at func(*Job) *string) field {
	return scalar(kindText, at, func(s string) (string, error) {
		if strings.TrimSpace(s) == "" {
			return "", errEmpty
		}
		return s, nil
	}, func(s string) string { return s })
}

// word is one of some words, or any where none are given.
func word(at func(*Job) *string, words ...string) field {
	f := scalar(kindWord, at, func(s string) (string, error) {
		if len(words) > 0 && !slices.Contains(words, s) {
			return "", &valueError{s, either(words)}
		}
		return s, nil
	}, func(s string) string { return s })
	f.choices = words
	return f
}

// either lists words as in "none, slurm or pbs".
func either(words []string) string {
	last := len(words) - 1
	if last < 1 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

func duration(at func(*Job) *time.Duration, parse func(string) (time.Duration, error)) field {
	return scalar(kindWord, at, parse, func(d time.Duration) string {
		if d < 0 {
			return "0" // NoGrace and its like
		}
		return d.String()
	})
}

// list is an option that may be given several times; the values of the strongest place count.
func list(k kind, at func(*Job) *[]string) field {
	return field{kind: k,
		set: func(j *Job, s string) error {
			if k == kindWords && s == "" {
				return errEmpty
			}
			*at(j) = append(*at(j), s)
			return nil
		},
		values: func(j *Job) []string { return *at(j) },
		merge: func(j, weaker *Job) {
			if len(*at(j)) == 0 {
				*at(j) = *at(weaker)
			}
		}}
}

// program is Job.Program, whose arguments are those of the same place. Job.Apps are instead of it.
func program() field {
	f := text(func(j *Job) *string { return &j.Program })
	f.merge = func(j, weaker *Job) {
		if j.Program == "" && len(j.Apps) == 0 {
			j.Program, j.Args, j.Apps = weaker.Program, weaker.Args, weaker.Apps
		}
	}
	return f
}

// arguments is Job.Args; program merges it.
func arguments() field {
	f := list(kindList, func(j *Job) *[]string { return &j.Args })
	f.merge = func(*Job, *Job) {}
	return f
}

// hostList is Job.Hosts. The hosts are those of one place, whether they are listed or in a hostfile.
func hostList() field {
	return field{kind: kindList,
		set: func(j *Job, s string) error {
			hosts, err := ParseHosts(s)
			j.Hosts = append(j.Hosts, hosts...)
			return err
		},
		values: func(j *Job) []string {
			if len(j.Hosts) == 0 {
				return nil
			}
			var names []string
			for _, h := range j.Hosts {
				names = append(names, h.String())
			}
			return []string{strings.Join(names, ",")}
		},
		merge: func(j, weaker *Job) {
			if len(j.Hosts) == 0 && j.Hostfile == "" {
				j.Hosts, j.Hostfile = weaker.Hosts, weaker.Hostfile
			}
		}}
}

// hostfile is Job.Hostfile; hostList merges it.
func hostfile() field {
	f := text(func(j *Job) *string { return &j.Hostfile })
	f.merge = func(*Job, *Job) {}
	return f
}

// settings is Job.Env. Variables of all places are kept; the strongest come last, and win.
func settings() field {
	return field{kind: kindList,
		set: func(j *Job, s string) error {
			name, value, has := strings.Cut(s, "=")
			j.Env = append(j.Env, Setting{Name: name, Value: value, Inherit: !has})
			return nil
		},
		values: func(j *Job) []string {
			var out []string
			for _, s := range j.Env {
				if s.Inherit {
					out = append(out, s.Name)
				} else {
					out = append(out, s.Name+"="+s.Value)
				}
			}
			return out
		},
		merge: func(j, weaker *Job) { j.Env = slices.Concat(weaker.Env, j.Env) }}
}
