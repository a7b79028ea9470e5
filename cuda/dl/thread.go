//go:build !nogpu

package dl

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

// thread is the C library's pointer for the calling thread. The next thread after one that has ended may have the same.
func thread() uintptr

// threads is what notices the end of a thread: a value of its own, which the C library hands to a function when the thread ends. That function cannot be
// Go's, for the thread has left Go by then. It is time(2), which writes the time to where the value points.
var threads struct {
	once        sync.Once
	setspecific Func // 0: the C library lacks what is needed
	key         uint32
	ended       int64 // the time when a marked thread ended
}

func watchThreads() {
	t := &threads
	create, set, time := Func(dlsym(purego.RTLD_DEFAULT, "pthread_key_create")), Func(dlsym(purego.RTLD_DEFAULT, "pthread_setspecific")), dlsym(purego.RTLD_DEFAULT, "time")
	if create != 0 && set != 0 && time != 0 && int32(create.Call3(uintptr(unsafe.Pointer(&t.key)), time, 0)) == 0 {
		t.setspecific = set
	}
}

// MarkThread gives the number of the calling thread, which ThisThread compares with; 0 where threads cannot be told from each other. The caller is locked to it.
func MarkThread() uintptr {
	t := &threads
	t.once.Do(watchThreads)
	if t.setspecific == 0 || int32(t.setspecific.Call3(uintptr(t.key), uintptr(unsafe.Pointer(&t.ended)), 0)) != 0 {
		return 0
	}
	return ThisThread()
}

// ThisThread is the number of the calling thread, for 2 ns. Once a thread that was marked has ended it is 0: a new thread could have the old one's number.
func ThisThread() uintptr {
	if atomic.LoadInt64(&threads.ended) != 0 {
		return 0
	}
	return thread()
}
