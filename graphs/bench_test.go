package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// onBench runs f on n ranks of this process: each prepares, then all do its loop b.N times.
func onBench(b *testing.B, n int, prepare func(ctx context.Context, r *rank) (loop func() error, done func() error, err error)) {
	b.ReportAllocs()
	ctx := b.Context()
	var wg sync.WaitGroup
	for _, job := range bootstrap.InProcess(n) {
		wg.Go(func() {
			defer job.Close()
			if err := func() error {
				r, err := newRank(ctx, job)
				if err != nil {
					return err
				}
				loop, done, err := prepare(ctx, r)
				if err != nil {
					return err
				}
				if err := job.Barrier(ctx); err != nil {
					return err
				}
				if job.Rank() == 0 {
					b.ResetTimer()
				}
				for range b.N {
					if err := loop(); err != nil {
						return err
					}
				}
				if err := job.Barrier(ctx); err != nil {
					return err
				}
				if job.Rank() == 0 {
					b.StopTimer()
				}
				return errors.Join(done(), r.close())
			}(); err != nil {
				b.Errorf("rank %d: %v", job.Rank(), err)
			}
		})
	}
	wg.Wait()
}

// smallReduces captures n all-reduces of 8 bytes.
func smallReduces(ctx context.Context, r *rank, n int) (*graphs.Graph, error) {
	return graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
		for range n {
			if err := nccl.AllReduce(r.comm, r.a.Slice(0, 2), r.b.Slice(0, 2), nccl.Sum, s); err != nil {
				return err
			}
		}
		return nil
	}, graphs.Comms(r.comm))
}

// BenchmarkCapture is a capture of calls all-reduces with the end of its graph.
func BenchmarkCapture(b *testing.B) {
	for _, ranks := range []int{2, 4, 8} {
		for _, calls := range []int{1, 20} {
			b.Run(fmt.Sprintf("ranks=%d/calls=%d", ranks, calls), func(b *testing.B) {
				onBench(b, ranks, func(ctx context.Context, r *rank) (func() error, func() error, error) {
					return func() error {
						g, err := smallReduces(ctx, r, calls)
						if err != nil {
							return err
						}
						return g.Close()
					}, func() error { return nil }, nil
				})
			})
		}
	}
}

// BenchmarkReplay is a launch and its end.
func BenchmarkReplay(b *testing.B) {
	for _, ranks := range []int{1, 2} {
		for _, calls := range []int{1, 20} {
			b.Run(fmt.Sprintf("ranks=%d/calls=%d", ranks, calls), func(b *testing.B) {
				onBench(b, ranks, func(ctx context.Context, r *rank) (func() error, func() error, error) {
					g, err := smallReduces(ctx, r, calls)
					if err != nil {
						return nil, nil, err
					}
					return func() error {
						if err := g.Launch(r.stream); err != nil {
							return err
						}
						return r.stream.Synchronize(ctx)
					}, g.Close, nil
				})
			})
		}
	}
}

// BenchmarkModes is a replay of one all-reduce on two ranks, whose memory is registered by the capture or private.
func BenchmarkModes(b *testing.B) {
	for _, bytes := range []int{64 << 10, 64 << 20} {
		for _, kind := range []cuda.AllocKind{cuda.Shareable, cuda.Private} {
			mode := "graph"
			if kind == cuda.Private {
				mode = "plain"
			}
			b.Run(fmt.Sprintf("bytes=%d/%s", bytes, mode), func(b *testing.B) {
				b.SetBytes(int64(bytes))
				onBench(b, 2, func(ctx context.Context, r *rank) (func() error, func() error, error) {
					buf, err := cuda.AllocBuffer[float32](r.dev, bytes/4, kind)
					if err != nil {
						return nil, nil, err
					}
					g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
						return nccl.AllReduce(r.comm, buf.All(), buf.All(), nccl.Max, s)
					}, graphs.Comms(r.comm))
					if err != nil {
						return nil, nil, err
					}
					return func() error {
						if err := g.Launch(r.stream); err != nil {
							return err
						}
						return r.stream.Synchronize(ctx)
					}, func() error { return errors.Join(g.Close(), buf.Free()) }, nil
				})
			})
		}
	}
}
