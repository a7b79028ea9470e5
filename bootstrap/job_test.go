package bootstrap

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/server"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
	"github.com/gorun-dev/gorun/rankenv"
)

// worlds are the ways in which ranks can be joined; each test of this file runs on all of them.
var worlds = map[string]func(t *testing.T, n int) []*Job{
	"in process": func(t *testing.T, n int) []*Job { return InProcess(n) },
	"served":     served,
}

// servers are those of served, for the account of a death.
var servers sync.Map

// served joins n ranks of this process to a server by its socket.
func served(t *testing.T, n int) []*Job {
	nodeOf := make([]int, n)
	st := store.New(nodeOf)
	name := "gorun-test-" + rand.Text()
	srv, err := server.Start(server.Config{Name: name, Job: "test", NodeOf: nodeOf, Host: "a", State: st, Logf: t.Logf, DeathHold: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		st.Close()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
	})
	jobs := make([]*Job, n)
	for r := range jobs {
		env := rankenv.Env{Launcher: "gorun", Job: "test", Rank: r, Size: n, LocalRank: r, LocalSize: n, Nodes: 1, Control: name}
		if jobs[r], err = join(t.Context(), env); err != nil {
			t.Fatal(err)
		}
		servers.Store(jobs[r], srv)
	}
	return jobs
}

func onEach(t *testing.T, n int, f func(t *testing.T, jobs []*Job)) {
	t.Helper()
	for name, join := range worlds {
		t.Run(name, func(t *testing.T) {
			jobs := join(t, n)
			defer func() {
				for _, j := range jobs {
					j.Close()
				}
			}()
			f(t, jobs)
		})
	}
}

// each runs f on all jobs and waits, bounded, for them.
func each(t *testing.T, jobs []*Job, f func(ctx context.Context, j *Job) error) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	errs := make([]error, len(jobs))
	var wg sync.WaitGroup
	for i, j := range jobs {
		wg.Go(func() { errs[i] = f(ctx, j) })
	}
	wg.Wait()
	return errs
}

func want(t *testing.T, errs []error) {
	t.Helper()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("rank %d: %v", i, err)
		}
	}
}

// until waits, bounded, for a state that others bring about.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in 20 s: %s", what)
		}
	}
}

func TestPlace(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		for r, j := range jobs {
			got := []int{j.Rank(), j.Size(), j.LocalRank(), j.LocalSize(), j.Node(), j.Nodes(), j.NodeOf(2)}
			if diff := cmp.Diff(got, []int{r, 3, r, 3, 0, 1, 0}); diff != "" {
				t.Errorf("rank %d: got -, want +:\n%s", r, diff)
			}
			if j.ID() == "" || j.ID() != jobs[0].ID() {
				t.Errorf("rank %d: job %q, want one id for all", r, j.ID())
			}
		}
	})
}

func TestAllGather(t *testing.T) {
	onEach(t, 4, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			for round := range 50 {
				v := fmt.Appendf(nil, "%d of %d", round, j.Rank())
				got, err := j.AllGather(ctx, v)
				if err != nil {
					return err
				}
				for r, g := range got {
					if want := fmt.Sprintf("%d of %d", round, r); string(g) != want {
						return fmt.Errorf("value of rank %d: %q, want %q", r, g, want)
					}
					clear(g) // it is ours: the others must not see it
				}
				if err := j.Barrier(ctx); err != nil {
					return err
				}
			}
			return nil
		}))
	})
}

func TestLargeValues(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			got, err := j.AllGather(ctx, bytes.Repeat([]byte{byte(j.Rank())}, 64<<10))
			if err != nil {
				return err
			}
			for r, g := range got {
				if len(g) != 64<<10 || g[0] != byte(r) || g[len(g)-1] != byte(r) {
					return fmt.Errorf("value of rank %d: %d bytes of %d", r, len(g), g[0])
				}
			}
			got, err = j.AllGather(ctx, nil)
			if err != nil || len(got) != 3 || len(got[0]) != 0 {
				return fmt.Errorf("empty values: %v, %v", got, err)
			}
			if _, err := j.AllGather(ctx, make([]byte, 64<<10+1)); err == nil || !strings.Contains(err.Error(), "at most 65536") {
				return fmt.Errorf("oversized value: %v", err)
			}
			if err := j.Put(ctx, "k", make([]byte, 64<<10+1)); err == nil {
				return errors.New("oversized put")
			}
			return nil
		}))
	})
}

