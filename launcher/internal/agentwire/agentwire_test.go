package agentwire

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/launcher/internal/stacks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestMessagesAreReadBack(t *testing.T) {
	all := make([]byte, 255)
	for i := range all {
		all[i] = byte(i + 1)
	}
	for _, m := range []*Message{
		{Prepare: &Prepare{Job: "j", Key: []byte{0, 1, 255}, Placement: []Span{{0, 1}, {1, 1}}, Dir: []byte("/\xff"), Stdin: []int{1}, KillGrace: time.Second,
			Programs: []Program{{Name: []byte("\xff"), Path: []byte("/\xff"), Item: 1}}, Ranks: []Rank{{Rank: 1, Program: 1, Dir: []byte("/d"), Argv: Pack([]string{"", string(all)}), Env: Pack([]string{"A=\n"})}}}},
		{StopForks: &Empty{}}, {Ping: &Empty{}}, {Reap: &Empty{}},
		{Signal: &Signal{Signal: 15, Ranks: []int{1, 2}}},
		{Exited: &Exited{Rank: 3, Code: 7, After: time.Minute, State: &State{Ended: []int{3}, Suspicions: []Suspicion{{By: 1, Rank: 3}}}}},
		{RankFailed: &RankFailed{Rank: 2, Failed: Failed{Code: 127, Text: "x"}}},
		{Check: &Check{Key: []byte{0}, Host: 2, Programs: []CheckProgram{{Name: []byte("./\xff"), Sum: all}}}}, {Reach: &Reach{Hosts: []Peer{{Host: 1, Addr: "10.0.0.1:7000"}}}},
		{Checked: &Checked{Machine: "m", Facts: []byte(`{"host":"a"}`), Programs: []Verdict{{Err: "x"}}}},
		{Reached: &Reached{Hosts: []ReachedHost{{Host: 1, Err: "refused"}, {Host: 2, Took: time.Second}}}},
		{Clock: &Clock{Now: time.Date(2026, 11, 29, 12, 0, 0, 1, time.UTC)}},
		{Look: &Look{ID: 3, Within: time.Second, Size: 1 << 20}},
		{Looked: &Looked{ID: 3, Standings: []byte(`[{"Rank":1}]`), Ranks: []stacks.Rank{{Rank: 1, Go: []stacks.Goroutine{{ID: 1, State: "select", Frames: []stacks.Frame{{Func: "main.main", Line: "a/b.go:3"}}}}}}}},
		{Reaped: &Reaped{Killed: 1, Joined: []Joined{{Rank: 1, Left: true}}}},
	} {
		b, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		r := bytes.NewReader(b)
		got, err := Read(r)
		if err != nil || r.Len() != 0 {
			t.Fatalf("%v, %d bytes are left", err, r.Len())
		}
		if diff := cmp.Diff(got, m); diff != "" {
			t.Errorf("(-got +want):\n%s", diff)
		}
		for cut := range len(b) {
			_, err := Read(bytes.NewReader(b[:cut]))
			if want := cut == 0; (err == io.EOF) != want || err == nil {
				t.Errorf("the first %d of %d bytes: %v", cut, len(b), err)
			}
		}
	}
	if got := Pack(nil).Unpack(); len(got) != 0 {
		t.Errorf("%q of nothing", got)
	}
}

func TestPlacement(t *testing.T) {
	for _, hostOf := range [][]int{nil, {0}, {0, 0, 1}, {0, 1, 0, 1}} {
		got, err := Expand(Compress(hostOf), 4)
		if diff := cmp.Diff(got, hostOf); diff != "" || err != nil {
			t.Errorf("%v (-got +want):\n%s", err, diff)
		}
	}
	for _, spans := range [][]Span{{{0, 5}}, {{0, 3}, {1, 2}}, {{0, 0}}, {{0, -1}}} {
		if got, err := Expand(spans, 4); err == nil {
			t.Errorf("%v is %v, want an error", spans, got)
		}
	}
}

func TestWrongMessages(t *testing.T) {
	frame := func(s string) string { return fmt.Sprintf("\x00\x00\x00%c%s", len(s), s) }
	for _, c := range []struct{ name, in, err string }{
		{"long", "\xff\xff\xff\xffx", "message of 4294967295 bytes, the most is 67108864"},
		{"no JSON", frame("x"), "message of 1 bytes: invalid character 'x' looking for beginning of value"},
		{"nothing", frame("{}"), `message says 0 things: "{}"`},
		{"two", frame(`{"Ping":{},"Reap":{}}`), `message says 2 things: "{\"Ping\":{},\"Reap\":{}}"`},
		{"announced only", "\x03\x00\x00\x00{}", "message of 50331648 bytes: unexpected EOF"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Read(strings.NewReader(c.in))
			if got := fmt.Sprint(err); got != c.err {
				t.Errorf("got  %s\nwant %s", got, c.err)
			}
		})
	}
}

func TestPreface(t *testing.T) {
	var b bytes.Buffer
	if err := WritePreface(&b, "v1 abc"); err != nil {
		t.Fatal(err)
	}
	mine := b.String()
	b.WriteString("rest")
	if err := ReadPreface(&b, "v1 abc"); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != "rest" {
		t.Errorf("%q is left, want rest", got)
	}
	for _, c := range []struct{ in, err string }{
		{"", "no agent: EOF"},
		{"motd of the day\n", `no agent, but "motd of the day"`},
		{"sh: gorun: not found", `no agent, but "sh: gorun: not found"`},
		{strings.Repeat("x", 1000), `no agent, but "` + strings.Repeat("x", maxPreface+1) + `"`},
		{mine, "the agent is gorun v1 abc, this is v2"},
		{"gorun agent 99 v2\n", "the agent speaks version 99 of the protocol, gorun version 1"},
		{"gorun agent x v2\n", `no agent, but "gorun agent x v2"`},
	} {
		if got := fmt.Sprint(ReadPreface(strings.NewReader(c.in), "v2")); got != c.err {
			t.Errorf("%q: got  %s\nwant %s", c.in, got, c.err)
		}
	}
}

