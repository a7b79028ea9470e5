package nccl_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/nccl"
)

// A rank's process ends in the middle of a run of all-reduces: every other rank has an error that names it, in time, whether it waits
// in the call or comes later.
func TestProcessEnds(t *testing.T) {
	const culprit, calls = 1, 50
	cases := []struct {
		name           string
		end            func(w *world)
		sentinel       error
		code           int
		signal, output string
	}{
		{"killed", func(*world) { syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} }, nccl.ErrRank, -1, "SIGKILL", ""},
		{"exits", func(*world) { os.Exit(0) }, nccl.ErrRank, 0, "", ""},
		{"exits with 3", func(*world) { os.Exit(3) }, nccl.ErrRank, 3, "", ""},
		// The panic runs the defers: the communicator is closed on the way.
		{"panics", func(*world) { panic("index out of range") }, nccl.ErrClosed, 2, "", "index out of range"},
	}
	for _, tc := range cases {
		for _, registered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/registered=%v", tc.name, registered), func(t *testing.T) {
				results := ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
					return with(ctx, job, nil, func(w *world) error {
						b, done, err := openBuffers(w, 1<<20, registered)
						defer done()
						if err != nil {
							return err
						}
						send, recv, err := place[float32](b, spec{op: nccl.OpAllReduce, count: 1 << 17, inPlace: true}, job.Rank(), job.Size())
						if err != nil {
							return err
						}
						for i := range 10 * calls {
							if job.Rank() == culprit && i == calls {
								tc.end(w)
							}
							start := time.Now()
							err := outcome(ctx, w.stream, nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream))
							if took := time.Since(start); took > room {
								return fmt.Errorf("call %d took %v: %v", i, took, err)
							}
							if err != nil && i >= calls-1 { // it may be gone before all have seen its last call through
								return wantErr(err, tc.sentinel, "rank 1")
							}
							if err != nil {
								return err
							}
						}
						return fmt.Errorf("rank %d got no error", job.Rank())
					})
				})
				for _, r := range results {
					switch {
					case r.Rank != culprit && r.Code != 0:
						t.Errorf("rank %d: code %d: %s", r.Rank, r.Code, r.Err)
					case r.Rank == culprit && (r.Code != tc.code || !strings.Contains(r.Signal, tc.signal) || !strings.Contains(r.Output, tc.output)):
						t.Errorf("rank %d ended with %+v", r.Rank, r)
					}
				}
			})
		}
	}
}
