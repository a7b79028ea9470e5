package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
// "well", "silently" (exit code 0 without goodbye) or "badly" (goodbye, then exit code 7). The others then wait in another
// barrier.
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
	if how[0] == "badly" {
		mark := filepath.Join(os.Getenv("RANKDIR"), "pid"+strconv.Itoa(job.Rank()))
		if job.Rank() < job.Size()-1 {
			if err := os.WriteFile(mark, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
				fail(err)
			}
		}
		if err := job.Barrier(ctx); err != nil {
			fail(err)
		}
		if job.Rank() < job.Size()-1 {
			fail(job.Barrier(ctx))
		}
		// The goodbye, and then slow to end: rank 0 has ended before.
		job.Close()
		text, _ := os.ReadFile(strings.TrimSuffix(mark, strconv.Itoa(job.Rank())) + "0")
		pid, _ := strconv.Atoi(string(text))
		for pid == 0 || alive(pid) {
			time.Sleep(time.Millisecond)
		}
		os.Exit(7)
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
