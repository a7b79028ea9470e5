package cusys

import (
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// ModuleLoad loads code into the current context: PTX as text, or a binary image. An error has the compiler's log in it.
// Load modules and get their functions before a capture: the driver loads lazily, which a capture does not allow.
func (d *Driver) ModuleLoad(image []byte) (Module, error) {
	const errorLog, errorLogSize = 5, 6
	code := append(image[:len(image):len(image)], 0) // PTX ends with a NUL
	log := make([]byte, 8192)
	options := []int32{errorLog, errorLogSize}
	values := struct {
		log  unsafe.Pointer
		size uintptr // a number in a void*
	}{unsafe.Pointer(&log[0]), uintptr(len(log) - 1)}
	var m Module
	rc := d.f.ModuleLoadDataEx.Result6(uintptr(unsafe.Pointer(&m)), uintptr(unsafe.Pointer(&code[0])), uintptr(len(options)),
		uintptr(unsafe.Pointer(&options[0])), uintptr(unsafe.Pointer(&values)), 0)
	err := d.check(&d.f.ModuleLoadDataEx, rc)
	if de, ok := err.(*Error); ok && log[0] != 0 {
		de.Text += ": " + dl.Text(log)
	}
	return m, err
}

func (d *Driver) ModuleUnload(m Module) error {
	return d.check(&d.f.ModuleUnload, d.f.ModuleUnload.Result3(uintptr(m), 0, 0))
}

// ModuleFunction finds a kernel by name.
func (d *Driver) ModuleFunction(m Module, name string) (Function, error) {
	b := dl.CString(name)
	var f Function
	rc := d.f.ModuleGetFunction.Result3(uintptr(unsafe.Pointer(&f)), uintptr(m), uintptr(unsafe.Pointer(&b[0])))
	return f, d.check(&d.f.ModuleGetFunction, rc)
}

// Dim are the sizes of a grid or block.
type Dim struct{ X, Y, Z uint32 }

// LaunchKernel enqueues a kernel. params are pointers to the arguments' values, which are read during the call; smem is
// dynamic shared memory in bytes.
func (d *Driver) LaunchKernel(f Function, grid, block Dim, smem uint32, s Stream, params []unsafe.Pointer) error {
	rc := d.f.LaunchKernel.Result12(uintptr(f), uintptr(grid.X), uintptr(grid.Y), uintptr(grid.Z),
		uintptr(block.X), uintptr(block.Y), uintptr(block.Z), uintptr(smem), uintptr(s),
		uintptr(unsafe.Pointer(unsafe.SliceData(params))), 0, 0)
	return d.check(&d.f.LaunchKernel, rc)
}
