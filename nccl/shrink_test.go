package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// shrink leaves out the last rank, then the first, of a communicator that works; the library is asked for the first one only.
func shrink(ctx context.Context, w *world) error {
	n, me := w.comm.Size(), w.comm.Rank()
	var all []int
	for r := range n {
		all = append(all, r)
	}
	if me < n-1 {
		part, err := w.comm.Shrink(ctx, []int{n - 1})
		if err != nil {
			return err
		}
		if want := fmt.Sprintf("world without %d", n-1); part.Name() != want {
			return fmt.Errorf("name %q, want %q", part.Name(), want)
		}
		if err := errors.Join(members(ctx, part, all[:n-1]), part.Close()); err != nil {
			return err
		}
		if log := libraryLog(); n > 2 && isFake() && w.dev.Platform() != cuda.Host {
			line := fmt.Sprintf("CommShrink count=1 first=%d flags=0 name=world without %d share=0", n-1, n-1)
			asked := slices.DeleteFunc(log, func(l string) bool { return l != line })
			if len(asked) != 2 {
				return fmt.Errorf("%d calls %q, want 2", len(asked), line)
			}
		}
	}
	if err := w.job.Barrier(ctx); err != nil {
		return err
	}
	// The next by an init of its own: the last rank has made one less.
	if me == n-1 {
		_, err := w.comm.Shrink(ctx, []int{me})
		if err := wantErr(err, nccl.ErrArgument, fmt.Sprintf("rank %d itself calls", me)); err != nil {
			return err
		}
	}
	again, err := w.comm.Shrink(ctx, nil)
	if err != nil {
		return err
	}
	return errors.Join(members(ctx, again, all), again.Close(), members(ctx, w.comm, all))
}

func TestShrink(t *testing.T) {
	ranktest.RunEither(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error { return shrink(ctx, w) })
	})
}

func TestLibraryShrink(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "calls")
			onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				return withDevice(ctx, job, nil, func(w *world) error { return shrink(ctx, w) })
			}, nil, nil, "FAKE_LOG="+log)
		})
	}
}

// A member may be in the middle of a step that writes to the others' memory when one of them gives up. Who has shrunk may use its memory.
func TestShrinkAwaitsSteps(t *testing.T) {
	var over atomic.Bool
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			if job.Rank() == 1 {
				end := nccl.HoldStep(w.comm)
				time.AfterFunc(300*time.Millisecond, func() {
					over.Store(true)
					end()
				})
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if job.Rank() == 0 {
				w.comm.Abort(errors.New("enough"))
			}
			part, err := w.comm.Shrink(ctx, nil)
			if err != nil {
				return err
			}
			if !over.Load() {
				err = fmt.Errorf("rank %d has shrunk in the middle of rank 1's step", job.Rank())
			}
			return errors.Join(err, part.Close())
		})
	})
}

const shrinkCulprit = 1

// survive has a rank die in the middle of a run; the others shrink the communicator, which has failed, before they close it, and go on.
func survive(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, closeFirst bool) (err error) {
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	all, rest := []int{}, []int{}
	for r := range comm.Size() {
		all = append(all, r)
		if r != shrinkCulprit {
			rest = append(rest, r)
		}
	}
	if err := members(ctx, comm, all); err != nil {
		return err
	}
	if err := job.Barrier(ctx); err != nil {
		return err
	}
	// It is killed before the others are in the next call, or in it.
	if job.Rank() == shrinkCulprit {
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	err = members(ctx, comm, all)
	died, ok := errors.AsType[*bootstrap.RankError](err)
	if !ok || died.Rank != shrinkCulprit {
		return fmt.Errorf("got %v, want the end of rank %d", err, shrinkCulprit)
	}
	if _, err := comm.Shrink(ctx, nil); len(rest) > 1 {
		if err := wantErr(err, nccl.ErrRank, fmt.Sprintf("rank %d is not left out, but has ended", shrinkCulprit)); err != nil {
			return err
		}
	}
	if closeFirst {
		if err := comm.Close(); err != nil {
			return err
		}
	}
	start := time.Now()
	part, err := comm.Shrink(ctx, []int{shrinkCulprit})
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "shrunk in %v\n", time.Since(start))
	defer func() { err = errors.Join(err, part.Close()) }()
	return members(ctx, part, rest)
}

