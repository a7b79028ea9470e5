package cuda

import (
	"slices"
	"sync"
	"sync/atomic"
)

// sharedList is a list that is read without a lock and changed seldom.
type sharedList[T comparable] struct {
	mu   sync.Mutex // guards changes
	list atomic.Pointer[[]T]
}

// all is the list as it is now; not to be changed.
func (l *sharedList[T]) all() []T {
	if p := l.list.Load(); p != nil {
		return *p
	}
	return nil
}

func (l *sharedList[T]) change(change func([]T) []T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := change(slices.Clone(l.all()))
	l.list.Store(&list)
}

func (l *sharedList[T]) add(v T) { l.change(func(list []T) []T { return append(list, v) }) }

func (l *sharedList[T]) remove(v T) {
	l.change(func(list []T) []T { return slices.DeleteFunc(list, func(other T) bool { return other == v }) })
}
