package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/gorun-dev/gorun/launcher"
)

func sprintf(format string, args ...any) string { return fmt.Sprintf(format, args...) }

// launch is gorun without a subcommand, and gorun run.
func launch(args []string, io stdio) int {
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
	job, err := jobOf(q, os.LookupEnv)
	if err != nil {
		return fail(io, err)
	}
	if job.Program == "" {
		if len(args) > 0 {
			return fail(io, usagef("no program is given; it comes after the flags: gorun -np 4 PROGRAM"))
		}
		fmt.Fprint(io.err, shortHelp)
		return launcher.ExitUsage
	}
	prog, err := launcher.FindProgram(job.Program, os.Getenv("PATH"))
	if err != nil {
		return fail(io, err)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	dir, err := os.Getwd()
	if err != nil && !strings.HasPrefix(job.Dir, "/") {
		return fail(io, &launcher.StartError{Code: launcher.ExitCannotRun, Msg: "the current directory is gone; cd to one that is there, or give --wdir", Err: err})
	}
	plan, err := job.Plan(launcher.Facts{Program: prog, Host: host, Dir: dir, Environ: os.Environ()})
	if err != nil {
		return fail(io, err)
	}
	if q.dryRun {
		if q.json {
			e := json.NewEncoder(io.out)
			e.SetIndent("", "  ")
			err = e.Encode(plan)
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
	if cpus := runtime.NumCPU(); q.verbose && len(plan.Ranks) > cpus {
		fmt.Fprintf(io.err, "gorun: %d ranks share %d cores\n", len(plan.Ranks), cpus)
	}
	acct := launcher.Run(context.Background(), plan, launcher.Options{Stdin: io.in, HasStdin: true, Stdout: io.out, Stderr: io.err,
		Signals: io.signals, Verbose: q.verbose, OwnProcess: true})
	tell(io, acct)
	if job.Report != "" {
		if err := acct.WriteReport(job.Report); err != nil {
			code := fail(io, err)
			if acct.Code == launcher.ExitOK {
				return code
			}
		}
	}
	return acct.Code
}

// lastWords is how long the account of a job that the user or its time has ended may take to be written: stderr may have
// no reader.
const lastWords = time.Second

// tell writes the summary. A reader of stderr that is slow is waited for, unless gorun is to end.
func tell(io stdio, acct *launcher.Account) {
	text := acct.Summary()
	if text == "" {
		return
	}
	done := make(chan struct{})
	go func() {
		fmt.Fprint(io.err, text)
		close(done)
	}()
	var over <-chan time.Time
	if acct.Cut || acct.Reason == launcher.ReasonSignal || acct.Reason == launcher.ReasonTimeout {
		over = time.After(lastWords)
	}
	for {
		select {
		case <-done:
			return
		case <-over:
			return
		case s := <-io.signals:
			if s == syscall.SIGINT || s == syscall.SIGTERM || s == syscall.SIGHUP {
				return
			}
		}
	}
}

// jobOf puts together what flags, environment and job file ask for.
func jobOf(q *request, lookup func(string) (string, bool)) (launcher.Job, error) {
	job := q.job
	rest := q.rest
	var more []string // arguments behind a job file
	file := q.file
	if file == "" && len(rest) > 0 && isJobFile(rest[0]) {
		file, more, rest = rest[0], rest[1:], nil
	}
	if len(rest) > 0 {
		if rest[0] == "" {
			return job, usagef("the program's name is empty (an unset variable?)")
		}
		job.Program, job.Args = rest[0], rest[1:]
	}
	env, err := fromEnviron(lookup)
	if err != nil {
		return job, err
	}
	var of launcher.Job
	if file != "" {
		if of, err = launcher.ReadJobFile(file); err != nil {
			return job, err
		}
		of.Args = append(of.Args, more...)
	}
	job = launcher.Merge(job, env, of)
	if file != "" && job.Program == "" {
		return job, usagef("%s: names no program; set program in [job], or give it with gorun -f %s PROGRAM", file, file)
	}
	return job, nil
}

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
