package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
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
	library *nccl.Comm // for all modes but auto: no call goes by peer memory; may be comm
	out     *report
	on      *progress
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

// commOf is the communicator that a series is measured on.
func (b *bencher) commOf(s series) *nccl.Comm {
	if s.mode == "auto" {
		return b.comm
	}
	return b.library
}

// measure goes through all series.
func measure[T cuda.Element](ctx context.Context, b *bencher) error {
	elem := uint64(cuda.DTypeOf[T]().Size())
	for _, s := range b.series() {
		b.on.total += len(b.shaped(s.op, elem, b.comm.Size()))
	}
	var warm struct { // since the last heat
		op   string
		comm *nccl.Comm
	}
	for _, s := range b.series() {
		sizes := b.shaped(s.op, elem, b.comm.Size())
		if comm := b.commOf(s); s.op != warm.op || comm != warm.comm {
			warm.op, warm.comm = s.op, comm
			if err := heat[T](ctx, b, s, slices.Max(sizes)); err != nil {
				return fmt.Errorf("warm up %s: %w", s.op, err)
			}
		}
		if err := measureSeries[T](ctx, b, s, sizes); err != nil {
			return err
		}
	}
	return nil
}

func measureSeries[T cuda.Element](ctx context.Context, b *bencher, s series, sizes []uint64) error {
	for i, size := range sizes {
		b.on.at(s, size)
		p, err := measurePoint[T](ctx, b, s, size)
		if errors.Is(err, errNoWindow) || errors.Is(err, graphs.ErrMode) { // on all ranks alike
			b.out.skipped(s, err)
			b.on.total -= len(sizes) - i
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s of %d bytes, %s, %s: %w", s.op, size, s.mode, s.calls(), err)
		}
		b.on.done++
		if err := b.out.point(s, p); err != nil {
			return err
		}
	}
	return nil
}

// heat makes untimed calls of the largest size before the first, as nccl-tests do: a GPU that has had nothing to do runs slowly at first.
func heat[T cuda.Element](ctx context.Context, b *bencher, of series, size uint64) (err error) {
	if b.warmUp == 0 || b.dev.Platform() == cuda.Host {
		return nil
	}
	s := series{op: of.op, mode: "plain"}
	if of.mode == "auto" {
		s.mode = of.mode
	}
	m, err := newMemory[T](ctx, b, s, size)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	c := &call[T]{b, s, m}
	timed := func(n int) (float64, error) {
		start := time.Now()
		for i := range n {
			if err := c.issue(i, b.stream); err != nil {
				return 0, err
			}
		}
		err := b.stream.Synchronize(ctx)
		return float64(time.Since(start).Microseconds()), err
	}
	if _, err := timed(1); err != nil { // connects the ranks
		return err
	}
	us, err := timed(1)
	if err != nil {
		return err
	}
	n, err := b.atMost(ctx, b.warmUp, us)
	if err == nil {
		_, err = timed(n)
	}
	return err
}

// atMost is how many of n calls fit into the limit on every rank, judged by one that took so long here.
func (b *bencher) atMost(ctx context.Context, n int, us float64) (int, error) {
	all, err := b.gather(ctx, []float64{us})
	if err != nil {
		return 0, err
	}
	return roundLength(n, b.limit, slices.Max(all[0])), nil
}

// errNoWindow is on all ranks alike.
var errNoWindow = errors.New("the communicator has no windows")

// memory is what a measurement works on. Each buffer is as large as the call needs, for what the runtime chooses may depend on it.
type memory[T cuda.Element] struct {
	send, recv []cuda.Slice[T] // that calls take in turn
	ends       []func() error  // in the order in which they were opened
}

func newMemory[T cuda.Element](ctx context.Context, b *bencher, s series, size uint64) (_ *memory[T], err error) {
	m := &memory[T]{}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	elem := uint64(cuda.DTypeOf[T]().Size())
	send, recv, _ := shape(s.op, size, elem, b.comm.Size())
	first := 0
	if s.mode == "local" || s.mode == "graph" {
		// Different offsets on the ranks: else a captured call would use a window.
		first = b.comm.Rank() * int(256/elem)
	}
	for range b.turns(size) {
		if s.inPlace {
			all, err := m.open(ctx, b, s, first, max(send, recv))
			if err != nil {
				return nil, err
			}
			out, in := all, all
			switch r := b.comm.Rank(); s.op {
			case "all-gather", "gather":
				out = all.Slice(r*send, (r+1)*send)
			case "reduce-scatter", "scatter":
				in = all.Slice(r*recv, (r+1)*recv)
			}
			m.send, m.recv = append(m.send, out), append(m.recv, in)
			continue
		}
		out, err := m.open(ctx, b, s, first, send)
		if err != nil {
			return nil, err
		}
		in, err := m.open(ctx, b, s, first, recv)
		if err != nil {
			return nil, err
		}
		m.send, m.recv = append(m.send, out), append(m.recv, in)
	}
	return m, nil
}

