// Command gorun starts the ranks of an SPMD program.
package main

import (
	"os"
	"os/signal"
	"slices"

	"github.com/gorun-dev/gorun/launcher"
)

func main() { os.Exit(realMain(os.Args[1:])) }

// stdio is where a command reads and writes.
type stdio struct {
	in       int // descriptor
	out, err launcher.FD
	signals  <-chan os.Signal
	catch    func() // has those that end a job come in signals, too; nil: they do
}

func realMain(args []string) int {
	c := make(chan os.Signal, 16)
	notify := func(ends bool) {
		for _, sig := range launcher.Signals() {
			if launcher.EndsJob(sig) == ends && !signal.Ignored(sig) { // nohup, or a background job of a shell script: it stays so
				signal.Notify(c, sig)
			}
		}
	}
	notify(false)
	return run(args, stdio{in: 0, out: 1, err: 2, signals: c, catch: func() { notify(true) }})
}

// ending is for what is to be ended in order. Until then Ctrl-C and the like end gorun at once, whatever it waits for: nothing was begun.
func (s stdio) ending() <-chan os.Signal {
	if s.catch != nil {
		s.catch()
	}
	return s.signals
}

// subcommands are the words that are commands of gorun's own when they come first. Anything else is a launch:
// "gorun -np 2 bench" starts a program called bench.
var subcommands = []string{"run", "check", "bench", "config", "version", "completion", "help", "__complete", "__completeNoDesc"}

// run does what the arguments say and returns the exit code.
func run(args []string, io stdio) int {
	if len(args) > 0 && args[0] == "agent" {
		return agent(args[1:], io)
	}
	if len(args) > 0 && slices.Contains(subcommands, args[0]) {
		return runCommand(args, io)
	}
	return launch(args, io)
}
