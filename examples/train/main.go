// Train is data-parallel stochastic gradient descent on any number of ranks: a small neural network learns the classes
// of a CSV or IDX file. It is the whole runtime at work: the gradients are all-reduced in a captured graph, whose
// buffer registers itself and is let go with the graph.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"github.com/gorun-dev/gorun/bootstrap"
	"github.com/gorun-dev/gorun/examples/internal/program"
	"github.com/gorun-dev/gorun/examples/train/internal/dataset"
	"github.com/gorun-dev/gorun/rankenv"
)

const about = `train: data-parallel training of a small neural network (one hidden layer, ReLU, softmax).

  gorun -np 4 ./examples/train -data FILE          learn from a file
  gorun -np 4 ./examples/train -synthetic 20000    learn from made-up rows
  go run ./examples/train -write FILE              write such rows to a CSV file

FILE is a CSV (comma, semicolon or tab; quotes; with or without a header, which is detected) or an IDX file as MNIST's, whose
labels are in a second file; either may be compressed by gzip. All columns but the label are numbers and are brought to
mean 0 and deviation 1; -ignore leaves columns out. The label is a class: whole numbers or names, at most 1000 of
them; there is no regression.

Each rank reads the file itself and takes its share of each batch. -batch counts the rows of all ranks, so that the losses are
the same (to 1e-5) whatever the number of ranks; GPUs and the host platform differ by their roundings.`

func main() { program.Main("train", run) }

// flags are the command line.
type flags struct {
	config
	data      string
	options   dataset.Options
	synthetic int
	write     string
	rows      int
	features  int
	classes   int
}

func parse(args []string, stdout io.Writer) (*flags, error) {
	var f flags
	fs := flag.NewFlagSet("train", flag.ContinueOnError)
	fs.StringVar(&f.data, "data", "", "`file` to learn from: CSV or IDX, may be gzipped")
	fs.StringVar(&f.options.Label, "label", "last", "`column` of a CSV with the class: first, last, or its name")
	fs.StringVar(&f.options.Labels, "labels", "", "`file` with the labels of an IDX file (default: the name with \"images\" replaced by \"labels\")")
	header := fs.String("header", "auto", "whether the first line of a CSV names the columns: auto, yes or no")
	ignore := fs.String("ignore", "", "`columns` of a CSV to leave out, by name, separated by commas")
	fs.IntVar(&f.synthetic, "synthetic", 0, "learn from this many made-up `rows` instead of a file")
	fs.StringVar(&f.write, "write", "", "write made-up rows to this CSV `file`, and do nothing else")
	fs.IntVar(&f.rows, "rows", 20000, "made-up rows for -write")
	fs.IntVar(&f.features, "features", 16, "columns of made-up rows")
	fs.IntVar(&f.classes, "classes", 4, "classes of made-up rows")
	fs.IntVar(&f.Epochs, "epochs", 10, "how often each row is used")
	fs.IntVar(&f.Batch, "batch", 256, "`rows` of a batch, over all ranks")
	fs.IntVar(&f.Hidden, "hidden", 64, "`units` of the hidden layer")
	fs.Float64Var(&f.Rate, "lr", 0.05, "learning `rate`")
	fs.Float64Var(&f.Momentum, "momentum", 0.9, "momentum, 0 for none")
	fs.Float64Var(&f.Holdout, "holdout", 0.2, "`part` of the rows that is kept for the accuracy at the end")
	fs.Uint64Var(&f.Seed, "seed", 1, "seed of all that is random: rows, weights, order")
	if err := program.Parse(fs, about, args, stdout); err != nil {
		return nil, err
	}
	switch *header {
	case "auto":
	case "yes":
		f.options.Header = dataset.HeaderYes
	case "no":
		f.options.Header = dataset.HeaderNo
	default:
		return nil, program.Usagef("-header %q: want auto, yes or no", *header)
	}
	if *ignore != "" {
		f.options.Ignore = strings.Split(*ignore, ",")
	}
	given := 0
	for _, is := range []bool{f.data != "", f.synthetic != 0, f.write != ""} {
		if is {
			given++
		}
	}
	limit := func(name string, v, lo, hi float64) error {
		if v >= lo && v < hi {
			return nil
		}
		return program.Usagef("-%s %v: want at least %v and less than %v", name, v, lo, hi)
	}
	if !(f.Rate > 0 && f.Rate <= math.MaxFloat32) {
		return nil, program.Usagef("-lr %v: want more than 0", f.Rate)
	}
	if given != 1 {
		return nil, program.Usagef("one of -data FILE, -synthetic ROWS and -write FILE is needed (-h shows the flags)")
	}
	for _, err := range []error{
		limit("epochs", float64(f.Epochs), 1, math.MaxInt32),
		limit("batch", float64(f.Batch), 1, math.MaxInt32),
		limit("hidden", float64(f.Hidden), 1, 1<<20),
		limit("momentum", f.Momentum, 0, 1),
		limit("holdout", f.Holdout, 0, 1),
	} {
		if err != nil {
			return nil, err
		}
	}
	return &f, nil
}

// load reads or makes the data.
func (f *flags) load() (*dataset.Set, error) {
	if f.synthetic != 0 {
		return dataset.Synthetic(f.synthetic, f.features, f.classes, f.Seed)
	}
	return dataset.Load(f.data, f.options)
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	f, err := parse(args, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return err
	}
	if err == nil && f.write != "" {
		env, err := rankenv.Current()
		if err != nil || env.Rank != 0 { // one file needs one rank
			return err
		}
		return writeFile(f, stdout)
	}
	job, e := bootstrap.Join(ctx)
	if e != nil {
		return errors.Join(err, e)
	}
	defer job.Close()
	return program.Tell(ctx, job, f.learn(ctx, job, err, stdout))
}

// learn is what the ranks do together; err is what is wrong with this rank's command line.
func (f *flags) learn(ctx context.Context, job *bootstrap.Job, err error, stdout io.Writer) error {
	var set *dataset.Set
	if err == nil {
		set, err = f.load()
	}
	if err := program.Agree(ctx, job, err); err != nil {
		return err
	}
	_, err = train(ctx, job, set, f.config, stdout)
	return err
}

// writeFile makes rows and writes them. A file that is there is replaced only when the new one is complete.
func writeFile(f *flags, stdout io.Writer) error {
	set, err := dataset.Synthetic(f.rows, f.features, f.classes, f.Seed)
	if err != nil {
		return err
	}
	path := f.write
	st, err := os.Stat(path)
	device := err == nil && !st.Mode().IsRegular() // a pipe, /dev/null: written to, not replaced
	if !device {
		path = fmt.Sprintf("%s.%d", f.write, os.Getpid())
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	err = set.WriteCSV(file)
	if e := file.Close(); err == nil {
		err = e
	}
	if !device {
		if err == nil {
			err = os.Rename(path, f.write)
		}
		if err != nil {
			os.Remove(path)
		}
	}
	if err == nil {
		fmt.Fprintf(stdout, "wrote %s: %d rows, %d features, %d classes\n", f.write, set.Rows, set.Features, len(set.Classes))
	}
	return err
}
