package dataset

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// idx is the content of an IDX file: two zero bytes, the type of the elements, the number of dimensions, the
// dimensions as 32-bit big-endian numbers, then the elements, big-endian, the last dimension running fastest.
type idx struct {
	dims   []int
	bytes  []byte    // elements of type uint8
	values []float64 // all other types
}

// elements is the number of elements.
func (x *idx) elements() int { return len(x.bytes) + len(x.values) }

// value is an element.
func (x *idx) value(i int) float64 {
	if x.bytes != nil {
		return float64(x.bytes[i])
	}
	return x.values[i]
}

// idxTypes are the element types of the format.
var idxTypes = map[byte]struct {
	name string
	size int
	read func([]byte) float64
}{
	0x08: {"uint8", 1, func(b []byte) float64 { return float64(b[0]) }},
	0x09: {"int8", 1, func(b []byte) float64 { return float64(int8(b[0])) }},
	0x0B: {"int16", 2, func(b []byte) float64 { return float64(int16(binary.BigEndian.Uint16(b))) }},
	0x0C: {"int32", 4, func(b []byte) float64 { return float64(int32(binary.BigEndian.Uint32(b))) }},
	0x0D: {"float32", 4, func(b []byte) float64 { return float64(math.Float32frombits(binary.BigEndian.Uint32(b))) }},
	0x0E: {"float64", 8, func(b []byte) float64 { return math.Float64frombits(binary.BigEndian.Uint64(b)) }},
}

// readIDX reads a whole file. size is what the file holds in bytes, -1 where only reading tells (gzip). The size that the
// header claims is compared before memory is taken for it; where it cannot be, memory grows with what really comes.
func readIDX(r io.Reader, size int64) (*idx, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("IDX header: %w", short(err))
	}
	if head[0] != 0 || head[1] != 0 {
		return nil, fmt.Errorf("not an IDX file: it starts with % x", head[:2])
	}
	typ, ok := idxTypes[head[2]]
	if !ok {
		return nil, fmt.Errorf("IDX header: unknown element type 0x%02x", head[2])
	}
	if head[3] < 1 || head[3] > 4 {
		return nil, fmt.Errorf("IDX header: %d dimensions, want 1 to 4", head[3])
	}
	x := &idx{}
	count := uint64(1)
	for range head[3] {
		var d [4]byte
		if _, err := io.ReadFull(r, d[:]); err != nil {
			return nil, fmt.Errorf("IDX header: %w", short(err))
		}
		n := binary.BigEndian.Uint32(d[:])
		if n > math.MaxInt32 {
			return nil, fmt.Errorf("IDX header: a dimension of %d", n)
		}
		x.dims = append(x.dims, int(n))
		hi, lo := bits.Mul64(count, uint64(n))
		if hi != 0 || lo > math.MaxInt64/16 {
			return nil, fmt.Errorf("IDX header: %s elements are too many", x.shape())
		}
		count = lo
	}
	want := int64(count) * int64(typ.size)
	header := int64(4 + 4*len(x.dims))
	if size >= 0 && size != header+want {
		return nil, fmt.Errorf("%s elements of %s need %d bytes, the file has %d", x.shape(), typ.name, header+want, size)
	}
	data, err := io.ReadAll(io.LimitReader(r, want+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) < want {
		return nil, fmt.Errorf("%s elements of %s need %d bytes, the file ends after %d", x.shape(), typ.name, header+want, header+int64(len(data)))
	}
	if int64(len(data)) > want {
		return nil, fmt.Errorf("%s elements of %s need %d bytes, the file has more", x.shape(), typ.name, header+want)
	}
	if typ.name == "uint8" {
		x.bytes = data
		return x, nil
	}
	x.values = make([]float64, count)
	for i := range x.values {
		v := typ.read(data[i*typ.size:])
		if math.IsNaN(v) || math.Abs(v) > maxValue {
			return nil, fmt.Errorf("element %d: %v is out of range", i, v)
		}
		x.values[i] = v
	}
	return x, nil
}

// shape is "60000x28x28".
func (x *idx) shape() string {
	s := make([]string, len(x.dims))
	for i, d := range x.dims {
		s[i] = strconv.Itoa(d)
	}
	return strings.Join(s, "x")
}

func short(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || err == io.EOF {
		return errors.New("the file is too short")
	}
	return err
}

// readIDXPair makes a table of a file of samples (two dimensions or more, the first counts the samples) and one of labels.
func readIDXPair(images io.Reader, imagesName string, imagesSize int64, labels io.Reader, labelsName string, labelsSize int64) (*Set, error) {
	l, err := readIDX(labels, labelsSize)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", labelsName, err)
	}
	if len(l.dims) != 1 {
		return nil, fmt.Errorf("%s: labels have 1 dimension, the file has %s", labelsName, l.shape())
	}
	x, err := readIDX(images, imagesSize)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", imagesName, err)
	}
	if len(x.dims) < 2 {
		return nil, fmt.Errorf("%s: samples have 2 dimensions or more, the file has %s", imagesName, x.shape())
	}
	s := &Set{Name: imagesName, Label: labelsName, Rows: x.dims[0], pixels: x.bytes, values: x.values, uniform: true}
	if s.Rows == 0 {
		return nil, fmt.Errorf("%s: %w", imagesName, errNoRows)
	}
	if s.Features = x.elements() / s.Rows; s.Features == 0 {
		return nil, fmt.Errorf("%s: samples of %s elements are empty", imagesName, x.shape())
	}
	if l.elements() != s.Rows {
		return nil, fmt.Errorf("%s: %d labels, %s has %d samples", labelsName, l.elements(), imagesName, s.Rows)
	}
	s.Labels = make([]int32, s.Rows)
	classes := map[float64]int32{}
	var order []string
	for i := range s.Labels {
		v := l.value(i)
		k, ok := classes[v]
		if !ok {
			if v != math.Trunc(v) || math.Abs(v) > 1<<53 {
				return nil, fmt.Errorf("%s: label %d: %v is not a class: labels are whole numbers", labelsName, i, v)
			}
			if len(order) == MaxClasses {
				return nil, fmt.Errorf("%s: more than %d classes", labelsName, MaxClasses)
			}
			k = int32(len(order))
			classes[v] = k
			order = append(order, strconv.FormatInt(int64(v), 10))
		}
		s.Labels[i] = k
	}
	if err := s.sortClasses(order); err != nil {
		return nil, err
	}
	return s, nil
}
