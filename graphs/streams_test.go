package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// mixed replays graphs and makes eager calls of one communicator on several streams, in a random order that is the same on all ranks, without waiting in between. Each of
// them sums a buffer of its own in place: one that met another's call would show.
func mixed(ctx context.Context, r *rank, seed uint64, rounds, steps int) error {
	rng := rand.New(rand.NewPCG(seed, 3))
	const graphsOf, eagerOf, streams = 3, 3, 3
	var all []*cuda.Stream
	for range streams {
		s, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		defer s.Close()
		all = append(all, s)
	}
	var bufs []*cuda.Buffer[uint32]
	var gs []*graphs.Graph
	for i := range graphsOf + eagerOf {
		b, err := nccl.Alloc[uint32](r.dev, 8<<(2*i)) // lengths that differ, some of them in windows
		if err != nil {
			return err
		}
		bufs = append(bufs, b)
		if i >= graphsOf {
			continue
		}
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			for range 3 {
				if err := nccl.AllReduce(r.comm, b.All(), b.All(), nccl.Sum, s); err != nil {
					return err
				}
			}
			return nil
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		gs = append(gs, g)
	}
	n := uint32(r.comm.Size())
	for round := range rounds {
		want := make([]uint32, len(bufs))
		for i, b := range bufs {
			want[i] = uint32(rng.Uint32N(1000))
			values := make([]uint32, b.Len())
			for k := range values {
				values[k] = want[i] + uint32(k)
			}
			if err := put(ctx, r.stream, b.All(), values); err != nil {
				return err
			}
		}
		factor := make([]uint32, len(bufs))
		for i := range factor {
			factor[i] = 1
		}
		for range steps {
			i, s := rng.IntN(len(bufs)), all[rng.IntN(streams)]
			times := 1
			if i < graphsOf {
				if err := gs[i].Launch(s); err != nil {
					return err
				}
				times = 3
			} else if err := nccl.AllReduce(r.comm, bufs[i].All(), bufs[i].All(), nccl.Sum, s); err != nil {
				return err
			}
			for range times {
				factor[i] *= n
			}
		}
		for _, s := range all {
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
		}
		for i, b := range bufs {
			got, err := get(ctx, r.stream, b.All())
			if err != nil {
				return err
			}
			for k, v := range got {
				if w := (want[i] + uint32(k)) * factor[i]; v != w {
					return fmt.Errorf("round %d, buffer %d, element %d: %d, want %d", round, i, k, v, w)
				}
			}
		}
	}
	var errs []error
	for _, g := range gs {
		errs = append(errs, g.Close())
	}
	errs = append(errs, r.comm.Drain(ctx))
	for _, b := range bufs {
		errs = append(errs, b.Free())
	}
	return errors.Join(errs...)
}

// TestLibraryMixedStreams: replays and eager calls on several streams do not overlap, whoever orders them.
func TestLibraryMixedStreams(t *testing.T) {
	rounds, steps := 4, 12
	run := func(ctx context.Context, r *rank) error {
		for seed := range uint64(3) {
			if err := mixed(ctx, r, seed, rounds, steps); err != nil {
				return fmt.Errorf("seed %d: %w", seed, err)
			}
		}
		return nil
	}
	if *long {
		rounds, steps = 200, 60
	}
	everywhere(t, run)
	t.Run("mixing on", func(t *testing.T) {
		dltest.NeedGPUs(t, 2)
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			r, err := deviceRank(ctx, job, elements)
			if err != nil {
				return err
			}
			return errors.Join(run(ctx, r), r.close())
		}, append(dltest.GPUEnv(), "NCCL_GRAPH_MIXING_SUPPORT=1")...))
	})
}

// TestLibraryStreamsThatGo: a communicator's last operation is on a stream that is closed, or that captures for another communicator, when it goes on elsewhere.
func TestLibraryStreamsThatGo(t *testing.T) {
	everywhere(t, func(ctx context.Context, r *rank) error {
		if text := nccl.Explain(r.comm); r.dev.Platform() != cuda.Host && !strings.Contains(text, "graph mixing:") {
			return fmt.Errorf("Explain does not tell of graph mixing:\n%s", text)
		}
		other, err := r.another(ctx, "other")
		if err != nil {
			return err
		}
		b, err := nccl.Alloc[float32](r.dev, elements)
		if err != nil {
			return err
		}
		g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return nccl.AllReduce(other, b.All(), b.All(), nccl.Sum, s)
		}, graphs.Comms(other))
		if err != nil {
			return err
		}
		if err := r.fill(ctx, b.All(), func(i int) float32 { return float32(i) }); err != nil {
			return err
		}
		short, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(short), short.Synchronize(ctx), short.Close(), g.Launch(r.stream)); err != nil {
			return err
		}
		// r.stream captures while other's graph goes on beside it.
		side, err := r.dev.NewStream()
		if err != nil {
			return err
		}
		h, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return errors.Join(allReduce(r, s), g.Launch(side), allReduce(r, s))
		}, graphs.Comms(r.comm))
		if err != nil {
			return err
		}
		if err := errors.Join(side.Synchronize(ctx), g.Launch(r.stream), side.Close(), h.Launch(r.stream), r.stream.Synchronize(ctx)); err != nil {
			return err
		}
		if err := r.holds(ctx, b.All(), func(i int) float32 { return float32(16 * i) }); err != nil {
			return err
		}
		return errors.Join(g.Close(), h.Close(), other.Drain(ctx), b.Free())
	})
}

// TestLibraryMixing: what Explain tells of who has decided.
func TestLibraryMixing(t *testing.T) {
	for _, tc := range []struct{ name, set, want string }{
		{"unset", "NCCL_GRAPH_MIXING_SUPPORT=", "off: the library adds no events to captured calls, this package orders them"},
		{"on by the user", "NCCL_GRAPH_MIXING_SUPPORT=1", "on: NCCL_GRAPH_MIXING_SUPPORT=1 (environment)"},
		{"off by the user", "NCCL_GRAPH_MIXING_SUPPORT=0", "off: NCCL_GRAPH_MIXING_SUPPORT=0 (environment)"},
		{"a profiler", "NCCL_PROFILER_PLUGIN=x", "on: NCCL_PROFILER_PLUGIN=x (environment) wants it"},
	} {
		t.Run("fake/"+tc.name, func(t *testing.T) {
			// A network device of the machine that tests must not decide.
			allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
				r, err := deviceRank(ctx, job, elements)
				if err != nil {
					return err
				}
				for range 2 {
					c, err := r.another(ctx, "again")
					if err != nil {
						return err
					}
					if text := nccl.Explain(c); !strings.Contains(text, tc.want) {
						return fmt.Errorf("Explain does not say %q:\n%s", tc.want, text)
					}
				}
				// What the library is told is not for what the process starts.
				child, err := exec.CommandContext(ctx, "env").Output()
				if err != nil {
					return err
				}
				if got := strings.Contains(string(child), "NCCL_GRAPH_MIXING_SUPPORT=0"); got != (tc.set == "NCCL_GRAPH_MIXING_SUPPORT=0") {
					return fmt.Errorf("a child has the variable: %t", got)
				}
				return errors.Join(r.works(ctx, r.comm), r.close())
			}, append(fakeEnv(t), tc.set, "NCCL_NET_DISABLE_INTRA=1")...))
		})
	}
}
