package main

import (
	"fmt"

	"github.com/gorun-dev/gorun/launcher"
)

// agent is "gorun agent", which gorun starts on other hosts, and "gorun agent verify HASH", by which it finds out whether what it
// sent there is whole. Nobody else has a use for it, so no help speaks of it.
func agent(args []string, io stdio) int {
	var err error
	switch {
	case len(args) == 0:
		err = launcher.ServeAgent()
	case len(args) == 2 && args[0] == "verify":
		err = launcher.VerifyAgent(args[1])
	default:
		return fail(io, usagef("agent is started by gorun itself; for a program of that name say gorun run agent"))
	}
	if err != nil {
		fmt.Fprintf(io.err, "gorun agent: %v\n", err)
		return 1
	}
	return launcher.ExitOK
}
