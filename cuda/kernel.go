package cuda

import (
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"unsafe"
)

// Grid is the shape of a launch in one dimension: N items. On a GPU they are covered by blocks of Block threads (0: 256).
type Grid struct {
	N     int
	Block int
}

// KernelSpec is a kernel as source: CUDA C++ for GPUs, a Go function for the host. A is one struct of arguments for both.
type KernelSpec[A any] struct {
	Name string
	// CUDA is compiled when the kernel is loaded, for the device, once a process. It defines
	//
	//	extern "C" __global__ void NAME(NAME_args a, long long n)
	//
	// where n is Grid.N: threads with blockIdx.x*blockDim.x+threadIdx.x >= n have nothing to do. The struct NAME_args is made from A: its fields in order by their
	// names, bool and numbers as their equals in C (int and uint have 64 bits), a Slice[T] as struct{ T *ptr; long long n; } that can be indexed,
	// arrays and structs of these. Float16, BFloat16 and the 8-bit floats are their bits: unsigned short, unsigned char. Nothing else can be a field.
	CUDA string
	// PTX is the same compiled already, for machines without the run-time compiler and kernels without CUDA; the driver makes code of it.
	PTX string
	// Host does items lo to hi-1; the host platform calls it from several goroutines with disjoint parts, of sizes that it chooses itself.
	// It may not wait for anything.
	Host func(g Grid, lo, hi int, a A)
}

// Kernel is a kernel loaded for a device.
type Kernel[A any] struct {
	dev  *Device
	spec KernelSpec[A]
	raw  platformKernel // nil: the Host function is run
	pool taskPool[kernelTask[A]]

	boxes taskPool[A]  // arguments on their way to raw
	pace  atomic.Int64 // measured picoseconds an item, 0 before the first run
}

// NewKernel loads a kernel. It needs no closing.
func NewKernel[A any](d *Device, spec KernelSpec[A]) (*Kernel[A], error) {
	op := "load kernel " + spec.Name
	if spec.Name == "" {
		return nil, &Error{Op: op, Err: errors.New("it has no name")}
	}
	if err := d.Err(); err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	raw, err := d.plat.loadKernel(spec.Name, kernelSource{spec.CUDA, spec.PTX}, reflect.TypeFor[A]())
	if err != nil {
		return nil, &Error{Op: op, Err: err}
	}
	if raw == nil && spec.Host == nil {
		return nil, &Error{Op: op, Err: errors.New("it has no Host function, which the host platform runs")}
	}
	return &Kernel[A]{dev: d, spec: spec, raw: raw}, nil
}

// Launch enqueues it. A panic in the Host function becomes the device's sticky error, with the kernel's name, and the stack on %+v. The arguments are
// copied; what they point to must stay until the kernel has run.
func (k *Kernel[A]) Launch(s *Stream, g Grid, a A) error {
	op := k.spec.Name
	switch {
	case g.N < 0 || g.Block < 0:
		return &Error{Op: "launch kernel", Detail: op, Err: fmt.Errorf("grid of %d items in blocks of %d", g.N, g.Block)}
	case k.dev != s.dev:
		return &Error{Op: "launch kernel", Detail: op, Err: errors.New("the stream belongs to another device")}
	}
	if g.Block == 0 {
		g.Block = 256
	}
	if k.raw != nil {
		return k.launchRaw(s, g, a)
	}
	t := k.pool.get()
	h := s.raw.(*hostStream)
	t.k, t.grid, t.args = k, g, a
	t.run.init(h.h, k.spec.Name, g.N, &k.pace, t)
	return h.enqueue("launch kernel", entry{task: t}, t)
}

// launchRaw gives the platform the arguments in memory that is used again, because their address escapes.
func (k *Kernel[A]) launchRaw(s *Stream, g Grid, a A) error {
	box := k.boxes.get()
	*box = a
	err := k.raw.launch(s.raw, g, unsafe.Pointer(box))
	var none A
	*box = none
	k.boxes.put(box)
	return err
}

// kernelTask is one launch on the host.
type kernelTask[A any] struct {
	k      *Kernel[A]
	grid   Grid
	args   A
	run    kernelRun
	pooled bool
}

func (t *kernelTask[A]) setPooled() { t.pooled = true }

func (t *kernelTask[A]) part(lo, hi int) { t.k.spec.Host(t.grid, lo, hi, t.args) }

func (t *kernelTask[A]) Start() { t.run.start() }

func (t *kernelTask[A]) Step() (bool, error) {
	if !t.run.step() {
		return false, nil
	}
	if k := t.k; t.pooled {
		var none A
		t.k, t.args, t.pooled = nil, none, false
		k.pool.put(t)
	}
	return true, nil
}

// Cancel does not put the task back: a goroutine may still be in the Host function.
func (t *kernelTask[A]) Cancel(error) { t.run.cancel() }

func (t *kernelTask[A]) String() string { return "kernel " + t.k.spec.Name }
