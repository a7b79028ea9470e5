package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

func free(buffers ...*cuda.Buffer[float32]) error {
	var errs []error
	for _, b := range buffers {
		errs = append(errs, b.Free())
	}
	return errors.Join(errs...)
}

// mode captures one call, replays it once, and says how it runs.
func (r *rank) mode(ctx context.Context, call func(s *cuda.Stream) error, o ...graphs.Option) (mode nccl.Mode, reason string, err error) {
	g, err := graphs.Capture(ctx, r.stream, call, append(o, graphs.Comms(r.comm))...)
	if err != nil {
		return 0, "", err
	}
	info := g.Calls()[0]
	return info.Mode, info.Reason, errors.Join(g.Launch(r.stream), r.stream.Synchronize(ctx), g.Close(), r.comm.Drain(ctx))
}

func (r *rank) wantMode(ctx context.Context, what string, call func(s *cuda.Stream) error, want nccl.Mode, text string, o ...graphs.Option) error {
	mode, reason, err := r.mode(ctx, call, o...)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if mode != want || !strings.Contains(reason, text) {
		return fmt.Errorf("%s: mode %v (%s), want %v (…%s…)", what, mode, reason, want, text)
	}
	return nil
}

// TestLibraryWindowsUnasked: which captured calls get windows that nobody has asked for, and how long those stay.
func TestLibraryWindowsUnasked(t *testing.T) {
	onDevices(t, 1<<14, func(ctx context.Context, r *rank) error {
		if ok, why := r.comm.WindowSupport(); !ok {
			if isFake() {
				return errors.New("no windows: " + why)
			}
			fmt.Println("no windows:", why)
			return nil
		}
		sum := func(from, to *cuda.Buffer[float32]) func(s *cuda.Stream) error {
			return func(s *cuda.Stream) error { return nccl.AllReduce(r.comm, from.All(), to.All(), nccl.Sum, s) }
		}
		// 32 KiB is the most.
		var buffers []*cuda.Buffer[float32]
		for _, n := range []int{8 << 10, 8 << 10, 2, 8<<10 + 1, 2} {
			b, err := nccl.Alloc[float32](r.dev, n)
			if err != nil {
				return err
			}
			buffers = append(buffers, b)
		}
		a, b, small, large, fresh := buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]
		const why = "window: in memory of up to 32 KiB it is faster in all calls"
		if err := errors.Join(
			r.wantMode(ctx, "32 KiB", sum(a, b), nccl.Window, why),
			r.wantMode(ctx, "8 bytes in place", sum(small, small), nccl.Window, why),
			r.wantMode(ctx, "more than 32 KiB", sum(large, large), nccl.Graph, "no window: it would be of 32772 bytes, and with more than 32 KiB"),
			r.wantMode(ctx, "part of more than 32 KiB", func(s *cuda.Stream) error {
				return nccl.AllReduce(r.comm, large.Slice(0, 2), large.Slice(0, 2), nccl.Sum, s)
			}, nccl.Graph, "no window: it would be of 32772 bytes"),
			r.wantMode(ctx, "all-gather", func(s *cuda.Stream) error {
				return nccl.AllGather(r.comm, a.Slice(0, 4<<10), b.All(), s)
			}, nccl.Window, why),
			r.wantMode(ctx, "reduce-scatter", func(s *cuda.Stream) error {
				return nccl.ReduceScatter(r.comm, a.All(), b.Slice(0, 4<<10), nccl.Sum, s)
			}, nccl.Window, why),
			r.wantMode(ctx, "broadcast", func(s *cuda.Stream) error {
				return nccl.Broadcast(r.comm, a.All(), b.All(), 0, s)
			}, nccl.Graph, "no window: the library uses none for such calls"),
		); err != nil {
			return err
		}
		if s := r.comm.Stats(); s.Windows != 3 || s.PendingWindows != 0 {
			return fmt.Errorf("%+v, want three windows", s)
		}
		// One member without them: none has them.
		var o []graphs.Option
		if r.job.Rank() == 1 {
			o = append(o, graphs.NoWindows())
		}
		if err := r.wantMode(ctx, "option", sum(fresh, fresh), nccl.Graph, "no window: the program made none of these buffers (Comm.Window); and makes none: option NoWindows on rank 1", o...); err != nil {
			return err
		}
		if r.job.Rank() == 1 {
			os.Setenv("GORUN_WINDOWS", "off")
		}
		if err := r.wantMode(ctx, "environment", sum(fresh, fresh), nccl.Graph, "and makes none: GORUN_WINDOWS=off on rank 1"); err != nil {
			return err
		}
		// What has a window uses it, and a demand is a demand.
		if err := errors.Join(r.wantMode(ctx, "has one", sum(small, small), nccl.Window, why),
			r.wantMode(ctx, "demanded", sum(fresh, fresh), nccl.Window, "window: the program made or demanded it", graphs.Require(nccl.Window))); err != nil {
			return err
		}
		os.Setenv("GORUN_WINDOWS", "auto")
		if s := r.comm.Stats(); s.Windows != 4 {
			return fmt.Errorf("%+v, want four windows", s)
		}

		// At other offsets the library would take the window all the same, and give wrong data.
		me := r.comm.Rank()
		if _, _, err := r.mode(ctx, func(s *cuda.Stream) error {
			return nccl.AllReduce(r.comm, a.Slice(me, me+2), b.Slice(0, 2), nccl.Sum, s)
		}); !errors.Is(err, nccl.ErrMixed) || wantText(err, "the buffers are in windows") != nil {
			return fmt.Errorf("offsets that differ: %v", err)
		}

		// Freed memory stays until all members have freed it and the next call is captured.
		freed := make(chan struct{})
		small.Memory().OnFree(func() { close(freed) })
		if r.job.Rank() == 0 {
			if err := small.Free(); err != nil {
				return err
			}
		}
		if err := r.wantMode(ctx, "freed by one", sum(a, b), nccl.Window, why); err != nil {
			return err
		}
		if s := r.comm.Stats(); s.Windows != 4 || s.PendingWindows != 1-me {
			return fmt.Errorf("freed by one: %+v, want four windows, pending on rank 0 only", s)
		}
		if r.job.Rank() == 1 {
			if err := small.Free(); err != nil {
				return err
			}
		}
		select {
		case <-freed:
			return errors.New("the memory of a window is gone")
		default:
		}
		if err := r.wantMode(ctx, "freed by both", sum(large, large), nccl.Graph, "no window"); err != nil {
			return err
		}
		select {
		case <-freed:
		default:
			return errors.New("the memory is still there")
		}
		if s := r.comm.Stats(); s.Windows != 3 || s.PendingWindows != 0 {
			return fmt.Errorf("freed by both: %+v, want three windows", s)
		}
		return free(a, b, large, fresh)
	}, "GORUN_WINDOWS=")
}

