package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// stressVar is for how many seconds each stress runs, in place of a few programs.
const stressVar = "GORUN_TEST_STRESS"

// A stress is a random program, the same on all ranks but for its pauses, and what it must come to: every rank knows the memory of all.
type stress struct {
	*world
	rng   *rand.Rand // the program's
	own   *rand.Rand // this rank's
	most  int        // elements of the largest part by peer memory
	comms []*stressComm
	lanes []*lane
	live  []*stressGraph
}

type stressComm struct {
	*nccl.Comm
	ranks []int // of the job
}

// lane is a stream with two buffers of its own.
type lane struct {
	s    *cuda.Stream
	bufs [2]*cuda.Buffer[uint32]
	sim  [][2][]uint32 // by rank
	join *cuda.Event
}

// stressCall is one call on one lane, for all parts of a communicator.
type stressCall struct {
	comm       int
	lane       int
	op         nccl.Op
	red        nccl.RedOp
	root       int // modulo the size
	count      int
	from, to   int // buffers
	send, recv int // offsets
}

type stressGraph struct {
	g     *graphs.Graph
	calls []stressCall
}

func openStress(w *world, seed uint64) (st *stress, err error) {
	n := w.comm.Size()
	st = &stress{world: w, rng: rand.New(rand.NewPCG(seed, 1)), own: rand.New(rand.NewPCG(seed, uint64(w.comm.Rank())+2)), most: nccl.PeerMost(w.comm) / 4}
	all := make([]int, n)
	for r := range all {
		all[r] = r
	}
	st.comms = append(st.comms, &stressComm{w.comm, all})
	for range 3 {
		l := &lane{sim: make([][2][]uint32, n)}
		st.lanes = append(st.lanes, l)
		if l.s, err = w.dev.NewStream(); err != nil {
			return st, err
		}
		if l.join, err = w.dev.NewEvent(); err != nil {
			return st, err
		}
		for i := range l.bufs {
			size := n*st.most + 64
			if l.bufs[i], err = cuda.Malloc[uint32](w.dev, size); err != nil {
				return st, err
			}
			for r := range n {
				l.sim[r][i] = make([]uint32, size)
				first := st.rng.Uint32()
				for k := range l.sim[r][i] {
					l.sim[r][i][k] = first + uint32(k)*2654435761
				}
			}
			if err = cuda.CopyToDevice(l.bufs[i].All(), l.sim[w.comm.Rank()][i], l.s); err != nil {
				return st, err
			}
		}
	}
	// Two parts, and the whole once more.
	first := 1 + st.rng.IntN(n-1)
	for _, color := range []func(r int) int{func(r int) int { return min(1, r/first) }, func(int) int { return 0 }} {
		var ranks []int
		for r := range n {
			if color(r) == color(w.comm.Rank()) {
				ranks = append(ranks, r)
			}
		}
		part, err := w.comm.Split(w.ctx, color(w.comm.Rank()), 0)
		if err != nil {
			return st, err
		}
		st.comms = append(st.comms, &stressComm{part, ranks})
	}
	return st, nil
}

// close closes what was opened, streams or communicators first.
func (st *stress) close() error {
	var errs []error
	for _, g := range st.live {
		errs = append(errs, g.g.Close())
	}
	comms := func() {
		for _, c := range st.comms[1:] {
			errs = append(errs, c.Close())
		}
	}
	later := st.own.IntN(2) == 0
	if !later {
		comms()
	}
	for _, l := range st.lanes {
		if l.s != nil {
			errs = append(errs, st.through(l.s), l.s.Close())
		}
		if l.join != nil {
			errs = append(errs, l.join.Close())
		}
		for _, b := range l.bufs {
			if b != nil {
				errs = append(errs, b.Free())
			}
		}
	}
	if later {
		comms()
	}
	return errors.Join(errs...)
}

// through waits until the device has done what is on a stream, failed or not: its memory is freed next.
func (st *stress) through(s *cuda.Stream) error {
	other, err := st.dev.NewStream()
	if err != nil {
		return err
	}
	event, err := st.dev.NewEvent()
	if err != nil {
		return errors.Join(err, other.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), room)
	defer cancel()
	return errors.Join(other.Behind(s, event), other.Synchronize(ctx), other.Close(), event.Close())
}

// parts is who a communicator's number means, on all ranks.
func (st *stress) parts(comm int) [][]int {
	if comm != 1 {
		return [][]int{st.comms[comm].ranks}
	}
	parts := [][]int{st.comms[1].ranks, nil}
	for r := range st.comm.Size() {
		if !slices.Contains(parts[0], r) {
			parts[1] = append(parts[1], r)
		}
	}
	return parts
}

