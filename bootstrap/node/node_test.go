package node

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/memberlist"

	"github.com/gorun-dev/gorun/bootstrap"
)

// exercise uses everything that crosses hosts.
func exercise(c *cluster) {
	c.t.Helper()
	id := bootstrap.UniqueID{1, 127: 9}
	last := len(c.nodeOf) - 1
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error {
		switch j.Rank() {
		case last / 2:
			if err := j.PublishID(ctx, "world", id); err != nil {
				return err
			}
		case last:
			if err := j.Put(ctx, "key", []byte("value")); err != nil {
				return err
			}
		}
		if got, err := j.UniqueID(ctx, "world"); err != nil || got != id {
			return fmt.Errorf("id: %v, %v", got[:2], err)
		}
		if got, err := j.Get(ctx, "key"); err != nil || string(got) != "value" {
			return fmt.Errorf("get: %q, %v", got, err)
		}
		for round := range 3 {
			all, err := j.AllGather(ctx, []byte{byte(j.Rank()), byte(round)})
			if err != nil {
				return err
			}
			for r, v := range all {
				if len(v) != 2 || v[0] != byte(r) || v[1] != byte(round) {
					return fmt.Errorf("round %d: value of rank %d: %v", round, r, v)
				}
			}
		}
		return j.Barrier(ctx)
	}))
}

// What ranks say of others comes to host 0, each rank's words once and before its end.
func TestSuspicions(t *testing.T) {
	c := newCluster(t, true, 3, 2)
	c.startAll()
	c.ready()
	c.joinAll()
	want := map[Suspicion]bool{}
	for _, j := range c.jobs {
		for _, rank := range []int{-1, j.Rank(), 4, 4, 1, j.Size()} {
			j.Suspect(rank)
			if rank >= 0 && rank < j.Size() && rank != j.Rank() {
				want[Suspicion{j.Rank(), rank}] = true
			}
		}
	}
	until(t, "host 0 has heard of all", func() bool { return len(c.nodes[0].Suspicions()) >= len(want) })
	first := map[int]int{}
	for _, s := range c.nodes[0].Suspicions() {
		if !want[s] {
			t.Errorf("rank %d suspects rank %d: twice, or never said", s.By, s.Rank)
		}
		delete(want, s)
		if _, ok := first[s.By]; !ok {
			first[s.By] = s.Rank
		}
	}
	for by, rank := range first {
		if rank != 4 && by != 4 {
			t.Errorf("rank %d suspects rank %d first, want 4", by, rank)
		}
	}
	if got := c.nodes[1].Suspicions(); len(got) > 0 {
		t.Errorf("host 1 keeps %v", got)
	}

	// Of a failed operation it need not be said; it is there when the end of the rank is told.
	c.nodes[2].RankExited(5, 3, "exited with code 3")
	before := len(c.nodes[0].Suspicions())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.jobs[0].Barrier(ctx); err == nil {
		t.Error("a barrier without rank 5")
	}
	c.jobs[0].Close()
	c.nodes[0].RankExited(0, 1, "exited with code 1")
	if got := c.nodes[0].Suspicions(); len(got) != before+1 || got[before] != (Suspicion{0, 5}) {
		t.Errorf("got %v after %d, want that rank 0 suspects rank 5", got[before:], before)
	}
}

// fewOrMany hosts are in a job that is one process: 64, and with -short, as under the race detector, as many as a small machine runs in seconds.
func fewOrMany() int {
	if testing.Short() {
		return 24
	}
	return 64
}

func TestManyOnMock(t *testing.T) {
	c := newCluster(t, true, fewOrMany(), 1)
	c.startAll()
	c.ready()
	c.joinAll()
	exercise(c)
}

func TestManyOnMockWithLoss(t *testing.T) {
	c := newCluster(t, true, fewOrMany(), 1)
	c.net.loss.Store(50) // 5 %
	c.startAll()
	c.ready()
	c.joinAll()
	exercise(c)
}

func Test16OnLoopback(t *testing.T) {
	for _, loss := range []int64{0, 50} {
		t.Run(fmt.Sprintf("loss %d of 1000", loss), func(t *testing.T) {
			c := newCluster(t, false, 16, 2)
			c.net.loss.Store(loss)
			c.startAll()
			c.joinAll() // before the membership is complete
			exercise(c)
			c.ready()
		})
	}
}

