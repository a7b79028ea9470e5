package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// outcome is what a rank of a mistake got.
type outcome struct {
	is   error    // errors.Is; nil: it succeeded
	text []string // all in the error's text
}

// mistake is a program with a fault that three ranks run. wrong does what the culprit does, right what the others do; each
// gives back the error that its rank got.
type mistake struct {
	name   string
	setup  func(ctx context.Context, r *rank) error
	wrong  func(ctx context.Context, r *rank) error
	right  func(ctx context.Context, r *rank) error
	bad    outcome // of the culprit; %[1]d in the text is its rank, in both
	good   outcome // of the others
	ruined bool    // the communicator cannot be used afterwards
	panes  bool    // it leaves windows behind
	graphs bool    // ranks have graphs, which those of the same process may not have closed yet
}

var errOwn = errors.New("no luck today")

// capture captures fn on the rank's communicator; a graph that should not be there is an error without any sentinel.
func capture(ctx context.Context, r *rank, fn func(s *cuda.Stream) error, o ...graphs.Option) error {
	g, err := graphs.Capture(ctx, r.stream, fn, append([]graphs.Option{graphs.Comms(append([]*nccl.Comm{r.comm}, r.others...)...)}, o...)...)
	if err != nil {
		return err
	}
	return g.Close()
}

// fork makes the rank's side stream part of the capture of s.
func fork(r *rank, s *cuda.Stream) error {
	e, err := r.dev.NewEvent()
	if err != nil {
		return err
	}
	if r.side == nil {
		if r.side, err = r.dev.NewStream(); err != nil {
			return err
		}
	}
	return errors.Join(s.Record(e), r.side.Wait(e), e.Close())
}

func allReduce(r *rank, s *cuda.Stream) error {
	return nccl.AllReduce(r.comm, r.a.All(), r.b.All(), nccl.Sum, s)
}

// calls captures one all-reduce, then fn, then another one.
func calls(fn func(r *rank, s *cuda.Stream) error, o ...graphs.Option) func(context.Context, *rank) error {
	return func(ctx context.Context, r *rank) error {
		return capture(ctx, r, func(s *cuda.Stream) error {
			if err := allReduce(r, s); err != nil {
				return err
			}
			if err := fn(r, s); err != nil {
				return err
			}
			return allReduce(r, s)
		}, o...)
	}
}