func TestPutGet(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 0 {
				return j.Put(ctx, "key", []byte("value"))
			}
			got, err := j.Get(ctx, "key")
			if err != nil || string(got) != "value" {
				return fmt.Errorf("got %q, %v", got, err)
			}
			if err := j.Put(ctx, "key", nil); err == nil || !strings.Contains(err.Error(), `key "key" was already written by rank 0`) {
				return fmt.Errorf("second put: %v", err)
			}
			return nil
		}))
	})
}

func TestUniqueID(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		id := UniqueID{1, 2, 127: 3}
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 1 {
				if err := j.PublishID(ctx, "world", id); err != nil {
					return err
				}
			}
			got, err := j.UniqueID(ctx, "world")
			if err != nil || got != id {
				return fmt.Errorf("got %v, %v", got[:4], err)
			}
			return nil
		}))
		if err := jobs[0].PublishID(t.Context(), "world", id); err == nil {
			t.Error("a name was published twice")
		}
	})
}

func TestGroups(t *testing.T) {
	onEach(t, 4, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			for round := range 10 { // the name is used again and again
				ranks := []int{2, 0}
				if j.Rank()%2 == 1 {
					ranks = []int{1, 3}
				}
				g, err := j.Group(fmt.Sprintf("parity %d", j.Rank()%2), ranks)
				if err != nil {
					return err
				}
				got, err := g.Meet(ctx, []byte{byte(j.Rank()), byte(round)}, "test")
				if err != nil {
					return err
				}
				want := [][]byte{{byte(ranks[0]), byte(round)}, {byte(ranks[1]), byte(round)}}
				if diff := cmp.Diff(got, want); diff != "" {
					return fmt.Errorf("got -, want +:\n%s", diff)
				}
				if g.Ranks()[g.Rank()] != j.Rank() || g.Size() != 2 {
					return fmt.Errorf("member %d of %v", g.Rank(), g.Ranks())
				}
				if err := g.Close(); err != nil {
					return err
				}
			}
			return nil
		}))
	})
}

func TestGroupMistakes(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		for _, c := range []struct {
			ranks []int
			err   string
		}{
			{[]int{1, 2}, "rank 0 makes it but is not in it"},
			{[]int{0, 0}, "listed twice"},
			{[]int{0, 3}, "rank 3 of a job of 3"},
		} {
			if _, err := jobs[0].Group("g", c.ranks); err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v: %v, want %q", c.ranks, err, c.err)
			}
		}
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			ranks := []int{0, 1, 2}
			if j.Rank() == 1 {
				ranks = []int{0, 2, 1}
			}
			g, err := j.Group("g", ranks)
			if err != nil {
				return err
			}
			_, err = g.AllGather(ctx, nil)
			return err
		})
		for r, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "0, 2, 1") && !strings.Contains(err.Error(), "rank 1") {
				t.Errorf("rank %d: %v, want an error that shows the lists", r, err)
			}
		}
	})
}

func TestBarrierAgainstAllGather(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 0 {
				return j.Barrier(ctx)
			}
			_, err := j.AllGather(ctx, nil)
			return err
		})
		for r, err := range errs {
			if err == nil || !strings.Contains(err.Error(), "in barrier #1") || !strings.Contains(err.Error(), "in all-gather #1") {
				t.Errorf("rank %d: %v", r, err)
			}
		}
	})
}

