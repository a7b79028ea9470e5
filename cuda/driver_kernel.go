package cuda

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda/dl"
	"github.com/gorun-dev/gorun/cuda/internal/cusys"
)

// kernelKey tells kernels apart. The struct of arguments is part of the source.
type kernelKey struct {
	name   string
	source kernelSource
}

// driverModule is a kernel loaded into the device's context.
type driverModule struct {
	module cusys.Module
	fn     cusys.Function
}

// driverKernel is a kernel with a way to hand it its arguments.
type driverKernel struct {
	g      *driverDevice
	name   string
	fn     cusys.Function
	layout argLayout
	blocks taskPool[argBlock]
}

// argBlock is the memory of one launch's arguments, as C has them.
type argBlock struct {
	data   [maxArgs]byte
	n      int64
	params [2]unsafe.Pointer
}

// maxArgs is what every device takes as arguments, less the count of items.
const maxArgs = 4096 - 16

func (g *driverDevice) loadKernel(name string, source kernelSource, args reflect.Type) (platformKernel, error) {
	if err := g.unsafeCall("load kernel " + name); err != nil {
		return nil, err
	}
	if source == (kernelSource{}) {
		return nil, fmt.Errorf("it has no CUDA source, which a %s device runs", g.platform)
	}
	layout, err := layoutOf(name, args)
	if err != nil {
		return nil, err
	}
	if source.cuda != "" {
		source.cuda = layout.declaration + source.cuda
	}
	m, err := g.loadOnce(name, source)
	if err != nil {
		return nil, err
	}
	return &driverKernel{g: g, name: name, fn: m.fn, layout: layout}, nil
}

func (g *driverDevice) loadOnce(name string, source kernelSource) (*driverModule, error) {
	g.kmu.Lock()
	defer g.kmu.Unlock()
	m := g.kernels[kernelKey{name, source}]
	if m == nil {
		image, err := g.image(name, source)
		if err != nil {
			return nil, err
		}
		if m, err = g.loadModule(name, image); err != nil {
			return nil, err
		}
		g.kernels[kernelKey{name, source}] = m
	}
	return m, nil
}

// image is what the driver loads.
func (g *driverDevice) image(name string, source kernelSource) ([]byte, error) {
	if source.cuda == "" {
		return []byte(source.ptx), nil
	}
	image, err := compile(g, name, source.cuda)
	var missing *dl.LoadError
	if source.ptx != "" && errors.As(err, &missing) {
		return []byte(source.ptx), nil
	}
	return image, err
}

func (g *driverDevice) loadModule(name string, image []byte) (*driverModule, error) {
	in, err := g.enter(true)
	if err != nil {
		return nil, err
	}
	defer in.leave()
	module, err := g.drv.ModuleLoad(image)
	if err != nil {
		return nil, g.cause(err)
	}
	fn, err := g.drv.ModuleFunction(module, name)
	if err != nil {
		return nil, errors.Join(fmt.Errorf(`%w: the source must define extern "C" __global__ void %s(%s a, long long n)`, g.cause(err), name, argsName(name)),
			g.drv.ModuleUnload(module))
	}
	return &driverModule{module, fn}, nil
}

// unload gives the modules back. The device is bound.
func (g *driverDevice) unload() error {
	g.kmu.Lock()
	defer g.kmu.Unlock()
	var errs []error
	for _, m := range g.kernels {
		errs = append(errs, g.drv.ModuleUnload(m.module))
	}
	clear(g.kernels)
	return errors.Join(errs...)
}

// compilers are the open run-time compilers and what they have compiled in this process.
var compilers struct {
	sync.Mutex
	open   map[Platform]*cusys.Compiler
	images map[compiled][]byte
}

type compiled struct {
	platform     Platform
	arch         string
	name, source string
}

func compile(g *driverDevice, name, source string) ([]byte, error) {
	compilers.Lock()
	defer compilers.Unlock()
	var options []string
	key := compiled{platform: g.platform, name: name, source: source}
	if g.platform == CUDA {
		key.arch = fmt.Sprintf("compute_%d%d", g.about.Major, g.about.Minor)
		options = []string{"--gpu-architecture=" + key.arch, "--std=c++17"}
	}
	if image := compilers.images[key]; image != nil {
		return image, nil
	}
	c := compilers.open[g.platform]
	if c == nil {
		var err error
		if c, err = cusys.OpenCompiler(g.drv.Vendor()); err != nil {
			return nil, fmt.Errorf("the source needs the run-time compiler: %w", err)
		}
		if compilers.open == nil {
			compilers.open, compilers.images = make(map[Platform]*cusys.Compiler), make(map[compiled][]byte)
		}
		compilers.open[g.platform] = c
	}
	image, err := c.Compile(source, name+".cu", options...)
	if err != nil {
		return nil, err
	}
	compilers.images[key] = image
	return image, nil
}

