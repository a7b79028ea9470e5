package nccl

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
)

// A window waits for another member's memory when the communicator fails: that member may have seen the failure first, and closed, so that nothing would come.
func TestWindowEndsWithCommunicator(t *testing.T) {
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := cuda.Open("host")
		if err != nil {
			return err
		}
		m, err := dev.Alloc(windowAlign, cuda.Shareable)
		if err != nil {
			return err
		}
		c, err := Init(ctx, job, dev)
		if err != nil {
			return err
		}
		if c.rank == 0 {
			why := errors.New("enough")
			waits, done := context.WithTimeout(ctx, 20*time.Second)
			defer done()
			ended := make(chan error, 1)
			go func() {
				w, err := c.be.(*host).newWindow(cuda.Range{Mem: m, Len: m.Size()})
				if err == nil {
					const never = 1 << 40 // an allocation that nobody offers
					err = w.open(waits, []windowOffer{{len: m.Size(), memory: m.ID()}, {len: m.Size(), memory: never}})
					err = errors.Join(err, w.close())
				}
				ended <- err
			}()
			for c.Stats().Registrations == 0 && ctx.Err() == nil { // then it looks for the other's
				time.Sleep(time.Millisecond)
			}
			c.Abort(why)
			if err := <-ended; !errors.Is(err, why) {
				return fmt.Errorf("the window ended with: %w", err)
			}
		}
		if err := job.Barrier(ctx); err != nil {
			return err
		}
		return errors.Join(c.Close(), m.Free(), dev.Close())
	})
}