func TestDeadlineNamesTheMissing(t *testing.T) {
	onEach(t, 4, func(t *testing.T, jobs []*Job) {
		errs := each(t, jobs[:2], func(ctx context.Context, j *Job) error {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
			defer cancel()
			return j.Barrier(ctx)
		})
		for r, err := range errs {
			var w *WaitError
			if !errors.As(err, &w) || !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("rank %d: %v, want a *WaitError of a deadline", r, err)
			}
			if !slices.Contains(w.Missing, 2) || !slices.Contains(w.Missing, 3) || w.Op != "barrier #1 of group world" {
				t.Errorf("rank %d: %v", r, err)
			}
		}
		// What was given stays given, and the next generation works.
		want(t, each(t, jobs[2:], func(ctx context.Context, j *Job) error { return j.Barrier(ctx) }))
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error { return j.Barrier(ctx) }))

		// A rank that comes with a context that has ended gives its value all the same, and an oversized value is no generation.
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() != 1 {
				return j.Barrier(ctx)
			}
			if _, err := j.AllGather(ctx, make([]byte, 1<<20)); err == nil {
				return errors.New("oversized value")
			}
			ended, cancel := context.WithCancel(ctx)
			cancel()
			if err := j.Barrier(ended); err != nil && !errors.Is(err, context.Canceled) {
				return err
			}
			return nil
		}))
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error { return j.Barrier(ctx) }))

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := jobs[0].Get(ctx, "nothing"); !errors.Is(err, context.Canceled) {
			t.Errorf("get: %v", err)
		}
	})
}

func TestDeath(t *testing.T) {
	onEach(t, 4, func(t *testing.T, jobs []*Job) {
		var mu sync.Mutex
		var seen []string
		stop := jobs[0].Watch(func(e Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind != RankJoined {
				seen = append(seen, fmt.Sprintf("%v %d", e.Kind, e.Rank))
			}
		})
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 2 {
				kill(j, "exited with code 3")
				return nil
			}
			return j.Barrier(ctx)
		})
		check := func(errs []error) {
			t.Helper()
			for r, err := range errs {
				var dead *RankError
				if r == 2 {
					continue
				}
				if !errors.As(err, &dead) || dead.Rank != 2 || dead.Left || !strings.Contains(err.Error(), "exited with code 3") {
					t.Errorf("rank %d: %v", r, err)
				}
			}
		}
		check(errs)
		check(each(t, jobs, func(ctx context.Context, j *Job) error { return j.Barrier(ctx) }))
		// Those who do not need it go on.
		want(t, each(t, jobs[:2], func(ctx context.Context, j *Job) error {
			g, err := j.Group("pair", []int{0, 1})
			if err != nil {
				return err
			}
			return g.Barrier(ctx)
		}))
		until(t, "rank 0 sees the death", func() bool { return jobs[0].RankErr(2) != nil })
		if jobs[0].RankErr(1) != nil {
			t.Errorf("rank 1 is said to have ended: %v", jobs[0].RankErr(1))
		}
		jobs[3].Close()
		until(t, "rank 0 sees rank 3 leave", func() bool { e := jobs[0].RankErr(3); return e != nil && e.Left })
		until(t, "both events", func() bool { mu.Lock(); defer mu.Unlock(); return len(seen) == 2 })
		stop()
		if diff := cmp.Diff(seen, []string{"rank died 2", "rank left 3"}); diff != "" {
			t.Errorf("got -, want +:\n%s", diff)
		}
	})
}

// A rank that gave its value and then left is not needed.
func TestLeaveAfterArrival(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			return j.Close()
		}))
		for _, j := range jobs {
			if err := j.Barrier(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("barrier after close: %v", err)
			}
		}
	})
}

func TestCycle(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			a, err := j.Group("a", []int{0, 1, 2})
			if err != nil {
				return err
			}
			b, err := j.Group("b", []int{0, 1, 2})
			if err != nil {
				return err
			}
			if j.Rank() == 1 {
				a, b = b, a
			}
			if _, err := a.Meet(ctx, nil, fmt.Sprintf("all-reduce of %s, rank %d", a.Name(), j.Rank())); err != nil {
				return err
			}
			_, err = b.Meet(ctx, nil, "second")
			return err
		})
		for r, err := range errs {
			var c *CycleError
			if !errors.As(err, &c) || len(c.Waits) != 2 {
				t.Fatalf("rank %d: %v, want a circle of two", r, err)
			}
			if msg := err.Error(); !strings.Contains(msg, "all-reduce of a, rank 0") || !strings.Contains(msg, "all-reduce of b, rank 1") {
				t.Errorf("rank %d: %v", r, err)
			}
		}
	})
}

