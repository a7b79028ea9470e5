package main

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// network is a multilayer perceptron on a device: features → hidden units (ReLU) → classes (softmax, cross entropy).
//
// Weights and activations are float32. Sums over rows (gradients, losses) are float64: the order in which they are added,
// which depends on the number of ranks, then shows only far below what is left of them in the float32 of the weights. That
// is how any number of ranks gets the same losses.
//
// The biases are the last row of each weight matrix; inputs and hidden activations have a last column of ones for them.
type network struct {
	features, hidden, classes int
	batch                     int // rows that the buffers hold

	weights  *cuda.Buffer[float32] // (features+1) x hidden, then (hidden+1) x classes
	velocity *cuda.Buffer[float32] // as weights
	x        *cuda.Buffer[float32] // batch x (features+1): inputs
	labels   *cuda.Buffer[int32]   // batch
	rows     *cuda.Buffer[int32]   // [2]: rows in use here, rows of the global batch
	act      *cuda.Buffer[float32] // batch x (hidden+1): activations of the hidden layer
	out      *cuda.Buffer[float32] // batch x classes: logits, then their gradients
	dact     *cuda.Buffer[float32] // batch x hidden: gradients of the hidden layer
	rowStats *cuda.Buffer[float64] // batch x stats: loss of each row, 1 if it was right
	epoch    *cuda.Buffer[float64] // stats: sums of the batches since the last reset

	// sums is what the ranks add up: gradients as weights, then stats. It is memory that can be registered.
	sums *cuda.Buffer[float64]

	dense    *cuda.Kernel[denseArgs]
	softmax  *cuda.Kernel[softmaxArgs]
	backward *cuda.Kernel[backwardArgs]
	outer    *cuda.Kernel[outerArgs]
	total    *cuda.Kernel[totalArgs]
	update   *cuda.Kernel[updateArgs]

	learningRate, momentum float32
	free                   []func() error
}

// stats counts what is summed beside the gradients: the loss and the number of right answers.
const stats = 2

// newNetwork makes a network with random weights, the same for the same seed.
func newNetwork(ctx context.Context, dev *cuda.Device, features, hidden, classes, batch int, learningRate, momentum float32, seed uint64) (*network, error) {
	n := &network{features: features, hidden: hidden, classes: classes, batch: batch, learningRate: learningRate, momentum: momentum}
	p := n.parameters()
	err := errors.Join(
		alloc(n, &n.weights, dev, p), alloc(n, &n.velocity, dev, p),
		alloc(n, &n.x, dev, batch*(features+1)), alloc(n, &n.labels, dev, batch), alloc(n, &n.rows, dev, 2),
		alloc(n, &n.act, dev, batch*(hidden+1)), alloc(n, &n.out, dev, batch*classes), alloc(n, &n.dact, dev, batch*hidden),
		alloc(n, &n.rowStats, dev, batch*stats), alloc(n, &n.epoch, dev, stats),
		load(&n.dense, dev, denseSpec), load(&n.softmax, dev, softmaxSpec), load(&n.backward, dev, backwardSpec),
		load(&n.outer, dev, outerSpec), load(&n.total, dev, totalSpec), load(&n.update, dev, updateSpec),
	)
	if err == nil {
		if n.sums, err = nccl.Alloc[float64](dev, p+stats); err == nil {
			n.free = append(n.free, n.sums.Free)
		}
	}
	if err == nil {
		err = n.init(ctx, dev, seed)
	}
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

func alloc[T cuda.Element](n *network, b **cuda.Buffer[T], dev *cuda.Device, elements int) error {
	m, err := cuda.Malloc[T](dev, elements)
	if err != nil {
		return err
	}
	*b = m
	n.free = append(n.free, m.Free)
	return nil
}

func load[A any](k **cuda.Kernel[A], dev *cuda.Device, spec cuda.KernelSpec[A]) (err error) {
	*k, err = cuda.NewKernel(dev, spec)
	return err
}

// parameters is the number of weights.
func (n *network) parameters() int { return (n.features+1)*n.hidden + (n.hidden+1)*n.classes }

// layers are the two matrices in a buffer that is laid out as the weights are.
func layers[T cuda.Element](n *network, b *cuda.Buffer[T]) (first, second cuda.Slice[T]) {
	split := (n.features + 1) * n.hidden
	return b.Slice(0, split), b.Slice(split, n.parameters())
}

// sumStats is the part of sums behind the gradients.
func (n *network) sumStats() cuda.Slice[float64] {
	return n.sums.Slice(n.parameters(), n.parameters()+stats)
}

// init draws the weights (He's initialisation, biases 0) and sets the column of ones.
func (n *network) init(ctx context.Context, dev *cuda.Device, seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 0x9e7))
	w := make([]float32, n.parameters())
	split := (n.features + 1) * n.hidden
	for i := range w[:n.features*n.hidden] {
		w[i] = float32(rng.NormFloat64() * math.Sqrt(2/float64(n.features)))
	}
	for i := range w[split : split+n.hidden*n.classes] {
		w[split+i] = float32(rng.NormFloat64() * math.Sqrt(2/float64(n.hidden)))
	}
	act := make([]float32, n.batch*(n.hidden+1))
	for row := range n.batch {
		act[row*(n.hidden+1)+n.hidden] = 1
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	return errors.Join(
		cuda.CopyToDevice(n.weights.All(), w, s),
		cuda.CopyToDevice(n.act.All(), act, s),
		s.Synchronize(ctx),
		s.Close(),
	)
}

