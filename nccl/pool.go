package nccl

import "sync"

// taskPool keeps tasks of one type for reuse, so that enqueueing allocates nothing once it is warm.
type taskPool[T any] struct {
	mu   sync.Mutex
	free []*T
}

// get is a task that was used before, or a new one: the caller sets all of it.
func (p *taskPool[T]) get() *T {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := len(p.free)
	if k == 0 {
		return new(T)
	}
	t := p.free[k-1]
	p.free = p.free[:k-1]
	return t
}

func (p *taskPool[T]) put(t *T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, t)
}
