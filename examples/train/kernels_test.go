package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/exampletest"
)

// TestGPUKernels launches each kernel on a GPU and on the host and compares what they leave in memory.
func TestGPUKernels(t *testing.T) {
	gpu, host := exampletest.OpenGPU(t, ".."), exampletest.Open(t, "host")
	const batch, hidden, classes = 37, 17, 11
	rng := rand.New(rand.NewPCG(8, 9))
	floats := func(n int) []float32 {
		v := make([]float32, n)
		for i := range v {
			if v[i] = float32(rng.NormFloat64()); rng.IntN(4) == 0 {
				v[i] = 0 // as activations are
			}
		}
		return v
	}
	doubles := func(n int) []float64 {
		v := make([]float64, n)
		for i := range v {
			v[i] = rng.NormFloat64()
		}
		return v
	}
	labels := make([]int32, batch)
	for i := range labels {
		labels[i] = rng.Int32N(classes)
	}
	for _, rows := range []int32{0, 1, 20, batch} {
		used := []int32{rows, 3*rows + 1}
		t.Run(fmt.Sprintf("%d rows", rows), func(t *testing.T) {
			for _, relu := range []bool{false, true} {
				in, w, out := floats(batch*hidden), floats(hidden*classes), floats(batch*(classes+1))
				onBoth(t, gpu, host, denseSpec, batch*classes, func(m *memory) denseArgs {
					return denseArgs{Rows: put(m, used), In: put(m, in), W: put(m, w), Out: put(m, out), Depth: hidden, Width: classes, Stride: classes + 1, ReLU: relu}
				})
			}
			out, st := floats(batch*classes), doubles(batch*stats)
			onBoth(t, gpu, host, softmaxSpec, batch, func(m *memory) softmaxArgs {
				return softmaxArgs{Rows: put(m, used), Out: put(m, out), Labels: put(m, labels), Stats: put(m, st), Classes: classes}
			})
			w, act, dact := floats(hidden*classes), floats(batch*(hidden+1)), floats(batch*hidden)
			onBoth(t, gpu, host, backwardSpec, batch*hidden, func(m *memory) backwardArgs {
				return backwardArgs{Rows: put(m, used), Out: put(m, out), W: put(m, w), Act: put(m, act), DAct: put(m, dact), Hidden: hidden, Classes: classes}
			})
			sums := doubles((hidden+1)*classes + stats)
			onBoth(t, gpu, host, outerSpec, (hidden+1)*classes, func(m *memory) outerArgs {
				return outerArgs{Rows: put(m, used), Left: put(m, act), Right: put(m, out), Sums: put(m, sums), Height: hidden + 1, Width: classes}
			})
			onBoth(t, gpu, host, totalSpec, stats, func(m *memory) totalArgs {
				return totalArgs{Rows: put(m, used), Stats: put(m, st), Sums: put(m, sums)}
			})
			weights, velocity, epoch := floats((hidden+1)*classes), floats((hidden+1)*classes), doubles(stats)
			onBoth(t, gpu, host, updateSpec, (hidden+1)*classes+stats, func(m *memory) updateArgs {
				return updateArgs{
					Rows: put(m, used), Sums: put(m, sums), W: put(m, weights), V: put(m, velocity), Epoch: put(m, epoch),
					Parameters: (hidden + 1) * classes, LearningRate: 0.1, Momentum: 0.9,
				}
			})
		})
	}
	t.Run("NaN", func(t *testing.T) { nan(t, gpu) })
}

// nan wants a GPU to hand on NaN: the training notices it in the loss.
func nan(t *testing.T, dev *cuda.Device) {
	n, err := newNetwork(t.Context(), dev, 2, 3, 2, 4, 0.1, 0, 3)
	if err != nil {
		t.Fatal(err)
	}
	in := randomSample(rand.New(rand.NewPCG(1, 2)), 4, 2, 2)
	in.x[0] = float32(math.NaN())
	if got := gradientsOf(t, dev, n, in)[n.parameters()]; !math.IsNaN(got) {
		t.Errorf("loss %v, want NaN", got)
	}
	if err := n.close(); err != nil {
		t.Error(err)
	}
}

// memory is what one launch works on: copies of slices in a device's memory.
type memory struct {
	t     *testing.T
	dev   *cuda.Device
	s     *cuda.Stream
	fetch []func() []float64
	free  []func() error
}

func put[T cuda.Element](m *memory, v []T) cuda.Slice[T] {
	m.t.Helper()
	b, err := cuda.Malloc[T](m.dev, len(v))
	if err != nil {
		m.t.Fatal(err)
	}
	m.free = append(m.free, b.Free)
	if err := cuda.CopyToDevice(b.All(), v, m.s); err != nil {
		m.t.Fatal(err)
	}
	m.fetch = append(m.fetch, func() []float64 {
		got := make([]T, len(v))
		if err := fetch(m.t.Context(), got, b.All(), m.s); err != nil {
			m.t.Fatal(err)
		}
		out := make([]float64, len(v))
		for i := range got {
			switch x := any(got[i]).(type) {
			case float32:
				out[i] = float64(x)
			case float64:
				out[i] = x
			case int32:
				out[i] = float64(x)
			}
		}
		return out
	})
	return b.All()
}

// launch runs a kernel once and returns all slices that it was given, in the order of put.
func launch[A any](t *testing.T, dev *cuda.Device, spec cuda.KernelSpec[A], items int, args func(m *memory) A) [][]float64 {
	t.Helper()
	k, err := cuda.NewKernel(dev, spec)
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	m := &memory{t: t, dev: dev, s: s}
	if err := k.Launch(s, cuda.Grid{N: items, Block: 64}, args(m)); err != nil {
		t.Fatal(err)
	}
	var out [][]float64
	for _, f := range m.fetch {
		out = append(out, f())
	}
	for _, f := range append(m.free, s.Close) {
		if err := f(); err != nil {
			t.Error(err)
		}
	}
	return out
}

func onBoth[A any](t *testing.T, gpu, host *cuda.Device, spec cuda.KernelSpec[A], items int, args func(m *memory) A) {
	t.Helper()
	got, want := launch(t, gpu, spec, items, args), launch(t, host, spec, items, args)
	for i := range want {
		for j, w := range want[i] {
			if g := got[i][j]; !(math.Abs(g-w) <= 2e-6*(1+math.Abs(w))) {
				t.Errorf("%s: slice %d, element %d: the GPU has %v, the host %v", spec.Name, i, j, g, w)
			}
		}
	}
}
