package ranktest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRunEither(t *testing.T) {
	RunEither(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		id := bootstrap.UniqueID{5}
		if job.Rank() == 1 {
			if err := job.PublishID(ctx, "world", id); err != nil {
				return err
			}
		}
		if got, err := job.UniqueID(ctx, "world"); err != nil || got != id {
			return fmt.Errorf("id %v, %v", got[:2], err)
		}
		return job.Barrier(ctx)
	})
}

// Each way for a process to end is told to the others and to the test.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		name, signal, output, cause string
		code                        int
		end                         func(job *bootstrap.Job) error
	}{
		{name: "error", code: 1, output: "it failed\n", cause: "exited with code 1", end: func(*bootstrap.Job) error { return errors.New("it failed") }},
		{name: "panic", code: 2, output: "panic: something", cause: "exited with code 2", end: func(*bootstrap.Job) error { panic("something") }},
		{name: "exit 0", code: 0, cause: "exited with code 0 without closing its job", end: func(*bootstrap.Job) error { os.Exit(0); return nil }},
		{name: "exit 7", code: 7, cause: "exited with code 7", end: func(*bootstrap.Job) error { os.Exit(7); return nil }},
		{name: "kill", code: -1, signal: "SIGKILL", cause: "killed by SIGKILL", end: func(j *bootstrap.Job) error { Kill(j, ""); return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			rs := RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				if err := job.Barrier(ctx); err != nil {
					return err
				}
				if job.Rank() == 1 {
					return c.end(job)
				}
				err := job.Barrier(ctx)
				var dead *bootstrap.RankError
				if !errors.As(err, &dead) || dead.Rank != 1 {
					return fmt.Errorf("barrier: %v, want an error of rank 1", err)
				}
				// An error ends with a goodbye first, which is what the others may see.
				// On a busy machine the broken connection may be told before the account of the process.
				if !dead.Left && dead.Cause != c.cause && dead.Cause != "lost its control connection" {
					return fmt.Errorf("cause %q, want %q", dead.Cause, c.cause)
				}
				if dead.Left && c.name != "error" {
					return fmt.Errorf("a death is said to be a goodbye: %v", err)
				}
				return nil
			})
			for rank, r := range rs {
				if rank != 1 {
					if r.Code != 0 {
						t.Errorf("%v", r)
					}
					continue
				}
				if r.Code != c.code || r.Signal != c.signal || !strings.Contains(r.Output, c.output) {
					t.Errorf("code %d, signal %q, output:\n%s", r.Code, r.Signal, r.Output)
				}
				if want := map[bool]string{true: "it failed"}[c.name == "error"]; r.Err != want {
					t.Errorf("error text %q, want %q", r.Err, want)
				}
			}
		})
	}
}

// In one process a panic is a death of its rank, and the test's failure is reported with it.
func TestPanicInProcess(t *testing.T) {
	jobs := bootstrap.InProcess(2)
	ends := make(chan end, 2)
	go runRank(t.Context(), jobs[0], func(context.Context, *bootstrap.Job) error { panic("boom") }, ends)
	if e := <-ends; e.rank != 0 || !strings.Contains(e.text, "panic: boom") || !strings.Contains(e.text, "ranktest_test.go") {
		t.Errorf("end of the rank: %+v", e)
	}
	err := jobs[1].Barrier(t.Context())
	if err == nil || !strings.Contains(err.Error(), "rank 0 panicked: boom") {
		t.Errorf("barrier of the other: %v", err)
	}
	jobs[1].Close()
}

// A rank that hangs is made to show its goroutines, and is killed.
func TestHang(t *testing.T) {
	hang := func(ctx context.Context, job *bootstrap.Job) error {
		if job.Rank() == 1 {
			select {}
		}
		return nil
	}
	if os.Getenv(testVar) == t.Name() {
		runAsRank(t, hang)
	}
	p := &processes{t: t, nodeOf: make([]int, 2), results: make([]Result, 2), bound: 100 * time.Millisecond}
	p.start(nil)
	for joined := false; !joined; joined, _ = p.nodes[0].Joined(1) {
		select {
		case <-p.ranks[1].done:
			t.Fatalf("it does not hang: %v", p.results[1])
		case <-time.After(time.Millisecond):
		}
	}
	p.wait()
	if r := p.results[1]; !p.late || r.Code != 2 || !strings.Contains(r.Output, "SIGQUIT") || !strings.Contains(r.Output, "TestHang") {
		t.Errorf("late %v, %v", p.late, r)
	}
}

func TestEnvironment(t *testing.T) {
	rs := RunProcesses(t, 1, func(ctx context.Context, job *bootstrap.Job) error {
		if got := os.Getenv("EXTRA"); got != "yes" {
			return fmt.Errorf("EXTRA=%q", got)
		}
		return nil
	}, "EXTRA=yes")
	if rs[0].Code != 0 {
		t.Errorf("%v", rs[0])
	}
}
