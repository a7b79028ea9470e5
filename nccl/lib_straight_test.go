package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// Which calls go straight: those of which nothing is to be said.
func TestLibraryStraight(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		defer dev.Close()
		err = withComm(ctx, job, dev, &nccl.Config{Name: "strict", Check: nccl.Strict}, func(w *world) error { return straights(w, false) })
		if err != nil {
			return err
		}
		return withComm(ctx, job, dev, nil, func(w *world) error {
			if err := straights(w, true); err != nil {
				return err
			}
			if err := errors.Join(w.job.Barrier(w.ctx), w.comm.Abort(nil)); err != nil { // one would end the other
				return err
			}
			return straights(w, false)
		})
	}, fakeLibraries(t)...))
}

// straights asks for calls of each kind; working says whether the communicator lets any go straight.
func straights(w *world, working bool) error {
	b, done, err := openBuffers(w, 4096, false)
	defer done()
	if err != nil {
		return err
	}
	gone, err := freedRange(w)
	if err != nil {
		return err
	}
	good := nccl.Call{Op: nccl.OpAllReduce, Type: cuda.Float32DType, Count: 8, Send: cuda.Range{Mem: b.send, Len: 32}, Recv: cuda.Range{Mem: b.recv, Len: 32}, Stream: w.stream}
	with := func(change func(c *nccl.Call)) nccl.Call {
		c := good
		change(&c)
		return c
	}
	var wrong []error
	want := func(what string, call nccl.Call, want bool) {
		if got := nccl.GoesStraight(w.comm, call); got != (want && working) {
			wrong = append(wrong, fmt.Errorf("%s: goes straight: %t", what, got))
		}
	}
	for _, op := range collectives {
		want(op.String(), with(func(c *nccl.Call) { c.Op = op }), true)
	}
	want("in place", with(func(c *nccl.Call) { c.Recv = c.Send }), true)
	want("root 1", with(func(c *nccl.Call) { c.Op, c.Root = nccl.OpReduce, 1 }), true)
	want("bfloat16", with(func(c *nccl.Call) { c.Type = cuda.BFloat16DType }), true)
	for _, c := range []struct {
		what   string
		change func(c *nccl.Call)
	}{
		{"overlapping", func(c *nccl.Call) { c.Recv = cuda.Range{Mem: b.send, Off: 4, Len: 32} }},
		{"no elements", func(c *nccl.Call) { c.Count = 0 }},
		{"send", func(c *nccl.Call) { c.Op = nccl.OpSend }},
		{"recv", func(c *nccl.Call) { c.Op = nccl.OpRecv }},
		{"root 2", func(c *nccl.Call) { c.Op, c.Root = nccl.OpBroadcast, 2 }},
		{"root -1", func(c *nccl.Call) { c.Op, c.Root = nccl.OpBroadcast, -1 }},
		{"reduction that is none", func(c *nccl.Call) { c.Red = nccl.Avg + 1 }},
		{"type that is none", func(c *nccl.Call) { c.Type = 0 }},
		{"no stream", func(c *nccl.Call) { c.Stream = nil }},
		{"freed memory received", func(c *nccl.Call) { c.Recv = gone }},
		{"freed memory sent", func(c *nccl.Call) { c.Send = gone }},
	} {
		want(c.what, with(c.change), false)
	}
	if !working {
		return errors.Join(wrong...)
	}
	nccl.Group(func() error {
		want("in a group", good, false)
		return nil
	}, w.comm)
	if err := inCaptureAndRegistered(w, b.send, func(what string) { want(what, good, false) }); err != nil {
		return err
	}
	want("after it", good, true)
	return errors.Join(wrong...)
}

// freedRange is of memory that is there no more.
func freedRange(w *world) (cuda.Range, error) {
	freed, err := nccl.Alloc[float32](w.dev, 8)
	if err != nil {
		return cuda.Range{}, err
	}
	gone := freed.All().Range()
	return gone, freed.Free()
}

// inCaptureAndRegistered calls ask in a capture, and then while memory is registered.
func inCaptureAndRegistered(w *world, mem *cuda.Memory, ask func(what string)) error {
	_, err := graphs.Capture(w.ctx, w.stream, func(*cuda.Stream) error {
		ask("captured")
		return errors.New("no graph")
	}, graphs.Comms(w.comm))
	if err == nil {
		return errors.New("a capture that fails gave no error")
	}
	reg, err := w.comm.Register(mem)
	if err != nil {
		return err
	}
	ask("with a registration")
	return reg.Close()
}
