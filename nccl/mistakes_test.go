package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/nccl"
)

// How long after a mistake every rank has its error: a contradiction between calls, the end of a rank.
const (
	contradictionBound = time.Second
	deathBound         = 3 * time.Second
)

// patience is the deadline of ranks that wait for one which does not come. The others of n are to be there by then: they would be named, too.
func patience(n int) time.Duration {
	if n > 2 {
		return time.Second
	}
	return 300 * time.Millisecond
}

// attempt is what a rank has for one mistake: a communicator of its own, and buffers of n elements.
type attempt struct {
	*world
	culprit    int
	n          int
	mem        buffers
	send, recv cuda.Slice[float32]
	undo       []func() error
}

// keep has f done when the mistake is over, last first.
func (a *attempt) keep(f func() error) { a.undo = append(a.undo, f) }

// wait is the outcome of an enqueued call, however it ends.
func (a *attempt) wait(err error) error {
	ctx, cancel := context.WithTimeout(a.ctx, room)
	defer cancel()
	return outcome(ctx, a.stream, err)
}

// fails is the outcome of a call that contradicts another rank's. The device may be done with it before the other rank has come, or be done with both,
// with wrong data: then the communicator tells.
func (a *attempt) fails(err error) error {
	err = a.wait(err)
	for end := time.Now().Add(room); err == nil && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
		err = a.comm.Err()
	}
	return err
}

// deadline waits no longer than patience, and again while others than the culprit have not come.
func (a *attempt) deadline(err error) error {
	for end := time.Now().Add(room); ; {
		ctx, cancel := context.WithTimeout(a.ctx, patience(2))
		got := outcome(ctx, a.stream, err)
		cancel()
		if !errors.Is(got, context.DeadlineExceeded) || err != nil || !a.namesOther(got) || time.Now().After(end) {
			return got
		}
	}
}

// namesOther reports whether an error of a wait names a rank that is neither this one nor the culprit as one that has not come.
func (a *attempt) namesOther(err error) bool {
	_, waits, _ := strings.Cut(err.Error(), "waits for ")
	for r := range a.comm.Size() {
		if r != a.culprit && r != a.comm.Rank() && strings.Contains(waits, fmt.Sprintf("rank %d (", r)) {
			return true
		}
	}
	return false
}

func (a *attempt) sum(count int) error {
	return nccl.AllReduce(a.comm, a.send.Slice(0, count), a.recv.Slice(0, count), nccl.Sum, a.stream)
}

// works shows that the communicator does.
func (a *attempt) works() error {
	const k = 1000
	me, n := a.comm.Rank(), a.comm.Size()
	values := make([]float32, k)
	for i := range values {
		values[i] = float32(i + me)
	}
	err := errors.Join(cuda.CopyToDevice(a.send.Slice(0, k), values, a.stream), a.sum(k), cuda.CopyToHost(values, a.recv.Slice(0, k), a.stream))
	if err = a.wait(err); err != nil {
		return err
	}
	for i, got := range values {
		if want := float32(n*i + n*(n-1)/2); got != want {
			return fmt.Errorf("element %d is %v, want %v", i, got, want)
		}
	}
	return nil
}

// register registers the buffers of this rank until the mistake is over.
func (a *attempt) register(ms ...*cuda.Memory) error {
	for _, m := range ms {
		r, err := a.comm.Register(m)
		if err != nil {
			return err
		}
		a.keep(r.Close)
	}
	return nil
}

func firstOther(culprit int) int {
	if culprit == 0 {
		return 1
	}
	return 0
}

func (a *attempt) first() int { return firstOther(a.culprit) }

// told is what a rank must get.
type told struct {
	is   error    // errors.Is; nil: no error
	text []string // all in the error's text. CULPRIT and FIRST stand for the culprit's rank and that of the first of the others
}

func (o told) check(err error, culprit int) error {
	if o.is == nil && o.text == nil {
		return err
	}
	text := make([]string, len(o.text))
	for i, s := range o.text {
		text[i] = strings.NewReplacer("CULPRIT", strconv.Itoa(culprit), "FIRST", strconv.Itoa(firstOther(culprit))).Replace(s)
	}
	return wantErr(err, o.is, text...)
}

