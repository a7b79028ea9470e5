package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gorun-dev/gorun/launcher"
)

// exitCode is an error that was told already.
type exitCode int

func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// runCommand runs a subcommand.
func runCommand(args []string, io stdio) int {
	if args[0] == "check" {
		args = checkArgs(args)
	}
	root := newRootCmd(io)
	root.SetArgs(args)
	err := root.Execute()
	if err == nil {
		return launcher.ExitOK
	}
	if code, ok := errors.AsType[exitCode](err); ok {
		return int(code)
	}
	return fail(io, err)
}

func newRootCmd(io stdio) *cobra.Command {
	root := &cobra.Command{
		Use:                "gorun",
		SilenceErrors:      true,
		SilenceUsage:       true,
		DisableFlagParsing: true, // completion of a launch's flags is our own
		ValidArgsFunction:  completeLaunch,
		// Only words that are reserved for commands come here: everything else is a launch.
		RunE: func(cmd *cobra.Command, args []string) error {
			return usagef("no command %s in this version of gorun; for a program of that name say gorun run %s", args[0], args[0])
		},
		Args: cobra.ArbitraryArgs,
	}
	root.SetOut(io.out)
	root.SetErr(io.err)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usagef("%v; see %s --help", err, c.CommandPath())
	})
	defaultHelp := root.HelpFunc()
	root.SetHelpFunc(func(c *cobra.Command, args []string) {
		if c == root || c.Name() == "run" {
			fmt.Fprint(io.out, launchHelp())
			return
		}
		defaultHelp(c, args)
	})
	root.AddCommand(newRunCmd(io), newBenchCmd(io), newCheckCmd(io), newConfigCmd(io), newVersionCmd(io.out))
	for _, t := range helpTopics() {
		topic := &cobra.Command{Use: t.name, Short: t.short}
		topic.SetHelpFunc(func(*cobra.Command, []string) { fmt.Fprint(io.out, t.text()) })
		root.AddCommand(topic)
	}
	root.SetHelpCommand(newHelpCmd(root))
	root.InitDefaultCompletionCmd("completion")
	if c, _, err := root.Find([]string{"completion"}); err == nil {
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(_ *cobra.Command, args []string) error {
			e := &launcher.UsageError{Msg: "completion needs a shell"}
			if len(args) > 0 {
				e.Msg = "no completion for the shell " + args[0]
			}
			e.Hint = "there are bash, zsh, fish and powershell; gorun completion SHELL --help says how to use it"
			return e
		}
	}
	return root
}

func newHelpCmd(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND|TOPIC]",
		Short: "help on gorun, a command or a topic",
		ValidArgsFunction: func(c *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			var names []string
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			for _, c := range root.Commands() {
				if !strings.HasPrefix(c.Name(), "__") && strings.HasPrefix(c.Name(), word) {
					names = append(names, c.Name()+"\t"+c.Short)
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(_ *cobra.Command, args []string) error {
			c, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 || c == nil {
				e := &launcher.UsageError{Msg: "no help on " + strings.Join(args, " ")}
				var names []string
				for _, c := range root.Commands() {
					names = append(names, c.Name())
				}
				if near := launcher.Nearest(args[0], names); near != "" {
					e.Hint = "did you mean gorun help " + near + "?"
				} else {
					e.Hint = "gorun help lists commands and topics"
				}
				return e
			}
			c.InitDefaultHelpFlag()
			return c.Help()
		},
	}
}

func newRunCmd(io stdio) *cobra.Command {
	return &cobra.Command{
		Use:                "run [flags] PROGRAM [ARGUMENT ...]",
		Short:              "start the ranks of a program",
		DisableFlagParsing: true, // flags of gorun end at the program
		ValidArgsFunction:  completeLaunch,
		RunE: func(_ *cobra.Command, args []string) error {
			if code := launch(args, io); code != launcher.ExitOK {
				return exitCode(code)
			}
			return nil
		},
	}
}

// written names what failed when a command can't print.
func written(_ int, err error) error {
	if err != nil {
		return fmt.Errorf("write stdout: %w", err)
	}
	return nil
}

func newVersionCmd(out io.Writer) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "print the version",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("version takes no argument %s; for a program of that name say gorun run version", args[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return written(fmt.Fprintln(out, versionLine()))
		},
	}
}
