package bootstrap

import (
	"runtime"

	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

// stacks are those of all goroutines of this process, as the runtime writes them, cut at wire.MaxStacks bytes.
func stacks() []byte {
	for n := 64 << 10; ; n *= 4 {
		n = min(n, wire.MaxStacks)
		b := make([]byte, n)
		if got := runtime.Stack(b, true); got < n || n == wire.MaxStacks {
			return b[:got]
		}
	}
}
