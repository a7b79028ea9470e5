package main

import (
	"strconv"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
)

// request is a launch command line, taken apart.
type request struct {
	job     launcher.Job // what flags say
	file    string       // job file
	rest    []string     // the program and its arguments
	dryRun  bool
	json    bool
	verbose bool
	help    bool
	version bool
}

// flagDef describes a flag of a launch. The parser, the help text and the shell completion are made of it.
type flagDef struct {
	names  []string // the first is the one that help shows, with its dashes
	arg    string   // name of its value, "" for a switch
	help   string
	env    string   // variable that sets it, where no flag does
	values []string // for completion
	set    func(q *request, value string) error
}

var flagDefs = []flagDef{
	{names: []string{"-np", "-n", "--np"}, arg: "N", help: "number of ranks (default: every slot of the hosts; without hosts one a GPU, at least one)",
		set: func(q *request, v string) error {
			n, err := strconv.Atoi(v)
			if err != nil || n < 1 || n > launcher.MaxNP {
				return usagef("-np %s: must be a number from 1 to %d", v, launcher.MaxNP)
			}
			q.job.NP = n
			return nil
		}},
	{names: []string{"-H", "--host"}, arg: "LIST", help: "hosts: [user@]host[:slots],...; one slot without a number; may be repeated",
		set: func(q *request, v string) error {
			hosts, err := launcher.ParseHosts(v)
			if err != nil {
				return usagef("-H %v", err)
			}
			q.job.Hosts = append(q.job.Hosts, hosts...)
			return nil
		}},
	{names: []string{"--hostfile"}, arg: "FILE", help: "file with hosts, one a line: host slots=4, or host:4", env: "GORUN_HOSTFILE",
		set: func(q *request, v string) error { q.job.Hostfile = v; return notEmpty("--hostfile", v) }},
	{names: []string{"--map-by"}, arg: "HOW", help: "place ranks by slot (default), node (in turn), or ppr:N:node (N on each host)", values: []string{"slot", "node", "ppr:1:node"},
		set: func(q *request, v string) error {
			m, err := launcher.ParseMapBy(v)
			if err != nil {
				return usagef("--map-by %v", err)
			}
			q.job.MapBy = &m
			return nil
		}},
	{names: []string{"--oversubscribe"}, help: "a host may get more ranks than it has slots",
		set: func(q *request, v string) error { q.job.Oversubscribe = true; return nil }},
	{names: []string{"-f", "--job"}, arg: "FILE", help: "take the job from a TOML file (also: gorun FILE.toml)",
		set: func(q *request, v string) error { q.file = v; return notEmpty("--job", v) }},
	{names: []string{"-x"}, arg: "NAME[=VALUE]", help: "set a variable for the ranks, or keep one that would be removed; may be repeated",
		set: func(q *request, v string) error {
			name, value, has := strings.Cut(v, "=")
			q.job.Env = append(q.job.Env, launcher.Setting{Name: name, Value: value, Inherit: !has})
			return nil
		}},
	{names: []string{"--wdir"}, arg: "DIR", help: "working directory of the ranks",
		set: func(q *request, v string) error { q.job.Dir = v; return notEmpty("--wdir", v) }},
	{names: []string{"--device"}, arg: "TOKEN", help: "device of the ranks: host, an index, a UUID (default: each rank chooses)", env: "GORUN_DEVICE",
		set: func(q *request, v string) error { q.job.Device = v; return nil }},
	{names: []string{"--stdin"}, arg: "RANK", help: "who reads gorun's stdin: 0 (default) or none", values: []string{"0", "none"},
		set: func(q *request, v string) error {
			if v != launcher.StdinRank0 && v != launcher.StdinNone {
				return usagef("--stdin %s: must be 0 or none", v)
			}
			q.job.Stdin = v
			return nil
		}},
	{names: []string{"--tag-output"}, help: "put [RANK] before each line", env: "GORUN_TAG_OUTPUT",
		set: func(q *request, v string) error {
			on, err := strconv.ParseBool(v)
			if err != nil {
				return usagef("--tag-output=%s: must be true or false", v)
			}
			q.job.TagOutput = &on
			return nil
		}},
	{names: []string{"--timeout"}, arg: "TIME", help: "end the job after this time (30s, 5m, 1h)", env: "GORUN_TIMEOUT",
		set: func(q *request, v string) error {
			d, err := launcher.ParseDuration(v)
			if err != nil {
				return usagef("--timeout %v", err)
			}
			q.job.Timeout = d
			return nil
		}},
	{names: []string{"--kill-grace"}, arg: "TIME", help: "time between asking ranks to end and killing them (default 5s)", env: "GORUN_KILL_GRACE",
		set: func(q *request, v string) error {
			d, err := launcher.ParseGrace(v)
			if err != nil {
				return usagef("--kill-grace %v", err)
			}
			q.job.KillGrace = d
			return nil
		}},
	{names: []string{"--report"}, arg: "FILE", help: "write how each rank ended to a file, in JSON",
		set: func(q *request, v string) error { q.job.Report = v; return notEmpty("--report", v) }},
	{names: []string{"--keep-launcher-env"}, help: "let the ranks inherit variables that another launcher left over",
		set: func(q *request, v string) error { q.job.KeepLauncherEnv = true; return nil }},
	{names: []string{"--rm"}, arg: "NAME", help: "take the hosts of an allocation of slurm or pbs, or none (default: the one that is there)", env: "GORUN_RM", values: []string{"none", "slurm", "pbs"},
		set: func(q *request, v string) error {
			if v != launcher.RMNone && v != launcher.RMSlurm && v != launcher.RMPBS {
				return usagef("--rm %s: must be none, slurm or pbs", v)
			}
			q.job.RM = v
			return nil
		}},
	{names: []string{"--ssh-config"}, arg: "FILE", help: "ssh configuration, instead of the user's and the system's", env: "GORUN_SSH_CONFIG",
		set: func(q *request, v string) error { q.job.SSHConfig = v; return notEmpty("--ssh-config", v) }},
	{names: []string{"--accept-new-host-keys"}, help: "take the key of a host that is not known yet, and remember it",
		set: func(q *request, v string) error { q.job.AcceptNewHostKeys = true; return nil }},
	{names: []string{"--rsh"}, arg: "CMD", help: "command that reaches the hosts, instead of the built-in ssh client", env: "GORUN_RSH",
		set: func(q *request, v string) error { q.job.RSH = v; return notEmpty("--rsh", strings.TrimSpace(v)) }},
	{names: []string{"--connect-timeout"}, arg: "TIME", help: "time for reaching all hosts (default 30s)", env: "GORUN_CONNECT_TIMEOUT",
		set: func(q *request, v string) error {
			d, err := launcher.ParseConnectTimeout(v)
			if err != nil {
				return usagef("--connect-timeout %v", err)
			}
			q.job.ConnectTimeout = d
			return nil
		}},
	{names: []string{"--port-range"}, arg: "FROM-TO", help: "ports for the connections between hosts (default: any)", env: "GORUN_PORT_RANGE",
		set: func(q *request, v string) error {
			r, err := launcher.ParsePorts(v)
			if err != nil {
				return usagef("--port-range %v", err)
			}
			q.job.Ports = r
			return nil
		}},
	{names: []string{"--stage"}, arg: "FILE", help: "send a file or directory to the hosts, beside the program; may be repeated; none: send not even that",
		set: func(q *request, v string) error {
			q.job.Stage = append(q.job.Stage, v)
			return notEmpty("--stage", v)
		}},
	{names: []string{"--dry-run"}, help: "print what would be started, and start nothing",
		set: func(q *request, v string) error { q.dryRun = true; return nil }},
	{names: []string{"--json"}, help: "with --dry-run: print it in JSON",
		set: func(q *request, v string) error { q.json = true; return nil }},
	{names: []string{"-v", "--verbose"}, help: "say what gorun does",
		set: func(q *request, v string) error { q.verbose = true; return nil }},
	{names: []string{"--version"}, help: "print the version",
		set: func(q *request, v string) error { q.version = true; return nil }},
	{names: []string{"-h", "--help"}, help: "print this help",
		set: func(q *request, v string) error { q.help = true; return nil }},
}

