package bootstrap

import (
	"context"

	"github.com/gorun-dev/gorun/bootstrap/internal/inproc"
	"github.com/gorun-dev/gorun/rankenv"
)

func init() {
	inproc.Die = func(job any, cause string) { job.(*Job).die(cause) }
	inproc.Join = func(ctx context.Context, env rankenv.Env) (any, error) { return join(ctx, env) }
}

// die ends the membership as the sudden end of a process would, for tests.
func (j *Job) die(cause string) {
	stops, _ := j.shut()
	j.ctl.die(cause)
	for _, stop := range stops {
		stop()
	}
}