// mistake is a program with a fault. wrong is what the culprit does, right what the others do; each gives back the error that its rank got.
type mistake struct {
	name         string
	trials       string // the observed faults of the libraries, by number, that it stands for
	right, wrong func(a *attempt) error
	setup        func(a *attempt) error // on all ranks, when the communicator works
	bad, good    told                   // of the culprit, of the others
	within       time.Duration          // from the mistake to the error on every rank; 0: there is a deadline in it
	usable       bool                   // the communicator works on
	cold         bool                   // the first call on the communicator: the library still has to connect its members
}

// mistakes are those of eager calls, registration and windows.
func mistakes() []mistake {
	var all []mistake
	add := func(m mistake) { all = append(all, m) }

	// Two calls that contradict each other: every rank gets the same error, which names both calls and both ranks.
	differ := func(name, trials string, right, wrong func(a *attempt) error, text ...string) {
		all := told{nccl.ErrMismatch, append([]string{"rank CULPRIT: "}, text...)}
		add(mistake{name: name, trials: trials, right: right, wrong: wrong, bad: all, good: all, within: contradictionBound})
	}
	small := func(a *attempt) error { return a.fails(a.sum(1024)) }
	large := func(a *attempt) error { return a.fails(a.sum(a.n)) }
	as := func(count int, sum func(m *cuda.Memory, n *cuda.Memory, count int, a *attempt) error) func(*attempt) error {
		return func(a *attempt) error {
			k := count
			if k == 0 {
				k = a.n
			}
			return a.fails(sum(a.send.Memory(), a.recv.Memory(), k, a))
		}
	}
	differ("count, small", "5", small, func(a *attempt) error { return a.fails(a.sum(2048)) }, "all-reduce of 2048 float32, sum", "all-reduce of 1024 float32, sum")
	differ("count, large", "5", large, func(a *attempt) error { return a.fails(a.sum(a.n / 2)) }, "float32, sum")
	differ("count, zero", "5", small, func(a *attempt) error { return a.fails(a.sum(0)) }, "all-reduce of 0 float32", "all-reduce of 1024 float32")
	differ("type, small", "5", small, as(1024, sumAs[float64]), "all-reduce of 1024 float64", "all-reduce of 1024 float32")
	differ("type, large", "5", large, as(0, sumAs[int32]), "int32, sum", "float32, sum")
	differ("reduction", "5", large, func(a *attempt) error {
		return a.fails(nccl.AllReduce(a.comm, a.send, a.recv, nccl.Max, a.stream))
	}, "float32, max", "float32, sum")
	differ("operation", "5", small, func(a *attempt) error {
		return a.fails(nccl.Broadcast(a.comm, a.send.Slice(0, 1024), a.recv.Slice(0, 1024), 0, a.stream))
	}, "broadcast of 1024 float32, from rank 0", "all-reduce of 1024 float32, sum")
	rooted := func(root int) func(*attempt) error {
		return func(a *attempt) error {
			return a.fails(nccl.Broadcast(a.comm, a.send, a.recv, root, a.stream))
		}
	}
	differ("root", "5", rooted(0), rooted(1), "from rank 0", "from rank 1")
	broadcast := func(a *attempt) error { return nccl.Broadcast(a.comm, a.send, a.recv, 0, a.stream) }
	differ("order", "5", func(a *attempt) error { return a.fails(errors.Join(a.sum(a.n), broadcast(a))) },
		func(a *attempt) error { return a.fails(errors.Join(broadcast(a), a.sum(a.n))) }, "broadcast", "all-reduce")
	differ("one call of a group", "5", func(a *attempt) error {
		return a.fails(nccl.Group(func() error { return errors.Join(a.sum(1024), a.sum(512)) }, a.comm))
	}, func(a *attempt) error {
		return a.fails(nccl.Group(func() error { return errors.Join(a.sum(1024), a.sum(511)) }, a.comm))
	})
	differ("a group and a call", "5", small, func(a *attempt) error {
		return a.fails(nccl.Group(func() error { return errors.Join(a.sum(1024), a.sum(512)) }, a.comm))
	}, "a group of 2 calls", "all-reduce of 1024 float32, sum")
	add(mistake{name: "count, in the first call", trials: "5, 18", cold: true, right: small, wrong: func(a *attempt) error { return a.fails(a.sum(2048)) },
		bad:    told{nccl.ErrMismatch, []string{"rank CULPRIT: all-reduce of 2048"}},
		good:   told{nccl.ErrMismatch, []string{"rank CULPRIT: all-reduce of 2048"}},
		within: contradictionBound})

	// Registration by the program on some ranks, or of some buffers.
	mixed := func(name string, others, culprit func(a *attempt) error, text ...string) {
		all := told{nccl.ErrMixed, append([]string{"rank CULPRIT"}, text...)}
		add(mistake{name: name, trials: "4b", setup: func(a *attempt) error {
			if a.comm.Rank() == a.culprit {
				return culprit(a)
			}
			return others(a)
		}, right: large, wrong: large, bad: all, good: all, within: contradictionBound})
	}
	none := func(*attempt) error { return nil }
	both := func(a *attempt) error { return a.register(a.mem.send, a.mem.recv) }
	mixed("registered on one rank", none, both, "registered")
	mixed("registered on all ranks but one", both, none, "registered")
	mixed("send buffer of one rank registered", none, func(a *attempt) error { return a.register(a.mem.send) }, "send", "recv", "registered")
	mixed("recv buffer of one rank not registered", both, func(a *attempt) error { return a.register(a.mem.send) }, "send", "recv", "registered")

	// What one rank cannot even ask for: each call is refused, and nothing has reached the others. They learn of it when its program ends.
	add(mistake{name: "wrong buffers", trials: "8d", right: small, wrong: func(a *attempt) error {
		for name, call := range wrongBuffers {
			err := call.f(a)
			if err := wantErr(err, nccl.ErrArgument, call.text...); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return a.comm.Close() // as a program's defers do
	}, good: told{nccl.ErrClosed, []string{"rank CULPRIT closed communicator"}}, within: contradictionBound})
	// A window that the members do not want alike: none gets one.
	unlike := func(a *attempt) error {
		private, err := a.dev.Alloc(64<<10, cuda.Private)
		if err != nil {
			return err
		}
		freed, err := a.dev.Alloc(64<<10, cuda.Shareable)
		if err == nil {
			err = freed.Free()
		}
		if err != nil {
			return err
		}
		for _, tc := range []struct {
			r    cuda.Range // of the culprit; the others have 8192 bytes at 0
			is   error
			text string
		}{
			{cuda.Range{Mem: a.mem.send, Off: 4096, Len: 8192}, nccl.ErrMismatch, "8192 bytes at offset 4096"},
			{cuda.Range{Mem: a.mem.send, Len: 4096}, nccl.ErrMismatch, "4096 bytes at offset 0"},
			{cuda.Range{Mem: a.mem.send, Off: 512, Len: 8192}, nccl.ErrArgument, "range [512,8704) of"},
			{cuda.Range{Mem: private, Len: 8192}, nccl.ErrArgument, "is private memory (cuda.Malloc)"},
			{cuda.Range{Mem: freed, Len: 8192}, nccl.ErrArgument, "the memory was freed"},
			{cuda.Range{Mem: a.mem.send, Off: 4096, Len: a.mem.send.Size()}, nccl.ErrArgument, "outside the allocation"},
		} {
			r := cuda.Range{Mem: a.mem.send, Len: 8192}
			if a.comm.Rank() == a.culprit {
				r = tc.r
			}
			w, err := a.comm.Window(a.ctx, r)
			if w != nil {
				err = errors.New("a window")
			}
			// The first two are told against rank 0.
			if err := wantErr(err, tc.is, "rank ", tc.text); err != nil {
				return err
			}
			if tc.is == nccl.ErrArgument {
				if err := wantErr(err, nil, fmt.Sprintf("rank %d: ", a.culprit)); err != nil {
					return err
				}
			}
		}
		return private.Free()
	}
	add(mistake{name: "windows that differ", trials: "8b, 8c, 8d", right: unlike, wrong: unlike, usable: true})

	// A rank that goes another way.
	add(mistake{name: "closed before", trials: "3", right: func(a *attempt) error { return a.fails(errors.Join(a.sum(a.n), a.sum(a.n))) },
		wrong:  func(a *attempt) error { return errors.Join(a.wait(a.sum(a.n)), a.comm.Close()) },
		good:   told{nccl.ErrClosed, []string{"rank CULPRIT closed communicator", "after call #2; this is #3: all-reduce of"}},
		within: contradictionBound})
	add(mistake{name: "closed before the first call", trials: "18", cold: true, right: small,
		wrong:  func(a *attempt) error { return a.comm.Close() },
		good:   told{nccl.ErrClosed, []string{"rank CULPRIT closed communicator", "before any collective; this is #1: all-reduce of 1024 float32, sum"}},
		within: deathBound}) // its Close waits 2 s for the others
	add(mistake{name: "aborted", trials: "4h", right: large, wrong: func(a *attempt) error { return a.comm.Abort(errors.New("out of patience")) },
		good: told{nccl.ErrAborted, []string{"by rank CULPRIT: out of patience"}}, within: contradictionBound})

	// One that does not come is late, no more: the others' deadline names it, and when it comes all is done.
	add(mistake{name: "late", trials: "13", right: func(a *attempt) error {
		err := a.deadline(a.sum(a.n))
		return errors.Join(err, a.job.Barrier(a.ctx), a.wait(nil))
	}, wrong: func(a *attempt) error {
		return errors.Join(a.job.Barrier(a.ctx), a.wait(a.sum(a.n)))
	}, usable: true, good: told{context.DeadlineExceeded, []string{"all-reduce #2", "waits for rank CULPRIT (last enqueued #1, all-reduce of 1000 float32, sum"}}})
	// Those who wait give up: the late one is told so at its call.
	given := func(name string, cold bool) mistake {
		return mistake{name: name, trials: "13, 18", cold: cold, right: func(a *attempt) error {
			ctx, cancel := context.WithTimeout(a.ctx, patience(a.comm.Size()))
			defer cancel()
			stop := context.AfterFunc(ctx, func() { a.comm.Abort(ctx.Err()) })
			defer stop()
			err := a.wait(a.sum(a.n))
			return errors.Join(err, a.job.Barrier(a.ctx))
		}, wrong: func(a *attempt) error {
			return errors.Join(a.job.Barrier(a.ctx), a.wait(a.sum(a.n)))
		}, bad: told{nccl.ErrAborted, []string{"aborted by rank", "deadline exceeded", "rank CULPRIT"}},
			good: told{nccl.ErrAborted, []string{"aborted by rank", "deadline exceeded", "waits for rank CULPRIT ("}}}
	}
	add(given("late, given up", false))
	add(given("late in the first call, given up", true))
	return append(all, messageMistakes()...)
}

// wrongBuffers are calls that are refused on the rank that makes them.
var wrongBuffers = map[string]struct {
	f    func(a *attempt) error
	text []string
}{
	"memory of the host": {func(a *attempt) (err error) {
		host, err := cuda.Open("host")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, host.Close()) }()
		b, err := nccl.Alloc[float32](host, 1024)
		if err != nil {
			return err
		}
		_, err = a.comm.Register(b.Memory())
		if err := wantErr(err, nccl.ErrArgument, "another device"); err != nil {
			return err
		}
		err = nccl.AllReduce(a.comm, b.All(), a.recv.Slice(0, 1024), nccl.Sum, a.stream)
		return errors.Join(err, b.Free())
	}, []string{"all-reduce", "range [0,4096) of 4096-byte allocation", "is of another device than the communicator"}},
	"memory that was freed": {func(a *attempt) error {
		b, err := nccl.Alloc[float32](a.dev, 1024)
		if err == nil {
			err = b.Free()
		}
		if err != nil {
			return err
		}
		return nccl.AllReduce(a.comm, b.All(), a.recv.Slice(0, 1024), nccl.Sum, a.stream)
	}, []string{"all-reduce", "range [0,4096) of 4096-byte allocation", "the memory was freed"}},
	"a buffer that is too small": {func(a *attempt) error {
		return nccl.AllReduce(a.comm, a.send.Slice(0, 1024), a.recv.Slice(0, 1023), nccl.Sum, a.stream)
	}, []string{"all-reduce", "send has 1024 elements, recv 1023"}},
	"buffers that overlap": {func(a *attempt) error {
		return nccl.AllReduce(a.comm, a.send.Slice(0, 1024), a.send.Slice(8, 1032), nccl.Sum, a.stream)
	}, []string{"overlap; in place they are equal"}},
	"registration of private memory": {func(a *attempt) error {
		p, err := cuda.Malloc[float32](a.dev, 1024)
		if err != nil {
			return err
		}
		_, err = a.comm.Register(p.Memory())
		return errors.Join(err, p.Free())
	}, []string{"register", "4096-byte allocation", "is private memory", "nccl.Alloc"}},
	"a root that is not there": {func(a *attempt) error {
		return nccl.Broadcast(a.comm, a.send, a.recv, a.comm.Size(), a.stream)
	}, []string{"is no rank of a communicator of"}},
	"a root that is no 32-bit number": {func(a *attempt) error {
		return nccl.Broadcast(a.comm, a.send, a.recv, 1<<32, a.stream)
	}, []string{"root 2147483647 is no rank of a communicator of"}},
}

