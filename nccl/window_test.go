package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/cuda/dl/dltest"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// On the host platform a window's addresses are real ones: each rank writes into every other's part.
func TestWindow(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			ranktest.RunEither(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error {
					if ok, why := w.comm.WindowSupport(); !ok {
						return errors.New(why)
					}
					m, err := w.dev.Alloc(3*4096, cuda.Shareable)
					if err != nil {
						return err
					}
					defer m.Free()
					win, err := w.comm.Window(ctx, cuda.Range{Mem: m, Off: 4096, Len: 4096})
					if err != nil {
						return err
					}
					if text := nccl.Explain(w.comm); !strings.Contains(text, fmt.Sprintf("rank %d of %d", job.Rank(), n)) || !strings.Contains(text, "registration") {
						return fmt.Errorf("explanation %q", text)
					}
					if got, want := win.UserPtr(), m.Pointer()+4096; got != want {
						return fmt.Errorf("user pointer %#x, want %#x", got, want)
					}
					for r := range n {
						p, err := win.LSADevicePtr(r)
						if err != nil {
							return err
						}
						*(*byte)(unsafe.Add(*(*unsafe.Pointer)(unsafe.Pointer(&p)), job.Rank())) = byte(10*r + job.Rank() + 1)
					}
					if err := job.Barrier(ctx); err != nil {
						return err
					}
					for r := range n {
						if got, want := win.Range().Bytes()[r], byte(10*job.Rank()+r+1); got != want {
							return fmt.Errorf("byte %d is %d, want %d", r, got, want)
						}
					}
					if _, err := win.LSADevicePtr(n); !errors.Is(err, nccl.ErrArgument) {
						return fmt.Errorf("address of rank %d: %v", n, err)
					}
					// The memory goes with the window.
					if err := m.Free(); err != nil {
						return err
					}
					if st := w.comm.Stats(); st.PeerMappings != n-1 {
						return fmt.Errorf("%d mappings, want %d", st.PeerMappings, n-1)
					}
					if err := errors.Join(job.Barrier(ctx), win.Close(ctx), win.Close(ctx)); err != nil {
						return err
					}
					if _, err := win.LSADevicePtr(0); err == nil {
						return errors.New("a closed window has addresses")
					}
					if st := w.comm.Stats(); st.Registrations+st.PeerMappings+st.GraphHolds != 0 {
						return fmt.Errorf("left: %+v", st)
					}
					// One that is not closed goes with the communicator.
					last, err := nccl.Alloc[int32](w.dev, 100)
					if err != nil {
						return err
					}
					defer last.Free()
					_, err = w.comm.Window(ctx, cuda.Range{Mem: last.Memory(), Len: 400})
					return err
				})
			})
		})
	}
}

// What members do wrong is told to all, and the communicator works on.
func TestWindowFaults(t *testing.T) {
	faults(t, func(t *testing.T, f func(ctx context.Context, job *bootstrap.Job) error) {
		ranktest.Run(t, 2, f)
	}, func(ctx context.Context, job *bootstrap.Job, f func(w *world) error) error {
		return with(ctx, job, nil, f)
	})
}

func faults(t *testing.T, run func(*testing.T, func(context.Context, *bootstrap.Job) error), with func(context.Context, *bootstrap.Job, func(*world) error) error) {
	run(t, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, func(w *world) error {
			m, err := w.dev.Alloc(64<<10, cuda.Shareable)
			if err != nil {
				return err
			}
			defer m.Free()
			private, err := w.dev.Alloc(64<<10, cuda.Private)
			if err != nil {
				return err
			}
			defer private.Free()
			odd := job.Rank() == 1
			pick := func(bad cuda.Range) cuda.Range {
				if odd {
					return bad
				}
				return cuda.Range{Mem: m, Len: 8192}
			}
			cases := []struct {
				name     string
				r        cuda.Range
				sentinel error
				part     string
			}{
				{"offset", cuda.Range{Mem: m, Off: 4096, Len: 8192}, nccl.ErrMismatch, "rank 1: 8192 bytes at offset 4096"},
				{"length", cuda.Range{Mem: m, Len: 4096}, nccl.ErrMismatch, "rank 1: 4096 bytes"},
				{"alignment", cuda.Range{Mem: m, Off: 512, Len: 8192}, nccl.ErrArgument, "rank 1: range [512,8704)"},
				{"private", cuda.Range{Mem: private, Len: 8192}, nccl.ErrArgument, "private memory"},
				{"empty", cuda.Range{}, nccl.ErrArgument, "an empty range"},
				{"outside", cuda.Range{Mem: m, Off: 4096, Len: 64 << 10}, nccl.ErrArgument, "outside"},
			}
			for _, tc := range cases {
				win, err := w.comm.Window(ctx, pick(tc.r))
				if win != nil {
					return fmt.Errorf("%s: a window", tc.name)
				}
				if err := wantErr(err, tc.sentinel, tc.part); err != nil {
					return fmt.Errorf("%s: %w", tc.name, err)
				}
			}
			// A member that does not come.
			if !odd {
				short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
				defer cancel()
				_, err := w.comm.Window(short, pick(cuda.Range{}))
				if err := wantErr(err, nil, "rank 1"); err != nil {
					return err
				}
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			if odd {
				if _, err := w.comm.Window(ctx, cuda.Range{Mem: m, Len: 4096}); err == nil {
					return errors.New("a window that one member has given up")
				}
			}
			win, err := w.comm.Window(ctx, cuda.Range{Mem: m, Len: 8192})
			if err != nil {
				return err
			}
			return win.Close(ctx)
		})
	})
}