func usagef(format string, args ...any) error {
	return &launcher.UsageError{Msg: sprintf(format, args...)}
}

// notEmpty refuses the value of a variable that is not set.
func notEmpty(flag, value string) error {
	if value == "" {
		return usagef("%s: its value is empty (an unset variable?)", flag)
	}
	return nil
}

// parse takes a launch command line apart: flags up to the program, then the program's own arguments.
func parse(args []string) (*request, error) {
	q := &request{}
	for len(args) > 0 {
		a := args[0]
		if a == "--" {
			args = args[1:]
			break
		}
		if len(a) < 2 || a[0] != '-' {
			break
		}
		args = args[1:]
		name, value, has := strings.Cut(a, "=")
		d := findFlag(name)
		if d == nil {
			if n, ok := attachedCount(a); ok {
				name, value, has, d = "-np", n, true, findFlag("-np")
			}
		}
		if d == nil {
			return nil, unknownFlag(name)
		}
		switch {
		case d.arg == "" && !has:
			value = "true"
		case d.arg == "" && d.names[0] != "--tag-output":
			return nil, usagef("%s takes no value", name)
		case d.arg != "" && !has:
			if len(args) == 0 {
				return nil, usagef("%s needs a value: %s %s", name, name, d.arg)
			}
			value, args = args[0], args[1:]
		}
		if err := d.set(q, value); err != nil {
			return nil, err
		}
	}
	q.rest = args
	return q, nil
}

// findFlag finds a flag by its name with dashes; one dash or two make no difference.
func findFlag(name string) *flagDef {
	bare := strings.TrimPrefix(strings.TrimPrefix(name, "-"), "-")
	for i := range flagDefs {
		for _, n := range flagDefs[i].names {
			if strings.TrimLeft(n, "-") == bare {
				return &flagDefs[i]
			}
		}
	}
	return nil
}

// attachedCount is the number in -np4, --np4 or -n4.
func attachedCount(a string) (string, bool) {
	for _, prefix := range []string{"-np", "--np", "-n"} {
		if n, ok := strings.CutPrefix(a, prefix); ok && n != "" && strings.Trim(n, "0123456789") == "" {
			return n, true
		}
	}
	return "", false
}

// fromEnviron is what variables of gorun's own environment ask for.
func fromEnviron(lookup func(string) (string, bool)) (launcher.Job, error) {
	q := &request{}
	for _, d := range flagDefs {
		if d.env == "" {
			continue
		}
		if v, ok := lookup(d.env); ok && v != "" {
			if err := d.set(q, v); err != nil {
				return q.job, usagef("variable %s: %v", d.env, err)
			}
		}
	}
	return q.job, nil
}