func pair(t *testing.T) (client, server *Mux) {
	t.Helper()
	a, b := net.Pipe()
	made := make(chan error)
	go func() {
		var err error
		server, err = Accept(b)
		made <- err
	}()
	client, err := Dial(a)
	if err = errors.Join(err, <-made); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		client.Close()
		server.Close()
	})
	return client, server
}

// A stream that nobody reads holds up neither messages nor another stream, and takes no more than its window.
func TestStuckStream(t *testing.T) {
	client, server := pair(t)
	stuck, err := server.Open(Header{Kind: Stdout, Rank: 7})
	if err != nil {
		t.Fatal(err)
	}
	total := make(chan int)
	go func() {
		n := 0
		for {
			k, err := stuck.Write(make([]byte, 64<<10))
			if n += k; err != nil {
				total <- n
				return
			}
		}
	}()
	h, conn, err := client.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(h, Header{Kind: Stdout, Rank: 7}); diff != "" {
		t.Errorf("(-got +want):\n%s", diff)
	}
	const n = 1000
	go func() {
		for range n {
			server.Send(&Message{Ping: &Empty{}})
		}
	}()
	for range n {
		if _, err := client.Receive(); err != nil {
			t.Fatal(err)
		}
	}
	other, err := server.Open(Header{Kind: Stderr})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		io.WriteString(other, "text")
		other.Close()
	}()
	_, c2, err := client.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c2); string(got) != "text" || err != nil {
		t.Errorf("%q, %v, want text", got, err)
	}
	first, err := io.ReadFull(conn, make([]byte, 64<<10)) // the other side writes by now
	if err != nil {
		t.Fatal(err)
	}
	client.Close()
	// What came before the end can be read.
	rest, err := io.Copy(io.Discard, conn)
	rest += int64(first)
	// A Write that the end has overtaken does not count what was sent of it.
	if got := <-total; err != nil || rest > 1<<20 || int64(got) < rest-5-64<<10 {
		t.Errorf("%d bytes were written and %d read, %v", got, rest, err)
	}
	if _, err := server.Receive(); err == nil {
		t.Error("a message of a session that has ended")
	}
}

func TestFlush(t *testing.T) {
	client, server := pair(t)
	client.Send(&Message{Log: &Text{strings.Repeat("x", 1<<20)}})
	if client.Idle() {
		t.Error("a megabyte is sent, and nobody has read it")
	}
	client.Flush(time.Millisecond) // in vain
	if m, err := server.Receive(); err != nil || len(m.Log.Text) != 1<<20 {
		t.Errorf("%v", err)
	}
	client.Flush(time.Minute)
	if !client.Idle() {
		t.Error("not sent")
	}
}

func FuzzRead(f *testing.F) {
	for _, m := range []*Message{{Ping: &Empty{}}, {Prepare: &Prepare{Ranks: []Rank{{Argv: Pack([]string{"a"})}}}}} {
		b, err := Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		again, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Read(bytes.NewReader(again))
		if err != nil {
			t.Fatalf("%q: %v", again, err)
		}
		// Empty and missing lists are the same on the wire.
		if b2, _ := Encode(got); !bytes.Equal(b2, again) {
			t.Errorf("%q is read as %q", again, b2)
		}
	})
}

func FuzzPreface(f *testing.F) {
	f.Add("gorun agent 1 v\n")
	f.Add("gorun agent  \n")
	f.Fuzz(func(t *testing.T, s string) {
		if err := ReadPreface(strings.NewReader(s), "v"); err == nil && !strings.HasPrefix(s, "gorun agent ") {
			t.Errorf("%q is taken for an agent", s)
		}
	})
}

// slowClose is a connection whose end takes its time.
type slowClose struct {
	net.Conn
	release chan struct{}
}

func (c *slowClose) Close() error {
	<-c.release
	return c.Conn.Close()
}

// Readers learn of the end at once: they would spin in yamux until the connection below is closed.
func TestReadersEndBeforeTheConnection(t *testing.T) {
	a, b := net.Pipe()
	served := make(chan *Mux)
	go func() {
		m, err := Accept(b)
		if err != nil {
			t.Error(err)
		}
		served <- m
	}()
	release := make(chan struct{})
	m, err := Dial(&slowClose{a, release})
	if err != nil {
		t.Fatal(err)
	}
	other := <-served
	defer other.Close()
	stream, err := m.Open(Header{Kind: File})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 2)
	go func() {
		_, err := m.Receive()
		ended <- err
	}()
	go func() {
		_, err := stream.Read(make([]byte, 1))
		ended <- err
	}()
	closed := make(chan struct{})
	go func() {
		m.Close()
		close(closed)
	}()
	for range 2 {
		select {
		case err := <-ended:
			if err != io.EOF {
				t.Errorf("a reader ended with %v, want EOF", err)
			}
		case <-time.After(10 * time.Second):
			t.Error("a reader did not end")
		}
	}
	select {
	case <-closed:
		t.Error("Close returned before the connection was closed")
	default:
	}
	close(release)
	<-closed
}
