package launcher

import (
	"bytes"
	"time"
)

// stampLayout is RFC 3339 with microseconds, always as long; hosts may be in several time zones, so it is UTC.
const stampLayout = "2006-01-02T15:04:05.000000Z "

// stamper puts before each line of a stream the time at which its first byte was read from the rank's pipe. A carriage return begins
// the line again, unless a newline follows.
type stamper struct {
	inLine bool // the text so far ends within a line
	cr     bool // it ends with a carriage return
}

// append appends data, which was read now, to t.
func (s *stamper) append(t, data []byte, now time.Time) []byte {
	var text []byte
	for len(data) > 0 {
		if s.cr && data[0] == '\n' {
			t = append(t, '\n')
			data = data[1:]
			s.cr = false
			continue
		}
		if s.cr = false; !s.inLine {
			if text == nil {
				text = now.UTC().AppendFormat(make([]byte, 0, len(stampLayout)), stampLayout)
			}
			t = append(t, text...)
		}
		n := lineLength(data)
		s.inLine = data[n-1] != '\n' && data[n-1] != '\r'
		s.cr = data[n-1] == '\r'
		t = append(t, data[:n]...)
		data = data[n:]
	}
	return t
}

// lineLength is the length of the first line of data, with its end: a newline, a carriage return and a newline, or a carriage return
// alone. Without one it is all.
func lineLength(data []byte) int {
	n := bytes.IndexByte(data, '\n') + 1
	if n == 0 {
		n = len(data)
	}
	if cr := bytes.IndexByte(data[:n], '\r'); cr >= 0 && cr+1 < len(data) && data[cr+1] != '\n' {
		return cr + 1
	}
	return n
}
