package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/node"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// signalVar names a file by which the process of a test lets a rank go on.
const signalVar = "GORUN_TEST_SIGNAL"

// awaitSignal waits for that file.
func awaitSignal(ctx context.Context) error {
	for ; ctx.Err() == nil; time.Sleep(2 * time.Millisecond) {
		if _, err := os.Stat(os.Getenv(signalVar)); err == nil {
			return nil
		}
	}
	return ctx.Err()
}

// awaitReport asks the hosts, again and again, until they tell as many lines as are wanted, and each begins with one of those.
func awaitReport(t *testing.T, hosts []ranktest.Host, nodeOf []int, want ...string) {
	t.Helper()
	names := make([]string, len(hosts))
	for i := range hosts {
		names[i] = fmt.Sprint("h", i)
	}
	var lines []string
	for end := time.Now().Add(room); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var all []node.Standing
		for _, h := range hosts {
			all = append(all, h.Standings()...)
		}
		lines = node.Report(all, nodeOf, names)
		missing := slices.DeleteFunc(slices.Clone(want), func(w string) bool {
			return slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, w) })
		})
		if len(lines) == len(want) && len(missing) == 0 {
			return
		}
	}
	t.Errorf("the hosts told %q, want %q", lines, want)
}

// Where ranks hang in a collective their hosts know in which, for whom, and where that one was last; when it has come, nothing.
func TestStandingInCollective(t *testing.T) {
	nodeOf := []int{0, 1, 0}
	run := func(t *testing.T, open func(job *bootstrap.Job) (*cuda.Device, error), env ...string) {
		signal := filepath.Join(t.TempDir(), "go on")
		allWell(t, ranktest.RunHostsBeside(t, nodeOf, func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := open(job)
			if err != nil {
				return err
			}
			return errors.Join(withComm(ctx, job, dev, nil, func(w *world) error {
				b, done, err := openBuffers(w, 4096, false)
				defer done()
				if err != nil {
					return err
				}
				send, _ := cuda.SliceOf[float32](b.send, 0, 8)
				recv, _ := cuda.SliceOf[float32](b.recv, 0, 8)
				err = errors.Join(nccl.Broadcast(w.comm, send, recv, 0, w.stream), w.stream.Synchronize(ctx))
				if job.Rank() == 1 {
					err = errors.Join(err, awaitSignal(ctx))
				}
				return errors.Join(err, nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream), w.stream.Synchronize(ctx))
			}), dev.Close())
		}, func(hosts []ranktest.Host) {
			awaitReport(t, hosts, nodeOf,
				"rank 1 of 3 (host h1) has not entered all-reduce #2 on communicator world: it was last seen in broadcast #1; ranks 0,2 wait for it since ")
			if err := os.WriteFile(signal, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, append(env, signalVar+"="+signal)...))
	}
	t.Run("host", func(t *testing.T) {
		run(t, func(*bootstrap.Job) (*cuda.Device, error) { return cuda.Open("host") })
	})
	t.Run("library", func(t *testing.T) {
		run(t, func(job *bootstrap.Job) (*cuda.Device, error) { return cuda.Open(strconv.Itoa(job.Rank())) }, fakeLibraries(t)...)
	})
}

// Ranks that all send before they receive wait for each other. Their hosts, and the end of the wait, tell it as one circle.
func TestStandingInMessages(t *testing.T) {
	const n = 1 << 18 // more than a library has room for
	nodeOf := []int{0, 1, 0}
	run := func(t *testing.T, open func(job *bootstrap.Job) (*cuda.Device, error), env ...string) {
		signal := filepath.Join(t.TempDir(), "give up")
		allWell(t, ranktest.RunHostsBeside(t, nodeOf, func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := open(job)
			if err != nil {
				return err
			}
			return errors.Join(withComm(ctx, job, dev, nil, func(w *world) error {
				b, done, err := openBuffers(w, 4*n, false)
				defer done()
				if err != nil {
					return err
				}
				send, _ := cuda.SliceOf[float32](b.send, 0, n)
				next := (job.Rank() + 1) % 3
				if err := nccl.Send(w.comm, send, next, w.stream); err != nil {
					return err
				}
				for told := false; !told; { // the next rank has told its host, and that has told this one's, in a while
					short, end := context.WithTimeout(ctx, 300*time.Millisecond)
					err := w.stream.Synchronize(short)
					end()
					if err == nil || ctx.Err() != nil {
						return fmt.Errorf("got %v, want it to say that it waits for rank %d, and that with all others", err, next)
					}
					told = strings.Contains(err.Error(), fmt.Sprintf("waits for rank %d", next)) &&
						strings.Contains(err.Error(), "(ranks 0 -> 1 -> 2 -> 0 all wait in Send, each to the next)")
				}
				if err := errors.Join(awaitSignal(ctx), job.Barrier(ctx)); err != nil { // all have been told
					return err
				}
				return w.comm.Abort(errors.New("the test is over"))
			}), dev.Close())
		}, func(hosts []ranktest.Host) {
			awaitReport(t, hosts, nodeOf, "ranks 0 -> 1 -> 2 -> 0 of 3 all wait in Send, each to the next, since ")
			if err := os.WriteFile(signal, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, append(env, signalVar+"="+signal)...))
	}
	t.Run("host", func(t *testing.T) {
		run(t, func(*bootstrap.Job) (*cuda.Device, error) { return cuda.Open("host") })
	})
	t.Run("library", func(t *testing.T) {
		run(t, func(job *bootstrap.Job) (*cuda.Device, error) { return cuda.Open(strconv.Itoa(job.Rank())) }, fakeLibraries(t)...)
	})
}
