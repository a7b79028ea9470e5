package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gorun-dev/gorun/launcher"
)

// request is a launch command line, taken apart.
type request struct {
	job     launcher.Job // what flags say
	file    string       // job file
	rest    []string     // the program and its arguments; of several programs none
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

	mayBeOff bool // --switch=false is there, too
	app      bool // each of several programs may have its own
}

// flagDefs are the options of a job that have a flag, and what concerns the launch alone.
var flagDefs = append(jobFlags(), []flagDef{
	{names: []string{"-f", "--job"}, arg: "FILE", help: "take the job from a TOML file (also: gorun FILE.toml)",
		set: func(q *request, v string) error {
			if q.file = v; v == "" {
				return usagef("--job: its value is empty (an unset variable?)")
			}
			return nil
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
}...)

func jobFlags() []flagDef {
	var defs []flagDef
	for i := range launcher.JobOptions {
		o := &launcher.JobOptions[i]
		if len(o.Flags) == 0 {
			continue
		}
		defs = append(defs, flagDef{names: o.Flags, arg: o.Arg, help: o.Help, env: o.Env, values: o.Values, mayBeOff: o.Arg == "", app: o.App,
			set: func(q *request, v string) error { return o.Set(&q.job, o.Flags[0], v) }})
	}
	return defs
}

func usagef(format string, args ...any) error {
	return &launcher.UsageError{Msg: fmt.Sprintf(format, args...)}
}

// parse takes a launch command line apart: flags up to the program, then the program's own arguments. Further programs follow behind
// colons, each with its own flags; what stands before the first program is the whole job's, but its -np.
func parse(args []string) (*request, error) {
	q := &request{}
	rest, plain, err := q.flags(args, nil)
	if err != nil {
		return nil, err
	}
	more := -1
	if !plain {
		more = slices.Index(rest, ":")
	}
	if more < 0 {
		q.rest = rest
		return q, nil
	}
	switch {
	case more == 0 && q.job.NP != 0:
		return nil, usagef("no program between -np and the first ':': gorun -np 1 PROGRAM : -np 4 PROGRAM")
	case more > 0:
		first := launcher.NewApp(launcher.Job{NP: q.job.NP, Program: rest[0], Args: rest[1:more]})
		q.job.Apps, q.job.NP = append(q.job.Apps, first), 0
	}
	for n := 1; more >= 0; n++ {
		of := &request{}
		before := rest[more+1:]
		if rest, plain, err = of.flags(before, q); err != nil {
			return nil, err
		}
		if more = -1; !plain {
			more = slices.Index(rest, ":")
		}
		end := len(rest)
		if more >= 0 {
			end = more
		}
		if end == 0 {
			return nil, usagef("no program behind the ':' of program %d: gorun -np 1 PROGRAM : -np 4 PROGRAM", n)
		}
		of.job.Program, of.job.Args = rest[0], rest[1:end]
		q.job.Apps = append(q.job.Apps, launcher.NewApp(of.job))
	}
	return q, nil
}

// flags reads flags up to a program, which begins what it returns; plain says that a -- stands before it, so that what follows is the
// program's to the end. Those of a further program have the request of the job.
func (q *request) flags(args []string, job *request) (rest []string, plain bool, err error) {
	for len(args) > 0 {
		a := args[0]
		if a == "--" {
			return args[1:], true, nil
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
			return nil, false, unknownFlag(name)
		}
		if job != nil && !d.app {
			return nil, false, usagef("%s is for the whole job: it stands before the first program", name)
		}
		switch {
		case d.arg == "" && !has:
			value = "true"
		case d.arg == "" && !d.mayBeOff:
			return nil, false, usagef("%s takes no value", name)
		case d.arg != "" && !has:
			if len(args) == 0 {
				return nil, false, usagef("%s needs a value: %s %s", name, name, d.arg)
			}
			value, args = args[0], args[1:]
		}
		if err := d.set(q, value); err != nil {
			if slices.Contains(d.names, "-np") {
				err = hintCount(err, value)
			}
			return nil, false, err
		}
	}
	return args, false, nil
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
