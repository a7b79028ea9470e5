package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// holdUp has a stream do nothing of what comes next until let is called.
func holdUp(s *cuda.Stream) (let func(), err error) {
	ch := make(chan struct{})
	return sync.OnceFunc(func() { close(ch) }), s.HostFunc(func() { <-ch })
}

// On a GPU NCCL's end, and what frees memory, waits for a stream that is held up: the tests of that are for the stand-ins.

// What is still enqueued when a communicator fails uses nothing any more: neither the program's memory nor the communicator's. The device stays.
func TestLibraryPeerHeldUp(t *testing.T) {
	for _, test := range []struct {
		name string
		end  func(w *world, buf *cuda.Buffer[float32]) error // on the rank that is held up, after the failure
	}{
		{"memory is freed", func(w *world, buf *cuda.Buffer[float32]) error { return errors.Join(w.comm.Abort(nil), buf.Free()) }},
		{"stream and communicator are closed", func(w *world, _ *cuda.Buffer[float32]) error { return errors.Join(w.stream.Close(), w.comm.Close()) }},
		{"communicator is closed", func(w *world, _ *cuda.Buffer[float32]) error { return w.comm.Close() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
				dev, err := device(job)
				if err != nil {
					return err
				}
				w := &world{ctx: ctx, job: job, dev: dev}
				if w.comm, err = nccl.Init(ctx, job, dev); err != nil {
					return err
				}
				defer w.comm.Close()
				if w.stream, err = dev.NewStream(); err != nil {
					return err
				}
				buf, err := nccl.Alloc[float32](dev, 100)
				if err != nil {
					return err
				}
				sum := func() error { return nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream) }
				if err := errors.Join(sum(), w.stream.Synchronize(ctx)); err != nil {
					return err
				}
				other, err := dev.NewStream()
				if err != nil {
					return err
				}
				if job.Rank() == 0 {
					let, err := holdUp(w.stream)
					defer let()
					if err := errors.Join(err, sum(), sum(), job.Barrier(ctx)); err != nil {
						return err
					}
					if err := wantErr(w.stream.Synchronize(ctx), nccl.ErrAborted, "by rank 1"); err != nil {
						return err
					}
					if err := test.end(w, buf); err != nil {
						return err
					}
					let()
				} else {
					if err := errors.Join(sum(), job.Barrier(ctx), w.comm.Abort(nil)); err != nil {
						return err
					}
				}
				w.comm.Close()
				w.stream.Close()
				// The device is well, nothing is left on it, and there is a next communicator.
				if !buf.Memory().Freed() {
					err = buf.Free()
				}
				err = errors.Join(err, withComm(ctx, job, dev, nil, func(w *world) error {
					buf, err := nccl.Alloc[float32](dev, 100)
					if err != nil {
						return err
					}
					defer buf.Free()
					return errors.Join(nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream), w.stream.Synchronize(ctx))
				}), other.Close())
				if err != nil {
					return err
				}
				return closeSoon(dev)
			}, append(fakeLibraries(t), byPeer)...))
		})
	}
}

// closeSoon closes a device on which something may still be on its way out.
func closeSoon(dev *cuda.Device) error {
	err := dev.Close()
	for end := time.Now().Add(room); err != nil && time.Now().Before(end); err = dev.Close() {
		time.Sleep(time.Millisecond)
	}
	return err
}

// A communicator whose calls are done closes well, and leaves nothing, while its stream does something else.
func TestLibraryPeerCloseBesideWork(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		s, err := dev.NewStream()
		if err != nil {
			return err
		}
		buf, err := nccl.Alloc[float32](dev, 100)
		if err != nil {
			return err
		}
		comm, err := nccl.Init(ctx, job, dev)
		if err != nil {
			return err
		}
		if err := errors.Join(nccl.AllReduce(comm, buf.All(), buf.All(), nccl.Sum, s), s.Synchronize(ctx)); err != nil {
			return err
		}
		let, err := holdUp(s)
		defer let()
		if err := errors.Join(err, comm.Close()); err != nil {
			return err
		}
		if err := wantErr(dev.Close(), nil, "still open"); err != nil {
			return err
		}
		if nccl.PeerLeft(comm) {
			return errors.New("its buffers are still there")
		}
		let()
		return errors.Join(s.Synchronize(ctx), s.Close(), buf.Free(), dev.Close())
	}, append(fakeLibraries(t), byPeer)...))
}

// A stream on which a communicator was used last may become part of another's capture.
func TestLibraryPeerJoinsCapture(t *testing.T) {
	onPeers(t, 2, func(w *world) (err error) {
		second, err := nccl.InitConfig(w.ctx, w.job, w.dev, &nccl.Config{Name: "second"})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, second.Close()) }()
		var streams [2]*cuda.Stream
		var events [2]*cuda.Event
		for i := range streams {
			if streams[i], err = w.dev.NewStream(); err != nil {
				return err
			}
			defer streams[i].Close()
			if events[i], err = w.dev.NewEvent(); err != nil {
				return err
			}
			defer events[i].Close()
		}
		buf, err := nccl.Alloc[uint64](w.dev, 100)
		if err != nil {
			return err
		}
		defer buf.Free()
		captured, err := nccl.Alloc[uint64](w.dev, 100)
		if err != nil {
			return err
		}
		defer captured.Free()
		fork, last := streams[0], streams[1]
		sum := func(c *nccl.Comm, b *cuda.Buffer[uint64], s *cuda.Stream) error {
			return nccl.AllReduce(c, b.All(), b.All(), nccl.Sum, s)
		}
		if err := errors.Join(cuda.Fill(buf.All(), 1, fork), cuda.Fill(captured.All(), 1, w.stream)); err != nil {
			return err
		}
		if err := sum(second, buf, fork); err != nil {
			return err
		}
		g, err := graphs.Capture(w.ctx, w.stream, func(s *cuda.Stream) error {
			if err := errors.Join(s.Record(events[0]), fork.Wait(events[0]), sum(w.comm, captured, fork)); err != nil {
				return err
			}
			if err := sum(second, buf, last); err != nil {
				return fmt.Errorf("the other communicator: %w", err)
			}
			return errors.Join(fork.Record(events[1]), s.Wait(events[1]))
		}, graphs.Comms(w.comm))
		if err != nil {
			return err
		}
		defer g.Close()
		got, replayed := make([]uint64, 100), make([]uint64, 100)
		err = errors.Join(sum(second, buf, last), cuda.CopyToHost(got, buf.All(), last), last.Synchronize(w.ctx),
			g.Launch(w.stream), cuda.CopyToHost(replayed, captured.All(), w.stream), w.stream.Synchronize(w.ctx))
		if err == nil && (got[99] != 8 || replayed[99] != 2) {
			err = fmt.Errorf("%d and %d, want 8 and 2", got[99], replayed[99])
		}
		return err
	})
}
