package nccl

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
)

// maxMade is how many reductions a communicator has at most at a time: a record tells them apart by a byte.
const maxMade = 256 - firstMade

// firstMade is the number of the first reduction that a communicator can make.
const firstMade = uint32(Avg) + 1

// madeOp is a reduction that the communicator has made.
type madeOp struct {
	op     RedOp // 0: none
	typ    cuda.DType
	scalar uint64 // its bits, in the low bytes
	lib    ncclsys.RedOp
}

// PreMulSum makes a reduction of the communicator: the sum of each rank's elements times that rank's scalar. The scalars of the ranks may differ, their type is
// that of the data. All members make and destroy theirs in the same order: calls compare which one it is. Local: it waits for nobody, and is no call of
// the communicator. It lasts until DestroyRedOp, or Close. Integers wrap around; 16-bit and 8-bit floats are multiplied and summed in float32 on the host
// platform, and as the library does it elsewhere. errors.Is finds ErrUnsupported where the library is too old (NCCL 2.11.4 has it).
//
// Libraries do not use registered buffers in calls with it: registration is no gain there, and captured calls have mode Plain.
func PreMulSum[T cuda.Element](c *Comm, scalar T) (RedOp, error) {
	var bits uint64
	*(*T)(unsafe.Pointer(&bits)) = scalar
	return c.makeOp(cuda.DTypeOf[T](), bits)
}

func (c *Comm) makeOp(t cuda.DType, scalar uint64) (RedOp, error) {
	const what = "make a pre-multiplied sum"
	if err := c.usable(); err != nil {
		return 0, c.errorf(what, err)
	}
	if c.made == nil {
		c.made = make([]madeOp, maxMade)
	}
	// The numbers go round, so that one that was destroyed is not taken for the next.
	at := -1
	for i := range maxMade {
		if k := (c.madeCount + i) % maxMade; c.made[k].op == 0 {
			at = int(k)
			break
		}
	}
	if at < 0 {
		return 0, c.errorf(what, causef(ErrArgument, "there are %d reductions: destroy some", maxMade))
	}
	m := madeOp{typ: t, scalar: scalar}
	if maker, ok := c.be.(redMaker); ok {
		var err error
		if m.lib, err = maker.makeRed(t, scalar); err != nil {
			return 0, c.errorf(what+" of "+t.String(), err)
		}
	}
	c.madeCount = uint32(at) + 1
	c.madeEver++
	// The upper bits tell the communicators and the lives of a number apart.
	m.op = RedOp(uint32(fnv64(fnv64(fnvOffset, c.id), c.madeEver))|1<<31)&^0xff | RedOp(firstMade+uint32(at))
	c.made[at] = m
	return m.op, nil
}

// DestroyRedOp ends a reduction that PreMulSum made. Calls that are enqueued or captured keep it.
func (c *Comm) DestroyRedOp(op RedOp) error {
	const what = "destroy a reduction"
	if c == nil {
		return c.errorf(what, errNoComm)
	}
	m := c.madeOp(op)
	if m == nil {
		return c.errorf(what, causef(ErrArgument, "%s", c.unknownRed(op)))
	}
	lib := m.lib
	*m = madeOp{}
	if maker, ok := c.be.(redMaker); ok && c.usable() == nil {
		if err := maker.destroyRed(lib); err != nil {
			return c.errorf(what, err)
		}
	}
	return nil
}

// redMaker is a backend that has to know of reductions.
type redMaker interface {
	makeRed(t cuda.DType, scalar uint64) (ncclsys.RedOp, error)
	destroyRed(op ncclsys.RedOp) error
}

// madeOp is the reduction of this number, nil if this communicator has not made it, or has destroyed it.
func (c *Comm) madeOp(op RedOp) *madeOp {
	at := int(uint32(op)&0xff) - int(firstMade)
	if at < 0 || at >= len(c.made) || c.made[at].op != op {
		return nil
	}
	return &c.made[at]
}

// checkRed is what is wrong with a call's reduction, "" if nothing.
func (c *Comm) checkRed(call *Call) string {
	m := c.madeOp(call.Red)
	switch {
	case m == nil:
		return c.unknownRed(call.Red)
	case !call.Op.reduces():
		return fmt.Sprintf("a reduction (%v) in a call that has none", call.Red)
	case m.typ != call.Type:
		return fmt.Sprintf("%v was made for %v, the data is %v", call.Red, m.typ, call.Type)
	}
	return ""
}

func (c *Comm) unknownRed(op RedOp) string {
	if op.PreMultiplied() {
		return fmt.Sprintf("%v is not of communicator %s, or was destroyed", op, c.name)
	}
	return fmt.Sprintf("unknown reduction %d", uint32(op))
}

// PreMultiplied reports whether it is one of PreMulSum's.
func (o RedOp) PreMultiplied() bool { return o>>31 != 0 } // what a record tells has no upper bits

// makeRed makes the library's. Local there, too.
func (l *library) makeRed(t cuda.DType, scalar uint64) (ncclsys.RedOp, error) {
	lt, err := l.redType(t)
	if err != nil {
		return 0, err
	}
	l.mu.Lock()
	defer l.unlock()
	if err := l.enter(); err != nil {
		return 0, err
	}
	defer l.leave()
	return l.createRed(lt, scalar)
}

// redType is the library's type for a pre-multiplied sum.
func (l *library) redType(t cuda.DType) (ncclsys.DataType, error) {
	if err := l.sys.Need(ncclsys.PreMulSum); err != nil {
		return 0, errors.Join(ErrUnsupported, err)
	}
	return l.typeOf(&Call{Op: OpAllReduce, Type: t})
}

func (l *library) createRed(t ncclsys.DataType, scalar uint64) (ncclsys.RedOp, error) {
	op, err := l.sys.RedOpCreatePreMulSum(unsafe.Pointer(&scalar), t, ncclsys.OnHost, l.main)
	return op, result(err)
}

func (l *library) destroyRed(op ncclsys.RedOp) error {
	l.mu.Lock()
	defer l.unlock()
	if err := l.enter(); err != nil {
		return nil // it goes with the communicator
	}
	defer l.leave()
	return result(l.sys.RedOpDestroy(op, l.main))
}

// redOf is the library's number of a call's reduction.
func (l *library) redOf(op RedOp) ncclsys.RedOp {
	if op <= Avg {
		return libReds[op]
	}
	return l.c.madeOp(op).lib // validate has looked
}