// A member that cannot show its memory to the others, here because it has no descriptor left, ends Window on all: none waits for that memory.
func TestWindowFailsAlone(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			ctx, cancel := context.WithTimeout(ctx, room)
			defer cancel()
			b, done, err := openBuffers(w, 8192, false)
			defer done()
			if err != nil {
				return err
			}
			r := cuda.Range{Mem: b.send, Len: 4096}
			var limit unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
				return err
			}
			if job.Rank() == 1 {
				if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}); err != nil {
					return err
				}
			}
			_, err = w.comm.Window(ctx, r)
			var cause error
			if job.Rank() == 1 {
				cause = unix.EINVAL // no number is within the limit
			}
			if err := errors.Join(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit), wantErr(err, cause, ": rank 1: ", "duplicate descriptor ")); err != nil {
				return err
			}
			win, err := w.comm.Window(ctx, r)
			if err != nil {
				return err
			}
			return win.Close(ctx)
		})
	}))
}

// Windows of the library: captured calls use them, addresses come with the version that has them.
func TestLibraryWindow(t *testing.T) {
	body := func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			if ok, why := w.comm.WindowSupport(); !ok {
				return errors.New(why)
			}
			b, done, err := openBuffers(w, 4<<20, false)
			defer done()
			if err != nil {
				return err
			}
			win, err := w.comm.Window(ctx, cuda.Range{Mem: b.send, Len: 1 << 20})
			if err != nil {
				return err
			}
			if win == nil {
				_, why := w.comm.WindowSupport()
				return fmt.Errorf("no window: %s", why)
			}
			if got, want := win.UserPtr(), b.send.Pointer(); got != want {
				return fmt.Errorf("user pointer %#x, want %#x", got, want)
			}
			p, err := win.LSADevicePtr(1 - job.Rank())
			user := win.CheckUserPtr()
			if errors.Is(user, nccl.ErrUnsupported) != errors.Is(err, nccl.ErrUnsupported) || user != nil && !errors.Is(user, nccl.ErrUnsupported) {
				return fmt.Errorf("user pointer: %v; peer's: %v", user, err)
			}
			switch {
			case strings.Contains(nccl.Explain(w.comm), "CL 2.28."): // NCCL, MCCL, RCCL
				if err := wantErr(err, nccl.ErrUnsupported, "CL 2.29.2, found "); err != nil {
					return err
				}
			case err != nil:
				return err
			case isFake() && p != b.send.Pointer()+uintptr(2-job.Rank())<<40:
				return fmt.Errorf("address %#x of the peer's part, own %#x", p, b.send.Pointer())
			}
			ops := []nccl.Op{nccl.OpAllReduce, nccl.OpAllGather, nccl.OpReduceScatter, nccl.OpBroadcast}
			ty := libTypes[libF32]
			captured := func(how string, s spec, want nccl.Mode, o ...graphs.Option) error {
				g, err := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error {
					if s.inPlace {
						return ty.call(w, b, s)
					}
					return errors.Join(ty.call(w, b, s), ty.call(w, b, s))
				}, append(o, graphs.Comms(w.comm))...)
				if err != nil {
					return fmt.Errorf("%s: %v: %w", how, s, err)
				}
				if got := g.Calls()[0]; got.Mode != want {
					return fmt.Errorf("%s: %s: mode %v (%s), want %v", how, got.Call, got.Mode, got.Reason, want)
				}
				for range 3 {
					if err := errors.Join(ty.write(w, b, s), g.Launch(w.stream), ty.verify(w, b, s)); err != nil {
						return fmt.Errorf("%s: %w", how, err)
					}
				}
				return g.Close()
			}
			specs := func(f func(s spec) error) error {
				for i, op := range ops {
					for _, count := range []int{2, 17, 1000, 200_000} {
						for _, inPlace := range []bool{false, true} {
							if err := f(spec{op: op, count: count, salt: i, inPlace: inPlace}); err != nil {
								return err
							}
						}
					}
				}
				return nil
			}
			// One buffer of the two is in a window: not enough.
			if err := captured("send in a window", spec{op: nccl.OpAllReduce, count: 1000}, nccl.Graph); err != nil {
				return err
			}
			if err := win.Close(ctx); err != nil {
				return err
			}
			fmt.Fprintln(os.Stderr, "windows by demand")
			if err := specs(func(s spec) error {
				if s.op == nccl.OpBroadcast {
					return nil // it uses none
				}
				return captured("demanded", s, nccl.Window, graphs.Require(nccl.Window))
			}); err != nil {
				return err
			}
			fmt.Fprintln(os.Stderr, "the program's windows")
			var wins []*nccl.SymmetricWindow
			for _, m := range []*cuda.Memory{b.send, b.recv} {
				win, err := w.comm.Window(ctx, cuda.Range{Mem: m, Len: m.Size()})
				if err != nil {
					return err
				}
				wins = append(wins, win)
			}
			if err := specs(func(s spec) error {
				want := nccl.Window
				if s.op == nccl.OpBroadcast {
					want = nccl.Graph
				}
				if err := captured("in windows", s, want); err != nil {
					return err
				}
				// and eager
				return errors.Join(ty.write(w, b, s), ty.call(w, b, s), ty.verify(w, b, s))
			}); err != nil {
				return err
			}
			g, err := graphs.Capture(ctx, w.stream, func(*cuda.Stream) error {
				return ty.call(w, b, spec{op: nccl.OpAllReduce, count: 4})
			}, graphs.Comms(w.comm))
			if err != nil {
				return err
			}
			if err := wantErr(wins[0].Close(ctx), nil, "in use by", "graph captured at window_test.go"); err != nil {
				return err
			}
			if err := errors.Join(g.Close(), released(w), job.Barrier(ctx)); err != nil {
				return err
			}
			return errors.Join(wins[0].Close(ctx), wins[1].Close(ctx))
		})
	}
	onLibrary(t, body, nil)
	t.Run("with addresses", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 2, body, fakeLibraries(t, "-DVERSION=22907")...))
	})
	t.Run("without windows", func(t *testing.T) {
		allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
			return withDevice(ctx, job, nil, func(w *world) error {
				b, done, err := openBuffers(w, 8192, false)
				defer done()
				if err != nil {
					return err
				}
				win, err := w.comm.Window(ctx, cuda.Range{Mem: b.send, Len: 4096})
				if win != nil || err != nil {
					return fmt.Errorf("window %v, error %v; want none", win, err)
				}
				if _, err := win.LSADevicePtr(0); win.UserPtr() != 0 || !errors.Is(err, nccl.ErrNoWindow) || win.Close(ctx) != nil {
					return fmt.Errorf("the nil window has %v", err)
				}
				if ok, why := w.comm.WindowSupport(); ok || why == "" {
					return errors.New("windows are supported")
				}
				s := spec{op: nccl.OpAllReduce, count: 4}
				capture := func(o ...graphs.Option) (*graphs.Graph, error) {
					return graphs.Capture(ctx, w.stream, func(*cuda.Stream) error { return libTypes[libF32].call(w, b, s) }, append(o, graphs.Comms(w.comm))...)
				}
				g, err := capture()
				if err != nil {
					return err
				}
				if got := g.Calls()[0]; got.Mode != nccl.Graph || !strings.Contains(got.Reason, "no window: the library made none") {
					return fmt.Errorf("mode %v: %s", got.Mode, got.Reason)
				}
				if err := g.Close(); err != nil {
					return err
				}
				_, err = capture(graphs.Require(nccl.Window))
				return wantErr(err, graphs.ErrMode, "there is no window")
			})
		}, append(fakeLibraries(t), "FAKE_NCCL="+os.Getenv("FAKE_NCCL")+"no-window")...))
	})
}

