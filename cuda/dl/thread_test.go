//go:build !nogpu

package dl

import (
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A thread keeps its number, two have different ones, and when a marked one has ended no thread is told from another any more.
func TestThread(t *testing.T) {
	if atomic.LoadInt64(&threads.ended) != 0 {
		t.Fatal("a marked thread has ended before")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := MarkThread()
	if own == 0 || ThisThread() != own {
		t.Fatalf("this thread is %#x, marked %#x", ThisThread(), own)
	}
	main := make(chan bool)
	defer close(main)
	// another runs f on another thread, which ends after it if it is to: the process's first thread would not.
	another := func(ends bool, f func()) {
		for done := false; !done; {
			reached := make(chan bool)
			go func() {
				runtime.LockOSThread()
				if unix.Gettid() == os.Getpid() {
					reached <- false
					<-main // so that the next one is on another thread
					runtime.UnlockOSThread()
					return
				}
				f()
				if !ends {
					runtime.UnlockOSThread()
				}
				reached <- true
			}()
			done = <-reached
		}
	}
	another(false, func() {
		if n := MarkThread(); n == 0 || n == own {
			t.Errorf("another thread is %#x, this one %#x", n, own)
		}
	})
	if ThisThread() != own {
		t.Errorf("this thread is %#x, was %#x", ThisThread(), own)
	}
	another(true, func() { MarkThread() })
	for start := time.Now(); ThisThread() != 0; runtime.Gosched() {
		if time.Since(start) > 10*time.Second {
			t.Fatal("the end of a marked thread was not noticed")
		}
	}
	if n := MarkThread(); n != 0 {
		t.Errorf("marked %#x after the end of a marked thread", n)
	}
	atomic.StoreInt64(&threads.ended, 0) // for other tests of this process
}

func BenchmarkThisThread(b *testing.B) {
	for b.Loop() {
		ThisThread()
	}
}