// messageMistakes are those of eager Sends and Recvs: the other ranks send to the culprit, or receive from it.
func messageMistakes() []mistake {
	// exchange has the culprit receive from each other rank, and them send: the same messages, but what wrong says of the first of them.
	exchange := func(a *attempt, counts []int, wrong func(i int) error) error {
		return nccl.Group(func() error {
			if a.comm.Rank() != a.culprit {
				for _, n := range counts {
					if err := nccl.Send(a.comm, a.send.Slice(0, n), a.culprit, a.stream); err != nil {
						return err
					}
				}
				return nil
			}
			for r := range a.comm.Size() {
				for i, n := range counts {
					var err error
					switch {
					case r == a.culprit:
					case r == a.first() && wrong != nil:
						err = wrong(i)
					default:
						err = nccl.Recv(a.comm, a.recv.Slice(0, n), r, a.stream)
					}
					if err != nil {
						return err
					}
				}
			}
			return nil
		}, a.comm)
	}
	var all []mistake
	differ := func(name string, counts []int, wrong func(a *attempt, i int) error, text ...string) {
		got := told{nccl.ErrMismatch, append([]string{"rank FIRST: send of", "rank CULPRIT: recv of"}, text...)}
		all = append(all, mistake{name: name, trials: "5",
			right: func(a *attempt) error { return a.fails(exchange(a, counts, nil)) },
			wrong: func(a *attempt) error { return a.fails(exchange(a, counts, func(i int) error { return wrong(a, i) })) },
			bad:   got, good: got, within: contradictionBound})
	}
	differ("message, count", []int{1024}, func(a *attempt, i int) error {
		return nccl.Recv(a.comm, a.recv.Slice(0, 512), a.first(), a.stream)
	}, "message #1: ", "send of 1024 float32, to rank CULPRIT", "recv of 512 float32, from rank FIRST")
	differ("message, type", []int{1024}, func(a *attempt, i int) error {
		ints, err := cuda.SliceOf[int32](a.recv.Memory(), 0, 1024)
		if err != nil {
			return err
		}
		return nccl.Recv(a.comm, ints, a.first(), a.stream)
	}, "message #1: ", "send of 1024 float32, to rank CULPRIT", "recv of 1024 int32, from rank FIRST")
	differ("messages, order", []int{1024, 1024, 512}, func(a *attempt, i int) error {
		return nccl.Recv(a.comm, a.recv.Slice(0, []int{1024, 512, 1024}[i]), a.first(), a.stream)
	}, "message #2: ", "send of 1024 float32, to rank CULPRIT", "recv of 512 float32, from rank FIRST")
	all = append(all, mistake{name: "message, not received", trials: "18",
		right:  func(a *attempt) error { return a.fails(exchange(a, []int{a.n}, nil)) },
		wrong:  func(a *attempt) error { return a.comm.Close() },
		good:   told{nccl.ErrClosed, []string{"rank CULPRIT closed communicator", "after call #1 and does not meet ", "send of", "to rank CULPRIT"}},
		within: deathBound}) // its Close waits 2 s for the others
	// Late: the deadline names the message, which arrives in the end.
	give := func(a *attempt, n int) error {
		return nccl.Group(func() (err error) {
			if a.comm.Rank() != a.culprit {
				return nccl.Recv(a.comm, a.recv.Slice(0, n), a.culprit, a.stream)
			}
			for r := range a.comm.Size() {
				if r != a.culprit {
					err = errors.Join(err, nccl.Send(a.comm, a.send.Slice(0, n), r, a.stream))
				}
			}
			return err
		}, a.comm)
	}
	all = append(all, mistake{name: "message, late", trials: "13",
		setup: func(a *attempt) error { return a.wait(give(a, 8)) }, // so that the library has nothing left to connect
		right: func(a *attempt) error {
			err := a.deadline(give(a, 1024))
			return errors.Join(err, a.job.Barrier(a.ctx), a.wait(nil))
		}, wrong: func(a *attempt) error {
			return errors.Join(a.job.Barrier(a.ctx), a.wait(give(a, 1024)))
		}, usable: true, good: told{context.DeadlineExceeded, []string{"recv", "waits for rank CULPRIT"}}})
	return all
}

