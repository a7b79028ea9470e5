package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/examples/train/internal/dataset"
	"github.com/gorun-dev/gorun/graphs"
	"github.com/gorun-dev/gorun/nccl"
)

// config are the settings of a training; equal on all ranks.
type config struct {
	Epochs   int
	Batch    int // rows of the global batch, over all ranks
	Hidden   int
	Rate     float64 // learning rate
	Momentum float64
	Holdout  float64 // part of the rows that is not trained on
	Seed     uint64
}

// result is what a training came to; equal on all ranks.
type result struct {
	Losses   []float64 // mean over the rows of each epoch, at the weights of the moment
	HeldOut  int       // rows
	Accuracy float64   // on the held-out rows
	Steps    int
	Before   nccl.Stats // after the last step
	After    nccl.Stats // after the graph was closed
}

// train trains a network on the set: each rank takes its share of each batch, and the sums of the gradients go over the ranks in a captured graph.
// Collective. Rank 0 tells stdout.
func train(ctx context.Context, job *bootstrap.Job, set *dataset.Set, c config, stdout io.Writer) (*result, error) {
	if job.Rank() != 0 {
		stdout = io.Discard
	}
	if err := agree(ctx, job, set, c); err != nil {
		return nil, err
	}
	rows, held := set.Split(c.Holdout, c.Seed)
	scaler := set.NewScaler(rows)
	batch := min(c.Batch, len(rows))
	share := (batch + job.Size() - 1) / job.Size() // the largest one

	dev, err := cuda.Open(job.Device())
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	net, err := newNetwork(ctx, dev, set.Features, c.Hidden, len(set.Classes), share, float32(c.Rate), float32(c.Momentum), c.Seed)
	if err != nil {
		return nil, err
	}
	defer net.close()
	stream, err := dev.NewStream()
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	comm, err := nccl.Init(ctx, job, dev)
	if err != nil {
		return nil, err
	}
	defer comm.Close()
	feed, err := newFeeder(net, dev, set, scaler)
	if err != nil {
		return nil, err
	}
	defer feed.close()

	fmt.Fprintf(stdout, "data: %s: %d rows to train on, %d held out; %d features, %d classes\n", set.Name, len(rows), len(held), set.Features, len(set.Classes))
	if k := scaler.Constant(); len(k) > 0 {
		fmt.Fprintf(stdout, "data: %d features have one value in all rows and tell nothing\n", len(k))
	}
	fmt.Fprintf(stdout, "network: %d-%d-%d, %d parameters; batches of %d rows on %s (%v)\n",
		set.Features, c.Hidden, len(set.Classes), net.parameters(), batch, count(job.Size(), "rank"), dev)

	// The whole step is one graph. Its all-reduce registers net.sums on all ranks.
	graph, err := graphs.Capture(ctx, stream, func(s *cuda.Stream) error {
		if err := net.forward(s); err != nil {
			return err
		}
		if err := net.gradients(s); err != nil {
			return err
		}
		if err := nccl.AllReduce(comm, net.sums.All(), net.sums.All(), nccl.Sum, s); err != nil {
			return err
		}
		return net.step(s)
	}, graphs.Comms(comm), graphs.Name("training step"))
	if err != nil {
		return nil, err
	}
	defer graph.Close()

	res := &result{HeldOut: len(held)}
	var busy time.Duration
	for epoch := 1; epoch <= c.Epochs; epoch++ {
		start := time.Now()
		dataset.Shuffle(rows, c.Seed, uint64(epoch)) // the same order on all ranks
		if err := stream.Memset(net.epoch.All().Range(), 0); err != nil {
			return nil, err
		}
		for at := 0; at < len(rows); at += batch {
			global := rows[at:min(at+batch, len(rows))]
			if err := feed.put(ctx, stream, part(global, job.Rank(), job.Size()), len(global)); err != nil {
				return nil, err
			}
			if err := graph.Launch(stream); err != nil {
				return nil, err
			}
			res.Steps++
		}
		var sums [stats]float64
		if err := fetch(ctx, sums[:], net.epoch.All(), stream); err != nil {
			return nil, err
		}
		took := time.Since(start)
		busy += took
		loss := sums[0] / float64(len(rows))
		if math.IsNaN(loss) || math.IsInf(loss, 0) {
			return nil, program.Common(fmt.Errorf("epoch %d: the loss is %v: a learning rate below %v may help", epoch, loss, c.Rate))
		}
		res.Losses = append(res.Losses, loss)
		fmt.Fprintf(stdout, "epoch %*d of %d: loss %.9g, right %.2f %%, %.0f samples/s\n", len(fmt.Sprint(c.Epochs)), epoch, c.Epochs,
			loss, 100*sums[1]/float64(len(rows)), float64(len(rows))/took.Seconds())
	}
	res.Before = comm.Stats()

	if err := sameWeights(ctx, job, net, stream); err != nil {
		return nil, err
	}
	if len(held) > 0 {
		right, err := evaluate(ctx, comm, net, feed, stream, part(held, job.Rank(), job.Size()))
		if err != nil {
			return nil, err
		}
		res.Accuracy = right / float64(len(held))
		fmt.Fprintf(stdout, "held-out accuracy: %.2f %% of %d rows\n", 100*res.Accuracy, len(held))
	}
	fmt.Fprintf(stdout, "throughput: %.0f samples/s over %d steps on %s\n",
		float64(len(rows)*c.Epochs)/busy.Seconds(), res.Steps, count(job.Size(), "rank"))
	for _, call := range graph.Calls() {
		fmt.Fprintf(stdout, "captured: %s: mode %v: %s\n", call.Call, call.Mode, call.Reason)
	}
	if b := res.Before; b.BytesDirect+b.BytesStaged > 0 { // not one rank; libraries do not tell it of captured calls
		fmt.Fprintf(stdout, "moved: %s direct, %s staged\n", size(b.BytesDirect), size(b.BytesStaged))
	}

	if err := graph.Close(); err != nil {
		return nil, err
	}
	if err := comm.Drain(ctx); err != nil {
		return nil, err
	}
	res.After = comm.Stats()
	return res, released(stdout, res, net.sums.Memory().Size())
}

