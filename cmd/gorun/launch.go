package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

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
		fmt.Fprint(io.out, launchHelp())
		return launcher.ExitOK
	case q.version:
		fmt.Fprintln(io.out, versionLine())
		return launcher.ExitOK
	}
	job, err := jobOf(q, os.LookupEnv)
	if err != nil {
		return fail(io, err)
	}
	if job.Program == "" {
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
	if err != nil {
		return fail(io, fmt.Errorf("find the current directory: %w", err))
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
	fmt.Fprint(io.err, acct.Summary())
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
		return job, usagef("%s: names no program; set program in [job], or give one on the command line", file)
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
