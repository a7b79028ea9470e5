// Barrier joins the job, passes a barrier and leaves: MPI_Init, MPI_Barrier, MPI_Finalize. It needs no device.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "barrier:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	job, err := bootstrap.Join(ctx)
	if err != nil {
		return err
	}
	defer job.Close()
	return job.Barrier(ctx)
}
