package bootstrap

import (
	"context"
	"fmt"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// Handle is something that a rank hands to another on the same host: a file descriptor between processes,
// or any Go value between ranks of one process.
type Handle struct {
	FD    int // -1: none
	Local any // only arrives where Job.InProcess
}

// Export makes the handle available to the other ranks of this host under a key, until withdraw is called.
// The job duplicates h.FD; the caller keeps its own. A key can be exported once at a time.
func (j *Job) Export(key string, h Handle) (withdraw func(), err error) {
	if len(key) > store.MaxName {
		return nil, fmt.Errorf("export: key of %d bytes, at most %d are allowed", len(key), store.MaxName)
	}
	if j.isClosed() {
		return nil, fmt.Errorf("export %q: %w", key, ErrClosed)
	}
	if withdraw, err = j.ctl.export(key, h); err != nil {
		return nil, fmt.Errorf("export %q: %w", key, err)
	}
	return withdraw, nil
}

// Import fetches a handle that a rank of this host exports, and waits until it does. The caller owns the
// descriptor (close-on-exec). The node relays descriptors and keeps none.
func (j *Job) Import(ctx context.Context, rank int, key string) (Handle, error) {
	none := Handle{FD: -1}
	op := fmt.Sprintf("import %q of rank %d", key, rank)
	switch {
	case rank < 0 || rank >= j.size:
		return none, fmt.Errorf("%s: the job has %d ranks", op, j.size)
	case j.nodeOf[rank] != j.node:
		return none, fmt.Errorf("%s: it runs on %s, this is %s", op, j.named(j.nodeOf[rank]), j.named(j.node))
	case len(key) > store.MaxName:
		return none, fmt.Errorf("%s: key of %d bytes, at most %d are allowed", op, len(key), store.MaxName)
	case ctx.Err() != nil:
		return none, &WaitError{Op: op, Missing: []int{rank}, Err: ctx.Err()}
	case j.isClosed():
		return none, fmt.Errorf("%s: %w", op, ErrClosed)
	}
	h, err := j.ctl.fetch(ctx, rank, key)
	if err != nil {
		return none, j.opError(ctx, op, err)
	}
	return h, nil
}