// TestLibraryWindowsAgain: memory that is captured again keeps its window.
func TestLibraryWindowsAgain(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		log := filepath.Join(t.TempDir(), "log")
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			r, err := deviceRank(ctx, job, elements)
			if err != nil {
				return err
			}
			for range 5 {
				if err := r.works(ctx, r.comm); err != nil {
					return err
				}
			}
			b, err := os.ReadFile(fmt.Sprintf("%s.%d", os.Getenv("FAKE_LOG"), os.Getpid()))
			if err != nil {
				return err
			}
			if up, down := strings.Count(string(b), "CommWindowRegister"), strings.Count(string(b), "CommWindowDeregister"); up != 2 || down != 0 {
				return fmt.Errorf("%d windows made and %d ended, want 2 and none", up, down)
			}
			return r.close()
		}, append(fakeEnv(t), "FAKE_LOG="+log)...))
	})
}

// TestLibraryWindowsFail: a window that one member cannot make is none, and not tried again; where it is demanded it is an error of all.
func TestLibraryWindowsFail(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		log := filepath.Join(t.TempDir(), "log")
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			r, err := deviceRank(ctx, job, elements)
			if err != nil {
				return err
			}
			call := func(s *cuda.Stream) error { return allReduce(r, s) }
			if _, _, err := r.mode(ctx, call, graphs.Require(nccl.Window)); !errors.Is(err, graphs.ErrMode) || wantText(err, "rank 1: ", "no addresses are left") != nil {
				return fmt.Errorf("demanded: %v", err)
			}
			for range 2 {
				if err := r.wantMode(ctx, "unasked", call, nccl.Graph, "no window: rank 1: ncclCommWindowRegister: "); err != nil {
					return err
				}
			}
			b, err := os.ReadFile(fmt.Sprintf("%s.%d", os.Getenv("FAKE_LOG"), os.Getpid()))
			if err != nil {
				return err
			}
			up, down, wantDown := strings.Count(string(b), "CommWindowRegister"), strings.Count(string(b), "CommWindowDeregister"), 4*(1-job.Rank())
			if up != 4 || down != wantDown {
				return fmt.Errorf("%d windows tried and %d ended, want 4 and %d", up, down, wantDown)
			}
			return errors.Join(r.works(ctx, r.comm), r.close())
		}, append(fakeEnv(t), "FAKE_LOG="+log, "FAKE_NCCL=window-fails")...))
	})
}