// Two goroutines of a rank that meet in two groups in opposite order are no circle.
func TestNoCycleWithTwoGoroutines(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			errs := make(chan error, 2)
			for _, name := range []string{"a", "b"} {
				g, err := j.Group(name, []int{0, 1})
				if err != nil {
					return err
				}
				go func() {
					for range 200 {
						if _, err := g.Meet(ctx, nil, "meet "+name); err != nil {
							errs <- err
							return
						}
					}
					errs <- nil
				}()
			}
			return errors.Join(<-errs, <-errs)
		}))
	})
}

func TestExportImport(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 0 {
				fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
				if err != nil {
					return err
				}
				f := os.NewFile(uintptr(fd), "test")
				defer f.Close()
				if _, err := f.WriteString("hello"); err != nil {
					return err
				}
				withdraw, err := j.Export("mem", Handle{FD: int(f.Fd()), Local: "local"})
				if err != nil {
					return err
				}
				if _, err := j.Export("mem", Handle{FD: -1}); err == nil {
					return errors.New("a key was exported twice")
				}
				if err := j.Barrier(ctx); err != nil {
					return err
				}
				withdraw()
				withdraw()
				return j.Barrier(ctx)
			}
			h, err := j.Import(ctx, 0, "mem")
			if err != nil {
				return err
			}
			f := os.NewFile(uintptr(h.FD), "import")
			defer f.Close()
			text := make([]byte, 5)
			if _, err := f.ReadAt(text, 0); err != nil || string(text) != "hello" {
				return fmt.Errorf("read %q: %v", text, err)
			}
			if j.InProcess() != (h.Local == "local") {
				return fmt.Errorf("local value %v, in process: %v", h.Local, j.InProcess())
			}
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			defer cancel()
			_, err = j.Import(short, 0, "mem")
			var w *WaitError
			if !errors.As(err, &w) || !slices.Equal(w.Missing, []int{0}) {
				return fmt.Errorf("import of what was withdrawn: %v", err)
			}
			return nil
		}))
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			if j.Rank() == 0 {
				return j.Close()
			}
			_, err := j.Import(ctx, 0, "never")
			return err
		})
		var gone *RankError
		if !errors.As(errs[1], &gone) || gone.Rank != 0 {
			t.Errorf("import from a rank that left: %v", errs[1])
		}
	})
}

func TestLedger(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			own, err := j.Ledger(j.Rank())
			if err != nil {
				return err
			}
			mine, err := own.OpenAccount(0)
			if err != nil {
				return err
			}
			if _, err := own.OpenAccount(0); err == nil {
				return errors.New("an account was opened twice")
			}
			for i := range uint64(300) {
				mine.Append(Enqueued, [2]uint64{i, uint64(j.Rank())})
			}
			mine.SetDone(7)
			mine.SetDone(5) // another goroutine, late
			mine.SetBusy("capture train.go:41, all-reduce #3")
			if err := j.Barrier(ctx); err != nil {
				return err
			}

			peer, err := j.Ledger(1 - j.Rank())
			if err != nil {
				return err
			}
			if _, err := peer.OpenAccount(1); err == nil {
				return errors.New("opened an account in another rank's ledger")
			}
			if peer.FindAccount(1) != nil {
				return errors.New("found an account that was never opened")
			}
			a := peer.FindAccount(0)
			if a == nil || a.Last() != 300 || a.Done() != 7 || a.Busy() != "capture train.go:41, all-reduce #3" {
				return fmt.Errorf("peer's account: %+v", a)
			}
			got, ok := a.At(299)
			if got.Sum == 0 {
				return errors.New("a record without a sum")
			}
			got.Sum = 0
			if diff := cmp.Diff(got, Record{Seq: 299, Kind: Enqueued, Desc: [2]uint64{298, uint64(1 - j.Rank())}}); diff != "" || !ok {
				return fmt.Errorf("record, got -, want +:\n%s", diff)
			}
			for _, seq := range []uint64{0, 1, 44, 301} {
				if _, ok := a.At(seq); ok {
					return fmt.Errorf("record %d is there", seq)
				}
			}
			if _, closed := a.Closed(); closed {
				return errors.New("closed too early")
			}
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			mine.SetClosed(300)
			mine.Release()
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			if n, closed := a.Closed(); !closed || n != 300 {
				return fmt.Errorf("closed after %d: %v", n, closed)
			}
			if peer.FindAccount(0) != nil {
				return errors.New("found a released account")
			}
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			// Until the slot is taken again, by the 256th account from here.
			for i := range uint64(256) {
				b, err := own.OpenAccount(i + 10)
				if err != nil {
					return err
				}
				b.Append(Capture, [2]uint64{})
			}
			if _, err := own.OpenAccount(9999); err == nil || !strings.Contains(err.Error(), "256 accounts") {
				return fmt.Errorf("account above the limit: %v", err)
			}
			if err := j.Barrier(ctx); err != nil {
				return err
			}
			if n, closed := a.Closed(); !closed || n != 300 || a.Last() != 300 {
				return fmt.Errorf("old account: closed after %d: %v, last %d", n, closed, a.Last())
			}
			if _, ok := a.At(1); ok {
				return errors.New("old account shows the new one's record")
			}
			return j.Barrier(ctx)
		}))
	})
}

