package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
)

// open gives a test the host device.
func open(t *testing.T) *cuda.Device {
	t.Helper()
	dev, err := cuda.Open("host")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

// sample is input for a network, with labels.
type sample struct {
	x      []float32 // rows x features
	labels []int32
}

func randomSample(rng *rand.Rand, rows, features, classes int) sample {
	s := sample{x: make([]float32, rows*features), labels: make([]int32, rows)}
	for i := range s.x {
		s.x[i] = float32(rng.NormFloat64())
	}
	for i := range s.labels {
		s.labels[i] = rng.Int32N(int32(classes))
	}
	return s
}

// gradientsOf runs a network on a sample and gives the sums: gradients, loss, right answers.
func gradientsOf(t *testing.T, dev *cuda.Device, n *network, in sample) []float64 {
	t.Helper()
	x := make([]float32, len(in.labels)*(n.features+1))
	for r := range in.labels {
		copy(x[r*(n.features+1):], in.x[r*n.features:][:n.features])
		x[r*(n.features+1)+n.features] = 1
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	sums := make([]float64, n.parameters()+stats)
	rows := []int32{int32(len(in.labels)), int32(len(in.labels))}
	for _, f := range []func() error{
		func() error { return cuda.CopyToDevice(n.rows.All(), rows, s) },
		func() error { return cuda.CopyToDevice(n.x.Slice(0, len(x)), x, s) },
		func() error { return cuda.CopyToDevice(n.labels.Slice(0, len(in.labels)), in.labels, s) },
		func() error { return n.forward(s) },
		func() error { return n.gradients(s) },
		func() error { return fetch(t.Context(), sums, n.sums.All(), s) },
		s.Close,
	} {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	return sums
}

// loss is the network's loss and count of right answers, written down again in float64 and without any of its code.
func loss(w []float64, features, hidden, classes int, in sample) (sum float64, right int) {
	second := w[(features+1)*hidden:]
	for r, label := range in.labels {
		logits := make([]float64, classes)
		copy(logits, second[hidden*classes:])
		for h := range hidden {
			a := w[features*hidden+h]
			for i := range features {
				a += float64(in.x[r*features+i]) * w[i*hidden+h]
			}
			for c := range logits {
				logits[c] += math.Max(a, 0) * second[h*classes+c]
			}
		}
		total, best := 0.0, 0
		for c, z := range logits {
			total += math.Exp(z)
			if z > logits[best] {
				best = c
			}
		}
		sum += math.Log(total) - logits[label]
		if best == int(label) {
			right++
		}
	}
	return sum, right
}

// TestGradients compares each gradient with the numeric derivative of the loss.
func TestGradients(t *testing.T) {
	dev := open(t)
	for _, d := range []struct{ features, hidden, classes, batch, rows int }{
		{1, 1, 2, 1, 1}, {3, 5, 4, 9, 9}, {7, 2, 3, 10, 4}, {2, 17, 10, 33, 32}, {4, 3, 2, 5, 0},
	} {
		t.Run(fmt.Sprintf("%d-%d-%d, %d of %d rows", d.features, d.hidden, d.classes, d.rows, d.batch), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(5, uint64(d.features)))
			n, err := newNetwork(t.Context(), dev, d.features, d.hidden, d.classes, d.batch, 0.1, 0, 3)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := n.close(); err != nil {
					t.Error(err)
				}
			}()
			// What an earlier, larger batch leaves behind must not be counted.
			gradientsOf(t, dev, n, randomSample(rng, d.batch, d.features, d.classes))
			in := randomSample(rng, d.rows, d.features, d.classes)
			got := gradientsOf(t, dev, n, in)

			w := make([]float64, n.parameters())
			for i, v := range n.weights.All().Host() {
				w[i] = float64(v)
			}
			sum, right := loss(w, d.features, d.hidden, d.classes, in)
			if math.Abs(got[len(w)]-sum) > 1e-5*sum || int(got[len(w)+1]) != right {
				t.Errorf("loss %v, %v right, want %v, %v", got[len(w)], got[len(w)+1], sum, right)
			}
			differ := 0
			const h = 1e-6
			for i := range w {
				old := w[i]
				w[i] = old + h
				up, _ := loss(w, d.features, d.hidden, d.classes, in)
				w[i] = old - h
				down, _ := loss(w, d.features, d.hidden, d.classes, in)
				w[i] = old
				want := (up - down) / (2 * h)
				if want != 0 {
					differ++
				}
				if math.Abs(got[i]-want) > 1e-4*(1+math.Abs(want)) {
					t.Errorf("gradient %d of %d: %v, numerically %v", i, len(w), got[i], want)
				}
			}
			if d.rows > 0 && differ < d.classes {
				t.Errorf("only %d gradients are not 0", differ)
			}
		})
	}
}

