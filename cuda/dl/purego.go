//go:build !nogpu

package dl

import (
	"runtime"

	"github.com/ebitengine/purego"
)

// dlopen opens with RTLD_LOCAL: NCCL and RCCL have the same symbol names, and two copies must not see each other.
func dlopen(path string) (uintptr, error) {
	runtime.LockOSThread() // dlerror is the thread's
	defer runtime.UnlockOSThread()
	return purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
}

// dlsym is 0 for a symbol that is not there.
func dlsym(handle uintptr, symbol string) uintptr {
	runtime.LockOSThread() // dlerror, which purego reads after a miss, is the thread's
	defer runtime.UnlockOSThread()
	a, err := purego.Dlsym(handle, symbol)
	if err != nil {
		return 0
	}
	return a
}

func dlclose(handle uintptr) { purego.Dlclose(handle) }

// callC is the one way into C. The callers' functions are marked, so that pointers among args stay valid.
func callC(f Func, args []uintptr) uintptr {
	r, _, _ := purego.SyscallN(uintptr(f), args...)
	return r
}

func bindC(f Func, fn any) { purego.RegisterFunc(fn, uintptr(f)) }

func newCallback(fn func(uintptr)) uintptr { return purego.NewCallback(fn) }
