package main

import (
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

	mayBeOff bool // --switch=false is there, too
}

// flagDefs are the options of a job that have a flag, and what concerns the launch alone.
var flagDefs = append(jobFlags(), []flagDef{
	{names: []string{"-f", "--job"}, arg: "FILE", help: "take the job from a TOML file (also: gorun FILE.toml)",
		set: func(q *request, v string) error { q.file = v; return notEmpty("--job", v) }},
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
		defs = append(defs, flagDef{names: o.Flags, arg: o.Arg, help: o.Help, env: o.Env, values: o.Values, mayBeOff: o.Arg == "",
			set: func(q *request, v string) error { return o.Set(&q.job, o.Flags[0], v) }})
	}
	return defs
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
		case d.arg == "" && !d.mayBeOff:
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
