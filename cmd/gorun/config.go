package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/gorun-dev/gorun/launcher"
)

const configShowLong = `Show every setting of a job and where it comes from: a flag, a variable, a file and
its line, or the default. A flag wins over a variable, that over the file. The last line
is the command line that asks for the same.

gorun config show takes what gorun takes: config show -np 4 --timeout 5m job.toml
`

func newConfigCmd(io stdio) *cobra.Command {
	config := &cobra.Command{Use: "config", Short: "check a job file, or show what it asks for"}
	config.RunE = func(c *cobra.Command, args []string) error {
		if len(args) > 0 {
			return usagef("unknown command config %s; there are config validate, config show and config schema", args[0])
		}
		return usagef("config needs a command: config validate FILE, config show FILE or config schema")
	}
	config.Args = cobra.ArbitraryArgs
	show := &cobra.Command{
		Use:                "show [flags] [FILE|PROGRAM]",
		Short:              "show each setting of a job and where it comes from",
		Long:               configShowLong,
		DisableFlagParsing: true, // they are those of a launch
		ValidArgsFunction:  completeLaunch,
	}
	show.RunE = func(c *cobra.Command, args []string) error {
		q, err := parse(args)
		if err != nil {
			return err
		}
		if q.help {
			return c.Help()
		}
		return showConfig(q, io)
	}
	config.AddCommand(&cobra.Command{
		Use:   "validate FILE",
		Short: "check a job file",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("needs one job file")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return validate(args[0], io) },
	}, &cobra.Command{
		Use:   "schema",
		Short: "print the JSON Schema of a job file, for editors",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return written(io.out.Write(launcher.JobSchema())) },
	}, show)
	return config
}

// validate checks a job file: what gorun FILE refuses is an error here, too, though flags may give the rest.
func validate(file string, io stdio) error {
	job, places, err := launcher.ReadJobFile(file)
	if err != nil {
		return err
	}
	sources := []launcher.Source{ofFile: {Job: job, Places: places}}
	if job.Hostfile != "" {
		if _, err := launcher.ReadHostfile(job.Hostfile); err != nil {
			return hintBeside(placed(err, job, sources), job, file)
		}
	}
	var refused error
	for _, i := range launcher.FindIdle(mayBeAway(job), sources...) {
		switch {
		case !i.Refused:
			fmt.Fprintf(io.err, "gorun: %s: %s\n", i.From, i.Text(false))
		case refused == nil:
			refused = refusal(&i)
		}
	}
	switch {
	case refused != nil:
		return refused
	case len(job.Programs()) == 0:
		return noProgram(file)
	}
	env, err := fromEnviron(os.LookupEnv)
	if err != nil {
		return err
	}
	sources[ofEnviron] = launcher.Source{Job: env, Name: variableName}
	if sources, err = effective(sources, os.LookupEnv); err != nil {
		return err
	}
	return unplanned(merge(sources), sources)
}

// unplanned is why no plan can be made of a job, whatever its programs are; nil: one can. What GPUs there are, and what a resource manager gives, are
// those of another time or machine.
func unplanned(job launcher.Job, sources []launcher.Source) error {
	f := launcher.Facts{Host: "localhost", Dir: "/", Environ: os.Environ()}
	if host, err := os.Hostname(); err == nil {
		f.Host = host
	}
	var err error
	if job.Hostfile != "" {
		if f.Hostfile, err = launcher.ReadHostfile(job.Hostfile); err != nil {
			return placed(err, job, sources)
		}
	}
	if len(job.Hosts) == 0 && job.Hostfile == "" {
		job.MapBy = nil
		if job.NP == 0 {
			job.Stdin = "" // there may be such a rank
		}
	}
	if _, err = job.Plan(f); err != nil {
		return placed(err, job, sources)
	}
	return nil
}

// showConfig prints the settings of a job with their origins.
func showConfig(q *request, io stdio) error {
	sources, err := sourcesOf(q, os.LookupEnv)
	if err != nil {
		return err
	}
	counted, err := effective(sources, os.LookupEnv)
	if err != nil {
		return err
	}
	job := merge(counted)
	refused := refusedIn(job, counted)
	if refused == nil && len(job.Programs()) > 0 {
		refused = unplanned(job, counted)
	}
	settings := launcher.Origins(sources...)
	if q.json {
		e := encoder(io.out)
		e.SetEscapeHTML(false)
		shown := struct {
			Settings    []launcher.Origin `json:"settings"`
			CommandLine string            `json:"command_line,omitempty"` // none where gorun refuses the job
		}{Settings: settings}
		if refused == nil {
			shown.CommandLine = job.CommandLine()
		}
		if err := e.Encode(shown); err != nil {
			return written(0, err)
		}
		return refused
	}
	if err := launcher.WriteOrigins(io.out, settings); err != nil {
		return written(0, err)
	}
	if refused != nil {
		return refused
	}
	return written(fmt.Fprintf(io.out, "\n%s\n", job.CommandLine()))
}
