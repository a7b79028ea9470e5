package launcher

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")) // else each process of a -race run ends a second late
	if _, set := os.LookupEnv("GORUN_OVERSUBSCRIBE"); !set {      // what gorun says of that depends on the machine
		os.Setenv("GORUN_OVERSUBSCRIBE", "true")
	}
	if len(os.Args) > 1 && os.Args[1] == "agent" { // the test binary is gorun on other hosts
		agentMain(os.Args[2:])
	}
	if len(os.Args) > 2 && os.Args[1] == "rank" {
		testRank(os.Args[2])
	}
	if len(os.Args) > 1 && os.Args[1] == "kill-children" {
		testKillChildren()
	}
	if len(os.Args) > 1 && os.Args[1] == "reap-twice" {
		testReapTwice()
	}
	if len(os.Args) > 1 && os.Args[1] == "kill-foreign" {
		testKillForeign()
	}
	if len(os.Args) > 2 && os.Args[1] == "reader" {
		testReader(os.Args[2])
	}
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if signal.Ignored(sig) { // in the background of a script; the gorun and ranks of tests would ignore it as well
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(gorunDir)
		os.RemoveAll(homeDir)
		os.Exit(code)
	}))
}

// sink keeps what was written, and each write apart.
type sink struct {
	mu     sync.Mutex
	all    bytes.Buffer
	writes []string
	err    error
	wrote  chan struct{} // gets a token for each write, if there is room
}

func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	s.all.Write(p)
	s.writes = append(s.writes, string(p))
	select {
	case s.wrote <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (s *sink) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all.String()
}

// eventually waits until f is true, within a bound against hangs.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 60 s", what)
		}
	}
}

// feed is a collector with n streams to one sink; the files are the ranks' ends.
func feed(t *testing.T, n int, tags bool, s *sink) (*collector, []*os.File) {
	t.Helper()
	c, err := newCollector(s, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	var ends []*os.File
	for i := range n {
		r, w, err := pipe()
		if err != nil {
			t.Fatal(err)
		}
		st := &stream{rank: i, fd: r, sink: s}
		if tags {
			st.tag = tagOf(i)
		}
		if err := c.add(st); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, os.NewFile(uintptr(w), "rank"))
	}
	t.Cleanup(func() {
		for _, f := range ends {
			f.Close()
		}
		c.finish()
		<-c.done
	})
	return c, ends
}

func drain(c *collector, ends []*os.File) {
	for _, f := range ends {
		f.Close()
	}
	c.finish()
	<-c.done
}

func TestLinesStayWhole(t *testing.T) {
	// Odd chunks, lines from empty to longer than what is kept back, and no line end at the end of half of them.
	n, size := 4, 4<<20
	if testing.Short() {
		size = 1 << 20
	}
	for _, tags := range []bool{false, true} {
		t.Run(fmt.Sprintf("tags=%v", tags), func(t *testing.T) {
			s := &sink{}
			c, ends := feed(t, n, tags, s)
			want := make([][]string, n)
			var wait sync.WaitGroup
			for i := range n {
				rnd := rand.New(rand.NewPCG(1, uint64(i)))
				var text bytes.Buffer
				for text.Len() < size {
					length := rnd.IntN(200)
					if rnd.IntN(500) == 0 {
						length = rnd.IntN(3 * maxLine)
					}
					line := fmt.Sprintf("<%d>%s", i, strings.Repeat(string(rune('a'+rnd.IntN(26))), length))
					want[i] = append(want[i], line)
					text.WriteString(line + "\n")
				}
				wait.Go(func() {
					for data := text.Bytes(); len(data) > 0; {
						k := min(len(data), 1+rnd.IntN(9000))
						if _, err := ends[i].Write(data[:k]); err != nil {
							t.Error(err)
							return
						}
						data = data[k:]
					}
					ends[i].Close()
				})
			}
			wait.Wait()
			drain(c, ends)
			got := make([][]string, n)
			for _, line := range strings.Split(strings.TrimSuffix(s.text(), "\n"), "\n") {
				var i int
				if tags {
					if _, err := fmt.Sscanf(line, "[%d]", &i); err != nil || i < 0 || i >= n {
						t.Fatalf("line without tag: %.80q", line)
					}
					line = strings.TrimPrefix(line, tagOf(i))
				} else if _, err := fmt.Sscanf(line, "<%d>", &i); err != nil || i < 0 || i >= n {
					t.Fatalf("line cut: %.80q", line)
				}
				got[i] = append(got[i], line)
			}
			for i := range n {
				if d := cmp.Diff(got[i], want[i]); d != "" {
					t.Errorf("rank %d (-got +want):\n%.2000s", i, d)
				}
			}
		})
	}
}