// A member takes 128 state exchanges at once, and gossip of joins gets lost, here all of it: all must come to know all.
func Test160JoinAtOnce(t *testing.T) {
	c := newCluster(t, true, manyMembers, 1)
	c.startAll(func(m *memberlist.Config) {
		// All gossip is lost: what is tested is the joining.
		m.GossipInterval, m.ProbeInterval, m.PushPullInterval = 0, 0, 0
	})
	c.ready()
	for i, n := range c.nodes {
		if got := n.mesh.list.NumMembers(); got != manyMembers {
			t.Errorf("node %d knows %d members", i, got)
		}
	}
}

// A host that comes late has the ids when it has joined: they are part of the state exchange.
func TestLateJoiner(t *testing.T) {
	c := newCluster(t, true, 8, 1)
	c.net.mu.Lock()
	c.net.noUDP[c.addrs[7]] = true // no gossip reaches it
	c.net.mu.Unlock()
	noProbes := func(m *memberlist.Config) { m.ProbeInterval, m.PushPullInterval = 0, 0 }
	for i := range 7 {
		c.start(i, noProbes)
	}
	c.join(0, 1, 2, 3, 4, 5, 6)
	id := bootstrap.UniqueID{7}
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Rank() == 3 {
			if err := j.PublishID(ctx, "world", id); err != nil {
				return err
			}
		}
		_, err := j.UniqueID(ctx, "world")
		return err
	}))

	c.start(7, noProbes)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := c.nodes[7].Ready(ctx); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	for range 50 {
		if err := c.nodes[7].Ready(over); err != nil {
			t.Fatalf("all are there when the wait is given up: %v", err)
		}
	}
	if !c.nodes[7].store.HasID("world") {
		t.Error("the late host is a member and has no id")
	}
	c.join(7)
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error { return j.Barrier(ctx) }))
}

// Who waits for all hosts in vain hears which are missing.
func TestReadyMissing(t *testing.T) {
	c := newCluster(t, true, 3, 1)
	c.start(0)
	c.start(1)
	until(t, "hosts 0 and 1 know each other", func() bool { return c.nodes[1].mesh.member(0) != nil && c.nodes[0].mesh.member(1) != nil })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := c.nodes[1].Ready(ctx)
	apart, ok := errors.AsType[*ApartError](err)
	if !ok || !errors.Is(err, context.Canceled) {
		t.Fatalf("got error %v, want an ApartError", err)
	}
	if diff := cmp.Diff(apart.Missing, []int{2}); diff != "" {
		t.Errorf("missing (-got +want):\n%s", diff)
	}
	if want := "wait for the hosts of the job: context canceled, missing host 2"; err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
}

// Lazy members stay alone until their ranks join, or their time is over.
func TestLazy(t *testing.T) {
	for _, tt := range []struct {
		name string
		lazy time.Duration
	}{{"ranks join", time.Hour}, {"the time is over", 50 * time.Millisecond}} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, true, 8, 1)
			for i := range c.config {
				c.config[i].Lazy = tt.lazy
			}
			c.startAll()
			if tt.lazy == time.Hour {
				for i, n := range c.nodes {
					if got := len(n.mesh.missing()); got != 7 {
						t.Errorf("node %d misses %d others", i, got)
					}
				}
				c.join(3)
				until(t, "host 0 is a member", func() bool { return c.nodes[3].mesh.member(0) != nil })
				c.join(0, 1, 2, 4, 5, 6, 7)
			}
			c.ready()
		})
	}
}

// Where the push down the tree fails altogether, gossip brings the id.
func TestGossipRepairs(t *testing.T) {
	c := newCluster(t, true, 8, 1)
	c.startAll(func(m *memberlist.Config) { m.PushPullInterval = 0 })
	c.ready()
	c.net.mu.Lock()
	for _, a := range c.addrs {
		c.net.noTCP[a] = true
	}
	c.net.mu.Unlock()
	c.nodes[3].mesh.publish("world", make([]byte, 128))
	for i, n := range c.nodes {
		until(t, fmt.Sprintf("node %d has the id", i), func() bool { return n.store.HasID("world") })
	}
}

// faster finds deaths sooner; the test's Confirm keeps a busy machine from losing the living.
func faster(m *memberlist.Config) {
	m.ProbeInterval, m.ProbeTimeout, m.SuspicionMult = 200*time.Millisecond, 100*time.Millisecond, 2
}