// close frees what the network holds, last first.
func (n *network) close() (err error) {
	for len(n.free) > 0 {
		last := len(n.free) - 1
		err = errors.Join(err, n.free[last]())
		n.free = n.free[:last]
	}
	return err
}

// forward enqueues the way from the inputs to the losses: stats of this rank's rows are in sums afterwards, and the
// gradients of the logits in out.
func (n *network) forward(s *cuda.Stream) error {
	first, second := layers(n, n.weights)
	if err := n.dense.Launch(s, cuda.Grid{N: n.batch * n.hidden}, denseArgs{
		Rows: n.rows.All(), In: n.x.All(), W: first, Out: n.act.All(),
		Depth: n.features + 1, Width: n.hidden, Stride: n.hidden + 1, ReLU: true,
	}); err != nil {
		return err
	}
	if err := n.dense.Launch(s, cuda.Grid{N: n.batch * n.classes}, denseArgs{
		Rows: n.rows.All(), In: n.act.All(), W: second, Out: n.out.All(),
		Depth: n.hidden + 1, Width: n.classes, Stride: n.classes,
	}); err != nil {
		return err
	}
	if err := n.softmax.Launch(s, cuda.Grid{N: n.batch}, softmaxArgs{
		Rows: n.rows.All(), Out: n.out.All(), Labels: n.labels.All(), Stats: n.rowStats.All(), Classes: n.classes,
	}); err != nil {
		return err
	}
	return n.total.Launch(s, cuda.Grid{N: stats}, totalArgs{Rows: n.rows.All(), Stats: n.rowStats.All(), Sums: n.sumStats()})
}

// gradients enqueues the way back: sums of the gradients over this rank's rows.
func (n *network) gradients(s *cuda.Stream) error {
	_, weights := layers(n, n.weights)
	first, second := layers(n, n.sums)
	if err := n.outer.Launch(s, cuda.Grid{N: (n.hidden + 1) * n.classes}, outerArgs{
		Rows: n.rows.All(), Left: n.act.All(), Right: n.out.All(), Sums: second, Height: n.hidden + 1, Width: n.classes,
	}); err != nil {
		return err
	}
	if err := n.backward.Launch(s, cuda.Grid{N: n.batch * n.hidden}, backwardArgs{
		Rows: n.rows.All(), Out: n.out.All(), W: weights, Act: n.act.All(), DAct: n.dact.All(), Hidden: n.hidden, Classes: n.classes,
	}); err != nil {
		return err
	}
	return n.outer.Launch(s, cuda.Grid{N: (n.features + 1) * n.hidden}, outerArgs{
		Rows: n.rows.All(), Left: n.x.All(), Right: n.dact.All(), Sums: first, Height: n.features + 1, Width: n.hidden,
	})
}

// step enqueues the change of the weights by the sums, which by now are those of all ranks, and adds stats to epoch.
func (n *network) step(s *cuda.Stream) error {
	return n.update.Launch(s, cuda.Grid{N: n.parameters() + stats}, updateArgs{
		Rows: n.rows.All(), Sums: n.sums.All(), W: n.weights.All(), V: n.velocity.All(), Epoch: n.epoch.All(),
		Parameters: n.parameters(), LearningRate: n.learningRate, Momentum: n.momentum,
	})
}
