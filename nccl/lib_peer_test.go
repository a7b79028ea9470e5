package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// byPeer has a test's ranks make small collectives by peer memory.
const byPeer = "GORUN_PEER=auto"

// onPeers runs f on n ranks with a device, a communicator that has peer memory, and a stream.
func onPeers(t *testing.T, n int, f func(w *world) error) {
	t.Helper()
	onLibraries(t, n, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(w *world) error {
			if nccl.PeerMost(w.comm) == 0 {
				return fmt.Errorf("no peer memory:\n%s", nccl.Explain(w.comm))
			}
			return f(w)
		})
	}, nil, nil, byPeer)
}

// Every operation with every type and reduction, sizes around each bound of the kernel, in and out of place, straight and not, eager and captured; with calls of the library between.
func TestLibraryPeer(t *testing.T) {
	for _, n := range []int{2, 3, 8} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			onPeers(t, n, func(w *world) error {
				most := nccl.PeerMost(w.comm)
				b, done, err := openBuffers(w, n*most+4096, false)
				defer done()
				if err != nil {
					return err
				}
				salt, byPeer, byLibrary := 0, uint64(0), 0
				for i, ty := range libTypes {
					counts := []int{0, 1, 9, 333}
					if i == libF32 || !isFake() {
						counts = append(counts, 128*8/ty.size, 128*8/ty.size+1, 64*128*8/ty.size-1, 64*128*8/ty.size+1, most/ty.size, most/ty.size+1)
					}
					for _, op := range collectives {
						for red := nccl.Sum; red <= nccl.Avg; red++ {
							moves := op == nccl.OpBroadcast || op == nccl.OpAllGather
							f8 := ty.name == cuda.F8E4M3DType.String() || ty.name == cuda.F8E5M2DType.String()
							library := (red == nccl.Avg || f8) && !moves
							if moves && red > nccl.Sum || library && isFake() && !ty.fake {
								continue
							}
							for _, count := range counts {
								if library && count > 1000 || count*ty.size > most && (isFake() && !ty.fake || red > nccl.Sum) {
									continue
								}
								for _, inPlace := range []bool{false, true} {
									salt++
									s := spec{op: op, red: red, count: count, inPlace: inPlace, salt: salt, root: salt % n}
									nccl.SetStraight(w.comm, salt/2>>w.job.Rank()&1 == 0)
									if err := ty.write(w, b, s); err != nil {
										return err
									}
									calls := func() error { return ty.call(w, b, s) }
									if salt%5 == 0 && !inPlace {
										calls = func() error { return replayTwice(w, func() error { return ty.call(w, b, s) }) }
									}
									if err := calls(); err != nil {
										return fmt.Errorf("%v of %s: %w", s, ty.name, err)
									}
									if err := ty.verify(w, b, s); err != nil {
										return err
									}
									if count > 0 && !library && count*ty.size <= most {
										byPeer++
									} else {
										byLibrary++
									}
								}
							}
						}
					}
				}
				if got := nccl.ByPeerCalls(w.comm); got != byPeer {
					return fmt.Errorf("%d calls by peer memory, want %d", got, byPeer)
				}
				if byLibrary == 0 {
					return errors.New("no calls by the library between them")
				}
				return nil
			})
		})
	}
}

// replayTwice captures a call and launches it twice.
func replayTwice(w *world, call func() error) error {
	g, err := graphs.Capture(w.ctx, w.stream, func(*cuda.Stream) error { return call() }, graphs.Comms(w.comm))
	if err != nil {
		return err
	}
	return errors.Join(g.Launch(w.stream), g.Launch(w.stream), w.stream.Synchronize(w.ctx), g.Close())
}

// Buffers need no alignment but their elements'.
func TestLibraryPeerUnaligned(t *testing.T) {
	onPeers(t, 2, func(w *world) error {
		buf, err := cuda.AllocBuffer[uint8](w.dev, 8192, cuda.Private)
		if err != nil {
			return err
		}
		defer buf.Free()
		for _, at := range [][2]int{{1, 4099}, {3, 4096}, {8, 4097}, {4, 4100}} {
			for _, n := range []int{1, 7, 8, 1001} {
				mine := make([]uint8, n)
				for i := range mine {
					mine[i] = uint8(i*3 + w.comm.Rank())
				}
				// What is beside the result stays.
				around := slices.Repeat([]uint8{0xa5}, n+16)
				send, recv := buf.Slice(at[0], at[0]+n), buf.Slice(at[1], at[1]+n)
				got := make([]uint8, n+16)
				err := errors.Join(cuda.CopyToDevice(buf.Slice(at[1]-8, at[1]+n+8), around, w.stream), cuda.CopyToDevice(send, mine, w.stream),
					nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream), cuda.CopyToHost(got, buf.Slice(at[1]-8, at[1]+n+8), w.stream), w.stream.Synchronize(w.ctx))
				if err != nil {
					return err
				}
				for i, g := range got {
					want := uint8(0xa5)
					if i >= 8 && i < 8+n {
						want = uint8((i-8)*6 + 1)
					}
					if g != want {
						return fmt.Errorf("%d bytes from %d to %d: byte %d is %#x, want %#x", n, at[0], at[1], i-8, g, want)
					}
				}
			}
		}
		return nil
	})
}

