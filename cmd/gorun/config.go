package main

import (
	"encoding/json"
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
		RunE: func(_ *cobra.Command, args []string) error {
			job, places, err := launcher.ReadJobFilePlaces(args[0])
			if err == nil && job.Hostfile != "" {
				_, err = launcher.ReadHostfile(job.Hostfile)
			}
			if err != nil {
				return err
			}
			var refused error // what gorun FILE refuses is an error here, too, though flags may give the rest
			for _, i := range launcher.FindIdle(mayBeAway(job), []launcher.Source{ofFile: {Job: job, Places: places}}...) {
				switch {
				case !i.Refused:
					fmt.Fprintf(io.err, "gorun: %s: %s\n", i.From, i.Text(false))
				case refused == nil:
					refused = refusal(&i)
				}
			}
			if refused == nil && len(job.Programs()) == 0 {
				refused = noProgram(args[0])
			}
			return refused
		},
	}, &cobra.Command{
		Use:   "schema",
		Short: "print the JSON Schema of a job file, for editors",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return written(io.out.Write(launcher.JobSchema())) },
	}, show)
	return config
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
	settings := launcher.Origins(sources...)
	if q.json {
		e := json.NewEncoder(io.out)
		e.SetIndent("", "  ")
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