// sumAs is an all-reduce of the buffers taken for another type; a.n elements of float32 are fewer of a longer one.
func sumAs[T cuda.Element](send, recv *cuda.Memory, count int, a *attempt) error {
	from, err := cuda.SliceOf[T](send, 0, count)
	if err != nil {
		return err
	}
	to, err := cuda.SliceOf[T](recv, 0, count)
	if err != nil {
		return err
	}
	return nccl.AllReduce(a.comm, from, to, nccl.Sum, a.stream)
}

// positions are where the culprit stands: first, in the middle, last.
func positions(n int) []int {
	return slices.Compact([]int{0, n / 2, n - 1})
}

// bench runs mistakes one after the other in the same processes, each on a communicator of its own: that it can be made, and works, shows what the one before has
// left behind. The culprit changes its place: shift says where it begins.
type bench struct {
	list  []mistake
	shift int
	n     int // elements of the buffers
}

func (b bench) culprit(i, ranks int) int {
	p := positions(ranks)
	return p[(i+b.shift)%len(p)]
}

// run is a rank. report gets for each mistake how long its error took, and what it says.
func (b bench) run(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, report func(m mistake, culprit int, took time.Duration, err error)) (err error) {
	s := &world{ctx: ctx, job: job, dev: dev}
	mem := buffers{}
	for _, m := range []**cuda.Memory{&mem.send, &mem.recv} {
		if *m, err = dev.Alloc(uint64(4*b.n), cuda.Shareable); err != nil {
			return err
		}
	}
	for i, m := range b.list {
		a := &attempt{world: s, culprit: b.culprit(i, job.Size()), n: b.n, mem: mem}
		a.send, _ = cuda.SliceOf[float32](mem.send, 0, b.n)
		a.recv, _ = cuda.SliceOf[float32](mem.recv, 0, b.n)
		if err := m.on(a, report); err != nil {
			return fmt.Errorf("%s, culprit %d: %w", m.name, a.culprit, err)
		}
	}
	// The last one's successor.
	err = withComm(ctx, job, dev, &nccl.Config{Name: "afterwards"}, func(w *world) error {
		a := &attempt{world: w, n: b.n, mem: mem}
		a.send, _ = cuda.SliceOf[float32](mem.send, 0, b.n)
		a.recv, _ = cuda.SliceOf[float32](mem.recv, 0, b.n)
		return a.works()
	})
	return errors.Join(err, mem.send.Free(), mem.recv.Free())
}