func TestPromptIsShown(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 2, true, s)
	ends[0].WriteString("N = ")
	eventually(t, "prompt", func() bool { return s.text() == "[0] N = " })
	ends[0].WriteString("4\n")
	ends[1].WriteString("other\n")
	drain(c, ends)
	got := s.text()
	if want := "[0] N = 4\n[1] other\n"; got != want && got != "[0] N = \n[1] other\n[0]+ 4\n" {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestCutLineIsMarked(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 2, true, s)
	ends[0].WriteString("a")
	eventually(t, "begin", func() bool { return s.text() == "[0] a" })
	ends[1].WriteString("other\n") // rank 0 says nothing: after hold the other one may speak
	eventually(t, "other", func() bool { return s.text() == "[0] a\n[1] other\n" })
	ends[0].WriteString("b\nc\n")
	drain(c, ends)
	if got, want := s.text(), "[0] a\n[1] other\n[0]+ b\n[0] c\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestLongLineKeepsTheSink(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 2, false, s)
	long := strings.Repeat("x", 3*maxLine)
	go func() {
		ends[0].WriteString(long)
		ends[1].WriteString("other\n")
		ends[0].WriteString("y\n")
		ends[0].Close()
		ends[1].Close()
	}()
	eventually(t, "both", func() bool { return len(s.text()) == len(long)+len("y\nother\n") })
	drain(c, ends)
	if got, want := s.text(), long+"y\nother\n"; got != want {
		t.Errorf("a line of %d bytes was cut", len(long))
	}
}

func TestUntaggedIsByteExact(t *testing.T) {
	all := make([]byte, 256*40)
	for i := range all {
		all[i] = byte(i * 7)
	}
	s := &sink{}
	c, ends := feed(t, 1, false, s)
	ends[0].Write(all)
	drain(c, ends)
	if got := s.text(); got != string(all) {
		t.Errorf("got %d bytes that differ from the %d written", len(got), len(all))
	}
}

