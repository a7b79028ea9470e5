package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
)

// listenOnMasterPort does what the meeting point of PyTorch or JAX does on rank 0.
func listenOnMasterPort() {
	if os.Getenv("RANK") != "0" {
		return
	}
	l, err := net.Listen("tcp", net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	defer l.Close()
	fmt.Println("listening")
}

// joinJob is a member of the job: it passes a barrier, then ends as how says on the last rank:
// "well", or "silently" (exit code 0 without goodbye). The others then wait in a second barrier.
func joinJob(how []string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	fail := func(err error) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	job, err := bootstrap.Join(ctx)
	if err != nil {
		fail(err)
	}
	if err := job.Barrier(ctx); err != nil {
		fail(err)
	}
	if how[0] == "silently" {
		if job.Rank() == job.Size()-1 {
			os.Exit(0)
		}
		if err := job.Barrier(ctx); err != nil {
			fail(err)
		}
	}
	fmt.Printf("rank %d of %d joined\n", job.Rank(), job.Size())
	if err := job.Close(); err != nil {
		fail(err)
	}
}