// on makes the mistake on one rank, and checks what each got.
func (m mistake) on(a *attempt, report func(m mistake, culprit int, took time.Duration, err error)) error {
	return withComm(a.ctx, a.job, a.dev, &nccl.Config{Name: m.name}, func(w *world) error {
		a.world = w
		if !m.cold {
			if err := a.works(); err != nil {
				return fmt.Errorf("before: %w", err)
			}
		}
		if m.setup != nil {
			if err := m.setup(a); err != nil {
				return fmt.Errorf("before: %w", err)
			}
		}
		if err := w.job.Barrier(w.ctx); err != nil {
			return err
		}
		do, want := m.right, m.good
		if w.comm.Rank() == a.culprit {
			do, want = m.wrong, m.bad
		}
		begin := time.Now()
		err := do(a)
		took := time.Since(begin)
		report(m, a.culprit, took, err)
		if err := want.check(err, a.culprit); err != nil {
			return fmt.Errorf("after %v: %w", took, err)
		}
		if bound := m.bound(w); bound > 0 && err != nil && took > bound {
			return fmt.Errorf("the error came after %v, want %v: %w", took, bound, err)
		}
		if m.usable {
			if err := a.works(); err != nil {
				return fmt.Errorf("the same communicator afterwards: %w", err)
			}
		} else if w.comm.Err() == nil { // or closed
			return errors.New("the communicator has no error afterwards")
		}
		var errs []error
		for _, f := range slices.Backward(a.undo) {
			errs = append(errs, f())
		}
		return errors.Join(errs...)
	})
}

