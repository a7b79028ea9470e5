package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/bootstrap/ranktest"
	"github.com/gorun-dev/gorun/cuda"
	"github.com/gorun-dev/gorun/examples/internal/exampletest"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/examples/train/internal/dataset"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// onHost has a test's ranks run on the host platform, also on a machine with GPUs, of which it may have fewer than the test has ranks.
func onHost(t *testing.T) { t.Setenv("GORUN_DEVICE", "host") }

// trainOn trains on n ranks in this process and returns what rank 0 got and printed, after a look that all got the same.
func trainOn(t *testing.T, n int, set *dataset.Set, c config) (*result, string) {
	t.Helper()
	results := make([]*result, n)
	out := exampletest.InProcess(t, n, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) (err error) {
		results[job.Rank()], err = train(ctx, job, set, c, stdout)
		return err
	})
	if t.Failed() {
		t.FailNow()
	}
	for r, res := range results {
		if diff := cmp.Diff(res.Losses, results[0].Losses); diff != "" || res.Accuracy != results[0].Accuracy {
			t.Errorf("rank %d: accuracy %v, rank 0 has %v; losses: rank %d -, rank 0 +\n%s", r, res.Accuracy, results[0].Accuracy, r, diff)
		}
	}
	return results[0], out
}

func TestSameLossOnAnyNumberOfRanks(t *testing.T) {
	onHost(t)
	load := func(name string, o dataset.Options) func() (*dataset.Set, error) {
		return func() (*dataset.Set, error) { return dataset.Load(filepath.Join("testdata", name), o) }
	}
	for _, tt := range []struct {
		name     string
		load     func() (*dataset.Set, error)
		c        config
		rows     int
		accuracy float64 // at least
	}{
		{"synthetic", func() (*dataset.Set, error) { return dataset.Synthetic(2003, 12, 4, 9) },
			config{Epochs: 6, Batch: 64, Hidden: 32, Rate: 0.05, Momentum: 0.9, Holdout: 0.2, Seed: 1}, 2003, 0.8},
		{"flowers: no newline at the end", load("flowers.csv", dataset.Options{}),
			config{Epochs: 30, Batch: 16, Hidden: 8, Rate: 0.05, Momentum: 0.5, Holdout: 0.25, Seed: 2}, 151, 0.8},
		{"quoted: mark, CRLF, semicolons, label in the middle", load("quoted.csv", dataset.Options{Label: `grade "A-C"`, Ignore: []string{"id"}}),
			config{Epochs: 30, Batch: 10, Hidden: 5, Rate: 0.05, Momentum: 0, Holdout: 0.3, Seed: 3}, 67, 0.7},
		{"numbers: tabs, no header, label first", load("numbers.tsv", dataset.Options{Label: "first"}),
			config{Epochs: 20, Batch: 1000, Hidden: 16, Rate: 0.1, Momentum: 0.9, Holdout: 0, Seed: 4}, 83, 0},
		{"images", load("shapes-images.idx.gz", dataset.Options{}),
			config{Epochs: 20, Batch: 5, Hidden: 32, Rate: 0.02, Momentum: 0.9, Holdout: 0.2, Seed: 5}, 90, 0.7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if testing.Short() && (tt.name == "synthetic" || tt.name == "images") {
				t.Skip("-short: the others take a fraction of its time")
			}
			set, err := tt.load()
			if err != nil {
				t.Fatal(err)
			}
			if set.Rows != tt.rows {
				t.Fatalf("%d rows, want %d", set.Rows, tt.rows)
			}
			var one *result
			for _, n := range []int{1, 2, 4, 7} {
				res, out := trainOn(t, n, set, tt.c)
				if len(res.Losses) != tt.c.Epochs {
					t.Fatalf("%d ranks: %d epochs, want %d", n, len(res.Losses), tt.c.Epochs)
				}
				if res.Before.BytesStaged != 0 {
					t.Errorf("%d ranks: %d bytes staged, want none", n, res.Before.BytesStaged)
				}
				if res.Before.Registrations != 1 || res.Before.GraphHolds != 1 {
					t.Errorf("%d ranks: %d registrations, %d of graphs, want 1 and 1", n, res.Before.Registrations, res.Before.GraphHolds)
				}
				if a := res.After; a.Registrations+a.GraphHolds+a.PendingRelease+a.PeerMappings != 0 {
					t.Errorf("%d ranks: after the graph was closed: %+v", n, a)
				}
				exampletest.Contains(t, out, "released: yes (0 live, 0 pending)\n")
				if one == nil {
					one = res
					first, last := res.Losses[0], res.Losses[tt.c.Epochs-1]
					if !(last < 0.7*first) {
						t.Errorf("the loss went from %v to %v only", first, last)
					}
					if !(res.Accuracy >= tt.accuracy) || res.HeldOut != int(math.Round(tt.c.Holdout*float64(tt.rows))) {
						t.Errorf("accuracy %v on %d rows, want at least %v", res.Accuracy, res.HeldOut, tt.accuracy)
					}
					continue
				}
				for e, l := range res.Losses {
					if math.Abs(l-one.Losses[e]) > 1e-5*one.Losses[e] {
						t.Errorf("%d ranks, epoch %d: loss %v, one rank has %v", n, e+1, l, one.Losses[e])
					}
				}
				if res.Steps != one.Steps || res.HeldOut != one.HeldOut {
					t.Errorf("%d ranks: %d steps, %d rows held out, one rank has %d, %d", n, res.Steps, res.HeldOut, one.Steps, one.HeldOut)
				}
				if slack := 1.01 / float64(max(1, one.HeldOut)); math.Abs(res.Accuracy-one.Accuracy) > slack {
					t.Errorf("%d ranks: accuracy %v, one rank has %v", n, res.Accuracy, one.Accuracy)
				}
			}
		})
	}
}

