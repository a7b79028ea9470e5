package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/nccl"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(ranktest.Patient{M: m}) }

// world is what most tests need on each rank.
type world struct {
	ctx    context.Context
	job    *bootstrap.Job
	dev    *cuda.Device
	comm   *nccl.Comm
	stream *cuda.Stream
}

// with opens a device, a communicator and a stream, runs f, and closes them; whatever f leaves open is an error.
func with(ctx context.Context, job *bootstrap.Job, cfg *nccl.Config, f func(w *world) error) (err error) {
	dev, err := cuda.Open("host")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	comm, err := nccl.InitConfig(ctx, job, dev, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, comm.Close()) }()
	stream, err := dev.NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	return f(&world{ctx, job, dev, comm, stream})
}

// room bounds what takes a moment, and takes longer on a machine that does much else: it is far less than what would bring an end otherwise, a deadline
// or the end of the test. Real devices, on a machine of their own, are held to deathBound and contradictionBound.
const room = 20 * time.Second

// wantErr is nil if err is the sentinel and its text has all parts.
func wantErr(err, sentinel error, parts ...string) error {
	if err == nil {
		return fmt.Errorf("no error, want %v", sentinel)
	}
	if sentinel != nil && !errors.Is(err, sentinel) {
		return fmt.Errorf("error %q, want %v", err, sentinel)
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			return fmt.Errorf("error %q, want %q in it", err, p)
		}
	}
	return nil
}

// counting is held while a rank counts: the counting of others opens descriptors.
var counting sync.Mutex

// mapCount counts the mappings of shared memory of this process.
func mapCount() int {
	counting.Lock()
	defer counting.Unlock()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return -1
	}
	return strings.Count(string(b), "memfd:")
}

// fdCount counts the open descriptors of this process.
func fdCount() int {
	counting.Lock()
	defer counting.Unlock()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(l)
}
