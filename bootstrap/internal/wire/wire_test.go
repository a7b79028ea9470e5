package wire

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/bootstrap/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is both ends of a connection.
func pair(t *testing.T) (a, b *Conn) {
	t.Helper()
	name := "gorun-test-" + rand.Text()
	l, err := Listen(name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err = Dial(t.Context(), name, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	sock, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	b, err = NewConn(sock, 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Conn{a, b} {
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		t.Cleanup(func() { c.Close() })
	}
	return a, b
}

func TestMessages(t *testing.T) {
	a, b := pair(t)
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString("content")
	sizes := []int{0, 1, MaxPayload, MaxPayload + 1, 3*MaxPayload + 5}
	for i, n := range sizes {
		m := Message{Type: Request, ID: uint64(i), Payload: bytes.Repeat([]byte{byte(i)}, n)}
		if i%2 == 1 {
			m.File = f
		}
		if err := a.Send(m); err != nil {
			t.Fatal(err)
		}
		got, err := b.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if got.Type != Request || got.ID != uint64(i) || !bytes.Equal(got.Payload, m.Payload) {
			t.Errorf("message %d: type %d, id %d, %d bytes", i, got.Type, got.ID, len(got.Payload))
		}
		if (got.File != nil) != (m.File != nil) {
			t.Fatalf("message %d: file %v", i, got.File)
		}
		if got.File != nil {
			text := make([]byte, 7)
			if _, err := got.File.ReadAt(text, 0); err != nil || string(text) != "content" {
				t.Errorf("message %d: file has %q, %v", i, text, err)
			}
			flags, err := unix.FcntlInt(got.File.Fd(), unix.F_GETFD, 0)
			if err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("message %d: descriptor flags %#x, %v: want close-on-exec", i, flags, err)
			}
			got.File.Close()
		}
	}
	a.Close()
	if _, err := b.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("after close: %v, want EOF", err)
	}
}

// Send does not wait for a side that does not read, and nothing is lost or reordered when it reads again.
func TestSlowReader(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const n = 200
	for i := range n {
		m := Message{Type: Reply, ID: uint64(i), Payload: make([]byte, 100_000)}
		if i%10 == 0 {
			m.File = f
		}
		if err := a.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		m, err := b.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.ID != uint64(i) || len(m.Payload) != 100_000 || (m.File != nil) != (i%10 == 0) {
			t.Fatalf("message %d: id %d, %d bytes, file %v", i, m.ID, len(m.Payload), m.File)
		}
		if m.File != nil {
			m.File.Close()
		}
	}
	a.Flush(10 * time.Second)
	if err := a.Send(Message{Type: Reply}); err != nil {
		t.Errorf("after flush: %v", err)
	}
}

// A queue is given up while its first packet waits for room. The packet's descriptor is no other one then, when there is room.
func TestDescriptorOfQueueGivenUp(t *testing.T) {
	a, b := pair(t)
	own, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	full := append(appendHeader(nil, Reply, 1, MaxPayload, false), make([]byte, MaxPayload)...)
	a.mu.Lock()
	for sent := true; sent; {
		if sent, err = a.try(full, nil, false); err != nil {
			t.Fatal(err)
		}
	}
	err = a.sendPacket(appendHeader(nil, Reply, 2, 0, false), own)
	a.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for end, stacks := time.Now().Add(20*time.Second), ""; !strings.Contains(stacks, "poll.(*FD).RawWrite"); {
		if time.Now().After(end) {
			t.Fatalf("the packet does not wait for room:\n%s", stacks)
		}
		buf := make([]byte, 1<<20)
		stacks = string(buf[:runtime.Stack(buf, true)])
	}
	a.Flush(time.Millisecond)
	for range 8 { // which take the numbers that are free
		other, err := os.Open("/dev/zero")
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
	}
	for {
		m, err := b.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.ID == 1 {
			continue
		}
		if m.File == nil {
			t.Fatal("it has none")
		}
		defer m.File.Close()
		want, errWant := own.Stat()
		got, errGot := m.File.Stat()
		if err := errors.Join(errWant, errGot); err != nil {
			t.Fatal(err)
		}
		if !os.SameFile(got, want) {
			t.Error("it is another file")
		}
		return
	}
}

func TestFlushGivesUp(t *testing.T) {
	a, _ := pair(t)
	for range 50 {
		a.Send(Message{Type: Reply, Payload: make([]byte, MaxPayload)})
	}
	a.Flush(10 * time.Millisecond)
	if err := a.Send(Message{Type: Reply}); err == nil {
		t.Error("the connection is in use after its queue was given up")
	}
}

func TestMalformed(t *testing.T) {
	good := appendHeader(nil, Request, 1, 0, false)
	more := appendHeader(nil, Request, 1, 0, true)
	tooLong := append(appendHeader(nil, Request, 1, MaxPayload+1, false), make([]byte, MaxPayload+1)...)
	for _, c := range []struct {
		name    string
		packets [][]byte
		err     string
	}{
		{"short", [][]byte{good[:15]}, "packet of 15 bytes"},
		{"magic", [][]byte{append([]byte("GET / HTTP/1.1"), good...)}, "packet begins with"},
		{"type", [][]byte{appendHeader(nil, lastType+1, 1, 0, false)}, "unknown type"},
		{"length", [][]byte{append(bytes.Clone(good), 1)}, "packet says 0 bytes and carries 1"},
		{"too long", [][]byte{tooLong}, "carries 65537 bytes, at most 65536 are allowed"},
		{"far too long", [][]byte{append(tooLong, 1, 2, 3)}, "packet of more than"},
		{"interrupted", [][]byte{more, appendHeader(nil, Reply, 1, 0, false)}, "is interrupted"},
		{"endless", func() (p [][]byte) {
			for range 80 {
				p = append(p, append(appendHeader(nil, Request, 1, MaxPayload, true), make([]byte, MaxPayload)...))
			}
			return p
		}(), "message of more than"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, b := pair(t)
			go func() {
				for _, p := range c.packets {
					if _, err := a.sock.Write(p); err != nil {
						return
					}
				}
			}()
			_, err := b.Recv()
			var bad *Error
			if !errors.As(err, &bad) || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
		})
	}
}

