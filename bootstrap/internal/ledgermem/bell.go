package ledgermem

import (
	"structs"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bell is a doorbell: package cuda's sleepers use the same two words.
type Bell struct {
	_        structs.HostLayout
	seq      uint32 // futex word, counts rings
	sleepers uint32
}

// The futex operations are the shared ones, without FUTEX_PRIVATE_FLAG: the sleeper may be another process.
const (
	futexWait = 0
	futexWake = 1
)

// Ring wakes whoever sleeps on the bell, in any process.
func (b *Bell) Ring() {
	atomic.AddUint32(&b.seq, 1)
	if atomic.LoadUint32(&b.sleepers) != 0 {
		unix.Syscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b.seq)), futexWake, 1<<30)
	}
}

// HasSleeper reports whether somebody sleeps on the bell.
func (b *Bell) HasSleeper() bool { return atomic.LoadUint32(&b.sleepers) != 0 }

// Wait sleeps until the bell rings; unix.ETIMEDOUT after d.
func (b *Bell) Wait(d time.Duration) error {
	seq := atomic.LoadUint32(&b.seq)
	atomic.AddUint32(&b.sleepers, 1)
	defer atomic.AddUint32(&b.sleepers, ^uint32(0))
	end := time.Now().Add(d)
	for atomic.LoadUint32(&b.seq) == seq {
		ts := unix.NsecToTimespec(int64(time.Until(end)))
		if ts.Nano() <= 0 {
			return unix.ETIMEDOUT
		}
		_, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&b.seq)), futexWait, uintptr(seq), uintptr(unsafe.Pointer(&ts)), 0, 0)
		if errno != 0 && errno != unix.EAGAIN && errno != unix.EINTR {
			return errno
		}
	}
	return nil
}
