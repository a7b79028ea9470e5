package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// TestRandomAborts aborts a communicator on a goroutine of its own, at a random moment of a program that captures, replays, registers and divides it, while others look at it. It
// is for the race detector most of all: whatever the program is in ends with the abort, everything can be closed, and the next communicator works.
func TestRandomAborts(t *testing.T) {
	t.Run("library", func(t *testing.T) { everywhere(t, abortRounds, noWindows) })
	t.Run("peer memory", func(t *testing.T) { onDevices(t, elements, abortRounds, noWindows, "GORUN_PEER=auto") })
	t.Run("hosts", func(t *testing.T) { onHosts(t, abortRounds) })
}

func abortRounds(ctx context.Context, r *rank) error {
	rounds := uint64(12)
	if !r.job.InProcess() {
		rounds = 4
	}
	seconds, _ := strconv.Atoi(os.Getenv("GORUN_TEST_STRESS"))
	first := uint64(1)
	if v := os.Getenv("GORUN_TEST_SEED"); v != "" {
		first, _ = strconv.ParseUint(v, 10, 64)
	}
	start := time.Now()
	for i := uint64(0); ; i++ {
		on := []byte{0}
		if i < rounds || time.Since(start) < time.Duration(seconds)*time.Second {
			on[0] = 1
		}
		all, err := r.job.AllGather(ctx, on)
		if err != nil {
			return err
		}
		if all[0][0] == 0 {
			return r.works(ctx, r.comm)
		}
		if err := abortRound(ctx, r, first+i); err != nil {
			return fmt.Errorf("seed %d: %w", first+i, err)
		}
	}
}

// abortRound is one communicator's life.
func abortRound(ctx context.Context, r *rank, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 1)) // the program's: the same on all ranks
	own := rand.New(rand.NewPCG(seed, uint64(r.job.Rank())+2))
	c, err := nccl.InitConfig(ctx, r.job, r.dev, &nccl.Config{Name: fmt.Sprint("round ", seed)})
	if err != nil {
		return err
	}
	s, err := r.dev.NewStream()
	if err != nil {
		return err
	}
	var bufs [3]*cuda.Buffer[float32]
	for i := range bufs {
		kind := cuda.Shareable
		if i == 2 {
			kind = cuda.Private
		}
		if bufs[i], err = cuda.AllocBuffer[float32](r.dev, 256, kind); err != nil {
			return err
		}
	}
	p := &abortProgram{ctx: ctx, rng: rng, own: own, c: c, s: s, bufs: bufs[:]}

	culprit, delay := rng.IntN(r.job.Size()), time.Duration(own.IntN(4000))*time.Microsecond
	over, looked, aborted := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(looked)
		for {
			select {
			case <-over:
				return
			case <-time.After(50 * time.Microsecond):
			}
			c.Err()
			c.Stats()
		}
	}()
	go func() {
		defer close(aborted)
		if r.job.Rank() == culprit {
			time.Sleep(delay) // any moment will do
			c.Abort(errOwn)
		}
	}()
	for err = nil; err == nil; {
		err = p.step()
	}
	<-aborted
	close(over)
	<-looked
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("the program was not ended: %w", err)
	}
	if cause := eventually(ctx, func() error { // what was made of it may have failed first
		if cause := c.Err(); !errors.Is(cause, nccl.ErrAborted) {
			return fmt.Errorf("communicator: %w", cause)
		}
		return nil
	}); cause != nil {
		return fmt.Errorf("the program ended with %w, the %w", err, cause)
	}
	err = nil
	if seed%3 == 0 {
		var again *nccl.Comm
		if again, err = c.Shrink(ctx, nil); err == nil {
			err = errors.Join(r.works(ctx, again), again.Close())
		}
	}
	err = errors.Join(err, p.close(), c.Close(), s.Close(), r.job.Barrier(ctx))
	for _, b := range bufs {
		err = errors.Join(err, b.Free())
	}
	return err
}

// abortProgram makes random calls until one fails.
type abortProgram struct {
	ctx  context.Context
	rng  *rand.Rand // the same on all ranks
	own  *rand.Rand
	c    *nccl.Comm
	s    *cuda.Stream
	bufs []*cuda.Buffer[float32]

	graphs  []*graphs.Graph
	regs    []*nccl.Registration
	windows []*nccl.SymmetricWindow
	parts   []*nccl.Comm
}

