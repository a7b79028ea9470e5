package cuda

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
)

// PanicPlace is the file and line of the program that panicked, "train.go:43", for a deferred function that has recovered or is about to; "" where there is no panic,
// or only the module's own packages are in it. For libraries.
func PanicPlace() string {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for panicked := false; ; {
		f, more := frames.Next()
		switch {
		case f.Function == "runtime.gopanic":
			panicked = true
		case panicked && !strings.HasPrefix(f.Function, "runtime.") && !ours(&f):
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
		if !more {
			return ""
		}
	}
}

// ours reports whether a frame is in the module's packages for programs.
func ours(f *runtime.Frame) bool {
	pkg, found := strings.CutPrefix(f.Function, "github.com/gorun-dev/gorun/")
	return found && !strings.HasSuffix(f.File, "_test.go") &&
		(strings.HasPrefix(pkg, "cuda.") || strings.HasPrefix(pkg, "nccl.") || strings.HasPrefix(pkg, "graphs."))
}

// atPlace is what is there to be said of a panic's place: " at train.go:43".
func atPlace() string {
	if p := PanicPlace(); p != "" {
		return " at " + p
	}
	return ""
}
