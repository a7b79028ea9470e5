package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// perfTable is what a program of nccl-tests (all_reduce_perf and its like) printed.
type perfTable struct {
	tests   string               // version of nccl-tests, "" where it is not told
	library string               // NCCL's version, "2.28.3"; "" where it is not told
	us      map[uint64][]float64 // out of place, by size in bytes; more than one where it ran more than one cycle
}

var (
	perfTests   = regexp.MustCompile(`^#\s*nccl-tests version (\S+)`)
	perfLibrary = regexp.MustCompile(`nccl-library=(\d+)`)
	perfTag     = regexp.MustCompile(`^\[\d+,\d+\](<\w+>)?:\s?`) // that mpirun --tag-output puts before a line
)

// maxPerfLine is the longest line that a table has, in bytes.
const maxPerfLine = 1 << 20

// parsePerf reads the text that a program of nccl-tests prints. Lines that are neither comments nor rows are other output, for instance of the library;
// a row that does not hold a time is an error.
func parsePerf(r io.Reader) (*perfTable, error) {
	t := &perfTable{us: map[uint64][]float64{}}
	timeColumn := 5 // size, count, type, redop, root, time
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxPerfLine)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimSpace(perfTag.ReplaceAllString(lines.Text(), ""))
		if strings.HasPrefix(text, "#") {
			if m := perfTests.FindStringSubmatch(text); m != nil {
				t.tests = m[1]
			}
			if m := perfLibrary.FindStringSubmatch(text); m != nil {
				t.library = ncclVersion(m[1])
			}
			if head := strings.Fields(strings.TrimLeft(text, "# ")); len(head) > 0 && head[0] == "size" {
				if timeColumn = slices.Index(head, "time"); timeColumn < 0 {
					return nil, fmt.Errorf("line %d: the table has no column time", n)
				}
			}
			if strings.Contains(text, "Out of bounds values") && strings.HasSuffix(text, "FAILED") {
				return nil, fmt.Errorf("line %d: wrong results: %s", n, text)
			}
			continue
		}
		f := strings.Fields(text)
		if len(f) < 3 {
			continue
		}
		size, errSize := strconv.ParseUint(f[0], 10, 63)
		_, errCount := strconv.ParseUint(f[1], 10, 63)
		if errSize != nil || errCount != nil {
			continue
		}
		if len(f) <= timeColumn {
			return nil, fmt.Errorf("line %d: a row of %d columns, the time is column %d: %q", n, len(f), timeColumn+1, text)
		}
		us, err := strconv.ParseFloat(f[timeColumn], 64)
		if err != nil || !(us > 0) || math.IsInf(us, 0) {
			return nil, fmt.Errorf("line %d: time %q is none, in microseconds (other output in the row?)", n, f[timeColumn])
		}
		if size > 0 { // sizes too small to be divided among the ranks are calls on nothing
			t.us[size] = append(t.us[size], us)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(t.us) == 0 {
		return nil, errors.New("no row of nccl-tests")
	}
	return t, nil
}

// ncclVersion turns NCCL's number into a version: 22803 into 2.28.3.
func ncclVersion(code string) string {
	n, err := strconv.Atoi(code)
	if err != nil {
		return code
	}
	if n < 10000 { // before 2.9
		return fmt.Sprintf("%d.%d.%d", n/1000, n/100%10, n%100)
	}
	return fmt.Sprintf("%d.%d.%d", n/10000, n/100%100, n%100)
}
