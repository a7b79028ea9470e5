package agentwire

import (
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// writes notes the size of each write to a connection.
type writes struct {
	io.ReadWriteCloser
	mu    sync.Mutex
	sizes []int
}

func (w *writes) Write(p []byte) (int, error) {
	w.mu.Lock()
	w.sizes = append(w.sizes, len(p))
	w.mu.Unlock()
	return w.ReadWriteCloser.Write(p)
}

// A frame is one write, and comes whole: header and data are one packet of ssh's.
func TestFrameIsOneWrite(t *testing.T) {
	a, b := net.Pipe()
	w := &writes{ReadWriteCloser: a}
	accepted := make(chan *Mux, 1)
	go func() {
		m, err := Accept(b)
		if err != nil {
			t.Error(err)
		}
		accepted <- m
	}()
	g, err := Dial(w)
	if err != nil {
		t.Fatal(err)
	}
	agent := <-accepted
	if agent == nil {
		return
	}
	defer g.Close()
	defer agent.Close()
	text := string(make([]byte, 40000))
	var want []int
	for _, m := range []*Message{{Ping: &Empty{}}, {Failed: &Failed{Text: text}}, {Failed: &Failed{}}} {
		g.Send(m)
		got, err := agent.Receive()
		if diff := cmp.Diff(got, m); diff != "" || err != nil {
			t.Fatalf("%v (-got +want):\n%s", err, diff)
		}
		e, err := Encode(m)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, frameHeader+len(e))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// Besides there are frames that are a header: the stream's begin, and what may be sent.
	got := slices.DeleteFunc(slices.Clone(w.sizes), func(n int) bool { return n == frameHeader })
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("sizes of %v (-got +want):\n%s", w.sizes, diff)
	}
}

// The writes of what is below may fail: what was taken is not counted as data.
func TestFrameWriteFails(t *testing.T) {
	h := &heard{ReadWriteCloser: failing{}}
	head := []byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3}
	if n, err := h.Write(head); n != len(head) || err != nil {
		t.Errorf("header: %d, %v", n, err)
	}
	if n, err := h.Write([]byte("abc")); n != 0 || err != io.ErrClosedPipe {
		t.Errorf("data: %d, %v", n, err)
	}
	// The next is a frame of its own again.
	if n, err := h.Write([]byte{0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3}); n != 5 || err != io.ErrClosedPipe {
		t.Errorf("frame without data: %d, %v", n, err)
	}
}

// failing takes 5 bytes.
type failing struct{ io.ReadWriteCloser }

func (failing) Write([]byte) (int, error) { return 5, io.ErrClosedPipe }