// Sums are equal as long as the records are, and never again after one that differs.
func TestRecordSums(t *testing.T) {
	type entry struct {
		kind RecordKind
		desc [2]uint64
	}
	same := []entry{{Enqueued, [2]uint64{1, 2}}, {Enqueued, [2]uint64{1, 2}}, {Capture, [2]uint64{}}, {Replay, [2]uint64{4, 1 << 63}}}
	cases := []struct {
		name    string
		a, b    []entry
		differs int // the first record whose sums differ
	}{
		{"equal", same, same, math.MaxInt},
		{"kind", []entry{{Enqueued, [2]uint64{3, 0}}}, []entry{{Replay, [2]uint64{3, 0}}}, 1},
		{"first word", []entry{{Enqueued, [2]uint64{3, 4}}}, []entry{{Enqueued, [2]uint64{2, 4}}}, 1},
		{"second word", append(same, entry{Enqueued, [2]uint64{3, 4}}), append(same, entry{Enqueued, [2]uint64{3, 5}}), 5},
		{"words changed round", []entry{{Enqueued, [2]uint64{3, 4}}}, []entry{{Enqueued, [2]uint64{4, 3}}}, 1},
		{"order", []entry{same[0], same[3]}, []entry{same[3], same[0]}, 1},
	}
	jobs := InProcess(2)
	for _, j := range jobs {
		defer j.Close()
	}
	for id, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			var accounts [2]*Account
			for r, list := range [][]entry{tc.a, tc.b} {
				l, err := jobs[r].Ledger(r)
				if err != nil {
					t.Fatal(err)
				}
				if accounts[r], err = l.OpenAccount(uint64(id) + 100); err != nil {
					t.Fatal(err)
				}
				for _, e := range append(list, same...) {
					accounts[r].Append(e.kind, e.desc)
				}
			}
			for seq := uint64(1); seq <= accounts[0].Last(); seq++ {
				a, _ := accounts[0].At(seq)
				b, _ := accounts[1].At(seq)
				if got, want := a.Sum == b.Sum, int(seq) < tc.differs; got != want {
					t.Errorf("record %d: equal sums %t, want %t (%x, %x)", seq, got, want, a.Sum, b.Sum)
				}
			}
		})
	}
}

