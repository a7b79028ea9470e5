//go:build race || !amd64

package ledgermem

import "sync/atomic"

func store(p *atomic.Uint64, v uint64) { p.Store(v) }