// mistakes are for buffers of n elements.
func mistakes(n int) []mistake {
	half := n / 2
	same := func(o outcome) (outcome, outcome) { return o, o }
	var all []mistake
	add := func(m mistake) { all = append(all, m) }

	// A call that is not the others' call: the same error on all ranks.
	other := func(name string, right, wrong func(r *rank, s *cuda.Stream) error, text ...string) {
		m := mistake{name: name, right: calls(right), wrong: calls(wrong)}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, append(text, "call 2 on communicator world")})
		add(m)
	}
	other("op", allReduce, func(r *rank, s *cuda.Stream) error {
		return nccl.Broadcast(r.comm, r.a.All(), r.b.All(), 0, s)
	}, "broadcast", "all-reduce")
	other("count", allReduce, func(r *rank, s *cuda.Stream) error {
		return nccl.AllReduce(r.comm, r.a.Slice(0, half), r.b.Slice(0, half), nccl.Sum, s)
	}, fmt.Sprintf("all-reduce of %d float32", half), fmt.Sprintf("all-reduce of %d float32", n))
	other("type", allReduce, func(r *rank, s *cuda.Stream) error {
		a, err := cuda.SliceOf[int32](r.a.Memory(), 0, n)
		if err != nil {
			return err
		}
		b, err := cuda.SliceOf[int32](r.b.Memory(), 0, n)
		if err != nil {
			return err
		}
		return nccl.AllReduce(r.comm, a, b, nccl.Sum, s)
	}, "int32", "float32")
	reduceTo := func(root int) func(r *rank, s *cuda.Stream) error {
		return func(r *rank, s *cuda.Stream) error {
			return nccl.Reduce(r.comm, r.a.All(), r.b.All(), nccl.Sum, root, s)
		}
	}
	other("root", reduceTo(0), reduceTo(1), "to rank 0", "to rank 1")
	other("redop", allReduce, func(r *rank, s *cuda.Stream) error {
		return nccl.AllReduce(r.comm, r.a.All(), r.b.All(), nccl.Max, s)
	}, "max", "sum")
	other("order", func(r *rank, s *cuda.Stream) error {
		return errors.Join(reduceTo(0)(r, s), nccl.Broadcast(r.comm, r.a.All(), r.b.All(), 0, s))
	}, func(r *rank, s *cuda.Stream) error {
		return errors.Join(nccl.Broadcast(r.comm, r.a.All(), r.b.All(), 0, s), reduceTo(0)(r, s))
	}, "reduce", "broadcast")
	other("a call of a group", func(r *rank, s *cuda.Stream) error {
		return nccl.Group(func() error { return errors.Join(allReduce(r, s), allReduce(r, s)) }, r.comm)
	}, func(r *rank, s *cuda.Stream) error {
		return nccl.Group(func() error { return errors.Join(allReduce(r, s), reduceTo(0)(r, s)) }, r.comm)
	}, "call 2 of the group", "reduce")

	// Fewer calls: the others are told where the function ended.
	{
		m := mistake{name: "fewer calls", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
			return capture(ctx, r, func(s *cuda.Stream) error { return allReduce(r, s) })
		}}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d ended its capture at matrix_test.go:", "after 1 call"}})
		add(m)
	}
	{
		m := mistake{name: "no calls", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
			return capture(ctx, r, func(s *cuda.Stream) error { return nil })
		}}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d ended its capture at matrix_test.go:", "without a call"}})
		add(m)
	}
	{
		m := mistake{name: "other demands", right: calls(allReduce), wrong: calls(allReduce, graphs.Require(nccl.Graph))}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"requires mode", "none", "graph"}})
		add(m)
	}

	// Registration.
	{
		m := mistake{name: "one registered", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
			ra, err := r.comm.Register(r.a.Memory())
			if err != nil {
				return err
			}
			defer ra.Close()
			return calls(allReduce)(ctx, r)
		}}
		m.bad, m.good = same(outcome{nccl.ErrMixed, []string{"rank %[1]d", "a send buffer in registered memory", "memory that can be registered but is not", "-byte allocation"}})
		add(m)
		m = mistake{name: "one unregistered", right: m.wrong, wrong: m.right}
		m.bad, m.good = same(outcome{nccl.ErrMixed, []string{"rank %[1]d", "a send buffer in registered memory", "memory that can be registered but is not", "-byte allocation"}})
		add(m)
	}
	{
		m := mistake{name: "one private", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
			p, err := cuda.Malloc[float32](r.dev, n)
			if err != nil {
				return err
			}
			err = calls(func(r *rank, s *cuda.Stream) error {
				return nccl.AllReduce(r.comm, p.All(), r.b.All(), nccl.Sum, s)
			})(ctx, r)
			return errors.Join(err, p.Free())
		}}
		m.bad, m.good = same(outcome{nccl.ErrMixed, []string{"rank %[1]d", "in private memory"}})
		add(m)
	}
	{
		reduceAt := func(off int) func(*rank, *cuda.Stream) error {
			return func(r *rank, s *cuda.Stream) error {
				return nccl.AllReduce(r.comm, r.a.Slice(off, off+half), r.b.Slice(0, half), nccl.Sum, s)
			}
		}
		m := mistake{name: "offsets where a window is demanded", panes: true, right: calls(reduceAt(0), graphs.Require(nccl.Window)), wrong: calls(reduceAt(16), graphs.Require(nccl.Window))}
		m.bad, m.good = same(outcome{graphs.ErrMode, []string{"mode window is required", "the send buffer is at offset", "64 on rank"}})
		add(m)
	}

	// The function fails.
	failing := func(name string, fail func(r *rank, s *cuda.Stream) error, is error, text ...string) {
		add(mistake{name: name, right: calls(allReduce), wrong: calls(fail),
			bad:  outcome{is, text},
			good: outcome{graphs.ErrPeer, append([]string{"rank %[1]d"}, text...)}})
	}
	failing("error", func(*rank, *cuda.Stream) error { return errOwn }, errOwn, "no luck today")
	failing("panic", func(*rank, *cuda.Stream) error { panic(errOwn) }, errOwn, "panicked", "matrix_test.go:", "no luck today")
	failing("panic with a text", func(*rank, *cuda.Stream) error { panic("boom 17") }, isPanic{}, "panicked", "matrix_test.go:", "boom 17")
	failing("panic with a long text", func(*rank, *cuda.Stream) error { panic("boom 18 " + strings.Repeat("and more ", 10_000)) }, isPanic{}, "boom 18 and more and")
	failing("goexit", func(*rank, *cuda.Stream) error { runtime.Goexit(); return nil }, isAny{}, "runtime.Goexit")
	failing("synchronize", func(r *rank, s *cuda.Stream) error { return s.Synchronize(context.Background()) }, cuda.ErrCaptureUnsafe, cuda.ErrCaptureUnsafe.Error())
	failing("invalidated", func(r *rank, s *cuda.Stream) error {
		s.Synchronize(context.Background()) // and nobody looks at the error
		return nil
	}, isAny{}, "captur")
	failing("allocation", func(r *rank, s *cuda.Stream) error {
		b, err := nccl.Alloc[float32](r.dev, 8)
		if err == nil {
			b.Free()
			return errors.New("memory was allocated in a capture")
		}
		return err
	}, cuda.ErrCaptureUnsafe, cuda.ErrCaptureUnsafe.Error())
	failing("a call outside", func(r *rank, s *cuda.Stream) error {
		outside, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		return errors.Join(allReduce(r, outside), outside.Close())
	}, nccl.ErrInUse, "capture at matrix_test.go:")
	failing("a fork that is not joined", func(r *rank, s *cuda.Stream) error {
		if err := fork(r, s); err != nil {
			return err
		}
		return errors.Join(cuda.Fill(r.a.All(), 1, r.side), allReduce(r, s))
	}, cuda.ErrCaptureUnjoined, cuda.ErrCaptureUnjoined.Error())
	failing("a stream of another capture", func(r *rank, s *cuda.Stream) error {
		other, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		if err := other.BeginCapture(cuda.CaptureThreadLocal); err != nil {
			return err
		}
		err = allReduce(r, other)
		g, end := other.EndCapture()
		if g != nil {
			end = errors.Join(end, g.Destroy())
		}
		return errors.Join(err, end, other.Close())
	}, isAny{}, "is on a stream that is not part of this capture")
	add(mistake{name: "a stream that captures already", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := r.stream.BeginCapture(cuda.CaptureRelaxed); err != nil {
			return err
		}
		err := calls(allReduce)(ctx, r)
		g, end := r.stream.EndCapture()
		if g != nil {
			end = errors.Join(end, g.Destroy())
		}
		return errors.Join(err, end)
	}, bad: outcome{isAny{}, []string{"capture at matrix_test.go:", "captur"}}, good: outcome{graphs.ErrPeer, []string{"rank %[1]d ended its capture", "without a call"}}})
	add(mistake{name: "a communicator that is named twice", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
		return calls(allReduce, graphs.Comms(r.comm))(ctx, r)
	}, bad: outcome{nccl.ErrInUse, nil}, good: outcome{graphs.ErrPeer, []string{"rank %[1]d ended its capture", "without a call", "leased"}}})
	add(mistake{name: "a communicator that is nil", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
		return calls(allReduce, graphs.Comms(nil))(ctx, r)
	}, bad: outcome{isAny{}, []string{"is nil"}}, good: outcome{graphs.ErrPeer, []string{"rank %[1]d ended its capture", "is nil"}}})
	add(mistake{name: "a communicator that is not named",
		setup: func(ctx context.Context, r *rank) error {
			_, err := r.another(ctx, "unnamed")
			return err
		},
		right: func(ctx context.Context, r *rank) error {
			_, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return errors.Join(allReduce(r, s), allReduce(r, s)) }, graphs.Comms(r.comm))
			return err
		},
		wrong: func(ctx context.Context, r *rank) error {
			_, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
				return errors.Join(allReduce(r, s), nccl.AllReduce(r.others[0], r.a.All(), r.b.All(), nccl.Sum, s))
			}, graphs.Comms(r.comm))
			return err
		},
		bad:  outcome{nccl.ErrArgument, []string{"graphs.Comms"}},
		good: outcome{graphs.ErrPeer, []string{"rank %[1]d", "graphs.Comms"}}})
	add(mistake{name: "cancelled", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return calls(func(r *rank, s *cuda.Stream) error { cancel(); return nil })(ctx, r)
	}, bad: outcome{context.Canceled, nil}, good: outcome{graphs.ErrPeer, []string{"rank %[1]d gave up its capture", "context canceled"}}})
	add(mistake{name: "cancelled before", right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return calls(allReduce)(ctx, r)
	}, bad: outcome{context.Canceled, nil}, good: outcome{graphs.ErrPeer, []string{"rank %[1]d gave up its capture", "without a call", "context canceled"}}})

	// Without any capture: the ledger tells.
	{
		eager := func(n int) func(context.Context, *rank) error {
			return func(ctx context.Context, r *rank) error {
				err := nccl.AllReduce(r.comm, r.a.Slice(0, n), r.b.Slice(0, n), nccl.Sum, r.stream)
				if err == nil {
					err = r.stream.Synchronize(ctx)
				}
				return err
			}
		}
		m := mistake{name: "eager count", ruined: true, right: eager(n), wrong: eager(half)}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d: all-reduce of " + fmt.Sprint(half), "all-reduce of " + fmt.Sprint(n)}})
		add(m)
	}

	// Another call on the communicator where the others capture.
	{
		m := mistake{name: "eager call", ruined: true, right: calls(allReduce), wrong: func(ctx context.Context, r *rank) error {
			err := allReduce(r, r.stream)
			if err == nil {
				err = r.stream.Synchronize(ctx)
			}
			return err
		}}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"rank %[1]d: all-reduce", "a capture"}})
		add(m)
	}

	// Two communicators.
	twice := func(ctx context.Context, r *rank) error {
		_, err := r.another(ctx, "second")
		return err
	}
	on := func(r *rank, i int, s *cuda.Stream) error {
		return nccl.AllReduce([]*nccl.Comm{r.comm, r.others[0]}[i], r.a.All(), r.b.All(), nccl.Sum, s)
	}
	{
		ab := func(x, y int) func(context.Context, *rank) error {
			return func(ctx context.Context, r *rank) error {
				return capture(ctx, r, func(s *cuda.Stream) error {
					if err := on(r, x, s); err != nil {
						return err
					}
					return on(r, y, s)
				})
			}
		}
		m := mistake{name: "b before a", setup: twice, right: ab(0, 1), wrong: ab(1, 0)}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"wait for each other", "rank %[1]d is in capture at matrix_test.go:"}})
		add(m)
	}
	{
		named := func(x, y int) func(context.Context, *rank) error {
			return func(ctx context.Context, r *rank) error {
				comms := []*nccl.Comm{r.comm, r.others[0]}
				_, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error { return nil }, graphs.Comms(comms[x], comms[y]))
				return err
			}
		}
		m := mistake{name: "named in another order", setup: twice, right: named(0, 1), wrong: named(1, 0)}
		m.bad, m.good = same(outcome{nccl.ErrMismatch, []string{"wait for each other"}})
		add(m)
	}
	add(mistake{name: "error with two communicators", setup: twice,
		right: func(ctx context.Context, r *rank) error {
			return capture(ctx, r, func(s *cuda.Stream) error { return on(r, 1, s) })
		},
		wrong: func(ctx context.Context, r *rank) error {
			return capture(ctx, r, func(s *cuda.Stream) error { return errOwn })
		},
		bad:  outcome{errOwn, nil},
		good: outcome{graphs.ErrPeer, []string{"rank %[1]d ended its capture", "no luck today", "on communicator second"}}})
	return slices.Concat(all, replayMistakes(), transferMistakes())
}

