package nccl_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/nccl"
)

// placements are jobs of several hosts: the host of each rank.
var placements = [][]int{{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 1, 2}}

// acrossHosts runs f on ranks of several hosts and wants success of all.
func acrossHosts(t *testing.T, nodeOf []int, f func(ctx context.Context, job *bootstrap.Job) error) {
	t.Helper()
	allWell(t, ranktest.RunHosts(t, nodeOf, f))
}

// seedOf is a number that differs from run to run, and is the same on all ranks.
func seedOf(job *bootstrap.Job) uint64 {
	h := fnv.New64a()
	h.Write([]byte(job.ID()))
	return h.Sum64()
}

// Between hosts calls give what they give within one.
func TestHosts(t *testing.T) {
	for _, nodeOf := range placements {
		t.Run(fmt.Sprint(nodeOf), func(t *testing.T) {
			acrossHosts(t, nodeOf, func(ctx context.Context, job *bootstrap.Job) error {
				if err := randomSequences(ctx, job, seedOf(job)); err != nil {
					return err
				}
				return manyMessages(ctx, job, seedOf(job)+1)
			})
		})
	}
}

// Large calls: many chunks, and each rank's part of a chunk.
func TestHostsLarge(t *testing.T) {
	acrossHosts(t, []int{0, 1, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			b, done, err := openBuffers(w, 3*(2<<20)+4096, true)
			defer done()
			if err != nil {
				return err
			}
			for i, op := range collectives {
				s := spec{op: op, count: 1<<19 - 5, root: i % 3, inPlace: i%2 == 0, salt: i}
				if err := outcome(ctx, w.stream, types[6].call(w, b, s, w.stream)); err != nil {
					return fmt.Errorf("%v: %w", s, err)
				}
				if err := types[6].verify(w, b, s); err != nil {
					return err
				}
			}
			if st := w.comm.Stats(); st.BytesDirect != 0 || st.PeerMappings != 0 {
				return fmt.Errorf("%+v: between hosts all is staged", st)
			}
			return nil
		})
	})
}

// Communicators of some of the hosts' ranks: within one host, and over a pair of hosts.
func TestHostsSplit(t *testing.T) {
	acrossHosts(t, []int{0, 0, 1, 1, 2}, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			for _, color := range []int{job.Node(), w.comm.Rank() % 2} {
				part, err := w.comm.Split(ctx, color, -w.comm.Rank())
				if err != nil {
					return err
				}
				sub := &world{ctx, job, w.dev, part, w.stream}
				b, done, err := openBuffers(sub, 1<<20, false)
				if err == nil {
					s := spec{op: nccl.OpAllReduce, count: 70_001, salt: color}
					if err = outcome(ctx, w.stream, types[2].call(sub, b, s, w.stream)); err == nil {
						err = types[2].verify(sub, b, s)
					}
				}
				done()
				if err := errors.Join(err, part.Close()); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// A member that calls something else, that closes early, or that dies on another host: every rank has an error that names it, in time.
func TestHostsFaults(t *testing.T) {
	const culprit = 2
	for _, tc := range []struct {
		name string
		does func(w *world, b buffers) error // by the culprit, in place of the call
		kind error
		text string
	}{
		{"mismatch", func(w *world, b buffers) error {
			return outcome(w.ctx, w.stream, types[6].call(w, b, spec{op: nccl.OpAllReduce, count: 999}, w.stream))
		}, nccl.ErrMismatch, "rank 2"},
		{"closes", func(w *world, b buffers) error { return w.comm.Close() }, nccl.ErrClosed, "rank 2"},
		{"dies", func(w *world, b buffers) error { syscall.Kill(os.Getpid(), syscall.SIGKILL); select {} }, nccl.ErrRank, "rank 2"},
		{"aborts", func(w *world, b buffers) error { return w.comm.Abort(errors.New("enough")) }, nccl.ErrAborted, "aborted by rank 2: enough"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			results := ranktest.RunHosts(t, []int{0, 0, 1, 2}, func(ctx context.Context, job *bootstrap.Job) error {
				return with(ctx, job, nil, func(w *world) error {
					b, done, err := openBuffers(w, 1<<20, false)
					defer done()
					if err != nil {
						return err
					}
					s := spec{op: nccl.OpAllReduce, count: 1000}
					if err := outcome(ctx, w.stream, types[6].call(w, b, s, w.stream)); err != nil {
						return err
					}
					if err := job.Barrier(ctx); err != nil { // what a rank has sent may be lost with it
						return err
					}
					start := time.Now()
					if w.comm.Rank() == culprit {
						if err := tc.does(w, b); tc.name != "mismatch" {
							return err
						} else {
							return wantErr(err, tc.kind, tc.text)
						}
					}
					err = outcome(ctx, w.stream, types[6].call(w, b, s, w.stream))
					if took := time.Since(start); took > room {
						return fmt.Errorf("%v after %v", err, took)
					}
					return wantErr(err, tc.kind, tc.text)
				})
			})
			for _, r := range results {
				if r.Code != 0 && !(r.Rank == culprit && tc.name == "dies" && r.Signal == "SIGKILL") {
					t.Errorf("%v", r)
				}
			}
		})
	}
}

// The listeners keep to the range of ports that they are given; where it is full, that is told.
func TestHostsPorts(t *testing.T) {
	taken := 0
	if os.Getenv(ranktest.PortsVar) == "" { // not in a rank's process
		probe, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer probe.Close()
		taken = probe.Addr().(*net.TCPAddr).Port // the ranks find it in use
	}
	init := func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			addr, err := listening(job.HostAddr())
			if err != nil {
				return err
			}
			from, to := job.DataPorts()
			_, text, _ := net.SplitHostPort(addr)
			if port, _ := strconv.Atoi(text); port <= from || port > to {
				return fmt.Errorf("rank %d listens on %s, want one behind %d, to %d", job.Rank(), addr, from, to)
			}
			return nil
		})
	}
	t.Run("free", func(t *testing.T) {
		for _, r := range ranktest.RunHosts(t, []int{0, 1}, init, fmt.Sprintf("%s=%d-%d", ranktest.PortsVar, taken, taken+20)) {
			if r.Code != 0 {
				t.Errorf("%v", r)
			}
		}
	})
	t.Run("full", func(t *testing.T) {
		for _, r := range ranktest.RunHosts(t, []int{0, 1}, init, fmt.Sprintf("%s=%d-%d", ranktest.PortsVar, taken, taken)) {
			if r.Code == 0 || !strings.Contains(r.Err, "listen for the members on other hosts") || !strings.Contains(r.Err, "address already in use") {
				t.Errorf("%v", r)
			}
		}
	})
}

