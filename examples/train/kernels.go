package main

import (
	"math"

	"github.com/gorun-dev/gorun/cuda"
)

// The kernels of the network. Each takes the number of rows in use from device memory, so that one captured graph serves the
// last, smaller batch of an epoch, too. An item's sum is added up in one order whatever part of the grid it is done with, on
// GPUs as on the host: a thread there does one item. What differs is the rounding of exp, log and fused multiply-adds.

// denseArgs: Out[r,j] = sum over i of In[r,i] * W[i,j].
type denseArgs struct {
	Rows       cuda.Slice[int32]
	In, W, Out cuda.Slice[float32]
	Depth      int // columns of In, rows of W
	Width      int // columns of W
	Stride     int // columns of Out, of which the first Width are written
	ReLU       bool
}

var denseSpec = cuda.KernelSpec[denseArgs]{Name: "dense", CUDA: `
extern "C" __global__ void dense(dense_args a, long long n) {
	long long item = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (item >= n || item >= a.Rows[0] * a.Width)
		return;
	long long r = item / a.Width, j = item % a.Width;
	float sum = 0;
	for (long long i = 0; i < a.Depth; i++)
		sum += a.In[r * a.Depth + i] * a.W[i * a.Width + j];
	a.Out[r * a.Stride + j] = a.ReLU && sum < 0 ? 0 : sum; // NaN stays: training must not seem to go well
}
`, Host: func(_ cuda.Grid, lo, hi int, a denseArgs) {
	in, w, out := a.In.Host(), a.W.Host(), a.Out.Host()
	for hi = min(hi, int(a.Rows.Host()[0])*a.Width); lo < hi; {
		// Items of one row are done together: W is then read along its rows.
		r, j := lo/a.Width, lo%a.Width
		n := min(a.Width-j, hi-lo)
		sum := out[r*a.Stride+j:][:n]
		clear(sum)
		for i, x := range in[r*a.Depth:][:a.Depth] {
			if x == 0 {
				continue
			}
			for k, v := range w[i*a.Width+j:][:n] {
				sum[k] += x * v
			}
		}
		if a.ReLU {
			for k, v := range sum {
				sum[k] = max(v, 0)
			}
		}
		lo += n
	}
}}

// softmaxArgs: an item is a row. Out holds logits, and afterwards the loss's gradients with respect to them.
type softmaxArgs struct {
	Rows    cuda.Slice[int32]
	Out     cuda.Slice[float32]
	Labels  cuda.Slice[int32]
	Stats   cuda.Slice[float64]
	Classes int
}

var softmaxSpec = cuda.KernelSpec[softmaxArgs]{Name: "softmax", CUDA: `
extern "C" __global__ void softmax(softmax_args a, long long n) {
	long long r = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (r >= n || r >= a.Rows[0])
		return;
	float *z = &a.Out[r * a.Classes];
	long long label = a.Labels[r], best = 0;
	for (long long k = 0; k < a.Classes; k++)
		if (z[k] > z[best])
			best = k;
	double top = z[best], sum = 0;
	for (long long k = 0; k < a.Classes; k++)
		sum += exp(z[k] - top);
	a.Stats[2 * r] = top + log(sum) - z[label];
	a.Stats[2 * r + 1] = best == label;
	for (long long k = 0; k < a.Classes; k++)
		z[k] = (float)(exp(z[k] - top) / sum);
	z[label] -= 1;
}
`, Host: func(_ cuda.Grid, lo, hi int, a softmaxArgs) {
	out, labels, st := a.Out.Host(), a.Labels.Host(), a.Stats.Host()
	for r := lo; r < min(hi, int(a.Rows.Host()[0])); r++ {
		z := out[r*a.Classes:][:a.Classes]
		label := int(labels[r])
		best := 0
		for k, v := range z {
			if v > z[best] {
				best = k
			}
		}
		top, sum := float64(z[best]), 0.0
		for _, v := range z {
			sum += math.Exp(float64(v) - top)
		}
		st[r*stats] = top + math.Log(sum) - float64(z[label])
		st[r*stats+1] = 0
		if best == label {
			st[r*stats+1] = 1
		}
		for k, v := range z {
			z[k] = float32(math.Exp(float64(v)-top) / sum)
		}
		z[label]--
	}
}}

// backwardArgs: DAct[r,h] = sum over c of Out[r,c] * W[h,c] where Act[r,h] is positive, else 0.
type backwardArgs struct {
	Rows              cuda.Slice[int32]
	Out, W, Act, DAct cuda.Slice[float32]
	Hidden, Classes   int
}