// A reader never sees a record that was not written as a whole.
func TestLedgerReadWhileWritten(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		const n = 200_000
		want(t, each(t, jobs, func(ctx context.Context, j *Job) error {
			l, err := j.Ledger(0)
			if err != nil {
				return err
			}
			if j.Rank() == 0 {
				a, err := l.OpenAccount(5)
				if err != nil {
					return err
				}
				for i := range uint64(n) {
					a.Append(Replay, [2]uint64{i + 1, ^(i + 1)})
					if i%1000 == 0 {
						a.SetBusy(strings.Repeat(string(rune('a'+i/1000%26)), 100))
					}
				}
				return nil
			}
			var a *Account
			for a == nil {
				if a = l.FindAccount(5); a == nil && ctx.Err() != nil {
					return ctx.Err()
				}
			}
			for seen := 0; a.Last() < n; {
				last := a.Last()
				for seq := last; seq > 0 && seq+300 > last; seq-- {
					if r, ok := a.At(seq); ok {
						seen++
						if r.Desc != [2]uint64{seq, ^seq} || r.Kind != Replay {
							return fmt.Errorf("record %d: %+v", seq, r)
						}
					}
				}
				if b := a.Busy(); b != "" && strings.Trim(b, b[:1]) != "" {
					return fmt.Errorf("torn text %q", b)
				}
				if ctx.Err() != nil {
					return ctx.Err()
				}
			}
			return nil
		}))
	})
}

func TestWatchAndClose(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		joined := make(chan int, 8)
		jobs[0].Watch(func(e Event) {
			if e.Kind == RankJoined {
				joined <- e.Rank
			}
		})
		got := []int{<-joined, <-joined}
		slices.Sort(got)
		if diff := cmp.Diff(got, []int{0, 1}); diff != "" {
			t.Errorf("got -, want +:\n%s", diff)
		}
		if err := jobs[0].Close(); err != nil { // ends the watch: goleak would see it
			t.Error(err)
		}
		if err := jobs[0].Close(); err != nil {
			t.Error(err)
		}
		jobs[0].Watch(func(Event) { t.Error("an event after Close") })()
	})
}