// TestProcesses trains with each rank in a process of its own.
func TestProcesses(t *testing.T) {
	onHost(t)
	exampletest.Processes(t, 3, func(ctx context.Context, job *bootstrap.Job, stdout io.Writer) error {
		set, err := dataset.Synthetic(500, 6, 3, 1)
		if err != nil {
			return err
		}
		c := config{Epochs: 3, Batch: 50, Hidden: 8, Rate: 0.05, Momentum: 0.9, Holdout: 0.2, Seed: 1}
		res, err := train(ctx, job, set, c, stdout)
		if err == nil && res.Before.BytesStaged != 0 {
			err = fmt.Errorf("%d bytes staged", res.Before.BytesStaged)
		}
		return err
	})
}

// TestDisagreement wants an error on all ranks when one has other data or other settings.
func TestDisagreement(t *testing.T) {
	onHost(t)
	for _, tt := range []struct {
		name   string
		seed   uint64 // of rank 1's data
		hidden int    // of rank 1
		want   string
	}{
		{"data", 2, 8, "ranks 0 and 1 have read different data: is synthetic data the same file everywhere?"},
		{"settings", 1, 9, "ranks 0 and 1 have different settings: {Epochs:1 Batch:10 Hidden:8 Rate:0.1 Momentum:0 Holdout:0 Seed:1} and {Epochs:1 Batch:10 Hidden:9 "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
				seed, hidden := uint64(1), 8
				if job.Rank() == 1 {
					seed, hidden = tt.seed, tt.hidden
				}
				set, err := dataset.Synthetic(20, 2, 2, seed)
				if err != nil {
					return err
				}
				_, err = train(ctx, job, set, config{Epochs: 1, Batch: 10, Hidden: hidden, Rate: 0.1, Seed: 1}, io.Discard)
				if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
					return fmt.Errorf("got error %v, want %q", err, tt.want)
				}
				return nil
			})
		})
	}
}

// TestSameWeights has one rank start from other weights.
func TestSameWeights(t *testing.T) {
	onHost(t)
	for _, odd := range []int{-1, 2} {
		ranktest.Run(t, 3, func(ctx context.Context, job *bootstrap.Job) error {
			dev, err := cuda.Open(job.Device())
			if err != nil {
				return err
			}
			defer dev.Close()
			seed := uint64(1)
			if job.Rank() == odd {
				seed = 2
			}
			n, err := newNetwork(ctx, dev, 3, 4, 2, 1, 0.1, 0, seed)
			if err != nil {
				return err
			}
			defer n.close()
			s, err := dev.NewStream()
			if err != nil {
				return err
			}
			defer s.Close()
			want := ""
			if odd >= 0 {
				want = fmt.Sprintf("ranks 0 and %d have different weights after training", odd)
			}
			if err := sameWeights(ctx, job, n, s); fmt.Sprint(err) != want && !(err == nil && want == "") {
				return fmt.Errorf("got error %v, want %q", err, want)
			}
			return nil
		})
	}
}

// TestDivergence wants an error, not a table of NaNs.
func TestDivergence(t *testing.T) {
	onHost(t)
	set, err := dataset.Synthetic(200, 4, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		_, err := train(ctx, job, set, config{Epochs: 50, Batch: 10, Hidden: 8, Rate: 1e30, Momentum: 0.9, Seed: 1}, io.Discard)
		if err == nil || !strings.Contains(err.Error(), "the loss is NaN: a learning rate below 1e+30 may help") {
			return fmt.Errorf("got error %v", err)
		}
		return nil
	})
}

