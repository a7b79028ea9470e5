package launcher

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
)

// limit ends a session when its context ends, which may be replaced by a longer one.
type limit struct {
	over func() // ends the session

	mu   sync.Mutex // guards the rest
	ctx  context.Context
	stop func() bool
	why  error
}

func newLimit(ctx context.Context, over func()) *limit {
	return &limit{over: over, ctx: ctx, stop: context.AfterFunc(ctx, over)}
}

// move goes over to another context, unless the first has ended.
func (l *limit) move(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx != ctx && l.why == nil && l.stop() {
		l.ctx, l.stop = ctx, context.AfterFunc(ctx, l.over)
	}
}

// pass ends the session for another reason.
func (l *limit) pass(why error) {
	l.mu.Lock()
	if l.why == nil {
		l.why = why
	}
	l.mu.Unlock()
	l.over()
}

// passed is why the session was ended, nil if it was not.
func (l *limit) passed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == nil && l.ctx.Err() != nil {
		return context.Cause(l.ctx)
	}
	return l.why
}

// end lets the session live. It returns why that is too late.
func (l *limit) end() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.stop() && l.why == nil {
		l.why = context.Cause(l.ctx)
	}
	return l.why
}

// supply sends the host what it wants of items, and returns what its agent says then: Prepared or Failed.
func (h *remoteHost) supply(ctx context.Context, l *limit, s *staging, items []*item) (*agentwire.Message, error) {
	var sending sync.WaitGroup
	var sendErr error
	asked := false
	for {
		m, err := h.mux.Receive()
		switch {
		case err != nil:
			h.mux.Close()
			sending.Wait()
			if e, ok := errors.AsType[*sendError](sendErr); ok {
				return nil, e
			}
			return nil, fmt.Errorf("the agent has ended: %w", err)
		case m.Ping != nil: // it is at work
			l.move(ctx)
		case m.Log != nil:
			h.log(fmt.Sprintf("host %s: %s", h.name, m.Log.Text))
		case m.Want != nil && !asked:
			asked = true
			l.move(ctx)
			s.mark(h.index, true)
			sending.Go(func() {
				defer s.mark(h.index, false)
				if h.staged, sendErr = s.send(ctx, h.mux, items, m.Want.Items); sendErr != nil {
					h.mux.Close() // which ends Receive
				}
			})
		case m.Prepared != nil:
			sending.Wait()
			return m, nil
		default: // the agent gives all back when it hears that its word has come
			sayBye(ctx, h.mux)
			sending.Wait()
			return m, nil
		}
	}
}
