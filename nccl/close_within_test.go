package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// What is called when memory goes closes the communicator, whoever lets the memory go: the communicator's own Close, a deregistration, or what gives back the registrations of
// a closed graph.
func TestCloseWhenMemoryGoes(t *testing.T) {
	program := func(ctx context.Context, job *bootstrap.Job, dev *cuda.Device) error {
		for _, way := range []struct {
			name string
			use  func(w *world, b cuda.Slice[float32], free func() error) error
		}{
			{"close", func(w *world, b cuda.Slice[float32], free func() error) error {
				_, err := w.comm.Register(b.Memory())
				return errors.Join(err, free(), w.comm.Close())
			}},
			{"deregister", func(w *world, b cuda.Slice[float32], free func() error) error {
				reg, err := w.comm.Register(b.Memory())
				if err != nil {
					return err
				}
				return errors.Join(free(), reg.Close())
			}},
			{"graph", func(w *world, b cuda.Slice[float32], free func() error) error {
				g, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return nccl.AllReduce(w.comm, b, b, nccl.Sum, s) }, graphs.Comms(w.comm), graphs.NoWindows())
				if err != nil {
					return err
				}
				return errors.Join(g.Close(), free(), w.comm.Drain(ctx))
			}},
		} {
			err := withComm(ctx, job, dev, nil, func(w *world) error {
				m, err := w.dev.Alloc(4096, cuda.Shareable)
				if err != nil {
					return err
				}
				b, err := cuda.SliceOf[float32](m, 0, 16)
				if err != nil {
					return err
				}
				gone := make(chan error, 1)
				m.OnFree(func() { gone <- errors.Join(w.comm.Close(), wantErr(w.comm.Err(), nccl.ErrClosed)) })
				if err := way.use(w, b, m.Free); err != nil {
					return err
				}
				select {
				case err := <-gone:
					return err
				case <-time.After(room):
					return errors.New("the Close of what is called when memory goes does not return")
				}
			})
			if err != nil {
				return fmt.Errorf("%s: %w", way.name, err)
			}
		}
		return nil
	}
	on := func(open func(job *bootstrap.Job) (*cuda.Device, error)) func(ctx context.Context, job *bootstrap.Job) error {
		return func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := open(job)
			if err != nil {
				return err
			}
			defer dev.Close()
			return program(ctx, job, dev)
		}
	}
	host := on(func(*bootstrap.Job) (*cuda.Device, error) { return cuda.Open("host") })
	t.Run("alone", func(t *testing.T) { ranktest.Run(t, 1, host) })
	t.Run("host", func(t *testing.T) { ranktest.Run(t, 2, host) })
	t.Run("library", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 2, on(device), fakeLibraries(t)...))
	})
}