func TestHostDiesInBarrier(t *testing.T) {
	c := newCluster(t, true, 16, 2)
	c.startAll(faster)
	c.ready()
	c.joinAll()
	var lost atomic.Int32
	for _, j := range c.jobs[:10] {
		j.Watch(func(e bootstrap.Event) {
			if e.Kind == bootstrap.HostLost && e.Node == 5 && e.Err.Error() == "host h5 was lost" {
				lost.Add(1)
			}
		})
	}
	errs := c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Node() == 5 {
			if j.Rank() == 10 {
				c.kill(5)
			}
			return nil
		}
		return j.Barrier(ctx)
	})
	for r, err := range errs {
		var dead *bootstrap.RankError
		if c.nodeOf[r] == 5 {
			continue
		}
		if !errors.As(err, &dead) || dead.Rank != 10 && dead.Rank != 11 || dead.Host != "h5" || !strings.Contains(err.Error(), "was lost with its host h5") {
			t.Fatalf("rank %d: %v", r, err)
		}
	}
	until(t, "all see the host's loss", func() bool { return lost.Load() == 10 })
	for _, r := range []int{0, 31} {
		// The event may come a moment after what the barrier returns.
		until(t, fmt.Sprintf("rank %d hears of rank 11's end, with its host", r), func() bool { e := c.jobs[r].RankErr(11); return e != nil && e.Host == "h5" })
		if e := c.jobs[r].RankErr(12); e != nil {
			t.Errorf("rank %d: rank 12 is said to be %v", r, e)
		}
	}
	// Those who do not need it go on.
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Rank() > 3 {
			return nil
		}
		g, err := j.Group("few", []int{0, 1, 2, 3})
		if err != nil {
			return err
		}
		return g.Barrier(ctx)
	}))
}

func TestHostZeroDies(t *testing.T) {
	c := newCluster(t, true, 4, 1)
	c.startAll(faster)
	c.ready()
	c.joinAll()
	errs := c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Rank() == 0 {
			c.kill(0)
			return nil
		}
		return j.Barrier(ctx)
	})
	for r, err := range errs[1:] {
		if !errors.Is(err, bootstrap.ErrLost) || !strings.Contains(err.Error(), "host h0") {
			t.Errorf("rank %d: %v", r+1, err)
		}
	}
	// The event may come a moment after what the barrier returns.
	until(t, "rank 3 hears of rank 0's end, with its host", func() bool { e := c.jobs[3].RankErr(0); return e != nil && e.Host == "h0" })
	if err := c.jobs[1].Put(t.Context(), "k", nil); !errors.Is(err, bootstrap.ErrLost) {
		t.Errorf("put: %v", err)
	}
}

// A host that gossip cannot reach for a while, but that the launcher knows to live, loses nothing.
func TestHostIsBack(t *testing.T) {
	c := newCluster(t, true, 4, 1)
	for i := range c.config {
		c.config[i].Confirm = func(int) bool { return false }
	}
	c.startAll(faster)
	c.ready()
	c.joinAll()
	c.net.setCut(true, c.addrs[2])
	done := make(chan []error)
	go func() { done <- c.each(func(ctx context.Context, j *bootstrap.Job) error { return j.Barrier(ctx) }) }()
	until(t, "gossip holds host 2 for dead", func() bool { return c.nodes[0].mesh.member(2) == nil })
	c.net.setCut(false, c.addrs[2])
	c.want(<-done)
}

// Two generations in a row must not mix, whatever is lost and sent again.
func TestGenerationsRace(t *testing.T) {
	c := newCluster(t, true, 8, 1)
	c.net.loss.Store(50)
	c.startAll()
	c.ready()
	c.joinAll()
	c.want(c.each(func(ctx context.Context, j *bootstrap.Job) error {
		for round := range 30 {
			all, err := j.AllGather(ctx, fmt.Appendf(nil, "%d/%d", j.Rank(), round))
			if err != nil {
				return err
			}
			for r, v := range all {
				if want := fmt.Sprintf("%d/%d", r, round); string(v) != want {
					return fmt.Errorf("round %d: %q, want %q", round, v, want)
				}
			}
		}
		return nil
	}))
}

func TestDeadlineNamesTheMissingOfOtherHosts(t *testing.T) {
	c := newCluster(t, true, 4, 1)
	c.startAll()
	c.ready()
	c.joinAll()
	errs := c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Rank() == 1 {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		return j.Barrier(ctx)
	})
	for _, r := range []int{0, 2, 3} {
		var w *bootstrap.WaitError
		if !errors.As(errs[r], &w) || !errors.Is(errs[r], context.DeadlineExceeded) || len(w.Missing) == 0 || w.Missing[0] != 1 {
			t.Errorf("rank %d: %v", r, errs[r])
		}
	}
}

func TestDeadlineTellsWhereTheMissingOfThisHostIs(t *testing.T) {
	c := newCluster(t, true, 2, 2)
	c.startAll()
	c.ready()
	c.joinAll()
	errs := c.each(func(ctx context.Context, j *bootstrap.Job) error {
		if j.Rank() != 0 {
			return nil
		}
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		defer cancel()
		return j.Barrier(ctx)
	})
	want := "barrier #1 of group world: context deadline exceeded, missing rank 1 (host h0), ranks 2,3 (host h1): rank 1 waits in nothing of gorun"
	if errs[0] == nil || errs[0].Error() != want {
		t.Errorf("got %v, want %s", errs[0], want)
	}
}