// What a rank is said to be in is over with the wait for a message, whatever else it has waited for meanwhile.
func TestLedgerMessage(t *testing.T) {
	j := InProcess(1)[0]
	defer j.Close()
	l, _ := j.Ledger(0)
	a, err := l.OpenAccount(1)
	if err != nil {
		t.Fatal(err)
	}
	wait, send := ledgermem.WaitOfMessage(1, false), "send of 8 float32, to rank 1"
	long := strings.Repeat(send, 10)
	for i, s := range []struct {
		do   func()
		seq  uint64
		busy string
	}{
		{func() { a.ClearMessage() }, 0, ""},
		{func() { a.SetMessage(send, 1, false, time.Second) }, wait, send},
		{func() { a.ClearMessage() }, 0, ""},
		{func() { a.SetMessage(long, 1, false, time.Second) }, wait, long[:120]},
		{func() { a.SetMessage("recv of 8 float32, from rank 2", 2, true, time.Second) }, ledgermem.WaitOfMessage(2, true), "recv of 8 float32, from rank 2"},
		{func() { a.SetWait(7, time.Second) }, 7, ""}, // a collective takes its place
		{func() { a.ClearMessage() }, 7, ""},
		{func() { a.SetMessage(send, 1, false, time.Second) }, wait, send},
		{func() { a.SetBusy("capture") }, wait, "capture"},
		{func() { a.SetMessage(send, 1, false, time.Second) }, wait, "capture"},
		{func() { a.ClearMessage() }, 0, "capture"},
		{func() { a.SetMessage(send, 1, false, time.Second) }, wait, "capture"},
		{func() { a.SetBusy("") }, wait, ""},
		{func() { a.SetMessage(send, 1, false, time.Second) }, wait, send},
		{func() { a.Release(); a.ClearMessage() }, wait, send}, // the slot may be another's
	} {
		s.do()
		if seq, busy := a.slot.WaitSeq.Load(), a.slot.BusyText(); seq != s.seq || busy != s.busy {
			t.Errorf("step %d: wait %#x, busy %q; want %#x, %q", i, seq, busy, s.seq, s.busy)
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	j := InProcess(1)[0]
	defer j.Close()
	l, _ := j.Ledger(0)
	a, err := l.OpenAccount(1)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		a.Append(Enqueued, [2]uint64{1, 2})
	}
}

// kill makes a rank die: of the served ones the connection breaks, and the launcher gives its account.
func kill(j *Job, cause string) {
	j.die(cause)
	if srv, ok := servers.Load(j); ok {
		srv.(*server.Server).RankExited(j.rank, 3, cause)
	}
}

// TestGoodbyeIsHeard: when Close has returned the node knows that the rank left, however much of what the node had sent was still unread.
func TestGoodbyeIsHeard(t *testing.T) {
	for range 10 {
		jobs := served(t, 8)
		for _, j := range jobs {
			j.Watch(func(Event) {})
		}
		var wg sync.WaitGroup
		for _, j := range jobs {
			wg.Go(func() {
				if err := j.Barrier(t.Context()); err != nil {
					t.Error(err)
				}
				if err := j.Close(); err != nil {
					t.Error(err)
				}
				srv, _ := servers.Load(j)
				if _, left := srv.(*server.Server).Rank(j.Rank()); !left {
					t.Errorf("rank %d has closed its job and the node has not heard of it", j.Rank())
				}
			})
		}
		wg.Wait()
	}
}

// TestMeetGivenUp: a member whose context ends takes the meeting away from all, and the next one takes place.
func TestMeetGivenUp(t *testing.T) {
	onEach(t, 3, func(t *testing.T, jobs []*Job) {
		late := make(chan struct{})
		var wg sync.WaitGroup
		for _, j := range jobs {
			wg.Go(func() {
				g, err := j.Group("meet", []int{0, 1, 2})
				if err != nil {
					t.Error(err)
					return
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch j.Rank() {
				case 0: // gives up, possibly before it has begun
					cancel()
				case 2: // comes when the meeting is over
					<-late
				}
				_, err = g.Meet(ctx, nil, "a test")
				gone, ok := errors.AsType[*GaveUpError](err)
				switch {
				case j.Rank() == 0 && !errors.Is(err, context.Canceled):
					t.Errorf("rank 0: %v, want %v", err, context.Canceled)
				case j.Rank() != 0 && (!ok || !strings.Contains(gone.Text, "rank 0 gave up its wait for rank") || !strings.Contains(gone.Text, "in a test")):
					t.Errorf("rank %d: %v, want that rank 0 gave up", j.Rank(), err)
				}
				if j.Rank() == 0 {
					close(late)
				}
				if _, err := g.Meet(t.Context(), nil, "the next"); err != nil {
					t.Errorf("rank %d: %v", j.Rank(), err)
				}
			})
		}
		wg.Wait()
	})
}

// TestRankErrAfterClose: a job that was closed before its first events came waits for them no more.
func TestRankErrAfterClose(t *testing.T) {
	jobs := served(t, 2)
	defer jobs[1].Close()
	j := jobs[0]
	r := j.ctl.(*remote)
	r.mu.Lock()
	r.subscribed = make(chan struct{}) // as when the node has not answered yet
	r.mu.Unlock()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if err := j.RankErr(1); err != nil {
		t.Errorf("got %v, want nothing", err)
	}
	if d := time.Since(start); d >= statusWait {
		t.Errorf("waited %v for events of a closed job", d)
	}
}

// TestUnaskedEvents: a node that sends events to a rank which has not subscribed is in error; the rank does not crash.
func TestUnaskedEvents(t *testing.T) {
	jobs := served(t, 1)
	defer jobs[0].Close()
	var e wire.Encoder
	e.Events([]store.Event{{Kind: store.Joined}})
	err := jobs[0].ctl.(*remote).handle(wire.Message{Type: wire.Events, Payload: e.B})
	if bad := new(wire.Error); !errors.As(err, &bad) || !strings.Contains(bad.Reason, "nobody has asked") {
		t.Errorf("got %v, want an error of the protocol", err)
	}
}

// TestGroupOnce: groups with names of their own leave nothing behind in the rank.
func TestGroupOnce(t *testing.T) {
	onEach(t, 2, func(t *testing.T, jobs []*Job) {
		errs := each(t, jobs, func(ctx context.Context, j *Job) error {
			before := len(j.openings) + len(j.groups)
			for i := range 20 {
				g, err := j.GroupOnce(fmt.Sprintf("step %d", i), []int{1, 0})
				if err != nil {
					return err
				}
				if err := g.Barrier(ctx); err != nil {
					return err
				}
				g.Close()
			}
			if n := len(j.openings) + len(j.groups); n != before {
				return fmt.Errorf("%d names are remembered, want %d", n, before)
			}
			return nil
		})
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	})
}