// Calls on several streams, in captures with forks and between them, run in one order: the kernels of a communicator share their lines.
func TestLibraryPeerStreams(t *testing.T) {
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			onPeers(t, n, func(w *world) (err error) {
				const count, lanes = 3000, 3
				var lane [lanes]struct {
					s    *cuda.Stream
					a, b *cuda.Buffer[uint64]
					x    uint64 // what all elements of a are
				}
				for i := range lane {
					l := &lane[i]
					if l.s, err = w.dev.NewStream(); err != nil {
						return err
					}
					defer func() { err = errors.Join(err, l.s.Close()) }()
					for _, b := range []**cuda.Buffer[uint64]{&l.a, &l.b} {
						if *b, err = nccl.Alloc[uint64](w.dev, count); err != nil {
							return err
						}
						defer (*b).Free()
					}
					l.x = uint64(i + 1)
					if err := cuda.Fill(l.a.All(), l.x, l.s); err != nil {
						return err
					}
				}
				// Twice the sum over all ranks, there and back.
				twice := func(i int) error {
					l := &lane[i]
					return errors.Join(nccl.AllReduce(w.comm, l.a.All(), l.b.All(), nccl.Sum, l.s), nccl.AllReduce(w.comm, l.b.All(), l.a.All(), nccl.Sum, l.s))
				}
				fork, err := w.dev.NewEvent()
				if err != nil {
					return err
				}
				defer fork.Close()
				var joins [lanes]*cuda.Event
				for i := range joins {
					if joins[i], err = w.dev.NewEvent(); err != nil {
						return err
					}
					defer joins[i].Close()
				}
				g, err := graphs.Capture(w.ctx, lane[0].s, func(s *cuda.Stream) error {
					if err := s.Record(fork); err != nil {
						return err
					}
					for i := 1; i < lanes; i++ {
						if err := lane[i].s.Wait(fork); err != nil {
							return err
						}
					}
					for range 3 {
						for i := range lane {
							if err := twice(i); err != nil {
								return err
							}
						}
					}
					for i := 1; i < lanes; i++ {
						if err := errors.Join(lane[i].s.Record(joins[i]), s.Wait(joins[i])); err != nil {
							return err
						}
					}
					return nil
				}, graphs.Comms(w.comm))
				if err != nil {
					return err
				}
				rounds := 20
				nn := uint64(n) * uint64(n)
				for range rounds {
					for i := range lane {
						if err := twice(i); err != nil {
							return err
						}
						lane[i].x *= nn
					}
					// The graph reads what the other lanes write, as the program has to say.
					for i := 1; i < lanes; i++ {
						if err := errors.Join(lane[i].s.Record(joins[i]), lane[0].s.Wait(joins[i])); err != nil {
							return err
						}
					}
					if err := g.Launch(lane[0].s); err != nil {
						return err
					}
					for i := range lane {
						lane[i].x *= nn * nn * nn
					}
					if err := lane[0].s.Record(fork); err != nil {
						return err
					}
					for i := 1; i < lanes; i++ {
						if err := lane[i].s.Wait(fork); err != nil {
							return err
						}
					}
				}
				for i := range lane {
					l := &lane[i]
					got := make([]uint64, count)
					if err := errors.Join(cuda.CopyToHost(got, l.a.All(), l.s), l.s.Synchronize(w.ctx)); err != nil {
						return err
					}
					for k, x := range got {
						if x != l.x {
							return fmt.Errorf("lane %d, element %d: %d, want %d", i, k, x, l.x)
						}
					}
				}
				return g.Close()
			})
		})
	}
}

