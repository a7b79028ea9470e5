package node

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
)

// accounts opens an account on every rank.
func (c *cluster) accounts(id uint64) []*bootstrap.Account {
	c.t.Helper()
	all := make([]*bootstrap.Account, len(c.jobs))
	for r, j := range c.jobs {
		l, err := j.Ledger(r)
		if err == nil {
			all[r], err = l.OpenAccount(id)
		}
		if err != nil {
			c.t.Fatal(err)
		}
	}
	return all
}

func (c *cluster) everybody() []int {
	all := make([]int, len(c.nodeOf))
	for r := range all {
		all[r] = r
	}
	return all
}

// askUntil asks as a wait does, until what is known is so.
func askUntil(t *testing.T, f *bootstrap.Far, what string, ok func() bool) {
	t.Helper()
	until(t, what, func() bool { f.Ask(1); return ok() })
}

// What is known of ranks on other hosts is what their ledgers said when they were asked last.
func TestFar(t *testing.T) {
	const id = 77
	for _, loss := range []int64{0, 50} {
		t.Run(fmt.Sprintf("loss %d of 1000", loss), func(t *testing.T) {
			c := newCluster(t, true, 3, 2)
			c.startAll()
			c.ready()
			c.joinAll()
			c.net.loss.Store(loss)
			own := c.accounts(id)
			for _, asker := range []int{0, 5} { // of host 0, and of another
				f := c.jobs[asker].Far(id, c.everybody(), func() {})
				for r := range own {
					if (f.Account(r) == nil) != (c.nodeOf[r] == c.nodeOf[asker]) {
						t.Fatalf("rank %d's account of rank %d: %v", asker, r, f.Account(r))
					}
				}
				far := 2 // on host 1
				a := f.Account(far)
				if asker == 0 {
					if a.Known() || a.Last() != 0 {
						t.Error("known before it was asked for")
					}
					for i := range uint64(10) {
						own[far].Append(bootstrap.Enqueued, [2]uint64{1, i})
					}
					own[far].SetDone(9)
					own[far].SetBusy("capture at train.go:41")
				}
				askUntil(t, f, "rank 2's last", func() bool { return a.Last() == 10 })
				if a.Done() != 9 || a.Busy() != "capture at train.go:41" {
					t.Errorf("done %d, busy %q", a.Done(), a.Busy())
				}
				want, _ := own[far].At(10)
				if got, ok := a.At(10); !ok || got != want {
					t.Errorf("record 10: %+v, %v, want %+v", got, ok, want)
				}
				if got, ok := a.Newest(9); ok {
					t.Errorf("record 9 is %+v, and nobody has asked for it", got)
				}
				until(t, "single records", func() bool { return f.Detail(far, 3, 8) })
				for seq := uint64(1); seq <= 10; seq++ {
					want, _ := own[far].At(seq)
					if got, ok := a.At(seq); ok != (seq >= 3 && seq <= 8 || seq == 10) || ok && got != want {
						t.Errorf("record %d: %+v, %v, want %+v", seq, got, ok, want)
					}
				}
				if n, closed := a.Closed(); closed {
					t.Errorf("closed after %d", n)
				}
			}

			f := c.jobs[5].Far(id, c.everybody(), func() {})
			own[2].SetClosed(10)
			askUntil(t, f, "rank 2 has closed", func() bool { _, closed := f.Account(2).Closed(); return closed })
			if n, _ := f.Account(2).Closed(); n != 10 {
				t.Errorf("closed after %d, want 10", n)
			}
			// An account whose place is another's.
			own[3].Append(bootstrap.Enqueued, [2]uint64{1, 1})
			askUntil(t, f, "rank 3's last", func() bool { return f.Account(3).Last() == 1 })
			own[3].Release()
			l, err := c.jobs[3].Ledger(3)
			if err != nil {
				t.Fatal(err)
			}
			for i := range uint64(256) { // slots are taken in turn
				a, err := l.OpenAccount(1000 + i)
				if err != nil {
					t.Fatal(err)
				}
				a.Release()
			}
			askUntil(t, f, "rank 3 has none any more", func() bool { _, closed := f.Account(3).Closed(); return closed })
			if n, _ := f.Account(3).Closed(); n != 1 || f.Account(3).Last() != 1 {
				t.Errorf("closed after %d, last %d, want 1", n, f.Account(3).Last())
			}
		})
	}
}