func TestTaggedText(t *testing.T) {
	for _, c := range []struct {
		name, data   string
		inLine, cont bool
		want         string
	}{
		{"lines", "a\nb\n", false, false, "[7] a\n[7] b\n"},
		{"empty line", "\n\n", false, false, "[7] \n[7] \n"},
		{"goes on", "a\nb", true, false, "a\n[7] b"},
		{"was cut", "a\nb", false, true, "[7]+ a\n[7] b"},
		{"carriage return", "10%\r20%\r", false, false, "[7] 10%\r[7] 20%\r"},
		{"crlf", "a\r\nb\r\n", false, false, "[7] a\r\n[7] b\r\n"},
		{"nothing", "", false, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := string(appendTagged(nil, "[7] ", []byte(c.data), c.inLine, c.cont)); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestLineEnd(t *testing.T) {
	for _, c := range []struct {
		data string
		want int
	}{
		{"", 0}, {"a", 0}, {"a\n", 2}, {"a\nb", 2}, {"a\rb", 2}, {"a\r", 0}, {"a\r\n", 3}, {"a\nb\r", 2}, {"a\nb\rc", 4}, {"\r\r", 1}, {"\n", 1}, {"\r", 0},
	} {
		if got := lineEnd([]byte(c.data)); got != c.want {
			t.Errorf("lineEnd(%q) = %d, want %d", c.data, got, c.want)
		}
	}
}

func TestSinkFails(t *testing.T) {
	s := &sink{err: unix.EPIPE}
	failed := make(chan error, 1)
	c, err := newCollector(s, func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.add(&stream{fd: r, sink: s}); err != nil {
		t.Fatal(err)
	}
	unix.Write(w, []byte("x\n"))
	if err := <-failed; !errors.Is(err, unix.EPIPE) {
		t.Errorf("got %v, want EPIPE", err)
	}
	// The rank's writes fail as in a pipeline, as soon as the pipe's end is closed.
	eventually(t, "EPIPE for the rank's write", func() bool { _, err := unix.Write(w, []byte("y\n")); return err == unix.EPIPE })
	unix.Close(w)
	c.finish()
	<-c.done
}

func TestSinkFailsQuietly(t *testing.T) {
	s := &sink{err: unix.EPIPE}
	c, err := newCollector(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := pipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.add(&stream{fd: r, sink: s}); err != nil {
		t.Fatal(err)
	}
	big := make([]byte, 1<<20) // more than the pipe holds: it is read on
	if _, err := (FD(w)).Write(big); err != nil {
		t.Errorf("rank's write: %v", err)
	}
	unix.Close(w)
	c.finish()
	<-c.done
}

func TestNoticeBetweenLines(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 1, true, s)
	ends[0].WriteString("half")
	eventually(t, "half", func() bool { return s.text() == "[0] half" })
	c.notice("gorun: note\n")
	eventually(t, "note", func() bool { return s.text() == "[0] half\ngorun: note\n" })
	ends[0].WriteString("rest\n")
	drain(c, ends)
	if got, want := s.text(), "[0] half\ngorun: note\n[0]+ rest\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestHeldPipeDoesNotHang(t *testing.T) {
	s := &sink{}
	c, ends := feed(t, 1, false, s)
	ends[0].WriteString("last words")
	c.finish() // the rank's end stays open, as by somebody outside the job
	select {
	case <-c.done:
	case <-time.After(20 * time.Second):
		t.Fatal("the collector waits for a pipe that nobody writes to")
	}
	if got, want := s.text(), "last words"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestTailIsKept(t *testing.T) {
	s := &sink{}
	c, err := newCollector(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := pipe()
	if err != nil {
		t.Fatal(err)
	}
	st := &stream{fd: r, sink: s, keepTail: true}
	if err := c.add(st); err != nil {
		t.Fatal(err)
	}
	for i := range 5000 {
		FD(w).Write([]byte(fmt.Sprintf("line %d\n", i)))
	}
	unix.Close(w)
	c.finish()
	<-c.done
	if got := len(st.tail); got < tailSize || got > 2*tailSize {
		t.Errorf("kept %d bytes, want %d to %d", got, tailSize, 2*tailSize)
	}
	if got, want := lastLines(st.tail, 2), []string{"line 4998", "line 4999"}; !cmp.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func FuzzTagged(f *testing.F) {
	f.Add([]byte("a\nb\r\nc\r10%\rend"), 3)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		// Taking the tags off gives the bytes back, however the text comes in pieces.
		s := &sink{}
		c := &collector{sinkErr: func(error) {}}
		st := &stream{sink: s, tag: tagOf(1)}
		rest := data
		for len(rest) > 0 {
			n := len(rest)
			if cut > 0 {
				n = min(n, cut)
			}
			c.emit(st, rest[:n])
			rest = rest[n:]
		}
		if bytes.Contains(data, []byte("[1]")) {
			return // can't be told from a tag
		}
		if got := strings.ReplaceAll(s.text(), tagOf(1), ""); got != string(data) {
			t.Errorf("got %q, want %q", got, data)
		}
	})
}

// A collector that has ended leaves descriptors alone that have got the numbers of its own.
func TestCollectorThatHasEnded(t *testing.T) {
	c, err := newCollector(&sink{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.finish()
	<-c.done
	other := -1
	for range 64 { // the lowest free number is the next
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if fd == c.poller.wake {
			other = fd
			break
		}
	}
	if other < 0 {
		t.Fatalf("descriptor %d is not given again", c.poller.wake)
	}
	c.finish()
	c.notice("x")
	var text [8]byte
	if _, err := unix.Read(other, text[:]); err != unix.EAGAIN {
		t.Errorf("it has written %x to a descriptor that is not its own (%v)", text, err)
	}
	if err := c.add(&stream{fd: other}); err == nil {
		t.Error("it takes another stream")
	}
}