func (st *stress) randomCall() stressCall {
	r := st.rng
	c := stressCall{comm: r.IntN(len(st.comms)), lane: r.IntN(len(st.lanes)), op: collectives[r.IntN(len(collectives))], red: nccl.RedOp(r.IntN(4)), root: r.IntN(8), from: r.IntN(2), to: r.IntN(2)}
	switch k := r.IntN(20); {
	case k < 10:
		c.count = r.IntN(20)
	case k < 16:
		c.count = r.IntN(600)
	case k < 18:
		c.count = min(128*2*(1+r.IntN(65))+r.IntN(5)-2, st.most)
	case k < 19:
		c.count = st.most - r.IntN(3)
	default:
		c.count = st.most + r.IntN(3) // half of them by the library
	}
	if r.IntN(12) == 0 {
		c.red = nccl.Avg
	}
	c.send, c.recv = r.IntN(30), r.IntN(30)
	return c
}

// place gives a call's buffers on a rank of a communicator of n.
func (c stressCall) place(rank, n int) (send, recv [2]int) { // from, to
	s, r := c.count, c.count
	switch c.op {
	case nccl.OpAllGather:
		r *= n
	case nccl.OpReduceScatter:
		s *= n
	}
	send, recv = [2]int{c.send, c.send + s}, [2]int{c.recv, c.recv + r}
	if c.from == c.to { // in place
		switch c.op {
		case nccl.OpAllGather:
			send = [2]int{c.recv + rank*c.count, c.recv + (rank+1)*c.count}
		case nccl.OpReduceScatter:
			recv = [2]int{c.send + rank*c.count, c.send + (rank+1)*c.count}
		default:
			recv = send
		}
	}
	return send, recv
}

func (st *stress) call(c stressCall) error {
	l, comm := st.lanes[c.lane], st.comms[c.comm]
	n := comm.Size()
	s, r := c.place(comm.Rank(), n)
	send, recv := l.bufs[c.from].Slice(s[0], s[1]), l.bufs[c.to].Slice(r[0], r[1])
	switch c.op {
	case nccl.OpAllReduce:
		return nccl.AllReduce(comm.Comm, send, recv, c.red, l.s)
	case nccl.OpReduce:
		return nccl.Reduce(comm.Comm, send, recv, c.red, c.root%n, l.s)
	case nccl.OpBroadcast:
		return nccl.Broadcast(comm.Comm, send, recv, c.root%n, l.s)
	case nccl.OpAllGather:
		return nccl.AllGather(comm.Comm, send, recv, l.s)
	}
	return nccl.ReduceScatter(comm.Comm, send, recv, c.red, l.s)
}

// simulate does a call on what every rank's memory is thought to be.
func (st *stress) simulate(c stressCall) {
	l := st.lanes[c.lane]
	e := numeric[uint32]()
	for _, ranks := range st.parts(c.comm) {
		n := len(ranks)
		if n == 0 {
			continue
		}
		sent := make([][]uint32, n)
		for i, r := range ranks {
			s, _ := c.place(i, n)
			sent[i] = append([]uint32(nil), l.sim[r][c.from][s[0]:s[1]]...)
		}
		column := make([]uint32, n)
		reduced := func(k int) uint32 {
			for i := range sent {
				column[i] = sent[i][k]
			}
			return e.fold(c.red, column)
		}
		for i, r := range ranks {
			_, to := c.place(i, n)
			out := l.sim[r][c.to][to[0]:to[1]]
			if c.op == nccl.OpReduce && i != c.root%n {
				continue
			}
			for k := range out {
				switch c.op {
				case nccl.OpAllReduce, nccl.OpReduce:
					out[k] = reduced(k)
				case nccl.OpBroadcast:
					out[k] = sent[c.root%n][k]
				case nccl.OpAllGather:
					out[k] = sent[k/c.count][k%c.count]
				case nccl.OpReduceScatter:
					out[k] = reduced(i*c.count + k)
				}
			}
		}
	}
}

// all makes a lane's stream wait for all others, or has them wait for it.
func (st *stress) all(at int, joins bool) error {
	for i, l := range st.lanes {
		if i == at {
			continue
		}
		a, b := l, st.lanes[at]
		if !joins {
			a, b = b, a
		}
		if err := errors.Join(a.s.Record(l.join), b.s.Wait(l.join)); err != nil {
			return err
		}
	}
	return nil
}

