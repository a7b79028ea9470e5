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
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// members checks a communicator: its members by their job ranks, in order, which they all-gather, and messages to itself and on.
func members(ctx context.Context, c *nccl.Comm, want []int) (err error) {
	b, err := nccl.Alloc[int32](c.Device(), 2*len(want)+2)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Free()) }()
	s, err := c.Device().NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	n := len(want)
	all, mine, from := b.Slice(0, n), b.Slice(n, n+1), b.Slice(n+1, n+2)
	got, one := make([]int32, n), make([]int32, 1)
	next, last := (c.Rank()+1)%n, (c.Rank()+n-1)%n
	ctx, cancel := context.WithTimeout(ctx, room)
	defer cancel()
	// Nothing but calls is enqueued when one may fail.
	if err := errors.Join(cuda.CopyToDevice(mine, []int32{int32(c.Job().Rank())}, s), s.Synchronize(ctx)); err != nil {
		return err
	}
	err = errors.Join(nccl.AllGather(c, mine, all, s),
		nccl.Group(func() error { return errors.Join(nccl.Send(c, mine, next, s), nccl.Recv(c, from, last, s)) }, c))
	if err == nil {
		err = s.Synchronize(ctx)
	}
	if err != nil {
		c.Abort(err) // what is enqueued ends before its memory goes
		return err
	}
	if err := errors.Join(cuda.CopyToHost(got, all, s), cuda.CopyToHost(one, from, s), s.Synchronize(ctx)); err != nil {
		return err
	}
	for i, r := range got {
		if int(r) != want[i] || c.JobRank(i) != want[i] {
			return fmt.Errorf("%v has job ranks %v, want %v", c, got, want)
		}
	}
	if int(one[0]) != want[last] {
		return fmt.Errorf("%v: received from job rank %d, want %d", c, one[0], want[last])
	}
	return nil
}

// onLibraries is onLibrary with n ranks.
func onLibraries(t *testing.T, n int, f func(ctx context.Context, job *bootstrap.Job) error, wants func(t *testing.T, results []ranktest.Result), args []string, env ...string) {
	t.Helper()
	if wants == nil {
		wants = allWell
	}
	t.Run("fake", func(t *testing.T) {
		wants(t, ranktest.RunProcesses(t, n, f, append(fakeLibraries(t, args...), env...)...))
	})
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedGPUs(t, n)
		wants(t, ranktest.RunProcesses(t, n, f, append(dltest.GPUEnv(), env...)...))
	})
}

