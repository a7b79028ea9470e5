// Package ranktest runs the ranks of an SPMD test: in this process, or each as a process of its own (the
// test binary, executed again), with a real node between them. For tests only.
//
//	func TestBarrier(t *testing.T) {
//		ranktest.RunEither(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
//			return job.Barrier(ctx)
//		})
//	}
package ranktest

import (
	"context"
	"fmt"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/internal/inproc"
)

const (
	// bound is how long the ranks of a test may take: only against hanging, so with room for a machine that does much else.
	bound = 2 * time.Minute
	// grace is what they have on top to return after the context has ended.
	grace = 15 * time.Second
)

// Run runs f on n ranks in this process and fails the test when one returns an error, panics, or when they do not
// all return within the test's bound (2 minutes, a dump of all goroutines). A rank that returns nil has its job closed; one that
// returns an error or panics is dead for the others.
func Run(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	ends := make(chan end, n)
	for _, job := range bootstrap.InProcess(n) {
		go runRank(ctx, job, f, ends)
	}
	late := time.NewTimer(bound + grace)
	defer late.Stop()
	for range n {
		select {
		case e := <-ends:
			if e.text != "" {
				t.Errorf("rank %d: %s", e.rank, e.text)
			}
		case <-late.C:
			buf := make([]byte, 4<<20)
			t.Fatalf("ranks did not return in %v:\n%s", bound, buf[:runtime.Stack(buf, true)])
		}
	}
}

// end is how a rank's function ended; text is empty for success.
type end struct {
	rank int
	text string
}

func runRank(ctx context.Context, job *bootstrap.Job, f func(context.Context, *bootstrap.Job) error, ends chan<- end) {
	e := end{rank: job.Rank()}
	returned := false
	defer func() {
		if p := recover(); p != nil {
			e.text = fmt.Sprintf("panic: %v\n%s", p, debug.Stack())
			Kill(job, fmt.Sprintf("panicked: %v", p))
		} else if !returned {
			e.text = "runtime.Goexit was called (t.Fatal, t.Skip: return an error instead)"
			Kill(job, "ended by runtime.Goexit")
		}
		ends <- e
	}()
	err := f(ctx, job)
	returned = true
	if err == nil {
		err = job.Close()
	}
	if err != nil {
		e.text = err.Error()
		Kill(job, "failed: "+err.Error())
	}
}

// Kill makes a rank of Run die for the others, as if its process had ended without goodbye: its job is closed, its cause is
// what their errors say. In a rank of RunProcesses it kills the process.
func Kill(job *bootstrap.Job, cause string) {
	if !job.InProcess() {
		killSelf()
	}
	inproc.Die(job, cause)
}

// RunEither runs f in process and then as processes, as subtests, and wants success of both.
func RunEither(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error) {
	t.Helper()
	t.Run("goroutines", func(t *testing.T) { Run(t, n, f) })
	t.Run("processes", func(t *testing.T) {
		for _, r := range RunProcesses(t, n, f) {
			if r.Code != 0 || r.Signal != "" {
				t.Errorf("%v", r)
			}
		}
	})
}