// More than one descriptor in a packet is refused and none stays open.
func TestTwoDescriptors(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	rights := unix.UnixRights(int(w.Fd()), int(w.Fd()))
	if _, _, err := a.sock.WriteMsgUnix(appendHeader(nil, Request, 1, 0, false), rights, nil); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if _, err := b.Recv(); err == nil || !strings.Contains(err.Error(), "2 descriptors") {
		t.Errorf("got %v", err)
	}
	// The pipe ends only if nobody holds its writing end.
	r.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read: %v, want EOF: a descriptor leaked", err)
	}
}

func TestDialNobody(t *testing.T) {
	if _, err := Dial(context.Background(), "gorun-test-"+rand.Text(), 1); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("got %v", err)
	}
	if !Clean(net.ErrClosed) || !Clean(io.EOF) || Clean(errors.New("other")) {
		t.Error("Clean tells ends apart wrongly")
	}
}

func TestRoundTrips(t *testing.T) {
	for _, q := range []*store.Request{
		{Kind: store.Put, Name: "k", Value: []byte("v")},
		{Kind: store.Gather, Name: "g", Value: []byte{}, Opening: 3, Ranks: []int{2, 0, 5}, Gen: 1 << 40, What: "all-reduce"},
		{Kind: store.Gather, Name: "world", Value: []byte{}, Barrier: true, Gen: 1},
		{Kind: store.CloseGroup, Name: "g", Value: []byte{}, Opening: 3},
	} {
		var e Encoder
		e.Request(q)
		d := Decoder{B: e.B}
		got := d.Request()
		if diff := cmp.Diff(got, q); diff != "" || d.End() != nil {
			t.Errorf("%v, got -, want +:\n%s", d.Err, diff)
		}
	}
	for _, r := range []store.Reply{
		{},
		{Values: [][]byte{}},
		{Values: [][]byte{{1}, {}, []byte("abc")}},
		{Err: &store.Error{Kind: store.Ended, End: store.End{Rank: 2, Host: "a", Cause: "exited", Left: true}}},
		{Err: &store.Error{Kind: store.Cancelled, Missing: []int{1, 2}}},
		{Err: &store.Error{Kind: store.Cancelled, Missing: []int{1, 2, 4, 5}, Hosts: []string{"a", "a", "", "b"}, Text: "rank 1 has not joined"}},
		{Err: &store.Error{Kind: store.Cycle, Waits: []store.CycleWait{{Rank: 1, What: "x"}, {Rank: 2}}}},
		{Err: &store.Error{Kind: store.Refused, Text: "no"}},
		{Err: &store.Error{Kind: store.GaveUp, Text: "rank 1 gave up"}},
	} {
		var e Encoder
		e.Reply(r)
		d := Decoder{B: e.B}
		got := d.Reply()
		if diff := cmp.Diff(got, r); diff != "" || d.End() != nil {
			t.Errorf("%v, got -, want +:\n%s", d.Err, diff)
		}
	}
	w := WelcomeBody{Node: 1, Addr: "10.0.0.7", DataKey: []byte{1, 2}, Ports: [2]int{40000, 40010}, NodeOf: []int{0, 0, 1, 1, 1, 0}}
	var e Encoder
	e.Welcome(w)
	d := Decoder{B: e.B}
	if diff := cmp.Diff(d.Welcome(), w); diff != "" || d.End() != nil {
		t.Errorf("%v, got -, want +:\n%s", d.Err, diff)
	}
}