// calls makes one to three collectives or messages.
func (p *abortProgram) calls(s *cuda.Stream) error {
	call := func() error {
		a, b := p.bufs[p.rng.IntN(len(p.bufs))], p.bufs[p.rng.IntN(len(p.bufs))]
		n := 1 + p.rng.IntN(64)
		size, me := p.c.Size(), p.c.Rank()
		switch p.rng.IntN(3) {
		case 0:
			return nccl.AllReduce(p.c, a.Slice(0, n), b.Slice(0, n), nccl.Sum, s)
		case 1:
			return nccl.Broadcast(p.c, a.Slice(0, n), b.Slice(0, n), p.rng.IntN(size), s)
		}
		return nccl.Group(func() error {
			return errors.Join(nccl.Send(p.c, a.Slice(0, n), (me+1)%size, s), nccl.Recv(p.c, a.Slice(128, 128+n), (me+size-1)%size, s))
		}, p.c)
	}
	for range 1 + p.rng.IntN(3) {
		if err := call(); err != nil {
			return err
		}
	}
	return nil
}

func (p *abortProgram) step() (err error) {
	if p.own.IntN(4) == 0 {
		runtime.Gosched()
	}
	switch p.rng.IntN(12) {
	case 0, 1, 2:
		var g *graphs.Graph
		if g, err = graphs.Capture(p.ctx, p.s, p.calls, graphs.Comms(p.c)); err == nil {
			p.graphs = append(p.graphs, g)
		}
	case 3, 4:
		if len(p.graphs) > 0 {
			err = p.graphs[p.rng.IntN(len(p.graphs))].Launch(p.s)
		}
	case 5:
		if n := len(p.graphs); n > 0 {
			err = p.graphs[n-1].Close()
			p.graphs = p.graphs[:n-1]
		}
	case 6:
		err = p.s.Synchronize(p.ctx)
	case 7:
		if n := len(p.regs); n > 0 {
			if err = errors.Join(p.s.Synchronize(p.ctx), p.c.Drain(p.ctx)); err == nil {
				err = p.regs[n-1].Close()
				p.regs = p.regs[:n-1]
			}
			break
		}
		for _, b := range p.bufs[:2] {
			var reg *nccl.Registration
			if reg, err = p.c.Register(b.Memory()); err != nil {
				break
			}
			p.regs = append(p.regs, reg)
		}
	case 8:
		var part *nccl.Comm
		if part, err = p.c.Split(p.ctx, 0, 0); err == nil {
			p.parts = append(p.parts, part)
		}
	case 9:
		if n := len(p.windows); n > 0 {
			if err = p.s.Synchronize(p.ctx); err == nil {
				err = p.windows[n-1].Close(p.ctx)
				p.windows = p.windows[:n-1]
			}
			break
		}
		if p.c.Device().Platform() != cuda.Host {
			break // replays in windows do not end with an abort before NCCL 2.30.7
		}
		var w *nccl.SymmetricWindow
		if w, err = p.c.Window(p.ctx, p.bufs[0].All().Range()); err == nil {
			p.windows = append(p.windows, w)
		}
	case 11: // lost, which Drain finds when the collector has
		if n := len(p.graphs); n > 0 {
			p.graphs[n-1] = nil
			p.graphs = p.graphs[:n-1]
		}
		runtime.GC()
		err = p.c.Drain(p.ctx)
	case 10: // not registered, whatever else is
		some := p.bufs[2].Slice(0, 1+p.rng.IntN(256))
		err = nccl.AllReduce(p.c, some, some, nccl.Sum, p.s)
	}
	if err == nil {
		err = p.c.Err()
	}
	return err
}

func (p *abortProgram) close() (err error) {
	for _, g := range p.graphs {
		err = errors.Join(err, g.Close())
	}
	for _, w := range p.windows {
		err = errors.Join(err, w.Close(p.ctx))
	}
	for _, reg := range p.regs {
		err = errors.Join(err, reg.Close())
	}
	for _, c := range p.parts {
		err = errors.Join(err, c.Close())
	}
	return err
}