type isAny struct{ error }
type isPanic struct{ error }

// is is errors.Is, and knows the two above.
func is(err, want error) bool {
	switch want.(type) {
	case isAny:
		return err != nil
	case isPanic:
		_, ok := errors.AsType[*graphs.PanicError](err)
		return ok
	}
	return errors.Is(err, want)
}

func (o outcome) check(err error, culprit int) error {
	if o.is == nil {
		return err
	}
	if err == nil {
		return fmt.Errorf("no error, want %v", o.is)
	}
	if !is(err, o.is) {
		return fmt.Errorf("error %q is not %q", err, o.is)
	}
	for _, want := range o.text {
		if strings.Contains(want, "%[1]d") {
			want = fmt.Sprintf(want, culprit)
		}
		if !strings.Contains(err.Error(), want) {
			return fmt.Errorf("error %q has no %q", err, want)
		}
	}
	return nil
}

// TestMistakes runs each mistake with the culprit at the beginning, in the middle and at the end. Every rank must get its error, nothing may be left registered,
// and where the mistake allows it the communicator must work again.
func TestMistakes(t *testing.T) {
	for _, m := range mistakes(elements) {
		t.Run(m.name, func(t *testing.T) {
			for culprit := range 3 {
				t.Run(fmt.Sprintf("rank %d", culprit), func(t *testing.T) { m.run(t, culprit) })
			}
		})
	}
}

