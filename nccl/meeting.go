package nccl

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"weak"

	"github.com/gorun-dev/gorun/bootstrap"
)

// inits counts, for each job and each set of members, the communicators made so far: members make them in the same
// order, so that the count names the meeting. An entry goes with its job.
var inits struct {
	sync.Mutex
	of map[weak.Pointer[bootstrap.Job]]map[string]int
}

func nextInit(job *bootstrap.Job, who string) int {
	inits.Lock()
	defer inits.Unlock()
	k := weak.Make(job)
	m := inits.of[k]
	if m == nil {
		if inits.of == nil {
			inits.of = map[weak.Pointer[bootstrap.Job]]map[string]int{}
		}
		m = map[string]int{}
		inits.of[k] = m
		runtime.AddCleanup(job, func(k weak.Pointer[bootstrap.Job]) {
			inits.Lock()
			delete(inits.of, k)
			inits.Unlock()
		}, k)
	}
	m[who]++
	return m[who]
}

// meetID makes the unique id on the first member and waits for it on the others. The end of a member, also one in good order, ends that: the first end is the cause, for
// those that wait for a member may have ended with it.
func (c *Comm) meetID(ctx context.Context, name string) (bootstrap.UniqueID, error) {
	if c.rank != 0 {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		stop := c.job.Watch(func(e bootstrap.Event) {
			if slices.Contains(c.ranks, e.Rank) && (e.Kind == bootstrap.RankDied || e.Kind == bootstrap.RankLeft) && e.Err != nil {
				cancel(e.Err)
			}
		})
		defer stop()
		id, err := c.job.UniqueID(ctx, name)
		if end, ok := errors.AsType[*bootstrap.RankError](context.Cause(ctx)); ok && err != nil {
			return id, end
		}
		if err != nil {
			err = fmt.Errorf("rank %d of the job has not begun it: %w", c.ranks[0], err)
		}
		return id, err
	}
	var id bootstrap.UniqueID
	rand.Read(id[:]) // never fails
	return id, c.job.PublishID(ctx, name, id)
}

func joinNames(names []string) string { return strings.Join(names, ", ") }
