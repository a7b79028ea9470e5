package cuda_test

import (
	"context"
	"fmt"
	"log"
	"runtime"

	"github.com/gorun-dev/gorun/cuda"
)

// A kernel is a Go function over a part of the items, and CUDA C++ for GPUs; both get one struct of arguments.
func ExampleKernel() {
	dev, err := cuda.Open("host")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	x, err := cuda.Malloc[float32](dev, 1000)
	if err != nil {
		log.Fatal(err)
	}
	defer x.Free()
	s, err := dev.NewStream()
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()

	type args struct {
		X cuda.Slice[float32]
		A float32
	}
	scale, err := cuda.NewKernel(dev, cuda.KernelSpec[args]{
		Name: "scale",
		CUDA: `extern "C" __global__ void scale(scale_args a, long long n) {
			long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
			if (i < n)
				a.X[i] *= a.A;
		}`,
		Host: func(g cuda.Grid, lo, hi int, a args) {
			x := a.X.Host()
			for i := lo; i < hi; i++ {
				x[i] *= a.A
			}
		},
	})
	if err != nil {
		log.Fatal(err)
	}

	host := make([]float32, x.Len())
	if err := cuda.Fill(x.All(), 1.5, s); err != nil {
		log.Fatal(err)
	}
	if err := scale.Launch(s, cuda.Grid{N: x.Len()}, args{X: x.All(), A: 2}); err != nil {
		log.Fatal(err)
	}
	if err := cuda.CopyToHost(host, x.All(), s); err != nil {
		log.Fatal(err)
	}
	if err := s.Synchronize(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(host[0], host[999])
	// Output: 3 3
}

// What is enqueued between BeginCapture and EndCapture is recorded, and carried out at each launch of the graph.
func ExampleGraph() {
	dev, err := cuda.Open("host")
	if err != nil {
		log.Fatal(err)
	}
	defer dev.Close()
	n, err := cuda.Malloc[int64](dev, 1)
	if err != nil {
		log.Fatal(err)
	}
	defer n.Free()
	s, err := dev.NewStream()
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	type args struct{ N cuda.Slice[int64] }
	next, err := cuda.NewKernel(dev, cuda.KernelSpec[args]{
		Name: "next",
		Host: func(_ cuda.Grid, lo, hi int, a args) {
			for i := lo; i < hi; i++ {
				a.N.Host()[i]++
			}
		},
	})
	if err != nil {
		log.Fatal(err)
	}

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := s.BeginCapture(cuda.CaptureThreadLocal); err != nil {
		log.Fatal(err)
	}
	launchErr := next.Launch(s, cuda.Grid{N: 1}, args{n.All()})
	g, err := s.EndCapture() // always, whatever went wrong in between
	if launchErr != nil || err != nil {
		log.Fatal(launchErr, err)
	}
	if err := g.OnRelease(func() { fmt.Println("released") }); err != nil {
		log.Fatal(err)
	}
	exec, err := g.Instantiate()
	if err != nil {
		log.Fatal(err)
	}
	if err := g.Destroy(); err != nil { // the executable lives on
		log.Fatal(err)
	}
	for range 3 {
		if err := exec.Launch(s); err != nil {
			log.Fatal(err)
		}
	}
	if err := s.Synchronize(context.Background()); err != nil {
		log.Fatal(err)
	}
	fmt.Println(n.All().Host()[0])
	if err := exec.Destroy(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 3
	// released
}
