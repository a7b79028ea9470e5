package bootstrap

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/internal/digest"
	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

// InProcess returns the n ranks of a job that lives in this process, for tests.
// The job ends when all of them are closed.
func InProcess(n int) []*Job { return inProcess(n, "") }

func inProcess(n int, device string) []*Job {
	if n < 1 {
		panic(fmt.Sprintf("bootstrap: InProcess(%d): a job has at least one rank", n))
	}
	nodeOf := make([]int, n)
	p := &process{
		store:   store.New(nodeOf),
		ledgers: make([]*Ledger, n),
		exports: make([]map[string]Handle, n),
		changed: make(chan struct{}),
		open:    n,
	}
	id := "local-" + rand.Text()
	jobs := make([]*Job, n)
	for r := range jobs {
		p.ledgers[r] = &Ledger{rank: r, own: true, mem: ledgermem.Heap(r)}
		p.exports[r] = map[string]Handle{}
		p.store.Join(r, "")
		jobs[r] = newJob(id, r, 0, nodeOf, device, &local{process: p, rank: r})
	}
	return jobs
}

// process is a job whose ranks live in this process.
type process struct {
	store   *store.Store
	ledgers []*Ledger

	mu      sync.Mutex // guards the rest
	exports []map[string]Handle
	changed chan struct{} // closed and replaced with each export and each end of a rank
	open    int           // ranks that have not closed
}

// local is the control of one rank of a process.
type local struct {
	*process
	rank int
	once sync.Once
}

func (l *local) start(id uint64, q *store.Request, done func(store.Reply)) {
	l.store.Start(l.rank, id, q, func(r store.Reply) {
		// Each rank owns what it receives.
		values := make([][]byte, len(r.Values))
		for i, v := range r.Values {
			values[i] = append([]byte{}, v...)
		}
		if r.Values != nil {
			r.Values = values
		}
		done(r)
	})
}

func (l *local) cancel(id uint64) { l.store.Cancel(l.rank, id) }

func (l *local) events(from int) ([]store.Event, <-chan struct{}) { return l.store.Events(from) }

func (l *local) status(rank int) *store.End {
	_, end := l.store.Status(rank)
	return end
}

func (l *local) export(key string, h Handle) (func(), error) {
	if h.FD >= 0 {
		fd, err := dupFD(h.FD)
		if err != nil {
			return nil, err
		}
		h.FD = fd
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, twice := l.exports[l.rank][key]; twice || l.exports[l.rank] == nil {
		closeFD(h.FD)
		if twice {
			return nil, errors.New("the key is already exported")
		}
		return nil, ErrClosed
	}
	l.exports[l.rank][key] = h
	l.wake()
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if h, ok := l.exports[l.rank][key]; ok {
			closeFD(h.FD)
			delete(l.exports[l.rank], key)
		}
	}), nil
}

// wake is called with mu held.
func (p *process) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (l *local) fetch(ctx context.Context, rank int, key string) (Handle, error) {
	for {
		l.mu.Lock()
		h, ok := l.exports[rank][key]
		var err error
		if ok && h.FD >= 0 {
			h.FD, err = dupFD(h.FD)
		}
		changed := l.changed
		gone := l.exports[l.rank] == nil
		l.mu.Unlock()
		if ok {
			return h, err
		}
		if gone {
			return Handle{}, ErrClosed
		}
		if end := l.status(rank); end != nil {
			return Handle{}, &store.Error{Kind: store.Ended, End: *end}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Handle{}, &store.Error{Kind: store.Cancelled, Missing: []int{rank}}
		}
	}
}

func (l *local) ledger(_ context.Context, rank int) (*Ledger, error) {
	if rank == l.rank {
		return l.ledgers[rank], nil
	}
	own := l.ledgers[rank]
	return &Ledger{rank: rank, mem: own.mem}, nil
}

func (l *local) inProcess() bool { return true }

func (l *local) hostName(int) string { return "" }

func (l *local) far(_ digest.Query, done func([]digest.State)) { done(nil) } // all ranks are on one host

func (l *local) suspect(int) {} // nobody to tell

func (l *local) close() error {
	l.end(func() { l.store.Leave(l.rank, "") })
	return nil
}

func (l *local) die(cause string) {
	first := false
	l.end(func() { first = true; l.store.Die(l.rank, "", cause) })
	if !first {
		l.store.Die(l.rank, "", cause) // a failure after the goodbye
		l.ring()
	}
}

// end takes the rank out of the job, once.
func (l *local) end(tell func()) {
	l.once.Do(func() {
		tell()
		l.mu.Lock()
		for _, h := range l.exports[l.rank] {
			closeFD(h.FD)
		}
		l.exports[l.rank] = nil
		l.open--
		last := l.open == 0
		l.wake()
		l.mu.Unlock()
		l.ring()
		if last {
			l.store.Close()
		}
	})
}

func (p *process) ring() {
	for _, l := range p.ledgers {
		l.mem.Page.Bell.Ring()
	}
}

func dupFD(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d: %w", fd, err)
	}
	return n, nil
}

func closeFD(fd int) {
	if fd >= 0 {
		unix.Close(fd)
	}
}