func FuzzPacket(f *testing.F) {
	f.Add(appendHeader(nil, Hello, 7, 0, false))
	f.Add(append(appendHeader(nil, Reply, 7, 3, true), 1, 2, 3))
	f.Fuzz(func(t *testing.T, p []byte) {
		typ, id, payload, more, err := parsePacket(p)
		if err != nil {
			return
		}
		again := append(appendHeader(nil, typ, id, len(payload), more), payload...)
		if !bytes.Equal(again, p) {
			t.Errorf("% x is read as % x", p, again)
		}
	})
}

func FuzzDecoders(f *testing.F) {
	var e Encoder
	e.Request(&store.Request{Kind: store.Gather, Name: "g", Value: []byte("v"), Ranks: []int{1, 2}, What: "w"})
	f.Add(byte(0), e.B)
	e = Encoder{}
	e.Reply(store.Reply{Values: [][]byte{{1}, {2}}})
	f.Add(byte(1), e.B)
	e = Encoder{}
	e.Events([]store.Event{{Kind: store.Died, Node: 1, End: store.End{Rank: 2, Host: "h", Cause: "c"}}})
	f.Add(byte(2), e.B)
	e = Encoder{}
	e.Hello(HelloBody{Version: Version, Job: "j", Rank: 1, Size: 2})
	f.Add(byte(3), e.B)
	e = Encoder{}
	e.Welcome(WelcomeBody{NodeOf: []int{0, 0, 1}})
	f.Add(byte(4), e.B)
	f.Fuzz(func(t *testing.T, which byte, b []byte) {
		if which%5 == 4 && len(b) > 64 {
			return // a placement of millions of ranks is right, and slow
		}
		codec := []func(*Decoder) func(*Encoder){
			func(d *Decoder) func(*Encoder) { v := d.Request(); return func(e *Encoder) { e.Request(v) } },
			func(d *Decoder) func(*Encoder) { v := d.Reply(); return func(e *Encoder) { e.Reply(v) } },
			func(d *Decoder) func(*Encoder) { v := d.Events(); return func(e *Encoder) { e.Events(v) } },
			func(d *Decoder) func(*Encoder) {
				v := d.Hello()
				if v.Version != Version {
					d.Err = errors.New("nothing is known of the rest")
				}
				return func(e *Encoder) { e.Hello(v) }
			},
			func(d *Decoder) func(*Encoder) { v := d.Welcome(); return func(e *Encoder) { e.Welcome(v) } },
		}[which%5]
		d := Decoder{B: b}
		encode := codec(&d)
		if d.End() != nil {
			return
		}
		// What was understood says the same when it is sent on.
		var first, second Encoder
		encode(&first)
		d = Decoder{B: first.B}
		again := codec(&d)
		if err := d.End(); err != nil {
			t.Fatalf("own encoding: %v", err)
		}
		again(&second)
		if !bytes.Equal(first.B, second.B) {
			t.Errorf("% x became % x", first.B, second.B)
		}
	})
}

// A packet is queued in the moment in which the goroutine that has emptied the queue has not looked yet whether it stays so: that one sends it, and no other one, too.
func TestQueuedWhileDrainEnds(t *testing.T) {
	packet := func(id uint64) []byte {
		return append(appendHeader(nil, Reply, id, MaxPayload, false), make([]byte, MaxPayload)...)
	}
	for range 30 {
		a, b := pair(t)
		a.mu.Lock()
		a.draining = true
		go a.drain() // at its look
		var want, got []uint64
		for sent := true; sent; {
			var err error
			if sent, err = a.try(packet(1), nil, false); err != nil {
				t.Fatal(err)
			}
			if sent {
				want = append(want, 1)
			}
		}
		for id := uint64(2); id < 6; id++ { // there is no room for them
			if err := a.sendPacket(packet(id), nil); err != nil {
				t.Fatal(err)
			}
			want = append(want, id)
		}
		a.mu.Unlock()
		for range want {
			m, err := b.Recv()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, m.ID)
		}
		a.Flush(10 * time.Second)
		if err := a.Send(Message{Type: Reply, ID: 6}); err != nil {
			t.Fatal(err)
		}
		m, err := b.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(append(got, m.ID), append(want, 6)); diff != "" {
			t.Fatal(diff)
		}
	}
}