func survived(t *testing.T, results []ranktest.Result) {
	t.Helper()
	for _, r := range results {
		if r.Rank == shrinkCulprit {
			if !strings.Contains(r.Signal, "SIGKILL") {
				t.Errorf("the culprit: %v", r)
			}
		} else if r.Code != 0 {
			t.Errorf("%v\n%s", r, r.Err)
		}
	}
	t.Log(results[0].Output)
}

func TestShrinkAfterDeath(t *testing.T) {
	for _, closeFirst := range []bool{false, true} {
		t.Run(fmt.Sprintf("close first %t", closeFirst), func(t *testing.T) {
			survived(t, ranktest.RunProcesses(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
				dev, err := cuda.Open("host")
				if err != nil {
					return err
				}
				return errors.Join(survive(ctx, job, dev, closeFirst), dev.Close())
			}))
		})
	}
}

func TestLibraryShrinkAfterDeath(t *testing.T) {
	for _, n := range []int{2, 4} {
		for _, closeFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d ranks/close first %t", n, closeFirst), func(t *testing.T) {
				onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					dev, err := device(job)
					if err != nil {
						return err
					}
					return errors.Join(survive(ctx, job, dev, closeFirst), dev.Close())
				}, survived, nil)
			})
		}
	}
}

// What goes wrong in Shrink goes wrong on all members that stay, and they may try again.
func TestShrinkMistakes(t *testing.T) {
	ranktest.RunEither(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, &nccl.Config{Timeout: 20 * time.Second}, func(w *world) error {
			me := w.comm.Rank()
			for text, exclude := range map[string][]int{"rank 4 is no rank of a communicator of 4": {4}, "rank -1 is no rank": {-1}} {
				_, err := w.comm.Shrink(ctx, exclude)
				if err := wantErr(err, nccl.ErrArgument, text); err != nil {
					return err
				}
			}
			other := []int{(me + 1) % 4, (me + 1) % 4}
			_, err := w.comm.Shrink(ctx, other)
			if err := wantErr(err, nccl.ErrArgument, "is twice in it"); err != nil {
				return err
			}
			// Rank 3 leaves out another one.
			exclude := []int{1}
			if me == 3 {
				exclude = []int{}
			}
			if me != 1 {
				_, err := w.comm.Shrink(ctx, exclude)
				if err := wantErr(err, nccl.ErrMismatch, "rank 3 excludes [], rank 0 [1]"); err != nil {
					return err
				}
			} else {
				_, err := w.comm.Shrink(ctx, exclude)
				if err := wantErr(err, nccl.ErrArgument, "itself calls"); err != nil {
					return err
				}
			}
			// Rank 0 is left out, and one that is not does not come in time.
			if me == 2 || me == 3 {
				late, cancel := context.WithTimeout(ctx, time.Second) // ranks 2 and 3 meet in it
				defer cancel()
				_, err := w.comm.Shrink(late, []int{0})
				if err := wantErr(err, context.DeadlineExceeded, "rank 1 has not called it"); err != nil {
					return err
				}
			} else {
				w.comm.Shrink(ctx, []int{me}) // for the count
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if me == 0 {
				return nil
			}
			part, err := w.comm.Shrink(ctx, []int{0})
			if err != nil {
				return err
			}
			return errors.Join(members(ctx, part, []int{1, 2, 3}), part.Close(), part.Close())
		})
	})
	t.Run("nil and closed", func(t *testing.T) {
		ranktest.Run(t, 1, func(ctx context.Context, job *bootstrap.Job) error {
			return with(ctx, job, nil, func(w *world) error {
				var none *nccl.Comm
				_, err := none.Shrink(ctx, nil)
				if err := wantErr(err, nccl.ErrArgument, "the communicator is nil"); err != nil {
					return err
				}
				again, err := w.comm.Shrink(ctx, nil)
				if err != nil {
					return err
				}
				if err := errors.Join(members(ctx, again, []int{0}), again.Close()); err != nil {
					return err
				}
				_, err = again.Shrink(ctx, nil)
				return wantErr(err, nccl.ErrClosed)
			})
		})
	})
}
