package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// twoRanks stands for a program that gorun starts twice: it gives f a device, a communicator and a stream on each rank.
func twoRanks(f func(ctx context.Context, dev *cuda.Device, comm *nccl.Comm, s *cuda.Stream) error) {
	var wg sync.WaitGroup
	for _, job := range bootstrap.InProcess(2) { // a program calls bootstrap.Join
		wg.Go(func() {
			defer job.Close()
			err := with(context.Background(), job, nil, func(w *world) error { return f(w.ctx, w.dev, w.comm, w.stream) })
			if err != nil {
				fmt.Println(err)
			}
		})
	}
	wg.Wait()
}

// Registered memory is read and written straight by the other ranks.
func ExampleComm_Register() {
	twoRanks(func(ctx context.Context, dev *cuda.Device, comm *nccl.Comm, s *cuda.Stream) error {
		grad, err := nccl.Alloc[float32](dev, 1000)
		if err != nil {
			return err
		}
		defer grad.Free()
		reg, err := comm.Register(grad.Memory())
		if err != nil {
			return err
		}
		defer reg.Close()
		for range 10 {
			if err := nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Avg, s); err != nil {
				return err
			}
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if st := comm.Stats(); comm.Rank() == 0 {
			fmt.Println(st.BytesDirect, "bytes direct,", st.BytesStaged, "staged")
		}
		return nil
	})
	// Output: 80000 bytes direct, 0 staged
}

// One block, registered once, holds the send and the receive buffer at the same offsets on every rank.
func ExampleCarve() {
	twoRanks(func(ctx context.Context, dev *cuda.Device, comm *nccl.Comm, s *cuda.Stream) error {
		arena, err := nccl.NewArena(dev, 1<<20, comm)
		if err != nil {
			return err
		}
		defer arena.Close()
		send, err := nccl.Carve[int64](arena, 3)
		if err != nil {
			return err
		}
		recv, err := nccl.Carve[int64](arena, 6)
		if err != nil {
			return err
		}
		for i := range send.Host() {
			send.Host()[i] = int64(10*comm.Rank() + i)
		}
		if err := nccl.AllGather(comm, send, recv, s); err != nil {
			return err
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if comm.Rank() == 1 {
			fmt.Println(recv.Host(), "at offset", recv.Range().Off)
		}
		return nil
	})
	// Output: [0 1 2 10 11 12] at offset 256
}

// Two ranks exchange their buffers: in one group, so that neither waits for the other.
func ExampleGroup() {
	twoRanks(func(ctx context.Context, dev *cuda.Device, comm *nccl.Comm, s *cuda.Stream) error {
		b, err := nccl.Alloc[uint8](dev, 2)
		if err != nil {
			return err
		}
		defer b.Free()
		mine, theirs := b.Slice(0, 1), b.Slice(1, 2)
		mine.Host()[0] = uint8('a' + comm.Rank())
		peer := 1 - comm.Rank()
		err = nccl.Group(func() error {
			return errors.Join(nccl.Send(comm, mine, peer, s), nccl.Recv(comm, theirs, peer, s))
		}, comm)
		if err != nil {
			return err
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if comm.Rank() == 0 {
			fmt.Printf("%c\n", theirs.Host()[0])
		}
		return nil
	})
	// Output: b
}

// Part i of what a rank sends goes to rank i: a transposition of the parts.
func ExampleAllToAll() {
	twoRanks(func(ctx context.Context, dev *cuda.Device, comm *nccl.Comm, s *cuda.Stream) error {
		send, err := nccl.Alloc[int32](dev, 2)
		if err != nil {
			return err
		}
		defer send.Free()
		recv, err := nccl.Alloc[int32](dev, 2)
		if err != nil {
			return err
		}
		defer recv.Free()
		for i := range int32(2) {
			send.All().Host()[i] = 10*int32(comm.Rank()) + i
		}
		if err := nccl.AllToAll(comm, send.All(), recv.All(), s); err != nil {
			return err
		}
		if err := s.Synchronize(ctx); err != nil {
			return err
		}
		if comm.Rank() == 1 {
			fmt.Println(recv.All().Host())
		}
		return nil
	})
	// Output: [1 11]
}