// bound is what is demanded where the machine is the test's own; elsewhere only that the error does not take for ever.
func (m mistake) bound(w *world) time.Duration {
	if m.within == 0 || w.dev.Platform() == cuda.Host || isFake() {
		return room
	}
	return m.within
}

// times collects what the ranks report, for the log.
type times struct {
	mu   sync.Mutex
	took map[string]time.Duration // the longest of all ranks
	text map[string]string
}

func (ts *times) add(name string, d time.Duration, text string) {
	ts.mu.Lock()
	defer ts.mu.Unlock()
	if ts.took == nil {
		ts.took, ts.text = map[string]time.Duration{}, map[string]string{}
	}
	if d >= ts.took[name] && text != "" {
		ts.took[name], ts.text[name] = d, text
	}
}

func (ts *times) log(t *testing.T) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(ts.took)) {
		t.Logf("%-45s %8v  %s", name, ts.took[name].Round(100*time.Microsecond), ts.text[name])
	}
}

// line is how a rank that is a process reports; parse reads it back.
func line(name string, took time.Duration, err error) {
	text := ""
	if err != nil {
		text = strings.ReplaceAll(err.Error(), "\n", " | ")
	}
	fmt.Printf("TOOK %d\t%s\t%s\n", took.Nanoseconds(), name, text)
}

