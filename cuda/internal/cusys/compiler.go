package cusys

import (
	"fmt"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
)

// Compiler is the vendor's run-time compiler (NVRTC, MTRTC, HIPRTC). It needs no device.
type Compiler struct {
	lib *dl.Library
	f   struct {
		Create, Compile, LogSize, Log, CodeSize, Code, Destroy, ErrorString dl.Entry
	}
}

// program is the compiler's handle of a source.
type program uintptr

// CompileError is source that does not compile, with the compiler's messages.
type CompileError struct {
	Name string // of the source
	Log  string
}

func (e *CompileError) Error() string { return "compile " + e.Name + ":\n" + e.Log }

// OpenCompiler opens the vendor's compiler. It may take 0.1 s and more.
func OpenCompiler(v *Vendor) (*Compiler, error) {
	lib, err := dl.Open(v.Compiler)
	if err != nil {
		return nil, err
	}
	c := &Compiler{lib: lib}
	symbol := func(e *dl.Entry, name string) dl.Symbol {
		return dl.Symbol{Entry: e, Names: []string{v.compilerPrefix + name}, Required: true}
	}
	f := &c.f
	if err := lib.Bind([]dl.Symbol{
		symbol(&f.Create, "CreateProgram"), symbol(&f.Compile, "CompileProgram"),
		symbol(&f.LogSize, "GetProgramLogSize"), symbol(&f.Log, "GetProgramLog"), symbol(&f.CodeSize, v.codeSize), symbol(&f.Code, v.code),
		symbol(&f.Destroy, "DestroyProgram"), symbol(&f.ErrorString, "GetErrorString"),
	}); err != nil {
		lib.Close()
		return nil, err
	}
	return c, nil
}

// Close unloads the library; for tests.
func (c *Compiler) Close() { c.lib.Close() }

// Compile compiles source text to what ModuleLoad takes. name stands in messages. The source's kernels are extern "C".
func (c *Compiler) Compile(source, name string, options ...string) ([]byte, error) {
	src, file := dl.CString(source), dl.CString(name)
	var prog program
	rc := c.f.Create.Result6(uintptr(unsafe.Pointer(&prog)), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&file[0])), 0, 0, 0)
	if err := c.check(&c.f.Create, rc); err != nil {
		return nil, err
	}
	defer c.f.Destroy.Result3(uintptr(unsafe.Pointer(&prog)), 0, 0)
	opts := make([]unsafe.Pointer, len(options))
	for i, o := range options {
		opts[i] = unsafe.Pointer(&dl.CString(o)[0])
	}
	rc = c.f.Compile.Result3(uintptr(prog), uintptr(len(opts)), uintptr(unsafe.Pointer(unsafe.SliceData(opts))))
	log, err := c.text(&c.f.LogSize, &c.f.Log, prog)
	if err != nil {
		return nil, err
	}
	const compilation = 6
	if rc == compilation {
		return nil, &CompileError{Name: name, Log: dl.Text(log)}
	}
	if err := c.check(&c.f.Compile, rc); err != nil {
		return nil, err
	}
	return c.text(&c.f.CodeSize, &c.f.Code, prog)
}

// text reads a result of the compiler by its two calls.
func (c *Compiler) text(size, get *dl.Entry, prog program) ([]byte, error) {
	var n uintptr
	rc := size.Result3(uintptr(prog), uintptr(unsafe.Pointer(&n)), 0)
	if err := c.check(size, rc); err != nil || n == 0 {
		return nil, err
	}
	b := make([]byte, n)
	rc = get.Result3(uintptr(prog), uintptr(unsafe.Pointer(&b[0])), 0)
	return b, c.check(get, rc)
}

func (c *Compiler) check(e *dl.Entry, rc int32) error {
	if rc == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (%s result %d)", e.Name, dl.GoString(c.f.ErrorString.Call3(uintptr(uint32(rc)), 0, 0)), c.lib.Name(), rc)
}