// A call that not all ranks make ends with the communicator; the process goes on with another one.
func TestLibraryPeerAbort(t *testing.T) {
	for _, calls := range []int{1, 3000} { // those of a full stream's launch waits, too
		t.Run(fmt.Sprintf("%d calls", calls), func(t *testing.T) {
			onLibraries(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
				dev, err := device(job)
				if err != nil {
					return err
				}
				for range 3 {
					var late error
					err := withComm(ctx, job, dev, nil, func(w *world) error {
						buf, err := cuda.Malloc[float32](dev, 100)
						if err != nil {
							return err
						}
						defer buf.Free()
						sum := func() error { return nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream) }
						if err := errors.Join(sum(), w.stream.Synchronize(ctx)); err != nil {
							return err
						}
						if job.Rank() == 0 {
							short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
							defer cancel()
							stop := context.AfterFunc(short, func() { w.comm.Abort(short.Err()) })
							defer stop()
							for range calls {
								if late = sum(); late != nil {
									break
								}
							}
							if late == nil {
								late = w.stream.Synchronize(ctx)
							}
							return nil
						}
						for ctx.Err() == nil && w.comm.Err() == nil {
							time.Sleep(time.Millisecond)
						}
						late = w.comm.Err()
						return nil
					})
					if err := errors.Join(err, wantErr(late, nccl.ErrAborted, "by rank 0")); err != nil {
						return err
					}
				}
				return dev.Close()
			}, nil, nil, byPeer)
		})
	}
}

// Parts and what is left have their own; a program, its user, or one rank's user can be without.
func TestLibraryPeerChoice(t *testing.T) {
	onLibraries(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		sum := func(w *world, peer bool, why string) error {
			if text := nccl.Explain(w.comm); (nccl.PeerMost(w.comm) > 0) != peer || !strings.Contains(text, why) {
				return fmt.Errorf("want %q in\n%s", why, text)
			}
			buf, err := cuda.Malloc[float32](w.dev, 10)
			if err != nil {
				return err
			}
			defer buf.Free()
			before, got := nccl.ByPeerCalls(w.comm), make([]float32, 10)
			err = errors.Join(cuda.Fill(buf.All(), 1, w.stream), nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream), cuda.CopyToHost(got, buf.All(), w.stream),
				w.stream.Synchronize(w.ctx))
			if err == nil && got[9] != float32(w.comm.Size()) {
				err = fmt.Errorf("sum of %d ranks: %v", w.comm.Size(), got)
			}
			if n := nccl.ByPeerCalls(w.comm) - before; err == nil && (n == 1) != peer {
				err = fmt.Errorf("%d calls by peer memory, want it %t", n, peer)
			}
			return err
		}
		yes := "yes: collectives of up to "
		err = withComm(ctx, job, dev, nil, func(w *world) error {
			if err := sum(w, true, yes); err != nil {
				return err
			}
			part, err := w.comm.Split(ctx, min(job.Rank(), 1), 0)
			if err != nil {
				return err
			}
			if part.Size() > 1 {
				err = sum(&world{ctx, job, dev, part, w.stream}, true, yes)
			}
			if err = errors.Join(err, part.Close()); err != nil || job.Rank() == 0 {
				return err
			}
			rest, err := w.comm.Shrink(ctx, []int{0})
			if err != nil {
				return err
			}
			return errors.Join(sum(&world{ctx, job, dev, rest, w.stream}, true, yes), rest.Close())
		})
		if err != nil {
			return err
		}
		err = withComm(ctx, job, dev, &nccl.Config{NoPeer: true}, func(w *world) error { return sum(w, false, "no: the program wants none (Config.NoPeer)") })
		if err != nil {
			return err
		}
		if job.Rank() == 1 {
			os.Setenv("GORUN_PEER", "off")
		}
		why := "no: rank 1: GORUN_PEER=off"
		if job.Rank() == 1 {
			why = "no: GORUN_PEER=off"
		}
		if err := withComm(ctx, job, dev, nil, func(w *world) error { return sum(w, false, why) }); err != nil {
			return err
		}
		if job.Rank() == 1 {
			os.Setenv("GORUN_PEER", "sometimes")
		}
		err = withComm(ctx, job, dev, nil, func(*world) error { return errors.New("a communicator with a setting that is none") })
		if err := wantErr(err, nil, `GORUN_PEER="sometimes": want auto or off`); err != nil {
			return err
		}
		return dev.Close()
	}, nil, nil, byPeer)
}

