package cuda

import (
	"context"
	"fmt"
	"testing"
)

// A stream is closed, whatever those say who watch it: another one's deadline is not that of the close.
func TestGPUCloseWatched(t *testing.T) {
	d := openGPU(t)
	s := must(d.NewStream())
	s.Watch(func(uint64, bool) (uint64, error) { return 0, fmt.Errorf("given up: %w", context.DeadlineExceeded) }, func() string { return "" })
	m := must(d.Alloc(1<<20, Private))
	wantError(t, s.Synchronize(testContext(t)), context.DeadlineExceeded)
	check(t, s.Close())
	check(t, m.Free())
}
