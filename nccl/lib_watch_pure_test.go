package nccl

import (
	"errors"
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
	enqueue := func(seq uint64) {
		u.note(1, OpAllReduce, seq)
		u.cameBack()
	}
	enqueue(1)
	first := ask(0, false)
	enqueue(2)
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
	enqueue(3)
	ask(0, true) // who watches since the driver was asked knows of nothing
	if n := u.done.Load(); n != 2 {
		t.Errorf("%d operations are done, want 2", n)
	}
}

// Another goroutine waits for the stream while a call is on its way: the driver knows nothing of that yet, so whatever it says the operation is not done, and
// fails with the communicator.
func TestDoneIsNothingOnItsWay(t *testing.T) {
	u := watched(t)
	u.note(1, OpAllReduce, 1)
	for range 2 {
		seen, err := u.check(0, false)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := u.check(seen, true); err != nil {
			t.Fatal(err)
		}
	}
	if n, told := u.done.Load(), u.l.c.acct.Done(); n != 0 || told != 0 {
		t.Errorf("%d operations are done, the ledger says #%d, want none", n, told)
	}
	u.cameBack()
	seen, err := u.check(0, false)
	if err != nil || seen != 1 {
		t.Errorf("%d operations are on the stream, %v; want 1", seen, err)
	}
	u.l.c.failed.Store(&failure{ErrAborted})
	if _, err := u.check(seen, true); !errors.Is(err, ErrAborted) {
		t.Errorf("the driver says done after the failure: %v, want %v", err, ErrAborted)
	}
	if n := u.done.Load(); n != 0 {
		t.Errorf("%d operations are done after the failure, want 0", n)
	}
}