// step makes some calls. What is random beyond the program is how long this rank takes.
func (st *stress) step() error {
	r := st.rng
	switch k := st.own.IntN(8); {
	case k == 0:
		time.Sleep(time.Duration(st.own.IntN(500)) * time.Microsecond)
	case k == 1:
		d := time.Duration(st.own.IntN(500)) * time.Microsecond
		if err := st.lanes[st.own.IntN(len(st.lanes))].s.HostFunc(func() { time.Sleep(d) }); err != nil {
			return err
		}
	}
	switch k := r.IntN(20); {
	case k == 0 && len(st.live) < 3:
		calls := make([]stressCall, 1+r.IntN(12))
		for i := range calls {
			calls[i] = st.randomCall()
		}
		at := r.IntN(len(st.lanes))
		var comms []*nccl.Comm
		for _, c := range st.comms {
			comms = append(comms, c.Comm)
		}
		g, err := graphs.Capture(st.ctx, st.lanes[at].s, func(*cuda.Stream) error {
			if err := st.all(at, false); err != nil {
				return err
			}
			for _, c := range calls {
				if err := st.call(c); err != nil {
					return err
				}
			}
			return st.all(at, true)
		}, graphs.Comms(comms...))
		if err != nil {
			return err
		}
		st.live = append(st.live, &stressGraph{g, calls})
	case k == 1 && len(st.live) > 0:
		i := r.IntN(len(st.live))
		g := st.live[i]
		st.live = append(st.live[:i], st.live[i+1:]...)
		return g.g.Close()
	case k < 7 && len(st.live) > 0:
		g, at := st.live[r.IntN(len(st.live))], r.IntN(len(st.lanes))
		if err := errors.Join(st.all(at, true), g.g.Launch(st.lanes[at].s)); err != nil {
			return err
		}
		for _, c := range g.calls {
			st.simulate(c)
		}
		return st.all(at, false)
	case k == 7: // on one communicator, of one lane
		first := st.randomCall()
		calls := []stressCall{first}
		for range r.IntN(3) {
			c := st.randomCall()
			c.comm, c.lane = first.comm, first.lane
			calls = append(calls, c)
		}
		err := nccl.Group(func() error {
			for _, c := range calls {
				if err := st.call(c); err != nil {
					return err
				}
			}
			return nil
		}, st.comms[first.comm].Comm)
		for _, c := range calls {
			st.simulate(c)
		}
		return err
	case k == 8:
		return st.verify()
	case k == 9: // a stream goes, and another comes
		l := st.lanes[r.IntN(len(st.lanes))]
		ctx, cancel := context.WithTimeout(st.ctx, room)
		defer cancel()
		s, err := st.dev.NewStream()
		if err == nil {
			err = l.s.Synchronize(ctx)
			l.s, s = s, l.s
		}
		return errors.Join(err, s.Close())
	default:
		for range 1 + r.IntN(6) {
			c := st.randomCall()
			if err := st.call(c); err != nil {
				return fmt.Errorf("%+v: %w", c, err)
			}
			st.simulate(c)
		}
	}
	return nil
}

func (st *stress) verify() error {
	for i, l := range st.lanes {
		for k := range l.bufs {
			want := l.sim[st.comm.Rank()][k]
			got := make([]uint32, len(want))
			ctx, cancel := context.WithTimeout(st.ctx, room)
			err := errors.Join(cuda.CopyToHost(got, l.bufs[k].All(), l.s), l.s.Synchronize(ctx))
			cancel()
			if err != nil {
				return err
			}
			for j := range want {
				if got[j] != want[j] {
					return fmt.Errorf("lane %d, buffer %d: element %d is %d, want %d", i, k, j, got[j], want[j])
				}
			}
		}
	}
	return nil
}

// more reports whether another program is to be run: a few, or as long as the user says.
func more(ctx context.Context, job *bootstrap.Job, start time.Time, i, few int) (bool, error) {
	seconds, _ := strconv.Atoi(os.Getenv(stressVar))
	if seconds == 0 {
		return i < few, nil
	}
	if err := job.Barrier(ctx); err != nil {
		return false, err
	}
	b := []byte{0}
	if time.Since(start) < time.Duration(seconds)*time.Second {
		b[0] = 1
	}
	name := fmt.Sprint("stress goes on ", i)
	if job.Rank() == 0 {
		return b[0] == 1, job.Put(ctx, name, b)
	}
	b, err := job.Get(ctx, name)
	return err == nil && b[0] == 1, err
}

// leaks compares what a process has after each program with what it had after the fourth: by then everything has been there once.
type leaks struct{ files, maps, goroutines int }

