package dataset

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// values are all features, row after row.
func values(s *Set) [][]float64 {
	rows := make([][]float64, s.Rows)
	for r := range rows {
		for c := range s.Features {
			rows[r] = append(rows[r], s.Value(r, c))
		}
	}
	return rows
}

// got is what a test compares of a Set.
type got struct {
	Columns []string
	Label   string
	Classes []string
	Labels  []int32
	Values  [][]float64
}

func gotOf(s *Set) got { return got{s.Columns, s.Label, s.Classes, s.Labels, values(s)} }

func TestReadCSV(t *testing.T) {
	plain := got{
		Columns: []string{"a", "b"}, Label: `column "y"`, Classes: []string{"no", "yes"}, Labels: []int32{1, 0, 1},
		Values: [][]float64{{1, 2}, {3, -4.5}, {0.5, 6e3}},
	}
	noHeader := plain
	noHeader.Columns, noHeader.Label = nil, "column 3"
	for _, tt := range []struct {
		name, in string
		o        Options
		want     got
	}{
		{"header", "a,b,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{}, plain},
		{"no newline at the end", "a,b,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes", Options{}, plain},
		{"CRLF", "a,b,y\r\n1,2,yes\r\n3,-4.5,no\r\n0.5,6e3,yes\r\n", Options{}, plain},
		{"byte order mark", "\xef\xbb\xbfa,b,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{Label: "y"}, plain},
		{"byte order mark, first column named", "\xef\xbb\xbfy,a,b\nyes,1,2\nno,3,-4.5\nyes,0.5,6e3\n", Options{Label: "y"}, plain},
		{"quoted fields", "\"a\",\"b\",\"y\"\n\"1\",2,\"yes\"\n3,\"-4.5\",no\n0.5,6e3,yes\n", Options{}, plain},
		{"empty lines", "\n\na,b,y\n1,2,yes\n\n3,-4.5,no\n0.5,6e3,yes\n\n", Options{}, plain},
		{"spaces", "a, b, y\n1, 2, yes\n 3 , -4.5 , no \n0.5,6e3,yes\n", Options{}, plain},
		{"semicolons", "a;b;y\n1;2;yes\n3;-4.5;no\n0.5;6e3;yes\n", Options{}, plain},
		{"tabs", "a\tb\ty\n1\t2\tyes\n3\t-4.5\tno\n0.5\t6e3\tyes\n", Options{}, plain},
		{"commas inside quotes do not count", "\"a,,,,\";b;y\n1;2;yes\n3;-4.5;no\n0.5;6e3;yes\n", Options{},
			got{[]string{"a,,,,", "b"}, plain.Label, plain.Classes, plain.Labels, plain.Values}},
		{"no header", "1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{}, noHeader},
		{"header said not to be", "1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{Header: HeaderNo}, noHeader},
		{"label first", "y,a,b\nyes,1,2\nno,3,-4.5\nyes,0.5,6e3\n", Options{Label: "first"}, plain},
		{"label named", "a,y,b\n1,yes,2\n3,no,-4.5\n0.5,yes,6e3\n", Options{Label: "y"}, plain},
		{"ignored columns", "id,a,b,note,y\nk1,1,2,,yes\nk2,3,-4.5,x,no\nk3,0.5,6e3,,yes\n", Options{Ignore: []string{"id", "note"}}, plain},
		{"numeric names with the header said", "2019,2020,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{Header: HeaderYes},
			got{[]string{"2019", "2020"}, plain.Label, plain.Classes, plain.Labels, plain.Values}},
		{"numeric names with the label named", "2019,2020,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{Label: "y"},
			got{[]string{"2019", "2020"}, plain.Label, plain.Classes, plain.Labels, plain.Values}},
		{"unnamed column", ",b,y\n1,2,yes\n3,-4.5,no\n0.5,6e3,yes\n", Options{},
			got{[]string{"column 1", "b"}, plain.Label, plain.Classes, plain.Labels, plain.Values}},
		{"numbers as classes in numerical order, one class for all spellings", "1,10\n2,9\n3,9.0\n4,-1\n5,1e1\n", Options{},
			got{nil, "column 2", []string{"-1", "9", "10"}, []int32{2, 1, 1, 0, 2}, [][]float64{{1}, {2}, {3}, {4}, {5}}}},
		{"numbers and names as classes", "1,10\n2,9\n3,b\n", Options{},
			got{nil, "column 2", []string{"10", "9", "b"}, []int32{0, 1, 2}, [][]float64{{1}, {2}, {3}}}},
		{"quoted class with comma, quote and newline", "1,\"a,\"\"b\"\"\nc\"\n2,d\n", Options{},
			got{nil, "column 2", []string{"a,\"b\"\nc", "d"}, []int32{0, 1}, [][]float64{{1}, {2}}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for how, r := range map[string]io.Reader{
				"whole":        strings.NewReader(tt.in),
				"byte by byte": iotest.OneByteReader(strings.NewReader(tt.in)),
			} {
				s, err := ReadCSV(r, "t.csv", tt.o)
				if err != nil {
					t.Fatalf("%s: %v", how, err)
				}
				if diff := cmp.Diff(gotOf(s), tt.want, cmpopts.EquateEmpty()); diff != "" {
					t.Errorf("%s: got -, want +\n%s", how, diff)
				}
			}
		})
	}
}

func TestReadCSVErrors(t *testing.T) {
	var many, long strings.Builder
	for i := range MaxClasses + 1 {
		fmt.Fprintf(&many, "1,c%d\n", i)
	}
	long.WriteString("a0")
	for i := range 20 {
		fmt.Fprintf(&long, ",a%d", i+1)
	}
	for _, tt := range []struct {
		name, in string
		o        Options
		want     string
	}{
		{"empty file", "", Options{}, "t.csv: empty file"},
		{"only empty lines", "\n\r\n\n", Options{}, "t.csv: empty file"},
		{"only a header", "a,b,y\n", Options{}, "t.csv: no rows after the header"},
		{"empty field", "a,b,y\n1,2,x\n3,,y\n", Options{}, `t.csv:3: column "b": empty field`},
		{"empty field of spaces", "a,b,y\n1,2,x\n\n3,  ,y\n", Options{}, `t.csv:4: column "b": empty field`},
		{"empty field, no header", "1,2,x\n3,,y\n", Options{}, "t.csv:2: column 2: empty field"},
		{"empty label", "a,b,y\n1,2,\n", Options{}, `t.csv:2: column "y": empty field`},
		{"not a number", "a,b,y\n1,2,x\n3,four,y\n", Options{}, `t.csv:3: column "b": "four" is not a number`},
		{"not a number, CRLF", "a,b,y\r\n1,2,x\r\n3,?,y\r\n", Options{}, `t.csv:3: column "b": "?" is not a number`},
		{"line after a quoted newline", "a,b,y\n1,2,\"x\nx\"\n3,four,y\n", Options{}, `t.csv:4: column "b": "four" is not a number`},
		{"long text is cut", "a,y\n" + strings.Repeat("z", 100) + ",y\n", Options{}, `t.csv:2: column "a": "` + strings.Repeat("z", 40) + `" is not a number`},
		{"first line half a header", "a,2,y\n1,2,x\n", Options{}, `t.csv:1: column 1: "a" is not a number (the line was not taken for a header, since other fields are numbers)`},
		{"header said not to be", "a,b,y\n1,2,x\n", Options{Header: HeaderNo}, `t.csv:1: column 1: "a" is not a number`},
		{"not finite", "1,x\nNaN,y\n", Options{}, `t.csv:2: column 1: "NaN" is not a finite number`},
		{"infinite", "1,x\n-inf,y\n", Options{}, `t.csv:2: column 1: "-inf" is out of range`},
		{"out of range", "1,x\n1e999,y\n", Options{}, `t.csv:2: column 1: "1e999" is out of range`},
		{"too large to square", "1,x\n1e101,y\n", Options{}, `t.csv:2: column 1: "1e101" is out of range`},
		{"too few fields", "a,b,y\n1,2,x\n3,y\n", Options{}, "t.csv:3: 2 fields, line 1 has 3"},
		{"too many fields", "\na,b,y\n1,2,x,\n", Options{}, "t.csv:3: 4 fields, line 2 has 3"},
		{"broken quotes", "a,b,y\n1,2\"2,x\n", Options{}, "t.csv:2:4: bare \" in non-quoted-field"},
		{"quote not closed", "a,b,y\n1,2,\"x\n", Options{}, "t.csv:2:8: extraneous or missing \" in quoted-field"},
		{"quote not closed for lines", "a,b,y\n1,\"2,x\n3,4,y\n5,6,x", Options{}, "t.csv:4:6: extraneous or missing \" in quoted-field (the record starts in line 2)"},
		{"label missing", "a,b,y\n1,2,x\n", Options{Label: "z"}, `t.csv:1: no column "z"; there are "a", "b", "y"`},
		{"label missing among many", long.String() + "\n", Options{Label: "z"}, `t.csv:1: no column "z"; there are "a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", and 13 more`},
		{"label named without header", "1,2,x\n", Options{Label: "y"}, `t.csv: no column "y": the file has no header`},
		{"label named, header said not to be", "a,y\n1,x\n", Options{Label: "y", Header: HeaderNo}, `t.csv: no column "y": the file has no header`},
		{"label twice", "y,a,y\n", Options{Label: "y"}, `t.csv:1: two columns are called "y"`},
		{"ignored column missing", "a,y\n1,x\n", Options{Ignore: []string{"b"}}, `t.csv: no column "b" to ignore`},
		{"ignored label", "a,y\n1,x\n", Options{Ignore: []string{"y"}}, `t.csv: column "y" is the label and cannot be ignored`},
		{"label only", "y\nx\nz\n", Options{}, "t.csv: no columns besides the label"},
		{"one class", "a,y\n1,x\n2,x\n", Options{}, `t.csv: column "y": all 2 rows are of class "x": there is nothing to learn`},
		{"fractional label", "a,y\n1,0\n2,0.5\n", Options{}, `t.csv:3: column "y": "0.5" is not a class: labels are whole numbers or names`},
		{"label not a number", "a,y\n1,0\n2,nan\n", Options{}, `t.csv:3: column "y": "nan" is not a class: labels are whole numbers or names`},
		{"too many classes", many.String(), Options{}, "t.csv:1001: column 2: more than 1000 classes: is this the label?"},
		{"UTF-16", "\xff\xfea\x00,\x00", Options{}, "t.csv: UTF-16 text: convert it to UTF-8"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, err := ReadCSV(strings.NewReader(tt.in), "t.csv", tt.o)
			if err == nil {
				t.Fatalf("no error, got %+v", gotOf(s))
			}
			if diff := cmp.Diff(err.Error(), tt.want); diff != "" {
				t.Errorf("got -, want +\n%s", diff)
			}
		})
	}
}

func TestReadCSVReadError(t *testing.T) {
	_, err := ReadCSV(io.MultiReader(strings.NewReader("a,y\n1,x\n"), iotest.ErrReader(io.ErrNoProgress)), "t.csv", Options{})
	if err == nil || !strings.Contains(err.Error(), io.ErrNoProgress.Error()) {
		t.Errorf("got %v, want the reader's error", err)
	}
}

// FuzzReadCSV wants either an error that names the file or a table that holds together.
func FuzzReadCSV(f *testing.F) {
	f.Add([]byte("a,b,y\n1,2,yes\n3,-4.5,no\n"), "", uint8(0))
	f.Add([]byte("\xef\xbb\xbf\"y\";b\r\nyes;1\r\n\"n\r\no\";2"), "y", uint8(1))
	f.Add([]byte("1\t2\t0\n3\t4\t1.0\n"), "first", uint8(2))
	f.Add([]byte(",,\n\"\",,"), "last", uint8(0))
	f.Fuzz(func(t *testing.T, in []byte, label string, header uint8) {
		s, err := ReadCSV(bytes.NewReader(in), "t.csv", Options{Label: label, Header: Header(header % 3)})
		if err != nil {
			if s != nil || !strings.HasPrefix(err.Error(), "t.csv:") {
				t.Fatalf("set %v with error %q", s, err)
			}
			return
		}
		check(t, s)
	})
}

// check fails the test if a table is not as its documentation says.
func check(t *testing.T, s *Set) {
	t.Helper()
	if s.Rows < 1 || s.Features < 1 || len(s.Labels) != s.Rows || len(s.values)+len(s.pixels) != s.Rows*s.Features {
		t.Fatalf("%d rows of %d features, %d labels, %d+%d values", s.Rows, s.Features, len(s.Labels), len(s.values), len(s.pixels))
	}
	if s.Columns != nil && len(s.Columns) != s.Features {
		t.Fatalf("%d names for %d features", len(s.Columns), s.Features)
	}
	used := map[int32]bool{}
	for _, l := range s.Labels {
		used[l] = true
		if l < 0 || int(l) >= len(s.Classes) {
			t.Fatalf("label %d of %d classes", l, len(s.Classes))
		}
	}
	if len(used) != len(s.Classes) || len(used) < 2 || len(used) > MaxClasses {
		t.Fatalf("%d classes, %d of them used", len(s.Classes), len(used))
	}
	train, held := s.Split(0.3, 1)
	if len(train) < 1 || len(train)+len(held) != s.Rows {
		t.Fatalf("split of %d rows: %d, %d", s.Rows, len(train), len(held))
	}
	sc := s.NewScaler(train)
	x := make([]float32, s.Features)
	for r := range s.Rows {
		sc.Row(x, int32(r))
		for c, v := range x {
			if v-v != 0 {
				t.Fatalf("row %d, feature %d: %v becomes %v", r, c, s.Value(r, c), v)
			}
		}
	}
}

func TestWriteCSV(t *testing.T) {
	for _, size := range []struct{ rows, features, classes int }{{2, 1, 2}, {101, 3, 12}, {1500, 16, 4}} {
		s, err := Synthetic(size.rows, size.features, size.classes, 7)
		if err != nil {
			t.Fatal(err)
		}
		check(t, s)
		var b bytes.Buffer
		if err := s.WriteCSV(&b); err != nil {
			t.Fatal(err)
		}
		again, err := ReadCSV(&b, "t.csv", Options{Label: "label"})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(gotOf(again), gotOf(s)); diff != "" {
			t.Errorf("%v: read again -, made +\n%s", size, diff)
		}
		if again.Digest() != s.Digest() {
			t.Errorf("%v: the file's digest is not that of the table it is from", size)
		}
		other, err := Synthetic(size.rows, size.features, size.classes, 8)
		if err != nil {
			t.Fatal(err)
		}
		if other.Digest() == s.Digest() {
			t.Errorf("%v: two seeds give the same table", size)
		}
	}
}

func TestSyntheticErrors(t *testing.T) {
	for _, size := range []struct{ rows, features, classes int }{{0, 1, 2}, {1, 1, 2}, {3, 1, 4}, {10, 0, 2}, {10, 1, 1}, {5000, 1, MaxClasses + 1}} {
		if s, err := Synthetic(size.rows, size.features, size.classes, 1); err == nil {
			t.Errorf("%v: no error, %d rows", size, s.Rows)
		}
	}
}

func BenchmarkReadCSV(b *testing.B) {
	s, err := Synthetic(10000, 16, 4, 1)
	if err != nil {
		b.Fatal(err)
	}
	var file bytes.Buffer
	if err := s.WriteCSV(&file); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(file.Len()))
	for b.Loop() {
		if _, err := ReadCSV(bytes.NewReader(file.Bytes()), "t.csv", Options{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(s.Rows)*float64(b.N)/b.Elapsed().Seconds(), "rows/s")
}
