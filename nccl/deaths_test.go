package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// tornVar names a file that stands, for the test's library, for the end of a peer's connections.
const tornVar = "FAKE_TORN"

// tear has the test's library take a peer's connections for ended.
func tear() {
	if name := os.Getenv(tornVar); name != "" {
		if err := os.WriteFile(name, nil, 0o600); err != nil {
			panic(err)
		}
	}
}

func killSelf(*attempt) {
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// death is a way in which a rank's process ends in the middle of what all ranks do. do is one round of that.
type death struct {
	name   string
	do     func(a *attempt) error
	before func(a *attempt) (func() error, error) // makes what do needs; the function it gives back ends it
	end    func(a *attempt)                       // of the culprit, after some rounds
	rounds int                                    // 0: in the first one
	code   int                                    // of the culprit's process
	output string
	init   bool // it never calls Init
	is     error
	stuck  bool // on libraries with the fault "window-abort" the device is not free again
	peer   bool // small calls go by peer memory
}

// env is for the processes of its ranks.
func (d death) env() []string {
	if d.peer {
		return []string{byPeer}
	}
	return nil
}

func deaths() []death {
	large := func(a *attempt) error { return a.wait(a.sum(a.n)) }
	var g *graphs.Graph
	const few = 100
	ahead := func(a *attempt) error { // more than a stream takes
		for range 1500 {
			if err := a.sum(few); err != nil {
				return err
			}
		}
		return a.wait(nil)
	}
	replay := func(n int, o ...graphs.Option) func(a *attempt) (func() error, error) {
		return func(a *attempt) (func() error, error) {
			var err error
			g, err = graphs.Capture(a.ctx, a.stream, func(*cuda.Stream) error { return a.sum(min(n, a.n)) }, append(o, graphs.Comms(a.comm))...)
			return func() error { return g.Close() }, err
		}
	}
	launch := func(a *attempt) error { return a.wait(g.Launch(a.stream)) }
	return []death{
		{name: "killed, eager", do: large, end: killSelf, rounds: 20, code: -1},
		{name: "killed, replay", before: replay(math.MaxInt), do: launch, end: killSelf, rounds: 20, code: -1},
		{name: "killed, capture", do: func(a *attempt) error {
			g, err := graphs.Capture(a.ctx, a.stream, func(*cuda.Stream) error { return a.sum(a.n) }, graphs.Comms(a.comm))
			if err == nil {
				err = g.Close()
			}
			return err
		}, end: killSelf, rounds: 20, code: -1},
		{name: "killed, message", do: func(a *attempt) error {
			next, last := (a.comm.Rank()+1)%a.comm.Size(), (a.comm.Rank()+a.comm.Size()-1)%a.comm.Size()
			return a.wait(nccl.Group(func() error {
				return errors.Join(nccl.Send(a.comm, a.send, next, a.stream), nccl.Recv(a.comm, a.recv, last, a.stream))
			}, a.comm))
		}, end: killSelf, rounds: 20, code: -1},
		{name: "killed, first call", do: large, end: killSelf, code: -1},
		{name: "killed, before Init", end: killSelf, init: true, code: -1},
		{name: "exits, before Init", end: func(*attempt) { os.Exit(0) }, init: true},
		{name: "exits, eager", do: large, end: func(*attempt) { os.Exit(3) }, rounds: 20, code: 3},
		{name: "panics, eager", do: large, end: func(*attempt) { panic("index out of range") }, rounds: 20, code: 2, output: "index out of range", is: nccl.ErrClosed},
		{name: "killed, replay in a window", before: replay(math.MaxInt, graphs.Require(nccl.Window)), do: launch, end: killSelf, rounds: 20, code: -1, stuck: true},
		{name: "killed, after its connections", do: large, end: func(a *attempt) {
			tear()
			time.Sleep(300 * time.Millisecond) // as the kernel takes for memory on a GPU
			killSelf(a)
		}, rounds: 20, code: -1},
		{name: "killed, peer memory", do: func(a *attempt) error { return a.wait(a.sum(few)) }, end: killSelf, rounds: 20, code: -1, peer: true},
		{name: "killed, peer memory, far ahead", do: ahead, end: killSelf, rounds: 3, code: -1, peer: true},
		{name: "killed, peer memory, replay", before: replay(few), do: launch, end: killSelf, rounds: 20, code: -1, peer: true},
		{name: "panics, peer memory", do: func(a *attempt) error { return a.wait(a.sum(few)) }, end: func(*attempt) { panic("index out of range") }, rounds: 20, code: 2, output: "index out of range",
			is: nccl.ErrClosed, peer: true},
	}
}

// rank is what each rank does. The survivors make a communicator without the culprit afterwards.
func (d death) rank(culprit, n int) func(ctx context.Context, job *bootstrap.Job) error {
	return func(ctx context.Context, job *bootstrap.Job) (err error) {
		dev, err := device(job)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dev.Close()) }()
		a := &attempt{world: &world{ctx: ctx, job: job, dev: dev}, culprit: culprit, n: n}
		for _, m := range []**cuda.Memory{&a.mem.send, &a.mem.recv} {
			if *m, err = dev.Alloc(uint64(4*n), cuda.Shareable); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, (*m).Free()) }()
		}
		a.send, _ = cuda.SliceOf[float32](a.mem.send, 0, n)
		a.recv, _ = cuda.SliceOf[float32](a.mem.recv, 0, n)
		at := func(what string) { fmt.Printf("%s %d\n", what, time.Now().UnixNano()) }
		isCulprit := job.Rank() == culprit
		if err := job.Barrier(ctx); err != nil {
			return err
		}
		if d.init && isCulprit {
			at("AT")
			d.end(a)
		}
		comm := func(set *nccl.Config, f func() error) error {
			return withComm(ctx, job, dev, set, func(w *world) error { a.world = w; return f() })
		}
		got := false
		err = comm(nil, func() error {
			if d.before != nil {
				after, err := d.before(a)
				if err != nil {
					return err
				}
				defer after()
			}
			for i := range 1000 {
				if isCulprit && i == d.rounds {
					at("AT")
					d.end(a)
				}
				if err := d.do(a); err != nil {
					if i < d.rounds-job.Size() { // of a message only the neighbours need to have got as far as the culprit
						return fmt.Errorf("round %d: %w", i, err)
					}
					at("GOT")
					got = true
					return fmt.Errorf("got: %w", err)
				}
			}
			return errors.New("no error")
		})
		if err != nil && !got {
			at("GOT")
		}
		is := d.is
		if is == nil {
			is = nccl.ErrRank
		}
		if d.init {
			is = nil
		}
		if err := wantErr(err, is, "rank "+strconv.Itoa(culprit)); err != nil {
			return err
		}
		fmt.Printf("TEXT %s\n", strings.ReplaceAll(err.Error(), "\n", " | "))
		var rest []int
		for r := range job.Size() {
			if r != culprit {
				rest = append(rest, r)
			}
		}
		os.Remove(os.Getenv(tornVar)) // by the first of them, where it is there
		err = comm(&nccl.Config{Name: "survivors", Ranks: rest}, func() error { return a.works() })
		if d.stuck && err != nil {
			fmt.Printf("TEXT %v\n", err)
			err = wantErr(err, nil, "still occupied by communicator world")
		}
		return err
	}
}