// released tells what was registered, and it is an error if the end of the graph has left any of it.
func released(stdout io.Writer, res *result, bytes uint64) error {
	a := res.After
	answer := "yes"
	if a.Registrations > 0 || a.PendingRelease > 0 || a.PeerMappings > 0 {
		answer = "no"
	}
	what := "nothing"
	if n := res.Before.Registrations; n > 0 {
		what = count(n, "buffer") + ", " + size(bytes)
	}
	fmt.Fprintf(stdout, "registered: %s; released: %s (%d live, %d pending)\n", what, answer, a.Registrations, a.PendingRelease)
	if answer == "no" {
		return fmt.Errorf("the closed graph left %d registrations, %d pending, %d mappings of peers' memory", a.Registrations, a.PendingRelease, a.PeerMappings)
	}
	return nil
}

// count is "1 rank", "4 ranks".
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// size writes bytes for people.
func size(bytes uint64) string {
	switch {
	case bytes < 1<<10:
		return fmt.Sprintf("%d B", bytes)
	case bytes < 1<<20:
		return fmt.Sprintf("%.0f KiB", float64(bytes)/(1<<10))
	case bytes < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30))
}

// part is the share of a rank; shares differ by one row at most, and some are empty when there are fewer rows than ranks.
func part(rows []int32, rank, size int) []int32 {
	return rows[len(rows)*rank/size : len(rows)*(rank+1)/size]
}

// agree makes sure that all ranks have read the same data and got the same settings: each reads the file itself.
func agree(ctx context.Context, job *bootstrap.Job, set *dataset.Set, c config) error {
	digest := set.Digest()
	settings := fmt.Appendf(nil, "%+v", c)
	all, err := job.AllGather(ctx, append(digest[:], settings...))
	if err != nil {
		return err
	}
	for r, theirs := range all {
		switch {
		case len(theirs) < len(digest) || string(theirs[:len(digest)]) != string(all[0][:len(digest)]):
			return program.Common(fmt.Errorf("ranks 0 and %d have read different data: is %s the same file everywhere?", r, set.Name))
		case string(theirs) != string(all[0]):
			return program.Common(fmt.Errorf("ranks 0 and %d have different settings: %s and %s", r, all[0][len(digest):], theirs[len(digest):]))
		}
	}
	return nil
}