// open makes a buffer in the series' mode: n elements from first on.
func (m *memory[T]) open(ctx context.Context, b *bencher, s series, first, n int) (all cuda.Slice[T], err error) {
	alloc := nccl.Alloc[T]
	if s.mode == "plain" {
		alloc = cuda.Malloc[T]
	}
	buf, err := alloc(b.dev, first+n)
	if err != nil {
		return all, err
	}
	m.ends = append(m.ends, buf.Free)
	all = buf.Slice(first, first+n)
	eagerWindow := s.mode == "window" && !s.captured
	if s.mode != "local" && !eagerWindow {
		return all, nil
	}
	reg, err := b.commOf(s).Register(buf.Memory())
	if err != nil {
		return all, err
	}
	m.ends = append(m.ends, reg.Close)
	if !eagerWindow {
		return all, nil
	}
	win, err := b.commOf(s).Window(ctx, buf.All().Range())
	if err != nil {
		return all, err
	}
	if win == nil {
		if _, why := b.commOf(s).WindowSupport(); why != "" {
			return all, fmt.Errorf("%w: %s", errNoWindow, why)
		}
		return all, fmt.Errorf("%w: another rank's platform has none", errNoWindow)
	}
	m.ends = append(m.ends, func() error { return win.Close(context.WithoutCancel(ctx)) })
	return all, nil
}

func (m *memory[T]) close() error {
	var errs []error
	for _, end := range slices.Backward(m.ends) {
		errs = append(errs, end())
	}
	return errors.Join(errs...)
}

// call is an operation in a series' mode.
type call[T cuda.Element] struct {
	b *bencher
	s series
	m *memory[T]
}

// issue enqueues call i of a round or graph.
func (c *call[T]) issue(i int, s *cuda.Stream) error {
	comm := c.b.commOf(c.s)
	i %= len(c.m.send)
	send, recv := c.m.send[i], c.m.recv[i]
	switch c.s.op {
	case "all-reduce":
		return nccl.AllReduce(comm, send, recv, redOps[c.b.red], s)
	case "all-gather":
		return nccl.AllGather(comm, send, recv, s)
	case "reduce-scatter":
		return nccl.ReduceScatter(comm, send, recv, redOps[c.b.red], s)
	case "broadcast":
		return nccl.Broadcast(comm, send, recv, c.b.root, s)
	case "reduce":
		return nccl.Reduce(comm, send, recv, redOps[c.b.red], c.b.root, s)
	case "gather":
		return nccl.Gather(comm, send, recv, c.b.root, s)
	case "scatter":
		return nccl.Scatter(comm, send, recv, c.b.root, s)
	case "all-to-all":
		return nccl.AllToAll(comm, send, recv, s)
	case "sendrecv":
		n := comm.Size()
		return nccl.Group(func() error {
			return errors.Join(nccl.Send(comm, send, (comm.Rank()+1)%n, s), nccl.Recv(comm, recv, (comm.Rank()+n-1)%n, s))
		}, comm)
	}
	return fmt.Errorf("unknown operation %s", c.s.op)
}

// captureModes are what a capture demands; auto demands nothing.
var captureModes = map[string]nccl.Mode{"plain": nccl.Plain, "local": nccl.Local, "graph": nccl.Graph, "window": nccl.Window}

// capture puts n of the call into a graph that runs in the series' mode.
func (c *call[T]) capture(ctx context.Context, n int) (*graphs.Graph, error) {
	opts := []graphs.Option{graphs.Comms(c.b.commOf(c.s)), graphs.Name(c.s.op)}
	if mode, ok := captureModes[c.s.mode]; ok {
		opts = append(opts, graphs.Require(mode))
	}
	return graphs.Capture(ctx, c.b.stream, func(s *cuda.Stream) error {
		for i := range n {
			if err := c.issue(i, s); err != nil {
				return err
			}
		}
		return nil
	}, opts...)
}

// point is a measurement.
type point struct {
	size    uint64
	count   int       // elements, as NCCL counts them
	mode    string    // that captured calls have
	reason  string    // why the first has it
	n       int       // calls or launches in a round
	us      []float64 // a call, of each round
	enqueue []float64 // of them what passed until all were enqueued, a call, on the slowest rank
	checked bool
	wrong   int // elements, on all ranks
}