// A host that does not answer leaves its ranks out, and does not hold the others up; an end of host 0 ends what is asked.
func TestFarWithoutHost(t *testing.T) {
	c := newCluster(t, true, 3, 1)
	c.startAll()
	c.ready()
	c.joinAll()
	own := c.accounts(77)
	for _, a := range own {
		a.Append(bootstrap.Enqueued, [2]uint64{1, 1})
	}
	c.net.setCut(true, c.addrs[1])
	f := c.jobs[2].Far(77, c.everybody(), func() {})
	askUntil(t, f, "what host 0 knows", func() bool { return f.Account(0).Last() == 1 })
	if f.Account(1).Known() {
		t.Error("a host that is cut off has answered")
	}
	c.net.setCut(false, c.addrs[1])
	askUntil(t, f, "what host 1 knows", func() bool { return f.Account(1).Last() == 1 })

	c.net.setCut(true, c.addrs[0])
	var ended atomic.Bool
	last := c.jobs[2].Far(77, []int{0, 1, 2}, func() { ended.Store(true) })
	last.Ask(1)
	c.nodes[2].LoseHost(0, "h0", "no answer for 10s")
	until(t, "the question ends", ended.Load)
}

// Many that ask the same at once cost no more than one.
func TestFarTogether(t *testing.T) {
	const perHost, rounds = 8, 10
	c := newCluster(t, true, 4, perHost)
	c.startAll()
	c.ready()
	c.joinAll()
	own := c.accounts(77)
	for _, a := range own {
		a.Append(bootstrap.Enqueued, [2]uint64{1, 1})
	}
	sent := func() (n uint64) {
		for _, node := range c.nodes {
			for _, l := range node.mesh.links {
				if l != nil {
					l.out.Lock()
					n += l.first + uint64(len(l.unacked))
					l.out.Unlock()
				}
			}
		}
		return n
	}
	before := sent()
	fars, answers := make([]*bootstrap.Far, len(c.jobs)), make([]atomic.Int64, len(c.jobs))
	for r, j := range c.jobs {
		fars[r] = j.Far(77, c.everybody(), func() { answers[r].Add(1) })
	}
	for round := range int64(rounds) {
		var wg sync.WaitGroup
		for r, f := range fars {
			wg.Go(func() {
				until(t, "an answer", func() bool { f.Ask(uint64(round)); return answers[r].Load() > round })
				if got := f.Account((r + perHost) % len(c.jobs)).Last(); got != 1 {
					t.Errorf("rank %d: last %d", r, got)
				}
			})
		}
		wg.Wait()
	}
	// Without that each question would be one message to host 0, three questions of it, three answers and one more.
	if n := sent() - before; n > uint64(len(c.jobs))*rounds*2 {
		t.Errorf("%d messages for %d questions", n, len(c.jobs)*rounds)
	} else {
		t.Logf("%d messages for %d questions", n, len(c.jobs)*rounds)
	}
}

// What only a rank of this host can be asked for is refused with the names of the hosts.
func TestElsewhere(t *testing.T) {
	c := newCluster(t, true, 2, 1)
	c.startAll()
	c.joinAll()
	c.ready()
	defer c.jobs[0].Watch(func(bootstrap.Event) {})()
	until(t, "rank 0 knows the hosts' names", func() bool { return c.jobs[0].HostName(0) != "" && c.jobs[0].HostName(1) != "" })
	if _, err := c.jobs[0].Ledger(1); err == nil || err.Error() != "ledger of rank 1: it runs on host h1, this is host h0" {
		t.Errorf("ledger: got error %v", err)
	}
	if _, err := c.jobs[0].Import(t.Context(), 1, "x"); err == nil || err.Error() != `import "x" of rank 1: it runs on host h1, this is host h0` {
		t.Errorf("import: got error %v", err)
	}
}
