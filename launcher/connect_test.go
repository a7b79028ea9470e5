package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gorun-dev/gorun/launcher/internal/agentwire"
	"github.com/gorun-dev/gorun/launcher/internal/push"
	"github.com/gorun-dev/gorun/launcher/internal/way"
	"github.com/gorun-dev/gorun/rankenv/citest"
)

// madeUp is a way to hosts whose agents are functions of this process.
type madeUp map[string]func(*agentwire.Mux)

func (w madeUp) Open(_ context.Context, t way.Target, line string) (way.Session, error) {
	near, far := net.Pipe()
	words := strings.Fields(line)
	mark := words[len(words)-2]
	s := &madeUpSession{Conn: near, ended: make(chan struct{})}
	go func() {
		defer close(s.ended)
		defer far.Close()
		fmt.Fprintf(far, "%s start /nowhere/gorun\n", mark)
		agentwire.WritePreface(far, buildName())
		if mux, err := agentwire.Accept(far); err == nil {
			w[t.Name](mux)
			mux.Close()
		}
	}()
	return s, nil
}

type madeUpSession struct {
	net.Conn
	ended chan struct{}
}

func (s *madeUpSession) CloseWrite() error      { return nil }
func (s *madeUpSession) Stderr() []byte         { return nil }
func (s *madeUpSession) Wait() error            { <-s.ended; return nil }
func (s *madeUpSession) Addrs() (_, _ net.Addr) { return nil, nil }

// talk receives until the message that it is asked for, with a function that picks it, or the session's end: then it is nil.
func talk(mux *agentwire.Mux, pick func(*agentwire.Message) bool) *agentwire.Message {
	for {
		m, err := mux.Receive()
		if err != nil {
			return nil
		}
		if pick(m) {
			return m
		}
	}
}

func toPrepare(m *agentwire.Message) bool { return m.Prepare != nil }
func toPing(m *agentwire.Message) bool    { return m.Ping != nil }

// An agent that ends while gorun still reads the files to send is noticed then, with what it said.
func TestAgentEndsBeforeItPrepares(t *testing.T) {
	big := filepath.Join(t.TempDir(), "big")
	write(t, big, "", 0o600)
	if err := os.Truncate(big, 1<<40); err != nil { // takes an hour to read, and no place
		citest.Lacking(t, "large files: %v", err)
	}
	for _, c := range []struct {
		name  string
		agent func(*agentwire.Mux)
		want  string
	}{
		{"without a word", func(*agentwire.Mux) {}, "host a: its agent has ended"},
		{"with one", func(mux *agentwire.Mux) {
			mux.Send(&agentwire.Message{AgentFailed: &agentwire.Text{Text: "the keeper died"}})
			mux.Flush(time.Minute)
		}, "host a: the keeper died"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := planOn(t, Job{}, "true", "a")
			p.Remote.Stage = []StageFile{{Name: big, Path: big}}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			acct := Run(ctx, p, Options{way: madeUp{"a": c.agent}, bind: loopback})
			if acct.Reason != ReasonNotStarted || acct.Error != c.want {
				t.Errorf("reason %s, %q, want %s, %q", acct.Reason, acct.Error, ReasonNotStarted, c.want)
			}
		})
	}
}