// TestLibraryWindowsGivenUp: the context of a capture ends on one member while the windows are made. They are nobody's then: the communicator works on, and at
// its end the memory is free.
func TestLibraryWindowsGivenUp(t *testing.T) {
	t.Run("fake", func(t *testing.T) {
		gate := filepath.Join(t.TempDir(), "gate") // there when rank 0 waits for rank 1, which has its window and does not come back with it
		allWell(t, ranktest.RunHostsBeside(t, make([]int, 2), func(ctx context.Context, job *bootstrap.Job) error {
			r, err := deviceRank(ctx, job, elements)
			if err != nil {
				return err
			}
			short, cancel := context.WithCancel(ctx)
			defer cancel()
			if job.Rank() == 0 {
				go func() {
					for !exists(os.Getenv("FAKE_GATE")+".0") && ctx.Err() == nil {
						time.Sleep(time.Millisecond)
					}
					cancel()
				}()
			}
			_, err = graphs.Capture(short, r.stream, func(s *cuda.Stream) error {
				return nccl.AllReduce(r.comm, r.a.All(), r.a.All(), nccl.Sum, s) // one window
			}, graphs.Comms(r.comm))
			want := []string{"rank 0 gave up its wait for rank 1"}
			if job.Rank() == 0 {
				want = []string{context.Canceled.Error()}
			}
			if err := wantText(err, want...); err != nil {
				return err
			}
			return errors.Join(r.works(ctx, r.comm), r.close())
		}, func(hosts []ranktest.Host) {
			for end := time.Now().Add(room); ; time.Sleep(time.Millisecond) {
				waits := false
				for _, st := range hosts[0].Standings() {
					waits = waits || st.Rank == 0 && len(st.Waits) > 0 && st.Waits[0].What == "windows of a captured call"
				}
				if waits {
					break
				}
				if time.Now().After(end) {
					t.Error("rank 0 does not come to wait for rank 1's windows")
					break
				}
			}
			if err := os.WriteFile(gate+".0", nil, 0o600); err != nil {
				t.Error(err)
			}
			for end := time.Now().Add(room); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if st := hosts[0].Standings(); len(st) == 0 || st[0].State != "" || len(st[0].Waits) == 0 || st[0].Waits[0].What != "windows of a captured call" {
					break // rank 0 has given up
				}
			}
			if err := os.WriteFile(gate, nil, 0o600); err != nil {
				t.Error(err)
			}
		}, append(fakeEnv(t), "FAKE_NCCL=window-gate", "FAKE_GATE="+gate)...))
	})
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// TestWindowsSetting: a setting that nobody knows is an error.
func TestWindowsSetting(t *testing.T) {
	t.Setenv("GORUN_WINDOWS", "sometimes")
	onRanks(t, 2, func(ctx context.Context, r *rank) error {
		_, _, err := r.mode(ctx, func(s *cuda.Stream) error { return allReduce(r, s) })
		return wantText(err, `GORUN_WINDOWS="sometimes": want auto or off`)
	})
}

// The library refuses a captured call's window to one member: the others are let out of the making of theirs, and that member says why.
func TestLibraryCaptureWindowRefused(t *testing.T) {
	dltest.Parallel(t)
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		r, err := deviceRank(ctx, job, elements)
		if err != nil {
			return err
		}
		c, err := r.another(ctx, "doomed")
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, room)
		defer cancel()
		_, err = graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
			return nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s)
		}, graphs.Comms(c), graphs.Require(nccl.Window))
		if !errors.Is(err, nccl.ErrAborted) {
			return fmt.Errorf("Capture: %w", err)
		}
		texts := []string{"rank 1 could not make its own"}
		if job.Rank() == 1 {
			texts = append(texts, "out of memory")
		}
		if err := wantText(err, texts...); err != nil {
			return err
		}
		return errors.Join(c.Close(), r.close())
	}, append(fakeEnv(t), "FAKE_NCCL=window-refused")...))
}
