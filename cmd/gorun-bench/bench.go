package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// bencher is a rank that measures.
type bencher struct {
	*config
	job     *bootstrap.Job
	dev     *cuda.Device
	stream  *cuda.Stream
	comm    *nccl.Comm
	out     *report
	checked int // measurements
	wrong   int // of them, on any rank
}

var redOps = map[string]nccl.RedOp{"sum": nccl.Sum, "min": nccl.Min, "max": nccl.Max}

// types are the programs for each element type.
var (
	types = map[string]func(context.Context, *bencher) error{
		"int8": measure[int8], "uint8": measure[uint8], "int32": measure[int32], "uint32": measure[uint32], "int64": measure[int64], "uint64": measure[uint64],
		"float16": measure[cuda.Float16], "bfloat16": measure[cuda.BFloat16], "float32": measure[float32], "float64": measure[float64],
	}
	typeNames = []string{"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"}
)

// measure goes through all series.
func measure[T cuda.Element](ctx context.Context, b *bencher) error {
	for _, s := range b.series() {
		if err := measureSeries[T](ctx, b, s); err != nil {
			return err
		}
	}
	return nil
}

// buffers are a series' memory, large enough for all its sizes.
type buffers[T cuda.Element] struct {
	send, recv *cuda.Buffer[T]
	first      int            // element at which this rank's data begins
	ends       []func() error // what is to be closed before the memory is freed, the last first
}

// errNoWindow is on all ranks alike.
var errNoWindow = errors.New("the communicator has no windows")