// Who does not know the job's key gets nothing, and disturbs nobody.
func TestHostsStranger(t *testing.T) {
	results := ranktest.RunHosts(t, []int{0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		return with(ctx, job, nil, func(w *world) error {
			if job.Rank() == 1 {
				if err := strangers(job); err != nil {
					return err
				}
			}
			if err := job.Barrier(ctx); err != nil {
				return err
			}
			return smallAllReduce(w)
		})
	})
	for _, r := range results {
		if r.Code != 0 {
			t.Errorf("%v", r)
		}
	}
	if !strings.Contains(results[1].Output, "gorun: rank 1: refused a connection from") {
		t.Errorf("rank 1 said %q", results[1].Output)
	}
}

// More members connect at once than may be in the middle of their proof: the others wait.
func TestHostsManyConnect(t *testing.T) {
	acrossHosts(t, []int{0, 0, 0, 0, 0, 0, 1}, func(ctx context.Context, job *bootstrap.Job) error {
		nccl.SetStrangeLimit(1)
		return with(ctx, job, nil, smallAllReduce)
	})
}

// smallAllReduce is one that works.
func smallAllReduce(w *world) error {
	b, done, err := openBuffers(w, 4096, false)
	defer done()
	if err != nil {
		return err
	}
	s := spec{op: nccl.OpAllReduce, count: 100}
	if err := outcome(w.ctx, w.stream, types[6].call(w, b, s, w.stream)); err != nil {
		return err
	}
	return types[6].verify(w, b, s)
}

// strangers speak to this process's listener in wrong ways.
func strangers(job *bootstrap.Job) error {
	addr, err := listening(job.HostAddr())
	if err != nil {
		return err
	}
	hello := append([]byte("gorundp1"), make([]byte, 32+16+8)...)
	for _, said := range [][]byte{nil, []byte("GET / HTTP/1.0\r\n\r\n"), hello, append(hello, make([]byte, 1<<10)...), bytes.Repeat([]byte{0xff}, 1<<16)} {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return err
		}
		conn.SetDeadline(time.Now().Add(room))
		conn.Write(said)
		conn.(*net.TCPConn).CloseWrite()
		var answer [200]byte
		n, err := conn.Read(answer[:])
		for err == nil {
			var k int
			k, err = conn.Read(answer[:])
			n += k
		}
		conn.Close()
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
			return fmt.Errorf("%d bytes were not refused", len(said))
		}
		if n > 0 {
			return fmt.Errorf("a stranger got %d bytes", n)
		}
	}
	return nil
}

// listening finds a TCP port on which this process listens.
func listening(host string) (string, error) {
	own := map[string]bool{}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return "", err
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil {
			if inode, ok := strings.CutPrefix(to, "socket:["); ok {
				own[strings.TrimSuffix(inode, "]")] = true
			}
		}
	}
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return "", err
	}
	for _, line := range strings.Split(string(table), "\n") {
		f := strings.Fields(line)
		if len(f) > 9 && f[3] == "0A" && own[f[9]] {
			_, port, _ := strings.Cut(f[1], ":")
			var n int
			fmt.Sscanf(port, "%x", &n)
			return net.JoinHostPort(host, fmt.Sprint(n)), nil
		}
	}
	return "", errors.New("this process listens on no port")
}
