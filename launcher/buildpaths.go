package launcher

import (
	"bytes"
	"io"
	"path/filepath"
	"regexp"
)

// goPlace is a place in a file at the beginning of a line of the go command, the file relative to where that ran.
var goPlace = regexp.MustCompile(`^\s*([^\s/:][^:]*\.go):\d`)

// placeWriter passes on what a go command says that runs in dir, with the places of files as seen from the directory from.
type placeWriter struct {
	w         io.Writer
	dir, from string
	line      []byte // the last one, without its end
}

func (p *placeWriter) Write(data []byte) (int, error) {
	p.line = append(p.line, data...)
	end := bytes.LastIndexByte(p.line, '\n') + 1
	if end == 0 {
		return len(data), nil
	}
	var out []byte
	for line := range bytes.Lines(p.line[:end]) {
		out = append(out, p.seen(line)...)
	}
	p.line = append(p.line[:0], p.line[end:]...)
	_, err := p.w.Write(out)
	return len(data), err
}

// flush passes on what is left of a last line.
func (p *placeWriter) flush() {
	if len(p.line) > 0 {
		p.w.Write(p.seen(p.line))
		p.line = nil
	}
}

func (p *placeWriter) seen(line []byte) []byte {
	m := goPlace.FindSubmatchIndex(line)
	if m == nil || p.dir == p.from {
		return line
	}
	file := filepath.Join(p.dir, string(line[m[2]:m[3]]))
	if rel, err := filepath.Rel(p.from, file); err == nil && len(rel) < len(file) {
		file = rel
	}
	return bytes.Join([][]byte{line[:m[2]], []byte(file), line[m[3]:]}, nil)
}
