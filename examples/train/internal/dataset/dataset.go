// Package dataset reads the table that package train learns from: a CSV file, or a pair of IDX files (the format of
// MNIST), either compressed with gzip or not. A row is a list of numbers and the class that it belongs to.
package dataset

import (
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strings"
)

// MaxClasses bounds the number of classes: a label column with more distinct values is hardly one of classes.
const MaxClasses = 1000

// maxValue bounds the magnitude of a feature, so that sums of squares stay finite.
const maxValue = 1e100

// Options say how to read a file. The zero value is right for a CSV whose label is in the last column and for IDX
// files with MNIST's names.
type Options struct {
	// Label is the column with the class, CSV only: "first", "last" (or ""), or the name of a column.
	Label string
	// Header says whether the first line names the columns: HeaderAuto, HeaderYes or HeaderNo.
	Header Header
	// Ignore lists names of columns that are left out, CSV only.
	Ignore []string
	// Labels is the file with the labels, IDX only; "" takes the name of the images with "images" replaced by
	// "labels" and "idx3" by "idx1".
	Labels string
}

// Header says whether a CSV file starts with the names of its columns.
type Header uint8

const (
	HeaderAuto Header = iota // it does if no feature of the first line is a number, or if that line holds the label's name
	HeaderYes
	HeaderNo
)

// Set is a table in memory. It is not changed after it was read.
type Set struct {
	Name     string   // file name, for messages
	Rows     int      // at least 1
	Features int      // numbers in a row, at least 1
	Columns  []string // names of the features; nil where the file has none
	Label    string   // name of the label's column, for messages
	Classes  []string // at least 2, in numerical order if all are numbers, else in that of their bytes
	Labels   []int32  // class of each row: an index into Classes

	values  []float64 // row after row, of a CSV or an IDX file of wide elements
	pixels  []byte    // the same for IDX files of bytes
	uniform bool      // all features are on one scale (an image)
}

// Value is feature col of a row.
func (s *Set) Value(row, col int) float64 {
	if s.pixels != nil {
		return float64(s.pixels[row*s.Features+col])
	}
	return s.values[row*s.Features+col]
}

// Load reads the file at path. It looks at the content, not at the name, to tell gzip, IDX and CSV apart. Errors name
// the file, and the line where there is one.
func Load(path string, o Options) (*Set, error) {
	f, err := open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if !f.isIDX() {
		return ReadCSV(f, path, o)
	}
	labels := o.Labels
	if labels == "" {
		labels = labelsName(path)
		if labels == path {
			return nil, fmt.Errorf("%s: IDX file without labels: the name of the file with the labels is needed", path)
		}
	}
	l, err := open(labels)
	if err != nil {
		return nil, fmt.Errorf("labels of %s: %w", path, err)
	}
	defer l.Close()
	return readIDXPair(f, path, f.size, l, labels, l.size)
}

// labelsName guesses the labels' file from that of the images.
func labelsName(images string) string {
	dir, base := "", images
	if i := strings.LastIndexByte(images, '/'); i >= 0 {
		dir, base = images[:i+1], images[i+1:]
	}
	base = strings.Replace(base, "images", "labels", 1)
	for _, dims := range []string{"idx2", "idx3", "idx4"} {
		base = strings.Replace(base, dims, "idx1", 1)
	}
	return dir + base
}

// file is an open file, unzipped where it is zipped.
type file struct {
	*bufio.Reader
	f    *os.File
	size int64 // of the content in bytes, -1 if not known before it is read
}

