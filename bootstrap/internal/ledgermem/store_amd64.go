//go:build !race

package ledgermem

import (
	"sync/atomic"
	"unsafe"
)

// store is p.Store without the wait until others can see it, which is most of what a record costs: that of package atomic also keeps back the reads that come after it.
// On amd64 others see all stores in their order.
func store(p *atomic.Uint64, v uint64) { *(*uint64)(unsafe.Pointer(p)) = v }
