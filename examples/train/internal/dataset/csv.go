package dataset

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// ReadCSV reads a table of comma, semicolon or tab separated values; the first line tells which. name is the file's, for
// errors. Fields may be quoted; lines end with LF or CRLF, the last one with nothing; empty lines are skipped; a byte order
// mark is. Each field but the label must be a finite number. Labels are whole numbers or names.
func ReadCSV(r io.Reader, name string, o Options) (*Set, error) {
	in := bufio.NewReaderSize(r, 1<<16)
	comma, err := prepare(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	t := &table{name: name, options: o, csv: csv.NewReader(in), classes: map[string]int32{}}
	t.csv.Comma = comma
	t.csv.FieldsPerRecord = -1 // compared here, for errors that say both lines
	t.csv.ReuseRecord = true
	t.csv.TrimLeadingSpace = comma != '\t'
	first, err := t.read()
	if err == io.EOF {
		return nil, fmt.Errorf("%s: empty file", name)
	}
	if err != nil {
		return nil, err
	}
	header, err := t.columns(first)
	if err != nil {
		return nil, err
	}
	if !header {
		if err := t.add(first); err != nil {
			return nil, err
		}
	}
	for {
		rec, err := t.read()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if err := t.add(rec); err != nil {
			return nil, err
		}
	}
	return t.set()
}

// prepare skips a byte order mark and finds the separator: the most frequent candidate outside quotes in the first line.
func prepare(in *bufio.Reader) (comma rune, err error) {
	start, _ := in.Peek(in.Size())
	switch {
	case len(start) >= 2 && (string(start[:2]) == "\xff\xfe" || string(start[:2]) == "\xfe\xff"):
		return 0, errors.New("UTF-16 text: convert it to UTF-8")
	case strings.HasPrefix(string(start), "\xef\xbb\xbf"):
		in.Discard(3)
		start = start[3:]
	}
	count := map[byte]int{}
	quoted, seen := false, false
scan:
	for _, b := range start {
		switch b {
		case '"':
			quoted = !quoted
		case '\n', '\r':
			if !quoted && seen { // empty lines before the first do not count
				break scan
			}
			continue
		case ',', ';', '\t':
			if !quoted {
				count[b]++
			}
		}
		seen = true
	}
	comma = ','
	for _, c := range []byte{';', '\t'} {
		if count[c] > count[byte(comma)] {
			comma = rune(c)
		}
	}
	return comma, nil
}

// table is a CSV file that is being read.
type table struct {
	name    string
	options Options
	csv     *csv.Reader

	width   int      // fields in each line
	first   int      // line that the width is from
	names   []string // of all columns; nil without header
	label   int      // column
	use     []int    // columns of features
	labels  []int32
	classes map[string]int32 // in the order of appearance
	order   []string
	values  []float64
}

func (t *table) read() ([]string, error) {
	rec, err := t.csv.Read()
	var pe *csv.ParseError
	if errors.As(err, &pe) {
		if pe.StartLine != pe.Line { // a quote that was not closed
			return nil, fmt.Errorf("%s:%d:%d: %w (the record starts in line %d)", t.name, pe.Line, pe.Column, pe.Err, pe.StartLine)
		}
		return nil, fmt.Errorf("%s:%d:%d: %w", t.name, pe.Line, pe.Column, pe.Err)
	}
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("%s: %w", t.name, err)
	}
	return rec, err
}

// columns finds out from the first line what each column is, and whether that line is a header.
func (t *table) columns(rec []string) (header bool, err error) {
	t.width = len(rec)
	t.first, _ = t.csv.FieldPos(0)
	names := make([]string, len(rec))
	for i, f := range rec {
		names[i] = strings.Clone(strings.TrimSpace(f)) // rec is used again
	}
	label, byName := -1, false
	switch l := t.options.Label; l {
	case "first":
		label = 0
	case "", "last":
		label = len(rec) - 1
	default:
		byName = true
		label = slices.Index(names, l)
		if label >= 0 && slices.Contains(names[label+1:], l) {
			return false, fmt.Errorf("%s:%d: two columns are called %q", t.name, t.first, l)
		}
	}
	switch t.options.Header {
	case HeaderYes:
		header = true
	case HeaderAuto:
		header = byName && label >= 0 || !anyNumber(names, label)
	}
	if byName && !header {
		return false, fmt.Errorf("%s: no column %q: the file has no header", t.name, t.options.Label)
	}
	if header {
		for i, n := range names {
			if n == "" { // as in files with an index column
				names[i] = fmt.Sprintf("column %d", i+1)
			}
		}
		t.names = names
	}
	if label < 0 {
		return false, fmt.Errorf("%s:%d: no column %q; there are %s", t.name, t.first, t.options.Label, list(names))
	}
	t.label = label
	ignore := map[int]bool{label: true}
	for _, n := range t.options.Ignore {
		i := slices.Index(t.names, n)
		if i < 0 {
			return false, fmt.Errorf("%s: no column %q to ignore", t.name, n)
		}
		if i == label {
			return false, fmt.Errorf("%s: column %q is the label and cannot be ignored", t.name, n)
		}
		for ; i < len(t.names); i++ {
			if t.names[i] == n {
				ignore[i] = true
			}
		}
	}
	for i := range rec {
		if !ignore[i] {
			t.use = append(t.use, i)
		}
	}
	if len(t.use) == 0 {
		return false, fmt.Errorf("%s: no columns besides the label", t.name)
	}
	return header, nil
}