func TestLibraryWindowFaults(t *testing.T) {
	faults(t, func(t *testing.T, f func(context.Context, *bootstrap.Job) error) { onLibrary(t, f, nil) },
		func(ctx context.Context, job *bootstrap.Job, f func(*world) error) error {
			return withDevice(ctx, job, nil, f)
		})
}

// The library refuses a window to one member before it has met the others there: they are let out, whatever their context, and the communicator has failed. The memory is free.
func TestLibraryWindowRefused(t *testing.T) {
	dltest.Parallel(t)
	allWell(t, ranktest.RunProcesses(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			ctx, cancel := context.WithTimeout(ctx, room)
			defer cancel()
			b, done, err := openBuffers(w, 8192, false)
			defer done()
			if err != nil {
				return err
			}
			_, err = w.comm.Window(ctx, cuda.Range{Mem: b.send, Len: 4096})
			text := "rank 1 could not make its own"
			if job.Rank() == 1 {
				text = "out of memory"
			}
			if err := wantErr(err, nil, "window on communicator world", text); err != nil {
				return err
			}
			if err := wantErr(w.comm.Err(), nccl.ErrAborted, "rank 1 could not make its own"); err != nil {
				return err
			}
			again, err := w.comm.Shrink(ctx, nil)
			if err != nil {
				return err
			}
			return errors.Join(members(ctx, again, []int{0, 1, 2}), again.Close(), w.comm.Close(), b.send.Free())
		})
	}, append(fakeLibraries(t), "FAKE_NCCL=window-refused")...))
}
