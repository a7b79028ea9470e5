package main

import (
	"context"
	"io"

	"github.com/gorun-dev/gorun/launcher"
)

// runRanks runs a program of gorun's own on this host, without stdin.
func runRanks(job launcher.Job, s stdio, stdout, stderr io.Writer) (*launcher.Account, error) {
	job.Stdin, job.RM = launcher.StdinNone, launcher.RMNone
	crowd := true // check itself says what a host lacks
	job.Oversubscribe = &crowd
	plan, err := planOf(job, s, false)
	if err != nil {
		return nil, err
	}
	return launcher.Run(context.Background(), plan, launcher.Options{Stdout: stdout, Stderr: stderr, Signals: s.ending(), OwnProcess: true}), nil
}
