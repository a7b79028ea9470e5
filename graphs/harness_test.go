package graphs_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(ranktest.Patient{M: m})
}

// elements is the length of a rank's buffers where nothing else is said.
const elements = 96

// rank is what a test's rank has: a device, a communicator, a stream and buffers. It is closed by close.
type rank struct {
	job    *bootstrap.Job
	dev    *cuda.Device
	comm   *nccl.Comm
	stream *cuda.Stream
	side   *cuda.Stream // nil until fork
	a, b   *cuda.Buffer[float32]
	others []*nccl.Comm

	culprit int           // of the test, where it has one
	got     string        // the error that a mistake gave
	took    time.Duration // until then
}

func newRank(ctx context.Context, job *bootstrap.Job) (*rank, error) {
	return newRankOn(ctx, job, "host", "world", elements)
}

func newRankOn(ctx context.Context, job *bootstrap.Job, token, name string, n int) (*rank, error) {
	r := &rank{job: job}
	var err error
	if r.dev, err = cuda.Open(token); err != nil {
		return nil, err
	}
	if r.a, err = nccl.Alloc[float32](r.dev, n); err != nil {
		return nil, err
	}
	if r.b, err = nccl.Alloc[float32](r.dev, n); err != nil {
		return nil, err
	}
	if r.comm, err = nccl.InitConfig(ctx, job, r.dev, &nccl.Config{Name: name}); err != nil {
		return nil, err
	}
	if r.stream, err = r.dev.NewStream(); err != nil {
		return nil, err
	}
	return r, nil
}

// put and get move values to and from the device, whatever its platform, and wait for it.
func put[T cuda.Element](ctx context.Context, s *cuda.Stream, to cuda.Slice[T], values []T) error {
	return errors.Join(cuda.CopyToDevice(to, values, s), s.Synchronize(ctx))
}

func get[T cuda.Element](ctx context.Context, s *cuda.Stream, from cuda.Slice[T]) ([]T, error) {
	values := make([]T, from.Len())
	return values, errors.Join(cuda.CopyToHost(values, from, s), s.Synchronize(ctx))
}

// fill and holds write and check a buffer's values.
func (r *rank) fill(ctx context.Context, to cuda.Slice[float32], at func(i int) float32) error {
	values := make([]float32, to.Len())
	for i := range values {
		values[i] = at(i)
	}
	return put(ctx, r.stream, to, values)
}

func (r *rank) holds(ctx context.Context, from cuda.Slice[float32], want func(i int) float32) error {
	values, err := get(ctx, r.stream, from)
	if err != nil {
		return err
	}
	for i, got := range values {
		if got != want(i) {
			return fmt.Errorf("element %d is %v, want %v", i, got, want(i))
		}
	}
	return nil
}

// another makes one more communicator of all ranks; close closes it.
func (r *rank) another(ctx context.Context, name string) (*nccl.Comm, error) {
	c, err := nccl.InitConfig(ctx, r.job, r.dev, &nccl.Config{Name: name})
	if err == nil {
		r.others = append(r.others, c)
	}
	return c, err
}

// close gives everything back; all of it must work.
func (r *rank) close() error {
	errs := []error{r.comm.Close(), r.stream.Close()}
	if r.side != nil {
		errs = append(errs, r.side.Close())
	}
	for _, c := range r.others {
		errs = append(errs, c.Close())
	}
	return errors.Join(append(errs, r.a.Free(), r.b.Free(), r.dev.Close())...)
}

// empty says what is still registered with a communicator.
func empty(c *nccl.Comm) error {
	if s := c.Stats(); s.Registrations+s.GraphHolds+s.PendingRelease+s.PeerMappings > 0 {
		return fmt.Errorf("communicator %s still has registrations: %+v", c.Name(), s)
	}
	return nil
}

// works runs a captured all-reduce on a communicator, checks its result and that nothing of it is left.
func (r *rank) works(ctx context.Context, c *nccl.Comm) error {
	if err := r.reduces(ctx, c); err != nil {
		return fmt.Errorf("afterwards: %w", err)
	}
	if err := c.Drain(ctx); err != nil {
		return err
	}
	return empty(c)
}

// reduces captures an all-reduce, replays it twice, checks its result and closes it. The sums are exact in float32.
func (r *rank) reduces(ctx context.Context, c *nccl.Comm) error {
	if err := r.fill(ctx, r.a.All(), func(i int) float32 { return float32(i%10_000 + c.Rank()) }); err != nil {
		return err
	}
	g, err := graphs.Capture(ctx, r.stream, func(s *cuda.Stream) error {
		return nccl.AllReduce(c, r.a.All(), r.b.All(), nccl.Sum, s)
	}, graphs.Comms(c))
	if err != nil {
		return err
	}
	for range 2 {
		if err := g.Launch(r.stream); err != nil {
			return err
		}
	}
	n := c.Size()
	if err := r.holds(ctx, r.b.All(), func(i int) float32 { return float32(n*(i%10_000) + n*(n-1)/2) }); err != nil {
		return err
	}
	return g.Close()
}

// memfds counts the mappings of shareable memory in this process, own and peers', without the ledgers, which are the job's.
func memfds(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), "memfd:") - strings.Count(string(b), "memfd:gorun-ledger")
}

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// large is the length of a buffer that takes a while. The race detector makes it longer.
func large() int {
	if raceEnabled || isFake() {
		return 1 << 18
	}
	return 4 << 20
}

// room bounds what takes a moment, and takes longer on a machine that does much else. Real devices, on a machine of their own, are held to less.
const room = 20 * time.Second

// eventually waits until f gives nil, a generous while.
func eventually(ctx context.Context, f func() error) error {
	deadline := time.Now().Add(room)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-time.After(time.Millisecond):
		}
	}
}