func (ts *times) parse(results []ranktest.Result) {
	for _, r := range results {
		for l := range strings.Lines(r.Output) {
			rest, ok := strings.CutPrefix(strings.TrimSuffix(l, "\n"), "TOOK ")
			if f := strings.SplitN(rest, "\t", 3); ok && len(f) == 3 {
				ns, _ := strconv.ParseInt(f[0], 10, 64)
				ts.add(f[1], time.Duration(ns), f[2])
			}
		}
	}
}

// TestMistakes: whatever one rank does wrong, every rank gets an error that names the rank and the rule, soon, and a new communicator works in the same
// processes. On the host platform, on the test's library, and on GPUs, with as many ranks as there are.
func TestMistakes(t *testing.T) {
	dltest.Parallel(t)
	report := func(m mistake, culprit int, took time.Duration, err error) {
		line(fmt.Sprintf("%s (culprit %d)", m.name, culprit), took, err)
	}
	for _, n := range []int{2, 4, 8} {
		for shift := range positions(n) {
			t.Run(fmt.Sprintf("%d ranks/%d", n, shift), func(t *testing.T) {
				dltest.Parallel(t)
				t.Run("host", func(t *testing.T) {
					if n > 4 || testing.Short() && n != 2+2*shift {
						t.Skip("the same as on fewer ranks, and in other places")
					}
					b := bench{mistakes(), shift, 1 << 12}
					var ts times
					ranktest.Run(t, n, func(ctx context.Context, job *bootstrap.Job) (err error) {
						dev, err := cuda.Open("host")
						if err != nil {
							return err
						}
						defer func() { err = errors.Join(err, dev.Close()) }()
						return b.run(ctx, job, dev, func(m mistake, culprit int, took time.Duration, err error) {
							if err != nil {
								ts.add(fmt.Sprintf("%s (culprit %d)", m.name, culprit), took, err.Error())
							}
						})
					})
					ts.log(t)
				})
				rank := func(list []mistake, shift, elements int) func(ctx context.Context, job *bootstrap.Job) error {
					return func(ctx context.Context, job *bootstrap.Job) (err error) {
						dev, err := device(job)
						if err != nil {
							return err
						}
						defer func() { err = errors.Join(err, dev.Close()) }()
						return bench{list, shift, elements}.run(ctx, job, dev, report)
					}
				}
				ended := func(t *testing.T, results []ranktest.Result) {
					var ts times
					ts.parse(results)
					ts.log(t)
					allWell(t, results)
				}
				t.Run("fake", func(t *testing.T) {
					if n > 4 && shift > 0 || testing.Short() && n != 2+2*shift {
						t.Skip("the same as on fewer ranks, and in other places")
					}
					ended(t, ranktest.RunProcesses(t, n, rank(mistakes(), shift, 1<<14), fakeLibraries(t)...))
				})
				t.Run("GPU", func(t *testing.T) {
					dltest.NeedGPUs(t, n)
					if testing.Short() && (n > 2 || shift > 0) {
						t.Skip("-short")
					}
					// In parts: each takes a second or two, and a run of processes has a minute.
					const part = 15
					i := 0
					for list := range slices.Chunk(mistakes(), part) {
						t.Run(list[0].name, func(t *testing.T) {
							ended(t, ranktest.RunProcesses(t, n, rank(list, shift+i, 4<<20), dltest.GPUEnv()...))
						})
						i += part
					}
				})
			})
		}
	}
}
