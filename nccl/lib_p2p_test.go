package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// Point to point, eager and captured, and then a collective on the same registered buffers: trials 16, where NCCL before 2.29.2 hangs.
func TestLibraryPointToPoint(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			n := large()
			peer := 1 - job.Rank()
			for _, registered := range []bool{false, true} {
				b, done, err := openBuffers(w, 4*n, registered)
				defer done()
				if err != nil {
					return err
				}
				send, _ := cuda.SliceOf[int32](b.send, 0, n)
				recv, _ := cuda.SliceOf[int32](b.recv, 0, n)
				part := func(s cuda.Slice[int32], i int) cuda.Slice[int32] { return s.Slice(i*n/4, (i+1)*n/4) }
				fill := func(salt int32) error {
					v := make([]int32, n)
					for i := range v {
						v[i] = int32(job.Rank()+1)*1000 + salt + int32(i%7)
					}
					return errors.Join(cuda.CopyToDevice(send, v, w.stream), cuda.Fill(recv, -1, w.stream))
				}
				exchange := func(*cuda.Stream) error {
					return nccl.Group(func() error {
						for i := range 3 {
							if err := errors.Join(nccl.Send(w.comm, part(send, i), peer, w.stream), nccl.Recv(w.comm, part(recv, i), peer, w.stream)); err != nil {
								return err
							}
						}
						// and one to this rank itself
						return errors.Join(nccl.Send(w.comm, part(send, 3), job.Rank(), w.stream), nccl.Recv(w.comm, part(recv, 3), job.Rank(), w.stream))
					}, w.comm)
				}
				check := func(what string, salt int32, want func(i int) int32) error {
					got := make([]int32, n)
					short, cancel := context.WithTimeout(ctx, room)
					defer cancel()
					if err := errors.Join(cuda.CopyToHost(got, recv, w.stream), w.stream.Synchronize(short)); err != nil {
						return fmt.Errorf("%s, registered=%t: %w", what, registered, err)
					}
					for i, v := range got {
						if v != want(i)+salt+int32(i%7) {
							return fmt.Errorf("%s, registered=%t: element %d is %d, want %d", what, registered, i, v, want(i)+salt+int32(i%7))
						}
					}
					return nil
				}
				exchanged := func(i int) int32 {
					if i >= 3*n/4 {
						return int32(job.Rank()+1) * 1000
					}
					return int32(peer+1) * 1000
				}
				if err := errors.Join(fill(1), exchange(w.stream), check("eager", 1, exchanged)); err != nil {
					return err
				}
				g, err := graphs.Capture(ctx, w.stream, exchange, graphs.Comms(w.comm))
				if err != nil {
					return err
				}
				for salt := range int32(3) {
					if err := errors.Join(fill(salt), g.Launch(w.stream), check("captured", salt, exchanged)); err != nil {
						return err
					}
				}
				// A collective on what was sent and received.
				sum := func(*cuda.Stream) error { return nccl.AllReduce(w.comm, send, recv, nccl.Max, w.stream) }
				largest := func(int) int32 { return 2000 }
				if err := errors.Join(fill(4), sum(w.stream), check("all-reduce afterwards", 4, largest)); err != nil {
					return err
				}
				h, err := graphs.Capture(ctx, w.stream, sum, graphs.Comms(w.comm))
				if err != nil {
					return err
				}
				if err := errors.Join(fill(5), h.Launch(w.stream), check("captured all-reduce afterwards", 5, largest)); err != nil {
					return err
				}
				// Both in one graph.
				both, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return errors.Join(exchange(s), sum(s)) }, graphs.Comms(w.comm))
				if err != nil {
					return err
				}
				if err := errors.Join(fill(6), both.Launch(w.stream), check("both", 6, largest)); err != nil {
					return err
				}
				if err := errors.Join(g.Close(), h.Close(), both.Close()); err != nil {
					return err
				}
				done()
			}
			return released(w)
		})
	}, nil)
}

