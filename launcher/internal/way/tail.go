package way

import "sync"

// TailSize is how much of a session's stderr is kept, in bytes.
const TailSize = 8 << 10

// Tail is a writer that keeps the last TailSize bytes. Its zero value is ready.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

// Write never fails.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(p)
	if n >= TailSize {
		t.buf, p = t.buf[:0], p[n-TailSize:]
	}
	if over := len(t.buf) + len(p) - TailSize; over > 0 {
		t.buf = t.buf[:copy(t.buf, t.buf[over:])]
	}
	t.buf = append(t.buf, p...)
	return n, nil
}

// Bytes is a copy of what is kept.
func (t *Tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]byte(nil), t.buf...)
}
