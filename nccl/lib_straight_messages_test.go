package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

// Which groups of messages go straight: those of which nothing is to be said.
func TestLibraryStraightMessages(t *testing.T) {
	allWell(t, ranktest.RunProcesses(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, &nccl.Config{Check: nccl.Strict}, func(w *world) error { // which compares collectives
			if err := straightMessages(w, true); err != nil {
				return err
			}
			if err := errors.Join(w.job.Barrier(w.ctx), w.comm.Abort(nil)); err != nil { // one would end the other
				return err
			}
			return straightMessages(w, false)
		})
	}, fakeLibraries(t)...))
}

// straightMessages asks for messages of each kind; working says whether the communicator lets any go straight.
func straightMessages(w *world, working bool) error {
	b, done, err := openBuffers(w, 4096, false)
	defer done()
	if err != nil {
		return err
	}
	other, err := w.dev.NewStream()
	if err != nil {
		return err
	}
	defer other.Close()
	gone, err := freedRange(w)
	if err != nil {
		return err
	}
	peer := int32(1 - w.comm.Rank())
	send := nccl.Call{Op: nccl.OpSend, Type: cuda.Float32DType, Count: 8, Root: peer, Send: cuda.Range{Mem: b.send, Len: 32}, Stream: w.stream}
	recv := nccl.Call{Op: nccl.OpRecv, Type: cuda.Float32DType, Count: 8, Root: peer, Recv: cuda.Range{Mem: b.recv, Len: 32}, Stream: w.stream}
	with := func(c nccl.Call, change func(c *nccl.Call)) nccl.Call {
		change(&c)
		return c
	}
	var wrong []error
	want := func(what string, want bool, calls ...nccl.Call) {
		if got := nccl.GoStraight(w.comm, calls...); got != (want && working) {
			wrong = append(wrong, fmt.Errorf("%s: straight: %t", what, got))
		}
	}
	want("send", true, send)
	want("recv", true, recv)
	want("send and recv", true, send, recv)
	want("six", true, send, recv, send, recv, recv, recv)
	want("seven", false, send, recv, send, recv, recv, recv, recv)
	want("none", false)
	want("bfloat16", true, with(send, func(c *nccl.Call) { c.Type = cuda.BFloat16DType }), recv)
	want("with a collective", false, nccl.Call{Op: nccl.OpAllReduce, Type: cuda.Float32DType, Count: 8, Send: send.Send, Recv: recv.Recv, Stream: w.stream}, send)
	for _, c := range []struct {
		what   string
		change func(c *nccl.Call)
	}{
		{"no elements", func(c *nccl.Call) { c.Count = 0 }},
		{"rank 2", func(c *nccl.Call) { c.Root = 2 }},
		{"rank -1", func(c *nccl.Call) { c.Root = -1 }},
		{"this rank", func(c *nccl.Call) { c.Root = int32(w.comm.Rank()) }},
		{"no stream", func(c *nccl.Call) { c.Stream = nil }},
		{"another stream", func(c *nccl.Call) { c.Stream = other }},
		{"type that is none", func(c *nccl.Call) { c.Type = 0 }},
		{"no memory", func(c *nccl.Call) { c.Send, c.Recv = cuda.Range{}, cuda.Range{} }},
		{"freed memory", func(c *nccl.Call) { c.Send, c.Recv = gone, gone }},
	} {
		want(c.what+" of a recv", false, send, with(recv, c.change))
		want(c.what+" of a send", false, with(send, c.change), recv)
	}
	if !working {
		return errors.Join(wrong...)
	}
	if err := inCaptureAndRegistered(w, b.send, func(what string) { want(what, false, send, recv) }); err != nil {
		return err
	}
	want("after it", true, send, recv)
	return errors.Join(wrong...)
}

// Whichever way they go, messages leave the same records and counts, the same errors come, and after a group that fails nothing is left of it.
func TestLibraryStraightMessagesSame(t *testing.T) {
	onLibrary(t, func(ctx context.Context, job *bootstrap.Job) error {
		return withDevice(ctx, job, nil, func(straight *world) error {
			return withComm(ctx, job, straight.dev, nil, func(general *world) error {
				nccl.SetStraight(general.comm, false)
				b, done, err := openBuffers(straight, 4096, false)
				defer done()
				if err != nil {
					return err
				}
				var told [2]string
				for i, w := range []*world{straight, general} {
					text, err := tellMessages(w, b)
					if err != nil {
						return fmt.Errorf("straight=%t: %w", i == 0, err)
					}
					told[i] = text
				}
				if d := cmp.Diff(told[0], told[1]); d != "" {
					return fmt.Errorf("straight - general +:\n%s", d)
				}
				return nil
			})
		})
	}, nil)
}