func anyNumber(fields []string, except int) bool {
	for i, f := range fields {
		if _, err := strconv.ParseFloat(f, 64); err == nil && i != except {
			return true
		}
	}
	return false
}

// list names columns for an error, not more than fit a line.
func list(names []string) string {
	const most = 8
	q := make([]string, 0, most)
	for _, n := range names[:min(len(names), most)] {
		q = append(q, fmt.Sprintf("%.40q", n))
	}
	if len(names) > most {
		q = append(q, fmt.Sprintf("and %d more", len(names)-most))
	}
	return strings.Join(q, ", ")
}

// column names a column for errors.
func (t *table) column(i int) string {
	if t.names == nil {
		return fmt.Sprintf("column %d", i+1)
	}
	return fmt.Sprintf("column %.40q", t.names[i])
}

// errAt is an error about one field.
func (t *table) errAt(i int, format string, args ...any) error {
	line, _ := t.csv.FieldPos(i)
	return fmt.Errorf("%s:%d: %s: %s", t.name, line, t.column(i), fmt.Sprintf(format, args...))
}

// add takes a row.
func (t *table) add(rec []string) error {
	if len(rec) != t.width {
		line, _ := t.csv.FieldPos(0)
		return fmt.Errorf("%s:%d: %d fields, line %d has %d", t.name, line, len(rec), t.first, t.width)
	}
	if len(t.labels) == math.MaxInt32 {
		return fmt.Errorf("%s: more than %d rows", t.name, math.MaxInt32)
	}
	for _, i := range t.use {
		f := strings.TrimSpace(rec[i])
		if f == "" {
			return t.errAt(i, "empty field")
		}
		v, err := strconv.ParseFloat(f, 64)
		switch {
		case errors.Is(err, strconv.ErrRange) || err == nil && math.Abs(v) > maxValue:
			return t.errAt(i, "%.40q is out of range", f)
		case err != nil && len(t.labels) == 0 && t.names == nil && t.options.Header == HeaderAuto:
			return t.errAt(i, "%.40q is not a number (the line was not taken for a header, since other fields are numbers)", f)
		case err != nil:
			return t.errAt(i, "%.40q is not a number", f)
		case math.IsNaN(v):
			return t.errAt(i, "%.40q is not a finite number", f)
		}
		t.values = append(t.values, v)
	}
	class, err := className(rec[t.label])
	if err != nil {
		return t.errAt(t.label, "%v", err)
	}
	k, ok := t.classes[class]
	if !ok {
		if len(t.order) == MaxClasses {
			return t.errAt(t.label, "more than %d classes: is this the label?", MaxClasses)
		}
		k = int32(len(t.order))
		class = strings.Clone(class)
		t.classes[class] = k
		t.order = append(t.order, class)
	}
	t.labels = append(t.labels, k)
	return nil
}

// className is the class that a label's text stands for: a whole number in any spelling ("3", "3.0", "03") or a name.
func className(f string) (string, error) {
	f = strings.TrimSpace(f)
	if f == "" {
		return "", errors.New("empty field")
	}
	v, err := strconv.ParseFloat(f, 64)
	if err != nil {
		return f, nil
	}
	if v != math.Trunc(v) || math.Abs(v) > 1<<53 || math.IsNaN(v) {
		return "", fmt.Errorf("%.40q is not a class: labels are whole numbers or names", f)
	}
	return strconv.FormatInt(int64(v), 10), nil
}

// set makes the table of what was read.
func (t *table) set() (*Set, error) {
	s := &Set{
		Name: t.name, Rows: len(t.labels), Features: len(t.use), Label: t.column(t.label), Labels: t.labels, values: t.values,
	}
	if s.Rows == 0 {
		return nil, fmt.Errorf("%s: %w after the header", t.name, errNoRows)
	}
	if t.names != nil {
		for _, i := range t.use {
			s.Columns = append(s.Columns, t.names[i])
		}
	}
	if err := s.sortClasses(t.order); err != nil {
		return nil, err
	}
	return s, nil
}

// sortClasses gives the classes an order that does not depend on that of the rows: so far the labels are indices into appeared.
func (s *Set) sortClasses(appeared []string) error {
	sorted := slices.Clone(appeared)
	if len(sorted) == 1 {
		return fmt.Errorf("%s: %s: all %d rows are of class %.40q: there is nothing to learn", s.Name, s.Label, s.Rows, sorted[0])
	}
	numbers := map[string]int64{}
	for _, c := range sorted {
		if n, err := strconv.ParseInt(c, 10, 64); err == nil {
			numbers[c] = n
		}
	}
	if len(numbers) == len(sorted) {
		slices.SortFunc(sorted, func(a, b string) int {
			if numbers[a] < numbers[b] {
				return -1
			}
			return 1
		})
	} else {
		slices.Sort(sorted)
	}
	index := map[string]int32{}
	for i, c := range sorted {
		index[c] = int32(i)
	}
	for i, l := range s.Labels {
		s.Labels[i] = index[appeared[l]]
	}
	s.Classes = sorted
	return nil
}
