package dataset

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// idxFile makes an IDX file.
func idxFile(typ byte, dims []uint32, data ...byte) []byte {
	b := []byte{0, 0, typ, byte(len(dims))}
	for _, d := range dims {
		b = binary.BigEndian.AppendUint32(b, d)
	}
	return append(b, data...)
}

func zip(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func write(t testing.TB, dir, name string, b []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var (
	twoImages = idxFile(0x08, []uint32{2, 2, 3}, 0, 1, 2, 3, 4, 255, 6, 7, 8, 9, 10, 11)
	twoLabels = idxFile(0x08, []uint32{2}, 7, 3)
)

func TestLoad(t *testing.T) {
	images := got{Classes: []string{"3", "7"}, Labels: []int32{1, 0}, Values: [][]float64{{0, 1, 2, 3, 4, 255}, {6, 7, 8, 9, 10, 11}}}
	csv := []byte("a,y\n1,x\n2,z\n")
	table := got{Columns: []string{"a"}, Label: `column "y"`, Classes: []string{"x", "z"}, Labels: []int32{0, 1}, Values: [][]float64{{1}, {2}}}
	for _, tt := range []struct {
		name  string
		files map[string][]byte
		load  string
		o     Options
		want  got
	}{
		{"csv", map[string][]byte{"t.csv": csv}, "t.csv", Options{}, table},
		{"csv under any name", map[string][]byte{"images.idx": csv}, "images.idx", Options{}, table},
		{"csv, gzip", map[string][]byte{"t.csv.gz": zip(t, csv)}, "t.csv.gz", Options{}, table},
		{"idx, names as MNIST's", map[string][]byte{"train-images-idx3-ubyte": twoImages, "train-labels-idx1-ubyte": twoLabels},
			"train-images-idx3-ubyte", Options{}, images},
		{"idx, gzip", map[string][]byte{"train-images-idx3-ubyte.gz": zip(t, twoImages), "train-labels-idx1-ubyte.gz": zip(t, twoLabels)},
			"train-images-idx3-ubyte.gz", Options{}, images},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, b := range tt.files {
				write(t, dir, name, b)
			}
			s, err := Load(filepath.Join(dir, tt.load), tt.o)
			if err != nil {
				t.Fatal(err)
			}
			check(t, s)
			if tt.want.Label == "" { // the labels' file
				tt.want.Label = s.Label
				if !strings.HasPrefix(filepath.Base(s.Label), "train-labels-idx1-ubyte") {
					t.Errorf("label: got %q, want the labels' file", s.Label)
				}
			}
			if diff := cmp.Diff(gotOf(s), tt.want); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
	t.Run("labels named", func(t *testing.T) {
		dir := t.TempDir()
		path, labels := write(t, dir, "x.idx", twoImages), write(t, dir, "y.idx", twoLabels)
		s, err := Load(path, Options{Labels: labels})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(values(s), images.Values); diff != "" {
			t.Errorf("got -, want +\n%s", diff)
		}
	})
}

func TestLoadErrors(t *testing.T) {
	for _, tt := range []struct {
		name  string
		files map[string][]byte
		load  string
		want  string // DIR/ is the folder
	}{
		{"no file", nil, "t.csv", "open DIR/t.csv: no such file or directory"},
		{"a folder", map[string][]byte{"d/t": nil}, "d", "DIR/d: is a directory"},
		{"no labels' file", map[string][]byte{"images.idx": twoImages}, "images.idx", "labels of DIR/images.idx: open DIR/labels.idx: no such file or directory"},
		{"labels not to be guessed", map[string][]byte{"x.idx": twoImages}, "x.idx", "DIR/x.idx: IDX file without labels: the name of the file with the labels is needed"},
		{"broken gzip", map[string][]byte{"t.csv.gz": []byte("\x1f\x8bnothing at all")}, "t.csv.gz", "DIR/t.csv.gz: gzip: invalid header"},
		{"gzip header cut short", map[string][]byte{"t.csv.gz": []byte("\x1f\x8b")}, "t.csv.gz", "DIR/t.csv.gz: unexpected EOF"},
		{"gzip cut short", map[string][]byte{"t.csv.gz": zip(t, []byte("a,y\n1,x\n2,z\n"))[:20]}, "t.csv.gz", "DIR/t.csv.gz: unexpected EOF"},
		{"images and labels differ", map[string][]byte{"images": twoImages, "labels": idxFile(8, []uint32{3}, 1, 2, 3)}, "images", "DIR/labels: 3 labels, DIR/images has 2 samples"},
		{"images cut short", map[string][]byte{"images": twoImages[:20], "labels": twoLabels}, "images", "DIR/images: 2x2x3 elements of uint8 need 28 bytes, the file has 20"},
		{"zipped images cut short", map[string][]byte{"images": zip(t, twoImages[:20]), "labels": twoLabels}, "images", "DIR/images: 2x2x3 elements of uint8 need 28 bytes, the file ends after 20"},
		{"labels of images", map[string][]byte{"images": twoImages, "labels": twoImages}, "images", "DIR/labels: labels have 1 dimension, the file has 2x2x3"},
		{"samples of one dimension", map[string][]byte{"images": twoLabels, "labels": twoLabels}, "images", "DIR/images: samples have 2 dimensions or more, the file has 2"},
		{"no samples", map[string][]byte{"images": idxFile(8, []uint32{0, 2}), "labels": idxFile(8, []uint32{0})}, "images", "DIR/images: no rows"},
		{"empty samples", map[string][]byte{"images": idxFile(8, []uint32{2, 0}), "labels": twoLabels}, "images", "DIR/images: samples of 2x0 elements are empty"},
		{"one class", map[string][]byte{"images": twoImages, "labels": idxFile(8, []uint32{2}, 3, 3)}, "images", `DIR/images: DIR/labels: all 2 rows are of class "3": there is nothing to learn`},
		{"fractional label", map[string][]byte{"images": twoImages, "labels": idxFile(0x0D, []uint32{2}, 0x3f, 0, 0, 0, 0x3f, 0x80, 0, 0)}, "images", "DIR/labels: label 0: 0.5 is not a class: labels are whole numbers"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, b := range tt.files {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
					t.Fatal(err)
				}
				write(t, dir, name, b)
			}
			_, err := Load(filepath.Join(dir, tt.load), Options{})
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(err.Error(), strings.ReplaceAll(tt.want, "DIR/", dir+"/")); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
}

func TestReadIDX(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		want []float64
	}{
		{"uint8", idxFile(0x08, []uint32{2}, 1, 255), []float64{1, 255}},
		{"int8", idxFile(0x09, []uint32{2}, 1, 255), []float64{1, -1}},
		{"int16", idxFile(0x0B, []uint32{2, 1}, 1, 0, 255, 254), []float64{256, -2}},
		{"int32", idxFile(0x0C, []uint32{1, 1, 1, 1}, 255, 255, 255, 254), []float64{-2}},
		{"float32", idxFile(0x0D, []uint32{1}, binary.BigEndian.AppendUint32(nil, math.Float32bits(-1.5))...), []float64{-1.5}},
		{"float64", idxFile(0x0E, []uint32{1}, binary.BigEndian.AppendUint64(nil, math.Float64bits(0.1))...), []float64{0.1}},
		{"nothing", idxFile(0x08, []uint32{0}), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, size := range []int64{-1, int64(len(tt.in))} {
				x, err := readIDX(bytes.NewReader(tt.in), size)
				if err != nil {
					t.Fatal(err)
				}
				var v []float64
				for i := range x.elements() {
					v = append(v, x.value(i))
				}
				if diff := cmp.Diff(v, tt.want); diff != "" {
					t.Errorf("got -, want +\n%s", diff)
				}
			}
		})
	}
}

func TestReadIDXErrors(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   []byte
		want string
	}{
		{"nothing", nil, "IDX header: the file is too short"},
		{"dimensions missing", []byte{0, 0, 8, 2, 0, 0, 0, 1}, "IDX header: the file is too short"},
		{"text", []byte("a,b,c"), "not an IDX file: it starts with 61 2c"},
		{"type", idxFile(0x0A, []uint32{1}, 0), "IDX header: unknown element type 0x0a"},
		{"no dimensions", idxFile(0x08, nil), "IDX header: 0 dimensions, want 1 to 4"},
		{"five dimensions", idxFile(0x08, []uint32{1, 1, 1, 1, 1}, 0), "IDX header: 5 dimensions, want 1 to 4"},
		{"a huge dimension", idxFile(0x08, []uint32{1 << 31}), "IDX header: a dimension of 2147483648"},
		{"overflow", idxFile(0x08, []uint32{1 << 30, 1 << 30, 1 << 30}), "IDX header: 1073741824x1073741824 elements are too many"},
		{"much claimed", idxFile(0x0E, []uint32{1 << 30, 1 << 10}), "1073741824x1024 elements of float64 need 8796093022220 bytes, the file ends after 12"},
		{"one byte too many", idxFile(0x08, []uint32{1}, 1, 2), "1 elements of uint8 need 9 bytes, the file has more"},
		{"not finite", idxFile(0x0D, []uint32{2}, 0, 0, 0, 0, 0x7f, 0xc0, 0, 0), "element 1: NaN is out of range"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := readIDX(bytes.NewReader(tt.in), -1)
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(err.Error(), tt.want); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
}

func FuzzReadIDX(f *testing.F) {
	f.Add(twoImages, twoLabels, true)
	f.Add(idxFile(0x0D, []uint32{1, 1}, 1, 2, 3, 4), idxFile(0x09, []uint32{1}, 1), false)
	f.Add(idxFile(0x0E, []uint32{1 << 30, 1 << 30}), idxFile(0x0B, []uint32{2}, 1, 2, 3, 4), false)
	f.Fuzz(func(t *testing.T, images, labels []byte, sized bool) {
		is, ls := int64(-1), int64(-1)
		if sized {
			is, ls = int64(len(images)), int64(len(labels))
		}
		s, err := readIDXPair(bytes.NewReader(images), "i", is, bytes.NewReader(labels), "l", ls)
		if err != nil {
			if s != nil {
				t.Fatalf("a set with error %v", err)
			}
			return
		}
		check(t, s)
	})
}

func TestSplit(t *testing.T) {
	s, err := Synthetic(101, 2, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		holdout float64
		held    int
	}{{0, 0}, {0.2, 20}, {0.5, 51}, {0.999, 100}} {
		train, held := s.Split(tt.holdout, 3)
		if len(held) != tt.held {
			t.Errorf("holdout %v: %d rows held out, want %d", tt.holdout, len(held), tt.held)
		}
		all := slices.Sorted(slices.Values(append(slices.Clone(train), held...)))
		for i, r := range all {
			if int(r) != i {
				t.Fatalf("holdout %v: row %d is missing or twice", tt.holdout, i)
			}
		}
		again, _ := s.Split(tt.holdout, 3)
		if diff := cmp.Diff(again, train); diff != "" {
			t.Errorf("holdout %v: not the same for the same seed\n%s", tt.holdout, diff)
		}
		if other, _ := s.Split(tt.holdout, 4); len(train) > 1 && slices.Equal(other, train) {
			t.Errorf("holdout %v: the same for another seed", tt.holdout)
		}
	}
}

func TestScaler(t *testing.T) {
	s, err := ReadCSV(strings.NewReader("a,constant,big,y\n1,0.1,1e99,p\n2,0.1,-1e99,q\n3,0.1,0,p\n9,7,9e99,p\n"), "t.csv", Options{})
	if err != nil {
		t.Fatal(err)
	}
	sc := s.NewScaler([]int32{0, 1, 2})
	if diff := cmp.Diff(sc.Constant(), []int{1}); diff != "" {
		t.Errorf("constant columns: got -, want +\n%s", diff)
	}
	k := float32(math.Sqrt(1.5))
	var rows [][]float32
	for r := range int32(4) {
		x := make([]float32, 3)
		sc.Row(x, r)
		rows = append(rows, x)
	}
	want := [][]float32{{-k, 0, k}, {0, 0, -k}, {k, 0, 0}, {7 * k, 0, 9 * k}}
	near := cmp.Comparer(func(a, b float32) bool { return math.Abs(float64(a-b)) <= 1e-6*math.Abs(float64(b)) })
	if diff := cmp.Diff(rows, want, near); diff != "" {
		t.Errorf("got -, want +\n%s", diff)
	}
}

func TestScalerOfImages(t *testing.T) {
	s, err := readIDXPair(bytes.NewReader(twoImages), "i", -1, bytes.NewReader(twoLabels), "l", -1)
	if err != nil {
		t.Fatal(err)
	}
	// All pixels share one mean and deviation, so that equal pixels stay equal.
	sc := s.NewScaler([]int32{0, 1})
	var sum, squares float64
	x := make([]float32, s.Features)
	for r := range int32(2) {
		sc.Row(x, r)
		for c, v := range x {
			sum += float64(v)
			squares += float64(v) * float64(v)
			if want := (s.Value(int(r), c) - sc.mean[0]) * sc.inv[0]; math.Abs(float64(v)-want) > 1e-6 {
				t.Errorf("row %d, pixel %d: got %v, want %v", r, c, v, want)
			}
		}
	}
	if math.Abs(sum) > 1e-5 || math.Abs(squares/12-1) > 1e-5 {
		t.Errorf("mean %v, variance %v, want 0 and 1", sum/12, squares/12)
	}
}