func (l *leaks) check(i int) error {
	now := leaks{fdCount(), mapCount(), runtime.NumGoroutine()}
	const other = 4 // connections come and go, and goroutines are on their way out
	switch {
	case i == 3:
		*l = now
	case i > 3 && (now.files > l.files+other || now.maps > l.maps || now.goroutines > l.goroutines+other):
		return fmt.Errorf("program %d leaves %+v, once it was %+v", i, now, *l)
	}
	return nil
}

func stressSeed(t *testing.T) uint64 {
	if v := os.Getenv("GORUN_TEST_SEED"); v != "" {
		n, _ := strconv.ParseUint(v, 10, 64)
		return n
	}
	return 1
}

// Random programs over all operations, streams, graphs with forks and several communicators come to what they must.
func TestLibraryPeerStress(t *testing.T) {
	for _, n := range []int{2, 3, 8} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			seed := stressSeed(t)
			onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				dev, err := device(job)
				if err != nil {
					return err
				}
				var left leaks
				start := time.Now()
				for i := 0; ; i++ {
					if on, err := more(ctx, job, start, i, 1); err != nil || !on {
						return errors.Join(err, closeSoon(dev))
					}
					seed := seed + uint64(100*n+i)
					err := withComm(ctx, job, dev, nil, func(w *world) error {
						st, err := openStress(w, seed)
						for range 60 {
							if err == nil {
								err = st.step()
							}
						}
						if err == nil {
							err = st.verify()
						}
						return errors.Join(err, st.close())
					})
					if err != nil {
						return fmt.Errorf("seed %d: %w", seed, err)
					}
					if err := left.check(i); err != nil {
						return fmt.Errorf("seed %d: %w", seed, err)
					}
				}
			}, nil, nil, byPeer, "FAKE_SHUFFLE=1")
		})
	}
}

// The same, while one rank aborts a communicator, or ends: all have an error that names it, and go on with a next communicator.
func TestLibraryPeerStressEnds(t *testing.T) {
	for _, n := range []int{2, 5, 8} {
		for _, how := range []string{"aborts", "is killed"} {
			t.Run(fmt.Sprintf("%d ranks, one %s", n, how), func(t *testing.T) {
				seed := stressSeed(t) + uint64(10*n)
				culprit := int(seed*7) % n
				killed := how == "is killed"
				onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
					dev, err := device(job)
					if err != nil {
						return err
					}
					var left leaks
					start := time.Now()
					for i := 0; ; i++ {
						if on, err := more(ctx, job, start, i, 2); err != nil || !on {
							return errors.Join(err, closeSoon(dev))
						}
						if err := stressEnd(ctx, job, dev, seed+uint64(1000*i), (culprit+i)%n, killed); err != nil {
							return fmt.Errorf("seed %d, round %d: %w", seed, i, err)
						}
						if killed {
							return closeSoon(dev)
						}
						if err := left.check(i); err != nil {
							return fmt.Errorf("seed %d: %w", seed, err)
						}
					}
				}, func(t *testing.T, results []ranktest.Result) {
					for _, r := range results {
						if r.Code != 0 && !(killed && r.Rank == culprit && r.Code == -1) {
							t.Errorf("%v\n%s", r, r.Err)
						}
					}
				}, nil, byPeer, "FAKE_SHUFFLE=1")
			})
		}
	}
}

func stressEnd(ctx context.Context, job *bootstrap.Job, dev *cuda.Device, seed uint64, culprit int, killed bool) error {
	var failed error
	err := withComm(ctx, job, dev, nil, func(w *world) error {
		st, err := openStress(w, seed)
		if err != nil {
			return errors.Join(err, st.close())
		}
		if job.Rank() == culprit {
			victim := st.comms[st.own.IntN(2)*2] // one that has all ranks
			timer := time.AfterFunc(time.Duration(st.own.IntN(300))*time.Millisecond, func() {
				if killed {
					syscall.Kill(os.Getpid(), syscall.SIGKILL)
				}
				victim.Abort(errors.New("random end"))
			})
			defer timer.Stop()
		}
		for failed == nil {
			failed = st.step()
		}
		for _, c := range st.comms {
			c.Abort(failed)
		}
		return st.close()
	})
	if err != nil {
		return fmt.Errorf("after %v: %w", failed, err)
	}
	if err := wantErr(failed, nil, "rank "+strconv.Itoa(culprit)); err != nil {
		return err
	}
	var rest []int
	for r := range job.Size() {
		if !killed || r != culprit {
			rest = append(rest, r)
		}
	}
	return withComm(ctx, job, dev, &nccl.Config{Name: "next", Ranks: rest}, func(w *world) error {
		buf, err := cuda.Malloc[float32](dev, 100)
		if err != nil {
			return err
		}
		defer buf.Free()
		return errors.Join(nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream), w.stream.Synchronize(ctx))
	})
}
