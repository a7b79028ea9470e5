package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gorun-dev/gorun/launcher"
)

// launch is gorun without a subcommand, and gorun run.
func launch(args []string, io stdio) int { return launchIf(args, io, nil) }

// launchIf launches a job unless refuse, where it is given, has an error for its plan.
func launchIf(args []string, io stdio, refuse func(*launcher.Plan) error) int {
	q, err := parse(args)
	if err != nil {
		return fail(io, err)
	}
	switch {
	case q.help:
		return show(io, launchHelp())
	case q.version:
		return show(io, versionLine()+"\n")
	}
	sources, err := countedOf(q, os.LookupEnv)
	if err != nil {
		return fail(io, err)
	}
	job := merge(sources)
	if len(job.Programs()) == 0 {
		if len(args) > 0 {
			return fail(io, usagef("no program is given; it comes after the flags: gorun -np 4 PROGRAM"))
		}
		fmt.Fprint(io.err, shortHelp)
		return launcher.ExitUsage
	}
	plan, err := planOf(job, io, q.verbose)
	if err != nil {
		return fail(io, hintBeside(placed(err, job, sources), job, q.jobFile()))
	}
	if refuse != nil {
		if err := refuse(plan); err != nil {
			return fail(io, err)
		}
	}
	tellIdle(io, plan, sources)
	tellTypos(io, job, os.Environ())
	for _, note := range plan.MPINotes() {
		fmt.Fprintf(io.err, "gorun: %s\n", note)
	}
	if q.dryRun {
		ctx, cancel := context.WithTimeout(context.Background(), routesWait)
		defer cancel()
		plan.FindRoutes(ctx)
		if q.json {
			err = encoder(io.out).Encode(plan)
		} else {
			err = plan.Write(io.out)
		}
		if err != nil {
			return fail(io, err)
		}
		return launcher.ExitOK
	}
	if q.json {
		return fail(io, usagef("--json goes with --dry-run; for a report of a run use --report FILE"))
	}
	if job.Report != "" {
		if err := launcher.CheckReport(job.Report); err != nil {
			return fail(io, err)
		}
	}
	acct := launcher.Run(context.Background(), plan, launcher.Options{Stdin: io.in, HasStdin: true, Stdout: io.out, Stderr: io.err,
		Signals: io.ending(), Verbose: q.verbose, OwnProcess: true})
	tell(io, acct)
	if job.Report != "" {
		if err := writeReport(io, acct, job.Report, lastReport); err != nil {
			code := fail(io, err)
			if acct.Code == launcher.ExitOK {
				return code
			}
		}
	}
	return acct.Code
}

// routesWait bounds what --dry-run may take to ask OpenSSH's client for what only it understands.
const routesWait = 10 * time.Second

// planOf works a job out with what is found on this host.
func planOf(job launcher.Job, io stdio, verbose bool) (*launcher.Plan, error) {
	f, err := factsOf(job, io, verbose)
	if err != nil {
		return nil, err
	}
	missing := map[int]error{} // by index of Job.Programs
	for i, name := range job.Programs() {
		p, err := launcher.FindProgram(name, os.Getenv("PATH"))
		if err != nil {
			missing[i] = err
		}
		f.Programs = append(f.Programs, p)
	}
	f.Scripts = job.FindScripts(f)
	plan, err := job.Plan(f)
	for i, name := range job.Programs() {
		if missing[i] != nil && (err != nil || !foundThere(plan, i)) {
			return nil, hintJobFile(hintDir(hintCommand(missing[i], job, name), job, name), name)
		}
	}
	if err != nil {
		return nil, err
	}
	for _, file := range plan.Remote.Stage {
		if _, err := os.Stat(file.Path); err != nil {
			return nil, &launcher.UsageError{Flag: "--stage", Msg: fmt.Sprintf("%s: %v", file.Name, errors.Unwrap(err))}
		}
	}
	return plan, nil
}

