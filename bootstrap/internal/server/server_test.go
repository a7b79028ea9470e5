package server

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/gorun-dev/gorun/bootstrap/internal/ledgermem"
	"github.com/gorun-dev/gorun/bootstrap/internal/store"
	"github.com/gorun-dev/gorun/bootstrap/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fixture is a server with a log, and its store.
type fixture struct {
	t   *testing.T
	srv *Server
	st  *store.Store
	mu  sync.Mutex
	log strings.Builder
}

func newFixture(t *testing.T, n int) *fixture { return newFixtureHold(t, n, 0) }

func newFixtureHold(t *testing.T, n int, hold time.Duration) *fixture {
	f := &fixture{t: t, st: store.New(make([]int, n))}
	var err error
	f.srv, err = Start(Config{
		Name: "gorun-test-" + rand.Text(), Job: "job", NodeOf: make([]int, n), Host: "a", State: f.st, DeathHold: hold,
		Logf: func(format string, args ...any) {
			f.mu.Lock()
			defer f.mu.Unlock()
			fmt.Fprintf(&f.log, format+"\n", args...)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.st.Close()
		if err := f.srv.Close(); err != nil {
			t.Error(err)
		}
		if err := f.srv.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *fixture) logged() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.log.String()
}

func (f *fixture) dial() *wire.Conn {
	f.t.Helper()
	c, err := wire.Dial(f.t.Context(), f.srv.Name, 1<<20)
	if err != nil {
		f.t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	f.t.Cleanup(func() { c.Close() })
	return c
}

// hello says hello and returns why it was refused.
func (f *fixture) hello(c *wire.Conn, h wire.HelloBody, ledger *os.File) string {
	f.t.Helper()
	var e wire.Encoder
	e.Hello(h)
	if err := c.Send(wire.Message{Type: wire.Hello, Payload: e.B, File: ledger}); err != nil {
		f.t.Fatal(err)
	}
	m, err := c.Recv()
	if err != nil {
		f.t.Fatal(err)
	}
	d := wire.Decoder{B: m.Payload}
	w := d.Welcome()
	if err := d.End(); err != nil || m.Type != wire.Welcome {
		f.t.Fatalf("message of type %d: %v", m.Type, err)
	}
	return w.Refused
}

func (f *fixture) ledger(rank int) *os.File {
	f.t.Helper()
	m, file, err := ledgermem.Create(rank)
	if err != nil {
		f.t.Fatal(err)
	}
	m.Unmap()
	f.t.Cleanup(func() { file.Close() })
	return file
}

// join joins a rank.
func (f *fixture) join(rank, size int) *wire.Conn {
	f.t.Helper()
	c := f.dial()
	if refused := f.hello(c, wire.HelloBody{Version: wire.Version, Job: "job", Rank: rank, Size: size}, f.ledger(rank)); refused != "" {
		f.t.Fatal(refused)
	}
	return c
}

func (f *fixture) until(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			f.t.Fatalf("not in 20 s: %s\n%s", what, f.logged())
		}
	}
}

func (f *fixture) cause(rank int) string {
	if _, end := f.st.Status(rank); end != nil {
		return end.Cause
	}
	return ""
}

func TestRefusals(t *testing.T) {
	f := newFixture(t, 2)
	f.join(0, 2)
	f.srv.RankExited(1, 0, "exited with code 0")
	plain, err := os.Create(filepath.Join(t.TempDir(), "plain"))
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	ok := wire.HelloBody{Version: wire.Version, Job: "job", Rank: 0, Size: 2}
	with := func(change func(*wire.HelloBody)) wire.HelloBody { h := ok; change(&h); return h }
	for _, c := range []struct {
		name   string
		hello  wire.HelloBody
		ledger *os.File
		want   string
	}{
		{"second hello", ok, f.ledger(0), "rank 0 has already joined"},
		{"has ended", with(func(h *wire.HelloBody) { h.Rank = 1 }), f.ledger(1), "rank 1 has ended"},
		{"version", with(func(h *wire.HelloBody) { h.Version = 99 }), f.ledger(0), "version 99"},
		{"job", with(func(h *wire.HelloBody) { h.Job = "other" }), f.ledger(0), "this is job job, not other"},
		{"size", with(func(h *wire.HelloBody) { h.Size = 3 }), f.ledger(0), "the job has 2 ranks, not 3"},
		{"rank", with(func(h *wire.HelloBody) { h.Rank = 2 }), f.ledger(2), "rank 2 is not on host a"},
		{"no ledger", ok, nil, "brings no ledger"},
		{"not a memfd", ok, plain, "not a memfd"},
		{"another rank's ledger", ok, f.ledger(1), "not a ledger of this version and rank"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := f.dial()
			if got := f.hello(conn, c.hello, c.ledger); !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if _, err := conn.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("then: %v, want the end of the connection", err)
			}
		})
	}
	if f.cause(0) != "" {
		t.Errorf("rank 0 is said to have ended: %s", f.cause(0))
	}
}

