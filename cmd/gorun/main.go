// Command gorun starts the ranks of an SPMD program.
package main

import (
	"os"
	"os/signal"

	"github.com/gorun-dev/gorun/launcher"
)

func main() { os.Exit(realMain(os.Args[1:])) }

// stdio is where a command reads and writes.
type stdio struct {
	in       int // descriptor
	out, err launcher.FD
	signals  <-chan os.Signal
}

func realMain(args []string) int {
	c := make(chan os.Signal, 16)
	for _, sig := range launcher.Signals() {
		if !signal.Ignored(sig) { // nohup, or a background job of a shell script: it stays so
			signal.Notify(c, sig)
		}
	}
	return run(args, stdio{in: 0, out: 1, err: 2, signals: c})
}

// subcommands are the words that are commands of gorun's own when they come first. Anything else is a launch:
// "gorun -np 2 bench" starts a program called bench.
var subcommands = []string{"run", "check", "bench", "config", "version", "completion", "help", "__complete", "__completeNoDesc"}

// run does what the arguments say and returns the exit code.
func run(args []string, io stdio) int {
	if len(args) > 0 && args[0] == "agent" {
		return agent(args[1:], io)
	}
	if len(args) > 0 {
		for _, word := range subcommands {
			if args[0] == word {
				return runCommand(args, io)
			}
		}
	}
	return launch(args, io)
}