// Ends of ranks on other hosts, as the launcher there tells them.
func TestRankEndsElsewhere(t *testing.T) {
	c := newCluster(t, true, 3, 2)
	c.startAll()
	c.ready()
	c.join(0, 1)
	barrier := func(ctx context.Context, j *bootstrap.Job) error { return j.Barrier(ctx) }
	done := make(chan []error)
	go func() { done <- c.each(barrier) }()
	c.nodes[2].RankExited(4, 0, "exited with code 0") // it never joined: the others would wait for ever
	for r, err := range <-done {
		var dead *bootstrap.RankError
		if r < 4 && (!errors.As(err, &dead) || dead.Rank != 4 || !strings.Contains(err.Error(), "ended (exit code 0) without joining the job")) {
			t.Errorf("rank %d: %v", r, err)
		}
	}
	c.nodes[2].RankExited(5, 3, "exited with code 3")
	until(t, "rank 0 hears of rank 5", func() bool { return c.jobs[0].RankErr(5) != nil })
	if got := c.jobs[0].RankErr(5).Error(); got != "rank 5 (host h2) exited with code 3" {
		t.Errorf("got %q", got)
	}
}

// The launcher gives a host up although gossip still sees it.
func TestLoseHost(t *testing.T) {
	c := newCluster(t, true, 3, 1)
	c.startAll()
	c.ready()
	c.joinAll()
	for _, n := range c.nodes {
		n.LoseHost(1, "h1", "no answer for 10s")
	}
	until(t, "rank 2 hears of rank 1", func() bool { return c.jobs[2].RankErr(1) != nil })
	if got, want := c.jobs[2].RankErr(1).Error(), "rank 1 (host h1) was lost with its host h1: no answer for 10s"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestConfigMistakes(t *testing.T) {
	for _, c := range []struct {
		name string
		c    Config
		err  string
	}{
		{"no ranks", Config{Job: "j"}, "no ranks"},
		{"no job", Config{NodeOf: []int{0}}, "job id"},
		{"no key", Config{Job: "j", NodeOf: []int{0, 1}}, "gossip key has 0 bytes"},
		{"host without ranks", Config{Job: "j", NodeOf: []int{0, 2, 2}, Key: []byte(testKey)}, "host 1 has no ranks"},
		{"unknown host", Config{Job: "j", Node: 1, NodeOf: []int{0}}, "the job has 1 hosts"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := Start(t.Context(), c.c)
			if err == nil {
				n.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want an error with %q", err, c.err)
			}
		})
	}
}

// On one host the member starts with the first rank, and ids travel through it.
func TestOneHost(t *testing.T) {
	n, err := Start(t.Context(), Config{Job: "job", NodeOf: []int{0, 0}, Host: "a"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if n.Addr() != "" {
		t.Error("a member runs before a rank has joined")
	}
	c := &cluster{t: t, nodeOf: []int{0, 0}, nodes: []*Node{n}, jobs: make([]*bootstrap.Job, 2)}
	c.joinAll()
	exercise(c)
	if n.Addr() == "" {
		t.Error("no member runs")
	}
	n.mesh.mu.Lock()
	pushed := n.mesh.pushed["world"]
	n.mesh.mu.Unlock()
	if !pushed {
		t.Error("the id did not come through the member")
	}
	for _, j := range c.jobs {
		j.Close()
	}
	n.RankExited(0, 0, "exited with code 0")
	if joined, left := n.Joined(0); !joined || !left {
		t.Errorf("rank 0: joined %v, left %v", joined, left)
	}
}

// BenchmarkID is the time from the publication of an id until all members have it.
func BenchmarkID(b *testing.B) {
	for _, hosts := range []int{16, 64, 256} {
		b.Run(fmt.Sprintf("members=%d", hosts), func(b *testing.B) {
			c := newCluster(b, true, hosts, 1)
			c.startAll(func(m *memberlist.Config) { m.ProbeInterval, m.PushPullInterval = 10*time.Second, 0 })
			c.ready()
			round := 0
			for b.Loop() {
				name := fmt.Sprint(round)
				c.nodes[round%hosts].mesh.publish(name, make([]byte, 128))
				for _, n := range c.nodes {
					for !n.store.HasID(name) {
						time.Sleep(20 * time.Microsecond)
					}
				}
				round++
			}
		})
	}
}
