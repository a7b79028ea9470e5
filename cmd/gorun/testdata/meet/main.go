// Command meet is a rank that tells the others what it was built for. Given "fail", the last rank exits with code 5 then.
package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"

	"github.com/gorun-dev/gorun/bootstrap"
)

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	all, err := job.AllGather(ctx, []byte(runtime.GOARCH))
	if err != nil {
		return err
	}
	if job.Rank() == 0 {
		fmt.Printf("%s\n", bytes.Join(all, []byte(" ")))
	}
	if len(os.Args) > 1 && os.Args[1] == "fail" && job.Rank() == job.Size()-1 {
		os.Exit(5)
	}
	return job.Close()
}