// factsOf is what is found on this host for a job, but its program.
func factsOf(job launcher.Job, io stdio, verbose bool) (launcher.Facts, error) {
	f := launcher.Facts{Environ: os.Environ()}
	var err error
	if f.Host, err = os.Hostname(); err != nil {
		f.Host = "localhost"
	}
	if f.Dir, err = os.Getwd(); err != nil && !strings.HasPrefix(job.Dir, "/") {
		return f, &launcher.StartError{Code: launcher.ExitCannotRun, Msg: "the current directory is gone; cd to one that is there, or give --wdir", Err: err}
	}
	if f.Machine, err = launcher.ReadMachine(job.BindTo); err != nil {
		return f, err
	}
	switch {
	case job.Hostfile != "":
		if f.Hostfile, err = launcher.ReadHostfile(job.Hostfile); err != nil {
			return f, err
		}
	case len(job.Hosts) == 0:
		if f.Allocation, err = launcher.FindAllocation(job.RM, f.Environ); err != nil {
			return f, err
		}
		if verbose && f.Allocation.From != "" {
			fmt.Fprintf(io.err, "gorun: hosts and slots are those of %s; --rm none ignores them\n", f.Allocation.From)
		}
		if verbose && f.Allocation.Note != "" {
			fmt.Fprintf(io.err, "gorun: %s\n", f.Allocation.Note)
		}
		if job.NP == 0 && len(job.Apps) == 0 {
			f.GPUs = launcher.VisibleGPUs("/", f.Environ)
		}
	}
	return f, nil
}

// foundThere reports whether the program of an app that this host lacks may be there where its ranks run: none of them runs here, and
// either the program is looked up in PATH or nothing is to be sent.
func foundThere(p *launcher.Plan, app int) bool {
	name := p.Programs[p.Apps[app].Program].Name
	for _, r := range p.Ranks {
		if r.App == app && p.Hosts[r.Host].Local {
			return false
		}
	}
	return !strings.Contains(name, "/") || p.Remote.NoStage && strings.HasPrefix(name, "/")
}

// hintDir adds to the error for a program that is not in the current directory that it is in that of its ranks: Open MPI's mpirun looks there.
func hintDir(err error, job launcher.Job, program string) error {
	s, ok := errors.AsType[*launcher.StartError](err)
	if !ok || s.Code != launcher.ExitNotFound || !strings.Contains(program, "/") || filepath.IsAbs(program) {
		return err
	}
	var dirs []string
	for _, a := range job.Apps {
		if a.Program == program {
			dirs = append(dirs, cmp.Or(a.Dir, job.Dir))
		}
	}
	if len(job.Apps) == 0 {
		dirs = []string{job.Dir}
	}
	for _, dir := range dirs {
		file := filepath.Join(dir, program)
		if _, missing := launcher.FindProgram(file, ""); missing == nil {
			return &launcher.StartError{Code: s.Code, Msg: s.Error() + "; for the one in --wdir say " + file}
		}
	}
	return err
}

// hintCommand adds to the error for a missing program that a command of gorun's own has its name, or nearly has it.
func hintCommand(err error, job launcher.Job, program string) error {
	s, ok := errors.AsType[*launcher.StartError](err)
	if !ok || s.Code != launcher.ExitNotFound || strings.HasPrefix(program, "__") {
		return err
	}
	if !slices.Contains(subcommands, program) {
		words := slices.DeleteFunc(slices.Clone(subcommands), func(word string) bool { return strings.HasPrefix(word, "__") })
		// With a number of ranks it was meant to be a program; and what else is said of it is more likely.
		if near := launcher.Slip(program, words); near != "" && job.NP == 0 && strings.HasSuffix(s.Msg, ": not found in PATH") {
			return &launcher.StartError{Code: s.Code, Msg: s.Error() + "; did you mean gorun " + near + "?"}
		}
		return err
	}
	hint := "gorun " + program
	if job.NP != 0 && program == "bench" {
		hint += fmt.Sprintf(" -np %d", job.NP)
	}
	return &launcher.StartError{Code: s.Code, Msg: s.Error() + "; for gorun's own command say " + hint}
}

const (
	// lastWords is how long the account of a job that the user or its time has ended may take to be shown: stderr may have no reader.
	lastWords = time.Second
	// lastReport is the same for --report: its file may be on a network's file system, or a pipe without a reader.
	lastReport = 10 * time.Second
)

// tell writes the summary.
func tell(io stdio, acct *launcher.Account) {
	if text := acct.Summary(); text != "" {
		untilEnd(io, acct, lastWords, func() { fmt.Fprint(io.err, text) })
	}
}

