package bootstrap_test

import (
	"context"
	"fmt"
	"sync"

	"github.com/gorun-dev/gorun/bootstrap"
)

func ExampleInProcess() {
	ctx := context.Background()
	var ranks sync.WaitGroup
	for _, job := range bootstrap.InProcess(3) {
		ranks.Go(func() {
			defer job.Close()
			squares, err := job.AllGather(ctx, fmt.Append(nil, job.Rank()*job.Rank()))
			if err != nil {
				fmt.Println(err)
				return
			}
			if job.Rank() == 0 {
				fmt.Printf("%s\n", squares)
			}
		})
	}
	ranks.Wait()
	// Output: [0 1 4]
}