// A frame that cannot be read ends its connection, with a log, and nothing else.
func TestBadFrame(t *testing.T) {
	f := newFixture(t, 3)
	good, bad := f.join(0, 3), f.join(1, 3)
	stranger := f.dial()
	stranger.Send(wire.Message{Type: wire.Request})
	bad.Send(wire.Message{Type: wire.Request, ID: 1, Payload: []byte{0xff}})
	for _, c := range []*wire.Conn{stranger, bad} {
		if _, err := c.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("after a bad frame: %v, want the end of the connection", err)
		}
	}
	f.until("rank 1 is dead", func() bool { return strings.Contains(f.cause(1), "sent a malformed message") })
	if log := f.logged(); !strings.Contains(log, "closed the connection of rank 1: malformed message") ||
		!strings.Contains(log, "before the hello") {
		t.Errorf("log:\n%s", log)
	}
	good.Send(wire.Message{Type: wire.Ledger, ID: 5, Payload: []byte{0}})
	for {
		m, err := good.Recv()
		if err != nil {
			t.Fatalf("the good connection: %v", err)
		}
		if m.Type == wire.Deaths {
			continue
		}
		if m.Type != wire.Reply || m.ID != 5 || m.File == nil {
			t.Fatalf("got %+v", m)
		}
		m.File.Close()
		break
	}
}

// What is said of a rank's end, by how its connection and its process ended.
func TestEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(f *fixture, c *wire.Conn)
		want string
	}{
		{"connection only", func(f *fixture, c *wire.Conn) { c.Close() }, "lost its control connection"},
		{"connection, then account", func(f *fixture, c *wire.Conn) { c.Close(); f.srv.RankExited(0, -1, "killed by SIGKILL") }, "killed by SIGKILL"},
		{"exit 0 without goodbye", func(f *fixture, c *wire.Conn) { c.Close(); f.srv.RankExited(0, 0, "exited with code 0") }, "exited with code 0 without closing its job"},
		{"account, connection stays", func(f *fixture, c *wire.Conn) { f.srv.RankExited(0, 3, "exited with code 3") }, "exited with code 3"},
		{"goodbye", func(f *fixture, c *wire.Conn) {
			c.Send(wire.Message{Type: wire.Goodbye})
			c.Close()
			f.srv.RankExited(0, 0, "exited with code 0")
		}, "left the job"},
		{"goodbye, then a failure", func(f *fixture, c *wire.Conn) {
			c.Send(wire.Message{Type: wire.Goodbye})
			c.Close()
			f.srv.RankExited(0, 1, "exited with code 1")
		}, "exited with code 1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			hold := time.Minute // for the account, however busy the machine is
			if c.name == "connection only" {
				hold = 0
			}
			f := newFixtureHold(t, 2, hold)
			c.end(f, f.join(0, 2))
			f.until("an end", func() bool { return f.cause(0) != "" })
			if got := f.cause(0); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if joined, left := f.srv.Rank(0); !joined || left != strings.HasPrefix(c.name, "goodbye") {
				t.Errorf("joined %v, left %v", joined, left)
			}
		})
	}
}

// A rank that never joins is waited for by an import and a ledger, too.
func TestWaitsForOneThatNeverJoins(t *testing.T) {
	for _, code := range []int{0, 3} {
		t.Run(fmt.Sprint("code ", code), func(t *testing.T) {
			f := newFixture(t, 2)
			c := f.join(0, 2)
			var e wire.Encoder
			e.Int(1)
			c.Send(wire.Message{Type: wire.Ledger, ID: 1, Payload: e.B})
			e.String("key")
			c.Send(wire.Message{Type: wire.Import, ID: 2, Payload: e.B})
			f.srv.RankExited(1, code, fmt.Sprintf("exited with code %d", code))
			for answers := 0; answers < 2; {
				m, err := c.Recv()
				if err != nil {
					t.Fatal(err)
				}
				if m.Type == wire.Deaths {
					continue
				}
				d := wire.Decoder{B: m.Payload}
				r := d.Reply()
				if d.End() != nil || r.Err == nil || r.Err.Kind != store.Ended || r.Err.End.Rank != 1 {
					t.Fatalf("answer %d: %+v", m.ID, r.Err)
				}
				answers++
			}
		})
	}
}

// The owner of an export that dies while it is asked ends the import; an importer that dies is forgotten.
func TestImportEnds(t *testing.T) {
	f := newFixture(t, 3)
	owner, importer, other := f.join(0, 3), f.join(1, 3), f.join(2, 3)
	ask := func(c *wire.Conn) {
		var e wire.Encoder
		e.Int(0)
		e.String("key")
		c.Send(wire.Message{Type: wire.Import, ID: 9, Payload: e.B})
	}
	ask(importer)
	m, err := owner.Recv()
	if err != nil || m.Type != wire.Fetch {
		t.Fatalf("owner is asked: %v, %v", m.Type, err)
	}
	importer.Close()
	for m.Type != wire.FetchCancel {
		if m, err = owner.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	ask(other)
	owner.Close()
	for {
		if m, err = other.Recv(); err != nil {
			t.Fatal(err)
		}
		if m.Type == wire.Reply {
			break
		}
	}
	d := wire.Decoder{B: m.Payload}
	if r := d.Reply(); r.Err == nil || r.Err.End.Rank != 0 {
		t.Errorf("answer: %+v", r)
	}
}

// A death rings the bells of the host's ranks.
func TestBellRings(t *testing.T) {
	f := newFixture(t, 2)
	m, file, err := ledgermem.Create(0)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Unmap()
	defer file.Close()
	c := f.dial()
	if refused := f.hello(c, wire.HelloBody{Version: wire.Version, Job: "job", Rank: 0, Size: 2}, file); refused != "" {
		t.Fatal(refused)
	}
	woken := make(chan error, 1)
	go func() { woken <- m.Page.Bell.Wait(20 * time.Second) }()
	f.until("the bell has a sleeper", m.Page.Bell.HasSleeper)
	f.srv.RankExited(1, 3, "exited with code 3")
	if err := <-woken; err != nil {
		t.Error(err)
	}
}
