package dl

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// mapping is a line of /proc/self/maps that belongs to a file.
type mapping struct {
	lo, hi uintptr
	path   string
}

// mappings reads the file mappings. A deleted file's path ends in " (deleted)".
func mappings(r io.Reader) ([]mapping, error) {
	var out []mapping
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		// 7f10-7f20 r-xp 00000000 08:01 1234      /path with spaces
		line := sc.Text()
		at := strings.IndexByte(line, '/')
		if at < 0 {
			continue
		}
		lo, rest, ok := strings.Cut(line[:at], "-")
		hi, _, ok2 := strings.Cut(rest, " ")
		if !ok || !ok2 {
			return nil, fmt.Errorf("bad line %q", line)
		}
		l, err := strconv.ParseUint(lo, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("bad line %q", line)
		}
		h, err := strconv.ParseUint(hi, 16, 64)
		if err != nil {
			return nil, fmt.Errorf("bad line %q", line)
		}
		// The kernel writes a newline in a name as \012 and leaves all else alone.
		out = append(out, mapping{uintptr(l), uintptr(h), strings.ReplaceAll(line[at:], `\012`, "\n")})
	}
	return out, sc.Err()
}

func selfMappings() ([]mapping, error) {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ms, err := mappings(f)
	if err != nil {
		return nil, fmt.Errorf("read /proc/self/maps: %w", err)
	}
	return ms, nil
}

// fileAt is the file that is mapped at an address.
func fileAt(addr uintptr) (string, error) {
	ms, err := selfMappings()
	if err != nil {
		return "", err
	}
	for _, m := range ms {
		if m.lo <= addr && addr < m.hi {
			return m.path, nil
		}
	}
	return "", fmt.Errorf("no file is mapped at %#x", addr)
}

// otherCopy is a mapped file whose base name starts with prefix and that is not the file at path; "" if there is none.
func otherCopy(prefix, path string) (string, error) {
	ms, err := selfMappings()
	if err != nil {
		return "", err
	}
	want, err := os.Stat(path)
	if err != nil {
		want = nil // a mapped file that was deleted: compare the paths
	}
	for _, m := range ms {
		if !strings.HasPrefix(filepath.Base(m.path), prefix) || m.path == path {
			continue
		}
		if have, err := os.Stat(m.path); want != nil && err == nil && os.SameFile(want, have) {
			continue
		}
		return m.path, nil
	}
	return "", nil
}
