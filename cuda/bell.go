package cuda

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bell is a doorbell in memory that processes may share. The driver of a host device sleeps on it when no
// task can go on; whoever changes what a task waits for rings it. All zero it is ready.
//
// The sleeper counts itself in, notes seq, looks at its tasks once more, and only then sleeps as long as seq stays.
// Who rings has changed the task's condition before it looks for sleepers. All accesses are atomic and so in
// one order: either the sleeper saw the change, or the ringer sees the sleeper.
type Bell struct {
	seq      uint32 // futex word, counts rings that found a sleeper
	sleepers uint32
}

// BellAt is the bell at an address of shared memory (8 bytes, aligned to 4; bootstrap.Ledger.Bell).
func BellAt(p unsafe.Pointer) *Bell { return (*Bell)(p) }

// Ring wakes the sleepers. Without a sleeper it costs one load.
func (b *Bell) Ring() {
	if atomic.LoadUint32(&b.sleepers) == 0 {
		return
	}
	atomic.AddUint32(&b.seq, 1)
	// The word is shared between processes: no FUTEX_PRIVATE_FLAG.
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b.seq)), futexWake, 1<<30, 0, 0, 0)
	if p, ok := parkers.Load(b); ok {
		p.(*parker).wake()
	}
}

const (
	futexWait = 0
	futexWake = 1
)

// enter counts a sleeper in and notes the word; leave counts it out.
func (b *Bell) enter() (seq uint32) {
	atomic.AddUint32(&b.sleepers, 1)
	return atomic.LoadUint32(&b.seq)
}

func (b *Bell) leave() { atomic.AddUint32(&b.sleepers, ^uint32(0)) }

// sleep waits until the bell rings, at most d. It is a real system call for the scheduler (Syscall, not RawSyscall): a thread
// that sleeps must not keep the collector from stopping the world.
func (b *Bell) sleep(seq uint32, d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b.seq)), futexWait, uintptr(seq),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// parkers finds, for a bell that a device of this process sleeps on, the channel that it sleeps on instead of the futex
// when several ranks live in the process: a goroutine that parks gives its core to the other ranks at once, a thread in a
// system call only after the scheduler's watchdog has seen it.
var parkers sync.Map // *Bell -> *parker

type parker struct {
	ch    chan struct{}
	timer *time.Timer // the sleeper's
}

func newParker() *parker { return &parker{ch: make(chan struct{}, 1)} }

// sleep is Bell.sleep in the way that suits the process.
func (p *parker) sleep(b *Bell, seq uint32, d time.Duration) {
	if !crowded() {
		b.sleep(seq, d)
		return
	}
	if p.timer == nil {
		p.timer = time.NewTimer(d)
	} else {
		p.timer.Reset(d)
	}
	select {
	case <-p.ch:
	case <-p.timer.C:
	}
	p.timer.Stop()
}

func (p *parker) wake() {
	select {
	case p.ch <- struct{}{}:
	default:
	}
}