func open(path string) (*file, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	in := &file{Reader: bufio.NewReaderSize(f, 1<<16), f: f, size: -1}
	st, err := f.Stat()
	if err == nil && st.IsDir() {
		err = fmt.Errorf("%s: is a directory", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	if st.Mode().IsRegular() {
		in.size = st.Size()
	}
	if magic, _ := in.Peek(2); string(magic) == "\x1f\x8b" {
		z, err := gzip.NewReader(in.Reader)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		in.Reader, in.size = bufio.NewReaderSize(z, 1<<16), -1
	}
	return in, nil
}

func (f *file) Close() error { return f.f.Close() }

// isIDX looks for the two zero bytes that start an IDX file: no text has them.
func (f *file) isIDX() bool {
	magic, _ := f.Peek(2)
	return string(magic) == "\x00\x00"
}

// Digest is a checksum of everything that training depends on, to find out whether two ranks have read the same table.
func (s *Set) Digest() [sha256.Size]byte {
	h := sha256.New()
	w := bufio.NewWriterSize(h, 1<<16) // writes to a hash do not fail
	fmt.Fprintf(w, "%d %d %t %q\n", s.Rows, s.Features, s.uniform, s.Classes)
	var b [8]byte
	for _, l := range s.Labels {
		binary.LittleEndian.PutUint32(b[:], uint32(l))
		w.Write(b[:4])
	}
	w.Write(s.pixels)
	for _, v := range s.values {
		binary.LittleEndian.PutUint64(b[:], math.Float64bits(v))
		w.Write(b[:])
	}
	w.Flush()
	return [sha256.Size]byte(h.Sum(nil))
}

// Split divides the rows at random, the same for the same seed: holdout (0 to 1) of them go to held. At least one
// row is left to train on.
func (s *Set) Split(holdout float64, seed uint64) (train, held []int32) {
	rows := make([]int32, s.Rows)
	for i := range rows {
		rows[i] = int32(i)
	}
	Shuffle(rows, seed, 0)
	n := min(int(math.Round(holdout*float64(s.Rows))), s.Rows-1)
	return rows[n:], rows[:n]
}

// Shuffle orders rows at random; the same seed and round give the same order.
func Shuffle(rows []int32, seed, round uint64) {
	rand.New(rand.NewPCG(seed, round)).Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
}

// Scaler brings features to mean 0 and standard deviation 1.
type Scaler struct {
	set      *Set
	mean     []float64
	inv      []float64 // 1/standard deviation; 0 for a constant feature, which becomes 0 in every row
	constant []int
}

// NewScaler takes mean and deviation of each feature from the given rows. The pixels of images share one of each: a
// pixel that is nearly always black must not be blown up.
func (s *Set) NewScaler(rows []int32) *Scaler {
	sc := &Scaler{set: s, mean: make([]float64, s.Features), inv: make([]float64, s.Features)}
	dev := make([]float64, s.Features)
	n := float64(len(rows))
	for _, r := range rows {
		for c := range sc.mean {
			sc.mean[c] += s.Value(int(r), c)
		}
	}
	for c := range sc.mean {
		sc.mean[c] /= n
	}
	if s.uniform {
		fill(sc.mean, average(sc.mean))
	}
	for _, r := range rows {
		for c, m := range sc.mean {
			d := s.Value(int(r), c) - m
			dev[c] += d * d
		}
	}
	if s.uniform {
		fill(dev, average(dev))
	}
	for c, v := range dev {
		// A constant column has a deviation of rounding errors only.
		if d := math.Sqrt(v / n); d > 1e-12*math.Abs(sc.mean[c]) && 1/d <= math.MaxFloat64 {
			sc.inv[c] = 1 / d
		} else {
			sc.constant = append(sc.constant, c)
		}
	}
	return sc
}

func average(v []float64) (mean float64) {
	for _, x := range v {
		mean += x / float64(len(v))
	}
	return mean
}

func fill(v []float64, x float64) {
	for i := range v {
		v[i] = x
	}
}

// Constant are the features that have one value in all rows that the scaler was made from.
func (sc *Scaler) Constant() []int { return sc.constant }

// Row writes the scaled features of a row to dst, which has at least that many elements.
func (sc *Scaler) Row(dst []float32, row int32) {
	s := sc.set
	at := int(row) * s.Features
	dst = dst[:s.Features]
	if s.pixels != nil {
		for c, v := range s.pixels[at : at+s.Features] {
			dst[c] = clamp((float64(v) - sc.mean[c]) * sc.inv[c])
		}
		return
	}
	for c, v := range s.values[at : at+s.Features] {
		dst[c] = clamp((v - sc.mean[c]) * sc.inv[c])
	}
}

// clamp keeps a held-out value that is far off the training rows from becoming infinite.
func clamp(v float64) float32 { return float32(max(-1e6, min(1e6, v))) }

var errNoRows = errors.New("no rows")