// fetch copies to host memory and waits for it.
func fetch[T cuda.Element](ctx context.Context, dst []T, src cuda.Slice[T], s *cuda.Stream) error {
	if err := cuda.CopyToHost(dst, src, s); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// sameWeights compares the weights of all ranks, which saw the same sums and so must be equal to the last bit.
func sameWeights(ctx context.Context, job *bootstrap.Job, net *network, s *cuda.Stream) error {
	w := make([]float32, net.parameters())
	if err := fetch(ctx, w, net.weights.All(), s); err != nil {
		return err
	}
	h := sha256.New()
	if err := binary.Write(h, binary.LittleEndian, w); err != nil {
		return err
	}
	all, err := job.AllGather(ctx, h.Sum(nil))
	if err != nil {
		return err
	}
	for r, theirs := range all {
		if string(theirs) != string(all[0]) {
			return program.Common(fmt.Errorf("ranks 0 and %d have different weights after training", r))
		}
	}
	return nil
}

// evaluate counts the right answers for the rows of all ranks. Collective.
func evaluate(ctx context.Context, comm *nccl.Comm, net *network, feed *feeder, s *cuda.Stream, rows []int32) (right float64, err error) {
	var total [stats]float64
	for len(rows) > 0 {
		n := min(net.batch, len(rows))
		if err := feed.put(ctx, s, rows[:n], n); err != nil {
			return 0, err
		}
		if err := net.forward(s); err != nil {
			return 0, err
		}
		var sums [stats]float64
		if err := fetch(ctx, sums[:], net.sumStats(), s); err != nil {
			return 0, err
		}
		for i, v := range sums {
			total[i] += v
		}
		rows = rows[n:]
	}
	if err := cuda.CopyToDevice(net.sumStats(), total[:], s); err != nil {
		return 0, err
	}
	if err := nccl.AllReduce(comm, net.sumStats(), net.sumStats(), nccl.Sum, s); err != nil {
		return 0, err
	}
	err = fetch(ctx, total[:], net.sumStats(), s)
	return total[1], err
}

// feeder brings rows to the device. It fills one of two buffers while the device may still be copying from the other.
type feeder struct {
	net    *network
	set    *dataset.Set
	scaler *dataset.Scaler
	slots  [2]slot
	next   int
}

type slot struct {
	x      []float32
	labels []int32
	rows   [2]int32
	done   *cuda.Event // of the copies; nothing to wait for before the first use
	used   bool
}

func newFeeder(net *network, dev *cuda.Device, set *dataset.Set, scaler *dataset.Scaler) (*feeder, error) {
	f := &feeder{net: net, set: set, scaler: scaler}
	for i := range f.slots {
		done, err := dev.NewEvent()
		if err != nil {
			return nil, errors.Join(err, f.close())
		}
		f.slots[i] = slot{x: make([]float32, net.batch*(net.features+1)), labels: make([]int32, net.batch), done: done}
		for r := range net.batch {
			f.slots[i].x[r*(net.features+1)+net.features] = 1 // for the bias
		}
	}
	return f, nil
}

// put enqueues the copies of this rank's rows; global counts those of all ranks.
func (f *feeder) put(ctx context.Context, s *cuda.Stream, rows []int32, global int) error {
	b := &f.slots[f.next%len(f.slots)]
	f.next++
	if b.used {
		if err := b.done.Synchronize(ctx); err != nil {
			return err
		}
	}
	width := f.net.features + 1
	for i, r := range rows {
		f.scaler.Row(b.x[i*width:], r)
		b.labels[i] = f.set.Labels[r]
	}
	b.rows = [2]int32{int32(len(rows)), int32(global)}
	if err := cuda.CopyToDevice(f.net.rows.All(), b.rows[:], s); err != nil {
		return err
	}
	if err := cuda.CopyToDevice(f.net.x.Slice(0, len(rows)*width), b.x[:len(rows)*width], s); err != nil {
		return err
	}
	if err := cuda.CopyToDevice(f.net.labels.Slice(0, len(rows)), b.labels[:len(rows)], s); err != nil {
		return err
	}
	b.used = true
	return s.Record(b.done)
}

func (f *feeder) close() (err error) {
	for i := range f.slots {
		if e := f.slots[i].done; e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}
