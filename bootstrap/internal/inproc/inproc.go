// Package inproc lets tests reach into package bootstrap.
package inproc

import (
	"context"

	"github.com/gorun-dev/gorun/rankenv"
)

// Die makes the rank of a *bootstrap.Job die for the others. Package bootstrap sets it.
var Die func(job any, cause string)

// Join is bootstrap.Join for an environment that is not this process's; job is a *bootstrap.Job.
var Join func(ctx context.Context, env rankenv.Env) (job any, err error)
