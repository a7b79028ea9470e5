// Package ranktest runs the ranks of an SPMD test: in this process, or each as a process of its own (the
// test binary, executed again), with a real node between them. For tests only.
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

// bound is how long the ranks of a test may take.
const bound = 60 * time.Second

// Run runs f on n ranks in this process and fails the test when one returns an error, panics, or when they do not
// all return within the test's bound (60 s, a dump of all goroutines). A rank that returns nil has its job closed; one that
// returns an error or panics is dead for the others.
func Run(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	jobs := bootstrap.InProcess(n)
	ends := make(chan end, n)
	for _, job := range jobs {
		go func() { ends <- runRank(ctx, job, f) }()
	}
	late := time.NewTimer(bound + 2*time.Second) // the context ended the waits by then
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

func runRank(ctx context.Context, job *bootstrap.Job, f func(context.Context, *bootstrap.Job) error) (e end) {
	e.rank = job.Rank()
	returned := false
	defer func() {
		if p := recover(); p != nil {
			e.text = fmt.Sprintf("panic: %v\n%s", p, debug.Stack())
			Kill(job, fmt.Sprintf("panicked: %v", p))
		} else if !returned { // runtime.Goexit: t.FailNow and t.Skip
			Kill(job, "ended by runtime.Goexit")
		}
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
	return e
}

// Kill makes a rank of Run die for the others, as if its process had ended without goodbye: its job is closed, its cause is
// what their errors say. For ranks of RunProcesses kill the process instead.
func Kill(job *bootstrap.Job, cause string) { inproc.Die(job, cause) }

// RunProcesses runs f on n ranks, each in a process of its own: the test binary executed again with
// -test.run of this test, under a real node. It returns how each ended; f's error becomes exit code 1 and Output's last line.
func RunProcesses(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error) []Result {
	panic("stub")
}

// Result is how a rank's process ended.
type Result struct {
	Rank   int
	Code   int
	Signal string
	Output string // stdout and stderr
	Err    string // the text of f's error
}

// RunEither runs f in process and then as processes, as subtests, and wants success of both.
func RunEither(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error) {
	panic("stub")
}
