package launcher

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestPoller(t *testing.T) {
	before := openFDs(t)
	p, err := newPoller()
	if err != nil {
		t.Fatal(err)
	}
	if p.file == nil {
		t.Error("the waiter holds a thread from the beginning")
	}
	r, w, err := pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.EpollCtl(p.ep, unix.EPOLL_CTL_ADD, r, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: 7}); err != nil {
		t.Fatal(err)
	}
	events := make([]unix.EpollEvent, 4)
	one, got := make([]byte, 1), make([]byte, 1)
	// As those who wait do it: a signal, of the runtime's own too, interrupts.
	wait := func(ms int) (int, error) {
		for {
			n, err := p.wait(events, ms)
			if err != unix.EINTR {
				return n, err
			}
		}
	}
	for _, kept := range []bool{false, true} {
		if kept {
			p.keepThread()
		}
		for _, ms := range []int{0, 30} {
			start := time.Now()
			if n, err := wait(ms); n != 0 || err != nil {
				t.Fatalf("kept %v: %d events, %v, want none", kept, n, err)
			}
			if d, want := time.Since(start), time.Duration(ms)*time.Millisecond; d < want {
				t.Errorf("kept %v: waited %v, want %v", kept, d, want)
			}
		}
		// What comes while it waits, with and without an end, again and again; and what was there before.
		for i := range 100 {
			ms := []int{-1, 30_000}[i%2]
			if i%3 == 0 {
				unix.Write(w, one)
			} else {
				go unix.Write(w, one)
			}
			n, err := wait(ms)
			if n != 1 || err != nil || events[0].Fd != 7 {
				t.Fatalf("kept %v: %d events, %v, want one", kept, n, err)
			}
			// Level-triggered: it is there until it is read.
			if n, err := wait(ms); n != 1 || err != nil {
				t.Fatalf("kept %v: %d events, %v, want the same again", kept, n, err)
			}
			unix.Read(r, got)
		}
	}
	p.close()
	unix.Close(r)
	unix.Close(w)
	if after := openFDs(t); after > before+2 { // the runtime's own poller
		t.Errorf("%d descriptors, %d before", after, before)
	}
}
