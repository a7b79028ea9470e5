//go:build nogpu

package dl

import "errors"

// A program built with this tag is static: it runs without the system's C library, and opens no vendor library.

const noGPU = "built without GPU support (build tag nogpu)"

func dlopen(string) (uintptr, error) { return 0, errors.New(noGPU) }

func dlsym(uintptr, string) uintptr { return 0 }

func dlclose(uintptr) {}

func callC(Func, []uintptr) uintptr { panic("dl: " + noGPU) }

type frame struct {
	fn   uintptr
	args [12]uintptr
}

func callInt(*frame) int32 { panic("dl: " + noGPU) }

func callAll(*Calls) int32 { panic("dl: " + noGPU) }

func bindC(Func, any) { panic("dl: " + noGPU) }

func newCallback(func(uintptr)) uintptr { return 0 } // nothing can call it

// MarkThread and ThisThread tell threads from each other, which here nothing needs.
func MarkThread() uintptr { return 0 }
func ThisThread() uintptr { return 0 }
