package launcher

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestStamps(t *testing.T) {
	at := time.Date(2026, 11, 30, 1, 2, 3, 456789999, time.FixedZone("east", 3600))
	const s = "2026-11-30T00:02:03.456789Z "
	for _, c := range []struct {
		name   string
		pieces []string
		want   string
	}{
		{"lines", []string{"a\nb\n"}, s + "a\n" + s + "b\n"},
		{"no end", []string{"a"}, s + "a"},
		{"a line in pieces", []string{"a", "b", "c\nd"}, s + "abc\n" + s + "d"},
		{"end apart", []string{"a", "\n", "b\n"}, s + "a\n" + s + "b\n"},
		{"empty lines", []string{"\n", "\n\n"}, s + "\n" + s + "\n" + s + "\n"},
		{"progress", []string{"10%\r20%\r", "30%\r"}, s + "10%\r" + s + "20%\r" + s + "30%\r"},
		{"crlf", []string{"a\r\nb\r\n"}, s + "a\r\n" + s + "b\r\n"},
		{"crlf in pieces", []string{"a\r", "\nb\r", "\n"}, s + "a\r\n" + s + "b\r\n"},
		{"nothing", []string{""}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var st stamper
			var got []byte
			for _, p := range c.pieces {
				got = st.append(got, []byte(p), at)
			}
			if string(got) != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// The stamps do not depend on how the text comes, and without them it is the text.
func FuzzStamps(f *testing.F) {
	f.Add([]byte("a\nb\r\nc\r10%\rend"), 3)
	f.Add([]byte("\r\r\n\n\r"), 1)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		var whole, pieces stamper
		want := whole.append(nil, data, at)
		var got []byte
		for rest := data; len(rest) > 0; {
			n := len(rest)
			if cut > 0 {
				n = min(n, cut)
			}
			got = pieces.append(got, rest[:n], at)
			rest = rest[n:]
		}
		if !bytes.Equal(got, want) {
			t.Errorf("in pieces %q, at once %q", got, want)
		}
		stamp := at.Format(stampLayout)
		if !bytes.Contains(data, []byte("2026")) && strings.ReplaceAll(string(got), stamp, "") != string(data) {
			t.Errorf("without stamps %q, want %q", got, data)
		}
	})
}

func TestWholeRunes(t *testing.T) {
	for _, c := range []struct {
		data string
		want int
	}{
		{"", 0}, {"a", 1}, {"ü", 2}, {"a\xc3", 1}, {"€", 3}, {"a\xe2\x82", 1}, {"\xe2\x82", 0}, {"\xf0\x9f\x98", 0}, {"😀", 4},
		{"\xff", 1}, {"a\x80\x80\x80\x80", 5}, {"\x82", 1},
	} {
		if got := wholeRunes([]byte(c.data)); got != c.want {
			t.Errorf("wholeRunes(%q) = %d, want %d", c.data, got, c.want)
		}
	}
}

// A rank pauses in the middle of a character, and another one speaks.
func TestCharactersStayWhole(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 2, true, s)
	ends[0].WriteString("5 \xe2\x82")
	eventually(t, "begin", func() bool { return s.text() == "[0] 5 " })
	ends[0].WriteString("\xac")
	eventually(t, "the character", func() bool { return s.text() == "[0] 5 €" })
	ends[1].WriteString("other\n")
	ends[0].WriteString("\xe2") // is never completed
	eventually(t, "all", func() bool { return strings.Contains(s.text(), "\xe2") })
	drain(c, ends)
	if got, want := s.text(), "[0] 5 €\xe2\n[1] other\n"; got != want && got != "[0] 5 €\n[1] other\n[0]+ \xe2" {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A carriage return, a pause, and only then the newline: that is one line.
func TestCarriageReturnThenNewline(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 1, true, s)
	ends[0].WriteString("10%\r")
	eventually(t, "progress", func() bool { return s.text() == "[0] 10%\r" })
	ends[0].WriteString("\nend\n")
	drain(c, ends)
	if got, want := s.text(), "[0] 10%\r\n[0] end\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Dots that come all the time are shown, although no pause follows them.
func TestDotsAreShown(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 1, true, s)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(pause / 5)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				ends[0].WriteString(".")
			case <-stop:
				return
			}
		}
	}()
	eventually(t, "dots", func() bool { return strings.HasPrefix(s.text(), "[0] .") })
	close(stop)
	<-stopped
	drain(c, ends)
}

func TestOutputFilesGoOn(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		goOn bool
		want string
	}{{false, "x"}, {false, "x"}, {true, "xx"}} {
		f, err := openOutputFiles(dir, 2, false, c.goOn)
		if err != nil {
			t.Fatal(err)
		}
		for _, list := range [][]*os.File{f.out, f.err} {
			for _, file := range list {
				if _, err := file.WriteString("x"); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := f.close(); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"rank.0/stdout", "rank.0/stderr", "rank.1/stdout", "rank.1/stderr"} {
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != c.want {
				t.Errorf("%s: got %q, %v, want %q", name, got, err, c.want)
			}
		}
	}
}
