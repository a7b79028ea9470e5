package nccl

import (
	"errors"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl/internal/ncclsys"
	"github.com/gorun-dev/gorun/rankenv/gpulib"
)

// A pre-multiplied sum of one rank is no copy. On a GPU the library carries it out, with a communicator of one that the first such reduction makes.

func (a *alone) makeRed(t cuda.DType, scalar uint64) (op ncclsys.RedOp, err error) {
	if a.c.dev.Platform() == cuda.Host {
		return 0, nil
	}
	if a.lib == nil {
		if err := a.openLibrary(); err != nil {
			return 0, err
		}
	}
	lt, err := a.lib.redType(t)
	if err != nil {
		return 0, err
	}
	return a.lib.createRed(lt, scalar)
}

func (a *alone) destroyRed(op ncclsys.RedOp) error {
	if a.lib == nil {
		return nil
	}
	return result(a.lib.sys.RedOpDestroy(op, a.lib.main))
}

func (a *alone) openLibrary() error {
	v := vendorOf(a.c.dev.Platform())
	sys, err := openLibrary(v)
	if err != nil {
		return err
	}
	if _, err := gpulib.CheckSettings(v.Settings(), v.Lookup(), false); err != nil {
		return err
	}
	l := &library{c: a.c, sys: sys}
	err = l.onThread(func() error {
		id, err := sys.GetUniqueID()
		if err != nil {
			return err
		}
		var cfg *ncclsys.Config
		if sys.Need(ncclsys.NonBlocking) == nil {
			cfg = ncclsys.NewConfig()
			cfg.Blocking, cfg.CommName = 1, a.c.name
		}
		p, err := sys.CommInitRank(1, id, 0, cfg)
		if err == nil {
			l.main = p.Handle()
		}
		if p != nil {
			p.Done()
		}
		return err
	})
	if err != nil {
		return err
	}
	if l.main == 0 {
		return errors.New("NCCL_COMM_BLOCKING=0 does not go with a pre-multiplied sum of one rank")
	}
	a.lib = l
	return nil
}

// scale enqueues the reduction of one rank.
func (a *alone) scale(call *Call) error {
	m := a.c.madeOp(call.Red)
	if a.lib == nil {
		return call.Stream.Submit(&scaleTask{typ: m.typ, scalar: [1]uint64{m.scalar}, send: call.Send, recv: call.Recv})
	}
	b := a.c.dev.BindRelaxed()
	defer b.Release()
	if err := b.Err(); err != nil {
		return err
	}
	return result(a.lib.sys.AllReduce(ncclsys.DevicePtr(call.Send.Pointer()), ncclsys.DevicePtr(call.Recv.Pointer()), call.Count, libTypes[call.Type], m.lib,
		a.lib.main, ncclsys.Stream(call.Stream.Handle())))
}

// closeLibrary waits for what is enqueued as little as Close of a communicator of one does: these calls keep nothing of it.
func (a *alone) closeLibrary() {
	if a.lib != nil && a.c.dev.Err() == nil {
		a.lib.onThread(func() error { return a.lib.sys.CommDestroy(a.lib.main) }) // it is gone either way
	}
	a.lib = nil
}

// scaleTask is a pre-multiplied sum of one rank on the host platform.
type scaleTask struct {
	typ        cuda.DType
	scalar     [1]uint64
	send, recv cuda.Range
	acc        []byte
}

func (t *scaleTask) Start() {}

func (t *scaleTask) Step() (bool, error) {
	if t.acc == nil {
		t.acc = make([]byte, accSize)
	}
	reduce(t.typ, Sum, 1, t.scalar[:], [][]byte{t.recv.Bytes()}, [][]byte{t.send.Bytes()}, t.acc)
	return true, nil
}