// TestStep checks momentum and learning rate over two steps, and the sums of an epoch.
func TestStep(t *testing.T) {
	dev := open(t)
	const rate, momentum = 0.5, 0.75
	n, err := newNetwork(t.Context(), dev, 2, 3, 2, 4, rate, momentum, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer n.close()
	in := randomSample(rand.New(rand.NewPCG(1, 2)), 4, 2, 2)
	velocity := make([]float64, n.parameters())
	var losses float64
	for step := range 2 {
		before := append([]float32(nil), n.weights.All().Host()...)
		sums := gradientsOf(t, dev, n, in)
		losses += sums[n.parameters()]
		s, err := dev.NewStream()
		if err != nil {
			t.Fatal(err)
		}
		if err := n.step(s); err != nil {
			t.Fatal(err)
		}
		if err := s.Synchronize(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		for i, got := range n.weights.All().Host() {
			velocity[i] = momentum*velocity[i] + sums[i]/4
			if want := float64(before[i]) - rate*velocity[i]; math.Abs(float64(got)-want) > 1e-6 {
				t.Errorf("step %d, weight %d: %v, want %v", step, i, got, want)
			}
		}
	}
	if got := n.epoch.All().Host()[0]; math.Abs(got-losses) > 1e-12 {
		t.Errorf("loss of the epoch %v, want %v", got, losses)
	}
}

// TestKernelParts does each kernel's items in random parts and wants the bits that the whole gives.
func TestKernelParts(t *testing.T) {
	dev := open(t)
	const rows, depth, width = 5, 7, 11
	rng := rand.New(rand.NewPCG(8, 8))
	floats := func(n int) cuda.Slice[float32] {
		b, err := cuda.Malloc[float32](dev, n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Free() })
		for i := range b.All().Host() {
			b.All().Host()[i] = float32(rng.NormFloat64())
		}
		return b.All()
	}
	doubles := func(n int) cuda.Slice[float64] {
		b, err := cuda.Malloc[float64](dev, n)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Free() })
		return b.All()
	}
	used, err := cuda.Malloc[int32](dev, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer used.Free()
	copy(used.All().Host(), []int32{rows, 3 * rows})
	labels, err := cuda.Malloc[int32](dev, rows)
	if err != nil {
		t.Fatal(err)
	}
	defer labels.Free()
	copy(labels.All().Host(), []int32{0, 1, 2, 3, 4})

	in, w := floats(rows*depth), floats(depth*width)
	same(t, "dense", rows*width, func() (func(lo, hi int), func() []float32) {
		a := denseArgs{Rows: used.All(), In: in, W: w, Out: floats(rows * (width + 1)), Depth: depth, Width: width, Stride: width + 1, ReLU: true}
		for r := range rows {
			a.Out.Host()[r*a.Stride+width] = 1
		}
		return func(lo, hi int) { denseSpec.Host(cuda.Grid{}, lo, hi, a) }, a.Out.Host
	})
	out := floats(rows * width)
	same(t, "softmax", rows, func() (func(lo, hi int), func() []float32) {
		a := softmaxArgs{Rows: used.All(), Out: floats(rows * width), Labels: labels.All(), Stats: doubles(rows * stats), Classes: width}
		copy(a.Out.Host(), out.Host())
		return func(lo, hi int) { softmaxSpec.Host(cuda.Grid{}, lo, hi, a) }, a.Out.Host
	})
	act, second := floats(rows*(depth+1)), floats((depth+1)*width)
	same(t, "backward", rows*depth, func() (func(lo, hi int), func() []float32) {
		a := backwardArgs{Rows: used.All(), Out: out, W: second, Act: act, DAct: floats(rows * depth), Hidden: depth, Classes: width}
		return func(lo, hi int) { backwardSpec.Host(cuda.Grid{}, lo, hi, a) }, a.DAct.Host
	})
	same(t, "outer", depth*width, func() (func(lo, hi int), func() []float64) {
		a := outerArgs{Rows: used.All(), Left: in, Right: out, Sums: doubles(depth * width), Height: depth, Width: width}
		return func(lo, hi int) { outerSpec.Host(cuda.Grid{}, lo, hi, a) }, a.Sums.Host
	})
	sums := doubles(depth*width + stats)
	for i := range sums.Host() {
		sums.Host()[i] = rng.NormFloat64()
	}
	same(t, "update", depth*width+stats, func() (func(lo, hi int), func() []float32) {
		a := updateArgs{
			Rows: used.All(), Sums: sums, W: floats(depth * width), V: floats(depth * width), Epoch: doubles(stats),
			Parameters: depth * width, LearningRate: 0.1, Momentum: 0.9,
		}
		copy(a.W.Host(), w.Host())
		clear(a.V.Host())
		return func(lo, hi int) { updateSpec.Host(cuda.Grid{}, lo, hi, a) }, a.W.Host
	})
}