// Messages go by the library: those in registered memory are counted as such, also beside collectives by peer memory.
func TestLibraryPeerCountsMessages(t *testing.T) {
	onPeers(t, 2, func(w *world) error {
		b, done, err := openBuffers(w, 4096, true)
		defer done()
		if err != nil {
			return err
		}
		send, _ := cuda.SliceOf[uint8](b.send, 0, 1000)
		recv, _ := cuda.SliceOf[uint8](b.recv, 0, 1000)
		peer := 1 - w.comm.Rank()
		err = nccl.Group(func() error {
			return errors.Join(nccl.Send(w.comm, send, peer, w.stream), nccl.Recv(w.comm, recv, peer, w.stream))
		}, w.comm)
		if err := errors.Join(err, w.stream.Synchronize(w.ctx)); err != nil {
			return err
		}
		if s := w.comm.Stats(); s.BytesDirect != 2000 || s.BytesStaged != 0 {
			return fmt.Errorf("%d bytes direct, %d staged, want 2000 and 0", s.BytesDirect, s.BytesStaged)
		}
		return nil
	})
}

// What a communicator had made is given back, and its ranks' descriptors.
func TestLibraryPeerLeavesNothing(t *testing.T) {
	onLibraries(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		dev, err := device(job)
		if err != nil {
			return err
		}
		var files, maps int
		for round := range 6 {
			err := withComm(ctx, job, dev, nil, func(w *world) error {
				buf, err := nccl.Alloc[int32](dev, 1000)
				if err != nil {
					return err
				}
				defer buf.Free()
				return errors.Join(nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream), w.stream.Synchronize(ctx))
			})
			if err != nil {
				return err
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			switch f, m := fdCount(), mapCount(); {
			case round == 2:
				files, maps = f, m
			case round > 2 && (f > files || m > maps):
				return fmt.Errorf("round %d: %d descriptors and %d mappings, %d and %d before", round, f, m, files, maps)
			}
		}
		return dev.Close()
	}, nil, nil, byPeer)
}

// A launch that fails ends the communicator on all ranks, and leaves nothing behind.
func TestLibraryPeerLaunchFails(t *testing.T) {
	for _, n := range []int{2, 8} {
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			allWell(t, ranktest.RunProcesses(t, n, func(ctx context.Context, job *bootstrap.Job) error {
				dev, err := device(job)
				if err != nil {
					return err
				}
				for round := range 5 {
					err := withComm(ctx, job, dev, nil, func(w *world) error {
						buf, err := cuda.Malloc[float32](dev, 10)
						if err != nil {
							return err
						}
						defer buf.Free()
						if round%n == job.Rank() {
							nccl.BreakPeer(w.comm)
						}
						for err == nil {
							err = errors.Join(nccl.AllReduce(w.comm, buf.All(), buf.All(), nccl.Sum, w.stream), w.stream.Synchronize(ctx))
						}
						return wantErr(err, nil, "launch kernel: gorun_peer", fmt.Sprintf("rank %d", round%n))
					})
					if err != nil {
						return fmt.Errorf("round %d: %w", round, err)
					}
				}
				return dev.Close()
			}, append(fakeLibraries(t), byPeer)...))
		})
	}
}

// After 2^32 calls of a block its count begins again; lines that were never written before are awaited all the same.
func TestLibraryPeerCountsWrap(t *testing.T) {
	// A communicator each: lines of the calls that a count begins again with must not be there.
	for _, ranks := range []int{2, 3} {
		for _, first := range []uint32{math.MaxUint32 - 1, math.MaxUint32} {
			t.Run(fmt.Sprintf("%d ranks, %d calls", ranks, first), func(t *testing.T) { wrapPeerCounts(t, ranks, first) })
		}
	}
}

func wrapPeerCounts(t *testing.T, ranks int, first uint32) {
	onPeers(t, ranks, func(w *world) error {
		n := nccl.PeerMost(w.comm) / 8
		buf, err := cuda.Malloc[uint64](w.dev, 2*n)
		if err != nil {
			return err
		}
		defer buf.Free()
		send, recv := buf.Slice(0, n), buf.Slice(n, 2*n)
		err = errors.Join(cuda.Fill(send, uint64(w.comm.Rank()+1), w.stream), w.stream.Synchronize(w.ctx), nccl.SetPeerCounts(w.ctx, w.comm, first), w.job.Barrier(w.ctx))
		if err != nil {
			return err
		}
		if w.job.Rank() == 0 {
			time.Sleep(50 * time.Millisecond) // the others' kernels are there first
		}
		for call := range 4 {
			got := make([]uint64, n)
			err := errors.Join(cuda.Fill(recv, 0, w.stream), nccl.AllReduce(w.comm, send, recv, nccl.Sum, w.stream), cuda.CopyToHost(got, recv, w.stream), w.stream.Synchronize(w.ctx))
			if err != nil {
				return err
			}
			for i, x := range got {
				if want := uint64(ranks * (ranks + 1) / 2); x != want {
					return fmt.Errorf("call %d: element %d is %d, want %d", call, i, x, want)
				}
			}
		}
		return nil
	})
}
