package bootstrap

import (
	"context"
	"fmt"

	"github.com/gorun-dev/gorun/rankenv"
)

// Join makes this process a member of its job, as its environment says (package rankenv).
// Without a launcher it is a job of one. It returns when this host's node has accepted the rank;
// it does not wait for the other ranks.
func Join(ctx context.Context) (*Job, error) {
	env, err := rankenv.Current()
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	if env.Size == 1 && env.Control == "" {
		return inProcess(1, env.Device)[0], nil
	}
	return nil, fmt.Errorf("join: GORUN_CONTROL is not set")
}
