package cuda

import (
	"sync/atomic"
	"testing"
)

// Each wait gives those who watch its stream back what they told it, whatever another wait was told meanwhile.
func TestGPUWatchSeen(t *testing.T) {
	d := openGPU(t)
	s := newStream(t, d)
	const watchers = 4 // more than a wait has room for
	var issued, told [watchers]atomic.Uint64
	var others atomic.Bool
	for i := range watchers {
		remove := s.Watch(func(seen uint64, done bool) (uint64, error) {
			if !done {
				return issued[i].Load(), nil
			}
			if others.CompareAndSwap(true, false) {
				// Another goroutine enqueues, and looks, after this wait was told that all is done.
				for k := range issued {
					issued[k].Add(100)
				}
				end := make(chan error)
				go func() {
					_, err := s.Query()
					end <- err
				}()
				if err := <-end; err != nil {
					return 0, err
				}
			}
			told[i].Store(seen)
			return 0, nil
		}, nil)
		defer remove()
		issued[i].Store(uint64(i + 1))
	}
	others.Store(true)
	check(t, s.Synchronize(testContext(t)))
	for i := range told {
		if got := told[i].Load(); got != uint64(i+1) {
			t.Errorf("watcher %d: the wait gave back %d, want %d", i, got, i+1)
		}
	}
}
