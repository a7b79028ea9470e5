package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/gorun-dev/gorun/rankenv"
)

// Join makes this process a member of its job, as its environment says (package rankenv).
// Without a launcher it is a job of one. It returns when this host's node has accepted the rank;
// it does not wait for the other ranks.
//
// Under another launcher (mpirun, torchrun, srun, ...) with all ranks on one host, rank 0 serves the job
// in its own process, and Join waits for it, at most 60 s. Its ranks on several hosts do not meet: that is an error.
func Join(ctx context.Context) (*Job, error) {
	env, err := rankenv.Current()
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	j, err := join(ctx, env)
	if err != nil {
		return nil, fmt.Errorf("join as rank %d of %d: %w", env.Rank, env.Size, err)
	}
	return j, nil
}

func join(ctx context.Context, env rankenv.Env) (*Job, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	switch {
	case env.Control != "":
		ctl, welcome, err := dial(ctx, env.Control, env.Job, env.Rank, env.Size)
		if err != nil {
			return nil, fmt.Errorf("node at @%s: %w", env.Control, err)
		}
		j := newJob(env.Job, env.Rank, welcome.Node, welcome.NodeOf, env.Device, ctl)
		j.hostAddr, j.dataKey, j.dataPorts = welcome.Addr, welcome.DataKey, welcome.Ports
		return j, nil
	case env.Size == 1:
		return inProcess(1, env.Device)[0], nil
	case env.Launcher == "gorun":
		return nil, errors.New("GORUN_CONTROL is not set")
	}
	return joinForeign(ctx, env, os.Getppid())
}