func (d death) check(t *testing.T, culprit int, bound time.Duration, results []ranktest.Result) {
	t.Helper()
	stamp := func(r ranktest.Result, what string) (ns int64) {
		for l := range strings.Lines(r.Output) {
			if s, ok := strings.CutPrefix(strings.TrimSpace(l), what+" "); ok {
				ns, _ = strconv.ParseInt(s, 10, 64)
			}
		}
		return ns
	}
	begin := stamp(results[culprit], "AT")
	if r := results[culprit]; r.Code != d.code || !strings.Contains(r.Output, d.output) || begin == 0 {
		t.Errorf("the culprit: %v", r)
	}
	var worst time.Duration
	text := ""
	for _, r := range results {
		if r.Rank == culprit {
			continue
		}
		took := time.Duration(stamp(r, "GOT") - begin)
		worst = max(worst, took)
		if r.Code != 0 || took <= 0 || took > bound {
			t.Errorf("rank %d has its error %v after the end of rank %d, want %v: %v\n%s", r.Rank, took, culprit, bound, r, r.Err)
		}
		for l := range strings.Lines(r.Output) {
			if s, ok := strings.CutPrefix(l, "TEXT "); ok {
				text += "\n\trank " + strconv.Itoa(r.Rank) + ": " + strings.TrimSpace(s)
			}
		}
	}
	t.Logf("%s, culprit %d of %d: all have their error after %v%s", d.name, culprit, len(results), worst.Round(time.Millisecond), text)
}

// TestLibraryDeath: the process of one rank ends, wherever it is. All others have an error that names it, on GPUs within 3 s, and make a communicator without it.
func TestLibraryDeath(t *testing.T) {
	dltest.Parallel(t)
	for i, d := range deaths() {
		for _, n := range []int{2, 4, 8} {
			for at, culprit := range positions(n) {
				t.Run(fmt.Sprintf("%d ranks/%s/rank %d", n, d.name, culprit), func(t *testing.T) {
					t.Run("fake", func(t *testing.T) {
						if n > 4 || (n > 2 || testing.Short()) && at != i%len(positions(n)) || testing.Short() && !slices.Contains([]int{0, 1, 4, 5, 10}, i) {
							t.Skip("the same as elsewhere")
						}
						d.check(t, culprit, room, ranktest.RunProcesses(t, n, d.rank(culprit, 1<<16), append(fakeLibraries(t), slices.Concat([]string{tornVar + "=" + filepath.Join(t.TempDir(), "torn")}, d.env())...)...))
					})
					t.Run("GPU", func(t *testing.T) {
						need := dltest.NeedGPUs
						if d.stuck { // it is in a window
							need = dltest.NeedOwnGPUs
						}
						need(t, n)
						if at != i%len(positions(n)) || testing.Short() && (n > 2 || !slices.Contains([]int{1, 4, 5}, i)) {
							t.Skip("in another place")
						}
						d.check(t, culprit, deathBound, ranktest.RunProcesses(t, n, d.rank(culprit, 2<<20), append(dltest.GPUEnv(), d.env()...)...))
					})
				})
			}
		}
	}
}
