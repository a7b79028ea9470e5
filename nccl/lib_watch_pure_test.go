package nccl

import (
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
)

// watched is a stream's use by a communicator of one rank, without a library.
func watched(t *testing.T) *use {
	t.Helper()
	job := bootstrap.InProcess(1)[0]
	t.Cleanup(func() { job.Close() })
	ledger, err := job.Ledger(0)
	if err != nil {
		t.Fatal(err)
	}
	c := &Comm{name: "world", job: job, ranks: []int{0}}
	if c.acct, err = ledger.OpenAccount(1); err != nil {
		t.Fatal(err)
	}
	l := &library{c: c}
	c.be = l
	return &use{l: l}
}

// Two goroutines wait for a stream, and more is enqueued between: done is what was enqueued before the one asked whose answer it is.
func TestDoneIsWhatWasAskedFor(t *testing.T) {
	u := watched(t)
	ask := func(seen uint64, done bool) uint64 {
		t.Helper()
		now, err := u.check(seen, done)
		if err != nil {
			t.Fatal(err)
		}
		return now
	}
	u.note(OpAllReduce, 1)
	first := ask(0, false)
	u.note(OpAllReduce, 2)
	second := ask(0, false)
	ask(first, true) // the driver has told the first of the time before
	if n := u.done.Load(); n != 1 {
		t.Errorf("%d operations are done, want 1", n)
	}
	ask(second, true)
	ask(first, true) // late
	if n := u.done.Load(); n != 2 {
		t.Errorf("%d operations are done, want 2", n)
	}
	u.note(OpAllReduce, 3)
	ask(0, true) // who watches since the driver was asked knows of nothing
	if n := u.done.Load(); n != 2 {
		t.Errorf("%d operations are done, want 2", n)
	}
}