// same compares a kernel done as a whole with the same done in parts, in any order. make gives it new memory each time.
func same[T float32 | float64](t *testing.T, name string, items int, make func() (run func(lo, hi int), result func() []T)) {
	t.Helper()
	run, result := make()
	run(0, items)
	whole := result()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var parts [][2]int
		for lo := 0; lo < items; {
			hi := lo + 1 + rng.IntN(items-lo)
			parts = append(parts, [2]int{lo, hi})
			lo = hi
		}
		rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		run, result := make()
		for _, p := range parts {
			run(p[0], p[1])
		}
		for i, v := range result() {
			if v != whole[i] {
				t.Fatalf("%s in parts %v: element %d is %v, as a whole %v", name, parts, i, v, whole[i])
			}
		}
	}
}

// BenchmarkStep is one step of one rank without the all-reduce.
func BenchmarkStep(b *testing.B) {
	for _, d := range []struct{ features, hidden, classes, batch int }{{16, 64, 4, 64}, {16, 64, 4, 256}, {784, 128, 10, 64}} {
		b.Run(fmt.Sprintf("%d-%d-%d,rows=%d", d.features, d.hidden, d.classes, d.batch), func(b *testing.B) {
			dev, err := cuda.Open("host")
			if err != nil {
				b.Fatal(err)
			}
			defer dev.Close()
			n, err := newNetwork(b.Context(), dev, d.features, d.hidden, d.classes, d.batch, 0.01, 0.9, 1)
			if err != nil {
				b.Fatal(err)
			}
			defer n.close()
			for i := range n.x.All().Host() {
				n.x.All().Host()[i] = float32(i%7) - 3
			}
			copy(n.rows.All().Host(), []int32{int32(d.batch), int32(d.batch)})
			s, err := dev.NewStream()
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			for b.Loop() {
				for _, f := range []func(*cuda.Stream) error{n.forward, n.gradients, n.step} {
					if err := f(s); err != nil {
						b.Fatal(err)
					}
				}
				if err := s.Synchronize(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(d.batch)*float64(b.N)/b.Elapsed().Seconds(), "samples/s")
		})
	}
}