// writeReport writes the account to the file of --report. bound is lastReport.
func writeReport(io stdio, acct *launcher.Account, file string, bound time.Duration) error {
	written := make(chan error, 1)
	if !untilEnd(io, acct, bound, func() { written <- acct.WriteReport(file) }) {
		return fmt.Errorf("write report %s: not done %v after gorun was to end (a pipe without a reader?)", file, bound)
	}
	return <-written
}

// untilEnd does what may have to wait for a reader, and reports whether it is done. A slow reader is waited for, unless gorun is to end, or a signal says so
// meanwhile: then there is a bound.
func untilEnd(io stdio, acct *launcher.Account, bound time.Duration, do func()) bool {
	done := make(chan struct{})
	go func() {
		do()
		close(done)
	}()
	var over <-chan time.Time
	if acct.Cut || acct.Reason == launcher.ReasonSignal || acct.Reason == launcher.ReasonTimeout {
		over = time.After(bound)
	}
	for {
		select {
		case <-done:
			return true
		case <-over:
			return false
		case s := <-io.signals:
			if over == nil && launcher.EndsJob(s) {
				over = time.After(bound)
			}
		}
	}
}

// countedOf are the sources of a job, of which all counts.
func countedOf(q *request, lookup func(string) (string, bool)) ([]launcher.Source, error) {
	sources, err := sourcesOf(q, lookup)
	if err != nil {
		return nil, err
	}
	return effective(sources, lookup)
}

// effective are the sources of a job without the variables that do nothing in it: they are there for other jobs, and no mistake.
func effective(sources []launcher.Source, lookup func(string) (string, bool)) (counted []launcher.Source, err error) {
	without := map[string]bool{}
	for _, i := range launcher.FindIdle(true, sources...) {
		without[i.Option.Env] = i.Source == ofEnviron
	}
	counted = slices.Clone(sources)
	counted[ofEnviron].Job, err = fromEnviron(func(name string) (string, bool) {
		if without[name] {
			return "", false
		}
		return lookup(name)
	})
	return counted, err
}

// placed says of a job that was refused where in the file the reason stands, if that is a setting that needs another, or one that
// has a flag.
func placed(err error, job launcher.Job, sources []launcher.Source) error {
	if i := firstRefused(job, sources); i != nil && i.Source == ofFile {
		return refusal(i)
	}
	u, ok := errors.AsType[*launcher.UsageError](err)
	if !ok || u.Flag == "" || len(sources) <= ofFile {
		return err
	}
	for _, o := range launcher.Origins(sources...) {
		if o.Flag == u.Flag && strings.Count(o.Key, ".") == 1 && o.From == sources[ofFile].Places[o.Key] {
			_, key, _ := strings.Cut(o.Key, ".")
			return &launcher.UsageError{Msg: o.From + ": " + key + " " + u.Msg, Hint: u.Hint}
		}
	}
	return err
}

// refusedIn is the error for the first setting for which a job is refused, as it needs another; nil: there is none.
func refusedIn(job launcher.Job, sources []launcher.Source) error {
	if i := firstRefused(job, sources); i != nil {
		return refusal(i)
	}
	return nil
}

// firstRefused is the first setting for which a job is refused, as it needs another; nil: there is none.
func firstRefused(job launcher.Job, sources []launcher.Source) *launcher.Idle {
	for _, i := range launcher.FindIdle(mayBeAway(job), sources...) {
		if i.Refused {
			return &i
		}
	}
	return nil
}

// refusal is the error for a setting for which a job is refused.
func refusal(i *launcher.Idle) error {
	if i.Source == ofFlags {
		return usagef("%s", i.Text(true))
	}
	return usagef("%s: %s", i.From, i.Text(false))
}

// mayBeAway reports whether ranks of a job may run on other hosts, as far as its settings tell.
func mayBeAway(job launcher.Job) bool {
	return len(job.Hosts) > 0 || job.Hostfile != "" || job.RM != "" && job.RM != launcher.RMNone
}

// noProgram refuses a job file that names none.
func noProgram(file string) error {
	return usagef("%s: names no program; set program in [job], or give it with gorun -f %s PROGRAM", file, launcher.ShellQuote(file))
}

// tellIdle says which flags do nothing.
func tellIdle(io stdio, plan *launcher.Plan, sources []launcher.Source) {
	away := slices.ContainsFunc(plan.Hosts, func(h launcher.PlanHost) bool { return !h.Local })
	for _, i := range launcher.FindIdle(away, sources...) {
		if i.Source == ofFlags {
			fmt.Fprintf(io.err, "gorun: %s\n", i.Text(true))
		}
	}
}