var backwardSpec = cuda.KernelSpec[backwardArgs]{Name: "backward", CUDA: `
extern "C" __global__ void backward(backward_args a, long long n) {
	long long item = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (item >= n || item >= a.Rows[0] * a.Hidden)
		return;
	long long r = item / a.Hidden, h = item % a.Hidden;
	float sum = 0;
	if (a.Act[r * (a.Hidden + 1) + h] > 0)
		for (long long c = 0; c < a.Classes; c++)
			sum += a.Out[r * a.Classes + c] * a.W[h * a.Classes + c];
	a.DAct[item] = sum;
}
`, Host: func(_ cuda.Grid, lo, hi int, a backwardArgs) {
	out, w, act, dact := a.Out.Host(), a.W.Host(), a.Act.Host(), a.DAct.Host()
	for i := lo; i < min(hi, int(a.Rows.Host()[0])*a.Hidden); i++ {
		r, h := i/a.Hidden, i%a.Hidden
		var sum float32
		if act[r*(a.Hidden+1)+h] > 0 {
			weights := w[h*a.Classes:][:a.Classes]
			for c, d := range out[r*a.Classes:][:a.Classes] {
				sum += d * weights[c]
			}
		}
		dact[i] = sum
	}
}}

// outerArgs: Sums[i,j] = sum over rows r of Left[r,i] * Right[r,j].
type outerArgs struct {
	Rows          cuda.Slice[int32]
	Left, Right   cuda.Slice[float32]
	Sums          cuda.Slice[float64]
	Height, Width int
}

var outerSpec = cuda.KernelSpec[outerArgs]{Name: "outer", CUDA: `
extern "C" __global__ void outer(outer_args a, long long n) {
	long long item = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (item >= n)
		return;
	long long i = item / a.Width, j = item % a.Width;
	double sum = 0;
	for (long long r = 0, rows = a.Rows[0]; r < rows; r++)
		sum += a.Left[r * a.Height + i] * a.Right[r * a.Width + j]; // the product is a float, as on the host
	a.Sums[item] = sum;
}
`, Host: func(_ cuda.Grid, lo, hi int, a outerArgs) {
	rows, left, right, sums := int(a.Rows.Host()[0]), a.Left.Host(), a.Right.Host(), a.Sums.Host()
	for lo < hi {
		i, j := lo/a.Width, lo%a.Width
		n := min(a.Width-j, hi-lo)
		sum := sums[lo:][:n]
		clear(sum)
		for r := range rows {
			x := left[r*a.Height+i]
			if x == 0 {
				continue
			}
			for k, v := range right[r*a.Width+j:][:n] {
				sum[k] += float64(x * v)
			}
		}
		lo += n
	}
}}

// totalArgs: Sums[k] = sum over rows r of Stats[r,k].
type totalArgs struct {
	Rows        cuda.Slice[int32]
	Stats, Sums cuda.Slice[float64]
}

var totalSpec = cuda.KernelSpec[totalArgs]{Name: "total", CUDA: `
extern "C" __global__ void total(total_args a, long long n) {
	long long k = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (k >= n)
		return;
	double sum = 0;
	for (long long r = 0, rows = a.Rows[0]; r < rows; r++)
		sum += a.Stats[2 * r + k];
	a.Sums[k] = sum;
}
`, Host: func(_ cuda.Grid, lo, hi int, a totalArgs) {
	st, sums := a.Stats.Host(), a.Sums.Host()
	for k := lo; k < hi; k++ {
		sums[k] = 0
		for r := range int(a.Rows.Host()[0]) {
			sums[k] += st[r*stats+k]
		}
	}
}}

// updateArgs: the first Parameters items are weights: V = Momentum*V + gradient, W -= LearningRate*V, where the gradient is that of the
// mean loss over the global batch. The items behind them add Sums to Epoch.
type updateArgs struct {
	Rows                   cuda.Slice[int32]
	Sums                   cuda.Slice[float64]
	W, V                   cuda.Slice[float32]
	Epoch                  cuda.Slice[float64]
	Parameters             int
	LearningRate, Momentum float32
}

var updateSpec = cuda.KernelSpec[updateArgs]{Name: "update", CUDA: `
extern "C" __global__ void update(update_args a, long long n) {
	long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
	if (i >= n)
		return;
	if (i >= a.Parameters) {
		a.Epoch[i - a.Parameters] += a.Sums[i];
		return;
	}
	float v = a.Momentum * a.V[i] + (float)(a.Sums[i] / a.Rows[1]);
	a.V[i] = v;
	a.W[i] -= a.LearningRate * v;
}
`, Host: func(_ cuda.Grid, lo, hi int, a updateArgs) {
	sums, w, v, epoch := a.Sums.Host(), a.W.Host(), a.V.Host(), a.Epoch.Host()
	rows := float64(a.Rows.Host()[1])
	for i := lo; i < hi; i++ {
		if i >= a.Parameters {
			epoch[i-a.Parameters] += sums[i]
			continue
		}
		v[i] = a.Momentum*v[i] + float32(sums[i]/rows)
		w[i] -= a.LearningRate * v[i]
	}
}}