// What an agent says at its end is told once, also where gorun is ready just then.
func TestLastWordIsHeard(t *testing.T) {
	s, err := newStaging(t.Context(), &Plan{}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	defer s.end()
	c := &connector{ctx: t.Context(), files: s}
	for i := range 100 {
		near, far := net.Pipe()
		dialed := make(chan struct{})
		go func() {
			defer far.Close()
			if mux, err := agentwire.Accept(far); err == nil {
				<-dialed
				mux.Send(&agentwire.Message{AgentFailed: &agentwire.Text{Text: "the keeper died"}})
				mux.Flush(time.Minute)
				mux.Close()
			}
		}()
		mux, err := agentwire.Dial(near)
		close(dialed)
		if err != nil {
			t.Fatal(err)
		}
		<-mux.Done()
		limit := newLimit(t.Context(), func() {})
		_, _, err = c.offer(&remoteHost{mux: mux, session: &push.Started{}}, limit, nil)
		if err == nil { // the next one reads it
			var m *agentwire.Message
			if m, err = mux.Receive(); err == nil {
				err = errors.New(m.AgentFailed.Text)
			}
		}
		if err.Error() != "the keeper died" {
			t.Errorf("%d: got error %v", i, err)
		}
		limit.end()
		mux.Close()
	}
}

// A program is built once for all hosts of an architecture, one of which may be given up meanwhile, and they hear of a build that fails.
func TestBuildForHosts(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/bin/go", "#!/bin/sh\necho $GOARCH >>"+dir+"/built\nread line <"+dir+"/gate\nexec >\"$3\"\nprintf \"$line\"\n", 0o755)
	write(t, dir+"/prog/go.mod", "module prog\n", 0o600)
	if err := unix.Mkfifo(dir+"/gate", 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+"/bin:"+os.Getenv("PATH"))
	t.Setenv("XDG_CACHE_HOME", dir+"/cache")
	for _, c := range []struct{ arch, line, want string }{
		{"other", `\\177ELF`, ""},
		{"another", "text", "build ./prog: not a main package"},
	} {
		t.Run(c.arch, func(t *testing.T) {
			s, err := newStaging(t.Context(), &Plan{Programs: []Program{{Name: "./prog", GoDir: dir + "/prog"}}}, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			defer s.end()
			given, giveUp := context.WithCancelCause(t.Context())
			why := errors.New("its agent has ended")
			giveUp(why)
			if _, _, err := s.offer(given, c.arch, []int{0}); err != why {
				t.Errorf("the host that is given up: got error %v, want %v", err, why)
			}
			if s.quick(c.arch, []int{0}) {
				t.Error("the program is ready before it is built")
			}
			offered := make(chan error)
			for range 2 {
				go func() {
					items, at, err := s.offer(t.Context(), c.arch, []int{0})
					if err == nil && (len(items) != 1 || at[0] != 1 || items[0].size != 4 || items[0].to != ".program/prog") {
						err = fmt.Errorf("items %+v at %v", items, at)
					}
					offered <- err
				}()
			}
			write(t, dir+"/gate", c.line+"\n", 0) // the build waits for it
			for range 2 {
				if err := <-offered; fmt.Sprint(err) != c.want && (err != nil || c.want != "") {
					t.Errorf("got error %v, want %q", err, c.want)
				}
			}
			if !s.quick(c.arch, []int{0}) {
				t.Error("the program is not ready after it was built")
			}
		})
	}
	built, err := os.ReadFile(dir + "/built")
	if diff := cmp.Diff(string(built), "other\nanother\n"); err != nil || diff != "" {
		t.Errorf("%v: built for (-got +want):\n%s", err, diff)
	}
}

// A host that is prepared hears of gorun as long as others are not: its agent would take gorun for dead.
func TestPreparedHostIsNotForgotten(t *testing.T) {
	heard := make(chan struct{})
	hosts := madeUp{
		"a": func(mux *agentwire.Mux) {
			if talk(mux, toPrepare) == nil {
				return
			}
			mux.Send(&agentwire.Message{Prepared: &agentwire.Prepared{Node: agentwire.Node{Addr: "127.0.0.1:1"}}})
			for range 2 {
				if talk(mux, toPing) == nil {
					return
				}
			}
			close(heard)
			talk(mux, func(m *agentwire.Message) bool { return m.Bye != nil })
		},
		"b": func(mux *agentwire.Mux) {
			if talk(mux, toPrepare) == nil {
				return
			}
			for end := time.After(20 * beat); ; {
				select {
				case <-heard:
					mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "it was long enough"}})
				case <-end:
					mux.Send(&agentwire.Message{Failed: &agentwire.Failed{Text: "host a hears nothing of gorun"}})
				case <-time.After(beat):
					mux.Send(&agentwire.Message{Ping: &agentwire.Empty{}})
					continue
				}
				talk(mux, func(m *agentwire.Message) bool { return m.Bye != nil })
				return
			}
		},
	}
	acct := Run(t.Context(), planOn(t, Job{}, "true", "a", "b"), Options{way: hosts, bind: loopback})
	if acct.Reason != ReasonNotStarted || acct.Error != "host b: it was long enough" {
		t.Errorf("%s: %s", acct.Reason, acct.Error)
	}
}