func merge(sources []launcher.Source) launcher.Job {
	var jobs []launcher.Job
	for _, s := range sources {
		jobs = append(jobs, s.Job)
	}
	return launcher.Merge(jobs...)
}

// Where a job's settings come from, as indices of what sourcesOf returns.
const (
	ofFlags = iota
	ofEnviron
	ofFile // may be missing
)

// jobFile is the job file, given by --job or in place of the program, "" without one.
func (q *request) jobFile() string {
	if q.file == "" && len(q.rest) > 0 && isJobFile(q.rest[0]) {
		return q.rest[0]
	}
	return q.file
}

// sourcesOf are the places that say something about the job, the strongest first: flags, environment, job file.
func sourcesOf(q *request, lookup func(string) (string, bool)) ([]launcher.Source, error) {
	job := q.job
	rest := q.rest
	var more []string // arguments behind a job file
	file := q.jobFile()
	if file != q.file {
		more, rest = rest[1:], nil
	}
	if len(job.Apps) > 0 && file == "" && isJobFile(job.Apps[0].Program) {
		return nil, usagef("%s is a job file: its programs are in it ([[app]]), and ':' separates programs of the command line", job.Apps[0].Program)
	}
	if len(rest) > 0 {
		if rest[0] == "" {
			return nil, usagef("the program's name is empty (an unset variable?)")
		}
		job.Program, job.Args = rest[0], rest[1:]
	}
	env, err := fromEnviron(lookup)
	if err != nil {
		return nil, err
	}
	sources := []launcher.Source{{Job: job, Name: flagName}, {Job: env, Name: variableName}}
	if file == "" {
		return sources, nil
	}
	of, places, err := launcher.ReadJobFile(file)
	if err != nil {
		if looksLikeHostfile(file) {
			return nil, usagef("%s is no job file, but may be a hostfile: that is given with --hostfile %s", file, launcher.ShellQuote(file))
		}
		return nil, err
	}
	if len(more) > 0 && len(of.Apps) > 0 {
		return nil, usagef("%s has several programs ([[app]]): arguments behind it, as %s, would be of none", file, more[0])
	}
	if len(more) > 0 {
		of.Args = append(of.Args, more...)
		places["job.args"] = strings.TrimPrefix(places["job.args"]+", command line", ", ")
	}
	if len(job.Programs())+len(of.Programs()) == 0 {
		return nil, noProgram(file)
	}
	return append(sources, launcher.Source{Job: of, Places: places}), nil
}

// looksLikeHostfile reports whether a file is a good hostfile. What can be read but once, as a pipe, is not looked at.
func looksLikeHostfile(file string) bool {
	info, err := os.Stat(file)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	_, err = launcher.ReadHostfile(file)
	return err == nil
}

// flagName is where the command line has set an option.
func flagName(o *launcher.Option) string {
	if len(o.Flags) == 0 {
		return "command line"
	}
	return "flag " + o.Flags[0]
}

// variableName is where the environment has set an option.
func variableName(o *launcher.Option) string { return "variable " + o.Env }

// isJobFile reports whether the first argument is a job file and not a program.
func isJobFile(name string) bool {
	if !strings.HasSuffix(name, ".toml") {
		return false
	}
	info, err := os.Stat(name)
	return err != nil || info.Mode().IsRegular() // what is not there is reported as a job file
}

// show prints what was asked for and returns the exit code.
func show(io stdio, text string) int {
	if _, err := io.out.Write([]byte(text)); err != nil {
		return fail(io, fmt.Errorf("write stdout: %w", err))
	}
	return launcher.ExitOK
}

// encoder writes JSON for people, too.
func encoder(w io.Writer) *json.Encoder {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e
}

// fail prints an error and returns the exit code for it.
func fail(io stdio, err error) int {
	fmt.Fprintf(io.err, "gorun: %v\n", err)
	if _, ok := errors.AsType[*launcher.UsageError](err); ok {
		return launcher.ExitUsage
	}
	if s, ok := errors.AsType[*launcher.StartError](err); ok {
		return s.Code
	}
	return launcher.ExitInternal
}