// The library's own log says that Register registers and Close deregisters.
func TestLibraryRegistrationLog(t *testing.T) {
	dir := t.TempDir()
	t.Run("GPU", func(t *testing.T) {
		dltest.NeedOwnGPUs(t, 2)
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			err := withDevice(ctx, job, nil, func(w *world) error {
				b, done, err := openBuffers(w, 32<<20, true)
				defer done()
				if err != nil {
					return err
				}
				s := spec{op: nccl.OpAllReduce, count: 4 << 20}
				ty := libTypes[libF32]
				if err := errors.Join(ty.write(w, b, s), ty.call(w, b, s)); err != nil {
					return err
				}
				return ty.verify(w, b, s)
			})
			if err != nil {
				return err
			}
			logs, err := filepath.Glob(fmt.Sprintf("%s/nccl.%d.log", os.Getenv("LOG_DIR"), os.Getpid()))
			if err != nil || len(logs) != 1 {
				return fmt.Errorf("logs %v, %v", logs, err)
			}
			log, err := os.ReadFile(logs[0])
			if err != nil {
				return err
			}
			for _, part := range []string{"register comm", "IPC register", "IPC deregister"} {
				if !strings.Contains(string(log), part) {
					return fmt.Errorf("the log has no %q:\n%s", part, log)
				}
			}
			return nil
		}, append(dltest.GPUEnv(), "NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=REG", "LOG_DIR="+dir, "NCCL_DEBUG_FILE="+dir+"/nccl.%p.log")...))
	})
}

// One end of a message in memory that can be registered, the other in private memory: captured, the library would register the one end only, and lose the
// message. Both ranks are told; eager, and between equal kinds, it arrives.
func TestLibraryMixedTransfer(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			n := large()
			shared, err := nccl.Alloc[int32](w.dev, n)
			if err != nil {
				return err
			}
			defer shared.Free()
			private, err := cuda.Malloc[int32](w.dev, n)
			if err != nil {
				return err
			}
			defer private.Free()
			message := func(send, recv cuda.Slice[int32], s *cuda.Stream) error {
				if job.Rank() == 0 {
					return nccl.Send(w.comm, send, 1, s)
				}
				return nccl.Recv(w.comm, recv, 0, s)
			}
			for _, private0 := range []bool{true, false} { // rank 0's end and rank 1's are in memory of different kinds
				send, recv := shared.All(), private.All()
				if private0 {
					send, recv = recv, send
				}
				if err := errors.Join(cuda.Fill(send, 7, w.stream), cuda.Fill(recv, 1, w.stream)); err != nil {
					return err
				}
				if job.Rank() == 0 {
					err = cuda.Fill(send, 9, w.stream)
				}
				reg, regErr := w.comm.Register(shared.Memory()) // must not matter to an eager message
				if err := errors.Join(err, regErr, message(send, recv, w.stream)); err != nil {
					return err
				}
				got := make([]int32, n)
				short, cancel := context.WithTimeout(ctx, room)
				err := errors.Join(cuda.CopyToHost(got, recv, w.stream), w.stream.Synchronize(short))
				cancel()
				if err != nil {
					return fmt.Errorf("eager: %w", err)
				}
				if err := reg.Close(); err != nil {
					return err
				}
				for k, v := range got {
					if job.Rank() == 1 && v != 9 {
						return fmt.Errorf("eager: element %d is %d, want 9", k, v)
					}
				}
				g, err := graphs.Capture(ctx, w.stream, func(s *cuda.Stream) error { return message(send, recv, s) }, graphs.Comms(w.comm))
				if err == nil {
					return errors.Join(errors.New("captured: no error"), g.Close())
				}
				want := []string{"message from rank 0 to rank 1", "the send buffer is private memory", "nccl.Alloc for both or for neither"}
				if !private0 {
					want[1] = "the recv buffer is private memory"
				}
				if err := wantErr(err, nccl.ErrMixed, want...); err != nil {
					return err
				}
			}
			return nil
		})
	}, nil)
}