func newBuffers[T cuda.Element](ctx context.Context, b *bencher, s series) (_ *buffers[T], err error) {
	elem := uint64(cuda.DTypeOf[T]().Size())
	n := 0
	for _, bytes := range b.sizes() {
		send, recv, _ := shape(s.op, bytes, elem, b.comm.Size())
		n = max(n, send, recv)
	}
	m := &buffers[T]{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	alloc := cuda.Malloc[T]
	if s.mode != "plain" {
		alloc = nccl.Alloc[T]
		if s.mode != "window" {
			// Different offsets on the ranks: else a captured call would use a window, too.
			m.first = b.comm.Rank() * int(256/elem)
		}
	}
	if m.send, err = alloc(b.dev, m.first+n); err != nil {
		return nil, err
	}
	if !s.inPlace {
		if m.recv, err = alloc(b.dev, m.first+n); err != nil {
			return nil, err
		}
	}
	eagerWindow := s.mode == "window" && !s.captured
	for _, buf := range []*cuda.Buffer[T]{m.send, m.recv} {
		if buf == nil || s.mode != "local" && !eagerWindow {
			continue
		}
		reg, err := b.comm.Register(buf.Memory())
		if err != nil {
			return nil, err
		}
		m.ends = append(m.ends, reg.Close)
		if !eagerWindow {
			continue
		}
		win, err := b.comm.Window(ctx, buf.All().Range())
		if err != nil {
			return nil, err
		}
		if win == nil {
			if _, why := b.comm.WindowSupport(); why != "" {
				return nil, fmt.Errorf("%w: %s", errNoWindow, why)
			}
			return nil, fmt.Errorf("%w: another rank's platform has none", errNoWindow)
		}
		m.ends = append(m.ends, func() error { return win.Close(context.WithoutCancel(ctx)) })
	}
	return m, nil
}

func (m *buffers[T]) close() error {
	var errs []error
	for _, end := range slices.Backward(m.ends) {
		errs = append(errs, end())
	}
	for _, buf := range []*cuda.Buffer[T]{m.send, m.recv} {
		if buf != nil {
			errs = append(errs, buf.Free())
		}
	}
	return errors.Join(errs...)
}

// call is one operation on slices of the right lengths.
type call[T cuda.Element] struct {
	b          *bencher
	s          series
	send, recv cuda.Slice[T]
}

func newCall[T cuda.Element](b *bencher, s series, m *buffers[T], bytes uint64) *call[T] {
	send, recv, _ := shape(s.op, bytes, uint64(cuda.DTypeOf[T]().Size()), b.comm.Size())
	c := &call[T]{b: b, s: s}
	if !s.inPlace {
		c.send, c.recv = m.send.Slice(m.first, m.first+send), m.recv.Slice(m.first, m.first+recv)
		return c
	}
	all := m.send.Slice(m.first, m.first+max(send, recv))
	c.send, c.recv = all, all
	switch r := b.comm.Rank(); s.op {
	case "all-gather":
		c.send = all.Slice(r*send, (r+1)*send)
	case "reduce-scatter":
		c.recv = all.Slice(r*recv, (r+1)*recv)
	}
	return c
}

// issue enqueues the operation once.
func (c *call[T]) issue(s *cuda.Stream) error {
	comm := c.b.comm
	switch c.s.op {
	case "all-reduce":
		return nccl.AllReduce(comm, c.send, c.recv, redOps[c.b.red], s)
	case "all-gather":
		return nccl.AllGather(comm, c.send, c.recv, s)
	case "reduce-scatter":
		return nccl.ReduceScatter(comm, c.send, c.recv, redOps[c.b.red], s)
	case "broadcast":
		return nccl.Broadcast(comm, c.send, c.recv, c.b.root, s)
	case "sendrecv":
		n := comm.Size()
		return nccl.Group(func() error {
			return errors.Join(nccl.Send(comm, c.send, (comm.Rank()+1)%n, s), nccl.Recv(comm, c.recv, (comm.Rank()+n-1)%n, s))
		}, comm)
	}
	return fmt.Errorf("unknown operation %s", c.s.op)
}

// capture puts n of the call into a graph that runs in the series' mode.
func (c *call[T]) capture(ctx context.Context, n int) (*graphs.Graph, error) {
	mode := map[string]nccl.Mode{"plain": nccl.Plain, "local": nccl.Local, "graph": nccl.Graph, "window": nccl.Window}[c.s.mode]
	return graphs.Capture(ctx, c.b.stream, func(s *cuda.Stream) error {
		for range n {
			if err := c.issue(s); err != nil {
				return err
			}
		}
		return nil
	}, graphs.Comms(c.b.comm), graphs.Require(mode), graphs.Name(c.s.op))
}

func measureSeries[T cuda.Element](ctx context.Context, b *bencher, s series) (err error) {
	m, err := newBuffers[T](ctx, b, s)
	if errors.Is(err, errNoWindow) {
		b.out.skipped(s, err)
		return nil
	}
	if err != nil {
		return fmt.Errorf("buffers for %s, %s: %w", s.op, s.mode, err)
	}
	defer func() { err = errors.Join(err, m.close()) }()
	last := uint64(0)
	for _, bytes := range b.sizes() {
		_, _, size := shape(s.op, bytes, uint64(cuda.DTypeOf[T]().Size()), b.comm.Size())
		if size == last { // too small to be divided among the ranks
			continue
		}
		last = size
		p, err := measurePoint(ctx, b, s, newCall(b, s, m, bytes))
		if errors.Is(err, graphs.ErrMode) { // on all ranks alike
			b.out.skipped(s, err)
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s of %d bytes, %s, %s: %w", s.op, size, s.mode, s.calls(), err)
		}
		if err := b.out.point(s, p); err != nil {
			return err
		}
	}
	return nil
}

// point is a measurement.
type point struct {
	size    uint64
	count   int       // elements, as NCCL counts them
	mode    string    // that captured calls have
	n       int       // calls or launches in a round
	us      []float64 // a call, of each round
	checked bool
	wrong   int // elements, on all ranks
}

func measurePoint[T cuda.Element](ctx context.Context, b *bencher, s series, c *call[T]) (p point, err error) {
	elem := cuda.DTypeOf[T]().Size()
	p.count = min(c.send.Len(), c.recv.Len())
	p.size = uint64(max(c.send.Len(), c.recv.Len()) * elem)
	enqueue, perCall := func() error { return c.issue(b.stream) }, 1
	if s.captured {
		g, err := c.capture(ctx, b.perGraph)
		if err != nil {
			return p, err
		}
		defer func() { err = errors.Join(err, b.release(ctx, g)) }()
		p.mode = g.Calls()[0].Mode.String()
		enqueue, perCall = func() error { return g.Launch(b.stream) }, b.perGraph
	}
	// In place, the next call works on the last one's result; zeros stay zeros, and no number becomes one that is slow to add.
	if err := errors.Join(b.stream.Memset(c.send.Range(), 0), b.stream.Memset(c.recv.Range(), 0)); err != nil {
		return p, err
	}
	timed := func(n int) (float64, error) {
		start := time.Now()
		for range n {
			if err := enqueue(); err != nil {
				return 0, err
			}
		}
		err := b.stream.Synchronize(ctx)
		return float64(time.Since(start).Nanoseconds()) / 1e3 / float64(n*perCall), err
	}
	// The first call connects the ranks; those after it say how long one takes.
	if _, err := timed(1); err != nil {
		return p, err
	}
	guess, err := timed(max(1, b.warmUp))
	if err != nil {
		return p, err
	}
	guesses, err := b.gather(ctx, []float64{guess})
	if err != nil {
		return p, err
	}
	p.n = roundLength(b.n, b.limit, slices.Max(guesses[0])*float64(perCall))
	mine := make([]float64, b.rounds)
	for i := range mine {
		if err := b.job.Barrier(ctx); err != nil {
			return p, err
		}
		if _, err := timed(1); err != nil { // brings the ranks closer together than the barrier
			return p, err
		}
		if mine[i], err = timed(p.n); err != nil {
			return p, err
		}
	}
	rounds, err := b.gather(ctx, mine)
	if err != nil {
		return p, err
	}
	for _, r := range rounds {
		p.us = append(p.us, mean(r))
	}
	if b.check {
		if p.wrong, err = checkCall(ctx, b, s, c, enqueue); err != nil {
			return p, err
		}
		p.checked = true
		b.checked++
		if p.wrong > 0 {
			b.wrong++
		}
	}
	return p, nil
}

// release closes a graph and has its registrations given back, so that the next size begins as this one did.
func (b *bencher) release(ctx context.Context, g *graphs.Graph) error {
	if err := g.Close(); err != nil {
		return err
	}
	return b.comm.Drain(ctx)
}

// roundLength is how many calls of so many microseconds fit into the limit: at least one, at most n.
func roundLength(n int, limit time.Duration, us float64) int {
	fit := float64(limit.Microseconds()) / max(us, 1e-3)
	return int(max(1, min(float64(n), fit)))
}

// gather gives for each of the values those of all ranks.
func (b *bencher) gather(ctx context.Context, values []float64) ([][]float64, error) {
	var msg []byte
	for _, v := range values {
		msg = binary.LittleEndian.AppendUint64(msg, math.Float64bits(v))
	}
	all, err := b.job.AllGather(ctx, msg)
	if err != nil {
		return nil, err
	}
	out := make([][]float64, len(values))
	for r, m := range all {
		if len(m) != len(msg) {
			return nil, fmt.Errorf("rank %d measured %d values, this one %d: the ranks' flags differ", r, len(m)/8, len(values))
		}
		for i := range out {
			out[i] = append(out[i], math.Float64frombits(binary.LittleEndian.Uint64(m[8*i:])))
		}
	}
	return out, nil
}

func mean(v []float64) float64 {
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}