// tellMessages sends and receives in all ways that there are, right and wrong, and tells what came of it.
func tellMessages(w *world, b buffers) (string, error) {
	var told strings.Builder
	peer := 1 - w.comm.Rank()
	out, in := make([]int32, 512), make([]int32, 512)
	for i := range out {
		out[i] = int32(1000*w.comm.Rank() + i)
	}
	send, _ := cuda.SliceOf[int32](b.send, 0, 512)
	recv, _ := cuda.SliceOf[int32](b.recv, 0, 512)
	if err := errors.Join(cuda.CopyToDevice(send, out, w.stream), cuda.Fill(recv, -1, w.stream)); err != nil {
		return "", err
	}
	sendTo := func(n, to int) error { return nccl.Send(w.comm, send.Slice(0, n), to, w.stream) }
	recvFrom := func(n, from int) error { return nccl.Recv(w.comm, recv.Slice(0, n), from, w.stream) }
	both := func(n int) error { return errors.Join(sendTo(n, peer), recvFrom(n, peer)) }
	tell := func(what string, err error) {
		fmt.Fprintf(&told, "%s: %v\n%s", what, err, nccl.Notes(w.comm))
	}
	group := func(what string, fn func() error) { tell(what, nccl.Group(fn, w.comm)) }

	group("exchange", func() error { return both(3) })
	group("receive first", func() error { return errors.Join(recvFrom(512, peer), sendTo(512, peer)) })
	group("three each way", func() error { return errors.Join(both(1), both(2), both(511)) })
	group("eight", func() error { return errors.Join(both(1), both(2), both(3), both(4)) })
	group("nested", func() error { return nccl.Group(func() error { return both(7) }, w.comm) })
	tell("twice in a group", nccl.Group(func() error { return both(8) }, w.comm, w.comm))
	if w.comm.Rank() == 0 {
		tell("alone", sendTo(9, peer))
		tell("alone", recvFrom(10, peer))
	} else {
		tell("alone", recvFrom(9, peer))
		tell("alone", sendTo(10, peer))
	}
	group("empty", func() error { return both(0) })
	group("empty beside full", func() error { return errors.Join(both(0), both(5)) })
	group("to itself", func() error { return errors.Join(sendTo(4, w.comm.Rank()), recvFrom(4, w.comm.Rank())) })
	group("types", func() error {
		s, _ := cuda.SliceOf[cuda.F8E4M3](b.send, 0, 16)
		r, _ := cuda.SliceOf[cuda.F8E4M3](b.recv, 0, 16)
		return errors.Join(nccl.Send(w.comm, s, peer, w.stream), nccl.Recv(w.comm, r, peer, w.stream))
	})
	group("with a collective", func() error {
		return errors.Join(both(6), nccl.Broadcast(w.comm, send.Slice(0, 6), recv.Slice(16, 22), 0, w.stream), both(7))
	})
	group("nothing", func() error { return nil })

	other, err := w.dev.NewStream()
	if err != nil {
		return "", err
	}
	defer other.Close()
	before := nccl.Notes(w.comm)
	group("fails", func() error { return errors.Join(both(6), errors.New("no")) })
	func() {
		defer func() { tell("panics", fmt.Errorf("%v", recover())) }()
		group("panics", func() error { both(6); panic("no") })
	}()
	if after := nccl.Notes(w.comm); after != before {
		return "", fmt.Errorf("groups that fail leave something:\n%s", cmp.Diff(before, after))
	}
	tell("a rank that is none", sendTo(1, 2))
	group("a rank that is none", func() error { return errors.Join(both(1), recvFrom(1, -1)) })
	group("no other end here", func() error { return sendTo(1, w.comm.Rank()) })
	group("two streams", func() error { return errors.Join(sendTo(1, peer), nccl.Recv(w.comm, recv.Slice(0, 1), peer, other)) })
	tell("no stream", nccl.Recv(w.comm, recv.Slice(0, 1), peer, nil))
	group("after all", func() error { return both(100) })

	short, cancel := context.WithTimeout(w.ctx, room)
	defer cancel()
	if err := errors.Join(cuda.CopyToHost(in, recv, w.stream), w.stream.Synchronize(short)); err != nil {
		return "", err
	}
	fmt.Fprintln(&told, in, nccl.Undone(w.comm))
	if err := w.job.Barrier(w.ctx); err != nil { // one would end the other's calls
		return "", err
	}
	if err := w.comm.Abort(errors.New("enough")); err != nil { // on both ranks, and who was first is in the texts
		return "", err
	}
	for _, err := range []error{sendTo(1, peer), nccl.Group(func() error { return both(1) }, w.comm)} {
		if !errors.Is(err, nccl.ErrAborted) {
			return "", fmt.Errorf("after Abort: %v", err)
		}
	}
	return told.String(), nil
}