// splits makes communicators of all kinds of parts, and checks what the library was asked for: with split, once a kind of communicator. It is asked nothing where
// no part has several members.
func splits(ctx context.Context, w *world, split bool) error {
	n, me := w.comm.Size(), w.comm.Rank()
	for round, tc := range []struct {
		name  string
		color func(r int) int
		key   func(r int) int
	}{
		{name: "all, backwards", color: func(int) int { return 1 << 40 }, key: func(r int) int { return -r << 40 }},
		{name: "pairs", color: func(r int) int { return 100 - r/2 }, key: func(int) int { return 0 }},
		{name: "rank 0 alone, rank 1 in none", color: func(r int) int {
			switch r {
			case 0:
				return 7
			case 1:
				return -3
			}
			return 5
		}, key: func(r int) int { return r }},
		{name: "each alone", color: func(r int) int { return r }, key: func(int) int { return 0 }},
	} {
		var want []int
		for r := range n {
			if tc.color(r) == tc.color(me) {
				want = append(want, r)
			}
		}
		slices.SortStableFunc(want, func(a, b int) int { return tc.key(a) - tc.key(b) })
		before := len(libraryLog())
		part, err := w.comm.Split(ctx, tc.color(me), tc.key(me))
		if err != nil {
			return fmt.Errorf("%s: %w", tc.name, err)
		}
		if isFake() {
			var calls []string
			for _, l := range libraryLog()[before:] {
				if strings.HasPrefix(l, "CommSplit") || strings.HasPrefix(l, "CommInitRank") || strings.HasPrefix(l, "GetUniqueId") {
					calls = append(calls, l)
				}
			}
			color, key, ask := 0, slices.Index(want, me), split
			switch round {
			case 1:
				color = (n+1)/2 - 1 - me/2
				if n%2 == 1 {
					color--
				}
			case 2:
				ask = split && n > 3
			case 3:
				ask = false
			}
			line := fmt.Sprintf("CommSplit color=%d key=%d name=world/%d share=0", color, key, tc.color(me))
			if len(want) == 1 || tc.color(me) < 0 {
				line = "CommSplit color=-1 key=0 name= share=0"
			}
			if ask && (len(calls) < 2 || calls[0] != line || slices.ContainsFunc(calls, func(l string) bool { return strings.HasPrefix(l, "CommInitRank") })) {
				return fmt.Errorf("%s: calls %q, want %q twice and no init", tc.name, calls, line)
			}
			if !ask && slices.ContainsFunc(calls, func(l string) bool { return strings.HasPrefix(l, "CommSplit") }) {
				return fmt.Errorf("%s: calls %q, want no split", tc.name, calls)
			}
		}
		if tc.color(me) < 0 {
			if part != nil {
				return fmt.Errorf("%s: %v for a negative color", tc.name, part)
			}
			continue
		}
		if err := errors.Join(members(ctx, part, want), part.Close()); err != nil {
			return fmt.Errorf("%s: %w", tc.name, err)
		}
	}
	all := make([]int, n)
	for r := range all {
		all[r] = r
	}
	return members(ctx, w.comm, all)
}

func TestLibrarySplit(t *testing.T) {
	for _, n := range []int{2, 5, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "calls")
			onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				return withDevice(ctx, job, nil, func(w *world) error { return splits(ctx, w, true) })
			}, nil, nil, "FAKE_LOG="+log)
		})
	}
	own := func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error { return splits(ctx, w, false) })
	}
	// The library has no split; the user wants parts to share with their parent, which is no split's business then.
	t.Run("without", func(t *testing.T) {
		log := filepath.Join(t.TempDir(), "calls")
		allWell(t, ranktest.RunProcesses(t, 4, own, append(fakeLibraries(t, "-DNOSPLIT"), "FAKE_LOG="+log)...))
	})
	t.Run("shared", func(t *testing.T) {
		log := filepath.Join(t.TempDir(), "calls")
		allWell(t, ranktest.RunProcesses(t, 4, own, append(fakeLibraries(t), "FAKE_LOG="+log, "NCCL_COMM_SPLIT_SHARE_RESOURCES=1")...))
	})
}

// The library fails in the split on one member, or does not come out of it on one: all get an error that names it, also those without a part, and the parent has failed. All
// of them go on with a new communicator.
func TestLibrarySplitFails(t *testing.T) {
	dltest.Parallel(t)
	for name, text := range map[string]string{"split-fails": "rank 1: ", "split-hangs": "init of the library: context deadline exceeded"} {
		var timeout time.Duration
		if name == "split-hangs" {
			timeout = 5 * time.Second
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			allWell(t, ranktest.RunProcesses(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
				return withDevice(ctx, job, &nccl.Config{Timeout: timeout}, func(w *world) error {
					color := 0
					if job.Rank() == 3 {
						color = -1
					}
					_, err := w.comm.Split(ctx, color, 0)
					if job.Rank() == 1 {
						text = strings.TrimPrefix(text, "rank 1: ") // its own error
					}
					if err := wantErr(err, nil, text); err != nil {
						return err
					}
					if err := wantErr(w.comm.Err(), nccl.ErrAborted, "a part of it could not be made"); err != nil {
						return err
					}
					again, err := w.comm.Shrink(ctx, nil)
					if err != nil {
						return err
					}
					return errors.Join(members(ctx, again, []int{0, 1, 2, 3}), again.Close())
				})
			}, append(fakeLibraries(t), "FAKE_NCCL="+name)...))
		})
	}
}

