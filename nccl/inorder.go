package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
)

// ahead is the end of a meeting by a member that has enqueued a call which this rank has not, and so has not come.
type ahead struct {
	rank int
	rec  bootstrap.Record
}

func (a ahead) Error() string { return fmt.Sprintf("rank %d is in %s", a.rank, recordText(a.rec)) }

// meetInOrder is Meet for what is called in the order of the collectives, as Split: a member that is past this rank's last call without having come has done
// something else. Its ledger alone does not say so, because the meeting may be over and its answer under way: who had not come is in the answer to giving up.
func (c *Comm) meetInOrder(ctx context.Context, value []byte, what string) ([][]byte, error) {
	if c.acct == nil || c.check == Trust {
		return c.Meet(ctx, value, what)
	}
	own := c.acct.Last() // as long as this rank is here
	meeting, giveUp := context.WithCancelCause(ctx)
	defer giveUp(nil)
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for tick := time.NewTicker(longWait); ; {
			select {
			case <-stop:
				tick.Stop()
				return
			case <-tick.C:
			}
			for r, p := range c.peers {
				if r == c.rank || p.acct == nil || !p.acct.Known() || p.acct.Last() <= own {
					continue
				}
				if rec, ok := p.acct.At(own + 1); ok || c.detailed(r, own+1, own+1) {
					giveUp(ahead{r, rec})
				}
			}
		}
	})
	all, err := c.Meet(meeting, value, what)
	close(stop)
	watch.Wait()
	a, ok := errors.AsType[ahead](context.Cause(meeting))
	if err == nil || !ok || ctx.Err() != nil {
		return all, err
	}
	late, ok := errors.AsType[*bootstrap.WaitError](err)
	if !ok || !slices.Contains(late.Missing, c.ranks[a.rank]) {
		return nil, err
	}
	theirs := "another call"
	if a.rec.Seq > 0 {
		theirs = recordText(a.rec)
	}
	hi, lo, his, los := a.rank, c.rank, theirs, what
	if hi < lo {
		hi, lo, his, los = lo, hi, los, his
	}
	return nil, c.errorf(what, c.fail(causef(ErrMismatch, "call #%d: rank %d: %s; rank %d: %s", own+1, hi, his, lo, los), true, false))
}
