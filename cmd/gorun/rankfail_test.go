package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// failTogether is README's program: it captures an all-reduce, all that it opens is closed in defers. Rank 1 fails as how
// says: "panic" or "error" before the capture, "in-capture" in its function, "in-messages" where the others have messages in theirs, "aborts" with an Abort before; "usage" is an error that all ranks see and
// rank 0 tells, when rank 1 is gone.
func failTogether(how string) {
	log.SetFlags(0)
	err := capturing(how)
	if errors.Is(err, errShard) {
		log.Print(err)
		os.Exit(2) // as a panic does; the others have code 1
	}
	if err != nil {
		log.Fatal(err)
	}
}

var errShard = errors.New("no shard for rank 1")

func capturing(how string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	if how == "usage" {
		mark := filepath.Join(os.Getenv("RANKDIR"), "pid1")
		if job.Rank() == 1 {
			if err := os.WriteFile(mark, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
				return err
			}
		}
		if err := job.Barrier(ctx); err != nil {
			return err
		}
		if job.Rank() == 0 {
			text, err := os.ReadFile(mark)
			if err != nil {
				return err
			}
			pid, err := strconv.Atoi(string(text))
			for ; err == nil && alive(pid); time.Sleep(time.Millisecond) {
			}
			fmt.Fprintln(os.Stderr, "invalid size 64Q")
		}
		os.Exit(2)
	}
	dev, err := cuda.Open(job.Device())
	if err != nil {
		return err
	}
	defer dev.Close()
	grad, err := nccl.Alloc[float32](dev, 1<<10)
	if err != nil {
		return err
	}
	defer grad.Free()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer stream.Close()
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return err
	}
	defer comm.Close()
	culprit := job.Rank() == 1
	if culprit {
		switch how {
		case "panic":
			panic(errShard)
		case "error":
			return errShard
		case "aborts":
			comm.Abort(errShard)
			return errShard
		}
	}
	g, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
		if culprit && how == "in-capture" {
			return errShard
		}
		if how == "in-messages" {
			if culprit {
				return errShard
			}
			next, prev := (job.Rank()+1)%job.Size(), (job.Rank()+job.Size()-1)%job.Size()
			return nccl.Group(func() error {
				return errors.Join(nccl.Send(comm, grad.All().Slice(0, 8), next, s), nccl.Recv(comm, grad.All().Slice(8, 16), prev, s))
			}, comm)
		}
		return nccl.AllReduce(comm, grad.All(), grad.All(), nccl.Avg, s)
	}, graphs.Comms(comm))
	if err != nil {
		return err
	}
	return g.Close()
}
