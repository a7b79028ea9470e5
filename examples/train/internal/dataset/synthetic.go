package dataset

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strconv"
)

// Synthetic makes a table that can be learned but not by a linear rule: each class is two clusters of points. The same
// arguments give the same table. rows must be at least classes, classes at least 2, features at least 1.
func Synthetic(rows, features, classes int, seed uint64) (*Set, error) {
	if classes < 2 || classes > MaxClasses {
		return nil, fmt.Errorf("synthetic data: %d classes, want 2 to %d", classes, MaxClasses)
	}
	if rows < classes || rows > math.MaxInt32 {
		return nil, fmt.Errorf("synthetic data: %d rows, want at least one for each of %d classes", rows, classes)
	}
	if features < 1 || features > 1<<16 {
		return nil, fmt.Errorf("synthetic data: %d features, want 1 to %d", features, 1<<16)
	}
	const clusters = 2
	rng := rand.New(rand.NewPCG(seed, 0x5e7))
	centres := make([]float64, classes*clusters*features)
	for i := range centres {
		centres[i] = 1.2 * rng.NormFloat64()
	}
	s := &Set{
		Name: "synthetic data", Rows: rows, Features: features, Label: `column "label"`,
		Labels: make([]int32, rows), values: make([]float64, rows*features),
	}
	for c := range features {
		s.Columns = append(s.Columns, "x"+strconv.Itoa(c))
	}
	for k := range classes {
		s.Classes = append(s.Classes, strconv.Itoa(k))
	}
	for r := range rows {
		s.Labels[r] = int32(r % classes)
		centre := centres[(r%classes*clusters+rng.IntN(clusters))*features:]
		for c := range features {
			// Four digits, so that a file of them gives the same numbers.
			s.values[r*features+c] = math.Round(1e4*(centre[c]+rng.NormFloat64())) / 1e4
		}
	}
	return s, nil
}

// WriteCSV writes the table with a header and the label in the last column. Names must not need quotes.
func (s *Set) WriteCSV(w io.Writer) error {
	b := bufio.NewWriterSize(w, 1<<16)
	for c := range s.Features {
		b.WriteString(s.Columns[c])
		b.WriteByte(',')
	}
	b.WriteString("label\n")
	var num []byte
	for r := range s.Rows {
		for c := range s.Features {
			num = strconv.AppendFloat(num[:0], s.Value(r, c), 'f', -1, 64)
			b.Write(num)
			b.WriteByte(',')
		}
		b.WriteString(s.Classes[s.Labels[r]])
		b.WriteByte('\n')
	}
	return b.Flush()
}