func (k *driverKernel) launch(p platformStream, grid Grid, args unsafe.Pointer) error {
	const op = "launch kernel"
	s := p.(*driverStream)
	blocks := (int64(grid.N) + int64(grid.Block) - 1) / int64(grid.Block)
	if blocks > math.MaxInt32 {
		return &Error{Op: op, Detail: k.name, Err: fmt.Errorf("%d items in blocks of %d are more than %d blocks", grid.N, grid.Block, math.MaxInt32)}
	}
	b := k.blocks.get()
	defer k.blocks.put(b)
	if err := k.layout.fill(b.data[:], args, s.g.dev); err != nil {
		return &Error{Op: op, Detail: k.name, Err: err}
	}
	b.n = int64(grid.N)
	b.params = [2]unsafe.Pointer{unsafe.Pointer(&b.data), unsafe.Pointer(&b.n)}
	return s.enqueueNode(op, func() error {
		if blocks == 0 {
			return nil
		}
		return s.g.drv.LaunchKernel(k.fn, cusys.Dim{X: uint32(blocks), Y: 1, Z: 1}, cusys.Dim{X: uint32(grid.Block), Y: 1, Z: 1}, 0, s.h, b.params[:])
	})
}

// argLayout is how a Go struct of arguments becomes the same struct in C.
type argLayout struct {
	declaration string // C++ source
	size        uintptr
	parts       []argPart
}

// argPart is a number, or a Slice, which in C is a device pointer and a count.
type argPart struct {
	from, to, size uintptr
	name           string
	element        uintptr // size of a Slice's elements; 0: a number
}

func argsName(kernel string) string { return kernel + "_args" }

// sliceDeclaration is the C++ side of Slice.
const sliceDeclaration = `template <typename T> struct gorun_slice {
	T *ptr;
	long long n;
	__device__ T &operator[](long long i) const { return ptr[i]; }
};
`

func layoutOf(kernel string, args reflect.Type) (argLayout, error) {
	if args.Kind() != reflect.Struct {
		return argLayout{}, fmt.Errorf("its arguments are of type %s: a GPU takes one struct", args)
	}
	for i, r := range kernel {
		if r != '_' && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (i == 0 || r < '0' || r > '9') {
			return argLayout{}, fmt.Errorf("its name %q is no identifier of C", kernel)
		}
	}
	b := layoutBuilder{}
	body, size, _, err := b.structure(args, "", 0, 0, "\t")
	if err != nil {
		return argLayout{}, err
	}
	if size > maxArgs {
		return argLayout{}, fmt.Errorf("its arguments have %d bytes, a GPU takes %d", size, maxArgs)
	}
	// The numbers of lines in messages are those of the kernel's own source.
	decl := sliceDeclaration + "struct " + argsName(kernel) + " {\n" + body + "};\n#line 1\n"
	return argLayout{declaration: decl, size: size, parts: b.parts}, nil
}

type layoutBuilder struct{ parts []argPart }

// structure lays out a struct type: from is its offset in Go, to in C.
func (b *layoutBuilder) structure(t reflect.Type, path string, from, to uintptr, indent string) (text string, size, align uintptr, err error) {
	var out strings.Builder
	align = 1
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Name == "_" {
			continue // C has its own padding
		}
		at := size
		decl, n, a, err := b.field(f.Type, f.Name, path+f.Name, from+f.Offset, to, &at, indent)
		if err != nil {
			return "", 0, 0, err
		}
		out.WriteString(indent + decl + ";\n")
		size, align = at+n, max(align, a)
	}
	if size == 0 {
		size = 1 // as in C++
	}
	return out.String(), roundTo(size, align), align, nil
}

func roundTo(n, align uintptr) uintptr { return (n + align - 1) / align * align }