func measurePoint[T cuda.Element](ctx context.Context, b *bencher, s series, size uint64) (p point, err error) {
	m, err := newMemory[T](ctx, b, s, size)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	c := &call[T]{b, s, m}
	elem := cuda.DTypeOf[T]().Size()
	p.count = partOf(s.op, m.send[0].Len(), m.recv[0].Len(), b.comm.Size())
	p.size = uint64(max(m.send[0].Len(), m.recv[0].Len()) * elem)
	u := burst{b, func(i int) error { return c.issue(i, b.stream) }, 1, b.n}
	if s.captured {
		g, failed := c.capture(ctx, b.perGraph)
		if failed != nil {
			return p, b.modeless(ctx, failed)
		}
		defer func() { err = errors.Join(err, b.release(ctx, c.s, g)) }()
		p.mode = modesOf(g)
		if calls := g.Calls(); len(calls) > 0 { // one rank alone gathers nothing in place
			p.reason = calls[0].Reason
		}
		u = burst{b, func(int) error { return g.Launch(b.stream) }, b.perGraph, b.launches}
	}
	// In place, the next call works on the last one's result; zeros stay zeros, and no number becomes one that is slow to add.
	for _, part := range slices.Concat(m.send, m.recv) {
		if err := b.stream.Memset(part.Range(), 0); err != nil {
			return p, err
		}
	}
	if err := u.measure(ctx, &p); err != nil {
		return p, err
	}
	if b.check {
		if p.wrong, err = checkCall(ctx, c, func() error { return u.enqueue(0) }); err != nil {
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

// burst is what is timed: calls, or launches, one behind the other.
type burst struct {
	b       *bencher
	enqueue func(i int) error
	perCall int // calls in what enqueue enqueues
	most    int // of it in a round
}

// time enqueues n and waits for all: µs a call, and those of them until all were enqueued. Nothing else is timed, as in nccl-tests.
func (u *burst) time(ctx context.Context, n int) (us, enqueued float64, err error) {
	start := time.Now()
	for i := range n {
		if err := u.enqueue(i); err != nil {
			return 0, 0, err
		}
	}
	perCall := func() float64 { return float64(time.Since(start).Nanoseconds()) / 1e3 / float64(n*u.perCall) }
	enqueued = perCall()
	err = u.b.stream.Synchronize(ctx)
	return perCall(), enqueued, err
}

// measure warms up and times the rounds of a point.
func (u *burst) measure(ctx context.Context, p *point) error {
	b := u.b
	atMost := func(n int, us float64) (int, error) { return b.atMost(ctx, n, us*float64(u.perCall)) }
	// The first call connects the ranks; those after it say how long one takes.
	if _, _, err := u.time(ctx, 1); err != nil {
		return err
	}
	guess, _, err := u.time(ctx, 1)
	if err != nil {
		return err
	}
	warmUp, err := atMost(b.warmUp, guess)
	if err != nil {
		return err
	}
	if guess, _, err = u.time(ctx, warmUp); err != nil {
		return err
	}
	if p.n, err = atMost(u.most, guess); err != nil {
		return err
	}
	mine := make([]float64, 2*b.rounds) // times, then what was enqueueing in them
	for i := range b.rounds {
		if err := b.job.Barrier(ctx); err != nil {
			return err
		}
		if _, _, err := u.time(ctx, 1); err != nil { // brings the ranks closer together than the barrier
			return err
		}
		if mine[i], mine[b.rounds+i], err = u.time(ctx, p.n); err != nil {
			return err
		}
	}
	rounds, err := b.gather(ctx, mine)
	if err != nil {
		return err
	}
	for _, r := range rounds[:b.rounds] {
		p.us = append(p.us, mean(r))
	}
	for _, r := range rounds[b.rounds:] {
		p.enqueue = append(p.enqueue, slices.Max(r))
	}
	return nil
}

// modesOf names the modes of a graph's calls, each once.
func modesOf(g *graphs.Graph) string {
	var names []string
	for _, c := range g.Calls() {
		if name := c.Mode.String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// modeless is a failed capture's error, which is graphs.ErrMode on all ranks if it is on one: of a Send or Recv that does not reach the mode only its
// ends know. The capture has failed on all ranks.
func (b *bencher) modeless(ctx context.Context, failed error) error {
	mine := 0.0
	if errors.Is(failed, graphs.ErrMode) {
		mine = 1
	}
	all, err := b.gather(ctx, []float64{mine})
	if err != nil || mine == 1 || slices.Max(all[0]) == 0 {
		return failed
	}
	return fmt.Errorf("%w: %w", graphs.ErrMode, failed)
}

// release closes a graph and has its registrations given back, so that the next size begins as this one did.
func (b *bencher) release(ctx context.Context, s series, g *graphs.Graph) error {
	if err := g.Close(); err != nil {
		return err
	}
	return b.commOf(s).Drain(ctx)
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