// TestCancel ends the context in the middle of the training.
func TestCancel(t *testing.T) {
	onHost(t)
	set, err := dataset.Synthetic(200, 4, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	ranktest.Run(t, 2, func(ctx context.Context, job *bootstrap.Job) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		third := &after{text: "epoch     3 ", do: cancel}
		if job.Rank() == 1 {
			third.do = func() {}
		}
		_, err := train(ctx, job, set, config{Epochs: 10000, Batch: 10, Hidden: 8, Rate: 0.01, Seed: 1}, third)
		if job.Rank() == 0 && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("got error %v, want %v", err, context.Canceled)
		}
		if job.Rank() == 1 && (err == nil || !strings.Contains(err.Error(), "rank 0")) {
			return fmt.Errorf("got error %v, want one that names rank 0", err)
		}
		return nil
	})
}

// after calls do once when text is written.
type after struct {
	text string
	once sync.Once
	do   func()
}

func (a *after) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(a.text)) {
		a.once.Do(a.do)
	}
	return len(p), nil
}

// TestRun is the program itself, as a job of one: without launcher.
func TestRun(t *testing.T) {
	onHost(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "made.csv")
	var out bytes.Buffer
	if err := run(t.Context(), []string{"-write", file, "-rows", "301", "-features", "5", "-classes", "3"}, &out); err != nil {
		t.Fatal(err)
	}
	if got, want := out.String(), fmt.Sprintf("wrote %s: 301 rows, 5 features, 3 classes\n", file); got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
	if left, _ := filepath.Glob(file + ".*"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	if err := run(t.Context(), []string{"-write", os.DevNull, "-rows", "10"}, io.Discard); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(os.DevNull); err != nil || st.Mode().IsRegular() {
		t.Fatalf("%s was replaced: %v, %v", os.DevNull, st, err)
	}
	if err := run(t.Context(), []string{"-write", filepath.Join(dir, "no", "such", "folder")}, io.Discard); err == nil {
		t.Error("no error for a folder that is not there")
	}
	out.Reset()
	if err := run(t.Context(), []string{"-data", file, "-epochs", "3", "-label", "label"}, &out); err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`(?s)^data: .*made\.csv: 241 rows to train on, 60 held out; 5 features, 3 classes\n` +
		`network: 5-64-3, 579 parameters; batches of 241 rows on 1 rank \(.*host.*\)\n` +
		`epoch 1 of 3: loss [0-9.]+, right [0-9.]+ %, \d+ samples/s\n.*` +
		`epoch 3 of 3: loss [0-9.]+, right [0-9.]+ %, \d+ samples/s\n` +
		`held-out accuracy: [0-9.]+ % of 60 rows\n` +
		`throughput: \d+ samples/s over 3 steps on 1 rank\n.*` +
		`registered: .*; released: yes \(0 live, 0 pending\)\n$`)
	if !want.Match(out.Bytes()) {
		t.Errorf("printed\n%s", out.Bytes())
	}
}

func TestRunErrors(t *testing.T) {
	onHost(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "bad.csv")
	if err := os.WriteFile(file, []byte("a,b,label\n1,2,x\n3,,y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args  []string
		want  string
		usage bool
	}{
		{[]string{"-data", file}, file + `:3: column "b": empty field`, false},
		{[]string{"-data", file, "-label", "c"}, file + `:1: no column "c"; there are "a", "b", "label"`, false},
		{[]string{"-data", file, "-ignore", "b,c"}, file + `: no column "c" to ignore`, false},
		{[]string{"-data", file, "-header", "no"}, file + `:1: column 1: "a" is not a number`, false},
		{[]string{"-data", filepath.Join(dir, "none")}, "open " + filepath.Join(dir, "none") + ": no such file or directory", false},
		{[]string{"-synthetic", "1"}, "synthetic data: 1 rows, want at least one for each of 4 classes", false},
		{nil, "usage: one of -data FILE, -synthetic ROWS and -write FILE is needed (-h shows the flags)", true},
		{[]string{"-data", file, "-synthetic", "10"}, "usage: one of -data FILE, -synthetic ROWS and -write FILE is needed (-h shows the flags)", true},
		{[]string{"-data", file, "-header", "maybe"}, `usage: -header "maybe": want auto, yes or no`, true},
		{[]string{"-data", file, "-batch", "0"}, "usage: -batch 0: want at least 1 and less than 2.147483647e+09", true},
		{[]string{"-data", file, "-lr", "NaN"}, "usage: -lr NaN: want more than 0", true},
		{[]string{"-data", file, "-holdout", "1"}, "usage: -holdout 1: want at least 0 and less than 1", true},
		{[]string{file}, fmt.Sprintf("usage: unexpected argument %q (-h shows the flags)", file), true},
	} {
		err := run(t.Context(), tt.args, io.Discard)
		if err == nil || err.Error() != tt.want || errors.Is(err, program.ErrUsage) != tt.usage {
			t.Errorf("%q: got error %v, want %s", tt.args, err, tt.want)
		}
	}
}

func TestReleasedOfNothing(t *testing.T) {
	var out bytes.Buffer
	if err := released(&out, &result{}, 11<<10); err != nil {
		t.Fatal(err)
	}
	if got, want := out.String(), "registered: nothing; released: yes (0 live, 0 pending)\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