// field lays out one field at the first aligned offset from *at (within its struct, which is at to), which it sets.
func (b *layoutBuilder) field(t reflect.Type, name, path string, from, to uintptr, at *uintptr, indent string) (decl string, size, align uintptr, err error) {
	if e, ok := reflect.Zero(t).Interface().(interface{ element() DType }); ok {
		*at = roundTo(*at, 8)
		b.parts = append(b.parts, argPart{from: from, to: to + *at, name: path, element: uintptr(e.element().Size())})
		return fmt.Sprintf("gorun_slice<%s> %s", cType(e.element()), name), 16, 8, nil
	}
	if c, n := cScalar(t); c != "" {
		*at = roundTo(*at, n)
		b.parts = append(b.parts, argPart{from: from, to: to + *at, size: n, name: path})
		return c + " " + name, n, n, nil
	}
	switch t.Kind() {
	case reflect.Array:
		if t.Len() == 0 {
			break
		}
		var first string
		start := uintptr(0)
		for i := range t.Len() {
			off := *at + uintptr(i)*size
			decl, n, a, err := b.field(t.Elem(), fmt.Sprintf("%s[%d]", name, t.Len()), fmt.Sprintf("%s[%d]", path, i), from+uintptr(i)*t.Elem().Size(), to, &off, indent)
			if err != nil {
				return "", 0, 0, err
			}
			if i == 0 {
				first, start, size, align = decl, off, n, a
				*at = off
			}
		}
		*at = start
		return first, size * uintptr(t.Len()), align, nil
	case reflect.Struct:
		// Its size and alignment come first: where it stands depends on them.
		probe := layoutBuilder{}
		if _, _, align, err = probe.structure(t, path+".", from, 0, indent+"\t"); err != nil {
			return "", 0, 0, err
		}
		*at = roundTo(*at, align)
		body, size, align, err := b.structure(t, path+".", from, to+*at, indent+"\t")
		return "struct {\n" + body + indent + "} " + name, size, align, err
	}
	return "", 0, 0, fmt.Errorf("its argument %s is of type %s: a GPU takes numbers, cuda.Slice, and arrays and structs of them", path, t)
}

// cType is an element type in C++. Those of 16 and 8 bits without a type of the language are their bits.
func cType(t DType) string {
	return map[DType]string{Int8DType: "signed char", Uint8DType: "unsigned char", Int32DType: "int", Uint32DType: "unsigned", Int64DType: "long long",
		Uint64DType: "unsigned long long", Float16DType: "unsigned short", BFloat16DType: "unsigned short", Float32DType: "float", Float64DType: "double",
		F8E4M3DType: "unsigned char", F8E5M2DType: "unsigned char"}[t]
}

// cScalar is a Go number in C++, and its size.
func cScalar(t reflect.Type) (string, uintptr) {
	switch t {
	case reflect.TypeFor[Float16](), reflect.TypeFor[BFloat16]():
		return "unsigned short", 2
	case reflect.TypeFor[F8E4M3](), reflect.TypeFor[F8E5M2]():
		return "unsigned char", 1
	}
	name := map[reflect.Kind]string{reflect.Bool: "bool", reflect.Int8: "signed char", reflect.Uint8: "unsigned char", reflect.Int16: "short",
		reflect.Uint16: "unsigned short", reflect.Int32: "int", reflect.Uint32: "unsigned", reflect.Int64: "long long", reflect.Uint64: "unsigned long long",
		reflect.Int: "long long", reflect.Uint: "unsigned long long", reflect.Float32: "float", reflect.Float64: "double"}[t.Kind()]
	return name, t.Size()
}

// fill writes the arguments as C has them.
func (l *argLayout) fill(block []byte, args unsafe.Pointer, d *Device) error {
	for i := range l.parts {
		p := &l.parts[i]
		from, to := unsafe.Add(args, p.from), unsafe.Pointer(&block[p.to])
		if p.element == 0 {
			copy(unsafe.Slice((*byte)(to), p.size), unsafe.Slice((*byte)(from), p.size))
			continue
		}
		s := (*Slice[uint8])(from) // every Slice has this form
		out := (*struct {
			ptr uintptr
			n   int64
		})(to)
		out.ptr, out.n = 0, int64(s.n)
		if s.mem == nil {
			continue
		}
		if s.mem.dev != d {
			return fmt.Errorf("%s is memory of another device", p.name)
		}
		if s.mem.gone.Load() {
			return fmt.Errorf("%s is in %s, which was freed: %w", p.name, s.mem, ErrIllegalAddress)
		}
		out.ptr = uintptr(s.mem.ptr) + uintptr(s.off)
	}
	return nil
}