// A member is killed in the library's split, in which the others wait for it: they are let out, have an error that names it, and go on without it.
func TestLibrarySplitDeath(t *testing.T) {
	const culprit = 1
	log := filepath.Join(t.TempDir(), "calls")
	results := ranktest.RunProcesses(t, 4, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			if job.Rank() == culprit {
				go func() {
					for !slices.ContainsFunc(libraryLog(), func(l string) bool { return strings.HasPrefix(l, "CommSplit") }) {
						time.Sleep(time.Millisecond)
					}
					syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}()
			}
			color := 0
			if job.Rank() == 3 {
				color = -1
			}
			start := time.Now()
			_, err := w.comm.Split(ctx, color, 0)
			if took := time.Since(start); took > room {
				return fmt.Errorf("Split took %v: %v", took, err)
			}
			if err := errors.Join(wantErr(err, nil, "rank 1"), wantErr(w.comm.Err(), nccl.ErrRank, "rank 1")); err != nil {
				return err
			}
			rest, err := w.comm.Shrink(ctx, []int{culprit})
			if err != nil {
				return err
			}
			return errors.Join(members(ctx, rest, []int{0, 2, 3}), rest.Close())
		})
	}, append(fakeLibraries(t), "FAKE_LOG="+log, "FAKE_NCCL=split-hangs")...)
	for _, r := range results {
		if r.Rank != culprit && r.Code != 0 {
			t.Errorf("%v\n%s", r, r.Err)
		}
	}
	if !strings.Contains(results[culprit].Signal, "SIGKILL") {
		t.Errorf("the culprit: %v", results[culprit])
	}
}

// A communicator of more ranks than meet at one root has several; here they are few.
func TestLibraryRoots(t *testing.T) {
	for _, tc := range []struct{ n, per int }{{7, 3}, {4, 2}, {2, 1}} {
		t.Run(fmt.Sprintf("%d ranks", tc.n), func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "calls")
			roots := (tc.n + tc.per - 1) / tc.per
			onLibraries(t, tc.n, func(ctx context.Context, job *bootstrap.Job) error {
				nccl.SetRanksPerRoot(tc.per)
				return withDevice(ctx, job, nil, func(w *world) error {
					all := make([]int, tc.n)
					for r := range all {
						all[r] = r
					}
					for _, l := range libraryLog() {
						fmt.Println("LOG", l)
					}
					return members(ctx, w.comm, all)
				})
			}, func(t *testing.T, results []ranktest.Result) {
				allWell(t, results)
				if !strings.Contains(t.Name(), "fake") {
					return
				}
				lines := func(r int, prefix string) (out []string) {
					for l := range strings.Lines(results[r].Output) {
						if s, ok := strings.CutPrefix(l, "LOG "+prefix); ok {
							out = append(out, strings.TrimSpace(s))
						}
					}
					return out
				}
				// Two communicators: what was made is by rank, in the order of kinds.
				var want [2][]string
				for i := range roots {
					made := lines(i*tc.per, "id ")
					if len(made) != 2 {
						t.Fatalf("rank %d made %d ids, want 2", i*tc.per, len(made))
					}
					want[0], want[1] = append(want[0], made[0]), append(want[1], made[1])
				}
				for r := range results {
					if got := lines(r, "root "); !slices.Equal(got, slices.Concat(want[0], want[1])) {
						t.Errorf("rank %d: roots %q, want %q", r, got, want)
					}
					call := "CommInitRankScalable n=" + strconv.Itoa(tc.n) + " rank=" + strconv.Itoa(r) + " roots=" + strconv.Itoa(roots) + " name=world"
					if got := lines(r, "CommInitRank"); len(got) != 2 || "CommInitRank"+got[0] != call || got[1] != got[0] {
						t.Errorf("rank %d: calls %q, want %q twice", r, got, call)
					}
					if n := len(lines(r, "id ")); n > 0 && r%tc.per != 0 {
						t.Errorf("rank %d made %d ids", r, n)
					}
				}
			}, nil, "FAKE_LOG="+log, "FAKE_NCCL=tell-ids")
		})
	}
}