func (m mistake) run(t *testing.T, culprit int) {
	before := memfds(t)
	var mu sync.Mutex
	errs := map[int]string{}
	ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := newRank(ctx, job)
		if err != nil {
			return err
		}
		err = m.on(ctx, r, culprit)
		if err == nil {
			err = r.close()
		}
		mu.Lock()
		defer mu.Unlock()
		errs[job.Rank()] = r.got
		return err
	})
	if after := memfds(t); after != before {
		t.Errorf("%d mappings of shared memory, %d before", after, before)
	}
	for r := range 3 {
		t.Logf("rank %d: %s", r, errs[r])
	}
}

// on makes the mistake on one rank, and checks what it got.
func (m mistake) on(ctx context.Context, r *rank, culprit int) error {
	if m.setup != nil {
		if err := m.setup(ctx, r); err != nil {
			return err
		}
	}
	do, want := m.right, m.good
	if r.job.Rank() == culprit {
		do, want = m.wrong, m.bad
	}
	r.culprit = culprit
	begin := time.Now()
	err := do(ctx, r)
	if r.took = time.Since(begin); r.took > room {
		return fmt.Errorf("the error came after %v: %w", r.took, err)
	}
	if err != nil {
		r.got = err.Error()
	}
	if err := want.check(err, culprit); err != nil {
		return err
	}
	if live := graphs.Live(); len(live) > 0 && !m.graphs {
		return fmt.Errorf("live graphs: %q", live)
	}
	if m.ruined {
		if r.comm.Err() == nil {
			return errors.New("the communicator has no error")
		}
		return nil
	}
	for _, c := range append([]*nccl.Comm{r.comm}, r.others...) {
		if r.dev.Platform() != cuda.Host { // there the library lets go later
			if err := c.Drain(ctx); err != nil {
				return err
			}
		}
		if err := empty(c); err != nil {
			return err
		}
		if err := r.works(ctx, c); err != nil {
			return err
		}
	}
	return nil
}
